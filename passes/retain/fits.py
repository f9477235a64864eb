"""Which values codecs can keep smaller, what each may read, and what can be made again from what it decodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from roamc.cost.kind import is_light
from roamc.errors import PlanError
from roamc.graph import Phase, tensors_of
from roamc.graph.memory import MemoryModel, Place, Storage, fills_storage
from roamc.graph.reader_kinds import ReaderKinds, position_in
from roamc.operators import ops
from roamc.operators.ops import Need
from roamc.passes.retain.codecs import Codec, Coding, Saved, codec_of, projections, shapes, usable
from roamc.passes.retain.codecs.codec import Read
from roamc.passes.retain.codecs.projections import Products
from roamc.rewriting.rerun_variants import must_stay


class Value(NamedTuple):
    """A storage of forward that is read behind forward and may be kept smaller.

    Attributes:
        storage: the storage in the memory model.
        saved: its node, its readers in forward, and its readers behind forward that look at elements.
        shapes: its readers behind forward that need only the shape.
        memory: the memory model.
    """

    storage: Storage
    saved: Saved
    shapes: tuple[Read, ...]
    memory: MemoryModel


def values(memory: MemoryModel) -> Iterator[Value]:
    """Yield the saved storages of ``memory`` that may be kept smaller, in the graph's order.

    Left out are outputs of the graph, storages that a later operator writes, storages that no single tensor fills, and
    values that the user keeps (``roamc.keep``, or a checkpoint policy that must save). Whether a codec fits is not
    checked.
    """
    written = {storage for op in memory.operators for storage in op.writes}
    whole = _whole_nodes(memory)
    reads = _reads(memory)
    for storage in memory.saved:
        node = whole.get(storage.index)
        pinned = must_stay(memory.operators[storage.producer])
        if node is None or pinned or storage.place is not Place.TEMPORARY or storage.index in written:
            continue
        early = tuple(read for phase, read in reads[storage.index] if phase is Phase.FORWARD)
        late = [read for phase, read in reads[storage.index] if phase is not Phase.FORWARD]
        shape = tuple(read for read in late if shapes.reads_shape(read, node))
        yield Value(storage, Saved(node, early, tuple(read for read in late if read not in shape)), shape, memory)


def _whole_nodes(memory: MemoryModel) -> dict[int, fx.Node]:
    """Storage to the node that stands for all of it: what makes it, or picks it of several results."""
    whole: dict[int, fx.Node] = {}
    for op in memory.operators:
        single = isinstance(op.node.meta.get("val"), torch.Tensor)
        for node in (op.node,) if single else op.node.users:
            is_tensor = (node.name, 0) in memory.owner and isinstance(node.meta.get("val"), torch.Tensor)
            if is_tensor and memory.owner[node.name, 0] in op.births and fills_storage(node.meta["val"]):
                whole.setdefault(memory.owner[node.name, 0], node)
    return whole


def _reads(memory: MemoryModel) -> dict[int, list[tuple[Phase, Read]]]:
    """Per storage its readers in graph order, one entry for each argument."""
    reads: dict[int, list[tuple[Phase, Read]]] = {storage.index: [] for storage in memory.storages}
    for op in memory.operators:
        for argument in op.node.all_input_nodes:
            for storage in {memory.owner[argument.name, at]: None for at, _ in tensors_of(argument)}:
                if storage not in op.births:
                    reads[storage].append(
                        (op.phase, Read(op.node, _unaliased(argument), position_in(op.node, argument)))
                    )
    return reads


def _unaliased(node: fx.Node) -> fx.Node:
    """What ``node`` is another name for; itself if for nothing."""
    while ops.rule(node.target).renames:
        node = node.args[0]  # type: ignore[assignment]
    return node


def coding_of(value: Value, name: str, kinds: ReaderKinds) -> tuple[Codec, Coding] | Products | None:
    """Return the codec called ``name`` and its coding of ``value``.

    For the name "projections" it is the products that move to forward, for "shapes", which keeps nothing, None.

    Args:
        value: the storage, with its readers.
        name: of the codec.
        kinds: the kinds of readers in the graph of ``value``.

    Raises:
        PlanError: there is no codec ``name``, the codec does not fit ``value``, what it reads beside it is
            :func:`unfit`, a reader is of a kind that it does not serve, or ``name`` is "shapes" and a reader behind
            forward looks at elements, or "projections" and one does anything else than to project.
    """
    if name == projections.NAME:
        if (products := products_of(value)) is None:
            raise PlanError(f"what reads {value.storage.name} behind forward does more than to project it")
        return products
    if name == shapes.NAME:
        if not value.saved.late:
            return None
        raise PlanError(f"{value.saved.late[0].reader.name} reads elements of {value.storage.name}")
    codec = codec_of(name)
    coding = codec.fit(value.saved)
    if coding is None:
        raise PlanError(f"codec {name!r} does not fit {value.storage.name}")
    if why := _refusal(value, codec, coding, kinds):
        raise PlanError(f"codec {name!r} does not fit {value.storage.name}: {why}")
    return codec, coding


def _refusal(value: Value, codec: Codec, coding: Coding, kinds: ReaderKinds) -> str:
    """Why ``coding`` may not be used for ``value``; "" if it may."""
    for node in coding.beside(value.saved.node):
        if why := unfit(value, node):
            return f"{node.name}, beside it, {why}"
    for read in value.saved.late if codec.lossy else ():
        kind = kinds.of(read.reader, read.position)
        if kind not in coding.serves:
            return f"{read.reader.name} reads it as {kind.value!r}, which this codec, with its error, does not serve"
    return ""


def products_of(value: Value) -> Products | None:
    """Return the products that can wait in the place of ``value``, see :mod:`.codecs.projections`; None if none can."""
    products = projections.fit(value.saved)
    results = [value.memory.storage_of(node) for node in products.nodes] if products is not None else []
    return products if all(storage.place is Place.TEMPORARY for storage in results) else None


def unfit(value: Value, beside: fx.Node) -> str:
    """Return why no codec of ``value`` may read ``beside`` as well, as the end of a sentence; "" if one may.

    It may read a tensor that fills its storage, is there in forward, and is not written. Parameters and states that
    updates write, where all readers of the value behind forward read them as well, are there for these readers.
    """
    if not isinstance(beside.meta.get("val"), torch.Tensor) or not fills_storage(beside.meta["val"]):
        return "is no whole tensor"
    memory = value.memory
    storage = memory.storage_of(beside)
    late = storage.producer >= 0 and memory.operators[storage.producer].phase is not Phase.FORWARD
    if late or storage.place is Place.TANGENT:
        return "is not there in forward"
    if storage.overwritten:
        return "is written by the caller when forward has run"
    users = [memory.operators[at] for at in memory.uses[storage.index]]
    readers = {op.node for op in users if storage.index in op.reads}
    updated = storage.place is Place.INPUT and readers.issuperset(read.reader for read in value.saved.late)
    writes = (op for op in users if storage.index in op.writes)
    writer = next((op for op in writes if not (updated and op.phase is Phase.UPDATE)), None)
    return "" if writer is None else f"is written later, by {writer.node.name}"


def codings(value: Value, lossy: Collection[str], kinds: ReaderKinds) -> Iterator[tuple[str, Coding | Products | None]]:
    """Yield name and coding of each codec that makes ``value`` smaller.

    If no reader behind forward looks at an element, nothing is kept, and ("shapes", None) is all. If all that do are
    products with projections, and what these make is smaller, ("projections", these products) comes first.

    Args:
        value: the storage, with its readers.
        lossy: names of the codecs with an error that may be used; exact codecs always may.
        kinds: the kinds of readers in the graph of ``value``.
    """
    if not value.saved.late:
        yield shapes.NAME, None
        return
    products = products_of(value)
    if products is not None and products.nbytes < value.storage.nbytes:
        yield projections.NAME, products
    for codec in usable(lossy):
        coding = codec.fit(value.saved)
        smaller = coding is not None and coding.nbytes < value.storage.nbytes
        if coding is not None and smaller and not _refusal(value, codec, coding, kinds):
            yield codec.name, coding


def made_of(value: Value, codec: str, saved: Mapping[int, Value]) -> tuple[Value, ...]:
    """Return the values that readers behind forward may get made again from what ``codec`` decodes of ``value``.

    Each is what a light operator of forward makes that reads ``value``; all else that it reads is there behind forward
    anyway. There are none if the codec is not exact, or decodes less than all of the elements.

    Args:
        value: the storage that has a code.
        codec: the name of a codec, "shapes" or "projections".
        saved: the values of the graph, see :func:`values`, by the index of their storages.
    """
    if codec in (shapes.NAME, projections.NAME) or codec_of(codec).lossy or codec_of(codec).keeps is not Need.ELEMENTS:
        return ()
    readers = dict.fromkeys(read.reader for read in value.saved.early)
    results = [saved.get(value.memory.owner.get((reader.name, 0), -1)) for reader in readers]
    return tuple(
        result
        for reader, result in zip(readers, results, strict=True)
        if result is not None and result.saved.node is reader and result.saved.late and _may_run_late(reader, value)
    )


def _may_run_late(reader: fx.Node, value: Value) -> bool:
    """Whether an operator of forward may run behind it on the decoded value, and what else it reads is there anyway."""
    rule, memory = ops.rule(reader.target), value.memory
    if rule.random or not rule.recomputable or rule.mutates or not is_light(reader):
        return False
    saved = {storage.index for storage in memory.saved if storage.place is Place.TEMPORARY}
    others = [each for each in reader.all_input_nodes if memory.owner.get((each.name, 0)) != value.storage.index]
    return all(not unfit(value, each) and memory.storage_of(each).index in saved for each in others)


def late_readers(value: Value, again: Sequence[Value]) -> list[fx.Node]:
    """Return the readers behind forward that read a decoded value, or what is made again from it."""
    late = [read.reader for read in value.saved.late]
    return late + [read.reader for each in again for read in (*each.saved.late, *each.shapes)]
