"""Parts of a model whose results are kept whatever the budget: ``with roamc.keep():`` in its forward."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import fx
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

KEY, KEEP = "roamc", "keep"
"""Key and value in ``node.meta["custom"]`` of a node traced inside :func:`keep`."""


def keep() -> AbstractContextManager[object]:
    """Return a context manager for a model's forward: what is made inside stays until its last reader.

    No budget has it recomputed or encoded.

    >>> def forward(self, x):
    ...     with roamc.keep():
    ...         h = self.expensive(x)
    ...     return self.head(h)

    To have a part recomputed whatever the budget, use ``torch.utils.checkpoint``, which roamc leaves as it is. Inside
    such a region ``keep`` has no effect: what the region recomputes is recomputed. What a selective policy must save
    (``CheckpointPolicy.MUST_SAVE``) is kept as if it were made inside ``keep``.
    """
    return traceback.annotate({KEY: KEEP})


def keep_saved(graph: fx.Graph) -> None:
    """Mark nodes of ``graph`` that a selective checkpoint policy must save as made inside :func:`keep`.

    The mark stands in a node's ``meta``. Call this before a partitioner, which marks nodes with MUST_SAVE itself.
    """
    for node in graph.nodes:
        if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
            node.meta["custom"] = {**node.meta.get("custom", {}), KEY: KEEP}


def is_kept(node: fx.Node) -> bool:
    """Whether ``node`` was traced inside :func:`keep`."""
    custom = node.meta.get("custom")
    return isinstance(custom, dict) and custom.get(KEY) == KEEP
