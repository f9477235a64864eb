"""Hooks that a user has registered on an optimizer's step, around a step that is one program.

    eager         forward, backward   pre-hooks   update   post-hooks
    train_step    pre-hooks   forward, backward, update   post-hooks

So a pre-hook may set what the update reads, such as learning rates. It must not write parameters or buffers, which
forward would read; and no hook can read gradients, of which there are none.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from roamc import compat_hooks, notices
from roamc.capture.hooks import name_of
from roamc.compat_dtensor import part_of
from roamc.errors import CaptureError
from roamc.frontends.returned_loss import ADVICE

Hook = Callable[..., Any]
Parameters = Mapping[str, torch.Tensor]


def check_step_method(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose ``step`` was replaced by another function: it would never be called.

    The function that a learning-rate scheduler of torch puts in its place is allowed, since it only counts steps.

    Raises:
        CaptureError: names the function.
    """
    step = vars(optimizer).get("step")
    while step is not None and getattr(step, "_wrapped_by_lr_sched", False):
        step = getattr(step, "__wrapped__", None)
    if step is not None and step is not type(optimizer).step:
        raise CaptureError(
            f"step of this {type(optimizer).__name__} was replaced by {name_of(step)}, which train_step would never "
            "call; use register_step_pre_hook and register_step_post_hook, or roamc.optimize"
        )


def watch(step: object, optimizer: torch.optim.Optimizer) -> None:
    """Have ``optimizer.step()`` warn, as long as ``step`` lives, where it finds no gradients since ``step`` updates.

    Copies and pickles of the optimizer do not have the hook, as torch leaves all hooks out.
    """
    handle = optimizer.register_step_pre_hook(warn_of_idle_step)
    weakref.finalize(step, handle.remove).atexit = False


def warn_of_idle_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Step pre-hook: warn, once for the optimizer, that no parameter has a gradient, and no closure makes one.

    Args:
        optimizer: the optimizer.
        args: the optimizer, and the closure if it is positional.
        named: keyword arguments of the step.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if len(args) > 1 or named.get("closure") is not None or any(each.grad is not None for each in parameters):
        return
    notices.warn(
        optimizer,
        "idle step",
        f"{type(optimizer).__name__}.step() finds no gradients: roamc.train_step's step already updates the "
        f"parameters; {ADVICE}",
    )


def users_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Hook], list[Hook]]:
    """Return (pre-hooks, post-hooks) of ``optimizer.step()`` without those of :func:`watch`, in torch's order."""
    before, after = compat_hooks.optimizer_step_hooks(optimizer)
    return [hook for hook in before if hook is not warn_of_idle_step], after


def run_before(
    hooks: Sequence[Hook], optimizer: torch.optim.Optimizer, tensors: Parameters, parameters: Parameters
) -> None:
    """Run the pre-hooks of an optimizer's step, with gradients that cannot be read.

    Args:
        hooks: the hooks, in their order.
        optimizer: the optimizer that they are called with.
        tensors: parameters and buffers, by name, that hooks must not write.
        parameters: those of ``tensors`` that the step updates.

    Raises:
        CaptureError: a hook writes to one of ``tensors``, reads or sets a gradient, or gives the step other
            arguments.
        RuntimeError: a hook returns neither None nor ``(args, kwargs)``.
    """
    before = _marks(tensors)
    with _gradients_absent(parameters), _DataCounted():
        _run_each(hooks, optimizer)
        assigned = [
            name for name, tensor in parameters.items() if not isinstance(tensor.grad, compat_hooks.AbsentGradient)
        ]
    after = _marks(tensors)
    written = [name for name in tensors if before[name] != after[name]]
    who = f"a step pre-hook of the optimizer ({', '.join(map(name_of, hooks))})"
    if assigned:
        raise CaptureError(
            f"{who} sets .grad of {assigned[0]!r}, and train_step keeps no gradients; change them by "
            "Tensor.register_hook, or use roamc.optimize"
        )
    if written:
        raise CaptureError(
            f"{who} writes to {written[0]!r}; train_step runs it before forward, which reads that; write in a step "
            "post-hook, or use roamc.optimize"
        )


def _run_each(hooks: Sequence[Hook], optimizer: torch.optim.Optimizer) -> None:
    """Run pre-hooks, each with the arguments that the one before it has returned."""
    arguments: tuple[Any, Any] = (optimizer,), {}
    for hook in hooks:
        returned = hook(optimizer, *arguments)
        if returned is None:
            continue
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise RuntimeError(f"{name_of(hook)} must return None or (args, kwargs) for the step, not {returned!r}")
        arguments = returned
        if tuple(arguments[0]) != (optimizer,) or arguments[1]:
            raise CaptureError(
                f"step hook {name_of(hook)} hands the optimizer's step other arguments ({arguments[0][1:]}, "
                f"{arguments[1]}); train_step has none to hand on"
            )


def run_after(hooks: Sequence[Hook], optimizer: torch.optim.Optimizer, parameters: Callable[[], Parameters]) -> None:
    """Run the post-hooks of an optimizer's step, with gradients that cannot be read.

    Args:
        hooks: the hooks, in their order.
        optimizer: the optimizer that they are called with.
        parameters: returns the parameters that the step updates, by name; called if there is a hook.

    Raises:
        CaptureError: a hook reads a gradient.
    """
    if not hooks:
        return
    with _gradients_absent(parameters()):
        for hook in hooks:
            hook(optimizer, (optimizer,), {})


@contextlib.contextmanager
def _gradients_absent(parameters: Parameters) -> Iterator[None]:
    """While inside, ``.grad`` of every parameter is a tensor that refuses to be read."""
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = None
        parameter.grad = compat_hooks.AbsentGradient(parameter, name)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            if isinstance(parameter.grad, compat_hooks.AbsentGradient):
                parameter.grad = before[name]


class _DataCounted(TorchFunctionMode):
    """While inside, ``tensor.data`` counts writes as the tensor's own."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def _marks(tensors: Parameters) -> dict[str, tuple[int, int]]:
    """For every tensor a pair that changes when the tensor is written or gets other memory."""
    parts = {name: part_of(tensor) for name, tensor in tensors.items()}
    return {name: (part._version, part.data_ptr()) for name, part in parts.items()}
