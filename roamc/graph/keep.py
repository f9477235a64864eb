"""Parts of a model in which the user decides: ``with roamc.keep():`` in its forward."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import fx
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

KEY, KEEP = "roamc", "keep"


def keep() -> AbstractContextManager[object]:
    """Inside, in the forward of a model: what is made here stays until its last reader; no budget drops it.

    >>> def forward(self, x):
    ...     with roamc.keep():
    ...         h = self.expensive(x)
    ...     return self.head(h)

    To have a part made again whatever the budget, use ``torch.utils.checkpoint``, which roamc leaves as it is. In such
    a region the region decides: what it makes again is made again. What a selective policy of yours must save
    (``CheckpointPolicy.MUST_SAVE``) stays as it does here.
    """
    return traceback.annotate({KEY: KEEP})


def keep_saved(graph: fx.Graph) -> None:
    """Mark what a selective policy must save as made inside :func:`keep`; call it before a partitioner adds marks."""
    for node in graph.nodes:
        if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
            node.meta["custom"] = {**node.meta.get("custom", {}), KEY: KEEP}


def is_kept(node: fx.Node) -> bool:
    """Whether ``node`` was traced inside :func:`keep`."""
    custom = node.meta.get("custom")
    return isinstance(custom, dict) and custom.get(KEY) == KEEP
