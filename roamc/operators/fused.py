"""A group of operators as one: what a node calls that stands for several.

    before                                   after
    mul_50        = mul(grad, up)            silu_backward = fused(grad, up, gate)
    silu_backward = silu_backward(mul_50, gate)

Values inside a group have no storage: on a CPU a group runs as ATen's own ``out=`` kernels over blocks of rows, with
the values inside in memory for one block, so that every element has the bits that the operators give one after the
other. No compiler is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from roamc.compat import fake_mode_of
from roamc.graph import placeholders, source_line, tensors_of
from roamc.graph.storage_ids import STORAGES
from roamc.operators import blocks, in_place, ops
from roamc.operators.block_source import Text, text_of
from roamc.operators.blocks import Matrix
from roamc.operators.composite import Composite
from roamc.operators.costs.cost import Cost
from roamc.operators.costs.kinds import FUSED
from roamc.operators.kernels import CPU_ONLY, Kernel
from roamc.operators.ops import OpRule
from roamc.operators.schemas import name_of
from roamc.operators.table import Rowwise
from roamc.units import Bytes

Ints = tuple[int, ...]

REBUILDS = "roamc_rebuilds"
"""Key in the ``meta`` of a member that makes once more, inside a group, what an operator outside has made: its name."""


@dataclass(frozen=True)
class Member:
    """One operator of a group.

    Attributes:
        name: of its node in the graph that was captured.
        operator: qualified name of what it calls.
        line: the user's line that it comes from, as ``file.py:line``; "" if that is not known.
    """

    name: str
    operator: str
    line: str


@dataclass(frozen=True, eq=False)
class Fused(Composite):
    """A group of operators: the target of a node whose arguments are what the group reads.

    Attributes:
        name: name of the operator, a member of the group, that runs last.
        body: an FX graph. Placeholders in the order of the arguments; ``call_function`` nodes with fake results, views
            included; an output node with the result, or with a tuple of several. None of its operators writes an
            argument: see :mod:`roamc.operators.in_place`.
        matrix: the rows and columns that all tensors of the group are seen as.
        writes: positions of the arguments that the group writes; the last results of the body are written to them.
        stands_for: names of the members that are operators in place, such as ``mul_``, in the captured graph.
        in_blocks: values inside lie in memory, for one block; else in registers.
        several: a group may have several results.
    """

    name: str
    body: fx.Graph = field(repr=False)
    matrix: Matrix
    writes: tuple[int, ...] = ()
    stands_for: tuple[str, ...] = ()

    in_blocks: ClassVar[bool] = True
    """Whether values inside lie in memory, for one block; else in registers."""

    several: ClassVar[bool] = False
    """Whether a group may have several results."""

    def __post_init__(self) -> None:
        """Give the object the name that FX prints."""
        object.__setattr__(self, "__name__", f"fused_{self.name}")

    @functools.cached_property
    def members(self) -> tuple[Member, ...]:
        """The operators, in the order in which they run on each block; views are left out."""
        return tuple(Member(node.name, name_of(node.target), source_line(node)) for node in self.nodes)

    @functools.cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes of the members in ``body``."""
        called = (node for node in self.body.nodes if node.op == "call_function")
        return tuple(node for node in called if not ops.is_view(node.target))

    @functools.cached_property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes of ``body`` whose results are the group's, in the order in which they run."""
        outputs = blocks.results_of(self.body)
        return outputs[: len(outputs) - len(self.writes)]

    @functools.cached_property
    def written(self) -> dict[fx.Node, fx.Node]:
        """Placeholder of ``body`` to the node whose result is written over it."""
        inputs = placeholders(self.body)
        last = blocks.results_of(self.body)[len(self.results) :]
        return {inputs[at]: node for at, node in zip(self.writes, last, strict=True)}

    def malformed(self, arguments: int) -> str:
        """Return what is wrong with the body or with :attr:`writes`; "" if nothing is.

        Args:
            arguments: number of arguments that the group is called with.
        """
        inputs = len(placeholders(self.body))
        if not self._body_fault and inputs != arguments:
            return f"it is called with {arguments} arguments and has {inputs}"
        return self._body_fault

    @functools.cached_property
    def _body_fault(self) -> str:
        try:
            self.body.lint()
        except (RuntimeError, AssertionError) as error:
            return f"its body is no graph: {str(error).splitlines()[0]}"
        kinds = [node.op for node in self.body.nodes]
        unknown = set(kinds) - {"placeholder", "call_function", "output"}
        if unknown or kinds.count("output") != 1 or not self.nodes:
            return "its body is not made of inputs, at least one operator and one output"
        bare = next((node.name for node in self.body.nodes if node.op != "output" and "val" not in node.meta), None)
        if bare is not None:
            return f"{bare} of its body has no value"
        inputs, results = len(placeholders(self.body)), len(blocks.results_of(self.body))
        if list(self.writes) != sorted({*self.writes} & {*range(inputs)}) or len(self.writes) > results:
            return f"it writes arguments {self.writes}, of {inputs}, with {results} results"
        return ""

    # -- which operators fit ----------------------------------------------------------------------------

    @staticmethod
    def frame(root: fx.Node) -> Matrix | None:
        """Return the rows and columns of a group whose last member is ``root``; None if ``root`` cannot be the last."""
        return None if ops.rule(root.target).rowwise is None else blocks.matrix_of_node(root)

    @staticmethod
    def fits_numerics(node: fx.Node, *, fast: bool) -> bool:
        """Return True: every operator has in a group, on a CPU, the bits that it has alone.

        Args:
            node: an operator.
            fast: other last bits are allowed; read only by groups on a GPU.
        """
        return True

    @staticmethod
    def misfit(members: Sequence[fx.Node], matrix: Matrix, threads: int) -> str:
        """Say why these nodes cannot run as one; "" if they can.

        Args:
            members: operators of one graph and the views between them, in graph order.
            matrix: the rows and columns of the group.
            threads: torch's number of threads.
        """
        for node in members:
            if ops.is_view(node.target):
                if len(node.all_input_nodes) != 1 or not blocks.view_fits(node, blocks.base_of(node), matrix):
                    return f"{node.name} lies otherwise than in rows of {matrix.columns}"
            elif not blocks.fits(node, matrix):
                return f"{node.name} does not treat {matrix.rows} rows of {matrix.columns} apart"
        return _misfit_of_operands(members, matrix, threads)

    @staticmethod
    def unwritable(node: fx.Node, matrix: Matrix) -> str:
        """Return "": the result of any member can be a result of the group. Other kinds of groups say why it cannot.

        Args:
            node: a member.
            matrix: the rows and columns of the group.
        """
        return ""

    def unfit_writes(self) -> str:
        """Say why the group cannot write the arguments that its members write; "" if it can."""
        whole = self.matrix.columns, 1
        for operand, node in self.written.items():
            read = {blocks.operand_steps(user, operand, self.matrix) for user in operand.users}
            if read != {whole} or blocks.result_steps(node, self.matrix) != whole:
                return f"{operand.name} is not read element by element, and written"
        return ""

    @functools.cached_property
    def exact(self) -> bool:  # type: ignore[override]
        """Whether the result has the bits of the operators run one after the other."""
        return all(self.fits_numerics(node, fast=False) for node in self.nodes)

    @property
    def launches(self) -> int:
        """How many kernels run for each block: one for each member."""
        return len(self.nodes)

    @functools.cached_property
    def rule(self) -> OpRule:
        """What the planner must know of the group, which follows from its members.

        The group needs the elements of all its arguments, even where a member reads a shape alone: :meth:`write` would
        copy a stand-in for that shape, whose elements share one place in memory, to full size.
        """
        if self.writes:
            return OpRule(mutates=self.writes, recomputable=False, cost=Cost(FUSED))
        return OpRule(overwrites=self._overwrites(), cost=Cost(FUSED))

    def _overwrites(self) -> tuple[int, ...]:
        """The arguments over which the result may be written: seen as the result is, and read before it is written.

        The last member alone writes the result; what others read of a block has been read by then. What all blocks
        read, such as one element for each column, has not.
        """
        last = self.nodes[-1]
        protected = {node for at, node in enumerate(last.args) if at not in ops.rule(last.target).overwrites}
        protected.update(last.kwargs.values())
        bases = {blocks.base_of(node) for node in protected if isinstance(node, fx.Node)}
        result, steps = blocks.only_tensor(last), blocks.result_steps(last, self.matrix)
        return tuple(
            at
            for at, node in enumerate(placeholders(self.body))
            if node not in bases
            and isinstance(node.meta["val"], torch.Tensor)
            and same_geometry(node.meta["val"], result)
            and blocks.input_steps(node, self.matrix) == steps
        )

    @functools.cached_property
    def title(self) -> str:  # type: ignore[override]
        """The names of the operators, such as ``fused(mul.Tensor, silu_backward)``."""
        called = (member.operator.removeprefix("aten.").removesuffix(".default") for member in self.members)
        return f"fused({', '.join(called)})"

    # -- how it runs --------------------------------------------------------------------------------

    @functools.cached_property
    def text(self) -> Text:
        """The source of the function that runs the group, see :mod:`roamc.operators.block_source`."""
        return text_of(f"fused_{self.name}", self.body, self.matrix, self.written)

    def block_rows(self, threads: int) -> int:
        """Return how many rows one block has if torch runs with this number of ``threads``.

        One block has all rows if smaller blocks would change bits: torch's threads would divide the elements of a block
        among themselves in another way than those of the whole result.
        """
        if threads not in self._rows:
            self._rows[threads] = self._block_rows(threads)
        return self._rows[threads]

    @functools.cached_property
    def _rows(self) -> dict[int, int]:
        """Number of threads to rows of a block, as far as it was asked for: every step asks again."""
        return {}

    def _block_rows(self, threads: int) -> int:
        if not blocks.may_block(self.nodes, self.matrix, threads, broadcast=self._broadcasts):
            return self.matrix.rows
        itemsize = blocks.widest(self.nodes)
        aligned = blocks.must_align(self.nodes, self.matrix)
        pointwise = any(ops.rule(node.target).rowwise == Rowwise() for node in self.nodes)
        return blocks.block_rows(self.matrix, itemsize, threads, aligned=aligned, pointwise=pointwise)

    @functools.cached_property
    def _broadcasts(self) -> bool:
        """Whether some operand has one element for each row or column."""
        operand_steps = (blocks.input_steps(node, self.matrix) for node in placeholders(self.body))
        return any(not all(steps) for steps in operand_steps)

    def block_bytes(self, threads: int) -> Bytes:
        """Return the bytes of the values inside the group that exist at one time, for one block.

        Args:
            threads: torch's number of threads, which :meth:`block_rows` depends on.
        """
        return self.text.bytes_per_row * self.block_rows(threads)

    @functools.cached_property
    def _run(self) -> Callable[..., None]:
        namespace: dict[str, Any] = dict(self.text.constants)
        exec(compile(self.text.source, f"<{self.title}>", "exec"), namespace)
        function: Callable[..., None] = namespace[self.text.function]
        return function

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The :class:`roamc.operators.kernels.Kernel` for the CPU whose function is :meth:`write`."""
        return Kernel(self.write, CPU_ONLY)

    def write(self, *args: torch.Tensor | float, out: torch.Tensor | None) -> None:
        """Write the result for the arguments ``args`` to ``out``, which has the dtype, shape and strides of the result.

        ``out`` is None if the group only writes arguments. An argument whose strides are not those of its placeholder
        in ``body`` is copied first, and back if the group writes it.
        """
        lie = self.laid_out(args)
        self._run(*lie, **({} if out is None else {"out": out}), rows=self.block_rows(torch.get_num_threads()))
        self.put_back(args, lie)

    def laid_out(self, args: Sequence[torch.Tensor | float]) -> list[torch.Tensor | float]:
        """Return ``args``, copied where shape or strides are not those of the placeholder in ``body``."""
        return [
            value if lies is None or _as_expected(value, *lies) else _laid_out(value, *lies)  # type: ignore[arg-type]
            for value, lies in zip(args, self._expected, strict=True)
        ]

    def put_back(self, args: Sequence[torch.Tensor | float], lie: Sequence[torch.Tensor | float]) -> None:
        """Copy what the group wrote to copies of its arguments to the arguments themselves.

        Args:
            args: the arguments; changed where the group writes them.
            lie: what :meth:`laid_out` returned for ``args``, after the group has run on it.
        """
        for at in self.writes:
            if lie[at] is not args[at]:
                args[at].copy_(lie[at])  # type: ignore[union-attr,arg-type]

    @functools.cached_property
    def _expected(self) -> tuple[tuple[Ints, Ints] | None, ...]:
        """For each argument shape and strides of the fake tensor in the body that it stands for; None for a number."""
        fakes = (next((tensor for _, tensor in tensors_of(node)), None) for node in placeholders(self.body))
        return tuple(None if fake is None else (tuple(fake.shape), tuple(fake.stride())) for fake in fakes)

    def __call__(self, *args: torch.Tensor | float) -> Any:
        """Return the result, or a tuple of several, for ``args``; on fake tensors, what the body gives for them.

        A group without results returns None.
        """
        if any(fake_mode_of(tensor) is not None for tensor in args):
            results = self.run_members(args)[: len(self.results)]
            return results if len(results) > 1 else next(iter(results), None)
        out = self.allocated()
        self.write(*args, out=out)
        return out

    def run_members(self, args: Sequence[torch.Tensor | float]) -> tuple[torch.Tensor, ...]:
        """Run the members one after the other; return the results, then what is to be written to arguments."""
        outputs = fx.Interpreter(fx.GraphModule({}, self.body)).run(*args)
        return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)

    def allocated(self) -> Any:
        """Return new, unset memory for the result, or a tuple for several; None without results."""
        tensors = [blocks.only_tensor(node) for node in self.results]
        outs = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors)
        return outs if len(outs) > 1 else next(iter(outs), None)


def same_geometry(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``tensor`` and ``other`` have the same dtype, shape and strides."""
    return (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride())


def _as_expected(tensor: torch.Tensor, shape: Ints, strides: Ints) -> bool:
    """Whether a tensor has the shape and the strides that are expected, but for dimensions of one element."""
    if tensor.stride() == strides and tensor.shape == shape:
        return True
    each = zip(tensor.shape, tensor.stride(), strides, strict=False)
    return tensor.shape == shape and all(size < 2 or one == other for size, one, other in each)


def _laid_out(tensor: torch.Tensor, shape: Ints, strides: Ints) -> torch.Tensor:
    """Return a copy of ``tensor`` with these strides: one element where a dimension is expanded."""
    for dim, stride in enumerate(strides):
        tensor = tensor.narrow(dim, 0, 1) if not stride and tensor.shape[dim] else tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor).expand(shape)


def _sees_another(reader: fx.Node, argument: fx.Node, matrix: Matrix) -> bool:
    """Whether ``reader`` takes a value inside by other strides than it has: in a square, one for each row as column."""
    return blocks.operand_steps(reader, argument, matrix) != blocks.result_steps(blocks.base_of(argument), matrix)


def _misfit_of_operands(members: Sequence[fx.Node], matrix: Matrix, threads: int) -> str:
    inside = set(members)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in members:
        for argument in node.all_input_nodes:
            if argument not in inside:
                readers.setdefault(argument, []).append(node)
            elif not ops.is_view(node.target) and _sees_another(node, argument, matrix):
                return f"{node.name} sees {argument.name} otherwise than it is made"
    steps: list[blocks.Steps | None] = []
    for argument, users in readers.items():
        argument_steps = {blocks.operand_steps(user, argument, matrix) for user in users}
        if len(argument_steps) != 1:
            return f"{argument.name} is read in two ways"
        steps += argument_steps - {blocks.AS_IT_IS}
    broadcast = any(step is None or not all(step) for step in steps)
    called = [node for node in members if not ops.is_view(node.target)]
    if not blocks.may_block(called, matrix, threads, broadcast=broadcast):
        return f"{threads} threads share {matrix.rows} rows of {matrix.columns} in another way than a block's"
    return ""


def fuse(
    root: fx.Node, members: Sequence[fx.Node], kind: type[Fused] = Fused, results: Sequence[fx.Node] = ()
) -> tuple[Fused, list[fx.Node]]:
    """Make a group of nodes of a graph.

    Args:
        root: the member that runs last; the group has its rows and columns.
        members: all nodes of the group in graph order, views between members and picks of results included.
        kind: the class of the group: how it runs.
        results: the members whose results are the group's, in graph order. () for ``root`` alone, and for no results if
            some member writes an argument.

    Returns:
        The group, and the nodes of the graph that it reads, in the order of its arguments. The graph stays as it is.

    Raises:
        ValueError: the result of ``root`` is no tensor of rows.
    """
    body = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inside = set(members)
    read = dict.fromkeys(a for node in members for a in node.all_input_nodes if a not in inside)
    for argument in read:
        copies[argument] = body.placeholder(argument.name)
        copies[argument].meta = {key: argument.meta[key] for key in ("val", STORAGES) if key in argument.meta}
    versions = in_place.Versions(body, copies)
    for node in members:
        versions.take(node)
    stands_for = tuple(node.name for node in in_place.writers(members))
    last = {at: value for at, node in enumerate(read) if (value := versions.written(node)) is not None}
    outputs = (*(versions.now(node) for node in results or (() if stands_for else (root,))), *last.values())
    body.output(outputs if len(outputs) > 1 else outputs[0])
    matrix = kind.frame(root)
    if matrix is None:
        raise ValueError(f"{root.name} has no rows")
    return kind(root.name, body, matrix, tuple(last), stands_for), list(read)
