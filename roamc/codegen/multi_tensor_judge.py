"""The judge of a kernel that works on several tensors: each is judged as a kernel of its own, beside the others.

programs    0    1    2    |    3    |    4    5
            first ... last                          all of a tensor's programs are on one side of every border
                                                    what they load and store is that tensor's, and no other's
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from roamc.codegen.group_needs import extent_of, is_number, members_of, shape_of, tensor_of
from roamc.codegen.group_verdicts import GroupFault, Place, Verdict
from roamc.codegen.kernel_judge import KernelRun, judge_runs
from roamc.codegen.triton_stand_in import Language, Pointer
from roamc.graph import output_node, placeholders, tensors_of
from roamc.operators.gpu.multi_tensor import MultiTensorText

PROGRAMS = 2
"""Programs of a tensor that run, at most: the first and the last."""


def judge_multi_tensor(body: fx.Graph, text: MultiTensorText, places: Sequence[Place], writes: Sequence[int]) -> None:
    """Check the source of a kernel that works on several tensors.

    Of tensors for which the operators differ in names alone one is judged as a kernel of its own. For the others the
    lines in front of the first load must give the same elements and the same operands, counted in their own order.

    Args:
        body: the operators of all groups, with fake values.
        text: the kernel.
        places: where the arguments lie, one entry for each.
        writes: positions of the arguments that the results of ``body`` are written to.

    Raises:
        GroupFault: the kernel does something else than the operators.
    """
    parts = _parts(body, text, writes)
    _check_apart(parts, places)
    first: dict[Hashable, _Part] = {}
    for part in parts:
        first.setdefault(part.structure, part)
    judge_runs(_run(part, text, places) for part in first.values())
    head = _Head(text)
    first_values = {structure: (part, head.values(part)) for structure, part in first.items()}
    for part in parts:
        if part is not first[part.structure]:
            _check_same(part, head.values(part), *first_values[part.structure])


@dataclass(frozen=True)
class _Part:
    """The operators of one tensor.

    Attributes:
        body: a graph of their own.
        whole: each argument of all groups to its placeholder in ``body``; to itself if these operators do not read it.
        writes: positions in ``body`` of the arguments that its results are written to.
        first: number of the first program.
        count: number of programs.
    """

    body: fx.Graph
    whole: dict[fx.Node, fx.Node]
    writes: tuple[int, ...]
    first: int
    count: int

    @functools.cached_property
    def inputs(self) -> dict[fx.Node, int]:
        """Each placeholder of ``body`` to its position there."""
        return {node: at for at, node in enumerate(placeholders(self.body))}

    @functools.cached_property
    def positions(self) -> list[int]:
        """For each placeholder of ``body`` the position of that argument in the kernel."""
        position = {inner: at for at, inner in enumerate(self.whole.values())}
        return [position[node] for node in self.inputs]

    @functools.cached_property
    def structure(self) -> Hashable:
        """All that the operators' kernel depends on, names apart."""
        number = {node: f"%{at}" for at, node in enumerate(self.body.nodes)}
        lines = [self.writes, self.count]
        for node in self.body.nodes:
            call = (node.op, node.target if node.op == "call_function" else "")
            read = repr(fx.map_arg((node.args, node.kwargs), number.__getitem__))
            lies = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for _, t in tensors_of(node)]
            lines.append((call, read, *lies))
        return tuple(lines)


def _parts(body: fx.Graph, text: MultiTensorText, writes: Sequence[int]) -> list[_Part]:
    members = {node.name: node for node in members_of(body)}
    named = [name for names in text.members for name in names]
    if sorted(named) != sorted(members):
        raise GroupFault(Verdict.MISSING, f"{len(named)} operators run on some tensor, of {len(members)}")
    inputs, results = placeholders(body), output_node(body).all_input_nodes
    over = dict(zip(results, (inputs[at] for at in writes), strict=True))
    parts, first = list[_Part](), 0
    for names in text.members:
        elements = math.prod(shape_of(members[names[-1]]))
        parts.append(
            _part(body, {members[name] for name in names}, over, first, -(-elements // text.constants["BLOCK"]))
        )
        first += parts[-1].count
    if text.programs != first:
        raise GroupFault(Verdict.MISSING, f"{text.programs} programs are launched, and not {first}")
    return parts


def _part(body: fx.Graph, members: set[fx.Node], over: dict[fx.Node, fx.Node], first: int, count: int) -> _Part:
    mine, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    in_order = [node for node in body.nodes if node in members]
    for argument in dict.fromkeys(argument for node in in_order for argument in node.all_input_nodes):
        if argument.op == "placeholder":  # in the order in which they are read, whichever tensors come before
            copies[argument] = mine.placeholder(argument.name)
            copies[argument].meta = argument.meta
    for node in in_order:
        copies[node] = mine.node_copy(node, lambda argument, of=node: _held(copies, argument, of))  # type: ignore[misc]
        copies[node].name = node.name
    results = [node for node in over if node in members]
    mine.output(tuple(copies[node] for node in results))
    inputs = placeholders(mine)
    writes = tuple(inputs.index(_held(copies, over[node], node)) for node in results)
    return _Part(mine, {node: copies.get(node, node) for node in placeholders(body)}, writes, first, count)


def _held(copies: dict[fx.Node, fx.Node], argument: fx.Node, reader: fx.Node) -> fx.Node:
    if argument not in copies:
        raise GroupFault(Verdict.VALUE, f"{argument.name} belongs to another tensor", reader.name)
    return copies[argument]


def _check_apart(parts: Sequence[_Part], places: Sequence[Place]) -> None:
    """Check that no argument overlaps one that is written, and that what one tensor's operators write is their own."""
    nodes = {at: node for part in parts for at, node in zip(part.positions, part.inputs, strict=True)}
    ends = {
        at: places[at].start + extent_of(tensor_of(node)) * tensor_of(node).itemsize
        for at, node in nodes.items()
        if not is_number(node)
    }
    for part in parts:
        for position in (part.positions[at] for at in part.writes):
            if any(position in other.positions for other in parts if other is not part):
                raise GroupFault(
                    Verdict.OVERWRITTEN, f"two tensors' operators use argument {position}, which is written"
                )
            low, high = places[position].start, ends[position]
            for at, end in ends.items():
                same = at != position and places[at].memory == places[position].memory
                if same and places[at].start < high and low < end:
                    raise GroupFault(Verdict.OVERWRITTEN, f"{nodes[position].name} is written over {nodes[at].name}")


def _run(part: _Part, text: MultiTensorText, places: Sequence[Place]) -> Callable[[float], KernelRun]:
    """Return the function that makes the run of one part, given the smallest number in memory."""
    alone, lies = dataclasses.replace(text, programs=part.count), [places[at] for at in part.positions]
    lanes = PROGRAMS * text.constants["BLOCK"]
    return functools.partial(_Run, part.body, alone, lies, (), part.writes, lanes=lanes, part=part)


@dataclass(eq=False)
class _Run(KernelRun):
    """Runs the programs of one tensor; the kernel is given pointers to the others as well.

    Attributes:
        part: the operators of the tensor.
    """

    part: _Part = dataclasses.field(kw_only=True)

    def arguments(self) -> Sequence[fx.Node]:
        """Return the placeholders of the part, and those of all groups that the part does not read."""
        return list(self.part.whole.values())

    def number_of(self, node: fx.Node) -> int:
        """Return the position of an argument among those of the kernel."""
        return self.arguments().index(node)

    def program_id(self, axis: int) -> Any:
        """Return the numbers of the programs that run."""
        return _Programs(super().program_id(axis) + self.part.first)


@dataclass(frozen=True)
class _Programs:
    """The numbers of programs that work on one tensor, int32[programs, 1]."""

    numbers: Tensor

    @functools.cached_property
    def ends(self) -> tuple[int, int]:
        """The smallest and the largest number."""
        return int(self.numbers.min()), int(self.numbers.max())

    def __ge__(self, border: int) -> bool:
        """Whether the programs are at or behind a border between two tensors; all or none must be."""
        low, high = self.ends
        if low < border <= high:
            raise GroupFault(Verdict.ELEMENTS, f"programs on both sides of {border} work on one tensor")
        return low >= border

    def __sub__(self, first: int) -> Tensor:
        """The numbers, counted from ``first``."""
        return torch.sub(self.numbers, first)


# -- tensors for which the operators differ in names alone --------------------------------------------------------


class _Head:
    """The lines of a kernel in front of its first load or store, and what the others use of these lines."""

    def __init__(self, text: MultiTensorText) -> None:
        (function,) = (node for node in ast.parse(text.source).body if isinstance(node, ast.FunctionDef))
        touches = (at for at, line in enumerate(function.body) if "tl.load(" in ast.unparse(line))
        end = next(touches, len(function.body))
        tail = ast.Module(function.body[end:], [])
        self.used = sorted({node.id for node in ast.walk(tail) if isinstance(node, ast.Name)})
        function.body = [*function.body[:end], *ast.parse("return locals()").body]
        function.decorator_list = []
        self._code = compile(ast.fix_missing_locations(ast.Module([function], [])), "<judged>", "exec")
        self.text = text

    def values(self, part: _Part) -> dict[str, Any]:
        """Return the variables that the other lines use, at the first and the last program of ``part``."""
        numbers = torch.tensor([[part.first], [part.first + part.count - 1]], dtype=torch.int32, device="cpu")
        names: dict[str, Any] = {"tl": Language(_Borders(numbers))}
        exec(self._code, names)
        start = torch.zeros((), dtype=torch.int32, device="cpu")
        pointers = [Pointer(node, start) for node in part.whole.values()]
        variables = names[self.text.function](*pointers, **self.text.constants)
        return {name: variables[name] for name in self.used if name in variables}


class _Borders:
    """Gives the lines of a head the numbers of their programs. There is nothing to load or to store yet."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def program_id(self, axis: int) -> Any:
        """Return the numbers of the programs."""
        if axis != 0:
            raise GroupFault(Verdict.TWICE, f"programs are counted along axis {axis}, where there is one")
        return _Programs(self.numbers)

    def load(self, pointer: Pointer, mask: Tensor | None = None, other: float = 0) -> Tensor:
        """Refuse to load."""
        raise GroupFault(Verdict.UNKNOWN, "the head of a kernel loads")

    def store(self, pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
        """Refuse to store."""
        raise GroupFault(Verdict.UNKNOWN, "the head of a kernel stores")


def _check_same(part: _Part, have: Mapping[str, Any], judged: _Part, want: Mapping[str, Any]) -> None:
    """Check that what the operators of ``part`` are given is what those of ``judged`` are, each in its own order."""
    for name, value in want.items():
        mine = have.get(name)
        if isinstance(value, Pointer) and isinstance(mine, Pointer):
            if _position(mine, part) != _position(value, judged):
                raise GroupFault(Verdict.VALUE, f"{mine.node} is used as {name}", members_of(part.body)[-1].name)
        elif isinstance(value, Tensor) and isinstance(mine, Tensor):
            if not torch.equal(mine, value):
                raise GroupFault(Verdict.ELEMENTS, f"{name} has other numbers", members_of(part.body)[-1].name)
        elif type(mine) is not type(value) or mine != value:
            raise GroupFault(Verdict.ELEMENTS, f"{name} is {mine}, and not {value}", members_of(part.body)[-1].name)


def _position(pointer: Pointer, part: _Part) -> tuple[object, ...]:
    """Which of the part's arguments a pointer is to, and where; an argument of another tensor has no position."""
    assert pointer.node is not None, "a head is given operands alone"
    return part.inputs.get(pointer.node, pointer.node), pointer.places.tolist()
