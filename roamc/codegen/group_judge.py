"""The judge of groups: what runs for several operators reads and writes the elements that the operators do.

It runs wherever a program is checked, and shares no code with what decides how groups run and prints them.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from roamc.codegen.block_judge import judge_blocks
from roamc.codegen.group_needs import is_number, members_of, result_of, tensor_of
from roamc.codegen.group_verdicts import GroupFault, Place, Verdict
from roamc.codegen.kernel_judge import judge_kernel
from roamc.codegen.launch_judge import judge_launch
from roamc.codegen.multi_tensor_judge import judge_multi_tensor
from roamc.errors import VerifyError, way_out
from roamc.graph import TrainGraph, output_node, placeholders, storage_name, tensors_of
from roamc.graph.memory import SharedStorages
from roamc.graph.storage_ids import StorageId
from roamc.graph.storage_ids import placed as placed_of
from roamc.operators import ops
from roamc.operators.block_source import Text
from roamc.operators.fused import Fused
from roamc.operators.gpu.kernel import KernelText
from roamc.operators.gpu.multi_tensor import MultiTensorText
from roamc.units import Bytes

PARTS = 3
"""Into so many blocks a group is divided for a second look, since other numbers of threads have other blocks."""


def check_groups(graph: TrainGraph) -> None:
    """Check the program of every group of ``graph``, on the memory that the layout gives to operands and results.

    Groups that differ in names alone, as those of the layers of a model, are judged once.

    Args:
        graph: the planned graph.

    Raises:
        VerifyError: a group runs in another way than its operators; names the group, the operator and the fault.
    """
    groups = [node for node in graph.graph.nodes if isinstance(node.target, Fused)]
    if not groups:
        return
    memory = _Memory(graph)
    good: set[Key] = set()
    for node in groups:
        group: Any = node.target
        arguments = [argument for argument in node.args if isinstance(argument, fx.Node)]
        values = [tensor for _, tensor in tensors_of(node)]
        wrong = _misfit(arguments, values, group)
        if wrong:
            raise VerifyError(f"group {group.name}: {wrong}; {way_out('fuse')}")
        places = memory.places(arguments, group)
        outs = memory.results(node)
        key = key_of(group, graph.threads, places, outs)
        if key not in good:
            check_group(group, graph.threads, places, outs)
            good.add(key)


def _misfit(arguments: Sequence[fx.Node], values: Sequence[torch.Tensor], group: Fused) -> str:
    """Say which argument of a call of ``group``, or result, has another shape or dtype; "" if none has."""
    inputs, results = placeholders(group.body), output_node(group.body).all_input_nodes
    over = [inputs[at] for at in group.writes]
    results, last = results[: len(results) - len(over)], results[len(results) - len(over) :]
    if group.rule.mutates != group.writes:
        return f"{Verdict.PLACE.value}: its rule says that it writes arguments {group.rule.mutates}, not {group.writes}"
    for node, inner in zip(last, over, strict=True):
        if _geometry(tensor_of(node)) != _geometry(tensor_of(inner)) or tensor_of(node).dtype != tensor_of(inner).dtype:
            return f"{Verdict.PLACE.value}: {node.name} is written over {inner.name}, which lies otherwise"
    if (len(arguments), len(values)) != (len(inputs), len(results)):
        return (
            f"{Verdict.ARGUMENT.value}: {len(arguments)} for {len(inputs)}, and {len(values)} of {len(results)} results"
        )
    operands = [argument.meta.get("val") for argument in arguments]
    for node, tensor, inner in zip((*arguments, *results), (*operands, *values), (*inputs, *results), strict=True):
        expected = inner.meta.get("val")
        if isinstance(tensor, float) and isinstance(expected, float):
            continue
        if not isinstance(tensor, torch.Tensor) or not isinstance(expected, torch.Tensor):
            return f"{Verdict.UNKNOWN.value}: {node.name} is no tensor"
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            detail = f"{tensor.dtype} of {tuple(tensor.shape)}, and not {expected.dtype} of {tuple(expected.shape)}"
            return f"{Verdict.SHAPE.value}: {node.name} is {detail}"
    for tensor, node in zip(values, results, strict=True):
        if _geometry(tensor) != _geometry(tensor_of(node)):
            return f"{Verdict.PLACE.value}: in memory {node.name} has other strides than in the group"
    return ""


def check_group(
    group: Fused, threads: int, places: Sequence[Place] | None = None, outs: Sequence[Place] | None = None
) -> None:
    """Check the program of one group.

    Args:
        group: the group.
        threads: torch's number of threads.
        places: where the arguments lie; None if each has memory of its own.
        outs: where the results lie; None if each has memory of its own.

    Raises:
        VerifyError: the group runs in another way than its operators; names the group, the operator and the fault.
    """
    argument_places = places if places is not None else [Place(at) for at, _ in enumerate(placeholders(group.body))]
    try:
        _judge(group, threads, argument_places, outs if outs is not None else [Place(node) for node in group.results])
    except GroupFault as fault:
        raise VerifyError(f"group {group.name}, {fault}; {way_out('fuse')}") from fault


def _judge(group: Fused, threads: int, places: Sequence[Place], outs: Sequence[Place]) -> None:
    text: object = group.text
    if isinstance(text, MultiTensorText):
        judge_multi_tensor(group.body, text, places, group.writes)
    elif isinstance(text, KernelText):
        judge_kernel(group.body, text, places, outs, group.writes)
    if isinstance(text, KernelText):
        judge_launch(_printed(group), text)
        return
    out = next(iter(outs), None)
    rows = result_of(members_of(group.body)[-1]).rows
    planned = group.block_rows(threads)
    if planned < 1 or (rows > 1 and 1 in (planned, rows % planned)):
        raise GroupFault(Verdict.LONE_ROW, f"{rows} rows are in blocks of {planned}")
    for length in dict.fromkeys((planned, max(2, -(-rows // PARTS)))):
        judge_blocks(group.body, group.text, length, places, out, group.writes)


def _printed(group: Any) -> KernelText:
    """The kernel of a group as it is printed, whatever shape it is launched in."""
    printed: KernelText = group.printed
    return printed


# -- where operands and results lie -------------------------------------------------------------------------------


class _Memory:
    """The memory of a graph's tensors, as its layout and in-place reuse have it."""

    def __init__(self, graph: TrainGraph) -> None:
        self._shared = SharedStorages(graph)
        self._offset: dict[StorageId, Bytes] = {}
        placed = graph.layout.offset if graph.layout is not None else {}
        named: set[StorageId] = set()
        for node in graph.graph.nodes:
            for position, _, own in placed_of(node):
                storage, name = self._shared.of(own), storage_name(node, position)
                if storage not in named and name in placed:
                    self._offset[storage] = placed[name]
                named.add(storage)

    def results(self, node: fx.Node) -> list[Place]:
        """Return where the results of ``node`` lie: in the arena, or in storages of their own."""
        return [self._place(tensor, self._shared.of(storage)) for _, tensor, storage in placed_of(node)]

    def _place(self, tensor: torch.Tensor, storage: StorageId) -> Place:
        inside = int(tensor.storage_offset()) * tensor.itemsize
        if storage in self._offset:
            return Place("arena", self._offset[storage] + inside)
        return Place(storage, inside)

    def places(self, arguments: Sequence[fx.Node], group: Fused) -> list[Place]:
        """Return where the arguments of a group lie; one that is copied first has memory of its own."""
        places = []
        for argument, expected in zip(arguments, placeholders(group.body), strict=True):
            if is_number(expected):
                places.append(Place(("number", argument)))
                continue
            same = _geometry(tensor_of(argument)) == _geometry(tensor_of(expected))
            places += self.results(argument) if same else [Place(("copy of", argument))]
        return places


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    """Shape and strides, but for those of dimensions of one element."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    return shape, tuple(step for size, step in zip(shape, strides, strict=True) if size > 1)


# -- groups that differ in names alone ------------------------------------------------------------------------------


Key = tuple[Hashable, ...]
"""All that the judgement of a group depends on, without the names of its nodes."""


def key_of(group: Fused, threads: int, places: Sequence[Place], outs: Sequence[Place]) -> Key:
    """Return what the judgement of a group depends on, without names: groups with equal keys need one judgement.

    Args:
        group: the group.
        threads: torch's number of threads.
        places: where the arguments lie, one entry for each.
        outs: where the results lie, one entry for each.
    """
    number = {node: f"%{at}" for at, node in enumerate(group.body.nodes)}
    seeds = {node.args[0] for node in members_of(group.body) if ops.rule(node.target).numbered}
    nodes = tuple(
        (
            "input" if node.op == "placeholder" else node.target,
            repr(fx.map_arg((node.args, node.kwargs), number.__getitem__)),
            *((tensor.shape, tensor.stride(), tensor.dtype) for _, tensor in tensors_of(node)),
            # Where a seed begins among the others makes no difference.
            *(tensor.storage_offset() for _, tensor in tensors_of(node) if node not in seeds),
        )
        for node in group.body.nodes
    )
    text: Any = group.text
    constants = tuple((name, type(value), repr(value)) for name, value in text.constants.items())
    counted = text.bytes_per_row if isinstance(text, Text) else (text.programs, text.warps, text.partials, text.tables)
    by_name = {node.name: at for at, node in enumerate(group.body.nodes)}
    several = text.members if isinstance(text, MultiTensorText) else ()
    parts = tuple(tuple(by_name.get(name, -1) for name in names) for names in several)
    over = [places[at] for at in group.writes]
    related = (group.writes, *(_related(place, out) for place in (*places, *outs) for out in (*outs, *over)))
    return (
        nodes,
        related,
        _without_names(text.source, text.constants),
        constants,
        counted,
        parts,
        group.block_rows(threads),
    )


def _related(place: Place, out: Place) -> Bytes | None:
    """How far an argument lies from a result in the same memory; None in other memory."""
    return place.start - out.start if place.memory == out.memory else None


NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*\b(?!=[^=])")
"""A name in a source, but for those of attributes and of keyword arguments."""

KNOWN = frozenset({*dir(builtins), *keyword.kwlist, "torch", "tl", "triton"})


def _without_names(source: str, constants: Collection[str]) -> str:
    """Return a source without comments, and with numbers for the names that it chooses itself."""
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        name = match[0]
        return name if name in KNOWN or name in constants else numbers.setdefault(name, f"${len(numbers)}")

    return NAME.sub(number, re.sub(r"  # .*", "", source))
