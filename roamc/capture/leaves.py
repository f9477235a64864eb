"""Refusals of parameters, and of what a loss does to them, that a planned step would treat otherwise than eager."""

from __future__ import annotations

from collections.abc import Mapping

import torch

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


def check_untouched(leaves: Mapping[str, torch.Tensor], required: Mapping[str, bool]) -> None:
    """Refuse a loss function that has called ``backward()``, or has frozen or unfrozen a parameter.

    The step would leave out the gradients in ``.grad``, and update the parameters that required a gradient before.

    Args:
        leaves: the tensors that stand for parameters and buffers in the trace, by name, behind the call of the loss
            function.
        required: whether each required a gradient before it.

    Raises:
        CaptureError: names a parameter.
    """
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            raise CaptureError(
                "loss_fn runs backward itself: let it return the loss alone, or the sum of several losses; train_step "
                f"adds backward, and would lose the .grad of {name}"
            )
        if leaf.requires_grad is not required[name]:
            raise CaptureError(
                f"the step sets requires_grad of {name} to {leaf.requires_grad}; set it before the step, for which a "
                "change makes another plan"
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


def check_same_parameters(model: torch.nn.Module, stand_ins: Mapping[str, torch.Tensor]) -> None:
    """Refuse a loss function that has given a module another parameter: the optimizer would not know of it.

    Args:
        model: the model, with the stand-ins in the place of its parameters, behind the call of the loss function.
        stand_ins: what stands for parameters and buffers in the trace, by name.

    Raises:
        CaptureError: names the parameter.
    """
    stand_in_ids = set(map(id, stand_ins.values()))
    for name, parameter in model.named_parameters():
        if id(parameter) not in stand_in_ids:
            raise CaptureError(
                f"the step puts another parameter into {name}, which the optimizer does not update; change the model "
                "before the step"
            )
