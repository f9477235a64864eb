"""Operators that write over a value without later readers, replaced by operators that make a value.

    before                   after
    y = relu_(x)             y = relu(x)
    ... y ...                ... y ...

What has been written over cannot be made again from what it was, so that no budget could drop ``y``, ``x`` or what
``x`` is made of. The bits are the same, as :mod:`roamc.operators.ops` says of a result that is written over its
argument; and where no operator runs again, :mod:`roamc.passes.reuse` writes ``y`` over ``x`` as before. The copy that
autograd keeps of an ``x`` that is about to be written over goes with it: its readers read ``x``.

Some operators stay as they are: those that write to an input of the step, to a part of a storage, or to a storage that
is read afterwards under an older name, and those that :mod:`roamc.passes.reuse` could not write over their argument.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from roamc.capture.sharing import Place
from roamc.compat import FakeTensorMode, OpOverload, identity
from roamc.graph import tensors_of
from roamc.graph.memory import WROTE_OVER
from roamc.graph.rewrite import derived, move
from roamc.graph.storage_ids import addresses, addresses_of
from roamc.operators import ops
from roamc.operators.corrections import corrected
from roamc.operators.out_variants import FormKind, form_of
from roamc.operators.schemas import relative

aten = torch.ops.aten


def as_values(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Replace in-place operators by operators that make a value, where nothing reads the old value afterwards.

    Every reader still reads the same values. A node whose operator is replaced gets ``meta[WROTE_OVER] = True``. Views
    without readers are erased, and so are the copies of an argument that autograd makes before the argument is
    written over, if they lie as it does and nothing else writes to either.

    Args:
        graph: of forward and backward, changed in place.
        mode: the fake mode of its tensors.
    """
    _erase_dead_views(graph)
    _Exchange(graph, mode).run()


def _erase_dead_views(graph: fx.Graph) -> None:
    """Autograd makes every view of a storage anew when the storage is written; nobody may read them."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and ops.is_view(node.target):
            graph.erase_node(node)


@functools.cache
def makes_value(target: object) -> OpOverload | None:
    """Return the operator that makes as a value what ``target`` writes over its first argument: ``relu`` of ``relu_``.

    Returns:
        None where ``target`` is no such operator, or where the other one could not run again or be written over its
        argument.
    """
    twin = relative(target, lambda name: name.removesuffix("_"))
    if twin is None or ops.rule(target).mutates != (0,):
        return None
    rule = ops.rule(twin)
    return twin if rule.recomputable and 0 in rule.overwrites else None


@functools.cache
def writes_over(target: object) -> OpOverload | None:
    """Return the in-place form of ``target``, such as ``relu_`` of ``relu``; None where torch has none."""
    twin = relative(target, lambda name: f"{name}_")
    return twin if twin is not None and ops.rule(twin).mutates == (0,) else None


class _Exchange:
    """One walk through a graph, which looks at every node once.

    What an exchange moves to another storage, it moves when the walk comes there: each node moves once, however many
    operators in front of it wrote to its storage.

    Attributes:
        places: node to its position in the program order.
        writes: storage to the number of operators that write to it; it may be too high, never too low.
        tensors: storage to the tensors in it that the walk has passed.
        read_until: storage to the last position of a reader of these; the end of the graph if the caller may own one.
        moved: storage in the graph as it was to a tensor; what lies in that storage from here on moves to its storage.
        moved_from: storage of a tensor in ``moved`` to the storage in the graph as it was.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.mode = mode
        self.places = {node: place for place, node in enumerate(graph.nodes)}
        self.writes: Counter[int] = Counter()
        for node in graph.nodes:
            self.writes.update(addresses(ops.mutated_arguments(node)))
        self.tensors: dict[int, list[Place]] = {}
        self.read_until: dict[int, int] = {}
        self.moved: dict[int, torch.Tensor] = {}
        self.moved_from: dict[int, int] = {}

    def run(self) -> None:
        """Replace all operators that can be, in program order."""
        for node in list(self.graph.nodes):
            self._move(node)
            twin = makes_value(node.target)
            exchanged = twin is not None and self._is_free(node) and self._exchange(node, twin)
            self._pass(node, [pair for pair in tensors_of(node) if pair[1].layout is torch.strided])
            if exchanged:
                self._drop_copies(node)

    def _move(self, node: fx.Node) -> None:
        """Put the tensors of ``node`` where the exchanges in front of it have moved their storages."""
        for position, tensor in tensors_of(node):
            into = self.moved.get(identity(tensor)) if tensor.layout is torch.strided else None
            if into is not None:
                with self.mode:
                    move(node, position, into.untyped_storage())

    def _pass(self, node: fx.Node, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Note tensors of ``node``, by their positions, among those of their storages."""
        storages = [identity(tensor) for _, tensor in tensors]
        for storage, (position, _) in zip(storages, tensors, strict=True):
            self.tensors.setdefault(storage, []).append((node, position))
        for storage in dict.fromkeys(storages):
            self._read(storage, node)

    def _read(self, storage: int, node: fx.Node) -> None:
        """Note the readers of ``node``, whose tensor lies in ``storage``."""
        ends = [self.places[user] for user in node.users] if node.op == "call_function" else [len(self.places)]
        self.read_until[storage] = max(self.read_until.get(storage, 0), *ends, 0)

    def _is_free(self, node: fx.Node) -> bool:
        """Whether what ``node`` writes is the step's own, and read behind it by no name that is older."""
        return self.read_until[identity(node.meta["val"])] <= self.places[node]

    def _exchange(self, node: fx.Node, twin: OpOverload) -> bool:
        """Let ``node`` call ``twin`` if the result has the geometry, and the size, of all that was written over."""
        target, written = node.target, node.meta["val"]
        node.target = twin
        node.meta["val"] = value = corrected(node, derived(node, self.mode), self.mode)
        fits = geometry(value) == geometry(written) and 0 in ops.may_overwrite(node, addresses_of)
        if not fits or form_of(node, 1).kind is FormKind.ALLOCATE:
            node.target, node.meta["val"] = target, written
            return False
        node.meta[WROTE_OVER] = True
        old, new = identity(written), identity(value)
        self.moved_from[new] = first = self.moved_from.get(old, old)
        self.moved[first] = value
        # Writes in front of the node count for both storages: too high a count keeps a copy, and changes no value.
        self.writes[new] = self.writes[old] - 1
        self.writes[old] -= 1
        self.tensors[new], self.read_until[new] = [], 0
        return True

    def _drop_copies(self, node: fx.Node) -> None:
        """Let the readers of copies of what ``node`` wrote over read that itself, where nobody writes to either."""
        written = node.args[0]
        assert isinstance(written, fx.Node)
        value = written.meta["val"]
        for copy in [user for user in written.users if user.target is aten.clone.default]:
            own = copy.meta["val"]
            alike = geometry(own) == geometry(value) and copy.meta.get("custom") == written.meta.get("custom")
            if alike and not self.writes[identity(own)] and not self.writes[identity(value)]:
                self._replace(copy, written)

    def _replace(self, copy: fx.Node, written: fx.Node) -> None:
        """Let the readers of ``copy``, and its views, read ``written``, and erase it."""
        own, value = identity(copy.meta["val"]), written.meta["val"]
        self.moved[self.moved_from.get(own, own)] = value
        for other, position in self.tensors.pop(own):
            if other is copy:
                self._read(identity(value), copy)
                continue
            with self.mode:
                move(other, position, value.untyped_storage())
            self._pass(other, [(position, value)])
        copy.replace_all_uses_with(written)
        self.graph.erase_node(copy)


def geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return how ``tensor`` lies in its storage; one of two tensors with equal results may be written over the other.

    Returns:
        Shape, strides and offset in elements, dtype, device, bytes of the whole storage, (is conjugated, is negated).
    """
    size, bits = tensor.untyped_storage().nbytes(), (tensor.is_conj(), tensor.is_neg())
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, size, bits
