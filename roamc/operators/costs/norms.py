"""Workspace of norms on a CPU, as ATen's kernels of torch 2.13 take it. They compute half precision in float32.

Each formula takes a call and its first ``result`` and returns bytes.
"""

from __future__ import annotations

from math import prod

import torch

from roamc.operators.call import Call, tensor_at
from roamc.operators.costs.arguments import channels_last
from roamc.units import Bytes

LARGE = 1024
"""Pixels of an image from which a group norm whose image lies channels last gives each thread a part of its rows."""


def computed(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of an element in the dtype that ``tensor`` is computed in."""
    return max(4, tensor.itemsize)


def batch_norm(call: Call, result: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of a call of a batch norm; its first ``result`` is not read.

    It is a factor and an addend for every channel.
    """
    image = tensor_at(call, 0)
    return 2 * computed(image) * image.shape[1]


def batch_norm_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Return the bytes that each thread takes in a call of a batch norm; its first ``result`` is not read.

    They are a sum for every channel if channels lie side by side; else 0.
    """
    image = tensor_at(call, 0)
    return computed(image) * image.shape[1] if image.stride(1) == 1 else 0


def batch_norm_backward(call: Call, result: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of a call of ``native_batch_norm_backward``; its first ``result`` is not read.

    It is a copy of the gradient, in float32 if the gradient has half precision and other strides than the image.
    """
    gradient, image = tensor_at(call, 0), tensor_at(call, 1)
    alike = gradient.itemsize != 2 or gradient.stride() == image.stride()
    return gradient.nbytes if alike else 4 * gradient.numel()


def group_norm(call: Call, result: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of a call of ``native_group_norm`` beside each thread's; ``result`` is not read.

    Channels last it is a factor and an addend for every image and channel, or for every image and group; else 0.
    """
    image, groups = tensor_at(call, 0), call.args[6]
    if not channels_last(image):
        return 0
    return 2 * computed(image) * image.shape[0] * (groups if _large(call.args[5]) else image.shape[1])


def group_norm_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Return the bytes that each thread takes in a call of ``native_group_norm``; its ``result`` is not read.

    They are two sums for every image and channel, of large images that lie channels last; else 0.
    """
    return _sums_per_thread(tensor_at(call, 0), call.args[5])


def group_norm_backward(call: Call, result: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of a call of ``native_group_norm_backward``; its first ``result`` is not read.

    It is two sums for every image and channel, and channels last two more for every image and group.
    """
    image: torch.Tensor = tensor_at(call, 1)
    images, channels, groups = (int(call.args[at]) for at in (5, 6, 8))
    return 2 * computed(image) * images * (channels + (groups if channels_last(image) else 0))


def group_norm_backward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Return the bytes that each thread takes in a call of ``native_group_norm_backward``, as forward."""
    return _sums_per_thread(tensor_at(call, 1), call.args[7])


def _sums_per_thread(image: torch.Tensor, pixels: int) -> Bytes:
    rows = image.shape[0] * image.shape[1] if image.dim() > 1 else 0
    return 2 * computed(image) * rows if channels_last(image) and _large(pixels) else 0


def _large(pixels: int) -> bool:
    return pixels >= LARGE


def layer_norm_backward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Return the bytes that each thread takes in a call of ``native_layer_norm_backward``.

    They are the thread's sums of the gradients of weight and bias; 0 if neither gradient is asked for. The call's first
    ``result`` is not read.
    """
    return 2 * prod(call.args[2]) * tensor_at(call, 1).itemsize if any(call.args[7][1:]) else 0


def rms_norm(call: Call, result: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of a call of ``_fused_rms_norm``; its first ``result`` is not read.

    It is the squares of the argument in float32. For dtypes of another size, such as half precision, it is two and a
    half times as much.
    """
    read = tensor_at(call, 0)
    return read.numel() * (4 if read.itemsize == 4 else 10)
