"""Which operators of backward belong to one call of autograd: the text does not say it, and eager's peak depends on it.

Forward's operators run once more under autograd, on fake tensors, and what autograd calls has its own numbers. Its
backward is that of the text, operator for operator, but where a user's ``autograd.Function`` or a change of torch makes
another: what does not match gets no number.
"""

from __future__ import annotations

import difflib
import logging
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roamc import compat_calls
from roamc.capture.dump.text import TANGENTS
from roamc.compat_calls import Called
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
    trained = {node for node, result in zip(inputs, results[outputs:], strict=False) if result is not None}
    recorder = compat_calls.Recorder()
    place: dict[fx.Node, int] = {}  # of what an operator of forward has called, among all that was called
    begun: int | None = None
    try:
        with compat_calls.on_fakes(recorder):
            env = {node: _on_cpu(node.meta["val"]).requires_grad_(node in trained) for node in inputs}
            for node in forward:
                before = len(recorder.called)
                env[node] = _run(node, env)
                if node.op == "call_function" and len(recorder.called) > before:
                    place[node] = before
            pairs = _with_tangents(inputs, results[:outputs], env)
            if pairs:
                values, gradients = zip(*pairs, strict=True)
                recorder.follow(values)
                begun = len(recorder.called)
                torch.autograd.grad(values, [env[node] for node in trained], gradients, allow_unused=True)
    except Exception as error:  # of any kind: an operator without a derivative, or whose shapes the file has otherwise
        log.debug("forward cannot be traced again: %s", error)
        return False
    called = recorder.called
    for node, at in place.items():
        node.meta[CALL] = called[at].number
    if begun is None:
        return False
    saved = called[max(place.values(), default=0) + 1 : begun]
    for node in between:
        key = _key(node)
        like = next((call for call in saved if _key_of_call(call) == key), None)
        if like is not None:
            saved.remove(like)
        early = like is not None or node.target is operator.getitem
        node.meta["partitioner_tag"] = "is_forward" if early else "is_backward"
    backward = [node for node in nodes if node.meta.get("partitioner_tag") == "is_backward"]
    return _matched(backward, called[begun:])


def _with_tangents(
    inputs: Sequence[fx.Node], results: Sequence[Any], env: Mapping[fx.Node, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each of forward's results that has a gradient, and that gradient; none where the file has others."""
    tangents = iter([env[node] for node in inputs if node.name.startswith(TANGENTS)])
    returned = [env[node] for node in results if isinstance(node, fx.Node)]
    pairs = [(value, next(tangents, None)) for value in returned if value.requires_grad]
    fitting = [(value, tangent) for value, tangent in pairs if tangent is not None and tangent.shape == value.shape]
    return fitting if len(fitting) == len(pairs) else []


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


def _matched(backward: Sequence[fx.Node], called: Sequence[Called]) -> bool:
    """Give each operator of the text the number of the call that stands for it, where one does."""
    nodes = [node for node in backward if node.op == "call_function" and node.target is not operator.getitem]
    pairs = _in_turn(nodes, called)
    if len(pairs) < len(nodes):
        places = _common([_key(node) for node in nodes], [_key_of_call(each) for each in called])
        pairs = {nodes[own]: called[other] for own, other in places}
    for node, call in pairs.items():
        node.meta |= {CALL: call.number} | ({SUM_OF_GRADIENTS: True} if call.adds else {})
        if node.target != call.target:  # autograd computes it in place
            node.meta[WROTE_OVER] = True
    for node in backward:
        if node.target is operator.getitem and node.all_input_nodes[0] in pairs:
            node.meta[CALL] = pairs[node.all_input_nodes[0]].number
    return len(pairs) == len(nodes)


def _in_turn(nodes: Sequence[fx.Node], called: Sequence[Called]) -> dict[fx.Node, Called]:
    """Each operator of the text to the next call that is like it: all there is to do in nearly all graphs."""
    pairs, rest = {}, iter(called)
    for node in nodes:
        key = _key(node)
        call = next((call for call in rest if _key_of_call(call) == key), None)
        if call is None:
            break
        pairs[node] = call
    return pairs


def _common(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Places of what two sequences have in common, the longest run first."""
    numbers: dict[Hashable, int] = {}
    one, two = ([numbers.setdefault(key, len(numbers)) for key in side] for side in (left, right))
    blocks = difflib.SequenceMatcher(None, one, two, autojunk=False).get_matching_blocks()
    return [(own + at, other + at) for own, other, size in blocks for at in range(size)]


Key = tuple[str, tuple[tuple[torch.Size, torch.dtype], ...]]
"""Name of an operator, that of ``add`` for ``add_``, with shape and dtype of each result."""


def _key(node: fx.Node) -> Key:
    return _plain(node.target), tuple((tensor.shape, tensor.dtype) for _, tensor in tensors_of(node))


def _key_of_call(call: Called) -> Key:
    return _plain(call.target), call.results


def _plain(target: Any) -> str:
    return name_of(target).replace("_.", ".")
