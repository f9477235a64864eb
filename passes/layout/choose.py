"""Lay out several placements between arena and allocator, trim where that is worth its price, and take the cheapest.

The cost of a placement is its peak plus prices for what the step pays: bytes that pass through the allocator, and bytes
of the arena that are trimmed and then used again. Keeping the budget counts before the cost, and so does a peak that is
not above eager's. Where every arena leads to a peak above eager's, through alignment or fragmentation, or in a small
graph through workspace and the caller's own tensors (:mod:`roamc.passes.layout.eager`), the allocator gets everything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from roamc.cost import objects
from roamc.errors import VerifyError
from roamc.graph.memory import Int64s
from roamc.options import Options
from roamc.passes.layout import trims
from roamc.passes.layout.placement import (
    Placement,
    Table,
    arena_live,
    cost,
    excess,
    is_above,
    outside_live,
    peak,
    placements,
)
from roamc.solvers.layout import LayoutSolution, make_problem, solve, validate
from roamc.solvers.layout.trim import Trimming, trimmed
from roamc.units import Bytes

Rank = tuple[bool, bool, Bytes, bool, Bytes]
"""Rank of a layout; the smallest tuple is the best layout. The entries: whether the layout needs more than the budget;
whether it keeps the budget but its peak is above eager's; upper bound on the bytes by which workspace may bring it
above eager's peak; whether its peak is higher than that of the layout that we would take if there were no trims (among
those: of the first placement); its cost if it keeps the budget, else the bytes that it needs."""


@dataclass(frozen=True)
class Laid:
    """One placement with its layout and its trims.

    Attributes:
        placement: which storages lie with the allocator.
        solution: offsets of the others in the arena.
        trimming: ranges of the arena that are trimmed.
        peak_bytes: most bytes at one operator, of the arena without trimmed ranges and of tensors outside of it.
        needed_bytes: that peak with the estimated bytes of workspace and tensor objects; with trims at least the bytes
            that the step holds before parts of the arena are trimmed; and what other micro-batches have saved.
        cost: the peak plus the prices of trims and of bytes that pass through the allocator, in bytes of peak.
    """

    placement: Placement
    solution: LayoutSolution
    trimming: Trimming
    peak_bytes: Bytes
    needed_bytes: Bytes
    cost: Bytes


def best(table: Table, eager_bytes: Bytes | None, alignment: Bytes, options: Options, *, shrinks: bool) -> Laid:
    """Lay out several placements, with and without trims, and return the best by :data:`Rank`.

    A placement is laid out only if the lower bound on its rank is below the best rank so far. Where no layout keeps the
    budget, the result is the one that needs the fewest bytes.

    Args:
        table: the graph's storages.
        eager_bytes: what eager holds at its worst step, which the peak should not exceed; None if that is no limit.
        alignment: every offset is a multiple of it, in bytes.
        options: the budget, the node limit of the layout search, and whether idle arenas keep their memory.
        shrinks: whether the arena can be trimmed during a step.

    Raises:
        VerifyError: the solver gave a layout that is not legal.
    """
    plain = placements(table, eager_bytes)
    lay = _Layouts(table, alignment, options)
    first = _least(lay, plain, eager_bytes, shrinks=False)
    return _least(lay, plain, eager_bytes, shrinks=True, highest=first.peak_bytes) if shrinks else first


def _least(
    lay: _Layouts,
    plain: Sequence[Placement],
    eager_bytes: Bytes | None,
    *,
    shrinks: bool,
    highest: Bytes | None = None,
) -> Laid:
    """The best of the placements ``plain``; ``highest`` is the peak of :data:`Rank`, that of the first one if None."""
    table, limit, effort = lay.table, lay.options.limit_bytes, lay.table.effort
    estimate = {placement: least for least, placement in _estimated(table, plain, shrinks=shrinks)}
    cheapest = sorted(plain, key=lambda placement: estimate[placement])[: effort.layouts]
    # Placements in `within` keep the budget without trims; the others may keep it with trims.
    room = None if limit is None else limit - table.waiting
    within = [placement for placement in plain if room is not None and placement.peak_bytes <= room][: effort.layouts]
    lowest = min(plain, key=lambda placement: placement.peak_bytes)
    without_arena = next(placement for placement in plain if (placement.with_allocator | table.foreign).all())
    first, *others = dict.fromkeys((plain[0], *cheapest, *within, lowest, without_arena))
    least = {one: _least_rank(table, one, eager_bytes, limit, estimate[one], shrinks=shrinks) for one in others}
    ranked: list[tuple[Rank, Laid]] = []
    for placement in (first, *sorted(others, key=lambda one: least[one])):
        if ranked and min(rank for rank, _ in ranked) <= least[placement]:
            break
        for laid in lay.out(placement, shrinks=shrinks):
            highest = laid.peak_bytes if highest is None else highest
            higher = laid.peak_bytes > highest + max(effort.allocator_call, highest // effort.higher_share)
            fits = limit is None or laid.needed_bytes <= limit
            above = fits and is_above(laid.peak_bytes, eager_bytes)
            over = excess(table, placement.with_allocator, int(laid.solution.arena_bytes)) if fits else 0
            ranked.append(((not fits, above, over, higher, laid.cost if fits else laid.needed_bytes), laid))
    return min(ranked, key=lambda item: item[0])[1]


def _estimated(table: Table, ranked: Sequence[Placement], *, shrinks: bool) -> Iterator[tuple[Bytes, Placement]]:
    """Pairs of a lower bound on the cost, without fragmentation and with all idle ranges trimmed, and the placement."""
    for placement in ranked:
        arena = arena_live(table, placement.with_allocator)
        if not shrinks or peak(arena) < table.effort.trim.least_bytes:
            yield cost(placement.total // 2, placement, table.effort), placement
            continue
        between = trims.moments(table, placement)
        highest = sum(peak(arena) + peak(outside) for outside in between)
        lowest = sum(peak(np.append(arena, 0) + outside) for outside in between)
        price = (highest - lowest) // 2 // table.effort.trim_price
        yield cost(lowest // 2, placement, table.effort) + price, placement


def _least_rank(
    table: Table,
    placement: Placement,
    eager_bytes: Bytes | None,
    limit: Bytes | None,
    least_cost: Bytes,
    *,
    shrinks: bool,
) -> Rank:
    """A lower bound on the rank of every layout of ``placement``: without fragmentation, with all idle ranges trimmed.

    Args:
        table: the graph's storages.
        placement: which of them lie with the allocator.
        eager_bytes: what eager holds at its worst step; None if that is no limit.
        limit: the budget in bytes; None if there is none.
        least_cost: a lower bound on the cost, which counts no workspace in an arena too small to be trimmed.
        shrinks: whether the arena can be trimmed during a step.
    """
    with_allocator = placement.with_allocator
    arena, outside = arena_live(table, with_allocator), outside_live(table, with_allocator)
    arena_bytes = peak(arena)
    if not shrinks or arena_bytes < table.effort.trim.least_bytes:
        arena = np.full_like(arena, arena_bytes)
    own = table.objects.peak(~table.foreign & ~with_allocator)
    needed = _needed(table, arena + outside, own) + table.waiting
    if limit is not None and needed > limit:
        return True, False, 0, False, needed
    total = sum(peak(np.append(arena, 0) + beside) for beside in trims.moments(table, placement))
    over = excess(table, with_allocator, arena_bytes)
    above = is_above(peak(arena + outside), eager_bytes)
    return False, above, over, False, max(least_cost, cost(total // 2, placement, table.effort))


class _Layouts:
    """Layouts of placements, each of which is solved once."""

    def __init__(self, table: Table, alignment: Bytes, options: Options) -> None:
        self.table, self.options = table, options
        self._solve = functools.cache(functools.partial(_solve, table, alignment=alignment, options=options))

    def out(self, placement: Placement, *, shrinks: bool) -> Iterator[Laid]:
        """The layout of ``placement`` without trims, and then with each choice of trims."""
        table, solution = self.table, self._solve(placement)
        arena = int(solution.arena_bytes)
        outside = outside_live(table, placement.with_allocator)
        inside = ~table.foreign & ~placement.with_allocator
        own = table.objects.peak(inside)
        for trimming in trims.choices(table, placement, solution, shrinks=shrinks):
            tensors = arena - trimmed(trimming.ranges, table.steps)[:-1] + outside
            needed = _needed(table, tensors, own)
            if trimming.ranges:
                needed = max(needed, trims.taken(table, inside, arena, outside, keeps=self.options.keeps_arena))
            price = cost(trimming.total // 2, placement, table.effort) + trims.price(trimming, table.effort)
            yield Laid(placement, solution, trimming, peak(tensors), needed + table.waiting, price)


def _needed(table: Table, tensors: Int64s, own: Bytes) -> Bytes:
    """Most bytes at any of n steps: ``tensors``, int64[n], workspace, and ``own`` bytes of tensor objects."""
    most = peak(tensors + table.workspace)
    return most + objects(most, own)


def _solve(table: Table, placement: Placement, *, alignment: Bytes, options: Options) -> LayoutSolution:
    inside = ~table.foreign & ~placement.with_allocator
    problem = make_problem(table.size[inside], table.born[inside], table.dead[inside], alignment=alignment)
    solution = solve(problem, node_limit=options.layout_nodes)
    report = validate(problem, solution)
    if not report.good:
        raise VerifyError(f"pass 'layout': {solution.algorithm} gave a layout that is not legal: {report.detail}")
    return solution
