"""What other operators take for themselves on a CPU: products, norms, losses, sums, transforms, distances."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import torch

from roamc.operators.call import Call, fakes, rows_of, tensor_at, tensors_in
from roamc.operators.costs.arguments import in_order, matrix
from roamc.operators.costs.attention import backward_bytes, forward_bytes
from roamc.operators.costs.products import products
from roamc.operators.kernels import piece_elements
from roamc.units import Bytes

ACROSS: Bytes = 288 << 10
"""What a softmax takes along another dimension than the last, in half precision."""

FOURIER: Bytes = 104
"""What a Fourier transform takes of every element of its longest row."""


def first_again(call: Call, made: torch.Tensor) -> Bytes:
    """The first argument is copied, or something of its size made of it."""
    return tensor_at(call, 0).nbytes


def dropout_piece(call: Call, made: torch.Tensor) -> Bytes:
    """A part of the first argument."""
    return piece_elements(tensor_at(call, 0)) * made.itemsize


def batch_norm_backward(call: Call, made: torch.Tensor) -> Bytes:
    """The gradient once more; in half precision in float32 where it does not lie like the image."""
    gradient, image = tensor_at(call, 0), tensor_at(call, 1)
    alike = gradient.itemsize != 2 or gradient.stride() == image.stride()
    return gradient.nbytes if alike else 4 * gradient.numel()


def summed(call: Call, made: torch.Tensor) -> Bytes:
    """The argument in the dtype of the result; in half precision, over scattered dims, in float32."""
    read = tensor_at(call, 0)
    if read.dtype != made.dtype:
        return read.numel() * made.itemsize
    scattered = not _in_one_row(read, call.args[1] if len(call.args) > 1 else ())
    return read.numel() * 4 if scattered and _is_half(read) else 0


def averaged(call: Call, made: torch.Tensor) -> Bytes:
    """The argument in the dtype of the result; in half precision both in float32."""
    read = tensor_at(call, 0)
    if read.dtype != made.dtype:
        return read.numel() * made.itemsize
    return (read.numel() + made.numel()) * 4 if _is_half(read) else 0


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.itemsize == 2 and tensor.is_floating_point()


def cast_to_result(call: Call, made: torch.Tensor) -> Bytes:
    """The argument in the dtype of the result; of complex numbers in the same precision, nothing."""
    read = tensor_at(call, 0)
    return 0 if read.dtype == made.dtype or read.is_complex() else read.numel() * made.itemsize


def fourier(call: Call, made: torch.Tensor) -> Bytes:
    """A copy where the dimensions that are not transformed cannot be walked through as one."""
    return _batched(tensor_at(call, 0), call.args[1])


def fourier_to_real(call: Call, made: torch.Tensor) -> Bytes:
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


def distances(call: Call, made: torch.Tensor) -> Bytes:
    """Both sets of points with two columns more; before there is a result, the first one doubled."""
    first, second = tensor_at(call, 0), tensor_at(call, 1)
    more = 2 * (rows_of(first) + rows_of(second)) * made.itemsize
    return more + max(2 * first.nbytes - made.nbytes, first.nbytes + second.nbytes)


def pairs(call: Call, made: torch.Tensor) -> Bytes:
    """Sets of points that stand for a batch of them are copied for each."""
    return _repeated(tensor_at(call, 0), tensor_at(call, 1))


def pairs_backward(call: Call, made: torch.Tensor) -> Bytes:
    """Sets of points that stand for a batch of them are copied for each; the gradient comes before the sets."""
    return _repeated(tensor_at(call, 1), tensor_at(call, 2))


def _repeated(first: torch.Tensor, second: torch.Tensor) -> Bytes:
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    sets = [(tensor, prod(batch) * prod(tensor.shape[-2:])) for tensor in (first, second)]
    return sum(count * tensor.itemsize for tensor, count in sets if count > tensor.numel())


def _in_one_row(tensor: torch.Tensor, dims: Sequence[int] | None) -> bool:
    """Whether these dimensions, all if there are none, can be walked through as one."""
    chosen = [dim % tensor.dim() for dim in dims] if dims and tensor.dim() else range(tensor.dim())
    rows = sorted((tensor.stride(dim), tensor.shape[dim]) for dim in chosen if tensor.shape[dim] > 1)
    return all(stride == inner * count for (inner, count), (stride, _) in itertools.pairwise(rows))


def logits_loss(call: Call, made: torch.Tensor) -> Bytes:
    """Two tensors in float32, three where they do not lie alike."""
    read = tensor_at(call, 0)
    return (8 if read.is_contiguous() else 12) * read.numel()


def half_in_float32(call: Call, made: torch.Tensor) -> Bytes:
    """Half precision is computed in float32."""
    return 4 * made.numel() if made.itemsize == 2 else 0


def safe_softmax(call: Call, made: torch.Tensor) -> Bytes:
    """A byte of every element: whether it is finite."""
    return made.numel()


def losses(call: Call, made: torch.Tensor) -> Bytes:
    """The loss of every element, where one number is made of them; half precision is summed in float32."""
    read = tensor_at(call, 0)
    return read.nbytes + half_in_float32(call, read) if made.numel() < read.numel() else 0


def losses_behind(call: Call, made: torch.Tensor) -> Bytes:
    """The losses in float32 for half precision; they themselves lie in the storage of the result."""
    read = tensor_at(call, 0)
    return half_in_float32(call, read) if made.numel() < read.numel() else 0


def softmax_across_rows(call: Call, made: torch.Tensor) -> Bytes:
    """Half precision along another dimension than the last is computed in float32, some rows at a time."""
    dim = next((argument for argument in call.args if isinstance(argument, int)), -1)
    return ACROSS if made.itemsize == 2 and made.dim() > 1 and dim % made.dim() != made.dim() - 1 else 0


def rolled(call: Call, made: torch.Tensor) -> Bytes:
    """Dimension after dimension; without any, the elements in order."""
    dims = call.args[2] if len(call.args) > 2 else ()
    return made.nbytes * (len(dims) - 1 if dims else not tensor_at(call, 0).is_contiguous())


def multinomial(call: Call, made: torch.Tensor) -> Bytes:
    """Two tensors like the probabilities."""
    return 2 * tensor_at(call, 0).nbytes


def kth_value(call: Call, made: torch.Tensor) -> Bytes:
    """All values and their places."""
    read = tensor_at(call, 0)
    return read.numel() * (read.itemsize + 8)


def rms_norm(call: Call, made: torch.Tensor) -> Bytes:
    """One tensor of squares; in half precision two and a half in float32."""
    read = tensor_at(call, 0)
    return read.numel() * (4 if read.itemsize == 4 else 10)


def matrix_products(call: Call, made: torch.Tensor) -> Bytes:
    """Buffers of the kernel; batches also copy what is not in order, in float32 matrix after matrix."""
    first, second = [tensor for tensor in tensors_in(fakes(call.args)) if tensor.dim() > 1][-2:]
    if made.dim() < 3:
        return products(first, second, made)
    odd = [tensor for tensor in (first, second) if not (in_order(tensor) if made.itemsize == 2 else matrix(tensor))]
    together = made.shape[0] if made.itemsize == 2 else 1
    return products(first, second, made) + sum(tensor.nbytes // tensor.shape[0] * together for tensor in odd)


def attention(call: Call, made: torch.Tensor) -> Bytes:
    """See :func:`roamc.operators.costs.attention.forward_bytes`."""
    return forward_bytes(tensor_at(call, 0), tensor_at(call, 1))


def attention_backward(call: Call, made: torch.Tensor) -> Bytes:
    """See :func:`roamc.operators.costs.attention.backward_bytes`."""
    return backward_bytes(tensor_at(call, 0), tensor_at(call, 1), tensor_at(call, 2))
