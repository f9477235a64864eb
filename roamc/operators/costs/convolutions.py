"""Workspace of convolutions on a CPU, estimated at the upper end.

They run in oneDNN, which chooses among its kernels by rules of its own. What it mostly takes:

    channels first    copies of arguments and results, in blocks of 16 channels
    channels last     a copy of the weight
"""

from __future__ import annotations

from math import prod

import torch

from roamc.compat_operators import onednn_takes
from roamc.operators.call import Call, tensor_at
from roamc.operators.costs.arguments import HALF, is_half
from roamc.units import Bytes

BLOCK = 16
"""Channels in one block of oneDNN's blocked layouts."""

FEW = 16
"""Convolutions of fewer input channels have kernels of their own, which copy the weight more often in backward."""

WIDEST = 14
"""Columns of the widest window whose gradient oneDNN computes directly; for wider ones it makes a matrix of windows."""

ONE_IMAGE = 20480
"""Elements of one image up to which torch's own kernels convolve it in float32."""

OWN: Bytes = 4 << 10
"""Bytes that torch's own kernels take for any convolution."""

SMALL: Bytes = 32 << 10
"""Bytes that every convolution of oneDNN takes, and again for each thread: blocks of factors and of the result."""


def _by_onednn(image: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether oneDNN convolves ``image`` on this machine; torch's own kernels take other dtypes, and one small image.

    Torch's rule (``use_mkldnn``) on one image also asks whether there are several threads, only for windows of one
    pixel. Those make no matrix of windows, so that what oneDNN takes is the upper end.
    """
    if image.dtype is not torch.float32:
        return image.dtype in HALF and onednn_takes(image.dtype)
    window = (1, *weight.shape[2:])[-2:]
    small = image.shape[0] <= 1 and prod(image.shape[:4]) <= ONE_IMAGE and min(window) <= 3
    return groups > 1 or not small or prod(weight.shape[2:]) == 1


def forward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``aten.convolution``."""
    image, weight = tensor_at(call, 0), tensor_at(call, 1)
    if not _by_onednn(image, weight, call.args[8]):
        copied = weight.nbytes if _channels_last(image) else 0
        return _columns(weight, image if call.args[6] else result) + copied + OWN
    again = _weight_in_blocks(weight, call.args[8]) + SMALL
    if _channels_last(image):
        return again + weight.nbytes
    return again + (_transposed(image, result, call.args[3]) if call.args[6] else _forward(image, weight, result))


def forward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``aten.convolution``.

    Transposed and channels last: an image; else, with strides: an image and its result, in blocks. A 1 x 1 convolution
    with strides: the pixels that it gathers of an image. In torch's own kernel, transposed and in half precision: the
    matrix of windows of one image in float32.
    """
    image, weight, strides = tensor_at(call, 0), tensor_at(call, 1), prod(call.args[3])
    if not _by_onednn(image, weight, call.args[8]):
        sums = is_half(image) and call.args[6] and not _channels_last(image)
        return 2 * _columns(weight, image) // max(1, image.shape[0]) if sums else 0
    of_image = image.nbytes // max(1, image.shape[0])
    if call.args[6]:
        both = (_packed(image) + _packed(result)) // max(1, image.shape[0])
        return SMALL + (of_image if _channels_last(image) else both if strides > 1 else 0)
    if _channels_last(image):
        return SMALL
    return SMALL + (of_image // strides if strides > 1 and prod(weight.shape[2:]) == 1 else 0)


def _forward(image: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> Bytes:
    """Copies of image and result in blocks; in float32 the image's is freed before the result is put in order."""
    copied = _blocks(image) if prod(weight.shape[2:]) == 1 else _packed(image)
    if image.dtype is not torch.float32:
        return _blocks(result) + copied
    return max(_blocks(result), copied + _blocks(result) - result.nbytes)


def _transposed(image: torch.Tensor, result: torch.Tensor, strides: list[int]) -> Bytes:
    """Twice the larger of image and result in blocks; for stride 1 at least what the gradient of an image takes."""
    most = 2 * max(_packed(image), _packed(result))
    return most if prod(strides) > 1 else max(most, _blocks(image) + _blocks(result) - result.nbytes)


def backward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``aten.convolution_backward``."""
    gradient, image, weight = (tensor_at(call, at) for at in range(3))
    if not _by_onednn(image, weight, call.args[-2]):
        return _backward_by_torch(gradient, image, weight, transposed=call.args[7], of_bias=call.args[-1][2])
    blocks = _weight_in_blocks(weight, call.args[-2])
    few = image.shape[1] < FEW and prod(weight.shape[2:]) > 1
    again = (0 if image.dtype is torch.float32 else 2 * blocks) + SMALL
    again += max(blocks, 8 * weight.nbytes) if few else blocks
    if _channels_last(image):
        return again + max(2 * blocks, _padded(call))
    wide, groups = image.dtype is torch.float32, call.args[-2]
    if _large_windows_of_few(weight, groups):
        again += 0 if wide else _blocks(image)
    strided = any(step > 1 for step in call.args[4]) and (groups == 1 or not wide)
    most = _gradients(gradient, image, weight, transposed=call.args[7], of_image=call.args[-1][0] and not strided)
    if strided and call.args[-1][0]:
        most = max(most, 2 * _blocked(image), _blocks(image, BLOCK // 2) + _blocks(gradient, BLOCK // 2))
        if image.shape[1] < FEW and not call.args[7]:
            most = max(most, _blocked(image) + 2 * _blocks(gradient))
    return most + again


def _backward_by_torch(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *, transposed: bool, of_bias: bool
) -> Bytes:
    """Matrices of windows; for the gradient of a bias in half precision also a copy of ``gradient`` in float32.

    Transposed in three dimensions, the windows of one image are there as well while that copy is summed.
    """
    copied = 2 * gradient.nbytes if of_bias and is_half(gradient) else 0
    if not transposed:
        again = 2 * weight.nbytes if _channels_last(image) else 0
        return max(_columns(weight, gradient), copied) + again + OWN
    windows = _columns(weight, image) // max(1, image.shape[0]) + 2 * weight.nbytes
    return (windows + copied if image.dim() > 4 else max(windows, copied)) + OWN


def backward_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``aten.convolution_backward``.

    Channels last or in half precision: one image and its gradient; small groups with large windows: the weight twice;
    windows wider than :data:`WIDEST`: one image's matrix of windows and several gradients of the weight in float32. In
    torch's own kernel, in half precision: one image's matrix of windows, and again in float32.
    """
    gradient, image, weight = (tensor_at(call, at) for at in range(3))
    if not _by_onednn(image, weight, call.args[-2]):
        sums = is_half(image) and not call.args[7] and not _channels_last(image)
        return 3 * _columns(weight, gradient) // max(1, image.shape[0]) if sums else 0
    of_image = (image.nbytes + gradient.nbytes) // max(1, image.shape[0])
    if weight.shape[-1] > WIDEST:
        pixels, wide = image if call.args[7] else gradient, image.dtype is torch.float32
        windows = _columns(weight, pixels) // max(1, image.shape[0])
        of_image += windows + 4 * weight.nbytes if wide else windows * 3 // 2 + 2 * 4 * weight.numel()
    if _channels_last(image):
        return SMALL + of_image + _padded_image(call)
    grouped = 2 * weight.nbytes if _large_windows_of_few(weight, call.args[-2]) else 0
    direct = image.dtype is torch.float32 and weight.shape[-1] <= WIDEST
    return SMALL + grouped + (0 if direct else of_image)


def _large_windows_of_few(weight: torch.Tensor, groups: int) -> bool:
    """Whether a convolution has groups of less than a block of channels, and windows larger than 3 x 3."""
    return groups > 1 and max(weight.shape[2:]) > 3 and max(weight.shape[1], weight.shape[0] // groups) < BLOCK


def _weight_in_blocks(weight: torch.Tensor, groups: int, *, each: bool = False) -> Bytes:
    """Bytes of a weight with the input and the output channels of each group padded to whole blocks.

    Groups of one channel lie in blocks of groups, unless ``each`` is padded by itself.
    """
    leave, enter = weight.shape[0] // groups, weight.shape[1]
    if leave == enter == 1 and not each:
        return _whole(groups) * weight.nbytes // groups
    return groups * _whole(leave) * _whole(enter) * prod(weight.shape[2:]) * weight.itemsize


def _whole(channels: int) -> int:
    """``channels`` in whole blocks."""
    return -(-channels // BLOCK) * BLOCK


def _padded(call: Call) -> Bytes:
    """Backward, channels last: the weight of a grouped convolution, the channels of each group padded to whole blocks.

    In 16 bits three of them.
    """
    weight = tensor_at(call, 2)
    if not _pads(call):
        return 0
    blocks = _weight_in_blocks(weight, call.args[-2], each=True)
    return blocks if weight.dtype is torch.float32 else blocks * 3


def _padded_image(call: Call) -> Bytes:
    """Backward, channels last, in 16 bits: one image and its gradient, padded as :func:`_padded` pads the weight."""
    gradient, image, weight = (tensor_at(call, at) for at in range(3))
    if not _pads(call) or image.dtype is torch.float32:
        return 0
    leave, enter = max(1, weight.shape[0] // call.args[-2]), max(1, weight.shape[1])
    both: Bytes = image.nbytes * BLOCK // min(BLOCK, enter) + gradient.nbytes * BLOCK // min(BLOCK, leave)
    return both // max(1, image.shape[0])


def _pads(call: Call) -> bool:
    """Whether groups are padded; not if they are of one channel and have a kernel of their own.

    Those are the ones with windows up to 3 x 3, or without a gradient of the weight.
    """
    weight, groups, of_weight = tensor_at(call, 2), call.args[-2], call.args[-1][1]
    single = weight.shape[1] <= 1 and weight.shape[0] <= groups
    small = max(weight.shape[2:]) <= 3
    return not (groups == 1 or (single and (small or not of_weight)))


def _gradients(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *, transposed: bool, of_image: bool
) -> Bytes:
    """Copies of image and gradient in blocks; for the gradient of the image even if there are few channels."""
    if transposed:
        return sum(
            _blocks(tensor, BLOCK // 2 if tensor.shape[1] <= BLOCK // 2 else BLOCK) for tensor in (image, gradient)
        )
    if prod(weight.shape[2:]) == 1:
        return _blocks(image) + _blocks(gradient)
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


def _columns(weight: torch.Tensor, pixels: torch.Tensor) -> Bytes:
    """Bytes of the matrix of windows that torch's own kernels make first, to multiply it by the weight."""
    window = prod(weight.shape[1:])
    return pixels.shape[0] * window * prod(pixels.shape[2:]) * pixels.itemsize


def _channels_last(tensor: torch.Tensor) -> bool:
    """Whether oneDNN takes ``tensor`` as channels last: more than one channel, and they are the fastest dimension."""
    return tensor.dim() > 2 and tensor.shape[1] > 1 and tensor.stride(1) == 1
