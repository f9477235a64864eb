"""Workspace of other operators on a CPU: norms, losses, sums, transforms, distances.

Each formula takes a call and its first result ``made`` and returns bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import torch

from roamc.operators.call import Call, rows_of, tensor_at
from roamc.operators.costs.arguments import channels_last
from roamc.operators.kernels import piece_elements
from roamc.units import Bytes

FOURIER: Bytes = 104
"""Bytes that a Fourier transform takes for every element along the longest dimension that it transforms."""


def first_again(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of operators that copy their first argument, or make one tensor of its size."""
    return tensor_at(call, 0).nbytes


def dropout_piece(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of roamc's ``native_dropout_backward``: one piece of the mask in the dtype of ``made``."""
    return piece_elements(tensor_at(call, 0)) * made.itemsize


def batch_norm_backward(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``native_batch_norm_backward``: a copy of the gradient.

    The copy is in float32 if the gradient has half precision and other strides than the image.
    """
    gradient, image = tensor_at(call, 0), tensor_at(call, 1)
    alike = gradient.itemsize != 2 or gradient.stride() == image.stride()
    return gradient.nbytes if alike else 4 * gradient.numel()


def summed(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``sum``: the argument converted to the result's dtype, if the two dtypes differ.

    If they are the same, it is 0, except in half precision if the summed dimensions do not lie in memory as one: then
    it is the argument in float32.
    """
    read = tensor_at(call, 0)
    if read.dtype != made.dtype:
        return read.numel() * made.itemsize
    scattered = not _in_one_row(read, call.args[1] if len(call.args) > 1 else ())
    return read.numel() * 4 if scattered and _is_half(read) else 0


def averaged(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``mean``: the argument converted to the result's dtype, if the two dtypes differ.

    If they are the same, it is argument and result in float32 in half precision, else 0.
    """
    read = tensor_at(call, 0)
    if read.dtype != made.dtype:
        return read.numel() * made.itemsize
    return (read.numel() + made.numel()) * 4 if _is_half(read) else 0


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.itemsize == 2 and tensor.is_floating_point()


def cast_to_result(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of reductions that convert a real argument to the result's dtype, if that is another."""
    read = tensor_at(call, 0)
    return 0 if read.dtype == made.dtype or read.is_complex() else read.numel() * made.itemsize


def fourier(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``_fft_r2c`` and ``_fft_c2c``: a buffer for one row, and maybe a copy of the argument.

    The argument is copied if the dimensions that are not transformed do not lie as one in memory.
    """
    return _batched(tensor_at(call, 0), call.args[1])


def fourier_to_real(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``_fft_c2r``: as :func:`fourier` for one dimension.

    For several it is a complex copy, in which all but the last are transformed first, and the larger of both stages.
    """
    read, (*others, last) = tensor_at(call, 0), call.args[1]
    if not others:
        return _batched(read, [last])
    return read.nbytes + max(_batched(read, others), _batched(read, [last]))


def _batched(tensor: torch.Tensor, dims: Sequence[int]) -> Bytes:
    """Bytes of a row, and of a copy of ``tensor`` unless all dimensions but ``dims`` lie as one in memory."""
    transformed = {dim % tensor.dim() for dim in dims}
    rest = [dim for dim in range(tensor.dim()) if dim not in transformed]
    row = FOURIER * max((tensor.shape[dim] for dim in transformed), default=0)
    return row + (tensor.nbytes if rest and not _in_one_row(tensor, rest) else 0)


def distances(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``_euclidean_dist``: copies of both sets of points with two columns more.

    Before there is a result, the first set is there twice.
    """
    first, second = tensor_at(call, 0), tensor_at(call, 1)
    more = 2 * (rows_of(first) + rows_of(second)) * made.itemsize
    return more + max(2 * first.nbytes - made.nbytes, first.nbytes + second.nbytes)


def pairs(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``_cdist_forward``: a set of points is copied if it is broadcast over the batch."""
    return _repeated(tensor_at(call, 0), tensor_at(call, 1))


def pairs_backward(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``_cdist_backward``, see :func:`pairs`; argument 0 is the gradient."""
    return _repeated(tensor_at(call, 1), tensor_at(call, 2))


def _repeated(first: torch.Tensor, second: torch.Tensor) -> Bytes:
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    sets = [(tensor, prod(batch) * prod(tensor.shape[-2:])) for tensor in (first, second)]
    return sum(count * tensor.itemsize for tensor, count in sets if count > tensor.numel())


def _in_one_row(tensor: torch.Tensor, dims: Sequence[int] | None) -> bool:
    """Whether ``dims`` of ``tensor``, all if there are none, can be walked through in memory as one dimension."""
    chosen = [dim % tensor.dim() for dim in dims] if dims and tensor.dim() else range(tensor.dim())
    rows = sorted((tensor.stride(dim), tensor.shape[dim]) for dim in chosen if tensor.shape[dim] > 1)
    return all(stride == inner * count for (inner, count), (stride, _) in itertools.pairwise(rows))


def logits_loss(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``binary_cross_entropy_with_logits``: two tensors like the argument in float32.

    There are three if the argument is not contiguous.
    """
    read = tensor_at(call, 0)
    return (8 if read.is_contiguous() else 12) * read.numel()


def half_in_float32(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of operators that compute half precision in float32: ``made`` in float32; else 0."""
    return 4 * made.numel() if made.itemsize == 2 else 0


def safe_softmax(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``_safe_softmax``: a byte for every element, whether it is finite."""
    return made.numel()


def losses(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of losses that are summed or averaged: the loss of every element; without reduction 0.

    In half precision it is there in float32 as well, to be summed.
    """
    read = tensor_at(call, 0)
    return read.nbytes + half_in_float32(call, read) if made.numel() < read.numel() else 0


def losses_behind(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of eager losses that keep the loss of every element in the result's storage.

    In half precision it is these losses in float32, if they are summed or averaged; else 0.
    """
    read = tensor_at(call, 0)
    return half_in_float32(call, read) if made.numel() < read.numel() else 0


def norm_backward_per_thread(call: Call, made: torch.Tensor) -> Bytes:
    """Return what each thread takes in ``native_layer_norm_backward``: its sums of the weight's and bias's gradients.

    Nothing if neither is asked for.
    """
    return 2 * prod(call.args[2]) * tensor_at(call, 1).itemsize if any(call.args[7][1:]) else 0


def image_per_thread(call: Call, made: torch.Tensor) -> Bytes:
    """Return what each thread takes in an upsampling's backward: in half precision an image of ``made`` in float32.

    That is with channels last; else nothing beside the copies.
    """
    return 4 * made.numel() // max(1, made.shape[0]) if made.itemsize == 2 and channels_last(made) else 0


def rolled(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``roll``: a copy for each dimension but the first, as torch rolls one after the other.

    Without dimensions it is a copy of an argument that is not contiguous.
    """
    dims = call.args[2] if len(call.args) > 2 else ()
    return made.nbytes * (len(dims) - 1 if dims else not tensor_at(call, 0).is_contiguous())


def multinomial(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``multinomial``: two tensors like the probabilities."""
    return 2 * tensor_at(call, 0).nbytes


def kth_value(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``kthvalue``: a copy of all values, and an index of 8 bytes for each."""
    read = tensor_at(call, 0)
    return read.numel() * (read.itemsize + 8)


def rms_norm(call: Call, made: torch.Tensor) -> Bytes:
    """Return the workspace of ``_fused_rms_norm``: the squares of the argument in float32.

    For other dtypes than float32, such as half precision, it is two and a half times as much.
    """
    read = tensor_at(call, 0)
    return read.numel() * (4 if read.itemsize == 4 else 10)
