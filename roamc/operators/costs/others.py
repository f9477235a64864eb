"""Workspace of other operators on a CPU: losses, sums, transforms, distances."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import torch

from roamc.operators import activations, norm_inputs, projection
from roamc.operators.call import Call, broadcast_elements, rows_of, tensor_at
from roamc.operators.costs.arguments import INLINE_DIMS, is_half
from roamc.operators.counter import PIECE, PIECE_BYTES
from roamc.operators.kernels import piece_elements
from roamc.operators.scores import BYTES_OF_A_LABEL
from roamc.units import Bytes

NOTED, NOTED_VIEW = 48, 272
"""Bytes that ``cat`` and ``stack`` take for each tensor in their list, and for each that they read through a view."""

MANY = 64
"""Tensors from which on a list counts as long."""

GELU, GELU_BACKWARD, GRADIENT_MOVED = 12_544, 28_608, 9_344
"""Bytes that oneDNN takes for ``gelu``, for its backward, and for bringing a gradient in order there; fixed."""

FOURIER: Bytes = 104
"""Bytes that a Fourier transform takes for every element along the longest dimension that it transforms."""


def first_again(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of an operator that copies its first argument, or makes one tensor of its size."""
    return tensor_at(call, 0).nbytes


def dropout_piece(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of roamc's ``native_dropout_backward``: one piece of the mask, in the dtype of ``result``.

    See :func:`roamc.operators.kernels.piece_elements`.
    """
    return piece_elements(tensor_at(call, 0)) * result.itemsize


def piece_of_a_mask(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``counter_mask`` outside of groups."""
    return min(PIECE_BYTES, PIECE_BYTES // PIECE * result.numel())


def activation_inputs(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``activation_input``: what a piece takes, and a copy of outputs that lie in another order."""
    outputs = tensor_at(call, 0)
    moved = 0 if outputs.stride() == result.stride() else outputs.numel() * outputs.itemsize
    return moved + activations.TAKEN[result.dtype] * activations.piece_elements(result)


def launches_of_activation_inputs(call: Call, result: torch.Tensor) -> tuple[int, Bytes]:
    """Kernels, and bytes that they move, of ``activation_input`` on a GPU, where it is in no group."""
    count, nbytes = activations.launches(result)
    moved = 0 if tensor_at(call, 0).stride() == result.stride() else 2 * result.numel() * result.itemsize
    return count + (moved > 0), nbytes + moved


def piece_of_a_projection(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``projection``, on every device."""
    rows, columns, basis = call.args[3:6]
    return projection.piece_bytes(rows, columns, basis, result.device)


def draws_of_a_projection(call: Call, result: torch.Tensor) -> int:
    """What ``projection`` works through, in numbers that are drawn."""
    return projection.DRAWS[call.args[5]] * result.numel()


def launches_of_a_projection(call: Call, result: torch.Tensor) -> tuple[int, Bytes]:
    """Kernels, and bytes that they move, of ``projection`` on a GPU."""
    return projection.launches(result, call.args[5])


def columns_of_norms(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``lost_columns``, on every device."""
    return norm_inputs.BYTES_OF_A_COLUMN * tensor_at(call, 0).numel()


def launches_of_norm_inputs(call: Call, result: torch.Tensor) -> tuple[int, Bytes]:
    """Kernels, and bytes that they move, of ``norm_input`` on a GPU."""
    columns, biased, centered = tensor_at(call, 4).numel(), call.args[5] is not None, call.args[2] is not None
    return norm_inputs.launches(tensor_at(call, 0), result, columns, biased=biased, centered=centered)


def norm_inputs_of(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``norm_input``: a piece in float32, unless that is the dtype of ``result``."""
    wide = result.dtype in norm_inputs.WIDE
    elements = norm_inputs.piece_elements(result, tensor_at(call, 4).numel())
    return 0 if wide else norm_inputs.BYTES_OF_AN_ELEMENT * elements


def labels(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``label_scores`` and ``nll_of_scores``."""
    return BYTES_OF_A_LABEL * tensor_at(call, 1).numel()


def summed(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``sum``: the argument converted to the result's dtype, if the two dtypes differ.

    If they are the same, it is 0, except in half precision if the summed dimensions do not lie in memory as one: then
    it is the argument in float32.
    """
    read = tensor_at(call, 0)
    if read.dtype != result.dtype:
        return read.numel() * result.itemsize
    scattered = not _in_one_row(read, call.args[1] if len(call.args) > 1 else ())
    return read.numel() * 4 if scattered and is_half(read) else 0


def averaged(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``mean``: the argument converted to the result's dtype, if the two dtypes differ.

    If they are the same, it is argument and result in float32 in half precision, else 0.
    """
    read = tensor_at(call, 0)
    if read.dtype != result.dtype:
        return read.numel() * result.itemsize
    return (read.numel() + result.numel()) * 4 if is_half(read) else 0


def cast_to_result(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of a reduction that converts its first argument to the result's dtype.

    It is 0 if the two dtypes are the same, or the argument is complex.
    """
    read = tensor_at(call, 0)
    return 0 if read.dtype == result.dtype or read.is_complex() else read.numel() * result.itemsize


def other_elements(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``roamc::prod_backward`` where an element is 0, the most that it takes.

    It is two tensors of the gradient's size while products are made, with a first element for each, and a copy if all
    elements are multiplied and do not lie as one in memory.
    """
    x, dim = tensor_at(call, 1), call.args[3]
    copied = dim is None and not x.is_contiguous()
    return (2 + copied) * result.nbytes + (result.itemsize if dim is None else result.nbytes // max(1, x.size(dim)))


def quotients(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of eager's backward of ``prod`` where no element is 0: quotients, or before them a mask and its sum."""
    mask_and_counts = result.numel() * (torch.bool.itemsize + torch.int64.itemsize)
    return max(result.nbytes, mask_and_counts - result.nbytes)


def listed(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``cat`` and ``stack``: what they note of each tensor, and for a new last dimension a view of it.

    It is 0 for short lists, whose notes are less than what is counted for objects of a step.
    """
    tensors, dim = len(call.args[0]), call.args[1] if len(call.args) > 1 else 0
    if tensors < MANY:
        return 0
    if dim % max(1, result.dim()) + 1 < result.dim() or result.dim() == tensor_at(call, 0).dim():
        return NOTED * tensors
    return tensors * (NOTED_VIEW + (16 * result.dim() if result.dim() > INLINE_DIMS else 0))


def around(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``normal``: numbers as many as the result's, if means or deviations are a tensor."""
    name = getattr(call.target, "_overloadname", "")
    return result.nbytes if name in ("Tensor_float", "float_Tensor", "Tensor_Tensor") else 0


def gelu(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``gelu``: what oneDNN takes for itself, where it runs by oneDNN."""
    return GELU if _gelu_by_onednn(call, tensor_at(call, 0)) else 0


def gelu_backward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``gelu_backward``: a copy of a gradient that is not contiguous, where it runs by oneDNN."""
    return result.nbytes if _moves_gradient(call) else 0


def gelu_backward_fixed(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``gelu_backward`` for any number of rows: what oneDNN takes for itself, where it runs by oneDNN."""
    return (GELU_BACKWARD if _gelu_by_onednn(call, tensor_at(call, 1)) else 0) + GRADIENT_MOVED * _moves_gradient(call)


def _moves_gradient(call: Call) -> bool:
    return _gelu_by_onednn(call, tensor_at(call, 1)) and not tensor_at(call, 0).is_contiguous()


def _gelu_by_onednn(call: Call, x: torch.Tensor) -> bool:
    exact = call.kwargs.get("approximate", "none") == "none"
    return exact and x.dtype in (torch.float32, torch.bfloat16) and x.dim() > 0 and x.is_contiguous()


def fourier(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_fft_r2c`` and ``_fft_c2c``.

    It is a buffer for one row along the longest dimension that is transformed, and a copy of the argument if the
    dimensions that are not transformed do not lie as one in memory.
    """
    return _batched(tensor_at(call, 0), call.args[1])


def fourier_to_real(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_fft_c2r``: for one dimension as in :func:`fourier`.

    For several it is a complex copy, in which all but the last are transformed first, and the larger workspace of both
    stages.
    """
    read, (*others, last) = tensor_at(call, 0), call.args[1]
    if not others:
        return _batched(read, [last])
    return read.nbytes + max(_batched(read, others), _batched(read, [last]))


def _batched(tensor: torch.Tensor, dims: Sequence[int]) -> Bytes:
    """Bytes of a row, and of a copy of ``tensor`` unless all dimensions but ``dims`` lie as one in memory."""
    transformed = {dim % tensor.dim() for dim in dims}
    untransformed = [dim for dim in range(tensor.dim()) if dim not in transformed]
    row = FOURIER * max((tensor.shape[dim] for dim in transformed), default=0)
    return row + (tensor.nbytes if untransformed and not _in_one_row(tensor, untransformed) else 0)


def distances(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_euclidean_dist``: copies of both sets of points with two columns more.

    Before there is a result, the first set is there twice.
    """
    first, second = tensor_at(call, 0), tensor_at(call, 1)
    more = 2 * (rows_of(first) + rows_of(second)) * result.itemsize
    return more + max(2 * first.nbytes - result.nbytes, first.nbytes + second.nbytes)


def pairs(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_cdist_forward``: a copy of each set of points that is broadcast over the batch."""
    return _repeated(tensor_at(call, 0), tensor_at(call, 1))


def pairs_backward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_cdist_backward``: the copies that :func:`pairs` counts."""
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


def logits_loss(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``binary_cross_entropy_with_logits``, in float32.

    It is two tensors like the argument, without a reduction one; one more if the argument is not contiguous.
    """
    read, reduced = tensor_at(call, 0), len(call.args) < 5 or call.args[4] != 0
    return 4 * (1 + reduced + (not read.is_contiguous())) * read.numel()


def half_in_float32(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of an operator whose result is computed in float32 in half precision; in other dtypes 0."""
    return 4 * result.numel() if is_half(result) else 0


def safe_softmax(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_safe_softmax``.

    It is a byte for every element of the result, which says whether the element is finite, and one for every row.
    """
    dim = call.args[1]
    return result.numel() + (result.numel() // max(1, result.shape[dim]) if result.dim() else 1)


def losses(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of a loss that is summed or averaged: the losses of the elements; without a reduction 0.

    In half precision it is also a copy of them in float32, which is what is summed.
    """
    read = tensor_at(call, 0)
    return read.nbytes + half_in_float32(call, read) if result.numel() < read.numel() else 0


def losses_behind(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of a loss in eager that keeps the losses of the elements in the result's storage.

    If they are summed or averaged, in half precision, it is these losses in float32; else 0.
    """
    read = tensor_at(call, 0)
    return half_in_float32(call, read) if result.numel() < read.numel() else 0


def rolled(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``roll``: a copy for each dimension but the first, as torch rolls one after the other.

    Without dimensions it is a copy of an argument that is not contiguous.
    """
    dims = call.args[2] if len(call.args) > 2 else ()
    return result.nbytes * (len(dims) - 1 if dims else not tensor_at(call, 0).is_contiguous())


def margins_backward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``soft_margin_loss_backward``: three tensors like its ``result``.

    They are gone before there is a result, so that only two are beside it.
    """
    return 2 * result.nbytes


def powers_of_two(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``ldexp``: the powers of two."""
    return tensor_at(call, 1).numel() * result.itemsize


def magnitudes(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``isinf``: the magnitudes of its argument."""
    read = tensor_at(call, 0)
    return read.nbytes if read.is_floating_point() else 0


def differences(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``dist``: the differences of its arguments."""
    return broadcast_elements(call) * result.itemsize


def gammas(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of eager's ``mvlgamma``: each term of its sums."""
    terms: int = call.args[1]
    return terms * result.nbytes


def gammas_copied(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``mvlgamma`` into given memory: as :func:`gammas`, and ``result`` once more."""
    return gammas(call, result) + result.nbytes


def result_again(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace as large as ``result``: padded arguments of ``_chunk_cat``; counts of each thread of ``histogram``."""
    return result.nbytes


def flags(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``all`` and ``any``: the argument as flags."""
    read = tensor_at(call, 0)
    return read.numel() if read.dtype not in (torch.bool, torch.uint8) else 0


def log_sum(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``logsumexp``: the argument's exponentials, and the largest element of each row."""
    return (tensor_at(call, 0).numel() + result.numel()) * result.itemsize
