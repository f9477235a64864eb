"""Workspace of convolutions on a CPU, estimated at the upper end.

They run in oneDNN, which chooses among its kernels by rules of its own. What it mostly takes:

    channels first    copies of arguments and results, in blocks of 16 channels
    channels last     a copy of the weight
"""

from __future__ import annotations

from math import prod

import torch

from roamc.operators.call import Call, tensor_at
from roamc.operators.costs.products import THREADS
from roamc.units import Bytes

BLOCK = 16
"""Channels in one block of oneDNN's blocked layouts."""

FEW = 16
"""Convolutions of fewer input channels have kernels of their own, which copy the weight more often in backward."""

SMALL: Bytes = 32 << 10
"""Bytes that every convolution of oneDNN takes."""

ONEDNN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that oneDNN convolves; others take torch's own kernels."""


def convolution(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of a call of ``aten.convolution`` with the result ``made``."""
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
    """Copies of image and result in blocks; in float32 the image's is freed before the result is put in order."""
    pointwise = prod(weight.shape[2:]) == 1
    if image.dtype is not torch.float32:
        return _blocks(made) + (_blocks(image) if pointwise else _packed(image))
    if pointwise:
        return max(_blocked(image), _blocked(made))
    return max(_blocks(made), _packed(image) + _blocks(made) - made.nbytes)


def _transposed(image: torch.Tensor, made: torch.Tensor, strides: list[int]) -> Bytes:
    """Twice the larger of image and result in blocks; for stride 1 at least what the gradient of an image takes."""
    most = 2 * max(_packed(image), _packed(made))
    return most if prod(strides) > 1 else max(most, _blocks(image) + _blocks(made) - made.nbytes)


def convolution_backward(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace in bytes of a call of ``aten.convolution_backward``; ``made`` is not read."""
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
    """What the weight of a grouped convolution takes more, forward; groups of two channels are padded to blocks."""
    leave, enter = weight.shape[0] // groups, weight.shape[1]
    if groups == 1:
        return 0
    return weight.nbytes + SMALL + (_weight_in_blocks(weight, groups) if max(leave, enter) == 2 else 0)


def _weight_in_blocks(weight: torch.Tensor, groups: int) -> Bytes:
    """Bytes of a weight in float32 with the input and the output channels of each group padded to whole blocks."""
    leave, enter = weight.shape[0] // groups, weight.shape[1]
    block = torch.float32.itemsize * BLOCK * BLOCK * prod(weight.shape[2:])
    return groups * -(-leave // BLOCK) * -(-enter // BLOCK) * block


def _padded(call: Call) -> Bytes:
    """Backward, channels last: the weight of a grouped convolution, the channels of each group padded to whole blocks.

    In 16 bits half of that once more, and for each thread one image and one gradient, padded likewise. Nothing for
    groups of one channel with windows up to 3 x 3 or without a gradient of the weight: they have kernels of their own.
    """
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
    """Copies of image and gradient in blocks; for the gradient of the image even if there are few channels."""
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
    """Bytes of ``tensor`` with its channels, dimension 1, padded to whole blocks."""
    channels = tensor.shape[1]
    return tensor.nbytes // max(1, channels) * -(-channels // block) * block


def _blocked(tensor: torch.Tensor) -> Bytes:
    """Bytes of ``tensor`` in blocks of channels; as it is with at most a quarter of a block."""
    return tensor.nbytes if tensor.shape[1] <= BLOCK // 4 else _blocks(tensor)


def _packed(tensor: torch.Tensor) -> Bytes:
    """:func:`_blocked`, but 5 to 8 channels lie in one block of half the size."""
    return _blocks(tensor, BLOCK // 2) if BLOCK // 4 < tensor.shape[1] <= BLOCK // 2 else _blocked(tensor)


def _gathered(image: torch.Tensor, weight: torch.Tensor, strides: list[int]) -> Bytes:
    """Pixels that a strided 1 x 1 convolution gathers first, of one image for each thread."""
    if prod(weight.shape[2:]) > 1 or prod(strides) == 1:
        return 0
    return THREADS * image.nbytes // max(1, image.shape[0] * prod(strides))


def _columns(weight: torch.Tensor, pixels: torch.Tensor) -> Bytes:
    """Bytes of the matrix of windows that torch's own kernels make first, to multiply it by the weight."""
    window = prod(weight.shape[1:])
    return pixels.shape[0] * window * prod(pixels.shape[2:]) * pixels.itemsize


def _channels_last(tensor: torch.Tensor) -> bool:
    """Whether oneDNN takes ``tensor`` as channels last: more than one channel, and they are the fastest dimension."""
    return tensor.dim() > 2 and tensor.shape[1] > 1 and tensor.stride(1) == 1
