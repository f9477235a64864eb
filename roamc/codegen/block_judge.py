"""The judge of a group that runs on blocks of rows: its source runs on stand-ins, which compute nothing.

All blocks of full length run at once, then the last one, if it is shorter:

    mul_out(grad, up, out=block_0)      is the next member mul.Tensor(grad, up)?
                                        are the elements of grad and up those that broadcasting says, in every row?
                                        has block_0 room for the result, and its dtype?
    silu_backward_grad_input(block_0, gate, grad_input=out)
                                        does block_0 hold the result of mul, of the same rows?
                                        has an earlier block written over elements of gate that are read now?
                                        is every element of the result written exactly once?

Blocks run one after the other; the threads of torch share the elements of one call. So they disturb each other where a
call writes over what it reads at another place, which is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import fx

from roamc.codegen.calls import by_name, outs_of, same_literal
from roamc.codegen.group_needs import (
    Int64s,
    Need,
    extent_of,
    goes_along_last,
    is_number,
    members_of,
    needs_of,
    result_of,
    rows_of,
    tensor_of,
)
from roamc.codegen.group_verdicts import GroupFault, Place, Verdict
from roamc.graph import output_node, placeholders
from roamc.interruptions import interruption
from roamc.operators import ops
from roamc.operators.block_source import Text
from roamc.operators.table import Rowwise


def judge_blocks(
    body: fx.Graph, text: Text, rows: int, places: Sequence[Place], out: Place | None, writes: Sequence[int] = ()
) -> None:
    """Check the source of a group for one length of blocks.

    Args:
        body: the operators of the group, with fake values.
        text: the source of the group as it runs on a CPU, block by block.
        rows: how many rows a block has.
        places: where the arguments lie, one entry for each.
        out: where the result lies; None if there is none.
        writes: positions of the arguments that the last results of ``body`` are written to.

    Raises:
        GroupFault: the source does something else than the operators, or may when blocks have so many rows.
    """
    run = _Run(body, text, rows, places, out, writes)
    try:
        run.run()
    except GroupFault:
        raise
    except Exception as error:  # whatever the source does when it runs, such as a name that is gone
        if interruption(error) is not None:
            raise
        raise GroupFault(Verdict.UNKNOWN, f"{type(error).__name__}: {error}", run.member) from error


@dataclass(eq=False)
class _Memory:
    """Memory of an argument, of the result, or of a value inside.

    Attributes:
        name: for messages.
        extent: elements from the first to the end of the last.
        value: the argument; None for other memory.
        place: where it lies, by which memory that is the same is found; None for that of values inside.
        held: what was written to it in the block that runs: the member, and where its result was written.
    """

    name: str
    extent: int
    value: fx.Node | None = None
    place: Place | None = None
    held: tuple[fx.Node, _Piece] | None = None


@dataclass(frozen=True, eq=False)
class _Piece:
    """What the source has in the place of a tensor: the same part of several blocks.

    Attributes:
        run: the run that it belongs to.
        memory: what it lies in.
        starts: element at which it begins, for each block; one number if all blocks share it.
        shape: its sizes.
        strides: in elements.
        dtype: of its elements.
    """

    run: _Run
    memory: _Memory
    starts: Int64s
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Piece:
        """Return the elements from the same first one, by other strides."""
        last = int(self.starts.max()) + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        if min(strides) < 0 or min(shape) < 1 or last >= self.memory.extent:
            raise GroupFault(Verdict.OUTSIDE, f"{self.memory.name} ends before element {last}")
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def split(self, rows: int) -> _Blocks:
        """Return the blocks of so many rows, the last with what is left."""
        return _Blocks(self, rows)

    def expand(self, *shape: int) -> _Piece:
        """Return the elements shared along dimensions of one element."""
        if len(shape) != len(self.shape) or any(s not in (1, w) for s, w in zip(self.shape, shape, strict=True)):
            raise GroupFault(Verdict.SHAPE, f"{self.memory.name} of {self.shape} is expanded to {shape}")
        strides = (0 if size == 1 else step for size, step in zip(self.shape, self.strides, strict=True))
        return replace(self, shape=shape, strides=tuple(strides))

    def view(self, *shape: int) -> _Piece:
        """Return the elements in one dimension, the only other shape that is known."""
        if shape != (-1,) or self.shape[1:] != (1,):
            raise GroupFault(Verdict.UNKNOWN, f"{self.memory.name} of {self.shape} is viewed as {shape}")
        return replace(self, shape=self.shape[:1], strides=self.strides[:1])

    def copy_(self, source: _Piece) -> None:
        """Check that what a member has made is copied to an operand that is written."""
        self.run.copy(self, source)

    def __getitem__(self, rows: slice) -> _Piece:
        """Return the first rows."""
        if not isinstance(rows, slice) or rows.start or rows.step or not 0 < rows.stop <= self.shape[0]:
            raise GroupFault(Verdict.UNKNOWN, f"of {self.memory.name} the part {rows} is taken")
        return replace(self, shape=(rows.stop, *self.shape[1:]))

    @property
    def steps(self) -> tuple[int, int]:
        """Elements from row to row and from column to column of two dimensions; 0 along one of a single element."""
        row, column = (0 if size == 1 else step for size, step in zip(self.shape, self.strides, strict=True))
        return row, column

    def same_elements(self, other: _Piece) -> bool:
        """Whether both are the same elements of the same memory in the same order."""
        alike = (self.memory, self.shape, self.steps, self.dtype) == (
            other.memory,
            other.shape,
            other.steps,
            other.dtype,
        )
        return alike and np.array_equal(self.starts, other.starts)


@dataclass(frozen=True)
class _Blocks:
    """What ``split`` gives: iterated, the blocks of full length at once, then the shorter last one."""

    piece: _Piece
    rows: int

    def __iter__(self) -> Iterator[_Piece]:
        piece = self.piece
        full, left = divmod(piece.shape[0], self.rows)
        for first, count, length in ((0, full, self.rows), (full * self.rows, 1, left)):
            if not count or not length:
                continue
            starts = first + np.arange(count, dtype=np.int64) * length
            if piece.memory is piece.run.lead:
                piece.run.begin(starts, length)
            shape = (length, *piece.shape[1:])
            yield replace(piece, starts=piece.starts + starts * piece.strides[0], shape=shape)


@dataclass(frozen=True)
class _Function:
    """What the source has in the place of an operator or kernel: a call of it is checked."""

    run: _Run
    target: Any

    def __call__(self, *args: Any, **keywords: Any) -> None:
        self.run.call(self.target, args, keywords)


@dataclass(frozen=True)
class _Torch:
    """What the source has in the place of ``torch``."""

    run: _Run

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        if callable(attribute):
            raise GroupFault(Verdict.UNKNOWN, f"torch.{name} is called")
        return attribute

    def empty(self, shape: tuple[int, int], *, dtype: torch.dtype) -> _Piece:
        """Return memory for a value inside."""
        return self.run.allocate(shape, dtype)


@dataclass(eq=False)
class _Run:
    """Runs the source of a group on stand-ins.

    Attributes:
        body: the operators of the group.
        text: the source.
        length: rows of a block.
        places: where the arguments lie.
        out_place: where the result lies; None if there is none.
        writes: positions of the arguments that the last results are written to.
        member: name of the member that is called.
        blocks: row at which each of the blocks that run begins.
        rows: the rows of each block; none before the first block.
    """

    body: fx.Graph
    text: Text
    length: int
    places: Sequence[Place]
    out_place: Place | None
    writes: Sequence[int]
    member: str = ""
    blocks: Int64s = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    rows: Int64s = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))

    def __post_init__(self) -> None:
        """Find what the members read and write."""
        self.members = members_of(self.body)
        self.needs = {node: needs_of(node) for node in self.members}
        self.results = {node: result_of(node) for node in self.members}
        self.last = self.members[-1]
        self.total = self.results[self.last].rows
        self.out = _Memory("the result", extent_of(tensor_of(self.last)), place=self.out_place)
        inputs = placeholders(self.body)
        self.operands = [_memory_of(node, at) for node, at in zip(inputs, self.places, strict=True)]
        values = output_node(self.body).all_input_nodes
        over = [self.operands[at] for at in self.writes]
        self.over = dict(zip(over, values[len(values) - len(over) :], strict=True))  # what is written there in the end
        self.lead = self.out if self.out_place is not None else over[0]
        self.done = np.zeros((len(self.over) + 1, self.total), dtype=bool)
        self.inside: list[_Memory] = []
        self.row_bytes = 0
        self.due: Iterator[fx.Node] = iter(())

    # -- the whole source ---------------------------------------------------------------------------

    def run(self) -> None:
        """Run the function once, and check that it ends with every element of the result."""
        names = {name: self._constant(value) for name, value in self.text.constants.items()}
        exec(compile(self.text.source, "<judged>", "exec"), names)
        inputs = placeholders(self.body)
        pairs = zip(self.operands, inputs, strict=True)
        args = [node if is_number(node) else self._whole(memory, node) for memory, node in pairs]
        outs = {"out": self._whole(self.out, self.last)} if self.out_place is not None else {}
        names[self.text.function](*args, **outs, rows=self.length)
        self._end()
        for name, done in zip(("the result", *(one.name for one in self.over)), self.done, strict=True):
            if not done.all() and (name != "the result" or outs):
                self._fault(Verdict.MISSING, f"row {int(done.argmin())} of {name} is not written")
        if self.row_bytes != self.text.bytes_per_row:
            detail = f"values inside take {self.row_bytes} bytes for each row, and not {self.text.bytes_per_row}"
            raise GroupFault(Verdict.BYTES, detail)

    def _constant(self, value: Any) -> Any:
        if value is torch:
            return _Torch(self)
        return _Function(self, value) if callable(value) and not isinstance(value, torch.dtype) else value

    def _whole(self, memory: _Memory, node: fx.Node) -> _Piece:
        tensor = tensor_of(node)
        shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return _Piece(self, memory, np.zeros(1, dtype=np.int64), shape, strides, tensor.dtype)

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype) -> _Piece:
        """Return new memory for a value inside."""
        rows, columns = shape
        memory = _Memory(f"block {len(self.inside)}", rows * columns)
        self.inside.append(memory)
        self.row_bytes += columns * dtype.itemsize * rows // self.length
        return _Piece(self, memory, np.zeros(1, dtype=np.int64), shape, (columns, 1), dtype)

    def begin(self, starts: Int64s, length: int) -> None:
        """Note that blocks of ``length`` rows begin, at the rows ``starts``: their values are not there yet."""
        self._end()
        for memory in (*self.inside, *self.over):
            memory.held = None
        self.blocks, self.rows = starts, starts[:, None] + np.arange(length, dtype=np.int64)
        self.due = iter(self.members)
        if self.rows[-1, -1] >= self.total:
            raise GroupFault(Verdict.OUTSIDE, f"the result has {self.total} rows, and row {self.rows.max()} is due")

    def _end(self) -> None:
        left = next(self.due, None)
        if left is not None:
            raise GroupFault(Verdict.CALL, "is not called", left.name)
        for at, (memory, node) in enumerate(self.over.items() if len(self.blocks) else (), start=1):
            value = memory.held[0] if memory.held else None
            if value is not node:
                detail = f"{memory.name} holds {value.name}" if value is not None else f"{memory.name} is left as it is"
                raise GroupFault(Verdict.MISSING, detail, node.name)
            if self.done[at, self.rows].any():
                raise GroupFault(Verdict.TWICE, f"writes a row of {memory.name} twice", node.name)
            self.done[at, self.rows] = True

    # -- calls ----------------------------------------------------------------------------------------

    def call(self, target: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Check that a call is the next member, on the elements that it needs, and note what it writes."""
        node = next(self.due, None)
        if node is None:
            raise GroupFault(Verdict.CALL, f"{target} is called behind the last member or outside of blocks")
        self.member = node.name
        operator: Any = node.target
        names = outs_of(operator, target)
        if names is None or len(names) != 1 or not isinstance(keywords.get(names[0]), _Piece):
            self._fault(Verdict.CALL, f"calls {target} and not a form of {operator} that is given a place")
        out: _Piece = keywords[names[0]]
        read_keywords = {name: value for name, value in keywords.items() if name != names[0]}
        passed = by_name(operator, args, read_keywords)
        self._check_literals(node, passed)
        pieces = {name: passed[name] for name in self.needs[node]}
        self._check_result(node, pieces, out)
        for name, need in self.needs[node].items():
            self._check_operand(node, name, need, pieces[name])
            self._check_overlap(node, name, need, pieces[name], out)
        self._write(node, out)

    def _check_literals(self, node: fx.Node, passed: Mapping[str, Any]) -> None:
        """Check all arguments but tensors: equal, but for the dimension, which is the last one of the block."""
        rowwise, names = rows_of(node)
        node_arguments = by_name(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        for name, value in node_arguments.items():
            if isinstance(value, fx.Node) and is_number(value):
                if passed[name] is not value:
                    self._fault(Verdict.ARGUMENT, f"{name} is {passed[name]!r}, and not {value.name}")
            elif isinstance(value, fx.Node):
                if not isinstance(passed[name], _Piece):
                    self._fault(Verdict.ARGUMENT, f"{name} is {passed[name]!r}, and no tensor")
            elif rowwise.dim is not None and name == names[rowwise.dim]:
                if not goes_along_last(passed[name], 2) or isinstance(passed[name], int) is not isinstance(value, int):
                    self._fault(Verdict.DIMENSION, f"works along {passed[name]} of a block")
            elif rowwise.keepdim is not None and name == names[rowwise.keepdim]:
                if passed[name] is not True:
                    self._fault(Verdict.SHAPE, "gives a block without columns")
            elif not same_literal(passed[name], value):
                self._fault(Verdict.ARGUMENT, f"{name} is {passed[name]!r}, and not {value!r}")

    # -- what it reads ----------------------------------------------------------------------------------

    def _check_operand(self, node: fx.Node, name: str, need: Need, piece: _Piece) -> None:
        """Check that a member reads the elements that it needs, for every row of every block."""
        memory = piece.memory
        value = memory.held[0] if memory.held else memory.value
        if value is not need.value:
            clause = f"which holds {value.name}" if value is not None else "to which nothing was written"
            self._fault(Verdict.VALUE, f"{name} is {memory.name}, {clause}, and not {need.value.name}")
        if need.whole:
            if (piece.shape, piece.strides, piece.starts.tolist()) != (need.sizes, need.strides, [need.offset]):
                self._fault(Verdict.ELEMENTS, f"{name} is not the whole {need.value.name}")
            return
        starts, step = self._numbers(node, name, piece)
        need_starts = need.starts[self.rows]
        wrong = np.argwhere(np.broadcast_to(starts != need_starts, self.rows.shape))
        if len(wrong):
            at = tuple(wrong[0])
            have, want = int(np.broadcast_to(starts, need_starts.shape)[at]), int(need_starts[at])
            detail = f"{name} in row {self.rows[at]} is {need.value.name} from element {have}, and not from {want}"
            self._fault(Verdict.ELEMENTS, detail)
        if need.columns > 1 and step != need.step:
            detail = f"columns of {name} lie {step} elements of {need.value.name} apart, and not {need.step}"
            self._fault(Verdict.ELEMENTS, detail)

    def _numbers(self, node: fx.Node, name: str, piece: _Piece) -> tuple[Int64s, int]:
        """The number of the element of its value at which each row of a piece begins, and the step between columns."""
        rowwise, names = rows_of(node)
        if name in {names[at] for at in rowwise.per_row}:
            row, column = piece.strides[0], 0
        else:
            row, column = replace(piece, shape=(1, 1, *piece.shape)[-2:], strides=(0, 0, *piece.strides)[-2:]).steps
        inside = np.arange(self.rows.shape[1], dtype=np.int64)
        if piece.memory.held is None:
            return piece.starts[:, None] + inside * row, column
        value, written = piece.memory.held
        written_row, written_column = written.steps
        if not np.array_equal(piece.starts, written.starts) or (row, column) not in (
            *((written_row, written_column), (written_row, 0), (0, written_column), (0, 0)),
        ):
            self._fault(
                Verdict.ELEMENTS, f"{name} is another part of {piece.memory.name} than {value.name} was written to"
            )
        result = self.results[value]
        numbers = result.starts[self.rows] if row or len(inside) == 1 else result.starts[self.rows[:, :1]]
        return numbers, result.step if column else 0

    # -- what it writes ---------------------------------------------------------------------------------

    def _check_result(self, node: fx.Node, pieces: Mapping[str, _Piece], out: _Piece) -> None:
        """Check that the place of a result has the shape that the operator gives for such pieces, and its dtype."""
        rowwise, names = rows_of(node)
        flat = {names[at] for at in (*rowwise.per_row, *rowwise.whole)}
        length = self.rows.shape[1]
        if rowwise.per_row and any(pieces[names[at]].shape != (length,) for at in rowwise.per_row):
            self._fault(Verdict.SHAPE, f"does not get {length} elements, one for each row")
        shapes = [piece.shape for name, piece in pieces.items() if name not in flat]
        columns = self.results[node].columns
        try:
            shape = np.broadcast_shapes(*shapes)
        except ValueError:
            self._fault(Verdict.SHAPE, f"operands of {shapes} do not broadcast")
        if rowwise != Rowwise() and any(len(one) > 1 and one != shape for one in shapes):
            self._fault(Verdict.SHAPE, f"operands of {shapes} are not of one shape")
        sizes = (*shape[:-1], 1) if rowwise.keepdim is not None else shape
        if out.shape != sizes or sizes != (length, columns):
            self._fault(Verdict.SHAPE, f"gives {sizes} for a place of {out.shape}; {(length, columns)} would be right")
        if out.dtype is not tensor_of(node).dtype:
            self._fault(Verdict.DTYPE, f"writes {out.dtype}")

    def _write(self, node: fx.Node, out: _Piece) -> None:
        """Note what a member has written, and check that the place is its own."""
        if out.memory in self.over:
            self._check_place(self.over[out.memory], out, out.memory.name)
            out.memory.held = node, out
            return
        if node is not self.last or self.out_place is None:
            row, column = out.steps
            apart = (out.shape[1] == 1 or column >= 1) and (len(out) == 1 or row >= max(1, column * out.shape[1]))
            if out.memory not in self.inside or not apart:
                self._fault(Verdict.PLACE, f"writes to {out.memory.name}, where no value inside may lie")
            out.memory.held = node, out
            return
        if out.memory is not self.out:
            self._fault(Verdict.PLACE, f"writes the result of the group to {out.memory.name}")
        self._check_place(node, out, "the result")
        if self.done[0, self.rows].any():
            self._fault(Verdict.TWICE, "writes a row of the result twice")
        self.done[0, self.rows] = True

    def _check_place(self, node: fx.Node, out: _Piece, name: str) -> None:
        """Check that ``out`` is where the result of ``node`` has the elements of the rows of the block."""
        result = self.results[node]
        row, column = out.steps
        starts = out.starts[:, None] + np.arange(len(out), dtype=np.int64) * row
        if not np.array_equal(starts, result.starts[self.rows]) or (result.columns > 1 and column != result.step):
            self._fault(Verdict.PLACE, f"writes to other elements of {name} than those of the rows of the block")

    def copy(self, out: _Piece, source: _Piece) -> None:
        """Check that an operand that is written gets what a member has made, in its rows of the block."""
        last_write = source.memory.held
        if out.memory not in self.over or last_write is None or not source.same_elements(last_write[1]):
            self._fault(Verdict.PLACE, f"copies {source.memory.name} to {out.memory.name}")
        if out.shape != source.shape or out.dtype is not source.dtype:
            self._fault(Verdict.SHAPE, f"copies {source.shape} to {out.memory.name} of {out.shape}")
        self._check_place(self.over[out.memory], out, out.memory.name)
        out.memory.held = last_write[0], out

    # -- where memory is shared -------------------------------------------------------------------------

    def _check_overlap(self, node: fx.Node, name: str, need: Need, piece: _Piece, out: _Piece) -> None:
        """Check that nothing is read that an earlier block, or another thread of the same call, has written over."""
        _, names = rows_of(node)
        allowed = name in {names[at] for at in ops.rule(node.target).overwrites}
        if piece.memory is out.memory and not (allowed and piece.same_elements(out)):
            self._fault(Verdict.OVERWRITTEN, f"writes its result over {name}, which it reads elsewhere")
        place = piece.memory.place
        for memory in self.over:
            if memory is not piece.memory and self._share(need, place, memory):
                self._fault(Verdict.OVERWRITTEN, f"{name} is read, which lies where {memory.name} is written")
        if place is None or self.out_place is None or place.memory != self.out_place.memory:
            return
        if piece.memory in self.over and self._share(self.results[self.last], self.out_place, piece.memory):
            self._fault(Verdict.OVERWRITTEN, f"writes the result over {piece.memory.name}, which is written, too")
        low, high = self._bytes(need, tensor_of(need.value), place)
        result = self.results[self.last]
        first, end = _row_bytes(result, tensor_of(self.last), self.out_place)
        ends = np.maximum.accumulate(end)
        written = (high > first.min()) & (low < ends[np.maximum(self.blocks - 1, 0)]) & (self.blocks > 0)
        if written.any():
            self._fault(Verdict.OVERWRITTEN, f"{name} is read, which earlier blocks have written over")
        if node is not self.last:
            return
        block_first, block_end = first[self.rows].min(axis=1), end[self.rows].max(axis=1)
        together = (high > block_first) & (low < block_end)
        if together.any() and not (allowed and self._in_place(need, place)):
            self._fault(Verdict.OVERWRITTEN, f"writes the result over {name}, which it reads elsewhere")

    def _share(self, need: Need, place: Place | None, memory: _Memory) -> bool:
        """Whether elements that are read or written lie in bytes of an operand that is written."""
        own = memory.place
        if place is None or own is None or place.memory != own.memory:
            return False
        low, high = _row_bytes(need, tensor_of(need.value), place)
        end = own.start + memory.extent * tensor_of(self.over[memory]).itemsize
        return bool(high.max() > own.start and low.min() < end)

    def _in_place(self, need: Need, place: Place) -> bool:
        """Whether each element of the result lies where the last member reads the operand for it."""
        result = self.results[self.last]
        one, other = tensor_of(need.value), tensor_of(self.last)
        alike = (
            one.dtype is other.dtype and not need.whole and (need.columns, need.step) == (result.columns, result.step)
        )
        starts = place.start + need.starts * one.itemsize
        first = None if self.out_place is None else self.out_place.start + result.starts * other.itemsize
        return alike and first is not None and np.array_equal(starts, first)

    def _bytes(self, need: Need, tensor: torch.Tensor, place: Place) -> tuple[Int64s, Int64s]:
        """The first byte and the end of what each block reads of an operand."""
        low, high = _row_bytes(need, tensor, place)
        if need.whole:
            return low.min(keepdims=True), high.max(keepdims=True)
        return low[self.rows].min(axis=1), high[self.rows].max(axis=1)

    def _fault(self, verdict: Verdict, detail: str) -> NoReturn:
        raise GroupFault(verdict, detail, self.member)


def _row_bytes(need: Need, tensor: torch.Tensor, place: Place) -> tuple[Int64s, Int64s]:
    """The first byte and the end of every row."""
    low = place.start + need.starts * tensor.itemsize
    return low, low + ((need.columns - 1) * need.step + 1) * tensor.itemsize


def _memory_of(node: fx.Node, place: Place) -> _Memory:
    extent = 0 if is_number(node) else extent_of(tensor_of(node))
    return _Memory(node.name, extent, node, place)
