"""Writing FX nodes together with their metadata: every new node gets its fake value from the operator itself."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from roamc.compat import FakeTensorMode, fake_mode_of, with_bits
from roamc.graph import Phase, tensors_of
from roamc.operators.random import save_rng_state


class Writer:
    """Adds ``call_function`` nodes to a graph and derives shape, dtype and strides of each.

    Attributes:
        phase: node name to phase of every node written; :class:`roamc.graph.TrainGraph` takes it.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, phase: Phase) -> None:
        self.graph = graph
        self.mode = mode
        self.current = phase
        self.phase: dict[str, Phase] = {}
        self.like: fx.Node | None = None

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append ``target(*args, **kwargs)``; arguments are nodes, numbers or lists of them."""
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, value_of), **fx.map_arg(kwargs, value_of))
        if self.like is not None and "stack_trace" in self.like.meta:
            node.meta["stack_trace"] = self.like.meta["stack_trace"]
        self.phase[node.name] = self.current
        return node


def keep_state(graph: fx.Graph, first: fx.Node, mode: AbstractContextManager[Any], name: str | None = None) -> fx.Node:
    """A node in front of the random operator ``first`` that keeps the state of the generator it draws from."""
    device = next(tensor.device for _, tensor in tensors_of(first))
    with graph.inserting_before(first):
        state = graph.create_node("call_function", save_rng_state, (device,), name=name)
    shape = save_rng_state(device).shape
    with mode:
        state.meta["val"] = torch.empty(shape, dtype=torch.uint8)
    return state


def placed_in(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A fake tensor with the geometry and the lazy bits of ``tensor``, at the same place in another storage.

    Call it under the fake mode that both belong to.
    """
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    new = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return with_bits(new, conj=tensor.is_conj(), neg=tensor.is_neg())


def move(node: fx.Node, position: int, storage: torch.UntypedStorage) -> None:
    """Give one fake tensor of ``node`` the same place in another storage; call it as :func:`placed_in`.

    Args:
        position: among the results of ``node``, as :func:`roamc.graph.tensors_of` counts.
    """
    value = node.meta["val"]
    old = value if isinstance(value, torch.Tensor) else value[position]
    new = placed_in(old, storage)
    if isinstance(value, torch.Tensor):
        node.meta["val"] = new
    else:
        node.meta["val"] = type(value)(new if at == position else item for at, item in enumerate(value))


def value_of(node: fx.Node) -> Any:
    """The fake value that a node stands for."""
    return node.meta["val"]


def given(node: fx.Node) -> tuple[Any, Any]:
    """The arguments and keywords that ``node`` is called with, fake values in the place of nodes."""
    arguments: Any = fx.map_arg(node.args, value_of)
    keywords: Any = fx.map_arg(node.kwargs, value_of)
    return arguments, keywords


def settings_of(node: fx.Node) -> dict[str, Any]:
    """What ``node`` is called with by name, defaults of its operator included; see :func:`given`."""
    arguments, keywords = given(node)
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {argument.name: argument.default_value for argument in declared}
    return {**defaults, **dict(zip(defaults, arguments, strict=False)), **keywords}


def derived(node: fx.Node, mode: AbstractContextManager[Any]) -> Any:
    """The fake value that the operator of ``node`` gives for the values of its arguments, which belong to ``mode``."""
    arguments, keywords = given(node)
    if node.target is operator.getitem:
        return arguments[0][arguments[1]]
    target: Any = node.target
    with mode:
        return target(*arguments, **keywords)


def mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake mode that the tensors of ``graph`` belong to; None for a graph without tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, list | tuple) else (value,):
            mode = fake_mode_of(item)
            if mode is not None:
                return mode
    return None
