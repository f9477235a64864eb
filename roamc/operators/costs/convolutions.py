"""What convolutions take for themselves on a CPU, at the upper end.

They run in oneDNN, which chooses among its kernels by rules of its own.

    channels first    arguments and results once more, in blocks of 16 channels
    channels last     the weight once more
"""

from __future__ import annotations

from math import prod

import torch

from roamc.operators.call import Call, tensor_at
from roamc.operators.costs.products import THREADS
from roamc.units import Bytes

BLOCK = 16
"""oneDNN's blocked layouts have channels in groups of so many."""

FEW = 16
"""Convolutions of fewer input channels have kernels of their own."""

SMALL: Bytes = 32 << 10
"""What a convolution takes in any case."""

ONEDNN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that oneDNN convolves; others take torch's own kernels."""


def convolution(call: Call, made: torch.Tensor) -> Bytes:
    """Bytes beside arguments and ``made``, the result, forward."""
    image, weight = tensor_at(call, 0), tensor_at(call, 1)
    if image.dtype not in ONEDNN:
        return _columns(weight, made) if not call.args[6] else _columns(weight, image)
    again = weight.nbytes + SMALL
    if _channels_last(image):
        per_image = THREADS * image.nbytes // max(1, image.shape[0]) if call.args[6] else 0
        return again + per_image + _of_groups(weight, call.args[8])
    if call.args[6]:
        return _transposed(image, made, call.args[3]) + again
    return _forward(image, weight, made) + again + _gathered(image, weight, call.args[3])


def _forward(image: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> Bytes:
    """Image and result in blocks; in float32 the one is given back before the other is put in order."""
    pointwise = prod(weight.shape[2:]) == 1
    if image.dtype is not torch.float32:
        return _blocks(made) + (_blocks(image) if pointwise else _packed(image))
    if pointwise:
        return max(_blocked(image), _blocked(made))
    return max(_blocks(made), _packed(image) + _blocks(made) - made.nbytes)


def _transposed(image: torch.Tensor, made: torch.Tensor, strides: list[int]) -> Bytes:
    """The larger of the two twice; without strides as the gradient of an image."""
    most = 2 * max(_packed(image), _packed(made))
    return most if prod(strides) > 1 else max(most, _blocks(image) + _blocks(made) - made.nbytes)


def convolution_backward(call: Call, made: torch.Tensor) -> Bytes:
    """Bytes beside arguments and results of the gradients."""
    gradient, image, weight = (tensor_at(call, at) for at in range(3))
    if image.dtype not in ONEDNN:
        return _columns(weight, gradient)
    per_image = (image.nbytes + gradient.nbytes) // max(1, image.shape[0])
    again = weight.nbytes * (1 if image.dtype is torch.float32 else 3) + SMALL
    if image.shape[1] < FEW and prod(weight.shape[2:]) > 1:
        again += 7 * weight.nbytes
    if _channels_last(image):
        return again + weight.nbytes + THREADS * per_image + _padded(call)
    wide, groups = image.dtype is torch.float32, call.args[-2]
    if groups > 1 and max(weight.shape[2:]) > 3 and max(weight.shape[1], weight.shape[0] // groups) < BLOCK:
        again += 2 * THREADS * weight.nbytes + (0 if wide else _blocks(image))
    strided = any(step > 1 for step in call.args[4]) and (groups == 1 or not wide)
    most = _gradients(gradient, image, weight, transposed=call.args[7], of_image=call.args[-1][0] and not strided)
    if strided and call.args[-1][0]:
        most = max(most, 2 * _blocked(image), _blocks(image, BLOCK // 2) + _blocks(gradient, BLOCK // 2))
    return most + again + (0 if wide else THREADS * per_image)


def _of_groups(weight: torch.Tensor, groups: int) -> Bytes:
    """What the weights of groups take more, forward; those of two channels are padded."""
    leave, enter = weight.shape[0] // groups, weight.shape[1]
    if groups == 1:
        return 0
    return weight.nbytes + SMALL + (_weight_in_blocks(weight, groups) if max(leave, enter) == 2 else 0)


def _weight_in_blocks(weight: torch.Tensor, groups: int) -> Bytes:
    """A weight in float32 with the channels of each group, coming and going, in whole blocks."""
    leave, enter = weight.shape[0] // groups, weight.shape[1]
    block = torch.float32.itemsize * BLOCK * BLOCK * prod(weight.shape[2:])
    return groups * -(-leave // BLOCK) * -(-enter // BLOCK) * block


def _padded(call: Call) -> Bytes:
    """Weights of narrow groups, with the channels of each group in whole blocks; in 16 bits half of it once more, and
    an image and a gradient likewise. Groups of one channel have kernels of their own up to windows of 3 x 3, and for
    the gradient of the image."""
    gradient, image, weight = (tensor_at(call, at) for at in range(3))
    groups: int = call.args[-2]
    of_weight: bool = call.args[-1][1]
    leave, enter = max(1, weight.shape[0] // groups), max(1, weight.shape[1])
    small = max(weight.shape[2:]) <= 3
    if groups == 1 or (leave == enter == 1 and (small or not of_weight)):
        return 0
    blocks = _weight_in_blocks(weight, groups)
    if image.dtype is torch.float32:
        return blocks
    both = image.nbytes * BLOCK // min(BLOCK, enter) + gradient.nbytes * BLOCK // min(BLOCK, leave)
    return blocks * 3 // 2 + THREADS * both // max(1, image.shape[0])


def _gradients(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *, transposed: bool, of_image: bool
) -> Bytes:
    """Image and gradient in blocks; for the gradient of the image even where few channels could stay as they are."""
    if transposed:
        return sum(
            _blocks(tensor, BLOCK // 2 if tensor.shape[1] <= BLOCK // 2 else BLOCK) for tensor in (image, gradient)
        )
    if prod(weight.shape[2:]) == 1:
        form = _blocked if image.dtype is torch.float32 else _blocks
        return form(image) + form(gradient)
    of_weight = _blocked(image) + _blocks(gradient)
    return max(of_weight, _blocks(image) + _blocks(gradient) - image.nbytes) if of_image else of_weight


def _blocks(tensor: torch.Tensor, block: int = BLOCK) -> Bytes:
    """Its bytes with channels in whole blocks."""
    channels = tensor.shape[1]
    return tensor.nbytes // max(1, channels) * -(-channels // block) * block


def _blocked(tensor: torch.Tensor) -> Bytes:
    """Bytes of ``tensor`` in blocks of channels; one of very few channels stays as it is."""
    return tensor.nbytes if tensor.shape[1] <= BLOCK // 4 else _blocks(tensor)


def _packed(tensor: torch.Tensor) -> Bytes:
    """Bytes of ``tensor`` in blocks of channels, in blocks of half the size where there are few."""
    return _blocks(tensor, BLOCK // 2) if BLOCK // 4 < tensor.shape[1] <= BLOCK // 2 else _blocked(tensor)


def _gathered(image: torch.Tensor, weight: torch.Tensor, strides: list[int]) -> Bytes:
    """Strided convolutions without a window first gather the pixels that they read."""
    if prod(weight.shape[2:]) > 1 or prod(strides) == 1:
        return 0
    return THREADS * image.nbytes // max(1, image.shape[0] * prod(strides))


def _columns(weight: torch.Tensor, pixels: torch.Tensor) -> Bytes:
    """torch's own kernels multiply the weight with a matrix of windows, which they make first."""
    window = prod(weight.shape[1:])
    return pixels.shape[0] * window * prod(pixels.shape[2:]) * pixels.itemsize


def _channels_last(tensor: torch.Tensor) -> bool:
    """As oneDNN sees it: channels are the fastest dimension, and there is more than one."""
    return tensor.dim() > 2 and tensor.shape[1] > 1 and tensor.stride(1) == 1
