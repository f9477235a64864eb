"""Which temporaries lie in the arena and which with torch's allocator: the placement with the lowest peak.

The arena is as large at every step as at its fullest, and what lies with the allocator comes on top of it. So a
storage that lives at the arena's fullest step may cost less outside, in room that is free there at its time:

    arena    ########            the storage x lives at the arena's fullest step, the allocator's share is
    outside      oo  OOO         largest at another. With the allocator, x takes room that is free at its time.

Results of operators without an ``out=`` form are either copied into the arena, and then exist twice for a
moment, or left with the allocator. Temporaries on another device than the arena's always lie with the allocator.

With all temporaries with the allocator there is no arena. In an order whose live bytes are not above eager's, the peak
of that placement is not above eager's peak: both are the bytes requested from the allocator. The arena counts with the
bytes that its alignment adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from roamc.cost import TensorObjects, tensor_objects, workspaces
from roamc.graph import TrainGraph, main_device
from roamc.graph.in_flight import waiting_bytes
from roamc.graph.lifetimes import dropped_lifetimes, lifetimes, sizes, timeline
from roamc.graph.memory import Int64s, MemoryModel, Operator, Place, started_by
from roamc.operators.out_variants import FormKind, form_of
from roamc.passes.layout.eager import Bools, Floor, Moments, at_moments, moments
from roamc.passes.layout.effort import EFFORT, Effort
from roamc.rewriting.arrange import statements
from roamc.units import Bytes


@dataclass(frozen=True)
class Table:
    """All storages that live and die with the step: int64[k] and bool[k] arrays in the order of ``memory.counted``.

    Attributes:
        steps: number n of operators, each one step.
        boundary: the step at which backward begins; 0 if all runs in one go.
        size: bytes of each storage.
        padded: bytes of each storage, rounded up to the arena's alignment.
        born: first step of each storage.
        dead: step behind the last of each storage; outputs live to the end.
        dropped: ``dead`` if the caller drops the outputs of forward as soon as forward has ended.
        foreign: the caller's storages: outputs and tangents.
        saved: temporaries made in forward and read in backward, in a graph with a boundary; else none.
        allocated: temporaries made by an operator without an ``out=`` form.
        elsewhere: temporaries that cannot lie in the arena: on another device, still being written when their operator,
            which has no ``out=`` form, has returned, or saved by one of several calls that share the arena.
        workspace: int64[n], estimated bytes that each operator takes for itself.
        objects: the objects of tensors, those of views as well.
        waiting: bytes that others in flight, micro-batches or calls, hold.
        eager: what eager holds at every moment; None if that is no limit.
        effort: how many placements to try, and the prices by which they are compared.
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
    objects: TensorObjects
    waiting: Bytes
    eager: Moments | None
    effort: Effort


@dataclass(frozen=True, eq=False)
class Placement:
    """One choice between arena and allocator for every temporary, before layout.

    Attributes:
        with_allocator: bool[k], which lie with the allocator; never ``foreign`` storages, which are in neither part.
        peak_bytes: the arena, if it is as large as the most that lives in it, plus the most bytes outside of it.
        total: what is to be low: that peak with padded sizes, if the caller keeps the outputs of forward, plus the same
            if the caller drops them as soon as forward has ended; so about twice the peak.
        crowded: number of steps at which the arena or the outside is nearly at its fullest.
        passed: bytes that pass through the allocator in one run; those that are then copied into the arena count twice.
        no_arena: whether all lies with the allocator, though some results could be written into an arena.
    """

    with_allocator: Bools
    peak_bytes: Bytes
    total: Bytes
    crowded: int
    passed: Bytes
    no_arena: bool


def make_table(
    memory: MemoryModel,
    graph: TrainGraph,
    alignment: Bytes,
    *,
    floor: Floor | None = None,
    idle: bool = True,
    effort: Effort = EFFORT,
) -> Table:
    """Return a graph's storages as arrays, in the order of ``memory.counted``.

    Args:
        memory: the memory model of ``graph``, in its own or another order.
        graph: says the arena's device, the number of threads, and whether forward and backward run apart.
        alignment: the arena's alignment, in bytes.
        floor: what eager holds, if no moment is to be above that; None or empty if that is no limit.
        idle: whether the arena keeps its memory after backward.
        effort: how many placements to try, and the prices by which they are compared.
    """
    device, boundary = str(main_device(graph)), graph.boundary
    born, dead = lifetimes(memory)
    size = sizes(memory.counted)
    makers = {i for op in memory.operators if _allocates(op) for i in op.births}
    starts = {started_by(op.node) for op in memory.operators}
    late = makers.intersection(i for op in memory.operators if op.node in starts for i in op.births)
    waiting = {storage.index for storage in memory.saved} if boundary else set()
    # Each call that waits would hold a whole arena for what is saved there: without it they share one.
    apart = late | waiting if graph.calls else late
    temporary = _mask(s.place is Place.TEMPORARY for s in memory.counted)
    workspace = workspaces(memory.operators, graph.threads)
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
        elsewhere=_mask(s.device != device or s.index in apart for s in memory.counted) & temporary,
        workspace=workspace,
        objects=tensor_objects(memory, statements(graph, memory), born, dead),
        waiting=waiting_bytes(graph, memory),
        eager=moments(memory, workspace, floor, idle=idle) if floor else None,
        effort=effort,
    )


def _mask(flags: Iterable[bool]) -> Bools:
    return np.array(list(flags), dtype=bool)


def _allocates(operator: Operator) -> bool:
    return form_of(operator.node, len(operator.births)).kind is FormKind.ALLOCATE


def placements(table: Table, eager_bytes: Bytes | None = None) -> list[Placement]:
    """Return different placements, best first.

    Placements whose peak is not above ``eager_bytes`` come first, then those that exceed eager's peak by fewer bytes
    with workspace, then the cheaper ones. The placement of all temporaries with the allocator is always among them.

    Args:
        table: the graph's storages.
        eager_bytes: most bytes that eager holds at one step; None if that is no limit.
    """
    everything = _placement(table, ~table.foreign)
    distinct = {everything.with_allocator.tobytes(): everything}
    starts = [table.elsewhere]
    if table.saved.any():
        # The caller's tensors grow as backward goes and saved ones shrink: with the allocator these free their room.
        starts.append(table.elsewhere | table.saved)
    for start in starts:
        tried = [_placement(table, with_allocator) for with_allocator in _grid(table, start)]
        tried.append(_relieve(table, min(tried, key=_preference)))
        distinct |= {placement.with_allocator.tobytes(): placement for placement in tried}

    def rank(placement: Placement) -> tuple[bool, Bytes, Bytes, Bytes]:
        mask = placement.with_allocator
        over = excess(table, mask, peak(arena_live(table, mask))) if table.eager else 0
        above = is_above(placement.peak_bytes, eager_bytes)
        return above, over, cost(placement.total // 2, placement, table.effort), placement.passed

    return sorted(distinct.values(), key=rank)


def is_above(peak_bytes: Bytes, eager_bytes: Bytes | None) -> bool:
    """Return whether ``peak_bytes`` is above eager's peak ``eager_bytes``; False if ``eager_bytes`` is None."""
    return eager_bytes is not None and peak_bytes > eager_bytes


def excess(table: Table, with_allocator: Bools, arena_bytes: Bytes) -> Bytes:
    """Return an upper bound on the bytes by which a plan may be above eager's peak at any moment, workspace included.

    0 if no moment can be above eager's peak, or if ``table.eager`` is None.

    Args:
        table: the graph's k storages.
        with_allocator: bool[k], which of them lie with the allocator.
        arena_bytes: size of the arena for the other temporaries.
    """
    eager = table.eager
    if eager is None:
        return 0
    size = table.size * (with_allocator | table.foreign)
    lives = [(_outside(table, with_allocator, table.size, dead), dead) for dead in (table.dead, table.dropped)]
    ours = np.stack([at_moments(live, size, table.born, dead, eager.output, table.boundary) for live, dead in lives])
    waits = table.boundary and (eager.idle or (table.saved & ~with_allocator).any())
    has_arena = np.append(np.ones(table.steps, dtype=np.int64), [bool(waits), bool(table.boundary and eager.idle)])
    ours += arena_bytes * has_arena
    return max(0, int(np.where(ours <= eager.floor, 0, ours + eager.slack - eager.most).max(initial=0)))


def cost(peak_bytes: Bytes, placement: Placement, effort: Effort) -> Bytes:
    """Return ``peak_bytes`` plus the price, in bytes of peak, of what ``placement`` passes through the allocator.

    Args:
        peak_bytes: the peak of ``placement``, or a bound on it.
        placement: says how many bytes pass through the allocator, and whether there is an arena.
        effort: the prices.
    """
    calls = effort.allocator_call * ((placement.passed > 0) + placement.no_arena)
    return peak_bytes + placement.passed // effort.allocator_price + calls


def _grid(table: Table, start: Bools) -> Iterator[Bools]:
    """For each trial, ``start`` and a part of the results without an ``out=`` form, by life and size."""
    life = table.dead - table.born
    largest = int(table.size[table.allocated].max(initial=0))
    for steps, share in itertools.product(table.effort.allocator_steps, table.effort.allocator_shares):
        yield start | (table.allocated & (life <= steps) & (table.size >= share * largest))


def _placement(table: Table, with_allocator: Bools) -> Placement:
    arena, (kept, dropped) = arena_live(table, with_allocator), outsides(table, with_allocator)
    return Placement(
        with_allocator=with_allocator,
        peak_bytes=peak(arena) + peak(outside_live(table, with_allocator)),
        total=2 * peak(arena) + peak(kept) + peak(dropped),
        crowded=sum(int((live > peak(live) * table.effort.crowded_share).sum()) for live in (arena, kept, dropped)),
        passed=int(table.size[with_allocator].sum() + 2 * table.size[table.allocated & ~with_allocator].sum()),
        no_arena=_no_arena(table, with_allocator),
    )


def _no_arena(table: Table, with_allocator: Bools) -> bool:
    never_inside = table.foreign | table.allocated | table.elsewhere
    return bool((with_allocator | table.foreign).all() and not never_inside.all())


def _preference(placement: Placement) -> tuple[Bytes, Bytes]:
    return placement.total, placement.passed


def _progress(placement: Placement) -> tuple[Bytes, int]:
    """What a move has to lower: the total, or else the number of crowded steps."""
    return placement.total, placement.crowded


def _relieve(table: Table, placement: Placement) -> Placement:
    """Move storages between arena and allocator, one at a time, while that lowers the total or the crowded steps."""
    start = placement
    for _ in range(table.effort.moves if table.steps else 0):
        tried = [_placement(table, with_allocator) for with_allocator in _moves(table, placement.with_allocator)]
        best = min(tried, key=_progress, default=placement)
        if _progress(best) >= _progress(placement):
            break
        placement = best
    return placement if placement.total < start.total else start


def _moves(table: Table, with_allocator: Bools) -> Iterator[Bools]:
    """``with_allocator`` with one storage moved: a large one, alive at the fullest step of its side only."""
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
    """Rows of the largest chosen storages that are alive at ``step``, not at ``other``: as many as are candidates."""
    alive, elsewhere = ((table.born <= at) & (at < table.dead) for at in (step, other))
    rows = np.flatnonzero(chosen & alive & ~elsewhere)
    ordered = rows[np.argsort(-table.size[rows], kind="stable")][: table.effort.candidates]
    return [int(row) for row in ordered]


def arena_live(table: Table, with_allocator: Bools) -> Int64s:
    """Return the live bytes of the arena at every step, int64[n], with padded sizes.

    Args:
        table: the k storages, and the n steps.
        with_allocator: bool[k], which of them lie with the allocator instead of the arena.
    """
    return timeline(table.padded * ~(with_allocator | table.foreign), table.born, table.dead, table.steps)


def outside_live(table: Table, with_allocator: Bools) -> Int64s:
    """Return the bytes outside the arena at every step, int64[n], not padded.

    The bytes are those of the caller's storages, of storages with the allocator, and of results before their copy into
    the arena.

    Args:
        table: the k storages, and the n steps.
        with_allocator: bool[k], which of them lie with the allocator instead of the arena.
    """
    return _outside(table, with_allocator, table.size, table.dead)


def _outside(table: Table, with_allocator: Bools, size: Int64s, dead: Int64s) -> Int64s:
    copied = table.allocated & ~with_allocator
    total = timeline(size * (with_allocator | table.foreign), table.born, dead, table.steps)
    np.add.at(total, table.born[copied], size[copied])
    return total


def apart_bytes(table: Table, with_allocator: Bools) -> dict[str, Bytes]:
    """Return ``outside_bytes``, ``copied_bytes`` and ``allocator_bytes`` of :class:`roamc.passes.layout.Decision`.

    Args:
        table: the storages, k of them.
        with_allocator: bool[k], which of them lie with the allocator instead of the arena.
    """
    return {
        "outside_bytes": peak(outside_live(table, with_allocator)),
        "copied_bytes": int(table.size[table.allocated & ~with_allocator].sum()),
        "allocator_bytes": peak(timeline(table.size * with_allocator, table.born, table.dead, table.steps)),
    }


def outsides(table: Table, with_allocator: Bools) -> tuple[Int64s, Int64s]:
    """Return the padded bytes outside the arena at every step: if the caller keeps forward's outputs, and if not.

    The bytes are those of the caller's storages, of storages with the allocator, and, at the step that makes them, of
    results before their copy into the arena. Sizes are padded to the arena's alignment: the allocator pads too.

    Args:
        table: the k storages, and the n steps.
        with_allocator: bool[k], which of them lie with the allocator instead of the arena; never ``foreign`` ones.

    Returns:
        Two arrays int64[n]. They differ in when forward's outputs end: at ``table.dead``, if the caller keeps them, and
        at ``table.dropped``, if the caller drops them as soon as forward has ended.
    """
    kept, dropped = (_outside(table, with_allocator, table.padded, dead) for dead in (table.dead, table.dropped))
    return kept, dropped


def peak(live: Int64s) -> Bytes:
    """Return the most of ``live``, bytes at each step; 0 if there are no steps."""
    return int(live.max(initial=0))
