"""Refusals of parameters, and of what a loss does to them, that a planned step would treat otherwise than eager."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from roamc.capture.hooks import hooks_on
from roamc.compat import identity
from roamc.compat_dtensor import is_dtensor, part_of
from roamc.errors import CaptureError


def check_dtypes(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter that is complex, or whose gradient is to have another dtype.

    Raises:
        CaptureError: names the parameter.
    """
    if parameter.is_complex():
        raise CaptureError(f"{name} is complex; train_step updates real parameters only")
    if not is_dtensor(parameter) and parameter.grad_dtype != parameter.dtype:
        raise CaptureError(
            f"{name} is of {parameter.dtype} and has grad_dtype={parameter.grad_dtype}: train_step makes gradients in "
            "the dtype of their parameter; leave grad_dtype out"
        )


State = Mapping[str, tuple[bool, tuple[int, ...]]]
"""Name to whether a tensor requires a gradient, and the numbers of the hooks on it."""


def state_of(leaves: Mapping[str, torch.Tensor], stand_ins: Mapping[str, torch.Tensor]) -> State:
    """Return what :func:`check_untouched` compares; arguments are those there."""
    return {name: (leaf.requires_grad, hooks_on(stand_ins[name])) for name, leaf in leaves.items()}


def check_untouched(leaves: Mapping[str, torch.Tensor], stand_ins: Mapping[str, torch.Tensor], before: State) -> None:
    """Refuse a loss function that has called ``backward()``, frozen or unfrozen a parameter, or hooked one.

    The step would leave out the gradients in ``.grad``, update the parameters that required a gradient before, and
    lose a hook on what stands for a parameter in this trace alone.

    Args:
        leaves: the tensors that autograd gives gradients of in the trace, for each parameter and buffer, by name,
            behind the call of the loss function.
        stand_ins: what the model has in the place of its parameters and buffers, by name.
        before: what :func:`state_of` returned before that call.

    Raises:
        CaptureError: names a parameter.
    """
    for name, leaf in leaves.items():
        required, hooks = before[name]
        if leaf.grad is not None:
            raise CaptureError(
                "loss_fn runs backward itself: let it return the loss alone, or the sum of several losses; train_step "
                f"adds backward, and would lose the .grad of {name}"
            )
        if leaf.requires_grad is not required:
            raise CaptureError(
                f"the step sets requires_grad of {name} to {leaf.requires_grad}; set it before the step, for which a "
                "change makes another plan"
            )
        if hooks_on(stand_ins[name]) != hooks:
            raise CaptureError(
                f"the step registers a gradient hook on parameter {name!r}, which would be lost with the trace; "
                "register it before the step by register_hook, or use roamc.optimize, which runs hooks as they are"
            )


Memory = Mapping[str, tuple[int, torch.UntypedStorage]]
"""Name to the number of a storage, and the storage, which keeps the number from coming again."""


def memory_of(tensors: Mapping[str, torch.Tensor]) -> Memory:
    """Return the storages of ``tensors``, for :func:`check_memory`."""
    return {name: (identity(part_of(t)), part_of(t).untyped_storage()) for name, t in tensors.items()}


def check_memory(tensors: Mapping[str, torch.Tensor], memory: Memory) -> None:
    """Refuse a loss function that has put another tensor into ``.data`` of one: the trace has not heard of it.

    Args:
        tensors: what stands for parameters, buffers and batch tensors in the trace, by name, behind the call of the
            loss function.
        memory: what :func:`memory_of` returned before it.

    Raises:
        CaptureError: names a tensor.
    """
    for name, tensor in tensors.items():
        if identity(part_of(tensor)) != memory[name][0]:
            raise CaptureError(
                f"the step assigns .data of {name}, and would go on with the values before; write into the tensor "
                "instead, as .data.copy_() does"
            )


def check_same_parameters(model: torch.nn.Module, held: Mapping[str, torch.Tensor]) -> None:
    """Refuse a loss function that has given a module another parameter: the optimizer would not know of it.

    So it is where two parameters, or the modules that hold them, have changed places: the next step would find them as
    they were before this one.

    Args:
        model: the model, with the stand-ins in the place of its parameters, behind the call of the loss function.
        held: what :func:`parameters_by_name` returned before that call.

    Raises:
        CaptureError: names the parameter.
    """
    parameters = parameters_by_name(model)
    for name in {**parameters, **held}:
        if parameters.get(name) is held.get(name):
            continue
        what = f"puts another parameter into {name}" if name in parameters else f"takes parameter {name} away"
        raise CaptureError(
            f"the step {what}, which the optimizer does not {'update' if name in parameters else 'follow'}; change the "
            "model before the step"
        )


def parameters_by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of ``model`` by all of their names, of which tied ones have several."""
    return dict(model.named_parameters(remove_duplicate=False))
