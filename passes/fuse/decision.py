"""What pass fuse decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """A decision lists the groups.

    Attributes:
        groups: for each group the names of its operators in graph order. Its results are that of the last operator and
            those that are read outside the group.
    """

    groups: tuple[tuple[str, ...], ...] = ()
