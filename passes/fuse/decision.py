"""What pass fuse decides."""

from __future__ import annotations

from dataclasses import dataclass

MOST_MEMBERS = 48
"""Operators in a group at most, copies included. A kernel of more takes long to compile, and to choose: each operator
that might join is tried with all that have joined. Groups of language models have up to 12."""


@dataclass(frozen=True)
class Decision:
    """A decision lists the groups, and the operators of forward that run once more inside a group of backward.

    Attributes:
        groups: for each group the names of its operators in graph order, copies among them. Its results are that of the
            last operator and those that are read outside the group.
        copies: for each copy, in the order in which they are written: its name, which stands in one of ``groups``, the
            name of the operator that it repeats, and that of the member of its group in front of which it stands. The
            members from there on read the copy instead of what that operator makes.
        launches: for each launch of a GPU that several groups share, the names of their last operators.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    copies: tuple[tuple[str, str, str], ...] = ()
    launches: tuple[tuple[str, ...], ...] = ()
