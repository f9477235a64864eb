"""Parts of a model whose results are kept whatever the budget: ``with roamc.keep():`` in its forward."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import fx
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

KEY, KEEP = "roamc", "keep"
"""Key and value in ``node.meta["custom"]`` of a node traced inside :func:`keep`."""


def keep() -> AbstractContextManager[object]:
    """Return a context manager for a model's forward. Values computed inside are never recomputed or encoded.

    >>> def forward(self, x):
    ...     with roamc.keep():
    ...         h = self.expensive(x)
    ...     return self.head(h)

    To force recomputation, use ``torch.utils.checkpoint``, which roamc respects. ``keep`` has no effect inside such a
    region. What a selective policy must save (``CheckpointPolicy.MUST_SAVE``) is kept as if computed inside ``keep``.
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
