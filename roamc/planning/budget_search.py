"""The search for the plan that keeps a memory budget.

The passes decide one after the other, so what ``retain`` is asked for is not quite what comes out behind
``layout``. The search asks, sees what came out, and asks again:

    asked of retain    430        418         421
    peak of the plan   441  too   416  fits   429.6  fits: taken

There is one smallest budget: what the plan of ``"min"`` needs. That plan is looked for without a budget, and then by
asking for budgets a little below the lowest so far until some are refused. It is made before a budget is refused, and
before one is kept for which ``retain`` did not reach what it was asked for (only budgets near the smallest are such). A
budget that it fits is kept, by that plan if by no other; for one below it the error names what it needs, even if the
search for that budget has happened on a lower plan: there is one answer, however it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from roamc.cost import objects
from roamc.units import Bytes, Seconds

ROUNDS = 6
"""How often ``retain`` is asked at most."""

CLOSE = 0.01
"""Nothing is asked again for so small a share of the budget."""

DESCENTS = 8
"""Maximum number of plans that the search for that of ``"min"`` asks for beside those for the fewest live bytes."""

DESCENT = 0.005
"""Each of these plans is to need less than the lowest plan so far by this fraction of it."""

NEARLY = 1.1
"""A quick search for a budget makes the plan of ``"min"`` only if it has a plan that needs at most this multiple of the
budget; else it refuses the budget at once."""

ALIGNED = 1000
"""One part in so many is left for what the alignment of tensors rounds up."""


class Made(Protocol):
    """A plan."""

    @property
    def needed_bytes(self) -> Bytes:
        """Its peak, layout and workspace and all."""

    @property
    def added_seconds(self) -> Seconds:
        """What it takes longer than without a budget."""


class Tried(Made, Protocol):
    """A plan that was tried."""

    @property
    def asked_bytes(self) -> Bytes:
        """The peak of live bytes that ``retain`` foresaw."""

    @property
    def strained(self) -> bool:
        """Whether that is above what it was asked for."""


M = TypeVar("M", bound=Made)
T = TypeVar("T", bound=Tried)


@dataclass
class _Search:
    """What is known: the largest target whose plan fitted and the smallest whose plan did not."""

    budget: Bytes
    fitted: Bytes = 0
    failed: Bytes = 1 << 62

    def next(self, target: Bytes, tried: Tried) -> Bytes | None:
        """What to ask for after the plan for ``target``; None if another would hardly be better."""
        fits = tried.needed_bytes <= self.budget
        if fits:
            self.fitted = max(self.fitted, target)
        else:
            self.failed = min(self.failed, target)
            if tried.asked_bytes > target:  # retain knows of none lower
                return None
        wanted = self.budget - (tried.needed_bytes - tried.asked_bytes) - self.budget // ALIGNED
        if fits and min(wanted, self.failed) <= target + self.budget * CLOSE:
            return None
        if not self.fitted < wanted < self.failed:  # known already: look in between, or lower
            wanted = (self.fitted + self.failed) // 2 if self.fitted else self.failed - self.budget // 50
        return wanted if 0 < wanted < self.failed else None


def fit(ask: Callable[[Bytes], Sequence[T]], lowest: Callable[[], T], budget: Bytes, *, quick: bool = False) -> T:
    """The plan that keeps ``budget`` at the least added time; that of ``"min"`` if none does.

    Args:
        ask: plans made in search of one for a budget, as :func:`search` returns them.
        lowest: the plan of ``"min"``, as :func:`lower` returns it; only called where that may be the answer.
        budget: bytes; 0 for ``"min"``.
        quick: refuse a budget far below all plans made for it at once: the answer is then the lowest of these.
    """
    if not budget:
        return lowest()
    tried = ask(budget)
    found = best(tried, budget)
    kept = found.needed_bytes <= budget
    if kept and not any(one.strained for one in tried):
        return found
    if quick and found.needed_bytes > budget * NEARLY:
        return found
    smallest = lowest()
    return best([found, smallest], budget) if kept and smallest.needed_bytes <= budget else smallest


def search(first: Callable[[], T], least: Bytes, attempt: Callable[[Bytes], T], budget: Bytes) -> list[T]:
    """The plans that were made in search of the one that keeps ``budget`` at the least added time; at least one.

    Args:
        first: plans with nothing dropped; only called where that may be the answer, and then it is the only one.
        least: bytes that such a plan needs at least.
        attempt: plans with this many live bytes asked of ``retain``.
        budget: bytes.
    """
    found = list[T]()
    if least <= budget:
        found.append(first())
        if found[0].needed_bytes <= budget:
            return found
    known, target = _Search(budget), _begin(budget)
    for _ in range(ROUNDS):
        found.append(attempt(target))
        wanted = known.next(target, found[-1])
        if wanted is None:
            break
        target = wanted
    return found


def lower(found: Sequence[T], attempt: Callable[[Bytes], T]) -> T:
    """The plan of ``"min"``: the lowest that turns up where :func:`search` would look for one that needs less.

    Args:
        found: plans with as few bytes as were found without a budget to aim at.
        attempt: as for :func:`search`; of a strained plan nothing but that is asked.
    """
    lowest = min(found, key=_bytes_then_time)
    target: Bytes | None = _begin(_below(lowest))
    for _ in range(DESCENTS):
        tried = attempt(target) if target else None
        if target is None or tried is None or tried.strained:  # retain knows of none lower
            break
        lowest = min(lowest, tried, key=_bytes_then_time)
        target = _Search(_below(lowest)).next(target, tried)
    return lowest


def _below(lowest: Made) -> Bytes:
    """The budget to ask for next."""
    return lowest.needed_bytes - max(1, int(lowest.needed_bytes * DESCENT))


def _begin(budget: Bytes) -> Bytes:
    """The live bytes to ask for first."""
    return max(1, budget - budget // ALIGNED - objects(budget))


def best(found: Sequence[M], budget: Bytes) -> M:
    """Of those that keep ``budget`` the one with the least added time; the lowest where none does.

    Of the same plans, a lower budget takes one with no higher peak and no less added time.
    """
    fitting = [one for one in found if one.needed_bytes <= budget]
    if fitting:
        return min(fitting, key=lambda one: (one.added_seconds, one.needed_bytes))
    return min(found, key=_bytes_then_time)


def _bytes_then_time(one: Made) -> tuple[Bytes, Seconds]:
    return one.needed_bytes, one.added_seconds
