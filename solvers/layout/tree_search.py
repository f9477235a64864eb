"""Lower a layout by section search: several static orders and restarts in turn, at one capacity after another.

The running time of such a search has a heavy tail: most orders of the same storages take for ever, some take no
time. So no order is trusted. Static orders go on where they stopped, each time with a larger share, and between
them come many short searches with orders drawn at random (Gomes, Selman, Crato and Kautz 2000, "Heavy-tailed
phenomena in satisfiability and constraint satisfaction problems").
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.layout import sequences
from roamc.solvers.layout.effort import EFFORT, Effort
from roamc.solvers.layout.problem import Bytes, LayoutProblem, arena_bytes, make_problem, padded
from roamc.solvers.layout.section_search import FOUND, NONE, search
from roamc.solvers.layout.section_state import SearchState, spent, start

ORDERS: tuple[tuple[sequences.Sequence, sequences.Sequence | None], ...] = (
    (sequences.by_width_area_total, None),
    (sequences.by_total_width_area, sequences.by_lifetime),
    (sequences.by_size, None),
    (sequences.by_area, None),
    (sequences.by_total_area_width, sequences.by_area),
)
"""(ranks, tie) of each static order: `ranks` gives the sequence of all storages; `tie`, if not None, decides between
storages with equal bytes when a set is ranked again."""

Clock = Callable[[], bool]
Order = tuple[LongArray, LongArray | None]
Run = tuple[LongArray, SearchState]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What a search for a lower layout found.

    offset: int64[n] bytes, the lowest layout known.
    nodes: work of the search: storages placed, plus what it looked at in addition, converted by `section_state.spent`.
    proved: whether it is proved that no layout has a smaller arena, or the arena is within the target.
    refuted: whether it is proved that no layout is within the target.
    """

    offset: LongArray
    nodes: int
    proved: bool
    refuted: bool = False


def never() -> bool:
    """Return False; as the argument `late` of `tree_search` it sets no limit on time."""
    return False


def tree_search(
    problem: LayoutProblem,
    incumbent: LongArray,
    target_bytes: Bytes,
    node_limit: int,
    late: Clock = never,
    effort: Effort = EFFORT,
) -> SearchResult:
    """Search for a layout with a lower arena than that of `incumbent`, down to `target_bytes`.

    The problem must have no gaps and no fixed offsets, which is not checked. It is cut where nothing is live; pieces
    that are already within the target keep their offsets.

    incumbent: int64[n] bytes, the offsets of a legal layout; left unchanged.
    target_bytes: an arena that is low enough, no less than the lower bound.
    node_limit: number of storages that the search may place, of which each piece gets its share.
    late: called now and then; the search ends when it returns True.
    effort: how the nodes are shared among capacities and orders.
    """
    offset = incumbent.copy()
    size = padded(problem)
    pieces = [piece for piece in time_pieces(problem) if _top(piece, offset, size) > target_bytes]
    nodes = 0
    proved_height, refuted = target_bytes, False
    for number, piece in enumerate(pieces):
        share = (node_limit - nodes) // (len(pieces) - number)
        result = _lower(_part(problem, piece), offset[piece], target_bytes, share, late, effort)
        offset[piece] = result.offset
        nodes += result.nodes
        refuted = refuted or result.refuted
        if result.proved:
            proved_height = max(proved_height, _top(piece, offset, size))
    return SearchResult(offset, nodes, arena_bytes(problem, offset) <= proved_height, refuted)


def time_pieces(problem: LayoutProblem) -> list[LongArray]:
    """Return the storages that have bytes, as int64 arrays of indices: groups that share no step, in time order."""
    storages = np.flatnonzero(problem.size > 0)
    storages = storages[np.argsort(problem.born[storages], kind="stable")]
    if len(storages) == 0:
        return []
    alive_until = np.maximum.accumulate(problem.dead[storages])
    cuts = np.flatnonzero(problem.born[storages][1:] >= alive_until[:-1]) + 1
    return np.split(storages, cuts)


def _part(problem: LayoutProblem, piece: LongArray) -> LayoutProblem:
    return make_problem(
        problem.size[piece],
        problem.born[piece],
        problem.dead[piece],
        problem.alignment,
        own_alignment=problem.own_alignment[piece],
    )


def _top(piece: LongArray, offset: LongArray, size: LongArray) -> Bytes:
    return int((offset[piece] + size[piece]).max())


def _lower(
    part: LayoutProblem, offset: LongArray, target: Bytes, node_limit: int, late: Clock, effort: Effort
) -> SearchResult:
    """Ask for the target first; then, between it and the best known, for half of what is still open."""
    unit = int(np.gcd.reduce(np.concatenate([padded(part), part.own_alignment])))
    lowest = -(-target // unit) * unit  # no layout is lower, but for the target
    guess, nodes, refuted = lowest, 0, False
    height = arena_bytes(part, offset)
    static = _orders(part) if height > max(lowest, target) else []
    capacity = lowest
    while height > max(lowest, target) and nodes < node_limit and not late():
        share = (node_limit - nodes) // (effort.target_share if capacity == lowest else effort.capacity_share) + 1
        layout, proved, cost = _decide(part, static, capacity, min(share, node_limit - nodes), late, effort)
        nodes += cost
        if layout is not None:
            offset, height = layout, arena_bytes(part, layout)
        elif proved:
            lowest = capacity + unit
            refuted = True
        guess = max(lowest, capacity + unit) if layout is None else guess
        if guess >= height:
            guess = lowest
        capacity = guess + (height - guess) // (2 * unit) * unit
        capacity = min(capacity, height - unit)
    return SearchResult(offset, nodes, height <= max(lowest, target), refuted)


def _orders(part: LayoutProblem) -> list[Order]:
    return [(ranks(part), None if tie is None else tie(part)) for ranks, tie in ORDERS]


def _decide(
    part: LayoutProblem, orders: Sequence[Order], capacity: Bytes, node_limit: int, late: Clock, effort: Effort
) -> tuple[LongArray | None, bool, int]:
    """A layout within the capacity, or None; whether it is proved that there is none; and the nodes it took."""
    short = effort.restart_nodes * part.num_storages
    static = _started(part, orders)
    drawn = ((sequence, start(part, sequence)) for sequence in _drawn(part))
    nodes, share = 0, short
    while True:
        runs = itertools.chain(((*run, share) for run in static()), ((*next(drawn), short) for _ in itertools.count()))
        until = nodes + 2 * share * len(orders)  # half of it for the static orders, the rest for those drawn
        for sequence, state, budget in runs:
            if nodes >= node_limit or late():
                return None, False, nodes
            before = spent(state)
            ended = search(state, capacity, before + min(budget, node_limit - nodes))
            nodes += spent(state) - before
            if ended == FOUND:
                offset = np.empty(part.num_storages, dtype=np.int64)
                offset[sequence] = state.offset[: part.num_storages]
                return offset, False, nodes
            if ended == NONE:
                return None, True, nodes
            if nodes >= until:
                break
        share *= 2


def _started(part: LayoutProblem, orders: Sequence[Order]) -> Callable[[], Iterator[Run]]:
    """A walk over the static orders, each begun when it is first come to: short searches end before the last."""
    states: list[SearchState] = []

    def walk() -> Iterator[Run]:
        for number, (sequence, tie) in enumerate(orders):
            if number == len(states):
                states.append(start(part, sequence, tie))
            yield sequence, states[number]

    return walk


def _drawn(part: LayoutProblem) -> Iterator[LongArray]:
    """Orders by lifetime times area, each storage's off by a random factor from a half to three halves."""
    dice = random.Random(0)
    life = (part.dead - part.born).astype(np.float64)
    while True:
        factor = [0.5 + dice.random() for _ in range(part.num_storages)]
        yield np.argsort(-life * life * part.size * factor, kind="stable")
