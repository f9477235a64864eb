"""The judge of a group that runs as one Triton kernel: its source runs on the CPU, for some programs of the launch.

    x_value = tl.load(x + row * 768 + column, inside, 0)
                                        are these the elements of x that broadcasting says, and none behind its end?
                                        does the mask let in every element of the matrix?
    tl.store(out + row * 768 + column, mul_3, inside)
                                        is every element of these rows stored once, in its place, and nothing else?
                                        is it, up to rounding, what the operators give for the same numbers?

What is in memory, and what the operators give for it, says :mod:`roamc.codegen.kernel_values`. Floats of all dtypes are
computed in 64 bits on both sides: rounding is no matter of this judge. Places are integers of 32 bits where the source
has them so, and wrap around as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, fx

from roamc.codegen.group_needs import Need, extent_of, is_number, is_sum_over_rows, tensor_of
from roamc.codegen.group_verdicts import GroupFault, Place, Verdict, close, each_close
from roamc.codegen.kernel_columns import Columns, moves_columns, result_of
from roamc.codegen.kernel_values import Expected, Memory, entries, matrix_of
from roamc.codegen.partials_judge import PartialRows, judge_ends
from roamc.codegen.triton_stand_in import WIDE, Jit, Language, Pointer
from roamc.compat import without_modes
from roamc.graph import output_node, placeholders
from roamc.interruptions import interruption
from roamc.operators.gpu.kernel import KernelText
from roamc.units import Bytes

LANES = 1 << 13
"""About so many elements are computed: by all programs, or some up to the last, spread evenly."""


def judge_kernel(
    body: fx.Graph, text: KernelText, places: Sequence[Place], outs: Sequence[Place], writes: Sequence[int] = ()
) -> None:
    """Check the source of a kernel.

    Args:
        body: the operators of the group, with fake values.
        text: the kernel.
        places: where the arguments lie, one entry for each.
        outs: where the results lie, one entry for each.
        writes: positions of the arguments that the last results of ``body`` are written to.

    Raises:
        GroupFault: the kernel does something else than the operators.
    """
    judge_runs([lambda least: KernelRun(body, text, places, outs, writes, least)])


def judge_runs(runs: Iterable[Callable[[float], KernelRun]]) -> None:
    """Check what some programs of a kernel compute.

    Args:
        runs: for each choice of programs a function that makes the run, given the smallest number in memory.

    Raises:
        GroupFault: the kernel does something else than the operators.
    """
    try:
        with without_modes(), torch.no_grad():  # plans are made under fake modes, too
            for make in runs:
                _judge(make)
    except GroupFault:
        raise
    except Exception as error:  # whatever the source does when it runs, such as a name that is gone
        if interruption(error) is not None:
            raise
        raise GroupFault(Verdict.UNKNOWN, f"{type(error).__name__}: {error}") from error


def _judge(make: Callable[[float], KernelRun]) -> None:
    run = make(-0.5)
    run.compute()
    if not run.is_finite():  # some functions have no numbers below zero
        run = make(0.25)
        run.compute()
    run.run()
    run.compare()


@dataclass(eq=False)
class _Output:
    """A result of the group, as far as it is stored.

    Attributes:
        node: the member that makes it.
        place: where it lies.
        per_row: whether it has one element for each row.
        seen: by lane, or by row and column, how often it is stored.
        stored: what is stored there.
    """

    node: fx.Node
    place: Place
    per_row: bool
    seen: Tensor
    stored: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.result = result_of(self.node)
        self.stored = torch.zeros(self.seen.shape, dtype=WIDE, device="cpu")


@dataclass(eq=False)
class KernelRun:
    """Runs some programs of a kernel at once: programs are the first dimension of every block.

    Attributes:
        body: the operators of the group.
        text: the kernel.
        places: where the arguments lie.
        out_places: where the results lie.
        writes: positions of the arguments that the last results are written to.
        least: smallest number in memory.
        lanes: about so many elements are computed.
        start: first column of the piece of a row that is gone through; None outside of such a loop.
        begin: first row of the block that is gone through, counted in each program; None outside of such a loop.
        values: the kernel's variables when it ends.
    """

    body: fx.Graph
    text: KernelText
    places: Sequence[Place]
    out_places: Sequence[Place]
    writes: Sequence[int]
    least: float
    lanes: int = LANES
    start: int | None = None
    begin: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the matrix of the group, and which programs run."""
        self.inputs = placeholders(self.body)
        self.matrix = matrix_of(self.body)
        self.columns, self.numel = self.matrix.columns, self.matrix.numel
        self.memory = Memory(self.matrix, self.least, self.number_of)
        constants = self.text.constants
        self.flat = "BLOCK" in constants
        self.block = constants["BLOCK"] if self.flat else constants["ROWS"]
        self.per_program = constants.get("CHUNK", self.block)
        self.wide = 1 if self.flat else constants["COLUMNS"]
        self.pieces = not self.flat and self.wide < self.columns
        self.shifted = self._shifted()
        self._choose_programs()
        results = output_node(self.body).all_input_nodes
        over = [self.inputs[at] for at in self.writes]
        where = [*self.out_places, *(self.places[at] for at in self.writes)]
        pairs = list(zip(results, where, strict=True))
        self.outputs = {node: self._output(node, place) for node, place in pairs if not is_sum_over_rows(node)}
        # operand to what is written there
        self.over = dict(zip(over, results[len(results) - len(over) :], strict=True))
        self._check_apart()
        sums = {at: node for at, node in enumerate(results) if is_sum_over_rows(node)}
        self.partials = PartialRows(sums, self.text.programs, self.columns, self.programs, self.wide) if sums else None

    def _check_apart(self) -> None:
        """Check that nothing else is stored where an operand is written."""
        for operand, node in self.over.items():
            for output in self.outputs.values():
                if output.node is not node and self._far(operand, output) is not None:
                    raise GroupFault(Verdict.OVERWRITTEN, f"{output.node.name} is stored over {operand.name}")

    def _output(self, node: fx.Node, place: Place) -> _Output:
        per_row = tensor_of(node).numel() != self.numel
        if per_row and tensor_of(node).numel() * self.columns != self.numel:
            raise GroupFault(Verdict.SHAPE, "is no result with all columns", node.name)
        store_counts = torch.zeros(self._rows().shape, dtype=torch.int32, device="cpu")
        if not self.flat and not per_row:
            store_counts = store_counts.expand(*store_counts.shape[:-1], self.columns).clone()
        return _Output(node, place, per_row, store_counts)

    def _shifted(self) -> Columns | None:
        """Which columns lanes want, where members move columns; None where none does."""
        if not any(map(moves_columns, self.matrix.members)):
            return None
        if self.flat or self.pieces:
            raise GroupFault(Verdict.ELEMENTS, "columns are moved where no program holds whole rows")
        return Columns(self.body, self.matrix.needs, self.numel // self.columns, self.columns)

    def _choose_programs(self) -> None:
        """Choose the programs that run, and check their number."""
        units = self.numel if self.flat else self.numel // self.columns
        program_count = -(-units // self.per_program)
        if self.text.programs != program_count:
            raise GroupFault(Verdict.MISSING, f"{self.text.programs} programs are launched, and not {program_count}")
        lanes = self.per_program * (1 if self.flat else max(self.wide, self.columns))
        count = min(program_count, max(1 if self.per_program == self.block else 2, self.lanes // lanes))
        chosen = np.unique(np.linspace(program_count - 1, 0, count).astype(np.int64))
        shape = (-1, 1) if self.flat else (-1, 1, 1)
        self.programs = torch.from_numpy(chosen).reshape(shape)

    # -- which lane is which element ---------------------------------------------------------------

    def _rows(self) -> Tensor:
        """The row of each lane; in a kernel without rows, the element."""
        inside = torch.arange(self.per_program, dtype=torch.int64, device="cpu")[self._now()]
        return self.programs * self.per_program + (inside if self.flat else inside[:, None])

    def _now(self) -> slice:
        """The rows of each program that are gone through now."""
        return slice(None) if self.begin is None else slice(self.begin, self.begin + self.block)

    def _columns(self) -> Tensor:
        """The columns of the lanes that are gone through now."""
        if self.pieces and self.start is None:
            return torch.tensor([0, self.columns - 1], device="cpu")
        return (self.start or 0) + torch.arange(self.wide, dtype=torch.int64, device="cpu")

    def _lanes(self) -> tuple[Tensor, Tensor]:
        """The element of the matrix at each lane, row by row, and whether there is one."""
        rows = self._rows()
        if self.flat:
            return rows, rows < self.numel
        columns = self._columns()
        return rows * self.columns + columns, (rows * self.columns < self.numel) & (columns < self.columns)

    # -- what the kernel calls -----------------------------------------------------------------------

    def run(self) -> None:
        """Run the kernel, and check that the programs store all of their elements."""
        names: dict[str, Any] = {"triton": Jit, "tl": Language(self, over_rows=self.partials is not None)}
        names |= {"range": self._range, "tell_judge": self._tell}
        exec(compile(f"{self.text.source}    tell_judge(locals())\n", "<judged>", "exec"), names)
        first = torch.zeros((), dtype=torch.int32, device="cpu")
        outs = [node for node in self.outputs if node not in self.over.values()]
        operands = [self.memory.number(node) if is_number(node) else Pointer(node, first) for node in self.arguments()]
        pointers = [*operands, *(Pointer(node, first) for node in outs)]
        pointers += [Pointer(None, first)] if self.partials is not None else []
        pointers += [Pointer(None, first, table) for table in self.text.tables]
        names[self.text.function](*pointers, **self.text.constants)
        for output in self.outputs.values():
            missing = (output.seen == 0) & self._valid_results(output)
            if missing.any():
                detail = f"{int(missing.sum())} elements of {len(self.programs)} programs"
                raise GroupFault(Verdict.MISSING, detail, output.node.name)
        if self.partials is not None:
            self.partials.check_complete()
            judge_ends(self.text, self.partials, close)

    def arguments(self) -> Sequence[fx.Node]:
        """Return the nodes for which the kernel is given pointers and numbers, in order, the results' left out."""
        return self.inputs

    def number_of(self, node: fx.Node) -> int:
        """Return a number that no other argument of the kernel has; what is in memory follows from it."""
        return self.inputs.index(node)

    def _range(self, first: int, end: int, step: int) -> Iterator[int]:
        over_rows = self.partials is not None
        for start in range(first, end, step):
            self.start, self.begin = (None, start) if over_rows else (start, None)
            yield start
        self.start = self.begin = None

    def _tell(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def program_id(self, axis: int) -> Tensor:
        """Return the numbers of the programs that run, in 32 bits."""
        if axis != 0:
            raise GroupFault(Verdict.TWICE, f"programs are counted along axis {axis}, where there is one")
        return self.programs.to(torch.int32)

    def load(self, pointer: Pointer, mask: Tensor | None = None, other: float = 0) -> Tensor:
        """Check which elements are read, and return the numbers that are there."""
        node, places = pointer.node, pointer.places
        if pointer.table is not None:
            return entries(pointer.table, places)
        if node is None or node in self.outputs:
            raise GroupFault(Verdict.VALUE, "the result is read", node.name if node is not None else "")
        elements, valid = self._lanes()
        active = torch.ones((), dtype=torch.bool, device="cpu") if mask is None else mask
        active, where = torch.broadcast_tensors(active, places)
        used = where[active]
        if used.numel() and not (used.min() >= 0 and used.max() < extent_of(tensor_of(node))):
            raise GroupFault(
                Verdict.OUTSIDE, f"elements {int(used.min())} to {int(used.max())} of {node.name} are read"
            )
        if not self._picks(node):
            self._check_load(node, places, active, elements, valid)
        elif any(self._far(node, output) is not None for output in self.outputs.values()):
            raise GroupFault(Verdict.OVERWRITTEN, f"the result is stored over {node.name}, which all programs read")
        where = where.reshape(where.shape or 1)  # a tensor without dimensions yields to int32
        value = self.memory.content(node, where)
        return torch.where(active, value, torch.zeros((), dtype=value.dtype, device="cpu") + other)

    def _picks(self, node: fx.Node) -> bool:
        """Whether a member finds the place in an operand itself, such as the weight of a class."""
        return any(need.value is node and need.whole for needs in self.matrix.needs.values() for need in needs.values())

    def _check_load(self, node: fx.Node, places: Tensor, active: Tensor, elements: Tensor, valid: Tensor) -> None:
        """Check that every lane with an element reads that of the operand which some member needs there."""
        if self.shifted is not None:
            valid = self.shifted.check_load(node, places, active, (self._rows(), self._columns(), valid))
            self._check_overlaps(node, places, valid)
            return
        if (~torch.broadcast_tensors(active, valid)[0] & valid).any():
            raise GroupFault(Verdict.MASK, f"some elements of {node.name} are not read")
        node_needs = [need for needs in self.matrix.needs.values() for need in needs.values() if need.value is node]
        for need in node_needs:
            if not ((places != self.matrix.numbers(need, elements)) & valid).any():
                break
        else:
            self._fault_of_load(node, places, node_needs, elements, valid)
        self._check_overlaps(node, places, valid)

    def _fault_of_load(
        self, node: fx.Node, places: Tensor, node_needs: Sequence[Need], elements: Tensor, valid: Tensor
    ) -> NoReturn:
        if not node_needs:
            raise GroupFault(Verdict.VALUE, f"{node.name} is read, which nobody needs")
        have, want, valid_lanes = torch.broadcast_tensors(places, self.matrix.numbers(node_needs[0], elements), valid)
        at = int((have != want)[valid_lanes].nonzero()[0])
        detail = f"element {int(have[valid_lanes][at])} of {node.name} is read, and not {int(want[valid_lanes][at])}"
        raise GroupFault(Verdict.ELEMENTS, detail)

    def _check_overlaps(self, node: fx.Node, places: Tensor, valid: Tensor) -> None:
        for output in self.outputs.values():
            self._check_overlap(node, places, valid, output)

    def _check_overlap(self, node: fx.Node, places: Tensor, valid: Tensor, output: _Output) -> None:
        """Check that an operand under a result is read lane by lane where the result is stored, and before that."""
        far = self._far(node, output)
        if far is None:
            return
        result, tensor = tensor_of(output.node), tensor_of(node)
        elements, _ = self._lanes()
        stored = self.matrix.numbers(output.result, elements) * result.itemsize
        read = far + places.to(torch.int64) * tensor.itemsize
        if output.per_row or tensor.itemsize != result.itemsize or ((read != stored) & valid).any():
            raise GroupFault(Verdict.OVERWRITTEN, f"other programs store where {node.name} is read")
        if self._seen_now(output).any():
            raise GroupFault(Verdict.OVERWRITTEN, f"{node.name} is read behind the store of the result")

    def _far(self, node: fx.Node, output: _Output) -> Bytes | None:
        """How far behind a result's first byte an operand begins; None if they share no byte."""
        result, tensor = tensor_of(output.node), tensor_of(node)
        place = self.places[self.inputs.index(node)]
        far = place.start - output.place.start
        apart = far >= extent_of(result) * result.itemsize or -far >= extent_of(tensor) * tensor.itemsize
        return None if place.memory != output.place.memory or apart else far

    def store(self, pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
        """Check where elements of a result are stored, and keep them."""
        if pointer.node is None and pointer.table is None and self.partials is not None:
            self.partials.store(pointer.places, value, mask)
            return
        output = self.outputs.get(self.over.get(pointer.node, pointer.node)) if pointer.node is not None else None
        if output is None:
            raise GroupFault(Verdict.PLACE, f"the result is stored over {pointer.node}")
        elements, valid = self._lanes()
        if output.per_row and not self.flat:
            elements, valid = self._rows() * self.columns, self._rows() * self.columns < self.numel
        active = torch.ones((), dtype=torch.bool, device="cpu") if mask is None else mask
        active, places, lanes = torch.broadcast_tensors(active, pointer.places, valid)
        if active.shape != valid.shape:
            raise GroupFault(Verdict.TWICE, f"blocks of {tuple(active.shape[1:])} are stored")
        if (active & ~lanes).any():
            raise GroupFault(Verdict.MASK, "elements behind the last one are stored")
        if (places != self.matrix.numbers(output.result, elements))[active].any():
            raise GroupFault(Verdict.PLACE, "elements of the result are stored in other places")
        self._keep(output, value, active)

    def _seen_now(self, output: _Output) -> Tensor:
        """How often the elements at the lanes that are gone through now are stored."""
        store_counts = output.seen[:, self._now()]
        if self.flat or output.per_row:
            return store_counts
        columns = self._columns()
        return store_counts[..., columns[columns < self.columns]]

    def _keep(self, output: _Output, value: Tensor, active: Tensor) -> None:
        """Note which elements are stored; ``active`` has the shape of the lanes."""
        value = value.to(WIDE).expand(active.shape)
        store_counts, stored = output.seen[:, self._now()], output.stored[:, self._now()]
        if self.flat or output.per_row:
            store_counts += active
            stored.copy_(torch.where(active, value, stored))
        else:
            columns = self._columns()
            inside = columns < self.columns
            store_counts[..., columns[inside]] += active[..., inside].to(torch.int32)
            stored[..., columns[inside]] = torch.where(active, value, 0)[..., inside]
        if (output.seen > 1).any():
            raise GroupFault(Verdict.TWICE, "some programs store an element twice")

    def _valid_results(self, output: _Output) -> Tensor:
        """Which of the results of the programs that run there are."""
        rows = self._rows()
        valid = rows < self.numel if self.flat else rows * self.columns < self.numel
        return valid.expand(output.seen.shape)

    # -- what the operators give ----------------------------------------------------------------------

    def compute(self) -> None:
        """Compute what the operators give for the elements of the programs that run: in rows, or in one dimension."""
        counts: Sequence[int] = ()
        if self.flat:
            elements, valid = self._lanes()
            elements = elements[valid]
        else:
            rows = self._rows()
            counts = (rows * self.columns < self.numel).sum((1, 2)).tolist()
            rows = rows[rows * self.columns < self.numel]
            elements = rows[:, None] * self.columns + torch.arange(self.columns, dtype=torch.int64, device="cpu")
        self.expected = Expected(self.matrix, self.memory, self.shifted, elements, counts)

    def is_finite(self) -> bool:
        """Whether all floats of the results are finite."""
        sums = self.partials.sums if self.partials is not None else ()
        results = [self.expected.values[node] for node in (*self.outputs, *sums)]
        return all(bool(one.isfinite().all()) for one in results if one.is_floating_point())

    def compare(self) -> None:
        """Check that the kernel has stored what the operators give; names the first operator that differs."""
        for output in self.outputs.values():
            self._compare(output, self.expected.values[output.node])
        if self.partials is not None:
            for node, stored in zip(self.partials.sums, self.partials.stored, strict=True):
                if not close(stored[:, 0, : self.columns], self.expected.values[node]):
                    raise GroupFault(Verdict.NUMBERS, "the kernel adds up other rows or elements", node.name)

    def _compare(self, output: _Output, expected: Tensor) -> None:
        have = output.stored[self._valid_results(output)]
        want = expected.to(WIDE).expand_as(self.expected.elements if not output.per_row else expected).reshape(-1)
        if not close(have, want):
            at = int((~each_close(have, want)).nonzero()[0])
            detail = f"the kernel gives {have[at].item():.6g}, and the operators {want[at].item():.6g}"
            raise GroupFault(Verdict.NUMBERS, detail, self._first_wrong())

    def _first_wrong(self) -> str:
        """The name of the first member whose variable has other numbers; of the last one if none is found."""
        for node in self.matrix.members if not self.pieces and self.partials is None else ():
            expected, value = self.expected.values.get(node), self.values.get(node.name)
            if expected is None or expected.shape[-1] not in (1, self.columns):
                continue
            if isinstance(value, Tensor) and value.dtype in (WIDE, torch.bool):
                _, valid = self._lanes()
                full = torch.broadcast_to(value.to(WIDE), valid.shape)[valid]
                if not close(full, expected.to(WIDE).expand(self.expected.elements.shape).reshape(-1)):
                    return node.name
        return self.matrix.members[-1].name
