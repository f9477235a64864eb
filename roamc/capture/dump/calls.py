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
from roamc.operators import ops
from roamc.operators.schemas import name_of

aten = torch.ops.aten

log = logging.getLogger(__name__)

CALL = "seq_nr"
"""Key in ``node.meta`` of the number of a call; forward's operator and those of its backward have the same."""


class _Copy(torch.autograd.Function):
    """``old.copy_(new)``, of one shape, without a write; the gradient of ``old`` is made of zeros, as autograd does."""

    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """A tensor like ``old`` with the values of ``new``."""
        ctx.dtype = new.dtype
        return new.to(old).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradients of both."""
        old, new = ctx.needs_input_grad
        return torch.zeros_like(gradient) if old else None, gradient.to(ctx.dtype) if new else None


def _copied(old: torch.Tensor, new: torch.Tensor, non_blocking: bool = False) -> Any:
    del non_blocking
    wide = new if new.shape == old.shape else new.expand_as(old)
    return _Copy.apply(old, wide)  # type: ignore[no-untyped-call]


DIFFERENTIABLE: Mapping[Any, Callable[..., Any]] = {aten.copy.default: _copied}
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
    trained = [node for node, result in zip(inputs, results[outputs:], strict=False) if result is not None]
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
        key = None if any(map(_saved_in_place, node.all_input_nodes)) else _key(node)
        like = next((call for call in saved if _key_of_call(call) == key), None)
        if like is not None:
            saved.remove(like)
        early = like is not None or node.target is operator.getitem
        node.meta["partitioner_tag"] = "is_forward" if early else "is_backward"
    backward = [node for node in nodes if node.meta.get("partitioner_tag") == "is_backward"]
    return _matched(backward, called[begun:])


def _saved_in_place(node: fx.Node) -> bool:
    """Whether what an operator saves of ``node`` is made where backward reads it, as for a write in place."""
    tag = node.meta.get("partitioner_tag")
    return tag == "is_backward" or (tag == "is_forward" and WROTE_OVER in node.meta)


def _with_tangents(
    inputs: Sequence[fx.Node], results: Sequence[Any], env: Mapping[fx.Node, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each of forward's results that has a gradient, and that gradient; none where the file has others.

    The new value of an input that was written and is trained comes first, and has a tangent even if it needs none.
    """
    tangents = [env[node] for node in inputs if node.name.startswith(TANGENTS)]
    values = [env[node] for node in results if isinstance(node, fx.Node)]
    values = [value for value in values if value.requires_grad]
    last = tangents[max(0, len(tangents) - len(values)) :]
    fits = [value.shape for value in values] == [tangent.shape for tangent in last]
    return list(zip(values, last, strict=True)) if fits else []


def _forward(nodes: Sequence[fx.Node], results: Sequence[Any]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Operators up to the last that a result or write of forward needs, and those behind it that read no tangent.

    The latter are what the last operator saves, or the first of backward that read only what forward has saved.
    """
    early = [node for node in nodes if node.meta.get("partitioner_tag") == "is_forward"]
    needed = {node for node in results if isinstance(node, fx.Node)}
    for node in nodes:
        needed.update(node.all_input_nodes if node.meta.get("partitioner_tag") == "must_be_in_forward" else ())
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
    matched = pairs.keys() | _number_writes_of_slices(nodes)
    return all(node in matched or node.target is aten.detach.default for node in nodes)  # that takes no memory


FIRST_OF_SLICES = -2
"""Number of the first node of autograd for a write to a slice; those after it count down: nothing of forward has it."""


def _number_writes_of_slices(backward: Sequence[fx.Node]) -> set[fx.Node]:
    """Set :data:`CALL` and :data:`WROTE_OVER` of operators that are the backward of writes to slices; return these.

    Autograd has one node for a write and the view that is written. It copies the gradient, has the gradient of what was
    written in the same view of the copy, and writes it there. In the text both writes, and what brings the second back
    to the shape of the base, are operators with results of their own::

        base = new_empty_strided(gradient, …); copied = copy(base, gradient)
        part = unsqueeze(slice(copied, …)); own = clone(part); own_1 = masked_fill(own, …)
        written = copy(part, own_1); whole = slice_scatter(copied, squeeze(written), …)
    """
    numbered: set[fx.Node] = set()
    place = {node: at for at, node in enumerate(backward)}
    for begin, node in enumerate(backward):
        writes = _writes_of_slice(node)
        if not writes or not all(each in place for each in writes):
            continue
        for each in writes:
            each.meta[WROTE_OVER] = True
        members = backward[begin : place[writes[-1]] + 1]
        for each in members:
            each.meta[CALL] = FIRST_OF_SLICES - len(numbered)
            each.meta.pop(SUM_OF_GRADIENTS, None)
        numbered.update(members)
    return numbered


def _writes_of_slice(node: fx.Node) -> list[fx.Node]:
    """What is written in place where ``node`` begins the backward of a write to a slice, in turn; [] elsewhere."""
    if node.target is not aten.new_empty_strided.default:
        return []
    copied = _copy_into(node)
    if copied is None:
        return []
    waiting = [(copied, 0)]
    for part, steps in waiting:
        written = _copy_into(part)
        back = [] if written is None else _back_to_base(written, steps, copied)
        if back:
            return [copied, *back]
        waiting += [(user, steps + 1) for user in part.users if ops.is_view(user.target) and user.args[0] is part]
    return []


def _copy_into(node: fx.Node) -> fx.Node | None:
    return next((user for user in node.users if user.target is aten.copy.default and user.args[0] is node), None)


def _back_to_base(written: fx.Node, steps: int, base: fx.Node) -> list[fx.Node]:
    """``written`` and as many operators that make the whole of ``base`` of it; [] if they are not there."""
    chain = [written]
    for _ in range(steps):
        inverse = next((user for user in chain[-1].users if chain[-1] in user.args[:2]), None)
        if inverse is None:
            return []
        chain.append(inverse)
    return chain if chain[-1].meta["val"].shape == base.meta["val"].shape else []


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
