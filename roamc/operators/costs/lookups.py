"""Workspace of operators that read, sort or add by index, on a CPU: read off the heap with torch 2.13.

Numbers that these docstrings count are indices and the like, of :data:`INDEX` bytes each.
"""

from __future__ import annotations

import torch

from roamc.compat_operators import tensors_in
from roamc.operators.call import Call, broadcast_elements, fakes, rows_of, tensor_at
from roamc.operators.costs.arguments import INDEX, is_half
from roamc.operators.costs.cost import Cost
from roamc.operators.schemas import argument_of
from roamc.units import Bytes

MEAN, LARGEST = 1, 2
"""Modes of ``_embedding_bag``: means and largest elements."""

FEW_TESTED, FEW_POWER = 10, 0.145
"""``isin`` compares n elements one by one with fewer test elements than the first number times n to the second."""

SPREAD = 16
"""Rows with one index each are sorted from this many columns on; narrower ones are scattered element by element."""


def by_row(kind: str, each: Bytes) -> Cost:
    """Return the costs of an operator that takes ``each`` bytes for every element along ``dim``.

    Each thread takes them; of a single row, the one thread that computes it.
    """

    def of_one(call: Call, result: torch.Tensor) -> Bytes:
        return each * _along(call) if _one_row(call) else 0

    def per_thread(call: Call, result: torch.Tensor) -> Bytes:
        return 0 if _one_row(call) else each * _along(call)

    return Cost(kind, workspace=of_one, thread_workspace=per_thread)


def counted_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``mode``: a value and an index for every element along ``dim``."""
    return 2 * INDEX * _along(call)


def _one_row(call: Call) -> bool:
    return tensor_at(call, 0).numel() == _along(call)


def _along(call: Call) -> int:
    """Elements of the first argument along the dimension ``dim``."""
    read = tensor_at(call, 0)
    dim = argument_of(call.target, call.args, call.kwargs, "dim")
    return read.shape[dim] if read.dim() else 1


def multinomial(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``multinomial``: two tensors like the probabilities.

    For several without replacement it is what ``topk`` takes of a row, and one such tensor, if that is more.
    """
    read = tensor_at(call, 0)
    return max(2 * read.nbytes, read.nbytes + (_chosen(call) if rows_of(read) == 1 else 0))


def multinomial_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``multinomial`` of several rows, see :func:`multinomial`."""
    return _chosen(call) if rows_of(tensor_at(call, 0)) > 1 else 0


def _chosen(call: Call) -> Bytes:
    """Bytes of an element and an index for all of a row, if several are drawn without replacement."""
    several = call.args[1] > 1 and not (len(call.args) > 2 and call.args[2])
    return 2 * INDEX * tensor_at(call, 0).shape[-1] if several else 0


def kth_value(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``kthvalue``: a copy of all values, and an index for each."""
    read = tensor_at(call, 0)
    return read.numel() * (read.itemsize + INDEX)


def index_add(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``index_add``.

    Along the first dimension it is five numbers for every index, which are sorted. Along the last, in half precision,
    it is the result in float32.
    """
    dim = call.args[1] % max(1, result.dim())
    ordered = 5 * INDEX * tensor_at(call, 2).numel() if dim == 0 else 0
    return ordered + (4 * result.numel() if is_half(result) and dim == result.dim() - 1 else 0)


def bags(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_embedding_bag``: a number for every bag; for means one for every index, if these are more."""
    indices, offsets = tensor_at(call, 1), tensor_at(call, 2)
    return INDEX * (max(indices.numel(), offsets.numel()) if _mode(call, 4) == MEAN else offsets.numel())


def bags_backward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_embedding_bag_backward``.

    It is five numbers for every index: index and place, both sorted as well, and bag; and two for every row of the
    table. For largest elements it is an element and a number for every element of the gradient, and a number for every
    bag.
    """
    gradient, indices, offsets = (tensor_at(call, at) for at in range(3))
    if _mode(call, 8) == LARGEST:
        return gradient.numel() * (INDEX + gradient.itemsize) + INDEX * offsets.numel()
    rows: int = call.args[6]
    return INDEX * (5 * indices.numel() + 2 * rows)


def bags_dense_backward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_embedding_bag_dense_backward``.

    It is as for :func:`bags_backward`, but four numbers for every index: its bag is known.
    """
    gradient, indices = tensor_at(call, 0), tensor_at(call, 1)
    if _mode(call, 7) == LARGEST:
        return gradient.numel() * (INDEX + gradient.itemsize) + INDEX * gradient.shape[0]
    rows: int = call.args[5]
    return INDEX * (4 * indices.numel() + 2 * rows)


def _mode(call: Call, position: int) -> int:
    return call.args[position] if len(call.args) > position else 0


def median(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``median`` and ``nanmedian``: a copy of the argument to sort.

    It is 0 if the call has a dimension and the elements along it lie side by side.
    """
    read = tensor_at(call, 0)
    if len(call.args) > 1 and read.dim() and 1 in (read.stride(call.args[1]), read.shape[call.args[1]]):
        return 0
    return read.nbytes


def median_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``median`` along a dimension: an index for every element along it."""
    return INDEX * _along(call) if len(call.args) > 1 else 0


def scatter_reduce(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``scatter_reduce``.

    If each row has one index, it is four numbers for every row: torch sorts the rows. Else a mean takes a tensor like
    the result, one like the larger of result and source, and a byte (four in half precision) for every element of the
    result; any other reduction takes the result in float32 in half precision, else nothing.
    """
    index, source = tensor_at(call, 2), tensor_at(call, 3)
    if _by_rows(tensor_at(call, 0), call.args[1], index, source):
        return 4 * INDEX * index.shape[0]
    if call.args[4] != "mean":
        return 4 * result.numel() if is_half(result) else 0
    return result.nbytes + max(result.nbytes, source.nbytes) + result.numel() * (4 if is_half(result) else 1)


def _by_rows(tensor: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether every row of ``source`` goes to one row of ``tensor``, by the strides of ``index``: torch sorts these."""
    if dim or not index.dim() or tensor.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return False
    expanded = index.stride(0) > 0 and not any(index.stride()[1:]) and index.shape[1:] == source.shape[1:]
    wide = index.numel() >= SPREAD * index.shape[0]
    return expanded and wide and tensor.is_contiguous() and source.is_contiguous()


def index_reduce(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``index_reduce``: 0, but for means.

    A mean takes a tensor of ones as large as the source, their sums, as large as the result, in 16 bits quotients in
    float32, and along the first dimension four numbers for every index.
    """
    index, source = tensor_at(call, 2), tensor_at(call, 3)
    ordered = 4 * INDEX * index.numel() if call.args[1] % max(1, result.dim()) == 0 else 0
    divided = result.numel() * torch.float32.itemsize if is_half(result) else 0
    return result.nbytes + divided + source.nbytes + ordered if call.args[4] == "mean" else 0


def masked_scatter_backward(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``masked_scatter_backward``.

    It holds the mask, in the shape of the gradient, as numbers, and their running sums; the gradients that it picks are
    there when these are gone.
    """
    return 2 * INDEX * broadcast_elements(call)


def is_in(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``isin``, at the upper end; 0 for few test elements.

    For many, elements and test elements are sorted, those that occur several times once: how many there are cannot be
    known before.
    """
    if not all(isinstance(value, torch.Tensor) for value in fakes(call.args[:2])):
        return 0
    read, tested = tensor_at(call, 0), tensor_at(call, 1)
    if tested.numel() < FEW_TESTED * max(1, read.numel()) ** FEW_POWER:
        return 0
    both, size = read.numel() + tested.numel(), read.itemsize
    return read.numel() * (size + INDEX) + tested.numel() * size + both * (2 * size + 2 * INDEX)


def bags_of_weights(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_embedding_bag_per_sample_weights_backward``: two numbers for every index."""
    return 2 * INDEX * tensor_at(call, 2).numel()


def masked_index(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_unsafe_masked_index`` and of its sum of values.

    It is an element and a flag for every element of the mask, and indices within bounds.
    """
    read, mask = tensor_at(call, 0), tensor_at(call, 1)
    return mask.numel() * (read.itemsize + 1) + sum(tensor.nbytes for tensor in tensors_in(fakes(call.args[2])))
