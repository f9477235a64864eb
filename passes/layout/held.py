"""Which temporaries lie in the arena and which the allocator holds: the split with the lowest peak.

The arena is as large at every step as at its fullest, and what the allocator holds comes on top of it. So a
storage that lives at the arena's fullest step may cost less outside, in room that is free there at its time:

    arena    ########            the storage x lives at the arena's fullest step, the allocator's share is
    outside      oo  OOO         largest at another. Held, x takes room that is free at its time.

Results of operators without an ``out=`` form are either copied into the arena, and then exist twice for a
moment, or held. Temporaries on another device than the arena's are always held.

The split that holds everything has no arena. In an order whose live bytes are not above eager's its peak is not either:
both are the bytes asked of the allocator. The arena counts with what its alignment adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from roamc.cost import workspaces
from roamc.graph.memory import Int64s, MemoryModel, Operator, Place, dropped_lifetimes, lifetimes, sizes, timeline
from roamc.operators.out_variants import FormKind, form_of
from roamc.passes.layout.eager import Bools, Floor, Moments, at_moments, moments
from roamc.units import Bytes

HOLD_STEPS = (0, 1, 2, 4, 16, 64, 1 << 60)
"""In one trial each, results without an ``out=`` form that live at most this many steps are held."""

HOLD_SHARES = (0.0, 1 / 64, 1 / 8, 1 / 2)
"""And of these, in one trial each, only results of at least this share of the largest one."""

MOVES, CANDIDATES = 512, 12
"""How many storages may be moved across, and of how many on each side the best is taken each time."""

CROWDED = 0.995
"""A step counts as crowded from this share of the fullest one on."""

PRICE = 32
"""A lower peak is worth so many bytes, for each byte less, that pass through the allocator at every step: fresh
memory costs time. (AlexNet, batch 1, Adam: 2.6 % less peak with no arena at all, for steps 1.4 times as long.)"""

LITTLE: Bytes = 64 << 10
"""Price, in bytes of peak, of holding any result, and again of having no arena: calls of the allocator take time,
however few bytes they ask for. A peak above eager's has no price: a split with one comes last."""


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
        elsewhere: temporaries on another device than the arena's.
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
class Split:
    """One choice of held temporaries, before layout.

    Attributes:
        held: which; ``foreign`` storages are in neither part.
        peak_bytes: arena and outside together, if the arena is as large as what lives in it.
        total: what is to be low: the same peak, every size up to the alignment, and once more for a caller who drops
            what forward hands out as soon as forward has ended. Callers differ in what they drop.
        crowded: at how many steps the arena or the outside is nearly at its fullest.
        passed: bytes per step that pass through the allocator; twice for those that are then copied.
        given_up: there is no arena, though there are results that can be written into one.
    """

    held: Bools
    peak_bytes: Bytes
    total: Bytes
    crowded: int
    passed: Bytes
    given_up: bool


def make_table(
    memory: MemoryModel, device: str, alignment: Bytes, *, boundary: bool, floor: Floor | None = None, idle: bool = True
) -> Table:
    """The graph's storages in its present order, for an arena on ``device``.

    ``floor`` is what eager holds, if no moment is to be above that; ``idle`` that the arena is kept after backward.
    """
    born, dead = lifetimes(memory)
    size = sizes(memory.counted)
    makers = {i for op in memory.operators if _allocates(op) for i in op.births}
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
        elsewhere=_mask(s.device != device for s in memory.counted) & temporary,
        workspace=workspace,
        eager=moments(memory, workspace, floor, idle=idle) if floor else None,
    )


def _mask(flags: Iterable[bool]) -> Bools:
    return np.array(list(flags), dtype=bool)


def _allocates(operator: Operator) -> bool:
    return form_of(operator.node, len(operator.births)).kind is FormKind.ALLOCATE


def splits(table: Table, eager_bytes: Bytes | None = None) -> list[Split]:
    """Different choices of held temporaries, the one to take first: the cheapest that is not above ``eager_bytes``.

    The split that holds everything is always among them.
    """
    everything = _split(table, ~table.foreign)
    found = {everything.held.tobytes(): everything}
    starts = [table.elsewhere]
    if table.saved.any():
        # The caller's tensors grow as backward goes and saved ones shrink: held, they leave the room that they free.
        starts.append(table.elsewhere | table.saved)
    for start in starts:
        tried = [_split(table, held) for held in _grid(table, start)]
        tried.append(_relieve(table, min(tried, key=_preference)))
        found |= {split.held.tobytes(): split for split in tried}

    def rank(split: Split) -> tuple[bool, Bytes, Bytes, Bytes]:
        over = excess(table, split.held, peak(arena_live(table, split.held))) if table.eager else 0
        return is_above(split.peak_bytes, eager_bytes), over, cost(split.total // 2, split), split.passed

    return sorted(found.values(), key=rank)


def is_above(peak_bytes: Bytes, eager_bytes: Bytes | None) -> bool:
    """Whether a peak is above eager's; never where that is None."""
    return eager_bytes is not None and peak_bytes > eager_bytes


def excess(table: Table, held: Bools, arena_bytes: Bytes) -> Bytes:
    """Bytes by which a moment may be above eager's peak; 0 if none can be, or where eager's is no limit."""
    eager = table.eager
    if eager is None:
        return 0
    outside = table.size * (held | table.foreign)
    ours = np.stack(
        [
            at_moments(_outside(table, held, table.size, dead), outside, table.born, dead, eager.output, table.boundary)
            for dead in (table.dead, table.dropped)
        ]
    )
    waits = table.boundary and (eager.idle or (table.saved & ~held).any())
    there = np.append(np.ones(table.steps, dtype=np.int64), [bool(waits), bool(table.boundary and eager.idle)])
    ours += arena_bytes * there
    return max(0, int(np.where(ours <= eager.floor, 0, ours + eager.slack - eager.most).max(initial=0)))


def cost(peak_bytes: Bytes, split: Split) -> Bytes:
    """What decides between splits: the peak, and what passes through the allocator at every step."""
    return peak_bytes + split.passed // PRICE + LITTLE * ((split.passed > 0) + split.given_up)


def _grid(table: Table, start: Bools) -> Iterator[Bools]:
    """``start`` and, in turn, more or fewer of the results without an ``out=`` form."""
    life = table.dead - table.born
    largest = int(table.size[table.allocated].max(initial=0))
    for steps, share in itertools.product(HOLD_STEPS, HOLD_SHARES):
        yield start | (table.allocated & (life <= steps) & (table.size >= share * largest))


def _split(table: Table, held: Bools) -> Split:
    arena, (kept, dropped) = arena_live(table, held), outsides(table, held)
    return Split(
        held=held,
        peak_bytes=peak(arena) + peak(outside_live(table, held)),
        total=2 * peak(arena) + peak(kept) + peak(dropped),
        crowded=sum(int((live > peak(live) * CROWDED).sum()) for live in (arena, kept, dropped)),
        passed=int(table.size[held].sum() + 2 * table.size[table.allocated & ~held].sum()),
        given_up=_given_up(table, held),
    )


def _given_up(table: Table, held: Bools) -> bool:
    never_inside = table.foreign | table.allocated | table.elsewhere
    return bool((held | table.foreign).all() and not never_inside.all())


def _preference(split: Split) -> tuple[Bytes, Bytes]:
    return split.total, split.passed


def _progress(split: Split) -> tuple[Bytes, int]:
    """What a move across has to lower: the total, or else the number of steps that keep it up."""
    return split.total, split.crowded


def _relieve(table: Table, split: Split) -> Split:
    """Move storages across, one at a time, while that lowers the peak or the number of steps that have it."""
    start = split
    for _ in range(MOVES if table.steps else 0):
        tried = [_split(table, held) for held in _moves(table, split.held)]
        best = min(tried, key=_progress, default=split)
        if _progress(best) >= _progress(split):
            break
        split = best
    return split if split.total < start.total else start


def _moves(table: Table, held: Bools) -> Iterator[Bools]:
    """``held`` with one storage more or less: large ones alive at the fullest step of their side only."""
    arena = int(np.argmax(arena_live(table, held)))
    fullest = {int(np.argmax(live)) for live in outsides(table, held)}
    inside, movable = ~held & ~table.foreign, held & ~table.elsewhere
    rows: dict[int, None] = {}
    for outside in sorted(fullest):
        rows |= dict.fromkeys(_largest(table, inside, arena, outside) + _largest(table, movable, outside, arena))
    for row in rows:
        moved = held.copy()
        moved[row] = not moved[row]
        yield moved


def _largest(table: Table, chosen: Bools, step: int, other: int) -> list[int]:
    """Of the chosen storages that are alive at ``step`` and not at ``other``, the largest."""
    alive, elsewhere = ((table.born <= at) & (at < table.dead) for at in (step, other))
    rows = np.flatnonzero(chosen & alive & ~elsewhere)
    ordered = rows[np.argsort(-table.size[rows], kind="stable")][:CANDIDATES]
    return [int(row) for row in ordered]


def arena_live(table: Table, held: Bools) -> Int64s:
    """Bytes in the arena at every step, sizes up to the alignment."""
    return timeline(table.padded * ~(held | table.foreign), table.born, table.dead, table.steps)


def outside_live(table: Table, held: Bools) -> Int64s:
    """Bytes outside the arena at every step: the caller's, held results, and results that are about to be copied."""
    return _outside(table, held, table.size, table.dead)


def _outside(table: Table, held: Bools, size: Int64s, dead: Int64s) -> Int64s:
    copied = table.allocated & ~held
    total = timeline(size * (held | table.foreign), table.born, dead, table.steps)
    np.add.at(total, table.born[copied], size[copied])
    return total


def outsides(table: Table, held: Bools) -> tuple[Int64s, Int64s]:
    """With the caller keeping and dropping what forward hands out. Padded as the arena is: the allocator pads too."""
    return _outside(table, held, table.padded, table.dead), _outside(table, held, table.padded, table.dropped)


def peak(live: Int64s) -> Bytes:
    """The most bytes at one step; 0 if there is none."""
    return int(live.max(initial=0))
