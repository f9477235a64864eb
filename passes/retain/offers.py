"""Which storages codecs can keep smaller, as offers to the solver of :mod:`roamc.solvers.retain`.

What a codec adds to the graph is read off a small graph with its operators alone, once for all storages of one
geometry; :func:`roamc.passes.retain.compress.compress` writes the same operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from roamc import cost
from roamc.compat import FakeTensorMode
from roamc.cost import DeviceProfile
from roamc.graph import Phase, TrainGraph, operators
from roamc.graph.memory import build_memory
from roamc.graph.storage_ids import number_result
from roamc.options import Options
from roamc.passes.retain.codecs import Coding
from roamc.passes.retain.compress import (
    Code,
    Value,
    codings,
    copy_into,
    geometry_of,
    recorded,
    recorded_stand_in,
    values,
)
from roamc.passes.retain.problem import Question, question
from roamc.solvers.order.problem import reads, reusables, writes
from roamc.solvers.retain import Extra, Offer, Part, Result

WORTH_SHARE = 1_000
"""A storage gets a codec only if it is larger than all saved bytes divided by this number."""

_SOURCE = 0
"""The buffer of a small graph that stands for the storage itself; each other one is named one lower in an offer."""


def offered(asked: Question, options: Options, profile: DeviceProfile) -> list[tuple[Code, Offer]]:
    """Return an offer for each codec that makes a saved storage smaller, in the graph's order.

    Storages of no more than 1 / ``WORTH_SHARE`` of all saved bytes are left out.

    Args:
        asked: the graph as a problem without offers; its numbers name what the offers name.
        options: ``codecs`` names codecs with an error that may be used; ``disable`` may turn in-place reuse off.
        profile: the device profile that predicts the time of codecs.
    """
    writer = _Offers(asked, options, profile)
    least = sum(storage.nbytes for storage in asked.memory.saved) // WORTH_SHARE
    large = [value for value in values(asked.memory) if value.storage.nbytes > least and writer.knows_readers(value)]
    candidates = [(value, name, coding) for value in large for name, coding in codings(value, options.codecs)]
    return [
        (Code(value.storage.name, name), writer.offer(value, coding, (place, len(candidates))))
        for place, (value, name, coding) in enumerate(candidates)
    ]


@dataclass(frozen=True)
class _Row:
    """An operator that a codec adds, before it has a place in the graph; fields as in :class:`Extra`."""

    seconds: float
    workspace: int
    repeatable: bool
    reads: tuple[int, ...]
    makes: tuple[Result, ...]


@dataclass(frozen=True)
class _Rows:
    """The operators of a codec for storages of one geometry.

    Attributes:
        encode: operators that make the smaller form of buffer :data:`_SOURCE`.
        decode: operators that make the storage again.
        nbytes: bytes of the smaller form.
        result: which of the buffers that both make is the storage again.
    """

    encode: tuple[_Row, ...]
    decode: tuple[_Row, ...]
    nbytes: int
    result: int


class _Offers:
    """Makes offers for the storages of one problem."""

    def __init__(self, asked: Question, options: Options, profile: DeviceProfile) -> None:
        self.asked, self.options, self.profile = asked, options, profile
        self.operator = {name: number for number, name in enumerate(asked.operators)}
        self.buffer = {storage.index: number for number, storage in enumerate(asked.storages)}
        self.position = {node: number for number, node in enumerate(asked.graph.graph.nodes)}
        self.rows: dict[object, _Rows] = {}

    def knows_readers(self, value: Value) -> bool:
        """Whether every use of the storage is one that reads it by an argument, so that a codec can redirect it."""
        read = {r.reader.name for r in (*value.saved.early, *value.saved.late, *value.shapes)}
        memory = self.asked.memory
        return read == {memory.operators[user].node.name for user in memory.uses[value.storage.index]}

    def offer(self, value: Value, coding: Coding | None, place: tuple[int, int]) -> Offer:
        """Return the offer of a coding of ``value``, or of stand-ins alone.

        Args:
            value: the storage, with its readers.
            coding: the coding; None if readers behind forward need only the shape.
            place: the number of this offer, and how many there are: of two codecs at one place the graph has the later
                ``encode`` first, and the later ``decode`` last.
        """
        source = self.buffer[value.storage.index]
        extras: list[Extra] = []
        instead: list[tuple[int, int]] = []
        nbytes = 0
        if coding is not None:
            rows = self._coding_rows(value, coding)
            nbytes = rows.nbytes
            extras += self._coded(value, rows, source, place)
            instead += [(self.operator[read.reader.name], rows.result) for read in value.saved.late]
        for row, reader in self._stand_ins(value):
            own = sum(len(extra.makes) for extra in extras)
            anchor = self.operator[reader.name]
            extras.append(_placed(row, Part.STAND_IN, anchor, sum(place), source))
            instead.append((anchor, own))
        return Offer(source, nbytes, tuple(extras), tuple(dict.fromkeys(instead)))

    def _coded(self, value: Value, rows: _Rows, source: int, place: tuple[int, int]) -> Iterator[Extra]:
        """The operators that encode and decode ``value``."""
        at, count = place
        last = max((value.saved.node, *(read.reader for read in value.saved.early)), key=self.position.__getitem__)
        producer = self.asked.memory.operators[value.storage.producer].node
        behind = self.operator[producer.name if last is value.saved.node else last.name]
        for row in rows.encode:
            yield _placed(row, Part.ENCODE, behind, (self.position[last] + 1) * count - at, source)
        front = self.operator[value.saved.late[0].reader.name]
        for row in rows.decode:
            yield _placed(row, Part.DECODE, front, at, source)

    def _coding_rows(self, value: Value, coding: Coding) -> _Rows:
        """The operators of ``coding`` for the geometry of ``value``; found once for all equal ones."""
        geometry = geometry_of(value.saved.node)
        key = coding, geometry
        if key not in self.rows:
            encode = recorded(coding, "encode", *geometry)
            mini = _Small(geometry)
            code = mini.add(encode)
            first = len(operators(mini.graph)) - 1
            decode = recorded(coding, "decode", *geometry_of(code))
            result = mini.add(decode, code)
            self.rows[key] = self._numbered(mini, code, result, {n.name for n in operators(mini.graph)[1 : first + 1]})
        return self.rows[key]

    def _stand_ins(self, value: Value) -> Iterator[tuple[_Row, fx.Node]]:
        """Yield for each reader that needs only the shape the operator that makes its stand-in, and the reader."""
        shape, _, dtype, device = geometry = geometry_of(value.saved.node)
        for read in value.shapes:
            key = "stand-in", geometry
            if key not in self.rows:
                mini = _Small(geometry)
                stand_in = mini.add(recorded_stand_in(shape, dtype, device))
                self.rows[key] = self._numbered(mini, stand_in, stand_in, set())
            for row in self.rows[key].decode:
                yield row, read.reader

    def _numbered(self, mini: _Small, code: fx.Node, result: fx.Node, encoding: set[str]) -> _Rows:
        """The operators of a small graph, as numbers; ``encoding`` names those that encode."""
        graph = mini.finished(self.asked.graph.threads)
        memory = build_memory(graph)
        order = [op.node.name for op in memory.operators]
        small_question = question(
            graph, self.options, order, cost.prices(graph, self.profile), self.asked.allowed, as_given=True
        )
        problem = small_question.problem
        rows = [self._row(small_question, op) for op in range(1, problem.num_ops)]
        encode = tuple(row for row, name in zip(rows, order[1:], strict=True) if name in encoding)
        buffer = {storage.index: number for number, storage in enumerate(small_question.storages)}
        return _Rows(
            encode=encode,
            decode=tuple(rows[len(encode) :]),
            nbytes=memory.storage_of(code).nbytes,
            result=buffer[memory.storage_of(result).index] - 1,
        )

    def _row(self, small_question: Question, op: int) -> _Row:
        problem, order = small_question.problem, small_question.problem.order
        buffers = writes(order).lists()[op]
        reusable = reusables(order).lists()
        return _Row(
            seconds=float(problem.seconds[op]),
            workspace=int(order.workspace[op]),
            repeatable=bool(problem.repeatable[op]),
            reads=tuple(map(_own, reads(order).lists()[op])),
            makes=tuple(
                Result(int(order.size[k]), bool(problem.droppable[k]), tuple(map(_own, reusable[k]))) for k in buffers
            ),
        )


class _Small:
    """A graph under construction that has a storage of one geometry, and operators of a codec for it.

    Attributes:
        graph: the FX graph; its first operator makes the storage.
    """

    def __init__(self, geometry: tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]) -> None:
        shape, stride, dtype, device = geometry
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        target = torch.ops.aten.empty_strided.default
        keywords: dict[str, fx.node.Argument] = {"dtype": dtype, "device": device}
        self.source = self.graph.create_node("call_function", target, (shape, stride), keywords)
        with self.mode:
            self.source.meta["val"] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        number_result(self.source)

    def add(self, steps: fx.Graph, source: fx.Node | None = None) -> fx.Node:
        """Add recorded operators that read ``source``, or the storage if it is None; return the node of the result."""
        return copy_into(self.graph, self.mode, steps, source or self.source, "coded")[1]

    def finished(self, threads: int) -> TrainGraph:
        """Return the graph, in which all is forward and nothing is handed out."""
        self.graph.output(())
        phase = {node.name: Phase.FORWARD for node in operators(self.graph)}
        return TrainGraph("codec", fx.GraphModule(torch.nn.Module(), self.graph), (), (), phase, threads=threads)


def _own(buffer: int) -> int:
    """A buffer of a small graph as an offer names it, in which :data:`_SOURCE` is still to be replaced."""
    return buffer if buffer == _SOURCE else ~(buffer - 1)


def _placed(row: _Row, part: Part, anchor: int, rank: int, source: int) -> Extra:
    """The operator at its place, with ``source`` for the storage that it reads."""
    makes = tuple(
        dataclasses.replace(result, reusable=tuple(source if k == _SOURCE else k for k in result.reusable))
        for result in row.makes
    )
    read = tuple(source if buffer == _SOURCE else buffer for buffer in row.reads)
    return Extra(part, anchor, rank, row.seconds, row.workspace, row.repeatable, read, makes)
