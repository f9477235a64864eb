"""Parts of a model in which the user decides: ``with roamc.keep():`` in its forward."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import fx
from torch.fx import traceback

KEY, KEEP = "roamc", "keep"


def keep() -> AbstractContextManager[object]:
    """Inside, in the forward of a model: what is made here stays until its last reader; no budget drops it.

    >>> def forward(self, x):
    ...     with roamc.keep():
    ...         h = self.expensive(x)
    ...     return self.head(h)

    To have a part made again whatever the budget, use ``torch.utils.checkpoint``, which roamc leaves as it is.
    """
    return traceback.annotate({KEY: KEEP})


def is_kept(node: fx.Node) -> bool:
    """Whether ``node`` was traced inside :func:`keep`."""
    custom = node.meta.get("custom")
    return isinstance(custom, dict) and custom.get(KEY) == KEEP
