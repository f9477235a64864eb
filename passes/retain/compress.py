"""Keep values in a smaller form: the part of ``retain`` that writes codecs into the graph.

    before                              after
    y, mask = native_dropout(x, p)      y, mask = native_dropout(x, p)
    ...                                 code = encode(mask)
                                        ...                                 mask's bytes are free here
    ...                                 mask_1 = decode(code)
    dx = native_dropout_backward(       dx = native_dropout_backward(
        dy, mask, scale)                    dy, mask_1, scale)

All readers behind forward read the decoded value, and views of it are made anew. ``encode`` and ``decode`` are
operators like others, so the solver may drop their results and run them again. What a ``decode`` reads besides the code
is the value itself, or another run of it, also where readers behind forward get it decoded from a code of its own.

A rerun of an operator of forward reads the value itself, which would then have to wait beside its code. Where the codec
is exact, the operator may run a second time on the decoded value instead, for the readers of its result behind forward:

    y = native_dropout_backward(s, mask, scale)         mask_1 = decode(code)
    ...                                                 y_1 = native_dropout_backward(s, mask_1, scale)
    dv = bmm(y.T, g)                                    dv = bmm(y_1.T, g)

Of a value that readers behind forward only project, the projections are made in forward, and wait in its place: see
:mod:`roamc.passes.retain.codecs.projections`. Nothing is decoded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from roamc.compat import FakeTensorMode, trace
from roamc.errors import PlanError
from roamc.graph import Encoding, Phase, TrainGraph, copy_origin, output_node, placeholders
from roamc.graph.reader_kinds import ReaderKinds
from roamc.graph.rewrite import value_of
from roamc.graph.storage_ids import STORAGES, ids_of, number, number_result, renewed
from roamc.operators import ops
from roamc.operators.schemas import name_of
from roamc.passes.retain.codecs import Codec, Coding, shapes
from roamc.passes.retain.codecs.projections import Products, projection_of, views_of
from roamc.passes.retain.fits import Value, coding_of, late_readers, made_of, values
from roamc.passes.retain.kernels import as_kernel
from roamc.rewriting.versions import Versions

Geometry = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides in elements, dtype and device of a tensor that begins its storage."""

MARK = "code"
"""Key in ``node.meta`` of the nodes that belong to a codec; the value is a :class:`Mark`."""


class Code(NamedTuple):
    """The names of a storage to be kept smaller and of the codec that encodes it.

    Attributes:
        storage: name of the storage, as in the memory model.
        codec: a name in ``CODECS``, "shapes" if readers behind forward need only the shape, or "projections" if they
            only project.
        again: names of storages that readers behind forward get made again from the decoded value, see
            :func:`roamc.passes.retain.fits.made_of`.
    """

    storage: str
    codec: str
    again: tuple[str, ...] = ()


class Mark(NamedTuple):
    """What a node does for a storage that is kept smaller.

    Attributes:
        storage: name of the storage.
        role: "encode", "decode", "again" for what is made of the decoded value, or "shape" for a stand-in that has the
            shape and no elements.
        operator: name of the operator that makes the storage, such as ``aten.native_dropout.default``.
    """

    storage: str
    role: str
    operator: str


def compress(graph: TrainGraph, codes: Iterable[Code]) -> TrainGraph:
    """Write ``codes`` into the graph: encode each storage, and decode it for its readers behind forward.

    Readers that need only the shape get a stand-in. The FX graph is changed in place; the returned graph holds the same
    one and lists the new encodings behind the old ones in ``TrainGraph.encodings``.

    Raises:
        PlanError: the graph has no tensors or lacks a storage of ``codes``; readers of one storage get it in two ways;
            a codec is unknown, does not fit, or has an error and does not serve a reader; a storage is not
            :func:`made_of` what has a code.
    """
    writer = _Writer(graph)
    saved = {value.storage.index: value for value in values(writer.memory)}
    by_name = {value.storage.name: value for value in saved.values()}
    encoded: set[str] = set()
    kinds = ReaderKinds(graph)
    chosen: list[tuple[Value, tuple[Codec, Coding] | Products | None, Sequence[Value]]] = []
    for code in codes:
        for name in (code.storage, *code.again):
            if name in encoded:
                raise PlanError(f"the plan keeps {name!r} in two codes")
            encoded.add(name)
        if code.storage not in by_name:
            raise PlanError(f"this graph has no storage {code.storage!r} that could be kept smaller")
        value = by_name[code.storage]
        coding = coding_of(value, code.codec, kinds)
        results = {each.storage.name: each for each in made_of(value, code.codec, saved)} if code.again else {}
        if odd := [name for name in code.again if name not in results]:
            raise PlanError(f"{odd[0]!r} cannot be made again from what codec {code.codec!r} keeps of {code.storage!r}")
        chosen.append((value, coding, [results[name] for name in code.again]))
    for value, coding, again in chosen:
        writer.add(value, coding, again)
    writer.write()
    return writer.finished().replace(encodings=(*graph.encodings, *writer.encodings))


class _Writer(Versions):
    """Collects values to keep smaller (``add``), then writes them in one walk through the graph (``write``).

    Attributes:
        encodings: one for every value that has a code.
        decodings: maps a reader behind forward to the values that are decoded in front of it, with their operators,
            what these read, and the values that are made of the decoded one.
        shapes: maps a reader to (position of an argument that becomes a stand-in, value).
        decoded: maps the node of a value to that of the decoded value, from the first reader behind forward on.
    """

    def __init__(self, graph: TrainGraph) -> None:
        super().__init__(graph)
        self.position = {node: number for number, node in enumerate(graph.graph.nodes)}
        self.encodings: list[Encoding] = []
        self.decodings: dict[fx.Node, list[tuple[Value, fx.Graph, Sequence[fx.Node], Sequence[Value]]]] = {}
        self.shapes: dict[fx.Node, list[tuple[int, Value]]] = {}
        self.decoded: dict[fx.Node, fx.Node] = {}

    def add(self, value: Value, chosen: tuple[Codec, Coding] | Products | None, again: Sequence[Value] = ()) -> None:
        """Insert the ``encode`` nodes of ``value`` behind its last reader in forward, and note its later readers.

        Args:
            value: the storage, with its readers.
            chosen: codec and coding of the value, or products that move there; None if readers behind forward need only
                the shape.
            again: values that readers behind forward get made again from the decoded value.
        """
        for read in value.shapes:
            self.shapes.setdefault(read.reader, []).append((read.position, value))
        if chosen is None:
            return
        node = value.saved.node
        last = max((node, *(read.reader for read in value.saved.early)), key=self.position.__getitem__)
        if isinstance(chosen, Products):
            self._project(value, chosen, last)
            return
        codec, coding = chosen
        beside = coding.beside(node)
        encoded = [node, *beside[len(beside) - coding.shared :]]
        encode = recorded(coding, "encode", *map(geometry_of, encoded))
        code = self._insert(encode, encoded, node, last.next, last, self._mark(value, "encode"))
        sources = [code, *beside]
        decode = recorded(coding, "decode", *map(geometry_of, sources))
        front = min(late_readers(value, again), key=self.position.__getitem__)
        self.decodings.setdefault(front, []).append((value, decode, sources, again))
        names = tuple(self.memory.storage_of(each).name for each in beside)
        coded = value.storage.name, codec.name, coding.error, codec.keeps, encode, decode, names, coding.serves
        self.encodings.append(Encoding(*coded))

    def _project(self, value: Value, products: Products, last: fx.Node) -> None:
        """Insert products like those of backward, and what they multiply by, behind the last reader in forward."""
        step, mark = self.position[last], self._mark(value, "encode")
        for view in dict.fromkeys(view for each in products.nodes for view in views_of(each, value.saved.node)):
            if self.position[view] > step:
                last.append(view)
                self.phase[view.name], last = Phase.FORWARD, view

        def again(node: fx.Node, *args: Any) -> fx.Node:
            fresh = self.call(node.target, args, dict(node.kwargs), node, last.next)
            fresh.meta |= {STORAGES: renewed(ids_of(node))}
            self._note(fresh, value.saved.node, mark, Phase.FORWARD)
            return fresh

        early: dict[fx.Node, fx.Node] = {}
        for product in products.nodes:
            p = projection_of(product)
            if p not in early:
                early[p] = last = again(p, *p.args)
            last = again(product, product.args[0], early[p])
            self._read_instead(product, last)

    def write(self) -> None:
        """Insert the ``decode`` nodes into the graph, and exchange arguments: the graph is changed in place.

        A storage is decoded in front of the first reader behind forward, of it or of what is made of it; that reader
        and all later ones get the decoded value, and readers that need only the shape a stand-in.
        """
        for node in list(self.makers.values()):
            for value, decode, sources, again in self.decodings.get(node, ()):
                self._decode(value, decode, sources, node)
                for each in again:
                    self._make_again(each, value, node)
            for position, value in self.shapes.get(node, ()):
                self._stand_in(node, position, value)
            if self.decoded:
                self.redirect(node, self.decoded)

    def _mark(self, value: Value, role: str) -> Mark:
        maker = self.memory.operators[value.storage.producer].node
        return Mark(value.storage.name, role, name_of(maker.target))

    def _decode(self, value: Value, decode: fx.Graph, sources: Sequence[fx.Node], at: fx.Node) -> None:
        node = value.saved.node
        result = self._insert(decode, sources, node, at, at, self._mark(value, "decode"))
        _check_decoded(result, node)
        self._read_instead(node, result)

    def _make_again(self, result: Value, value: Value, at: fx.Node) -> None:
        """Run the operator that makes ``result`` once more in front of ``at``, on what is decoded of ``value``."""
        first = result.saved.node
        again = self.call(first.target, first.args, dict(first.kwargs), first, at)
        again.meta |= {STORAGES: renewed(ids_of(first)), MARK: self._mark(value, "again")}
        names = _names(value.saved.node)
        self.redirect(again, {name: self.decoded[name] for name in names})
        self._read_instead(first, again)

    def _read_instead(self, node: fx.Node, result: fx.Node) -> None:
        """Let readers from here on read ``result`` in the place of ``node``."""
        for name in _names(node):
            self.decoded[name], self.first[result] = result, name

    def _stand_in(self, reader: fx.Node, position: int, value: Value) -> None:
        tensor = value.saved.tensor
        recorded = recorded_stand_in(tuple(map(int, tensor.shape)), tensor.dtype, tensor.device)
        stand_in = self._insert(recorded, (), value.saved.node, reader, reader, self._mark(value, "shape"))
        reader.args = (*reader.args[:position], stand_in, *reader.args[position + 1 :])

    def _insert(
        self,
        recorded: fx.Graph,
        sources: Sequence[fx.Node],
        like: fx.Node,
        before: fx.Node,
        phase_of: fx.Node,
        mark: Mark,
    ) -> fx.Node:
        """Copy ``recorded`` in front of ``before``, reading ``sources``, with the name and origin of ``like``."""
        with self.graph.graph.inserting_before(before):
            nodes, result = copy_into(self.graph.graph, self.mode, recorded, sources, f"{like.name}_{mark.role}")
        for node in nodes:
            node.name = self.names.fresh(f"{like.name}_{mark.role}")
            as_kernel(node)
            self._note(node, like, mark, self.graph.phase[phase_of.name])
        return result

    def _note(self, node: fx.Node, like: fx.Node, mark: Mark, phase: Phase) -> None:
        """Note what a new node is for, where it runs, and that it comes from where ``like`` does."""
        copy_origin(node, like)
        node.meta[MARK] = mark
        self.phase[node.name] = phase


def _names(node: fx.Node) -> list[fx.Node]:
    """The node, and all that are mere other names of it."""
    names = [node]
    for name in names:
        names += [user for user in name.users if ops.rule(user.target).renames]
    return names


def copy_into(
    graph: fx.Graph, mode: FakeTensorMode, recorded: fx.Graph, sources: Sequence[fx.Node], name: str
) -> tuple[list[fx.Node], fx.Node]:
    """Insert the operators of ``recorded`` into ``graph`` where it inserts now, and run them on fake tensors.

    Args:
        graph: the graph to write into.
        mode: the fake mode of its tensors.
        recorded: operators with one output, a tensor.
        sources: nodes of ``graph``, one for each placeholder.
        name: name of the new nodes, which FX makes unique.

    Returns:
        The new nodes, first to last, and the one that stands for the output.
    """
    copies = dict(zip(placeholders(recorded), sources, strict=True))
    fresh: list[fx.Node] = []
    for node in recorded.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.create_node("call_function", node.target, args, kwargs, name=name)
            with mode:
                values = fx.map_arg((args, kwargs), value_of)
                copies[node].meta["val"] = node.target(*values[0], **values[1])
            number_result(copies[node])
            fresh.append(copies[node])
    (result,) = output_node(recorded).all_input_nodes
    return fresh, copies[result]


def geometry_of(node: fx.Node) -> Geometry:
    """Return shape, strides, dtype and device of the tensor that ``node`` stands for."""
    tensor = node.meta["val"]
    return tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype, tensor.device


@functools.lru_cache(maxsize=4096)
def recorded(coding: Coding, way: str, *tensors: Geometry) -> fx.Graph:
    """Return the operators of ``coding.encode`` or ``coding.decode``, as a graph with one placeholder a tensor.

    Calls with equal arguments share the graph, which must not be changed.

    Args:
        coding: the coding.
        way: "encode" or "decode".
        tensors: geometry of the tensor that is encoded, or of the code; and of what is read beside it.
    """
    mode = FakeTensorMode()
    with mode:
        examples = [torch.empty_strided(*lies, dtype=dtype, device=device) for *lies, dtype, device in tensors]
    way_of: Callable[..., Tensor] = coding.encode if way == "encode" else coding.decode
    graph = trace(lambda *fakes: way_of(*fakes), examples, mode).graph
    number(graph)
    return graph


@functools.lru_cache(maxsize=4096)
def recorded_stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> fx.Graph:
    """Return the operators that make a stand-in of this shape, dtype and device for readers that need only the shape.

    The graph has no placeholder. Calls with equal arguments share it, so it must not be changed.
    """
    graph = trace(lambda: shapes.stand_in(shape, dtype, device), [], FakeTensorMode()).graph
    number(graph)
    return graph


def _check_decoded(result: fx.Node, node: fx.Node) -> None:
    """Raise PlanError unless the last operator of a decoding makes a tensor like the value of ``node``."""
    decoded, needed = (
        (tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in (result.meta["val"], node.meta["val"])
    )
    if decoded != needed:
        raise PlanError(f"the codec of {node.name} decodes {decoded} in the place of {needed} (dtype, shape, strides)")
