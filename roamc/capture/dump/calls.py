"""Which operators of backward belong to one call of autograd: the text does not say it, and eager's peak depends on it.

Forward's operators run once more under autograd, on fake tensors, and the trace of that has torch's own numbers. Its
backward is that of the text, operator for operator, but where a user's ``autograd.Function`` or a change of torch makes
another: what does not match gets no number.
"""

from __future__ import annotations

import difflib
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roamc import compat
from roamc.capture.dump.text import TANGENTS
from roamc.graph import tensors_of
from roamc.graph.memory import WROTE_OVER
from roamc.graph.origin import SUM_OF_GRADIENTS
from roamc.operators.schemas import name_of

log = logging.getLogger(__name__)

CALL = "seq_nr"
"""Key in ``node.meta`` of the number of a call; forward's operator and those of its backward have the same."""

DIFFERENTIABLE: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.copy.default: lambda old, new, non_blocking=False: new.to(old).expand_as(old).clone(),
}
"""Operators of functionalization without a derivative to what computes the same with one."""


def number(joint: fx.GraphModule, outputs: int) -> bool:
    """Set :data:`CALL` of operators, and :data:`SUM_OF_GRADIENTS` of sums that autograd makes of two gradients.

    Args:
        joint: forward and backward, with the tags of :mod:`roamc.capture.dump.phases`.
        outputs: how many of its results are forward's.

    Returns:
        Whether every operator of backward that reads a gradient was found in the trace.
    """
    nodes = list(joint.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    results = nodes[-1].args[0]
    forward, between = _forward(nodes, results[:outputs])
    calls: dict[fx.Node, fx.Node] = {}  # operator of forward to what stands for it in the trace
    ends: list[fx.Node] = []

    def step(*values: torch.Tensor) -> list[Any]:
        trained = {node for node, result in zip(inputs, results[outputs:], strict=False) if result is not None}
        env = {
            node: value.detach().requires_grad_() if node in trained else value
            for node, value in zip(inputs, values, strict=True)
        }
        with torch.enable_grad():
            for node in forward:
                last = next(iter(reversed(compat.graph_so_far().nodes)))
                env[node] = _run(node, env)
                calls[node] = last.next  # autograd may have saved its result behind it
        tangents = iter([env[node] for node in inputs if node.name.startswith(TANGENTS)])
        returned = [env[node] for node in results[:outputs] if isinstance(node, fx.Node)]
        pairs = [(value, next(tangents, None)) for value in returned if value.requires_grad]
        if not pairs or any(tangent is None or tangent.shape != value.shape for value, tangent in pairs):
            return []
        values, gradients = zip(*pairs, strict=True)
        for value in values:
            compat.number_backward(value)
        ends.append(next(iter(reversed(compat.graph_so_far().nodes))))
        return list(torch.autograd.grad(values, [env[node] for node in trained], gradients, allow_unused=True))

    mode = compat.FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    with mode:  # on the CPU: autograd asks a GPU that need not be there for its streams
        fakes = [_on_cpu(node.meta["val"]) for node in inputs]
    try:
        traced = list(compat.trace(step, fakes, mode).graph.nodes)
    except Exception as error:  # of any kind: an operator without a derivative, or whose shapes the file has otherwise
        log.debug("forward cannot be traced again: %s", error)
        return False
    for node, call in calls.items():
        if CALL in call.meta:
            node.meta[CALL] = call.meta[CALL]
    if not ends:
        return False
    place = {node: at for at, node in enumerate(traced)}
    begun = place[ends[0]] + 1
    saved = traced[max((place[call] for call in calls.values() if call in place), default=0) + 1 : begun]
    for node in between:
        like = next((other for other in saved if _is_like(node, other)), None)
        if like is not None:
            saved.remove(like)
        early = like is not None or node.target is operator.getitem
        node.meta["partitioner_tag"] = "is_forward" if early else "is_backward"
    backward = [node for node in nodes if node.meta.get("partitioner_tag") == "is_backward"]
    return _matched(backward, traced[begun:])


def _forward(nodes: Sequence[fx.Node], results: Sequence[Any]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Operators up to the last that a result of forward needs, and those behind it that read no tangent.

    The latter are what the last operator saves, or the first of backward that read only what forward has saved.
    """
    early = [node for node in nodes if node.meta.get("partitioner_tag") == "is_forward"]
    needed = {node for node in results if isinstance(node, fx.Node)}
    for node in reversed(early):
        if node in needed:
            needed.update(node.all_input_nodes)
    last = max((at for at, node in enumerate(early) if node in needed), default=-1)
    return early[: last + 1], early[last + 1 :]


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor like ``value`` on the CPU; call it under the fake mode that it is to belong to."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _run(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return _on_cpu(node.meta["val"])
    args: Any = fx.map_arg(node.args, env.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, env.__getitem__)
    kwargs = {name: torch.device("cpu") if isinstance(each, torch.device) else each for name, each in kwargs.items()}
    target: Any = node.target
    return DIFFERENTIABLE.get(target, target)(*args, **kwargs)


def _matched(backward: Sequence[fx.Node], traced: Sequence[fx.Node]) -> bool:
    """Give each operator of the text the numbers of the operator of the trace that stands for it, where one does."""
    pairs = _in_turn(backward, traced)
    if not _are_all(backward, pairs):
        own_keys, other_keys = ([(_name(each), str(_shapes(each))) for each in part] for part in (backward, traced))
        blocks = difflib.SequenceMatcher(None, own_keys, other_keys, autojunk=False).get_matching_blocks()
        pairs = {backward[own + at]: traced[other + at] for own, other, size in blocks for at in range(size)}
    for node, other in pairs.items():
        node.meta |= {key: other.meta[key] for key in (CALL, SUM_OF_GRADIENTS) if key in other.meta}
        if node.target != other.target:  # autograd computes it in place
            node.meta[WROTE_OVER] = True
    return _are_all(backward, pairs)


def _in_turn(backward: Sequence[fx.Node], traced: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Each operator of the text to the next of the trace that is like it: all there is to do in nearly all graphs."""
    pairs, rest = {}, iter(traced)
    for node in backward:
        other = next((other for other in rest if _is_like(node, other)), None)
        if other is None:
            break
        pairs[node] = other
    return pairs


def _are_all(backward: Sequence[fx.Node], pairs: Mapping[fx.Node, fx.Node]) -> bool:
    return all(node in pairs or node.target is operator.getitem or node.op == "get_attr" for node in backward)


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    return _name(node) == _name(other) and _shapes(node) == _shapes(other)


def _name(node: fx.Node) -> str:
    """The name of an operator, that of ``add`` for ``add_``."""
    return name_of(node.target).replace("_.", ".")


def _shapes(node: fx.Node) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for _, tensor in tensors_of(node)]
