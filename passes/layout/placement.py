"""Which temporaries lie in the arena and which with torch's allocator: the placement with the lowest peak.

The arena is as large at every step as at its fullest, and what lies with the allocator comes on top of it. So a
storage that lives at the arena's fullest step may cost less outside, in room that is free there at its time:

    arena    ########            the storage x lives at the arena's fullest step, the allocator's share is
    outside      oo  OOO         largest at another. With the allocator, x takes room that is free at its time.

Results of operators without an ``out=`` form are either copied into the arena, and then exist twice for a
moment, or left with the allocator. Temporaries on another device than the arena's always lie with the allocator.

With all temporaries with the allocator there is no arena. In an order whose live bytes are not above eager's the peak
of that placement is not either: both are the bytes asked of the allocator. The arena counts with what its alignment
adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from roamc.cost import workspaces
from roamc.graph.memory import (
    Int64s,
    MemoryModel,
    Operator,
    Place,
    dropped_lifetimes,
    lifetimes,
    sizes,
    started_by,
    timeline,
)
from roamc.operators.out_variants import FormKind, form_of
from roamc.passes.layout.eager import Bools, Floor, Moments, at_moments, moments
from roamc.units import Bytes

ALLOCATOR_STEPS = (0, 1, 2, 4, 16, 64, 1 << 60)
"""In one trial each, results without an ``out=`` form that live at most this many steps stay with the allocator."""

ALLOCATOR_SHARES = (0.0, 1 / 64, 1 / 8, 1 / 2)
"""And of these, in one trial each, only results of at least this share of the largest one."""

MOVES, CANDIDATES = 512, 12
"""How many storages may be moved across, and of how many on each side the best is taken each time."""

CROWDED = 0.995
"""A step counts as crowded from this share of the fullest one on."""

PRICE = 32
"""Bytes that may pass through the allocator at every step for each byte of a lower peak: fresh memory costs time.
(AlexNet, batch 1, Adam: 2.6 % less peak with no arena at all, for steps 1.4 times as long.)"""

LITTLE: Bytes = 64 << 10
"""Price, in bytes of peak, of any result with the allocator, and again of having no arena: calls of the allocator take
time, however few bytes they ask for. A peak above eager's has no price: a placement with one comes last."""


@dataclass(frozen=True)
class Table:
    """All storages that live and die with the step, as arrays in the order of ``memory.counted``.

    Attributes:
        steps: of the graph's order.
        boundary: the step at which backward begins; 0 if all runs in one go.
        size: bytes.
        padded: bytes, up to the arena's alignment.
        born: first step.
        dead: step behind the last; outputs live to the end.
        dropped: the same if the caller drops what forward hands out as soon as forward has ended.
        foreign: of the caller: outputs and tangents.
        saved: made in forward and waiting for backward, in a graph with a boundary.
        allocated: temporaries made by an operator without an ``out=`` form.
        elsewhere: temporaries on another device than the arena's, or written when their operator, which has no ``out=``
            form, has returned.
        workspace: per step, what its operator takes for itself, as estimated.
        eager: what eager holds at every moment; None if that is no limit.
    """

    steps: int
    boundary: int
    size: Int64s
    padded: Int64s
    born: Int64s
    dead: Int64s
    dropped: Int64s
    foreign: Bools
    saved: Bools
    allocated: Bools
    elsewhere: Bools
    workspace: Int64s
    eager: Moments | None = None


@dataclass(frozen=True, eq=False)
class Placement:
    """One choice between arena and allocator for every temporary, before layout.

    Attributes:
        with_allocator: bool[storages], which lie with the allocator; ``foreign`` storages are in neither part.
        peak_bytes: arena and outside together, if the arena is as large as what lives in it.
        total: what is to be low: the same peak, every size up to the alignment, and once more for a caller who drops
            what forward hands out as soon as forward has ended. Callers differ in what they drop.
        crowded: at how many steps the arena or the outside is nearly at its fullest.
        passed: bytes per step that pass through the allocator; twice for those that are then copied.
        no_arena: there is no arena, though there are results that can be written into one.
    """

    with_allocator: Bools
    peak_bytes: Bytes
    total: Bytes
    crowded: int
    passed: Bytes
    no_arena: bool


def make_table(
    memory: MemoryModel, device: str, alignment: Bytes, *, boundary: bool, floor: Floor | None = None, idle: bool = True
) -> Table:
    """The graph's storages in its present order, for an arena on ``device``.

    ``floor`` is what eager holds, if no moment is to be above that; ``idle`` that the arena is kept after backward.
    """
    born, dead = lifetimes(memory)
    size = sizes(memory.counted)
    makers = {i for op in memory.operators if _allocates(op) for i in op.births}
    starts = {started_by(op.node) for op in memory.operators}
    late = makers.intersection(i for op in memory.operators if op.node in starts for i in op.births)
    waiting = {storage.index for storage in memory.saved} if boundary else set()
    temporary = _mask(s.place is Place.TEMPORARY for s in memory.counted)
    workspace = workspaces(memory.operators)
    return Table(
        steps=len(memory.operators),
        boundary=memory.boundary if boundary else 0,
        size=size,
        padded=-(-size // alignment) * alignment,
        born=born,
        dead=dead,
        dropped=dropped_lifetimes(memory, dead) if boundary else dead,
        foreign=~temporary,
        saved=_mask(s.index in waiting for s in memory.counted) & temporary,
        allocated=_mask(s.index in makers for s in memory.counted) & temporary,
        elsewhere=_mask(s.device != device or s.index in late for s in memory.counted) & temporary,
        workspace=workspace,
        eager=moments(memory, workspace, floor, idle=idle) if floor else None,
    )


def _mask(flags: Iterable[bool]) -> Bools:
    return np.array(list(flags), dtype=bool)


def _allocates(operator: Operator) -> bool:
    return form_of(operator.node, len(operator.births)).kind is FormKind.ALLOCATE


def placements(table: Table, eager_bytes: Bytes | None = None) -> list[Placement]:
    """Different placements, the one to take first: the cheapest that is not above ``eager_bytes``.

    The placement of all temporaries with the allocator is always among them.
    """
    everything = _placement(table, ~table.foreign)
    found = {everything.with_allocator.tobytes(): everything}
    starts = [table.elsewhere]
    if table.saved.any():
        # The caller's tensors grow as backward goes and saved ones shrink: with the allocator these free their room.
        starts.append(table.elsewhere | table.saved)
    for start in starts:
        tried = [_placement(table, with_allocator) for with_allocator in _grid(table, start)]
        tried.append(_relieve(table, min(tried, key=_preference)))
        found |= {placement.with_allocator.tobytes(): placement for placement in tried}

    def rank(placement: Placement) -> tuple[bool, Bytes, Bytes, Bytes]:
        mask = placement.with_allocator
        over = excess(table, mask, peak(arena_live(table, mask))) if table.eager else 0
        above = is_above(placement.peak_bytes, eager_bytes)
        return above, over, cost(placement.total // 2, placement), placement.passed

    return sorted(found.values(), key=rank)


def is_above(peak_bytes: Bytes, eager_bytes: Bytes | None) -> bool:
    """Whether a peak is above eager's; never where that is None."""
    return eager_bytes is not None and peak_bytes > eager_bytes


def excess(table: Table, with_allocator: Bools, arena_bytes: Bytes) -> Bytes:
    """Bytes by which a moment may be above eager's peak; 0 if none can be, or where eager's is no limit."""
    eager = table.eager
    if eager is None:
        return 0
    size = table.size * (with_allocator | table.foreign)
    lives = [(_outside(table, with_allocator, table.size, dead), dead) for dead in (table.dead, table.dropped)]
    ours = np.stack([at_moments(live, size, table.born, dead, eager.output, table.boundary) for live, dead in lives])
    waits = table.boundary and (eager.idle or (table.saved & ~with_allocator).any())
    there = np.append(np.ones(table.steps, dtype=np.int64), [bool(waits), bool(table.boundary and eager.idle)])
    ours += arena_bytes * there
    return max(0, int(np.where(ours <= eager.floor, 0, ours + eager.slack - eager.most).max(initial=0)))


def cost(peak_bytes: Bytes, placement: Placement) -> Bytes:
    """What decides between placements: the peak, and what passes through the allocator at every step."""
    return peak_bytes + placement.passed // PRICE + LITTLE * ((placement.passed > 0) + placement.no_arena)


def _grid(table: Table, start: Bools) -> Iterator[Bools]:
    """``start`` and, in turn, more or fewer of the results without an ``out=`` form."""
    life = table.dead - table.born
    largest = int(table.size[table.allocated].max(initial=0))
    for steps, share in itertools.product(ALLOCATOR_STEPS, ALLOCATOR_SHARES):
        yield start | (table.allocated & (life <= steps) & (table.size >= share * largest))


def _placement(table: Table, with_allocator: Bools) -> Placement:
    arena, (kept, dropped) = arena_live(table, with_allocator), outsides(table, with_allocator)
    return Placement(
        with_allocator=with_allocator,
        peak_bytes=peak(arena) + peak(outside_live(table, with_allocator)),
        total=2 * peak(arena) + peak(kept) + peak(dropped),
        crowded=sum(int((live > peak(live) * CROWDED).sum()) for live in (arena, kept, dropped)),
        passed=int(table.size[with_allocator].sum() + 2 * table.size[table.allocated & ~with_allocator].sum()),
        no_arena=_no_arena(table, with_allocator),
    )


def _no_arena(table: Table, with_allocator: Bools) -> bool:
    never_inside = table.foreign | table.allocated | table.elsewhere
    return bool((with_allocator | table.foreign).all() and not never_inside.all())


def _preference(placement: Placement) -> tuple[Bytes, Bytes]:
    return placement.total, placement.passed


def _progress(placement: Placement) -> tuple[Bytes, int]:
    """What a move across has to lower: the total, or else the number of steps that keep it up."""
    return placement.total, placement.crowded


def _relieve(table: Table, placement: Placement) -> Placement:
    """Move storages across, one at a time, while that lowers the peak or the number of steps that have it."""
    start = placement
    for _ in range(MOVES if table.steps else 0):
        tried = [_placement(table, with_allocator) for with_allocator in _moves(table, placement.with_allocator)]
        best = min(tried, key=_progress, default=placement)
        if _progress(best) >= _progress(placement):
            break
        placement = best
    return placement if placement.total < start.total else start


def _moves(table: Table, with_allocator: Bools) -> Iterator[Bools]:
    """``with_allocator`` with one storage more or less: large ones alive at the fullest step of their side only."""
    arena = int(np.argmax(arena_live(table, with_allocator)))
    fullest = {int(np.argmax(live)) for live in outsides(table, with_allocator)}
    inside, movable = ~with_allocator & ~table.foreign, with_allocator & ~table.elsewhere
    rows: dict[int, None] = {}
    for outside in sorted(fullest):
        rows |= dict.fromkeys(_largest(table, inside, arena, outside) + _largest(table, movable, outside, arena))
    for row in rows:
        moved = with_allocator.copy()
        moved[row] = not moved[row]
        yield moved


def _largest(table: Table, chosen: Bools, step: int, other: int) -> list[int]:
    """Of the chosen storages that are alive at ``step`` and not at ``other``, the largest."""
    alive, elsewhere = ((table.born <= at) & (at < table.dead) for at in (step, other))
    rows = np.flatnonzero(chosen & alive & ~elsewhere)
    ordered = rows[np.argsort(-table.size[rows], kind="stable")][:CANDIDATES]
    return [int(row) for row in ordered]


def arena_live(table: Table, with_allocator: Bools) -> Int64s:
    """Bytes in the arena at every step, sizes up to the alignment."""
    return timeline(table.padded * ~(with_allocator | table.foreign), table.born, table.dead, table.steps)


def outside_live(table: Table, with_allocator: Bools) -> Int64s:
    """Bytes outside the arena at every step: the caller's, the allocator's, and results before their copy."""
    return _outside(table, with_allocator, table.size, table.dead)


def _outside(table: Table, with_allocator: Bools, size: Int64s, dead: Int64s) -> Int64s:
    copied = table.allocated & ~with_allocator
    total = timeline(size * (with_allocator | table.foreign), table.born, dead, table.steps)
    np.add.at(total, table.born[copied], size[copied])
    return total


def outsides(table: Table, with_allocator: Bools) -> tuple[Int64s, Int64s]:
    """With the caller keeping and dropping what forward hands out. Padded as the arena is: the allocator pads too."""
    kept, dropped = (_outside(table, with_allocator, table.padded, dead) for dead in (table.dead, table.dropped))
    return kept, dropped


def peak(live: Int64s) -> Bytes:
    """The most bytes at one step; 0 if there is none."""
    return int(live.max(initial=0))
