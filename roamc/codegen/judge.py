"""The judge of emitted programs: the source calls what the planned graph says, on the bytes that the layout says.

The source runs once with stand-ins in the place of tensors and operators, which compute nothing:

    aten_mul_out(x, sin, out=mul)       is the next operator of the graph mul.Tensor(x, sin)?
                                        are x and sin the values that it reads, and do they lie where they should?
                                        is mul the place of its result, in shape, strides and dtype?
    del x                               is everything gone whose last reader has run, and nothing before?
    arena.close(4096, 8192)             are exactly the trims of the layout closed while an operator runs?

Shares no code with emission but its contract with whoever calls the program: :class:`Entry`, and the names in
:class:`Program`.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import fx

from roamc.codegen.calls import outs_of
from roamc.codegen.group_judge import check_groups
from roamc.codegen.source import Entry, Program
from roamc.errors import VerifyError, way_out
from roamc.graph import TrainGraph, attribute, maker_of, placeholders, storage_name, tensors_of
from roamc.graph.layout import Layout
from roamc.graph.memory import SharedStorages, started_by
from roamc.graph.storage_ids import StorageId, placed
from roamc.graph.verify import storage_lives
from roamc.interruptions import interruption
from roamc.operators import ops
from roamc.units import Bytes


def check_program(graph: TrainGraph, program: Program, code: CodeType | None = None) -> None:
    """Check that ``program`` calls the operators of ``graph`` in order, on the values and bytes that the layout says.

    The program runs once on stand-ins; no operator computes anything. The groups that it calls are checked as well, see
    :mod:`roamc.codegen.group_judge`.

    Args:
        graph: the planned graph, whose layout pass has run.
        program: the program that was emitted from it.
        code: the compiled source of the program, if there is one; else the source is compiled here.

    Raises:
        VerifyError: the program is another one than the graph, or the graph has no layout; names the line of the
            program, the operator, and what is wrong.
    """
    if graph.layout is None:
        raise VerifyError("after pass 'layout': the graph has no layout")
    check_groups(graph)
    judge = _Judge(graph, graph.layout, program)
    try:
        judge.run(code or compile(program.source, "<judged>", "exec"))
    except _Fault as fault:
        detail = str(fault)
    except Exception as error:  # whatever the source does when it runs, such as a name that is gone
        if interruption(error) is not None:
            raise
        detail = f"{type(error).__name__}: {error}"
    else:
        return
    at = f"line {judge.line}, {judge.node}" if judge.node else "before its first operator"
    raise VerifyError(f"the program of {graph.name}, {at}: {detail}; {way_out('layout')}")


class _Fault(Exception):
    """The program is wrong; the message says what it does."""


class _Cell:
    """The memory of one storage, as a stand-in sees it: the arena, or one storage outside it.

    It is garbage collected when no stand-in lies in it any more, by which the judge sees that memory is freed.

    Attributes:
        bound: whether it is known which storage of the graph it is.
    """

    bound = False


Geometry = tuple[Bytes, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]
"""(offset in the cell in bytes, shape, strides in elements, dtype, lazy conjugate bit, lazy negative bit)."""


@dataclass(frozen=True)
class _Stand:
    """What the program has in the place of a tensor.

    Attributes:
        judge: the judge that runs the program.
        cell: the memory that it lies in.
        geometry: where in the cell it lies, and its shape, strides, dtype and lazy bits.
    """

    judge: _Judge
    cell: _Cell
    geometry: Geometry

    def copy_(self, source: Any) -> None:
        """Check that ``source`` is a result whose planned place this is."""
        self.judge.copy(self, source)

    def as_strided(self, shape: Any, stride: Any, offset: int) -> _Stand:
        """Return another stand-in in the same memory, ``offset`` elements from the start of the memory."""
        place = offset * self.geometry[3].itemsize, tuple(shape), tuple(stride)
        return _Stand(self.judge, self.cell, (*place, *self.geometry[3:]))


@dataclass(frozen=True)
class _Operator:
    """What the program has in the place of an operator or kernel, ``target``: a call of it is checked."""

    judge: _Judge
    target: Any

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.judge.call(self.target, args, keywords, sys._getframe(1).f_lineno)


@dataclass(frozen=True)
class _Torch:
    """What the program has in the place of ``torch``: allocations give stand-ins."""

    judge: _Judge

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_strided(self, shape: Any, stride: Any, *, dtype: torch.dtype, device: str) -> _Stand:
        return _Stand(self.judge, _Cell(), (0, tuple(shape), tuple(stride), dtype, False, False))


class _Judge:
    """Runs a program on stand-ins and checks every call; the program has it in the place of its arena.

    Its checks raise :class:`_Fault` where the program does something else than the graph and the layout say.

    Attributes:
        graph: the planned graph.
        layout: the layout of the graph.
        program: the program that is judged.
        line: line of the source that made the last call.
        node: name of the operator of the last call.
    """

    def __init__(self, graph: TrainGraph, layout: Layout, program: Program) -> None:
        self.graph, self.layout, self.program = graph, layout, program
        self.line, self.node = 0, ""
        self._nodes = {node.name: node for node in graph.graph.nodes}
        self._position = {name: at for at, name in enumerate(self._nodes)}
        self._names, self._tensors = _tensors_by_place(graph)
        self._constants = {node: _Cell() for node in graph.graph.nodes if node.op == "get_attr"}
        last = ((dead, name) for name, (_, dead, _) in storage_lives(graph).items())
        self._deaths = sorted((dead, name) for dead, name in last if name not in layout.offset)[::-1]
        self._arena = _Cell()
        self._cells: dict[str, weakref.ref[_Cell]] = dict.fromkeys(layout.offset, weakref.ref(self._arena))
        for node, cell in self._constants.items():
            self._cells |= {name: weakref.ref(cell) for name in self._names_of(node)}
        self._written: set[str] = set()
        self._others: dict[tuple[fx.Node, int], object] = {}
        self._views: dict[str, _Stand] = {}
        self._uncopied: list[tuple[weakref.ref[_Stand], fx.Node, int]] = []
        self._closed = set(layout.trimmed)
        self._due: Iterator[fx.Node] = iter(())
        self._handed: set[str] = set()

    # -- the whole program ----------------------------------------------------------------------

    def run(self, code: CodeType) -> None:
        """Bind the program to the judge as its arena, then run its functions one after the other."""
        namespace = {name: self._constant_of(value) for name, value in self.program.constants.items()}
        exec(code, namespace)
        bound = namespace["bind"](self)
        for (name, position), view in self.program.places.items():
            self._expect(self._views.get(view), self._nodes[name], position, "the planned tensor")
        previous: dict[fx.Node, Any] = {}
        for entry in self.program.entries.values():
            previous = self._function(bound[entry.name], entry, previous)
        self._check_all_ran()
        if self.graph.boundary:
            placed = [self._nodes[name] for name in self.graph.saved if self._is_placed(self._nodes[name])]
            for node, stand in zip(placed, bound["saved"](), strict=True):
                self._expect(stand, node, 0, "the saved tensor")

    def _function(self, function: Any, entry: Entry, previous: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Run one function on stand-ins and return its results by node.

        Args:
            function: the bound function.
            entry: its parameters, results and phases.
            previous: node to result of the function before, from which parameters are taken; emptied.
        """
        self._due = iter(self._operators(entry))
        self._handed = {name for node in entry.results if node is not None for name in self._names_of(node)}
        args = [previous.pop(node) if node in previous else self._fed(node) for node in entry.parameters]
        previous.clear()
        results = function(args)
        left = next(self._due, None)
        if left is not None or self._uncopied or args:
            raise _Fault(f"{entry.name} ends before {left}" if left else f"{entry.name} leaves results or arguments")
        if len(results) != len(entry.results):
            raise _Fault(f"{entry.name} returns {len(results)} values and not {len(entry.results)}")
        for node, value in zip(entry.results, results, strict=True):
            if not (value is None if node is None else self._is(value, node)):
                raise _Fault(f"{entry.name} returns something else in the place of {node}")
        return {node: value for node, value in zip(entry.results, results, strict=True) if node is not None}

    def _operators(self, entry: Entry) -> list[fx.Node]:
        """Return the operators that one function has to call, in order.

        Picks of one result (``getitem``) are no calls, and views of planned tensors are planned tensors themselves.
        """
        mine = [node for node in self.graph.graph.nodes if self.graph.phase.get(node.name) in entry.phases]
        return [node for node in mine if self._is_called(node)]

    def _is_called(self, node: fx.Node) -> bool:
        """Whether the program has to call ``node``, see :meth:`_operators`."""
        if node.op != "call_function" or node.target is operator.getitem:
            return False
        waits = started_by(node) is not None
        return waits or self._makes(node) or not ops.is_view(node.target) or not self._is_placed(node)

    def _makes(self, node: fx.Node) -> bool:
        """Whether ``node`` makes a storage."""
        return any(maker_of(name) == node.name for name in self._names_of(node))

    def _check_all_ran(self) -> None:
        """Check that each phase runs in one function, each input is fed, and the right ranges are closed at the end."""
        phases = [phase for entry in self.program.entries.values() for phase in entry.phases]
        lost = [name for name, phase in self.graph.phase.items() if phases.count(phase) != 1]
        fed = [node for entry in self.program.entries.values() for node in entry.parameters if node.op == "placeholder"]
        if lost or set(fed) != set(placeholders(self.graph.graph)):
            raise _Fault("the functions are not the whole graph")
        if self._closed != {(trim.low, trim.high) for trim in self.layout.trims if not trim.before}:
            raise _Fault(f"ends with {sorted(self._closed)} trimmed")

    # -- what the program calls -------------------------------------------------------------------

    def view(
        self,
        name: str,
        offset: Bytes,
        size: Any,
        stride: Any,
        dtype: torch.dtype,
        conj: bool = False,
        neg: bool = False,
    ) -> _Stand:
        """Return a stand-in for a planned tensor; see :meth:`roamc.runtime.arena.Arena.view`."""
        self._views[name] = stand = _Stand(self, self._arena, (offset, tuple(size), tuple(stride), dtype, conj, neg))
        return stand

    def close(self, low: Bytes, high: Bytes) -> None:
        """Note that the program trims the range ``[low, high)`` of the arena, in bytes.

        Raises:
            _Fault: the range is trimmed already.
        """
        if (low, high) in self._closed:
            raise _Fault(f"trims [{low}, {high}) twice")
        self._closed.add((low, high))

    def open(self, low: Bytes, high: Bytes) -> None:
        """Note that the program uses the range ``[low, high)`` of the arena, in bytes, again.

        Raises:
            _Fault: the range is not trimmed.
        """
        if (low, high) not in self._closed:
            raise _Fault(f"takes [{low}, {high}) again, which is not trimmed")
        self._closed.remove((low, high))

    def copy(self, place: _Stand, source: Any) -> None:
        """Check that the program copies ``source``, a result of its last operator, to that result's planned place.

        Raises:
            _Fault: ``source`` is no result that waits to be copied, or ``place`` is not its planned place.
        """
        for at, (waiting, node, position) in enumerate(self._uncopied):
            if waiting() is source:
                self._expect(place, node, position, "the copy of the result")
                self._written.add(self._names[node, position])
                del self._uncopied[at]
                return
        raise _Fault("copies what is no result of its last operator")

    def call(self, target: Any, args: Sequence[Any], keywords: Mapping[str, Any], line: int) -> Any:
        """Check that a call is the next operator of the graph, on the right values and places, and return its results.

        Args:
            target: the operator or kernel that the program calls.
            args: the positional arguments of the call.
            keywords: the keyword arguments, places of results included.
            line: the line of the source that makes the call.

        Returns:
            Stand-ins for the results; None where the operator writes them to places that it is given.

        Raises:
            _Fault: the call is another one than the graph and the layout say.
        """
        node = next(self._due, None)
        self.line, self.node = line, node.name if node is not None else "behind the last operator"
        if node is None or self.program.statements.get(line, ("",))[0] != node.name:
            raise _Fault(f"calls {target} where {node} is due, or not in a line of it")
        if self._uncopied:
            raise _Fault(f"does not copy a result of {self._uncopied[0][1]} to its place")
        if self._makes(node) or not ops.is_view(node.target):  # other views touch no bytes, and stand anywhere
            self._check_memory(self._position[node.name])
        outs = outs_of(node.target, target)
        if outs is None:
            raise _Fault(f"calls {target} and not {node.target}")
        written = [keywords.get(name) for name in outs]
        if outs == ("out",) and isinstance(written[0], tuple):
            written = list(written[0])
        read_keywords = {name: value for name, value in keywords.items() if name not in outs}
        if not self._is(tuple(args), tuple(node.args)) or not self._is(read_keywords, dict(node.kwargs)):
            raise _Fault("reads other arguments than in the planned graph")
        return self._overwrite(node, written) if outs else self._results(node)

    def _overwrite(self, node: fx.Node, outs: Sequence[Any]) -> None:
        """Check the places ``outs`` that the program gives to an operator for its results."""
        positions = [position for position, _ in tensors_of(node)]
        if len(outs) != len(positions):
            raise _Fault(f"writes {len(outs)} results of {len(positions)}")
        for out, position in zip(outs, positions, strict=True):
            if isinstance(out, _Stand) and out.cell is not self._arena and not out.cell.bound:
                self._bind(node, position, out.cell)
            self._expect(out, node, position, "the result")
            self._written.add(self._names[node, position])

    def _results(self, node: fx.Node) -> Any:
        """Return stand-ins for the results of an operator that is given no places for them.

        They are views, arguments that it wrote, or new memory.
        """
        if node.name in self.graph.reuse:
            raise _Fault("does not write over its argument")
        value = node.meta.get("val")
        if not isinstance(value, list | tuple):
            return self._result(node, 0, value)
        return tuple(self._result(node, position, item) for position, item in enumerate(value))

    def _result(self, node: fx.Node, position: int, value: Any) -> Any:
        """Return a stand-in for one result of ``node``; ``value`` is the fake tensor or number of the graph."""
        if not isinstance(value, torch.Tensor):
            return self._others.setdefault((node, position), object())
        name = self._names[node, position]
        cell_ref = self._cells.get(name)
        if name in self.layout.offset and name not in self._written:
            stand = _Stand(self, _Cell(), self._geometry(node, position))
            self._uncopied.append((weakref.ref(stand), node, position))
            return stand
        cell = self._bind(node, position, _Cell()) if cell_ref is None else cell_ref()
        if cell is None:
            raise _Fault(f"is a view of what is gone: {name}")
        return _Stand(self, cell, self._geometry(node, position))

    # -- memory -----------------------------------------------------------------------------------

    def _check_memory(self, position: int) -> None:
        """Check the memory while the operator at ``position`` of the node list runs.

        Storages outside the arena that are dead must be freed, and exactly the trims of the layout closed.
        """
        while self._deaths and self._deaths[-1][0] <= position:
            _, name = self._deaths.pop()
            cell = self._cells.get(name)
            if cell is not None and cell() not in (None, *self._constants.values()) and name not in self._handed:
                raise _Fault(f"{name} is still there, which nobody reads any more")
        if not self.layout.trims and not self._closed:
            return
        planned_trims = set()
        for trim in self.layout.trims:
            first = self._position[trim.after] + 1 if trim.after else 0
            if first <= position < (self._position[trim.before] if trim.before else len(self._position)):
                planned_trims.add((trim.low, trim.high))
        if planned_trims != self._closed:
            raise _Fault(f"runs while {sorted(self._closed)} are trimmed, and not {sorted(planned_trims)}")

    def _bind(self, node: fx.Node, position: int, cell: _Cell) -> _Cell:
        """Note that ``cell`` is the storage of a result, unless that has a cell already; return ``cell``."""
        cell.bound = True
        self._cells.setdefault(self._names[node, position], weakref.ref(cell))
        return cell

    def _fed(self, node: fx.Node) -> Any:
        """Return a stand-in for an input of the graph."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return self._others.setdefault((node, 0), object())
        cell_ref = self._cells.get(self._names[node, 0])
        cell = cell_ref() if cell_ref is not None else None
        return _Stand(self, cell or self._bind(node, 0, _Cell()), self._geometry(node, 0))

    def _constant_of(self, value: Any) -> Any:
        """Return what the program gets in the place of one of its constants."""
        if value is torch:
            return _Torch(self)
        return _Operator(self, value) if callable(value) else value

    # -- what is what -----------------------------------------------------------------------------

    def _names_of(self, node: fx.Node) -> list[str]:
        """Return the names of the storages of the tensors that ``node`` gives."""
        return [self._names[node, position] for position, _ in tensors_of(node)]

    def _is_placed(self, node: fx.Node) -> bool:
        """Whether ``node`` gives tensors and all of them lie in the arena."""
        names = self._names_of(node)
        return bool(names) and all(name in self.layout.offset for name in names)

    def _geometry(self, node: fx.Node, position: int) -> Geometry:
        """Return where a result has to lie: in the arena, or in its own storage outside."""
        tensor, name = self._tensors[node, position], self._names[node, position]
        offset = self.layout.offset.get(name, 0) + int(tensor.storage_offset()) * tensor.itemsize
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return offset, shape, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg()

    def _expect(self, value: Any, node: fx.Node, position: int, subject: str) -> None:
        """Check that a value of the program is result ``position`` of ``node``; ``subject`` names it in the message."""
        if not self._lies(value, node, position):
            actual = f"lies at {value.geometry}" if isinstance(value, _Stand) else f"is {value}"
            raise _Fault(f"{subject} {position} of {node.name} {actual}, and not at {self._geometry(node, position)}")

    def _lies(self, value: Any, node: fx.Node, position: int) -> bool:
        """Whether a value of the program is a stand-in for a result of the graph, in the right memory and place."""
        cell = self._cells.get(self._names[node, position])
        alive = cell is not None and isinstance(value, _Stand) and value.cell is cell()
        return alive and value.geometry == self._geometry(node, position)

    def _is(self, value: Any, expected: Any) -> bool:
        """Whether an argument of the program is that of the graph; literals must be equal in type and in all bits."""
        if isinstance(expected, fx.Node):
            return self._is_value_of(value, expected)
        if isinstance(expected, dict):
            return value.keys() == expected.keys() and all(self._is(value[key], expected[key]) for key in expected)
        if isinstance(expected, list | tuple):
            alike = isinstance(value, list | tuple) and len(value) == len(expected)
            return alike and all(self._is(one, other) for one, other in zip(value, expected, strict=True))
        if isinstance(value, _Operator):
            return value.target is expected
        return value is expected or (type(value) is type(expected) and repr(value) == repr(expected))

    def _is_value_of(self, value: Any, node: fx.Node) -> bool:
        """Whether a value of the program stands for ``node``."""
        if node.op == "get_attr":
            constant = attribute(self.graph.module, str(node.target))
            return value is constant or (isinstance(value, _Operator) and value.target is constant)
        fake_value = node.meta.get("val")
        if isinstance(fake_value, torch.Tensor):
            return self._lies(value, node, 0)
        if node.target is operator.getitem:
            return value is self._others.get((node.args[0], node.args[1]), self)  # type: ignore[arg-type]
        if not isinstance(fake_value, list | tuple):
            return value is self._others.get((node, 0), self)
        return all(self._lies(value[position], node, position) for position, _ in tensors_of(node))


Result = tuple[fx.Node, int]
"""A node, and the position of a tensor among its results."""


def _tensors_by_place(graph: TrainGraph) -> tuple[dict[Result, str], dict[Result, torch.Tensor]]:
    """Return the name of the storage of every tensor of ``graph``, and every fake tensor."""
    shared, first = SharedStorages(graph), dict[StorageId, str]()
    names: dict[Result, str] = {}
    tensors: dict[Result, torch.Tensor] = {}
    for node in graph.graph.nodes:
        for position, tensor, storage in placed(node):
            names[node, position] = first.setdefault(shared.of(storage), storage_name(node, position))
            tensors[node, position] = tensor
    return names, tensors
