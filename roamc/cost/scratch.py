"""Memory that an operator takes for itself while it runs, beside its results: estimated, on a CPU.

No interface tells how much; what is here was read off the heap with torch 2.13 (``benchmarks/workspace.py`` measures
it again). Where torch converts or copies an argument the rule is exact. Convolutions run in oneDNN, which chooses
among its kernels by rules of its own: the estimate is at the upper end of what its kernels take.

    convolution, channels first    arguments and results once more, in blocks of 16 channels
                 channels last     the weight once more
    mul(float, bool)               the mask, as floats
    mm, bmm in half precision      see :mod:`roamc.cost.products`

On a GPU the workspaces of cuBLAS and cuDNN are not known before; none are counted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
import torch
from torch import fx

from roamc.cost.arguments import copied, in_order, matrix
from roamc.cost.attention import backward_bytes, forward_bytes
from roamc.cost.call import Call, call_of, fakes, tensor_at, tensors_in
from roamc.cost.kinds import COPIES, kind_of
from roamc.cost.products import THREADS, products
from roamc.graph import tensors_of
from roamc.memory import Int64s, Operator
from roamc.runtime.kernels import piece_elements
from roamc.units import Bytes

BLOCK = 16
"""oneDNN's blocked layouts have channels in groups of so many."""

FEW = 16
"""Convolutions of fewer input channels have kernels of their own."""

SMALL: Bytes = 32 << 10
"""What a convolution takes in any case."""

ACROSS: Bytes = 288 << 10
"""What a softmax takes along another dimension than the last, in half precision."""

OBJECTS: Bytes = 256 << 10
"""What the process takes for tensor objects and the like while a step runs: at most so much,"""

OBJECTS_SHARE = 96
"""and of small steps this part;"""

OBJECT: Bytes = 512
"""but no less than this for every tensor."""

ONEDNN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that oneDNN convolves; others take torch's own kernels."""


def workspace(node: fx.Node, *, eager: bool = False) -> Bytes:
    """Most bytes that ``node`` has beside its arguments and results while it runs; 0 where none are known.

    With ``eager`` in eager PyTorch, not in a program of ours, where kernels of :mod:`roamc.runtime.kernels` may run.
    """
    made = next(tensors_in(node.meta.get("val")), None)
    if made is None or made.device.type != "cpu":
        return 0
    call = call_of(node)
    rule = (_EAGER if eager else _RULES).get(call.name)
    if rule is not None:
        return copied(call) + rule(call, made)
    if all(tensor.dtype == made.dtype for argument in node.all_input_nodes for _, tensor in tensors_of(argument)):
        return copied(call)
    converts = kind_of(node) in ("mixed", "pointwise", "strided", "tanh", "root")
    return copied(call) + (_converted(call, made) if converts else 0)


def workspaces(operators: Iterable[Operator], *, eager: bool = False) -> Int64s:
    """What each of them takes for itself, in bytes, as :func:`workspace` says."""
    return np.array([workspace(operator.node, eager=eager) for operator in operators], dtype=np.int64)


def objects(nbytes: Bytes, tensors: int = 0) -> Bytes:
    """Bytes for the objects of a step that takes ``nbytes`` for so many ``tensors``.

    Measured: 50 to 120 kB, and 150 kB for the 364 tensors of an LSTM.
    """
    return max(min(OBJECTS, nbytes // OBJECTS_SHARE), OBJECT * tensors)


def _converted(call: Call, made: torch.Tensor) -> Bytes:
    """What pointwise operators convert to the dtype that they compute in."""
    if call.name in COPIES or call.name in ("where", "masked_fill"):
        return 0
    read = [tensor for tensor in tensors_in(fakes([*call.args, *call.kwargs.values()])) if tensor.dim()]
    if not read:
        return 0
    computed = functools.reduce(torch.promote_types, [tensor.dtype for tensor in read])
    if made.dtype.is_floating_point and not (computed.is_floating_point or computed.is_complex):
        computed = made.dtype
    return sum(tensor.numel() * computed.itemsize for tensor in read if tensor.dtype != computed)


def _nbytes(tensor: torch.Tensor) -> Bytes:
    return tensor.numel() * tensor.itemsize


def _first_again(call: Call, made: torch.Tensor) -> Bytes:
    """The first argument is copied, or something of its size made of it."""
    return _nbytes(tensor_at(call, 0))


def _piece(call: Call, made: torch.Tensor) -> Bytes:
    """A part of the first argument."""
    return piece_elements(tensor_at(call, 0)) * made.itemsize


def _batch_norm_backward(call: Call, made: torch.Tensor) -> Bytes:
    """The gradient once more; in half precision in float32 where it does not lie like the image."""
    gradient, image = tensor_at(call, 0), tensor_at(call, 1)
    alike = gradient.itemsize != 2 or gradient.stride() == image.stride()
    return _nbytes(gradient) if alike else 4 * gradient.numel()


def _reduced(call: Call, made: torch.Tensor) -> Bytes:
    """The argument in the dtype of the result; in half precision of means, and sums over scattered dims, in float32."""
    read = tensor_at(call, 0)
    if read.dtype != made.dtype:
        return read.numel() * made.itemsize
    if read.itemsize != 2 or not read.is_floating_point():
        return 0
    if call.name == "mean":
        return (read.numel() + made.numel()) * 4
    return 0 if _in_one_row(read, call.args[1] if len(call.args) > 1 else ()) else read.numel() * 4


def _in_one_row(tensor: torch.Tensor, dims: Sequence[int] | None) -> bool:
    """Whether these dimensions, all if there are none, can be walked through as one."""
    chosen = [dim % tensor.dim() for dim in dims] if dims and tensor.dim() else range(tensor.dim())
    rows = sorted((tensor.stride(dim), tensor.shape[dim]) for dim in chosen if tensor.shape[dim] > 1)
    return all(stride == inner * count for (inner, count), (stride, _) in itertools.pairwise(rows))


def _compared(call: Call, made: torch.Tensor) -> Bytes:
    """The losses make one tensor of differences, and in half precision some in float32."""
    read = tensor_at(call, 0)
    return read.numel() * (4 if read.itemsize == 4 else 6)


def _crossed(call: Call, made: torch.Tensor) -> Bytes:
    """Two tensors in float32, three where they do not lie alike."""
    read = tensor_at(call, 0)
    return (8 if read.is_contiguous() else 12) * read.numel()


def _half(call: Call, made: torch.Tensor) -> Bytes:
    """Half precision is computed in float32."""
    return 4 * made.numel() if made.itemsize == 2 else 0


def _half_of_first(call: Call, made: torch.Tensor) -> Bytes:
    """The same, for as many elements as are read."""
    return _half(call, tensor_at(call, 0))


def _across(call: Call, made: torch.Tensor) -> Bytes:
    """Half precision along another dimension than the last is computed in float32, some rows at a time."""
    dim = next((argument for argument in call.args if isinstance(argument, int)), -1)
    return ACROSS if made.itemsize == 2 and made.dim() > 1 and dim % made.dim() != made.dim() - 1 else 0


def _rolled(call: Call, made: torch.Tensor) -> Bytes:
    """Dimension after dimension; without any, the elements in order."""
    dims = call.args[2] if len(call.args) > 2 else ()
    return _nbytes(made) * (len(dims) - 1 if dims else not tensor_at(call, 0).is_contiguous())


def _multinomial(call: Call, made: torch.Tensor) -> Bytes:
    """Two tensors like the probabilities."""
    return 2 * _nbytes(tensor_at(call, 0))


def _kth(call: Call, made: torch.Tensor) -> Bytes:
    """All values and their places."""
    read = tensor_at(call, 0)
    return read.numel() * (read.itemsize + 8)


def _rms_norm(call: Call, made: torch.Tensor) -> Bytes:
    """One tensor of squares; in half precision two and a half in float32."""
    read = tensor_at(call, 0)
    return read.numel() * (4 if read.itemsize == 4 else 10)


def _products(call: Call, made: torch.Tensor) -> Bytes:
    """Buffers of the kernel; batches also copy what is not in order, in float32 matrix after matrix."""
    first, second = [tensor for tensor in tensors_in(fakes(call.args)) if tensor.dim() > 1][-2:]
    if made.dim() < 3:
        return products(first, second, made)
    odd = [tensor for tensor in (first, second) if not (in_order(tensor) if made.itemsize == 2 else matrix(tensor))]
    together = made.shape[0] if made.itemsize == 2 else 1
    return products(first, second, made) + sum(_nbytes(tensor) // tensor.shape[0] * together for tensor in odd)


def _attention(call: Call, made: torch.Tensor) -> Bytes:
    return forward_bytes(tensor_at(call, 0), tensor_at(call, 1))


def _attention_backward(call: Call, made: torch.Tensor) -> Bytes:
    return backward_bytes(tensor_at(call, 0), tensor_at(call, 1), tensor_at(call, 2))


def _convolution(call: Call, made: torch.Tensor) -> Bytes:
    image, weight = tensor_at(call, 0), tensor_at(call, 1)
    if image.dtype not in ONEDNN:
        return _columns(weight, made) if not call.args[6] else _columns(weight, image)
    again = _nbytes(weight) + SMALL
    if _channels_last(image):
        return again + (THREADS * _nbytes(image) // max(1, image.shape[0]) if call.args[6] else 0)
    read, written = _blocked(image), _blocked(made)
    if call.args[6]:
        return 2 * max(read, written) + again
    most = max(read, written) if image.dtype is torch.float32 else read + written
    return most + again + _gathered(image, weight, call.args[3])


def _convolution_backward(call: Call, made: torch.Tensor) -> Bytes:
    gradient, image, weight = (tensor_at(call, at) for at in range(3))
    if image.dtype not in ONEDNN:
        return _columns(weight, gradient)
    per_image = (_nbytes(image) + _nbytes(gradient)) // max(1, image.shape[0])
    again = _nbytes(weight) * (1 if image.dtype is torch.float32 else 3) + SMALL
    if image.shape[1] < FEW and prod(weight.shape[2:]) > 1:
        again += 7 * _nbytes(weight)
    if _channels_last(image):
        return again + _nbytes(weight) + THREADS * per_image
    read, written = _blocked(image), _blocked(gradient)
    wide, groups = image.dtype is torch.float32, call.args[-2]
    strided = any(step > 1 for step in call.args[4]) and (groups == 1 or not wide)
    most = max(read + written, 2 * read) if strided and call.args[-1][0] else read + written
    return most + again + (0 if wide else THREADS * per_image)


def _blocked(tensor: torch.Tensor) -> Bytes:
    """Its bytes with channels in whole blocks; images of few channels stay as they are."""
    channels = tensor.shape[1]
    return _nbytes(tensor) // max(1, channels) * (channels if channels <= 4 else -(-channels // BLOCK) * BLOCK)


def _gathered(image: torch.Tensor, weight: torch.Tensor, strides: list[int]) -> Bytes:
    """Strided convolutions without a window first gather the pixels that they read."""
    if prod(weight.shape[2:]) > 1 or prod(strides) == 1:
        return 0
    return THREADS * _nbytes(image) // max(1, image.shape[0] * prod(strides))


def _columns(weight: torch.Tensor, pixels: torch.Tensor) -> Bytes:
    """torch's own kernels multiply the weight with a matrix of windows, which they make first."""
    window = prod(weight.shape[1:])
    return pixels.shape[0] * window * prod(pixels.shape[2:]) * pixels.itemsize


def _channels_last(tensor: torch.Tensor) -> bool:
    """As oneDNN sees it: channels are the fastest dimension, and there is more than one."""
    return tensor.dim() > 2 and tensor.shape[1] > 1 and tensor.stride(1) == 1


_RULES: dict[str, Callable[[Call, torch.Tensor], Bytes]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_dropout": _first_again,
    "native_dropout_backward": _piece,
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
        _across,
    ),
    "_safe_softmax": lambda call, made: made.numel(),
    "_fused_rms_norm": _rms_norm,
    "logsumexp": _first_again,
    "mse_loss": _compared,
    "smooth_l1_loss": _compared,
    "huber_loss": _compared,
    "binary_cross_entropy": _half_of_first,
    "binary_cross_entropy_with_logits": _crossed,
    "gather": _half,
    "scatter": _half,
    "scatter_add": _half,
    "roll": _rolled,
    "im2col": _first_again,
    "multinomial": _multinomial,
    "kthvalue": _kth,
    "mean": _reduced,
    "sum": _reduced,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "mm": _products,
    "addmm": _products,
    "bmm": _products,
    "baddbmm": _products,
}

_EAGER = {**_RULES, "native_dropout_backward": _first_again}
