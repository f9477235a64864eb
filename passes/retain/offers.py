"""Which storages codecs can keep smaller, as offers to the solver of :mod:`roamc.solvers.retain`.

What a codec adds to the graph is read off a small graph with its operators alone, once for all storages of one
geometry; :func:`roamc.passes.retain.compress.compress` writes the same operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from roamc import cost
from roamc.compat import FakeTensorMode
from roamc.cost import DeviceProfile
from roamc.graph import Phase, TrainGraph, operators
from roamc.graph.memory import Place, build_memory
from roamc.graph.reader_kinds import ReaderKinds
from roamc.graph.storage_ids import number_result
from roamc.options import Options
from roamc.passes.retain.codecs import Coding, projections
from roamc.passes.retain.codecs.projections import Products, projection_of
from roamc.passes.retain.compress import (
    Code,
    Geometry,
    copy_into,
    geometry_of,
    recorded,
    recorded_stand_in,
)
from roamc.passes.retain.fits import Value, codings, late_readers, made_of, values
from roamc.passes.retain.kernels import as_kernel, seconds_inside
from roamc.passes.retain.problem import Question, question
from roamc.solvers.order.problem import reads, reusables, writes
from roamc.solvers.retain import Extra, Offer, Part, Result

WORTH_SHARE = 1_000
"""A storage gets a codec only if it is larger than all saved bytes divided by this number."""


def offered(asked: Question, options: Options, profile: DeviceProfile) -> list[tuple[Code, Offer]]:
    """Return an offer for each codec that makes a saved storage smaller, those of :func:`may_cost_more` last.

    Where other saved storages can be made again from what is decoded, a second offer does so for all of them. Storages
    of no more than 1 / ``WORTH_SHARE`` of all saved bytes are left out.

    Args:
        asked: the graph as a problem without offers; its numbers name what the offers name.
        options: ``codecs`` names codecs with an error that may be used; ``disable`` may turn in-place reuse off.
        profile: the device profile that predicts the time of codecs.
    """
    writer = _Offers(asked, options, profile)
    least = sum(storage.nbytes for storage in asked.memory.saved) // WORTH_SHARE
    saved = {value.storage.index: value for value in values(asked.memory) if writer.knows_readers(value)}
    kinds = ReaderKinds(asked.graph)
    candidates: list[tuple[Value, str, Coding | Products | None, Sequence[Value]]] = []
    for value in (each for each in saved.values() if each.storage.nbytes > least):
        for name, coding in codings(value, options.codecs, kinds):
            if writer.in_time(value, coding):
                again = [each for each in made_of(value, name, saved) if writer.may_run_late(each, value)]
                candidates += [(value, name, coding, each) for each in ([(), again] if again else [()])]
    candidates.sort(key=lambda candidate: may_cost_more(candidate[1], options))
    return [
        (
            Code(value.storage.name, name, tuple(each.storage.name for each in again)),
            writer.offer(value, coding, again, (place, len(candidates))),
        )
        for place, (value, name, coding, again) in enumerate(candidates)
    ]


def may_cost_more(codec: str, options: Options) -> bool:
    """Whether to keep a value by ``codec`` is often worse than to make it again: it is asked for with and without.

    Exact codes are of values that are hard to make again, such as masks. Others, and projections, are of any.
    """
    return codec in options.codecs or codec == projections.NAME


@dataclass(frozen=True)
class _Row:
    """An operator that a codec adds, before it has a place in the graph; fields as in :class:`Extra`.

    Buffer 0 stands for the storage itself, buffers 1, 2 and so on for what the codec reads beside it.
    """

    seconds: float
    workspace: int
    repeatable: bool
    reads: tuple[int, ...]
    makes: tuple[Result, ...]


@dataclass(frozen=True)
class _Rows:
    """The operators of a codec for storages of one geometry.

    Attributes:
        encode: operators that make the smaller form of the storage.
        decode: operators that make the storage again.
        nodes: the nodes of ``decode``, in a small graph.
        nbytes: bytes of the smaller form.
        result: which of the buffers that both make is the storage again.
    """

    encode: tuple[_Row, ...]
    decode: tuple[_Row, ...]
    nodes: tuple[fx.Node, ...]
    nbytes: int
    result: int


class _Source(NamedTuple):
    """What a codec reads that it does not make: the number of its buffer, and whether the step itself makes it.

    An input of the graph is no buffer of the problem: its number is None.
    """

    buffer: int | None
    own: bool


class _Offers:
    """Makes offers for the storages of one problem."""

    def __init__(self, asked: Question, options: Options, profile: DeviceProfile) -> None:
        self.asked, self.options, self.profile = asked, options, profile
        self.operator = {name: number for number, name in enumerate(asked.operators)}
        self.buffer = {storage.index: number for number, storage in enumerate(asked.storages)}
        self.position = {node: number for number, node in enumerate(asked.graph.graph.nodes)}
        self.step = {op: at for at, op in enumerate(asked.problem.sequence.tolist())}
        self.rows: dict[object, _Rows] = {}

    def in_time(self, value: Value, coding: Coding | Products | None) -> bool:
        """Whether all that ``coding`` reads beside the storage is made in front of the first reader behind forward.

        Of products that are to move: whether they are left out, where they are, once nobody reads them there.
        """
        if isinstance(coding, Products):
            return all(self.asked.problem.idle[self.operator[node.name]] for node in coding.nodes)
        beside = () if coding is None else coding.beside(value.saved.node)
        producers = [self.asked.memory.storage_of(node).producer for node in beside]
        makers = [self.asked.memory.operators[producer].node.name for producer in producers if producer >= 0]
        late = [self.step[self.operator[read.reader.name]] for read in value.saved.late]
        return all(self.step[self.operator[name]] < min(late) for name in makers)

    def may_run_late(self, result: Value, value: Value) -> bool:
        """Whether the operator of ``result`` may run again in front of all readers behind forward of both values."""
        problem, op = self.asked.problem, self.operator[result.saved.node.name]
        late = [self.step[self.operator[reader.name]] for reader in late_readers(value, [result])]
        lasts = problem.expires[op] == problem.num_ops and problem.droppable[self.buffer[result.storage.index]]
        return bool(problem.repeatable[op] and lasts) and self.step[op] < min(late)

    def knows_readers(self, value: Value) -> bool:
        """Whether every use of the storage is one that reads it by an argument, so that a codec can redirect it."""
        read = {r.reader.name for r in (*value.saved.early, *value.saved.late, *value.shapes)}
        memory = self.asked.memory
        return read == {memory.operators[user].node.name for user in memory.uses[value.storage.index]}

    def offer(
        self, value: Value, coding: Coding | Products | None, again: Sequence[Value], place: tuple[int, int]
    ) -> Offer:
        """Return the offer of a coding of ``value``, or of stand-ins alone.

        Args:
            value: the storage, with its readers.
            coding: the coding, or products that move to forward; None if readers behind forward need only the shape.
            again: what readers behind forward get made again from the decoded value.
            place: the number of this offer, and how many there are: of two codecs at one place the graph has the later
                ``encode`` first, and the later ``decode`` last.
        """
        source = self.buffer[value.storage.index]
        extras: list[Extra] = []
        instead: list[tuple[int, int, int]] = []
        nbytes, saves = 0, tuple[float, ...]()
        if isinstance(coding, Products):
            early = self._projected(value, coding, place)
            nbytes, saves = early.nbytes, early.saves
            extras += early.operators
            instead += early.instead
        elif coding is not None:
            rows = self._coding_rows(value, coding)
            nbytes = rows.nbytes
            front = self.operator[min(late_readers(value, again), key=self.position.__getitem__).name]
            extras += self._coded(value, rows, coding, front, place)
            instead += [(self.operator[read.reader.name], source, rows.result) for read in value.saved.late]
            for each in again:
                own, buffer = sum(len(extra.makes) for extra in extras), self.buffer[each.storage.index]
                extras.append(self._again(each, (source, rows.result), front, place))
                instead += [(self.operator[read.reader.name], buffer, own) for read in (*each.saved.late, *each.shapes)]
        for row, reader in self._stand_ins(value):
            own = sum(len(extra.makes) for extra in extras)
            anchor = self.operator[reader.name]
            extras.append(_placed(row, Part.STAND_IN, anchor, sum(place), ()))
            instead.append((anchor, source, own))
        return Offer(source, nbytes, tuple(extras), tuple(dict.fromkeys(instead)), saves)

    def _source(self, node: fx.Node) -> _Source:
        storage = self.asked.memory.storage_of(node)
        return _Source(self.buffer.get(storage.index), storage.place is Place.TEMPORARY)

    def _again(self, value: Value, decoded: tuple[int, int], front: int, place: tuple[int, int]) -> Extra:
        """The operator that makes ``value`` once more; ``decoded`` is a buffer, and what it reads in its place."""
        order, (source, own) = self.asked.problem.order, decoded

        def late(buffers: Iterable[int]) -> tuple[int, ...]:
            return tuple(~own if each == source else each for each in buffers)

        read = late(reads(order).lists()[self.operator[value.saved.node.name]])
        reusable = late(reusables(order).lists()[self.buffer[value.storage.index]])
        return self._like(value.saved.node, Part.DECODE, (front, place[0]), read, reusable)

    def _coded(self, value: Value, rows: _Rows, coding: Coding, front: int, place: tuple[int, int]) -> Iterator[Extra]:
        """The operators that encode and decode ``value``."""
        sources = [self._source(node) for node in (value.saved.node, *coding.beside(value.saved.node))]
        for row in rows.encode:
            yield _placed(row, Part.ENCODE, *self._behind(value, place), sources)
        readers = [read.reader for read in value.saved.late]
        for row, node in zip(rows.decode, rows.nodes, strict=True):
            inside = seconds_inside(node, value.saved.node, readers, self.profile)
            row = row if inside is None else dataclasses.replace(row, seconds=inside)
            yield _placed(row, Part.DECODE, front, place[0], sources)

    def _behind(self, value: Value, place: tuple[int, int]) -> tuple[int, int]:
        """Where operators that encode ``value`` stand: anchor and rank, as in :class:`Extra`."""
        at, count = place
        last = max((value.saved.node, *(read.reader for read in value.saved.early)), key=self.position.__getitem__)
        producer = self.asked.memory.operators[value.storage.producer].node
        anchor = self.operator[producer.name if last is value.saved.node else last.name]
        return anchor, (self.position[last] + 1) * count - at

    def _projected(self, value: Value, products: Products, place: tuple[int, int]) -> Offer:
        """The offer that makes products in forward: no other may serve those that are left out where they are."""
        source, behind = self.buffer[value.storage.index], self._behind(value, place)
        extras: list[Extra] = []
        instead: list[tuple[int, int, int]] = []
        entries: dict[fx.Node, int] = {}
        for node in products.nodes:
            p = projection_of(node)
            if p not in entries:
                entries[p] = len(extras)
                extras.append(self._like(p, Part.ENCODE, behind, ()))
            own, op = len(extras), self.operator[node.name]
            extras.append(self._like(node, Part.ENCODE, behind, (source, ~entries[p])))
            buffer, users = self._result(node)
            instead += [(op, source, own), *((user, buffer, own) for user in users)]
        left = [self.operator[node.name] for node in products.nodes]
        left += [self.operator[p.name] for p in entries if self._result(p)[1] <= {*left}]
        saves = tuple(float(self.asked.problem.seconds[op]) for op in left)
        return Offer(source, products.nbytes, tuple(extras), tuple(instead), saves)

    def _like(
        self, node: fx.Node, part: Part, at: tuple[int, int], reads: tuple[int, ...], reusable: tuple[int, ...] = ()
    ) -> Extra:
        """An operator like ``node``, which has one result, at an anchor and a rank."""
        problem, op, (buffer, _) = self.asked.problem, self.operator[node.name], self._result(node)
        result = Result(int(problem.order.size[buffer]), bool(problem.droppable[buffer]), reusable)
        seconds, workspace = float(problem.seconds[op]), int(problem.order.workspace[op])
        return Extra(part, *at, seconds, workspace, bool(problem.repeatable[op]), reads, (result,))

    def _result(self, node: fx.Node) -> tuple[int, set[int]]:
        """The buffer that ``node`` makes, and the operators that use it."""
        memory = self.asked.memory
        storage = memory.storage_of(node).index
        users = (memory.operators[user].node.name for user in memory.uses[storage])
        return self.buffer[storage], {self.operator[name] for name in users}

    def _coding_rows(self, value: Value, coding: Coding) -> _Rows:
        """The operators of ``coding`` for the geometry of ``value``; found once for all equal ones."""
        geometries = [geometry_of(node) for node in (value.saved.node, *coding.beside(value.saved.node))]
        key = coding, *geometries
        if key not in self.rows:
            mini = _Small(*geometries)
            early = [mini.sources[0], *mini.sources[len(geometries) - coding.shared :]]
            code = mini.add(recorded(coding, "encode", *map(geometry_of, early)), early)
            encoding = operators(mini.graph)[len(geometries) :]
            sources = [code, *mini.sources[1:]]
            result = mini.add(recorded(coding, "decode", *map(geometry_of, sources)), sources)
            self.rows[key] = self._numbered(mini, code, result, {node.name for node in encoding})
        return self.rows[key]

    def _stand_ins(self, value: Value) -> Iterator[tuple[_Row, fx.Node]]:
        """Yield for each reader that needs only the shape the operator that makes its stand-in, and the reader."""
        shape, _, dtype, device = geometry = geometry_of(value.saved.node)
        for read in value.shapes:
            key = "stand-in", geometry
            if key not in self.rows:
                mini = _Small(geometry)
                stand_in = mini.add(recorded_stand_in(shape, dtype, device), ())
                self.rows[key] = self._numbered(mini, None, stand_in, set())
            for row in self.rows[key].decode:
                yield row, read.reader

    def _numbered(self, mini: _Small, code: fx.Node | None, result: fx.Node, encoding: set[str]) -> _Rows:
        """The operators of a small graph, as numbers; ``encoding`` names those that encode."""
        graph = mini.finished(self.asked.graph.threads)
        memory = build_memory(graph)
        order = [op.node.name for op in memory.operators]
        small_question = question(
            graph, self.options, order, cost.prices(graph, self.profile), self.asked.allowed, as_given=True
        )
        num_sources = len(mini.sources)
        rows = [self._row(small_question, op, num_sources) for op in range(num_sources, small_question.problem.num_ops)]
        encode = tuple(row for row, name in zip(rows, order[num_sources:], strict=True) if name in encoding)
        buffer = {storage.index: number for number, storage in enumerate(small_question.storages)}
        return _Rows(
            encode=encode,
            decode=tuple(rows[len(encode) :]),
            nodes=tuple(operator.node for operator in memory.operators[num_sources + len(encode) :]),
            nbytes=0 if code is None else memory.storage_of(code).nbytes,
            result=buffer[memory.storage_of(result).index] - num_sources,
        )

    def _row(self, small_question: Question, op: int, num_sources: int) -> _Row:
        problem, order = small_question.problem, small_question.problem.order
        buffers = writes(order).lists()[op]
        reusable = reusables(order).lists()
        return _Row(
            seconds=float(problem.seconds[op]),
            workspace=int(order.workspace[op]),
            repeatable=bool(problem.repeatable[op]),
            reads=_named(reads(order).lists()[op], num_sources),
            makes=tuple(
                Result(int(order.size[k]), bool(problem.droppable[k]), _named(reusable[k], num_sources))
                for k in buffers
            ),
        )


class _Small:
    """A graph under construction that has a storage, what a codec reads beside it, and operators of the codec.

    Attributes:
        graph: the FX graph; its first operators make the storages of ``sources``.
        sources: the nodes of the storage, and of what is beside it.
    """

    def __init__(self, *geometries: Geometry) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.sources = [self._made(geometry) for geometry in geometries]

    def _made(self, geometry: Geometry) -> fx.Node:
        shape, stride, dtype, device = geometry
        target = torch.ops.aten.empty_strided.default
        keywords: dict[str, fx.node.Argument] = {"dtype": dtype, "device": device}
        node = self.graph.create_node("call_function", target, (shape, stride), keywords)
        with self.mode:
            node.meta["val"] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        number_result(node)
        return node

    def add(self, steps: fx.Graph, sources: Sequence[fx.Node]) -> fx.Node:
        """Add recorded operators that read ``sources``; return the node of the result."""
        nodes, result = copy_into(self.graph, self.mode, steps, sources, "coded")
        for node in nodes:
            as_kernel(node)
        return result

    def finished(self, threads: int) -> TrainGraph:
        """Return the graph, in which all is forward and nothing is handed out."""
        self.graph.output(())
        phase = {node.name: Phase.FORWARD for node in operators(self.graph)}
        return TrainGraph("codec", fx.GraphModule(torch.nn.Module(), self.graph), (), (), phase, threads=threads)


def _named(buffers: Iterable[int], num_sources: int) -> tuple[int, ...]:
    """Buffers of a small graph as an offer names them: those behind the first ``num_sources``, its own, below 0."""
    return tuple(buffer if buffer < num_sources else ~(buffer - num_sources) for buffer in buffers)


def _placed(row: _Row, part: Part, anchor: int, rank: int, sources: Sequence[_Source]) -> Extra:
    """The operator at its place, with the buffers of the problem in the place of those that are ``sources``."""

    def of_problem(buffers: Iterable[int]) -> tuple[int, ...]:
        named = (buffer if buffer < 0 else sources[buffer].buffer for buffer in buffers)
        return tuple(buffer for buffer in named if buffer is not None)

    def reusable(result: Result) -> tuple[int, ...]:
        return of_problem(buffer for buffer in result.reusable if buffer < 0 or sources[buffer].own)

    makes = tuple(dataclasses.replace(result, reusable=reusable(result)) for result in row.makes)
    return Extra(part, anchor, rank, row.seconds, row.workspace, row.repeatable, of_problem(row.reads), makes)
