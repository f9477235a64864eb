"""The way down to the lowest peak: gone once for a problem, and for each budget as far as to the first peak within it.

It does not depend on the budget, so whatever peak is found for one is found for that peak as the budget too:

    peak  plain o--o
                   |--o----o   stops, each with the lowest state so far
    budget - - - - - - - - | - - - - - - - -
                           o   the answer; a lower budget goes on from here
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from roamc.solvers.retain.greedy import descend
from roamc.solvers.retain.neighbours import improvements
from roamc.solvers.retain.search import Search, State


@dataclass(frozen=True, eq=False)
class Stop:
    """A place at which the way may end.

    peak: bytes.  lowest: the state with the lowest peak so far.  work: until here.
    """

    peak: int
    lowest: State
    work: int


@dataclass(eq=False)
class Descent:
    """The way down with so much work, from where `search` begins; the search itself is left alone.

    stops: those so far with a lower peak than all before.  last: the last so far.
    """

    search: Search
    work_limit: int
    stops: list[Stop] = field(default_factory=list)
    last: Stop = field(init=False)
    _way: Iterator[Stop] = field(init=False)

    def __post_init__(self) -> None:
        self._way = _way(self.search.anew(), self.work_limit)

    def to(self, budget: int) -> Stop:
        """The first stop with a peak within the budget; the end of the way if there is none."""
        for stop in self.stops:
            if stop.peak <= budget:
                return stop
        for stop in self._way:
            self.last = stop
            if not self.stops or stop.peak < self.stops[-1].peak:
                self.stops.append(stop)
            if stop.peak <= budget:
                break
        return self.last


def _way(search: Search, work_limit: int) -> Iterator[Stop]:
    """Down by greedy drops in stages of several heights, then by large neighbourhoods of the lowest."""
    begun = search.work
    limit = begun + work_limit
    for step in search.effort.descent_steps:
        for lowest in descend(search, search.work + (limit - search.work) // search.effort.descent_divisor, step):
            yield Stop(lowest.score.peak, lowest, search.work - begun)
    for best in improvements(search, search.lowest.copy(), 0, limit):
        lowest = best if best.score.peak < search.lowest.score.peak else search.lowest
        yield Stop(best.score.peak, lowest, search.work - begun)
        if best.score.seconds <= 0:
            break
