"""What roamc is compared with, one rival per file, all on the same graphs.

An ordering rival takes an ``OrderProblem`` and returns an order; a layout rival takes a ``LayoutProblem`` and
returns offsets. Peaks and arenas are then counted, and layouts judged, by the same code for all.
"""


class Missing(RuntimeError):
    """A rival is not installed, or has moved within its package."""
