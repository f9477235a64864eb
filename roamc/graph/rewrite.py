"""Writing FX nodes together with their metadata: every new node gets its fake value from the operator itself."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from roamc.compat import FakeTensorMode, fake_mode_of, with_bits, without_autocast
from roamc.graph import Phase, copy_origin, tensors_of
from roamc.graph.storage_ids import number_result
from roamc.operators.random import save_rng_state, state_bytes


class Writer:
    """Adds ``call_function`` nodes to a graph and derives shape, dtype and strides of each.

    Attributes:
        graph: the graph; new nodes go to its insertion point.
        mode: the fake mode that its tensors belong to.
        current: the phase of the nodes written from now on; at first the argument ``phase`` of the constructor.
        phase: name to phase of every node written, to be added to ``TrainGraph.phase``; empty at first.
        like: the node whose line and module new nodes get; None, as at first, for none.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, phase: Phase) -> None:
        self.graph = graph
        self.mode = mode
        self.current = phase
        self.phase: dict[str, Phase] = {}
        self.like: fx.Node | None = None

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call of ``target`` at the graph's insertion point, and return the new node.

        Args:
            target: a function of tensors; runs once on fake values, for the result's.
            args: positional arguments: nodes, numbers or lists of them.
            kwargs: keyword arguments, likewise.
        """
        node = self.graph.call_function(target, args, kwargs)
        with self.mode, without_autocast():
            node.meta["val"] = target(*fx.map_arg(args, value_of), **fx.map_arg(kwargs, value_of))
        if self.like is not None:
            copy_origin(node, self.like)
        self.phase[node.name] = self.current
        return node

    def insert(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call in front of ``before`` and of its line of the model, number its storage, and return it."""
        self.like = before
        with self.graph.inserting_before(before):
            node = self.call(target, *args, **kwargs)
        number_result(node)
        return node


def keep_state(graph: fx.Graph, first: fx.Node, mode: AbstractContextManager[Any], name: str | None = None) -> fx.Node:
    """Insert a node in front of the random operator ``first`` that saves the state of the generator it draws from.

    Args:
        graph: the graph of ``first``; changed in place.
        first: an operator with a tensor among its results, whose device says which default generator it draws from.
        mode: the fake mode of the graph's tensors.
        name: of the new node, made unique by FX; None for a default.

    Returns:
        The new node: it stands for a tensor of uint8 that :func:`roamc.operators.random.replay` takes.
    """
    device = next(tensor.device for _, tensor in tensors_of(first))
    with graph.inserting_before(first):
        state = graph.create_node("call_function", save_rng_state, (device,), name=name)
    nbytes = state_bytes(device)
    with mode:
        state.meta["val"] = torch.empty(nbytes, dtype=torch.uint8)
    number_result(state)
    return state


def placed_in(tensor: torch.Tensor, storage: torch.UntypedStorage, device: torch.device | None = None) -> torch.Tensor:
    """Return a fake tensor like ``tensor``, at the same offset in ``storage``.

    Dtype, shape, strides and the lazy conj and neg bits stay. Call it under the fake mode that ``storage`` belongs to.

    Args:
        tensor: a fake tensor; it stays as it is.
        storage: a fake storage, large enough for it.
        device: the device of ``storage``; None for that of ``tensor``.
    """
    empty = torch.empty(0, dtype=tensor.dtype, device=device or tensor.device)
    new = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return with_bits(new, conj=tensor.is_conj(), neg=tensor.is_neg())


def move(node: fx.Node, position: int, storage: torch.UntypedStorage) -> None:
    """Put one fake result of ``node`` into another storage, at the same offset; changes ``node.meta["val"]``.

    The result keeps its geometry, see :func:`placed_in`. Call it under the fake mode of ``node`` and ``storage``.

    Args:
        node: the node; its other results stay as they are.
        position: which result, as :func:`roamc.graph.tensors_of` numbers them; ignored for a single tensor.
        storage: the storage that the result lies in from now on, large enough for it.
    """
    value = node.meta["val"]
    old = value if isinstance(value, torch.Tensor) else value[position]
    new = placed_in(old, storage)
    if isinstance(value, torch.Tensor):
        node.meta["val"] = new
    else:
        node.meta["val"] = type(value)(new if at == position else item for at, item in enumerate(value))


def value_of(node: fx.Node) -> Any:
    """Return the fake value that ``node`` stands for: a tensor, a list or tuple of results, or a number."""
    return node.meta["val"]


def given(node: fx.Node) -> tuple[Any, Any]:
    """Return the arguments of ``node``, a tuple and a dict of keyword arguments, with fake values in place of nodes."""
    arguments: Any = fx.map_arg(node.args, value_of)
    keywords: Any = fx.map_arg(node.kwargs, value_of)
    return arguments, keywords


def settings_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of ``node`` by name, with the defaults of those that it does not pass.

    Fake values stand in the place of nodes. The target of ``node`` must have a schema, as every ``OpOverload`` has.
    """
    arguments, keywords = given(node)
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {argument.name: argument.default_value for argument in declared}
    return {**defaults, **dict(zip(defaults, arguments, strict=False)), **keywords}


def derived(node: fx.Node, mode: AbstractContextManager[Any]) -> Any:
    """Run the operator of ``node`` on the fake values of its arguments, under their fake mode ``mode``.

    Returns:
        The fake results, views of the arguments' fake tensors where the operator makes views. ``node`` stays as it is.
    """
    arguments, keywords = given(node)
    if node.target is operator.getitem:
        return arguments[0][arguments[1]]
    target: Any = node.target
    with mode:
        return target(*arguments, **keywords)


def mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """Return the ``FakeTensorMode`` that the tensors of ``graph`` belong to; None for a graph without tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, list | tuple) else (value,):
            mode = fake_mode_of(item)
            if mode is not None:
                return mode
    return None
