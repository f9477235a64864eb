"""The judge of layouts: it checks the offsets, trims and peak of every plan before the plan runs.

It shares no code with the layout pass or its solver, and derives all lives from the graph as it will run.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from roamc.cost import objects, view_bytes, workspace_bytes
from roamc.cost.tensor_objects import OBJECT
from roamc.errors import VerifyError
from roamc.graph import Phase, Role, TrainGraph, main_device, output_values, placeholders, storage_name
from roamc.graph.layout import Layout
from roamc.graph.memory import SharedStorages, started_by
from roamc.graph.storage_ids import StorageId, placed
from roamc.graph.verify import Life, storage_lives
from roamc.operators import ops
from roamc.operators.out_variants import FormKind, form_of
from roamc.operators.table import Space
from roamc.units import Bytes

PAGE: Bytes = 2 << 20
"""An arena with trims begins at a multiple of this many bytes; to allow for that, as many bytes more are allocated."""

PIECE: Bytes = PAGE // 8
"""Trims begin and end at multiples of this, or end with the arena: what is given back are whole pages of the system, of
up to 64 KiB, so a smaller piece may free nothing."""


def check_layout(graph: TrainGraph) -> None:
    """Check the offsets, trims and peak of the layout of ``graph``, whose layout pass has run.

    No two storages that are alive together may share bytes of the arena, nothing may be alive in bytes that are
    trimmed, and no step may need more than the layout says. Lives are derived by walking the graph once.

    Raises:
        VerifyError: the layout is wrong or missing; names the storages, the trim or the step.
    """
    if graph.layout is None:
        raise VerifyError("after pass 'layout': the graph has no layout")
    lives = storage_lives(graph)
    _check_owners(graph, graph.layout, lives)
    _check_places(graph.layout, lives)
    _check_elements(graph, graph.layout)
    trimmed = _trimmed(graph, graph.layout)
    _check_trims(graph.layout, lives, trimmed)
    _check_peak(graph, graph.layout, lives, trimmed)


def _check_owners(graph: TrainGraph, layout: Layout, lives: dict[str, Life]) -> None:
    """Check that no input or output of the graph, and nothing of another memory or device, lies in the arena.

    The next step writes over the arena, so only storages that the step makes and does not return may lie there. What an
    operator allocates is copied there when it returns, so it must have ended by then.
    """
    nodes, shared = list(graph.graph.nodes), SharedStorages(graph)
    handed = shared.of_all(output_values(graph.graph))
    device, starts = main_device(graph), {started_by(node) for node in nodes}
    births = Counter(born for born, _, _ in lives.values())
    for name in layout.offset:
        born = lives[name][0]
        node = nodes[born]
        if node.op != "call_function" or shared.of(_made(node, name)[1]) in handed:
            raise VerifyError(f"after pass 'layout': {name} lies in the arena and is the caller's")
        if ops.rule(node.target).space is not Space.DEVICE or _made(node, name)[0].device != device:
            raise VerifyError(f"after pass 'layout': {name} lies in the arena and belongs into another memory")
        if node in starts and form_of(node, births[born]).kind is FormKind.ALLOCATE:
            raise VerifyError(f"after pass 'layout': {name} would be copied into the arena while it is being written")


def _made(node: fx.Node, name: str) -> tuple[torch.Tensor, StorageId]:
    """Return the tensor for which ``node`` makes the storage ``name``, and the id of that storage."""
    return next((tensor, own) for position, tensor, own in placed(node) if storage_name(node, position) == name)


def _check_places(layout: Layout, lives: dict[str, Life]) -> None:
    """Check that offsets are aligned and inside the arena, that lives do not overlap there, and the arena's size."""
    alive: list[tuple[int, int, int, str]] = []
    for name, (born, dead, nbytes) in sorted(lives.items(), key=lambda item: item[1][0]):
        if name not in layout.offset:
            continue
        low = layout.offset[name]
        high = low + nbytes
        if low % layout.alignment or low < 0 or high > layout.arena_bytes:
            raise VerifyError(f"after pass 'layout': {name} at [{low}, {high}) is misaligned or outside the arena")
        alive = [other for other in alive if other[0] > born]
        for other_dead, other_low, other_high, other in alive:
            if low < other_high and other_low < high:
                raise VerifyError(
                    f"after pass 'layout': {name} at bytes [{low}, {high}), alive in steps [{born}, {dead}), and "
                    f"{other} at [{other_low}, {other_high}), alive until {other_dead}, overlap; "
                    f"leave the pass's order out with options={{'disable': 'reorder'}}"
                )
        if nbytes:
            alive.append((dead, low, high, name))
    end = max((low + lives[name][2] for name, low in layout.offset.items()), default=0)
    if layout.arena_bytes >= end + layout.alignment:
        raise VerifyError(
            f"after pass 'layout': the arena has {layout.arena_bytes} bytes and its last tensor ends at {end}"
        )


def _check_elements(graph: TrainGraph, layout: Layout) -> None:
    """Check that every storage in the arena begins at a multiple of the element size of each tensor in it."""
    shared, owner = SharedStorages(graph), dict[StorageId, str]()
    for node in graph.graph.nodes:
        for position, tensor, storage in placed(node):
            name = owner.setdefault(shared.of(storage), storage_name(node, position))
            if layout.offset.get(name, 0) % tensor.dtype.itemsize:
                raise VerifyError(
                    f"after pass 'layout': {name} at {layout.offset[name]} is misaligned: {node.name} has elements of "
                    f"{tensor.dtype.itemsize} bytes"
                )


def _trimmed(graph: TrainGraph, layout: Layout) -> list[tuple[int, int]]:
    """Return for every trim (first, end): its bytes are trimmed at these positions of the node list, end excluded."""
    nodes = [node.name for node in graph.graph.nodes]
    runs = {op.name: index for index, op in enumerate(graph.graph.nodes) if op.op == "call_function"}
    spans = []
    for trim in layout.trims:
        unknown = [name for name in (trim.after, trim.before) if name and name not in runs]
        if unknown or not 0 <= trim.low < trim.high <= layout.arena_bytes:
            raise VerifyError(f"after pass 'layout': {trim} is outside the arena or names no operator")
        if trim.low % PIECE or (trim.high % PIECE and trim.high != layout.arena_bytes):
            raise VerifyError(f"after pass 'layout': {trim} does not begin and end at multiples of {PIECE} bytes")
        first = runs[trim.after] + 1 if trim.after else 0
        end = runs[trim.before] if trim.before else len(nodes)
        if end < first:
            raise VerifyError(f"after pass 'layout': {trim} ends before it begins")
        spans.append((first, end))
    return spans


def _check_trims(layout: Layout, lives: dict[str, Life], trimmed: list[tuple[int, int]]) -> None:
    """Check that nothing is alive in a range while it is trimmed, and that no byte is trimmed twice at once."""
    for number, (trim, (first, end)) in enumerate(zip(layout.trims, trimmed, strict=True)):
        for name, low in layout.offset.items():
            born, dead, nbytes = lives[name]
            if low < trim.high and trim.low < low + nbytes and born < end and first < dead:
                raise VerifyError(
                    f"after pass 'layout': {name} at bytes [{low}, {low + nbytes}), alive in steps [{born}, {dead}), "
                    f"lies in [{trim.low}, {trim.high}), which is trimmed in steps [{first}, {end})"
                )
        for other, (other_first, other_end) in zip(layout.trims[:number], trimmed, strict=False):
            if other.low < trim.high and trim.low < other.high and other_first < end and first < other_end:
                raise VerifyError(f"after pass 'layout': {other} and {trim} trim the same bytes")


def _check_peak(graph: TrainGraph, layout: Layout, lives: dict[str, Life], trimmed: list[tuple[int, int]]) -> None:
    """Check the peak at every step: the arena less its trims, bytes outside it, and results before their copy into it.

    Workspaces and tensor objects are added for the bytes that are needed.
    """
    nodes = list(graph.graph.nodes)
    births = Counter(born for born, _, _ in lives.values())
    change = [0] * (len(nodes) + 1)

    def count(first: int, end: int, nbytes: int) -> None:
        change[first] += nbytes
        change[max(first, end)] -= nbytes

    for trim, (first, end) in zip(layout.trims, trimmed, strict=True):
        count(first, end, -trim.nbytes)
    outside = _outside_lives(graph, layout, lives)
    for name, (born, dead) in outside.items():
        count(born, dead, lives[name][2])
    for born, _, nbytes in (lives[name] for name in layout.offset):
        if form_of(nodes[born], births[born]).kind is FormKind.ALLOCATE:
            count(born, born + 1, nbytes)  # made first, copied then
    total = layout.arena_bytes
    # An arena that is trimmed is taken as a whole first.
    needed, where = (layout.arena_bytes + PAGE if layout.trims else 0), nodes[0].name
    own_bytes = _objects(graph, layout, lives, outside.values())
    under_way: dict[fx.Node, Bytes] = {}  # workspaces of operators that have not ended
    starts = {start for node in nodes if (start := started_by(node)) is not None}
    for at, node in enumerate(nodes):
        total += change[at]
        if node.op != "call_function":
            continue
        if total > layout.peak_bytes:
            raise VerifyError(_too_low(total, node.name, layout.peak_bytes))
        own = workspace_bytes(node, graph.threads)
        step_bytes = total + own + sum(under_way.values())
        if node in starts:
            under_way[node] = own
        elif (ended := started_by(node)) is not None:
            del under_way[ended]
        step_bytes += objects(step_bytes, own_bytes[at])
        needed, where = max((needed, where), (step_bytes, node.name), key=operator.itemgetter(0))
    needed += _waiting(graph, lives)
    if needed > layout.needed_bytes:
        raise VerifyError(_too_low(needed, where, layout.needed_bytes))


def _objects(
    graph: TrainGraph, layout: Layout, lives: dict[str, Life], outside: Iterable[tuple[int, int]]
) -> list[Bytes]:
    """Count the bytes of tensor objects at every position of the node list.

    One object for each storage of the step, and one for each view that a name of the program holds. Of what lies in the
    arena, the program has all views from the start.
    """
    nodes, shared = list(graph.graph.nodes), SharedStorages(graph)
    change = [0] * (len(nodes) + 1)
    for born, dead in [*(lives[name][:2] for name in layout.offset), *outside]:
        change[born] += OBJECT
        change[max(born, dead)] -= OBJECT
    planned = {shared.of(_made(nodes[lives[name][0]], name)[1]) for name in layout.offset}
    makers = {nodes[born] for born, _, _ in lives.values()}
    last = {node: at for at, node in enumerate(nodes)}
    for at, node in enumerate(nodes):
        for reader in (node, started_by(node)):
            last |= dict.fromkeys(reader.all_input_nodes if reader is not None else (), at)
    for node in reversed(nodes):
        if node.op == "call_function" and node not in makers and not ops.is_view(node.target):
            for argument in node.all_input_nodes:
                if shared.of_all([argument]) & shared.of_all([node]):  # written over: its object is the result's
                    last[argument] = max(last[argument], last[node])
    for at, node in enumerate(nodes):
        view = node.op == "call_function" and ops.is_view(node.target) and started_by(node) is None
        if not view or node in makers or node.target is operator.getitem:
            continue
        picks: dict[object, list[fx.Node]] = {}
        for user in node.users:
            if user.target is operator.getitem:
                picks.setdefault(user.args[1], []).append(user)
        for position, tensor, own in placed(node):
            if shared.of(own) not in planned:
                change[at] += view_bytes(tensor)
                change[1 + max(last[name] for name in picks.get(position, [node]))] -= view_bytes(tensor)
    return list(itertools.accumulate(change[:-1]))


def _waiting(graph: TrainGraph, lives: dict[str, Life]) -> Bytes:
    """The bytes that others in flight hold.

    A micro-batch holds what forward makes, or the batch brings, and a later operator reads. A call holds what forward
    makes and a later operator or the caller reads. Of several calls all but the last may wait; or one less, while
    autograd holds a second set of what backward hands out.

    Raises:
        VerifyError: calls share the arena, and what one has saved lies there.
    """
    if graph.in_flight == 1:
        return 0
    nodes, shared = list(graph.graph.nodes), SharedStorages(graph)
    late = [node for node in nodes if _is_late(graph, node)]
    read = {shared.of(storage) for node in late for source in node.all_input_nodes for *_, storage in placed(source)}
    handed = shared.of_all(output_values(graph.graph))
    saved = kept = gradients = 0
    for name, (born, _, nbytes) in lives.items():
        node = nodes[born]
        if node.op != "call_function" or ops.rule(node.target).space is not Space.DEVICE:
            continue
        own = shared.of(_made(node, name)[1])
        if _is_late(graph, node):
            gradients += nbytes * (own in handed)
            continue
        if graph.calls and own in read and graph.layout is not None and name in graph.layout.offset:
            raise VerifyError(f"after pass 'layout': {name} is saved by one of several calls that share the arena")
        saved += nbytes * (own in read)
        kept += nbytes * (own in read or own in handed)
    if graph.calls:
        return max((graph.in_flight - 1) * kept, (graph.in_flight - 2) * kept + gradients)
    fed = zip(placeholders(graph.graph), graph.inputs, strict=True)
    batch = [(shared.of(own), port) for node, port in fed if port.role is Role.INPUT for *_, own in placed(node)]
    held = {port.memory or own for own, port in batch if own in read}
    return (graph.in_flight - 1) * (saved + sum(own.nbytes for own in held))


def _too_low(nbytes: Bytes, where: str, claimed_bytes: Bytes) -> str:
    return f"after pass 'layout': {nbytes} bytes at {where}, above the {claimed_bytes} that the layout says"


def _outside_lives(graph: TrainGraph, layout: Layout, lives: dict[str, Life]) -> dict[str, tuple[int, int]]:
    """Return name to (born, dead) of storages that the step makes or is given as tangents, outside the arena."""
    nodes, shared = list(graph.graph.nodes), SharedStorages(graph)
    handed = shared.of_all(output_values(graph.graph))
    backward = next((i for i, node in enumerate(nodes) if _is_late(graph, node)), len(nodes))
    fed = {node: port.role for node, port in zip(placeholders(graph.graph), graph.inputs, strict=True)}
    outside_lives = {}
    for name, (born, dead, _) in lives.items():
        node = nodes[born]
        if name in layout.offset or (node.op != "call_function" and fed.get(node) is not Role.TANGENT):
            continue
        if node.op == "call_function" and ops.rule(node.target).space is not Space.DEVICE:
            continue
        end = len(nodes) if shared.of(_made(node, name)[1]) in handed else dead
        outside_lives[name] = (born if node.op == "call_function" else backward, end)
    return outside_lives


def _is_late(graph: TrainGraph, node: fx.Node) -> bool:
    """Whether ``node`` is an operator, and no view, behind forward."""
    if node.op != "call_function" or ops.is_view(node.target):
        return False
    return graph.phase[node.name] is not Phase.FORWARD
