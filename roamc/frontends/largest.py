"""The search for the largest size whose step fits a budget, with few plans.

A plan takes seconds; the lower bound of what any plan needs takes milliseconds once the step is captured, and grows
nearly evenly with the size, or with its square. So the bounds of two sizes say where to look; a plan that is refused
there says by how much plans lie above their bounds, and where to look next:

    size 8   bound 0.37 GB          as the size: 21
    size 21  bound 0.88 GB, needs 1.32 GB: refused      plans need 1.5 times their bounds: 15
    size 15  fits 1 GB
    size 16  needs 1.03 GB: refused                     15 is the largest

There is a plan of the answer; of the next size the bound is above the budget, or its search for a plan found none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from roamc import ticker
from roamc.errors import BudgetError, CaptureError
from roamc.graph import TrainGraph
from roamc.options import Options
from roamc.planning import together
from roamc.planning.collector import older_objects_left_alone
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from roamc.planning.search import PlanSearch
from roamc.units import Bytes, format_bytes

BEGIN = 8
"""The first size to look at, in multiples of the smallest: steps of very few rows have other peaks."""

GROWTH = 16
"""Times the largest size so far, at most, for the next one: where bytes hardly grow yet, lines end anywhere."""

STEP = 256
"""After two plans in turn with the same answer, the next size lies further off by this part; more steps double."""

PATIENCE = 8
"""Plans of guessed sizes; most searches are over before."""

NEAR = 0.5
"""The first plan is that of a size whose bound is at least this share of the budget. It says how far plans lie above
their bounds. With 1, two more sizes are looked at where plans lie far above, which takes as long as two plans."""

EXACT = 1e-6
"""What counts as nothing: by their last bits roots miss whole numbers, and lines are parabolas."""


@dataclass(frozen=True)
class Fit:
    """The largest size whose plan fits the budget.

    Attributes:
        size: the size.
        plan: the plan of the step of this size.
        too_large: the smallest size that was tried and does not fit; None if all sizes tried fit.
        tried: the sizes that were looked at, in that order.
        planned: those of them of which a plan was made; of the others a bound was enough.
    """

    size: int
    plan: Plan
    too_large: int | None
    tried: tuple[int, ...] = ()
    planned: tuple[int, ...] = ()

    @property
    def added_share(self) -> float:
        """The predicted time that recomputation and codecs add to a step, as a share of it."""
        return self.plan.added_share


@dataclass(frozen=True)
class _Look:
    """What a captured step of one size says before it is planned: lower bound of its bytes, budget, and fingerprint."""

    least: Bytes
    limit: Bytes
    fingerprint: str


@dataclass
class Largest:
    """A search; call :meth:`run` once.

    Attributes:
        captured: captures the step of a size.
        options: what the user set; the budget does not depend on the step.
        smallest: the first size that counts.
        largest: the last one.
        recomputation: whether operators may run again and values be encoded; without it the option ``disable`` has pass
            retain.
        answer: the graph and the plan of the largest size so far that fits.
    """

    captured: Callable[[int], TrainGraph]
    options: Options
    smallest: int
    largest: int
    recomputation: bool = True
    _looks: dict[int, _Look] = field(default_factory=dict)
    _refused: dict[int, bool] = field(default_factory=dict)  # sizes that do not fit, and whether that is for certain
    _planned: dict[int, None] = field(default_factory=dict)
    _answers: list[bool] = field(default_factory=list)  # whether the planned sizes fit
    _trials: tuple[int, PlanSearch] | None = None
    _misled: bool = False  # whether quick searches refuse sizes that fit
    answer: Planned | None = None
    _seen: int = 0  # sizes that had been looked at when one was planned last
    _factor: float = 1.0  # plans need about this multiple of their bounds

    def __post_init__(self) -> None:
        self._low, self._high = self.smallest - 1, self.largest + 1  # fits; does not fit
        if not self.recomputation:
            self.options = replace(self.options, disable=(*self.options.disable, "retain"))

    @older_objects_left_alone()
    def run(self) -> Fit:
        """Return the largest size whose plan fits the budget.

        Raises:
            BudgetError: not even the smallest size fits.
            CaptureError: all sizes give the same step.
        """
        while self._high - self._low > 1 or not self._refused.get(self._high, True):
            size = self._guess()
            if size in self._looks:
                self._plan(size)
            else:
                self._look(size)
        if self.answer is None:
            raise self._nothing()
        self._check_growth(self.answer.plan)
        too_large = self._high if self._high <= self.largest else None
        return Fit(self._low, self.answer.plan, too_large, tuple(self._looks), tuple(self._planned))

    def _search(self, size: int) -> PlanSearch:
        """The search for plans of the step of a size; that of the size before is dropped."""
        if self._trials is None or self._trials[0] != size:
            graph = together.as_alone(self.captured(size), self.options)
            self._trials = size, PlanSearch(graph, self.options, many=True)
        return self._trials[1]

    def _look(self, size: int) -> None:
        """Capture the step of a size, and note what is known of it before it is planned."""
        with ticker.part(self._so_far(f"looking at {size}")):
            search = self._search(size)
            limit = search.terms.limit
            assert limit is not None  # max_batch takes no other budget
            look = self._looks[size] = _Look(search.least_bytes(limit), limit, search.fingerprint)
        if look.least > look.limit:
            self._refused[size] = True
            self._high = min(size, self._high)

    def _plan(self, size: int) -> None:
        """Plan the step of a size, and note whether it fits.

        A quick search may refuse a size that the plan of ``"min"`` would fit: right behind one that fits, it is not.
        Where that was so, or :data:`PATIENCE` plans were made, none is quick any more: it is so for many sizes.
        """
        look, quick = self._looks[size], size - self._low > 1 and not self._misled
        with ticker.part(self._so_far(f"trying {size}")):
            search = self._search(size)
            try:
                planned = search.run(quick=quick)
                needed, fits = search.terms.taken(planned.plan), True
            except BudgetError as error:
                needed, fits = search.terms.taken(_lowest(error)), False
        self._seen = len(self._looks)
        self._planned[size] = None
        self._answers.append(fits)
        self._misled |= len(self._answers) >= PATIENCE or (fits and not self._refused.get(size, True))
        if fits:
            self._low, self.answer = size, planned
            self._factor = min(self._factor, look.limit / max(1, look.least))
        else:
            self._refused[size] = not quick or search.has_lowest
            self._factor = needed / max(1, look.least)
        if self._misled:
            self._refused = {each: certain for each, certain in self._refused.items() if certain}
        self._high = min((each for each in self._refused if each > self._low), default=self.largest + 1)

    def _so_far(self, then: str) -> str:
        if self.answer is None:
            return then
        return f"size {self._low} fits: {format_bytes(self.answer.plan.needed_bytes)}; {then}"

    def _over(self, size: int) -> float:
        """The bytes that a size is guessed to need, as a multiple of the budget: above 1 where it does not fit."""
        look = self._looks[size]
        return max(1, look.least) * self._factor / look.limit

    def _guess(self) -> int:
        """The size that is guessed to be the largest that fits, of those of which it is not known.

        Until there is a plan, it is one that was looked at and lies near the budget, if there is any. Where plans gave
        the same answer several times in turn, the steps grow. Halfway, once :data:`PATIENCE` plans were made: plans
        then do not grow as their bounds do.
        """
        near = [size for size, look in self._looks.items() if NEAR * look.limit <= look.least <= look.limit]
        if near and not self._answers:
            return max(near)
        if len(self._answers) >= PATIENCE:
            return (self._low + self._high + 1) // 2
        size = self._crossing() if self._looks else BEGIN * self.smallest
        last = self._answers[-1:]
        turn = len(list(takewhile(lambda answer: [answer] == last, reversed(self._answers))))
        if turn:
            step = 1 if turn == 1 else max(1, self._low // STEP) << (turn - 2)
            size = max(size, self._low + step) if last[0] else min(size, self._high - step)
        return max(self._low + 1, min(size, self._high - 1))

    def _crossing(self) -> int:
        """Where bytes cross the budget, on a parabola through the three sizes that are nearest to it.

        Halfway between the last below and the first above it, by factors, where three sizes in turn lay on the same
        side, as where sizes are rounded up to others.
        """
        sizes = sorted(self._looks)
        below = [size for size in sizes if self._over(size) <= 1]
        above = [size for size in sizes if self._over(size) > 1]
        sides = [size in above for size in list(self._looks)[self._seen :]]
        if below and above and len(sides) > 2 and len(set(sides[-3:])) == 1:
            return int(math.sqrt(below[-1] * above[0]))
        sided = [*below[-2:], *above[:2]] if below and above else below[-3:] or above[:3]
        near = {size: self._over(size) for size in sorted(sided, key=lambda size: abs(math.log(self._over(size))))[:3]}
        if len(sizes) == 1:
            near[0] = 0.0
        first, last = below[-1] if below else 0, above[0] if above else GROWTH * sizes[-1]
        curve = np.polynomial.Polynomial.fit(list(near), [over - 1 for over in near.values()], len(near) - 1)
        roots: list[complex] = curve.trim(EXACT).roots().tolist()
        crossings = [root.real for root in roots if root.imag == 0 and first - 1 < root.real < last + 1]
        return int(min(crossings, default=last if below else first) + EXACT)

    def _nothing(self) -> BudgetError:
        """The error that not even the smallest size fits."""
        try:
            self._search(self.smallest).run()
        except BudgetError as error:
            why = f"{error.reason}. {error.advice}"
            return BudgetError(
                f"not even size {self.smallest}, the smallest that is tried, fits: {why}",
                _lowest(error),
                verdict=error.verdict,
            )
        raise AssertionError(f"the lower bound of size {self.smallest} is above what its plan needs")

    def _check_growth(self, plan: Plan) -> None:
        """Refuse a step that is the same for the answer as for the smallest size."""
        if self._low == self.smallest or any(look.fingerprint != plan.fingerprint for look in self._looks.values()):
            return
        if self._search(self.smallest).fingerprint == plan.fingerprint:
            raise CaptureError(
                f"the step does not grow with its size: sizes {self.smallest} and {self._low} give the same one; let "
                "the function make the inputs of the size that it is called with"
            )


def _lowest(error: BudgetError) -> Plan:
    """The plan that an error of planning has."""
    plan: Any = error.plan
    assert isinstance(plan, Plan)
    return plan
