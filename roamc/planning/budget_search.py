"""The search for the plan that keeps a memory budget.

The passes decide one after the other, so the peak that ``retain`` is asked for is not quite the peak behind
``layout``. The search asks, sees what came out, and asks again, here for a budget of 430:

    asked of retain    430          418         421
    peak of the plan   441  above   416  fits   429.6  fits: taken

There is one smallest budget: what the plan of ``"min"`` needs. That plan is looked for without a limit, and then by
asking for budgets a little below the lowest plan so far until one is refused, in each order in which reruns are looked
for. It is made before a budget is refused. It is also made before a plan is accepted for which ``retain`` did not reach
what it was asked for, which happens only near the smallest budget. A budget that the plan of ``"min"`` fits is kept, if
need be by that plan. For a lower budget the error names what that plan needs, even if the search has found a lower one:
the smallest budget is the same however it is asked for.

For a share of time, :func:`within` looks for the lowest peak that adds no more, between a bound and the peak without
reruns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from roamc.cost import objects
from roamc.planning.effort import EFFORT, Effort
from roamc.units import Bytes, Seconds


class Outcome(Protocol):
    """What the choice among plans reads of a plan; any class with these two properties will do."""

    @property
    def needed_bytes(self) -> Bytes:
        """Peak in bytes after layout, with workspaces and tensor objects; compared with a budget."""

    @property
    def added_seconds(self) -> Seconds:
        """Predicted time per step of all reruns and codecs."""


class Asked(Outcome, Protocol):
    """A plan for which pass ``retain`` was asked for some peak of live bytes; it has more properties."""

    @property
    def asked_bytes(self) -> Bytes:
        """The peak of live bytes that ``retain`` reached, before the passes behind it."""

    @property
    def asked_seconds(self) -> Seconds:
        """An upper bound on the time that ``retain`` adds for it."""

    @property
    def strained(self) -> bool:
        """Whether :attr:`asked_bytes` is above the peak that ``retain`` was asked for."""


M = TypeVar("M", bound=Outcome)
T = TypeVar("T", bound=Asked)


@dataclass
class _Search:
    """What a search for one budget knows.

    A target is a peak of live bytes that ``retain`` is asked for.

    Attributes:
        budget: bytes.
        fitted: the largest target whose plan fitted the budget; 0 if there is none yet.
        failed: the smallest target whose plan did not.
        effort: limits and shares.
    """

    budget: Bytes
    fitted: Bytes = 0
    failed: Bytes = 1 << 62
    effort: Effort = EFFORT

    def next(self, target: Bytes, tried: Asked) -> Bytes | None:
        """Note the plan that was ``tried`` for ``target`` and return the next target; None to end the search."""
        fits = tried.needed_bytes <= self.budget
        if fits:
            self.fitted = max(self.fitted, target)
        else:
            self.failed = min(self.failed, target)
            if tried.asked_bytes > target:  # retain knows of none lower
                return None
        next_target = self.budget - (tried.needed_bytes - tried.asked_bytes) - self.effort.aligned(self.budget)
        if fits and min(next_target, self.failed) <= target + self.budget * self.effort.close_share:
            return None
        if not self.fitted < next_target < self.failed:  # known already: look in between, or lower
            next_target = (self.fitted + self.failed) // 2 if self.fitted else self.failed - self.budget // 50
        return next_target if 0 < next_target < self.failed else None


def fit(
    ask: Callable[[Bytes], Sequence[T]],
    lowest: Callable[[], T],
    budget: Bytes,
    *,
    quick: bool = False,
    effort: Effort = EFFORT,
) -> T:
    """Find the plan that keeps ``budget`` at the least added time; that of ``"min"`` if none does.

    Args:
        ask: takes a budget in bytes and returns the plans made in search of one for it, as :func:`search` does.
        lowest: makes the plan of ``"min"``, as :func:`lower` does; only called where that may be the answer.
        budget: bytes; 0 for ``"min"``.
        quick: do not make the plan of ``"min"`` if all plans made for the budget need more than
            ``effort.nearly_factor`` times as much. The lowest of them is then returned.
        effort: limits and shares.

    Returns:
        A plan. If its ``needed_bytes`` are above ``budget``, the budget is refused.
    """
    if not budget:
        return lowest()
    tried = ask(budget)
    chosen = best(tried, budget)
    fits = chosen.needed_bytes <= budget
    if fits and not any(one.strained for one in tried):
        return chosen
    if quick and chosen.needed_bytes > budget * effort.nearly_factor:
        return chosen
    smallest = lowest()
    return best([chosen, smallest], budget) if fits and smallest.needed_bytes <= budget else smallest


def search(
    first: Callable[[], T], least: Bytes, attempt: Callable[[Bytes], T], budget: Bytes, effort: Effort = EFFORT
) -> list[T]:
    """Make plans in search of the one that keeps ``budget`` at the least added time.

    Args:
        first: makes the plan in which nothing runs again; only called if ``least`` is within the budget.
        least: lower bound of the bytes that this plan needs.
        attempt: takes a peak of live bytes and makes a plan with that asked of ``retain``.
        budget: bytes, above 0.
        effort: limits and shares.

    Returns:
        All plans that were made, at least one; only that of ``first`` if it keeps the budget. :func:`best` chooses.
    """
    plans = list[T]()
    if least <= budget:
        plans.append(first())
        if plans[0].needed_bytes <= budget:
            return plans
    state, target = _Search(budget, effort=effort), _begin(budget, effort)
    for _ in range(effort.budget_rounds):
        plans.append(attempt(target))
        next_target = state.next(target, plans[-1])
        if next_target is None:
            break
        target = next_target
    return plans


def lower(plans: Sequence[T], attempt: Callable[[Bytes], T], effort: Effort = EFFORT, refused: Bytes = 0) -> T:
    """Find the plan of ``"min"`` by asking for budgets a little below the lowest plan so far.

    Args:
        plans: those with the fewest bytes that were found without a limit; at least one.
        attempt: takes a peak of live bytes and makes a plan with that asked of ``retain``. Of a strained plan only
            ``strained`` is read.
        effort: limits and shares.
        refused: live bytes that ``retain`` is known not to reach; 0 if there are none.

    Returns:
        The lowest of all these plans; of equally low ones that with the least added time.
    """
    lowest = min(plans, key=_bytes_then_time)
    target: Bytes | None = _begin(_below(lowest, effort), effort)
    for _ in range(effort.descents):
        if target is None or target <= refused:
            break
        tried = attempt(target)
        if tried.strained:  # retain knows of none lower
            break
        lowest = min(lowest, tried, key=_bytes_then_time)
        target = _Search(_below(lowest, effort), effort=effort).next(target, tried)
    return lowest


def within(
    attempt: Callable[[Bytes], T],
    bound: Bytes,
    highest: Bytes,
    seconds: Seconds,
    effort: Effort = EFFORT,
    least: Callable[[Bytes], Seconds] | None = None,
) -> list[T]:
    """Look for the lowest peak that adds at most ``seconds``, between one that adds more and one that does not.

    The first peak is asked for near the bound. After one that does not add more the next is where ``least`` has risen
    by what is left of ``seconds``: an answer is as far above its bound as its neighbour. Others are where a straight
    line between the two adds ``seconds``, but at least a quarter of the way off either, or half-way where the one
    before took off less than half.

    Args:
        attempt: takes a peak of live bytes and makes a plan with that asked of ``retain``. Only ``asked_bytes`` and
            ``asked_seconds`` are read.
        bound: live bytes below which no plan adds so little.
        highest: bytes if nothing runs again, live ones or those of a plan.
        seconds: most added time.
        effort: limits and shares.
        least: lower bound of the seconds that a peak adds, the more the lower it is; None where it is not known.

    Returns:
        Those of the plans made that keep to ``seconds`` and are below ``highest`` and each other, the lowest first.
    """
    kept, low, high, share = list[T](), bound, highest, effort.first_share
    added, more = 0.0, math.inf  # seconds of the peaks high and low, the latter where they are known
    for _ in range(effort.time_rounds):
        between = high - low
        if between <= highest * effort.left_share:
            break
        target = high - int(between * share)
        tried = attempt(target)
        if tried.asked_seconds <= seconds and tried.asked_bytes < high:
            kept.insert(0, tried)
            high, added = tried.asked_bytes, tried.asked_seconds
        if high > target:  # too long, or retain knows of none lower
            reached = tried.asked_bytes <= target
            low, more = target, tried.asked_seconds if reached else math.inf
        line = (seconds - added) / (more - added) if more < math.inf else 0.5
        share = min(max(line, 0.25), 0.75) if high - low <= between / 2 else 0.5
        if least is not None and kept and more == math.inf and low < high <= target:
            left = seconds - added + least(high)
            away = high - _lowest_with(least, left, low, high, int(highest * effort.left_share))
            share = max(away, highest * effort.left_share / 2) / (high - low)
    return kept


def _lowest_with(least: Callable[[Bytes], Seconds], seconds: Seconds, low: Bytes, high: Bytes, off: Bytes) -> Bytes:
    """Return the lowest peak from ``low`` to ``high`` that adds at most ``seconds`` by ``least``, about ``off`` off."""
    while high - low > max(off // 4, 1):
        peak = (low + high) // 2
        low, high = (peak, high) if least(peak) > seconds else (low, peak)
    return high


def _below(lowest: Outcome, effort: Effort) -> Bytes:
    """Return the budget to ask for next, a little below what the lowest plan so far needs."""
    return lowest.needed_bytes - max(1, int(lowest.needed_bytes * effort.descent_share))


def _begin(budget: Bytes, effort: Effort) -> Bytes:
    """Return the peak of live bytes to ask ``retain`` for first: the budget less alignment and tensor objects."""
    return max(1, budget - effort.aligned(budget) - objects(budget))


def best(plans: Sequence[M], budget: Bytes) -> M:
    """Choose among plans: of those within ``budget``, the one with the least added time; if none is, the lowest.

    Of equal plans within the budget, the one that needs fewer bytes is taken. From the same plans, a lower budget takes
    one that needs no more bytes and no less added time.

    Args:
        plans: at least one.
        budget: bytes, compared with ``needed_bytes``.
    """
    fitting = [one for one in plans if one.needed_bytes <= budget]
    if fitting:
        return min(fitting, key=lambda one: (one.added_seconds, one.needed_bytes))
    return min(plans, key=_bytes_then_time)


def _bytes_then_time(one: Outcome) -> tuple[Bytes, Seconds]:
    return one.needed_bytes, one.added_seconds
