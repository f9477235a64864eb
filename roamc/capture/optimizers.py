"""The optimizers of ``train_step``, as ATen operators written behind the backward of a step.

Each rule does the arithmetic of torch.optim's single-tensor form, operator by operator, so that the bits
are those of eager. A value that torch makes, the rule makes too: what eager holds is read off the graph.
Hyperparameters and the step count are inputs of the graph: a learning-rate scheduler needs no new plan.
``fused=True`` calls the same fused kernel as torch, one parameter at a time. ``foreach`` is accepted, and the
single-tensor form is used; the operators' ``meta`` says what eager holds, which runs each for a list of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc import optim
from roamc.compat_dtensor import describe, is_dtensor, placement_of
from roamc.compat_operators import prefers_foreach
from roamc.errors import CaptureError
from roamc.graph.memory import WROTE_OVER, is_dense
from roamc.graph.rewrite import Writer

aten = torch.ops.aten
Group = Mapping[str, Any]
Nodes = Mapping[str, fx.Node]


_REFUSED = ("capturable", "differentiable")
"""Settings of a group that no rule follows."""


@dataclass(frozen=True)
class Rule:
    """How one optimizer updates one parameter.

    Attributes:
        states: function of a group, an item of ``optimizer.param_groups``, that returns the keys of
            ``optimizer.state[p]`` that are tensors of the shape that ``shape`` gives.
        has_step: whether ``optimizer.state[p]["step"]`` counts steps.
        flags: keys of a group whose truth value decides which operators are written; see :func:`structure`.
        scalars: function of (group, number of the step, counted from 1, whether the parameters had no state before it)
            that returns the numbers that are inputs of the graph at that step, by name. The names do not depend on the
            step.
        write: function of (writer, parameter, gradient, states, scalars, group) that appends the update by a
            :class:`roamc.graph.rewrite.Writer`. States and scalars are nodes by key and name; the update writes to
            the parameter and the states in place, with the same operators for all parameters of a group. "foreach" of
            the group says whether eager runs them for lists of tensors.
        start: what the states hold before the first step.
        literals: keys of a group whose values stand in the graph.
        shape: function of (group, shape of a parameter) that returns the shape of its states, and of the gradient that
            its update reads; None where both have the parameter's. A parameter that has a number among the "streams" of
            its group gets the gradient's product with a random projection, see :mod:`roamc.capture.projected`; the
            transpose of that is state "projection".
    """

    states: Callable[[Group], tuple[str, ...]]
    has_step: bool
    flags: tuple[str, ...]
    scalars: Callable[[Group, float, bool], dict[str, float]]
    write: Callable[[Writer, fx.Node, fx.Node, Nodes, Nodes, Group], None]
    start: float = 0.0
    literals: tuple[str, ...] = ()
    shape: Callable[[Group, Sequence[int]], tuple[int, ...]] | None = None


def shape_of(rule: Rule, group: Group, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the states of a parameter of ``shape`` in ``group``, and of the gradient its update reads."""
    return tuple(shape) if rule.shape is None else rule.shape(group, shape)


def fresh_state(rule: Rule, group: Group, parameter: torch.Tensor) -> torch.Tensor:
    """Return a state of ``parameter`` in ``group`` before the first step."""
    return optim.fresh(parameter, shape_of(rule, group, parameter.shape), rule.start)


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of the exact type of ``optimizer``.

    Raises:
        CaptureError: the type is not supported (names those that are), or one of its settings is not.
    """
    rule = RULES.get(type(optimizer))
    if rule is None:
        supported = ", ".join(f"{kind.__module__.partition('.')[0]}.optim.{kind.__name__}" for kind in RULES)
        raise CaptureError(
            f"{type(optimizer).__name__} is not supported by train_step; supported: {supported}; roamc.optimize(model) "
            "takes any optimizer"
        )
    for group in optimizer.param_groups:
        for setting in _REFUSED:
            if group.get(setting):
                raise CaptureError(f"{type(optimizer).__name__}({setting}=True) is not supported; leave {setting} out")
        if not group.get("fused") and _has_tensor_betas(group):
            raise CaptureError(f"{type(optimizer).__name__} with betas that are tensors is not supported; give numbers")
    return rule


def check_dense(name: str, parameter: torch.Tensor, group: Group) -> None:
    """Refuse ``fused=True`` for a parameter whose elements lie apart: torch's kernels take them for one run of memory.

    Args:
        name: of the parameter, for the message.
        parameter: the parameter.
        group: the parameter's group in ``optimizer.param_groups``.

    Raises:
        CaptureError: ``parameter`` has gaps in memory and its group is fused.
    """
    if group.get("fused") and not is_dense(parameter):
        raise CaptureError(
            f"{name} has gaps in memory (shape {tuple(parameter.shape)}, strides {parameter.stride()}), which torch's "
            "fused kernels read over; leave fused=True out, or make the parameter of a .contiguous() tensor"
        )


def runs_foreach(group: Group, parameters: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Return whether eager updates ``parameters`` by ``torch._foreach_*``, each call for a list of tensors.

    Args:
        group: an item of ``optimizer.param_groups``; where it does not say, torch decides by the device.
        parameters: the live parameters of ``group`` that have gradients.
        device: where the step is to run.
    """
    if "foreach" not in group or group.get("fused"):
        return False
    if group["foreach"] is not None or group.get("fused") is not None:
        return bool(group["foreach"])
    refused = isinstance(group["lr"], torch.Tensor) and group.get("capturable") is False  # by Adam, not by SGD
    return prefers_foreach(parameters, device) and not refused


def structure(rule: Rule, group: Group) -> tuple[object, ...]:
    """Return what of ``group`` needs another graph when it changes, or is refused then by :func:`rule_for`.

    A number, such as ``weight_decay``, counts only as zero or not. ``group`` is one of ``optimizer.param_groups``.
    """
    flags = (bool(group.get(flag)) for flag in (*rule.flags, *_REFUSED))
    return (*flags, _has_tensor_betas(group), *(group[key] for key in rule.literals))


def _has_tensor_betas(group: Group) -> bool:
    return any(isinstance(beta, torch.Tensor) for beta in group.get("betas", ()))


def check_state(optimizer: torch.optim.Optimizer, rule: Rule, name: str, parameter: torch.Tensor, group: Group) -> None:
    """Refuse state of ``parameter`` that was made for another dtype, device or shape than ``parameter`` has now.

    Args:
        optimizer: holds ``parameter``.
        rule: of ``optimizer``.
        name: of the parameter, for the message.
        parameter: the live parameter.
        group: the parameter's group in ``optimizer.param_groups``.

    Raises:
        CaptureError: names the state, and how it is moved.
    """
    state = optimizer.state.get(parameter, {})
    shape = shape_of(rule, group, parameter.shape)
    wanted = (*_kind(parameter)[:2], shape, placement_of(parameter))
    for key in rule.states(group):
        value = state.get(key)
        if isinstance(value, torch.Tensor) and _kind(value) != wanted:
            also = "" if rule.shape is None else f", of which rank={group['rank']} of its group makes {list(shape)}"
            raise CaptureError(
                f"the optimizer's {key} of {name} is {_words(value)}, the parameter {_words(parameter)}{also}: the "
                "model or group was changed after its first step; optimizer.load_state_dict(optimizer.state_dict()) "
                "brings dtype and device after it, a new optimizer anything"
            )


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tuple(tensor.shape), placement_of(tensor)


def _words(tensor: torch.Tensor) -> str:
    placed = f", {describe(tensor)}" if is_dtensor(tensor) else ""
    return f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}{placed}"


def init_state(
    optimizer: torch.optim.Optimizer, rule: Rule, parameter: torch.Tensor, group: Group
) -> Callable[[], None] | None:
    """Add what is missing of the parameter's entries in ``optimizer.state``; entries that exist stay.

    The step count is 0, a float32 scalar, on the CPU or, for ``fused=True``, on the parameter's device; without
    ``fused=True`` a float64 scalar where that is the default dtype, as torch has it. The other entries hold
    ``rule.start`` and have the parameter's dtype and device, the shape that :func:`shape_of` gives, and, if that is the
    parameter's and it is dense, its strides.

    Args:
        optimizer: holds ``parameter``; its ``state`` is changed.
        rule: of ``optimizer``.
        parameter: the live parameter.
        group: the parameter's group in ``optimizer.param_groups``.

    Returns:
        A function without arguments that removes the added entries again; None if nothing was missing. Call it if the
        step fails: an optimizer that counts no steps takes a parameter without state for one before its first step.
    """
    before = optimizer.state.get(parameter)
    entries = before or {}
    missing: dict[str, torch.Tensor] = {}
    if rule.has_step and "step" not in entries:
        fused = group.get("fused")
        double = not fused and torch.get_default_dtype() is torch.float64
        device, dtype = parameter.device if fused else "cpu", torch.float64 if double else torch.float32
        missing["step"] = torch.zeros((), dtype=dtype, device=device)
    absent = [key for key in rule.states(group) if entries.get(key) is None]
    missing.update({key: fresh_state(rule, group, parameter) for key in absent})
    if not missing:
        return None
    take_away = functools.partial(_set_back, optimizer, parameter, None if before is None else dict(before))
    optimizer.state[parameter].update(missing)
    return take_away


def _set_back(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, before: dict[str, Any] | None) -> None:
    """Let the parameter's entries in ``optimizer.state`` be ``before``; None where it had none."""
    if before is None:
        del optimizer.state[parameter]
        return
    state = optimizer.state[parameter]
    state.clear()
    state.update(before)


def _sgd_states(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _sgd_scalars(group: Group, step: float, first: bool) -> dict[str, float]:
    return {
        "lr": float(group["lr"]),
        "minus_lr": -float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "momentum": float(group["momentum"]),
        # The first step's buffer is the gradient itself, whatever the dampening.
        "one_minus_dampening": 1.0 if first else 1 - float(group["dampening"]),
        "dampening": float(group["dampening"]),
        "is_first_step": first,
    }


def _sgd_write(writer: Writer, param: fx.Node, grad: fx.Node, states: Nodes, n: Nodes, group: Group) -> None:
    if group.get("fused"):
        _fused_sgd(writer, param, grad, states, n, group)
        return
    if group.get("maximize"):
        grad = writer.call(aten.neg.default, grad)
    if group["weight_decay"]:
        grad = _decayed(writer, param, grad, n, group)
    if group["momentum"]:
        buffer = states["momentum_buffer"]
        writer.call(aten.mul_.Tensor, buffer, n["momentum"])
        writer.call(aten.add_.Tensor, buffer, grad, alpha=n["one_minus_dampening"])
        if group.get("nesterov"):
            ahead = writer.call(aten.add.Tensor, grad, buffer, alpha=n["momentum"])
            grad = _over(ahead) if group["foreach"] else ahead
        else:
            grad = buffer
    writer.call(aten.add_.Tensor, param, grad, alpha=n["minus_lr"])


def _decayed(writer: Writer, param: fx.Node, grad: fx.Node, n: Nodes, group: Group) -> fx.Node:
    """Add ``weight_decay`` times ``param`` to ``grad``; return the sum."""
    total = writer.call(aten.add.Tensor, grad, param, alpha=n["weight_decay"])
    return _over(total) if group["foreach"] and group.get("maximize") else total


def _over(node: fx.Node) -> fx.Node:
    """Say of ``node`` that eager writes it over its first argument; return it."""
    node.meta[WROTE_OVER] = True
    return node


def _fused_sgd(writer: Writer, param: fx.Node, grad: fx.Node, states: Nodes, n: Nodes, group: Group) -> None:
    writer.call(
        aten._fused_sgd_.default,
        [param], [_in_the_order_of(param, grad, writer)], [states["momentum_buffer"]] if group["momentum"] else [],
        weight_decay=n["weight_decay"], momentum=n["momentum"], lr=n["lr"], dampening=n["dampening"],
        nesterov=bool(group.get("nesterov")), maximize=bool(group.get("maximize")), is_first_step=n["is_first_step"],
    )  # fmt: skip


def _in_the_order_of(param: fx.Node, grad: fx.Node, writer: Writer) -> fx.Node:
    """Return the gradient with the strides of ``param``, as fused kernels read both from front to back."""
    if grad.meta["val"].stride() == param.meta["val"].stride():
        return grad
    dense = writer.call(aten.empty_like.default, param)
    return writer.call(aten.copy_.default, dense, grad)


def _adam_states(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _adam_scalars(group: Group, step: float, first: bool) -> dict[str, float]:
    lr = group["lr"]  # a tensor rounds at every operation, and so it does in torch
    beta1, beta2 = (float(beta) for beta in group["betas"])
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    return {
        "lr": float(lr),
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "decay": float(1 - lr * group["weight_decay"]),
        "root_correction2": correction2**0.5,
        "minus_step_size": -float(lr / correction1),
    }


def _adam_write(decoupled: Callable[[Group], bool]) -> Callable[..., None]:
    def write(writer: Writer, param: fx.Node, grad: fx.Node, states: Nodes, n: Nodes, group: Group) -> None:
        if group.get("fused"):
            _fused_adam(writer, param, grad, states, n, group, decoupled(group))
            return
        if group.get("maximize"):
            grad = writer.call(aten.neg.default, grad)
        if group["weight_decay"] and decoupled(group):
            writer.call(aten.mul_.Tensor, param, n["decay"])
        elif group["weight_decay"]:
            grad = _decayed(writer, param, grad, n, group)
        first, denominator = _moments(writer, grad, states, n, group)
        writer.call(aten.addcdiv_.default, param, first, denominator, value=n["minus_step_size"])

    return write


def _moments(writer: Writer, grad: fx.Node, states: Nodes, n: Nodes, group: Group) -> tuple[fx.Node, fx.Node]:
    """Update Adam's moments; return the first, and what the update divides it by."""
    first, second = states["exp_avg"], states["exp_avg_sq"]
    writer.call(aten.lerp_.Scalar, first, grad, n["one_minus_beta1"])
    writer.call(aten.mul_.Tensor, second, n["beta2"])
    writer.call(aten.addcmul_.default, second, grad, grad, value=n["one_minus_beta2"])
    if group["amsgrad"]:
        largest = _over(writer.call(aten.maximum.default, states["max_exp_avg_sq"], second))
        writer.call(aten.copy_.default, states["max_exp_avg_sq"], largest)
        second = states["max_exp_avg_sq"]
    root = writer.call(aten.sqrt.default, second)
    divided = writer.call(aten.div.Tensor, root, n["root_correction2"])
    denominator = _over(divided) if group["foreach"] else divided
    writer.call(aten.add_.Tensor, denominator, n["eps"])
    return first, denominator


def _fused_adam(
    writer: Writer, param: fx.Node, grad: fx.Node, states: Nodes, n: Nodes, group: Group, decoupled: bool
) -> None:
    largest = [states["max_exp_avg_sq"]] if group["amsgrad"] else []
    writer.call(
        aten._fused_adamw_.default if decoupled else aten._fused_adam_.default,
        [param], [_in_the_order_of(param, grad, writer)], [states["exp_avg"]], [states["exp_avg_sq"]], largest,
        [states["step"]],
        lr=n["lr"], beta1=n["beta1"], beta2=n["beta2"], weight_decay=n["weight_decay"], eps=n["eps"],
        amsgrad=bool(group["amsgrad"]), maximize=bool(group.get("maximize")),
    )  # fmt: skip


def _compact_scalars(group: Group, step: float, first: bool) -> dict[str, float]:
    optim.check_settings(group)
    numbers = _adam_scalars({**group, "lr": float(group["lr"])}, step, first)  # as its own step() takes it
    if group["rank"] is None:
        return numbers
    scaled = numbers["minus_step_size"] * group["scale"]
    return {**numbers, "counter": float((step - 1) // group["every"]), "minus_scaled_size": scaled}


def _compact_write(writer: Writer, param: fx.Node, grad: fx.Node, states: Nodes, n: Nodes, group: Group) -> None:
    group = {**group, "amsgrad": False}
    if "projection" not in states:
        _adam_write(lambda group: True)(writer, param, grad, states, n, group)
        return
    if group["weight_decay"]:
        writer.call(aten.mul_.Tensor, param, n["decay"])
    first, denominator = _moments(writer, grad, states, n, group)
    direction = writer.call(aten.div.Tensor, first, denominator)
    writer.call(aten.addmm_.default, param, direction, states["projection"], alpha=n["minus_scaled_size"])


_ADAM_FLAGS = ("amsgrad", "maximize", "weight_decay", "fused", "decoupled_weight_decay")

RULES: dict[type, Rule] = {
    torch.optim.SGD: Rule(
        _sgd_states, False, ("momentum", "weight_decay", "nesterov", "maximize", "fused"), _sgd_scalars, _sgd_write,
        start=-0.0,  # of which momentum times it, and a gradient, is the gradient, also where that is -0.0
    ),
    torch.optim.Adam: Rule(
        _adam_states, True, _ADAM_FLAGS, _adam_scalars,
        _adam_write(lambda group: bool(group.get("decoupled_weight_decay"))),
    ),
    torch.optim.AdamW: Rule(_adam_states, True, _ADAM_FLAGS, _adam_scalars, _adam_write(lambda group: True)),
    optim.CompAct: Rule(
        lambda group: ("exp_avg", "exp_avg_sq"), True, ("weight_decay",), _compact_scalars, _compact_write,
        literals=("rank", "seed", "basis"), shape=optim.shape_of,
    ),
}  # fmt: skip
"""Class of an optimizer to its rule; a class that is missing here is not supported."""
