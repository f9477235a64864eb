"""Memory that an operator takes for itself while it runs, beside its results: estimated, on a CPU.

No interface tells how much; what is here was read off the heap with torch 2.13 (``benchmarks/workspace.py`` measures
it again). Where torch converts or copies an argument the rule is exact. Where the bytes depend on values, or on how
many threads there are, the estimate is at the upper end.

    mul(float, bool)               the mask, as floats
    mm, bmm in half precision      see :mod:`roamc.cost.products`
    attention                      see :mod:`roamc.cost.attention`
    convolutions                   see :mod:`roamc.cost.convolutions`
    factors, inverses, powers      see :mod:`roamc.cost.linear_algebra`
    by index, or sorted            see :mod:`roamc.cost.lookups`

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
from roamc.cost.call import Call, call_of, fakes, rows_of, tensor_at, tensors_in
from roamc.cost.convolutions import convolution, convolution_backward
from roamc.cost.kinds import COPIES, kind_of
from roamc.cost.linear_algebra import LINEAR_ALGEBRA
from roamc.cost.lookups import LOOKUPS
from roamc.cost.products import products
from roamc.graph import tensors_of
from roamc.graph.memory import Int64s, Operator
from roamc.operators.kernels import piece_elements
from roamc.units import Bytes

ACROSS: Bytes = 288 << 10
"""What a softmax takes along another dimension than the last, in half precision."""

FOURIER: Bytes = 104
"""What a Fourier transform takes of every element of its longest row."""

OBJECTS: Bytes = 256 << 10
"""What the process takes for tensor objects and the like while a step runs: at most so much,"""

OBJECTS_SHARE = 96
"""and of small steps this part;"""

OBJECT: Bytes = 512
"""but no less than this for every tensor."""


def workspace_bytes(node: fx.Node, *, eager: bool = False) -> Bytes:
    """Most bytes that ``node`` has beside its arguments and results while it runs; 0 where none are known.

    With ``eager`` in eager PyTorch, not in a program of ours, where kernels of :mod:`roamc.operators.kernels` may run.
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
    """Workspace of every operator in bytes, int64[n], as :func:`workspace_bytes` estimates it."""
    return np.array([workspace_bytes(operator.node, eager=eager) for operator in operators], dtype=np.int64)


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


def _first_again(call: Call, made: torch.Tensor) -> Bytes:
    """The first argument is copied, or something of its size made of it."""
    return tensor_at(call, 0).nbytes


def _piece(call: Call, made: torch.Tensor) -> Bytes:
    """A part of the first argument."""
    return piece_elements(tensor_at(call, 0)) * made.itemsize


def _batch_norm_backward(call: Call, made: torch.Tensor) -> Bytes:
    """The gradient once more; in half precision in float32 where it does not lie like the image."""
    gradient, image = tensor_at(call, 0), tensor_at(call, 1)
    alike = gradient.itemsize != 2 or gradient.stride() == image.stride()
    return gradient.nbytes if alike else 4 * gradient.numel()


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


def _cast(call: Call, made: torch.Tensor) -> Bytes:
    """The argument in the dtype of the result; of complex numbers in the same precision, nothing."""
    read = tensor_at(call, 0)
    return 0 if read.dtype == made.dtype or read.is_complex() else read.numel() * made.itemsize


def _fourier(call: Call, made: torch.Tensor) -> Bytes:
    """A copy where the dimensions that are not transformed cannot be walked through as one."""
    return _batched(tensor_at(call, 0), call.args[1])


def _fourier_to_real(call: Call, made: torch.Tensor) -> Bytes:
    """All dimensions but the last to complex numbers first, which are then what is read."""
    read, (*others, last) = tensor_at(call, 0), call.args[1]
    if not others:
        return _batched(read, [last])
    return read.nbytes + max(_batched(read, others), _batched(read, [last]))


def _batched(tensor: torch.Tensor, dims: Sequence[int]) -> Bytes:
    """A row, and a copy of ``tensor`` unless all but ``dims`` can be walked through as one."""
    transformed = {dim % tensor.dim() for dim in dims}
    rest = [dim for dim in range(tensor.dim()) if dim not in transformed]
    row = FOURIER * max((tensor.shape[dim] for dim in transformed), default=0)
    return row + (tensor.nbytes if rest and not _in_one_row(tensor, rest) else 0)


def _distances(call: Call, made: torch.Tensor) -> Bytes:
    """Both sets of points with two columns more; before there is a result, the first one doubled."""
    first, second = tensor_at(call, 0), tensor_at(call, 1)
    more = 2 * (rows_of(first) + rows_of(second)) * made.itemsize
    return more + max(2 * first.nbytes - made.nbytes, first.nbytes + second.nbytes)


def _repeated(call: Call, made: torch.Tensor) -> Bytes:
    """Sets of points that stand for a batch of them are copied for each."""
    first, second = (tensor_at(call, at) for at in ((0, 1) if call.name == "_cdist_forward" else (1, 2)))
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    sets = [(tensor, prod(batch) * prod(tensor.shape[-2:])) for tensor in (first, second)]
    return sum(count * tensor.itemsize for tensor, count in sets if count > tensor.numel())


def _in_one_row(tensor: torch.Tensor, dims: Sequence[int] | None) -> bool:
    """Whether these dimensions, all if there are none, can be walked through as one."""
    chosen = [dim % tensor.dim() for dim in dims] if dims and tensor.dim() else range(tensor.dim())
    rows = sorted((tensor.stride(dim), tensor.shape[dim]) for dim in chosen if tensor.shape[dim] > 1)
    return all(stride == inner * count for (inner, count), (stride, _) in itertools.pairwise(rows))


def _crossed(call: Call, made: torch.Tensor) -> Bytes:
    """Two tensors in float32, three where they do not lie alike."""
    read = tensor_at(call, 0)
    return (8 if read.is_contiguous() else 12) * read.numel()


def _half(call: Call, made: torch.Tensor) -> Bytes:
    """Half precision is computed in float32."""
    return 4 * made.numel() if made.itemsize == 2 else 0


def _losses(call: Call, made: torch.Tensor) -> Bytes:
    """The loss of every element, where one number is made of them; half precision is summed in float32."""
    read = tensor_at(call, 0)
    return read.nbytes + _half(call, read) if made.numel() < read.numel() else 0


def _losses_behind(call: Call, made: torch.Tensor) -> Bytes:
    """The same, where they lie in the storage of the result."""
    read = tensor_at(call, 0)
    return _half(call, read) if made.numel() < read.numel() else 0


def _across(call: Call, made: torch.Tensor) -> Bytes:
    """Half precision along another dimension than the last is computed in float32, some rows at a time."""
    dim = next((argument for argument in call.args if isinstance(argument, int)), -1)
    return ACROSS if made.itemsize == 2 and made.dim() > 1 and dim % made.dim() != made.dim() - 1 else 0


def _rolled(call: Call, made: torch.Tensor) -> Bytes:
    """Dimension after dimension; without any, the elements in order."""
    dims = call.args[2] if len(call.args) > 2 else ()
    return made.nbytes * (len(dims) - 1 if dims else not tensor_at(call, 0).is_contiguous())


def _multinomial(call: Call, made: torch.Tensor) -> Bytes:
    """Two tensors like the probabilities."""
    return 2 * tensor_at(call, 0).nbytes


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
    return products(first, second, made) + sum(tensor.nbytes // tensor.shape[0] * together for tensor in odd)


def _attention(call: Call, made: torch.Tensor) -> Bytes:
    return forward_bytes(tensor_at(call, 0), tensor_at(call, 1))


def _attention_backward(call: Call, made: torch.Tensor) -> Bytes:
    return backward_bytes(tensor_at(call, 0), tensor_at(call, 1), tensor_at(call, 2))


_RULES: dict[str, Callable[[Call, torch.Tensor], Bytes]] = {
    "convolution": convolution,
    "convolution_backward": convolution_backward,
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
    **dict.fromkeys(
        ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"),
        _losses,
    ),
    "binary_cross_entropy_with_logits": _crossed,
    "gather": _half,
    "scatter": _half,
    "scatter_add": _half,
    "roll": _rolled,
    "multinomial": _multinomial,
    "kthvalue": _kth,
    "mean": _reduced,
    "sum": _reduced,
    **dict.fromkeys(("cumsum", "cumprod", "prod", "nansum", "linalg_vector_norm"), _cast),
    **dict.fromkeys(("_fft_r2c", "_fft_c2c"), _fourier),
    "_fft_c2r": _fourier_to_real,
    "_euclidean_dist": _distances,
    **dict.fromkeys(("_cdist_forward", "_cdist_backward"), _repeated),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "mm": _products,
    "addmm": _products,
    "bmm": _products,
    "baddbmm": _products,
    **LINEAR_ALGEBRA,
    **LOOKUPS,
}

_EAGER = {
    **_RULES,
    "native_dropout_backward": _first_again,
    "im2col": _first_again,
    **dict.fromkeys(("binary_cross_entropy", "soft_margin_loss"), _losses_behind),
}
