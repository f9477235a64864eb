"""The way down to the lowest peak, walked once for a problem, and for each budget up to the first peak within it.

The way does not depend on the budget. So a peak that a search for one budget has found is also found where that peak
is itself the budget:

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
    """An intermediate result of a search for the lowest peak, at which the search may end.

    peak: bytes, the peak of the state that the search has reached; at least the peak of `lowest`.
    lowest: the state with the lowest peak so far.
    work: work from the beginning of the search to this result, counted as `Search.work`.
    """

    peak: int
    lowest: State
    work: int


@dataclass(eq=False)
class Descent:
    """A search for the lowest peak in one problem, which runs only as far as `to` asks and then goes on from there.

    The work is counted apart (`Search.anew`): `search.work` does not grow, but the room of `search` is overwritten.

    search: the tables and the room of the problem.
    work_limit: work after which the search ends, counted from its beginning.
    stops: the results so far whose peaks are lower than all before them.
    last: the last result so far; set by the first call of `to` that searches.
    """

    search: Search
    work_limit: int
    stops: list[Stop] = field(default_factory=list)
    last: Stop = field(init=False)
    _way: Iterator[Stop] = field(init=False)

    def __post_init__(self) -> None:
        self._way = _way(self.search.anew(), self.work_limit)

    def to(self, budget: int) -> Stop:
        """Go on with the search as far as needed, and return the first result with a peak of at most `budget` bytes.

        If there is none, the search runs to its end, and its last result is returned, whose peak is above the budget.
        """
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
    """Yield the stops: of greedy descents in stages of several heights, then of neighbourhoods of the lowest state."""
    begun = search.work
    limit = begun + work_limit
    for step in search.effort.descent_steps:
        for lowest in descend(search, limit, step):
            yield Stop(lowest.score.peak, lowest, search.work - begun)
    for best in improvements(search, search.lowest.copy(), 0, limit):
        lowest = best if best.score.peak < search.lowest.score.peak else search.lowest
        yield Stop(best.score.peak, lowest, search.work - begun)
        if best.score.seconds <= 0:
            break
