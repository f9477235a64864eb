"""One Triton kernel for groups of equal form on several tensors, such as the updates of a model's biases and norms.

    programs    0    1    2    |    3    |    4    5        a program works on BLOCK elements of one tensor
    tensor      0              |    1    |    2

    @triton.jit
    def fused_add__2(arg0_1, sum_3, arg1_1, sum_2, scale, BLOCK: tl.constexpr):
        program = tl.program_id(0)
        first, numel = 0, 2304
        operand_0, operand_1 = arg0_1, sum_3
        if program >= 3:
            first, numel = 3, 768
            operand_0, operand_1 = arg1_1, sum_2
        index = (program - first) * BLOCK + tl.arange(0, BLOCK)
        inside = index < numel
        operand_0_value = tl.load(operand_0 + index, inside, 0)
        ...

Where a tensor is small its kernel takes less time than its launch: one launch for all of them saves the others.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from roamc.graph import placeholders
from roamc.graph.storage_ids import STORAGES, all_ids
from roamc.operators import ops
from roamc.operators.blocks import Matrix
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kernel import BLOCK, RESERVED, KernelText, element_lines, head_of
from roamc.operators.gpu.launch_shapes import LaunchShape, shape_of
from roamc.operators.gpu.operands import is_number, needs_rows

MOST_TENSORS = 32
"""Tensors of one kernel at most. Each program goes through the borders of all of them."""

MOST_ARGUMENTS = 448
"""Arguments of one kernel at most: a launch passes up to 4 KiB of them, of 8 bytes each, and Triton adds some."""


@dataclass(frozen=True)
class MultiTensorText(KernelText):
    """A kernel for groups on several tensors, as text.

    Attributes:
        members: for each tensor, in the order of the programs, the names of the operators that run on it.
    """

    members: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Part:
    """One group of several that share a launch.

    Attributes:
        numel: elements of each of its tensors.
        arguments: for each argument of the group alone, its position among those of the kernel.
        members: names of its operators.
    """

    numel: int
    arguments: tuple[int, ...]
    members: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class MultiTensorKernel(FusedKernel):
    """Groups of equal form that run as one Triton kernel. Each writes arguments; there are no other results.

    Attributes:
        form: the largest of the groups; the others differ from it in sizes and names alone.
        parts: the groups, in the order of the programs.
    """

    form: FusedKernel
    parts: tuple[Part, ...]

    @functools.cached_property
    def title(self) -> str:  # type: ignore[override]
        """The names of one group's operators, and the number of groups: ``fused(mul.Tensor, add.Tensor) x 12``."""
        return f"{self.form.title} x {len(self.parts)}"

    @functools.cached_property
    def printed(self) -> KernelText:
        """The kernel as text; printed when it is first asked for."""
        return _text(f"fused_{self.name}", self)

    @functools.cached_property
    def shapes(self) -> tuple[LaunchShape, ...]:
        """The one shape of its launches: borders between tensors are counted in blocks."""
        return (shape_of(self.printed),)


Group = tuple[FusedKernel, Sequence[fx.Node]]
"""A group, and the nodes of the outer graph that it reads, in the order of its arguments."""


def form_of(group: FusedKernel) -> Hashable | None:
    """Return what groups that share a kernel have in common; None if ``group`` shares none.

    It must only write arguments, element by element, and all its tensors must lie in the order of their elements, or
    have one.
    """
    if group.results or not group.writes:
        return None
    number = {node: f"%{at}" for at, node in enumerate(group.body.nodes)}
    lines: list[Hashable] = [group.writes]
    for node in group.body.nodes:
        if node.op == "output":
            lines.append(tuple(number[read] for read in node.all_input_nodes))
            continue
        if is_number(node):
            lines.append("number")
            continue
        called = node.op == "call_function"
        value = node.meta.get("val")
        reach = _reach(value, group.matrix.numel) if isinstance(value, torch.Tensor) else ""
        if not reach or (called and (ops.is_view(node.target) or reach != "all" or needs_rows(node))):
            return None
        call = (node.target, repr(fx.map_arg((node.args, node.kwargs), number.__getitem__))) if called else ()
        lines.append((reach, value.dtype, str(value.device), *call))
    return tuple(lines)


def _reach(tensor: torch.Tensor, numel: int) -> str:
    """Whether ``tensor`` has an element for ``all`` of a group's elements, in order, or ``one``; "" for neither.

    A tensor without dimensions has one, also where the group has one element, as one of the other groups may have more.
    """
    if tensor.dim() and tensor.numel() == numel and tensor.is_contiguous():
        return "all"
    return "one" if tensor.numel() == 1 else ""


def unfit(groups: Sequence[Group]) -> str:
    """Say why groups cannot share a kernel; "" if they can."""
    forms = {form_of(group) for group, _ in groups}
    if len(forms) != 1 or None in forms:
        return "they are not of one form"
    if not 1 < len(groups) <= MOST_TENSORS:
        return f"they are {len(groups)}, and not 2 to {MOST_TENSORS}"
    if len({node for _, read in groups for node in read}) > MOST_ARGUMENTS:
        return f"they have more than {MOST_ARGUMENTS} arguments"
    read = [set(all_ids(nodes)) for _, nodes in groups]
    for at, (group, nodes) in enumerate(groups):
        written = set(all_ids(nodes[position] for position in group.writes))
        if any(not written.isdisjoint(ids) for other, ids in enumerate(read) if other != at):
            return f"what {group.name} writes another of them reads or writes"
    return ""


def join(groups: Sequence[Group]) -> tuple[MultiTensorKernel, list[fx.Node]]:
    """Make one kernel of groups that :func:`unfit` has nothing against.

    Returns:
        The kernel, which has the name of the last group, and the nodes of the graph that it reads, in the order of its
        arguments.
    """
    body = fx.Graph()
    arguments: dict[fx.Node, int] = {}
    for group, read in groups:
        for node, inner in zip(read, placeholders(group.body), strict=True):
            if node not in arguments:
                arguments[node] = len(arguments)
                body.placeholder(node.name).meta = {
                    key: inner.meta[key] for key in ("val", STORAGES) if key in inner.meta
                }
    inputs = placeholders(body)
    parts, written = [], dict[int, fx.Node]()
    for group, read in groups:
        places = tuple(arguments[node] for node in read)
        copies = dict(zip(placeholders(group.body), (inputs[at] for at in places), strict=True))
        for node in group.nodes:
            copies[node] = body.node_copy(node, copies.__getitem__)
            copies[node].name = node.name
        written.update(
            (places[at], copies[result]) for at, result in zip(group.writes, group.written.values(), strict=True)
        )
        parts.append(Part(group.matrix.numel, places, tuple(node.name for node in group.nodes)))
    body.output(tuple(written.values()))
    form = max((group for group, _ in groups), key=lambda group: group.matrix.numel)
    stands_for = tuple(name for group, _ in groups for name in group.stands_for)
    matrix = Matrix(sum(part.numel for part in parts), 1)
    name = groups[-1][0].name
    kernel = MultiTensorKernel(name, body, matrix, tuple(written), stands_for, form=form, parts=tuple(parts))
    return kernel, list(arguments)


# -- the text -----------------------------------------------------------------------------------------------------


def _text(name: str, kernel: MultiTensorKernel) -> MultiTensorText:
    form, taken = kernel.form, {*RESERVED, *keyword.kwlist, "program", "first", "numel"}
    arguments = [_free(node.name, taken) for node in placeholders(kernel.body)]
    several = [
        at
        for at, places in enumerate(zip(*(part.arguments for part in kernel.parts), strict=True))
        if len(set(places)) > 1
    ]
    operands = {
        at: _free(_operand(at, [arguments[part.arguments[at]] for part in kernel.parts]), taken) for at in several
    }
    pointers = {
        node: operands.get(at, arguments[kernel.parts[0].arguments[at]])
        for at, node in enumerate(placeholders(form.body))
    }
    lines, wide = element_lines(form.body, form.matrix, form.written, pointers, taken)
    head, programs = ["program = tl.program_id(0)"], 0
    for number, part in enumerate(kernel.parts):
        chosen = ", ".join(arguments[part.arguments[at]] for at in several)
        selected = [f"first, numel = {programs}, {part.numel}", f"{', '.join(operands.values())} = {chosen}"]
        head += [f"if program >= {programs}:", *(f"    {line}" for line in selected)] if number else selected
        programs += -(-part.numel // BLOCK)
    head += [f"index = (program - first){wide} * BLOCK + tl.arange(0, BLOCK)", "inside = index < numel"]
    source = head_of(name, dict(zip(placeholders(kernel.body), arguments, strict=True)), (), ("BLOCK",))
    source += "".join(f"    {line}\n" for line in [*head, *lines])
    members = tuple(part.members for part in kernel.parts)
    return MultiTensorText(source, name, {"BLOCK": BLOCK}, programs, 4, 1, members=members)


def _operand(position: int, names: Sequence[str]) -> str:
    """A name for the argument at ``position`` of every group: the words in which ``names`` end, all of them."""
    words = [name.split("_") for name in names]
    common = 0
    while all(len(one) > common + 1 and one[-1 - common] == words[0][-1 - common] for one in words):
        common += 1
    name = "_".join(words[0][len(words[0]) - common :])
    return name if name.isidentifier() else f"operand_{position}"


def _free(name: str, taken: set[str]) -> str:
    """Return ``name``, or ``name`` and a number if it is taken; what is returned is taken from now on."""
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free
