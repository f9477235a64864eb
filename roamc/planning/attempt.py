"""A plan as the search for a budget sees it: what pass retain has chosen, and the rest only when it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from roamc.planning.planned import Planned, Terms
from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Attempt:
    """A plan as the search for a budget sees it; the passes behind retain run when :attr:`planned` is first read.

    Attributes:
        asked_bytes: the peak of live bytes that retain reached.
        strained: whether that is more than was asked of it.
        make: runs the passes behind retain.
        asked_seconds: an upper bound on the time that retain adds for it: reruns that nobody reads are left out later.
        terms: what the plan is made for; they say what of it the budget is compared with.
    """

    asked_bytes: Bytes
    strained: bool
    make: Callable[[], Planned]
    asked_seconds: Seconds
    terms: Terms

    @functools.cached_property
    def planned(self) -> Planned:
        """The graph and its plan; made once."""
        return self.make()

    @property
    def needed_bytes(self) -> Bytes:
        """What of the plan its terms compare with a budget."""
        return self.terms.taken(self.planned.plan)

    @property
    def added_seconds(self) -> Seconds:
        """The time that the plan adds."""
        return self.planned.plan.added_seconds
