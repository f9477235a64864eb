"""Gradients of the batch: what backward adds to ``.grad`` of a batch tensor that requires a gradient, as eager does.

    x.requires_grad_()
    step(x)                  eager:  loss.backward(); optimizer.step()    both leave the gradient in x.grad,
    step(x)                                                               and add that of the next step to it

The gradient is an output of the graph, in memory of its own and with the strides that autograd gives ``.grad``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roamc.capture.parts import stand_in
from roamc.compat import identity
from roamc.compat_dtensor import is_dtensor
from roamc.errors import CaptureError


def stand_for_batch(
    fakes: Mapping[int, torch.Tensor], leaves: Sequence[Any], held: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return what stands in the trace for each tensor of the batch.

    A tensor that requires a gradient has one stand-in, however often the batch has it, and if it is a parameter of the
    model, that of the parameter: autograd then sums its gradient as in eager. A parameter's is one to ``isinstance``.

    Args:
        fakes: position of each tensor among ``leaves`` to its traced value; of a DTensor, of this rank's part.
        leaves: tensors and other values of the batch.
        held: ``id`` of each parameter and buffer to its stand-in.

    Returns:
        Position to stand-in.
    """
    shared, batch = dict(held), {}
    for index, fake in fakes.items():
        leaf = leaves[index]
        batch[index] = shared.setdefault(id(leaf), stand_in(fake, leaf)) if leaf.requires_grad else stand_in(fake, leaf)
        if isinstance(leaf, nn.Parameter):
            alike: Any = batch[index]
            alike._is_param = True  # isinstance asks for it
    return batch


def wanted_of(batch: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the stand-ins that get a gradient, by position in the batch; each stand-in once.

    One that ``loss_fn`` has written over with what it computed with gradients gets none, as in eager.

    Args:
        batch: what :func:`stand_for_batch` returned.

    Raises:
        CaptureError: one is a DTensor, or ``loss_fn`` has assigned ``.grad`` of one; says its shape.
    """
    wanted: dict[int, torch.Tensor] = {}
    for index, tensor in batch.items():
        if tensor.is_leaf and tensor.grad is not None:
            raise CaptureError(
                f"loss_fn assigns .grad of a batch tensor of shape {tuple(tensor.shape)}, and the step would lose it; "
                "assign it outside of the step"
            )
        if not (tensor.requires_grad and tensor.is_leaf) or any(tensor is other for other in wanted.values()):
            continue
        if is_dtensor(tensor):
            raise CaptureError(
                f"a batch tensor of shape {tuple(tensor.shape)} is a DTensor that requires a gradient, which "
                "train_step does not compute; pass its .detach(), or use roamc.optimize"
            )
        wanted[index] = tensor
    return wanted


def handed_over(
    gradients: Mapping[int, torch.Tensor | None], batch: Mapping[int, torch.Tensor], others: Iterable[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the gradients that the caller gets: each alone in its memory, with the strides of ``.grad``.

    Autograd keeps a gradient as it is where it may, and copies one that something else holds as well, such as the
    gradient of the other operand of a sum, and one that has other strides.

    Args:
        gradients: position of a batch tensor to its gradient, None where the loss does not depend on it.
        batch: position to the batch tensor's stand-in.
        others: inputs, the loss and gradients of parameters, whose memory none of the results may share.

    Returns:
        Position to gradient, without those that are None.
    """
    taken = {identity(tensor) for tensor in others}
    results: dict[int, torch.Tensor] = {}
    for index, gradient in gradients.items():
        if gradient is None:
            continue
        gradient = laid_out(gradient, batch[index], copied=not _is_alone(gradient, taken))
        taken.add(identity(gradient))
        results[index] = gradient
    return results


def laid_out(gradient: torch.Tensor, leaf: torch.Tensor, *, copied: bool = False) -> torch.Tensor:
    """Return ``gradient`` with the strides that autograd gives ``leaf.grad``; a copy where it has others or ``copied``.

    What an optimizer computes in 16 bits, and the norm of a gradient, have other last bits with other strides.
    """
    strides = _strides_of_gradient(leaf)
    if copied or not _has_strides(gradient, strides):
        return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)
    return gradient


def _strides_of_gradient(leaf: torch.Tensor) -> tuple[int, ...]:
    """Strides of ``leaf.grad``: those of ``leaf`` where it fills its memory without gaps, else row by row."""
    if _fills(leaf):
        return leaf.stride()
    sizes = [max(size, 1) for size in leaf.shape]
    return tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))


def _fills(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` lie in memory without gaps, none over another."""
    behind = 1
    for step, size in sorted(pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] != 1):
        if step != behind:
            return False
        behind *= size
    return True


def _has_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(mine == wanted for size, mine, wanted in steps if size != 1)


def _is_alone(tensor: torch.Tensor, taken: set[int]) -> bool:
    """Whether no storage in ``taken`` is that of ``tensor``, which takes all of its own."""
    return identity(tensor) not in taken and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
