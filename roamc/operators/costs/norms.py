"""Workspace of norms on a CPU, as ATen's kernels of torch 2.13 take it."""

from __future__ import annotations

from math import prod

import torch

from roamc.operators.call import Call, tensor_at
from roamc.operators.costs.arguments import channels_last, computed_size, is_half
from roamc.units import Bytes

LARGE = 1024
"""Pixels of an image from which a group norm whose image lies channels last gives each thread a part of its rows."""


def batch_norm(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of a batch norm: a factor and an addend for every channel."""
    image = tensor_at(call, 0)
    return 2 * computed_size(image) * image.shape[1]


def batch_norm_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in a batch norm: a sum for every channel if these lie side by side."""
    image = tensor_at(call, 0)
    return computed_size(image) * image.shape[1] if image.stride(1) == 1 else 0


def batch_norm_backward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``native_batch_norm_backward``: a copy of the gradient.

    It is in float32 if the gradient has half precision and other strides than the image.
    """
    gradient, image = tensor_at(call, 0), tensor_at(call, 1)
    alike = not is_half(gradient) or gradient.stride() == image.stride()
    return gradient.nbytes if alike else 4 * gradient.numel()


def group_norm(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``native_group_norm``: channels last, a factor and an addend for every image and channel.

    For large images, see :data:`LARGE`, it is that for every image and group. It is 0 in other layouts.
    """
    image, groups = tensor_at(call, 0), call.args[6]
    if not channels_last(image):
        return 0
    return 2 * computed_size(image) * image.shape[0] * (groups if _large(call.args[5]) else image.shape[1])


def group_norm_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``native_group_norm``: the sums of large images channels last."""
    return _sums_per_thread(tensor_at(call, 0), call.args[5])


def group_norm_backward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``native_group_norm_backward``: two sums for every image and channel.

    Channels last it is two more for every image and group.
    """
    image: torch.Tensor = tensor_at(call, 1)
    images, channels, groups = (int(call.args[at]) for at in (5, 6, 8))
    return 2 * computed_size(image) * images * (channels + (groups if channels_last(image) else 0))


def group_norm_backward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``native_group_norm_backward``, as forward."""
    return _sums_per_thread(tensor_at(call, 1), call.args[7])


def _sums_per_thread(image: torch.Tensor, pixels: int) -> Bytes:
    rows = image.shape[0] * image.shape[1] if image.dim() > 1 else 0
    return 2 * computed_size(image) * rows if channels_last(image) and _large(pixels) else 0


def _large(pixels: int) -> bool:
    return pixels >= LARGE


def layer_norm_backward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``native_layer_norm_backward``.

    It is the thread's sums of the gradients of weight and bias, unless neither is asked for.
    """
    return 2 * prod(call.args[2]) * tensor_at(call, 1).itemsize if any(call.args[7][1:]) else 0


def rms_norm(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_fused_rms_norm``: the squares of the argument in float32.

    For dtypes of another size, such as half precision, it is two and a half times as much.
    """
    read = tensor_at(call, 0)
    return read.numel() * (4 if read.itemsize == 4 else 10)
