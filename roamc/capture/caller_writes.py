"""Writes to a tensor of the caller's, as functionalization leaves them: the operator writes there itself.

    before                               after
    v = lerp(x, s, 0.1)                  v = lerp_(x, s, 0.1)
    ... v ...                            ... v ...
    copy_(x, v)

``x`` is an input of the graph, such as a buffer. ``v`` has no bytes of its own any more, as in eager; of a chain
(``x.mul_(0.9).add_(y)``) neither has what lies between. A value that backward reads, or that the caller gets, stays:
the caller may write to ``x`` as soon as forward has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from roamc import ops
from roamc.capture.in_place_values import geometry, makes_value
from roamc.compat import FakeTensorMode, OpOverload
from roamc.graph import Phase, tensors_of
from roamc.memory import identity
from roamc.rewrite import move

aten = torch.ops.aten


def in_place(
    graph: fx.Graph, mode: FakeTensorMode, phase: Mapping[str, Phase], named: Collection[str]
) -> tuple[str, ...]:
    """Let operators whose result is copied to an input write to that input.

    Args:
        graph: changed in place.
        mode: the fake mode of its tensors.
        phase: of every operator and view.
        named: nodes whose tensors others take over; they stay as they are.

    Returns:
        Names of the copies, which are gone.
    """
    writes = _Writes(graph, mode, phase, named)
    return tuple(copy.name for copy in list(graph.nodes) if copy.target is aten.copy_.default and writes.exchange(copy))


@functools.cache
def writes_over(target: object) -> OpOverload | None:
    """The operator that writes over its first argument what ``target`` makes of it, with the same bits."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    twin = getattr(packet, target._overloadname, None)
    return twin if makes_value(twin) is target else None


@dataclass
class _Writes:
    """The tensors of one graph by their storages.

    Attributes:
        graph, mode, phase, named: as for :func:`in_place`.
    """

    graph: fx.Graph
    mode: FakeTensorMode
    phase: Mapping[str, Phase]
    named: Collection[str]

    def __post_init__(self) -> None:
        self.places = {node: place for place, node in enumerate(self.graph.nodes)}
        self.shared: dict[int, list[tuple[fx.Node, int]]] = {}
        for node in self.graph.nodes:
            for position, tensor in tensors_of(node):
                if tensor.layout is torch.strided:  # others have no storage, and are refused later, by name
                    self.shared.setdefault(identity(tensor), []).append((node, position))

    def exchange(self, copy: fx.Node) -> bool:
        """Let what makes the value of ``copy`` write to its input, if nobody reads anything else then."""
        given, value = copy.args[:2]
        if not isinstance(given, fx.Node) or given.op != "placeholder" or copy.users:
            return False
        chain = _chain(given, value)
        if not chain or not self._may(given, chain, copy):
            return False
        self.graph.erase_node(copy)
        storage = given.meta["val"].untyped_storage()
        for node in chain:
            node.target = writes_over(node.target)  # type: ignore[assignment]
            tensors = self.shared.pop(identity(node.meta["val"]))
            with self.mode:
                for other, position in tensors:
                    move(other, position, storage)
            self.shared[identity(given.meta["val"])] += tensors
        return True

    def _may(self, given: fx.Node, chain: list[fx.Node], copy: fx.Node) -> bool:
        """Whether each value has been read when the next is written over it, and only forward reads the last one."""
        nexts = [self.places[node] for node in chain]
        for node, until in zip([given, *chain[:-1]], nexts, strict=True):
            if any(self.places[reader] > until for reader in self._readers(node) if reader is not copy):
                return False
        last = [reader for reader in self._readers(chain[-1]) if reader is not copy]
        within = all(self.phase.get(reader.name) is Phase.FORWARD for reader in last)
        return within and not any(self._is_taken(node) for node in chain)

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Whoever reads a tensor in the storage of ``node``."""
        for other, _ in self.shared[identity(node.meta["val"])]:
            yield from other.users

    def _is_taken(self, node: fx.Node) -> bool:
        """Whether others take over, or write to, a tensor in the storage of ``node``."""
        own = identity(node.meta["val"])
        written = {
            identity(t)
            for reader in self._readers(node)
            for a in ops.mutated_arguments(reader)
            for _, t in tensors_of(a)
        }
        return own in written or any(other.name in self.named for other, _ in self.shared[own])


def _chain(given: fx.Node, value: object) -> list[fx.Node]:
    """The operators that make ``value`` of ``given``, each of the result of the one before; none if one of them cannot
    write over its argument."""
    chain: list[fx.Node] = []
    while value is not given:
        if not isinstance(value, fx.Node) or not _fits(value, given):
            return []
        chain.insert(0, value)
        value = value.args[0]
    return chain


def _fits(node: fx.Node, given: fx.Node) -> bool:
    """Whether ``node`` may write its result over its first argument, and the result lies as ``given`` does."""
    if node.op != "call_function" or writes_over(node.target) is None or 0 not in ops.may_overwrite(node):
        return False
    if geometry(node.meta["val"]) != geometry(given.meta["val"]) or not isinstance(node.args[0], fx.Node):
        return False
    storages = [{identity(tensor) for _, tensor in tensors_of(argument)} for argument in node.all_input_nodes]
    first = {identity(tensor) for _, tensor in tensors_of(node.args[0])}
    return sum(bool(first & others) for others in storages) == 1
