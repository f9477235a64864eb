"""Kernels of operators without a usable ``out=`` overload: functions that fill tensors they are given.

``KERNELS`` maps an overload to its function and the devices on which the function is exact. A function takes the
arguments of its operator and ``out``, with the geometry of the results, and returns None. It gives the bits of the ATen
operator, and for random ones draws the same numbers; tests compare them. Arguments ``geometry`` are ignored: ``out``
has the shape, strides and dtype that they ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roamc.compat import OpOverload
from roamc.operators import (
    activations,
    aligned,
    collectives,
    counter,
    norm_inputs,
    onednn,
    padded,
    projection,
    scores,
    shards,
    split_collectives,
)
from roamc.operators.composite import Composite
from roamc.operators.random import dropout_mask

aten = torch.ops.aten
ANYWHERE = frozenset({"cpu", "cuda"})
CPU_ONLY = frozenset({"cpu"})
WIDE = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True)
class Kernel:
    """A function that stands for an operator and writes the results into planned memory.

    Attributes:
        function: takes the arguments of the operator and the keyword ``out``: a tensor, or a tuple of them.
        devices: types of the devices on which it gives the operator's bits.
        lean: it has less workspace than the operator, and so replaces it even where results are not in the arena.
    """

    function: Callable[..., None]
    devices: frozenset[str]
    lean: bool = False


KERNELS: dict[OpOverload, Kernel] = {
    **{operator: Kernel(function, ANYWHERE) for operator, function in collectives.KERNELS.items()},
    **{operator: Kernel(function, ANYWHERE) for operator, function in split_collectives.KERNELS.items()},
    **{operator: Kernel(function, CPU_ONLY) for operator, function in onednn.KERNELS.items()},
    **{operator: Kernel(function, ANYWHERE) for operator, function in aligned.KERNELS.items()},
    **{operator: Kernel(function, ANYWHERE) for operator, function in padded.KERNELS.items()},
    **{operator: Kernel(function, ANYWHERE) for operator, function in shards.KERNELS.items()},
    **{operator: Kernel(function, ANYWHERE) for operator, function in counter.KERNELS.items()},
    **{operator: Kernel(function, ANYWHERE) for operator, function in projection.KERNELS.items()},
    **{operator: Kernel(function, ANYWHERE) for operator, function in scores.KERNELS.items()},
    **{operator: Kernel(function, ANYWHERE) for operator, function in activations.KERNELS.items()},
    **{operator: Kernel(function, ANYWHERE) for operator, function in norm_inputs.KERNELS.items()},
}


def kernel_of(target: object) -> Kernel | None:
    """Return the :class:`Kernel` of ``target``, an operator or a group; None if no function writes its results."""
    if isinstance(target, Composite):
        kernel: Kernel = target.kernel
        return kernel
    return KERNELS.get(target)  # type: ignore[call-overload,no-any-return]


def _writes(*overloads: OpOverload, devices: frozenset[str] = ANYWHERE, lean: bool = False) -> Callable[..., Any]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        for overload in overloads:
            KERNELS[overload] = Kernel(function, devices, lean)
        return function

    return register


@_writes(aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default)
def copy(source: Tensor, *, out: Tensor, non_blocking: bool = False, **geometry: Any) -> None:
    """Copy ``source`` to ``out``, converted to the dtype of ``out``; other arguments are ATen's and not read.

    Args:
        source: is read.
        out: is written.
        non_blocking: whether the caller goes on while a copy from pinned memory to a GPU runs.
        geometry: not read.
    """
    out.copy_(source, non_blocking)


@_writes(aten.copy.default)
def functional_copy(self: Tensor, source: Tensor, non_blocking: bool = False, *, out: Tensor) -> None:
    """Write the values of ``source``, broadcast to the shape of ``self``, to ``out``; ``self`` itself is not read."""
    out.copy_(source, non_blocking)


@_writes(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def zeros(*shape: Any, out: Tensor, **geometry: Any) -> None:
    """Fill ``out`` with zeros; the other arguments are those of ATen's operators and are not read."""
    out.zero_()


@_writes(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(*shape: Any, out: Tensor, **geometry: Any) -> None:
    """Fill ``out`` with ones; the other arguments are those of ATen's operators and are not read."""
    out.fill_(1)


@_writes(aten.full.default, aten.full_like.default)
def full(shape: Any, value: float, *, out: Tensor, **geometry: Any) -> None:
    """Fill ``out`` with ``value``; the other arguments are those of ATen's operators and are not read."""
    out.fill_(value)


@_writes(aten.new_full.default)
def new_full(like: Tensor, shape: Any, value: float, *, out: Tensor, **geometry: Any) -> None:
    """Fill ``out`` with ``value``; the other arguments are those of ATen's operators and are not read."""
    out.fill_(value)


@_writes(aten.scalar_tensor.default)
def scalar_tensor(value: float, *, out: Tensor, **geometry: Any) -> None:
    """Write ``value`` to ``out``, a tensor of one element; the other arguments are not read."""
    out.fill_(value)


@_writes(
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def empty(*shape: Any, out: Tensor, **geometry: Any) -> None:
    """Leave ``out`` as it is; the other arguments are those of ATen's operators and are not read."""


@_writes(aten.add.Scalar)
def add_scalar(self: Tensor, other: float, alpha: float = 1, *, out: Tensor) -> None:
    """Write ``self + alpha * other`` to ``out``."""
    torch.add(self, other, alpha=alpha, out=out)


@_writes(aten.sub.Scalar)
def sub_scalar(self: Tensor, other: float, alpha: float = 1, *, out: Tensor) -> None:
    """Write ``self - alpha * other`` to ``out``."""
    torch.sub(self, other, alpha=alpha, out=out)


@_writes(aten.mul.Scalar)
def mul_scalar(self: Tensor, other: float, *, out: Tensor) -> None:
    """Write ``self * other`` to ``out``."""
    torch.mul(self, other, out=out)


@_writes(aten.div.Scalar)
def div_scalar(self: Tensor, other: float, *, out: Tensor) -> None:
    """Write ``self / other`` to ``out``."""
    torch.div(self, other, out=out)


@_writes(aten.relu.default)
def relu(self: Tensor, *, out: Tensor) -> None:
    """Write ``max(self, 0)`` to ``out``; ATen's own relu is a ``clamp_min`` too."""
    torch.clamp_min(self, 0, out=out)


@_writes(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(*bounds: float, out: Tensor, **geometry: Any) -> None:
    """Write ``torch.arange(*bounds)`` to ``out``; the other arguments are not read."""
    torch.arange(*bounds, out=out)


@_writes(aten._safe_softmax.default)
def safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None, *, out: Tensor) -> None:
    """Write the softmax along ``dim`` to ``out``, with zeros for rows that are minus infinity throughout.

    ``self`` is converted to ``dtype`` first, unless that is None.
    """
    aten._softmax.out(self if dtype is None else self.to(dtype), dim, False, out=out)
    out.masked_fill_(self.eq(-math.inf).all(dim, keepdim=True), 0)


@_writes(aten.sum.default)
def sum_all(self: Tensor, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    """Write the sum of all elements to ``out``."""
    torch.sum(self, [], dtype=dtype, out=out)


@_writes(aten.mean.default)
def mean_all(self: Tensor, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    """Write the mean of all elements to ``out``."""
    torch.mean(self, [], dtype=dtype, out=out)


@_writes(aten.binary_cross_entropy.default, lean=True)
def binary_cross_entropy(
    self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, *, out: Tensor
) -> None:
    """Write the loss of each element (reduction 0), or the mean (1) or sum (2) of all, to ``out``.

    For a mean or sum, ATen's own operator keeps every element's loss: in the storage of its result or, with ``out=``,
    in the memory that follows ``out``, where other storages may lie.
    """
    _by_element(aten.binary_cross_entropy, (self, target, weight), reduction, out=out)


@_writes(aten.huber_loss.default)
def huber_loss(self: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0, *, out: Tensor) -> None:
    """Write the loss of each element (reduction 0), or the mean (1) or sum (2) of all, to ``out``.

    ATen's own operator with ``out=`` writes every element's loss into the memory behind the result.
    """
    _by_element(aten.huber_loss, (self, target), reduction, delta, out=out)


@_writes(aten.mse_loss.default, lean=True)
def mse_loss(self: Tensor, target: Tensor, reduction: int = 1, *, out: Tensor) -> None:
    """Write the loss of each element (reduction 0), or the mean (1) or sum (2) of all, to ``out``.

    ATen's own operator first gives the result the size of its arguments, so that the result's storage, which with
    ``out=`` is the arena, grows by as much.
    """
    _by_element(aten.mse_loss, (self, target), reduction, out=out)


@_writes(aten.smooth_l1_loss.default, lean=True)
def smooth_l1_loss(self: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0, *, out: Tensor) -> None:
    """Write the loss of each element (reduction 0), or the mean (1) or sum (2) of all, to ``out``.

    ATen's own operator differs as for :func:`mse_loss`.
    """
    _by_element(aten.smooth_l1_loss, (self, target), reduction, beta, out=out)


@_writes(aten.soft_margin_loss.default, lean=True)
def soft_margin_loss(self: Tensor, target: Tensor, reduction: int = 1, *, out: Tensor) -> None:
    """Write the loss of each element (reduction 0), or the mean (1) or sum (2) of all, to ``out``.

    ATen's own operator keeps every element's loss in the result's storage.
    """
    _by_element(aten.soft_margin_loss, (self, target), reduction, out=out)


def _by_element(loss: Any, read: tuple[Any, ...], reduction: int, *settings: float, out: Tensor) -> None:
    """Write all losses of the elements (reduction 0), or their mean (1) or sum (2), to ``out``.

    Args:
        loss: an operator of ATen.
        read: the arguments of ``loss`` in front of the reduction.
        reduction: what is made of the losses, in ATen's numbers.
        settings: the arguments of ``loss`` behind the reduction.
        out: where the result goes.
    """
    if reduction == 0:
        loss.out(*read, 0, *settings, out=out)
    else:
        (torch.mean if reduction == 1 else torch.sum)(loss.default(*read, 0, *settings), [], out=out)


@_writes(aten.stack.default)
def stack(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor) -> None:
    """Copy every tensor to its slice of ``out`` along the new dimension ``dim``."""
    for slot, tensor in zip(out.unbind(dim), tensors, strict=True):
        slot.copy_(tensor)


@_writes(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(self: Tensor, mask: Tensor, value: Any, *, out: Tensor) -> None:
    """Copy ``self`` to ``out``, then fill ``out`` with ``value`` where ``mask`` is True."""
    out.copy_(self)
    out.masked_fill_(mask, value)


@_writes(aten.index_put.default)
def index_put(
    self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *, out: Tensor
) -> None:
    """Copy ``self`` to ``out``, then put ``values`` at ``indices`` of ``out``."""
    out.copy_(self)
    aten.index_put_.default(out, indices, values, accumulate)


@_writes(aten.slice_scatter.default)
def slice_scatter(
    self: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1,
    *, out: Tensor,
) -> None:  # fmt: skip
    """Copy ``self`` to ``out``, then overwrite one slice with ``source``."""
    out.copy_(self)
    aten.slice.Tensor(out, dim, start, end, step).copy_(source)


@_writes(aten.select_scatter.default)
def select_scatter(self: Tensor, source: Tensor, dim: int, index: int, *, out: Tensor) -> None:
    """Copy ``self`` to ``out``, then overwrite what lies at ``index`` of ``dim`` with ``source``."""
    out.copy_(self)
    out.select(dim, index).copy_(source)


@_writes(aten.diagonal_scatter.default)
def diagonal_scatter(
    self: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1, *, out: Tensor
) -> None:
    """Copy ``self`` to ``out``, then overwrite one diagonal with ``source``."""
    out.copy_(self)
    out.diagonal(offset, dim1, dim2).copy_(source)


@_writes(aten.as_strided_scatter.default)
def as_strided_scatter(
    self: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None,
    *, out: Tensor,
) -> None:  # fmt: skip
    """Copy ``self`` to ``out``, then overwrite an ``as_strided`` view with ``source``.

    Capture ensures that ``self`` starts its storage.
    """
    out.copy_(self)
    out.as_strided(size, stride, out.storage_offset() + (storage_offset or 0)).copy_(source)


@_writes(aten.as_strided_copy.default)
def as_strided_copy(
    self: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None, *, out: Tensor
) -> None:
    """Copy an ``as_strided`` view of ``self`` to ``out``; capture ensures that ``self`` starts its storage."""
    out.copy_(self.as_strided(size, stride, self.storage_offset() + (storage_offset or 0)))


@_writes(aten.slice_backward.default)
def slice_backward(
    grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int, *, out: Tensor
) -> None:
    """Fill ``out`` with zeros, and with ``grad`` in the slice that was taken in forward."""
    out.zero_()
    aten.slice.Tensor(out, dim, start, end, step).copy_(grad)


@_writes(aten.select_backward.default)
def select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int, *, out: Tensor) -> None:
    """Fill ``out`` with zeros, and with ``grad`` at ``index`` of ``dim``, which was taken in forward."""
    out.zero_()
    out.select(dim, index).copy_(grad)


@_writes(aten.constant_pad_nd.default)
def constant_pad_nd(self: Tensor, pad: Sequence[int], value: float = 0, *, out: Tensor) -> None:
    """Fill ``out`` with ``value``, then copy ``self`` to the part that is not padding; negative padding crops."""
    out.fill_(value)
    source, target = self, out
    for back, (before, after) in enumerate(zip(pad[0::2], pad[1::2], strict=True)):
        dim = self.dim() - 1 - back
        source = source.narrow(dim, max(-before, 0), self.size(dim) - max(-before, 0) - max(-after, 0))
        target = target.narrow(dim, max(before, 0), out.size(dim) - max(before, 0) - max(after, 0))
    target.copy_(source)


@_writes(aten.bernoulli.p)
def bernoulli(self: Tensor, p: float, *, generator: torch.Generator | None = None, out: Tensor) -> None:
    """Write ones with probability ``p``, else zeros, to ``out``: draws what ``torch.bernoulli(self, p)`` draws."""
    out.bernoulli_(p, generator=generator)


@_writes(aten.rand_like.default)
def rand_like(self: Tensor, *, out: Tensor, **geometry: Any) -> None:
    """Draw uniform numbers in [0, 1) into ``out`` from the default generator; no other argument is read."""
    out.uniform_(0, 1)


@_writes(aten.randn_like.default)
def randn_like(self: Tensor, *, out: Tensor, **geometry: Any) -> None:
    """Draw normal numbers with mean 0 and deviation 1 into ``out``; no other argument is read."""
    out.normal_(0, 1)


@_writes(dropout_mask, devices=CPU_ONLY)
def keep_some(size: Sequence[int], stride: Sequence[int], keep: float, *, out: Tensor, **geometry: Any) -> None:
    """Draw a dropout's mask into ``out``: True with probability ``keep``; no other argument is read."""
    out.bernoulli_(keep)


@_writes(aten.native_dropout.default, devices=CPU_ONLY, lean=True)
def native_dropout(self: Tensor, p: float, train: bool | None, *, out: tuple[Tensor, Tensor]) -> None:
    """Write the result and the mask of a dropout to ``out`` with the bits of ATen's CPU kernel.

    An element becomes 0 with probability ``p``. Like that kernel the function draws the mask, scales it in the dtype of
    ``self``, and multiplies. If ``train`` is False, it draws nothing: the mask is True, the result is ``self``.
    """
    result, mask = out
    if train is False:
        mask.fill_(True)
        result.copy_(self)
        return
    keep = 1.0 - p
    mask.bernoulli_(keep)
    result.copy_(mask)
    result.mul_(0.0 if keep == 0 else 1.0 / keep)
    torch.mul(self, result, out=result)


@_writes(aten.native_dropout_backward.default, devices=CPU_ONLY, lean=True)
def native_dropout_backward(grad: Tensor, mask: Tensor, scale: float, *, out: Tensor) -> None:
    """Write ``grad * mask * scale`` to ``out``, rounded as ATen's CPU kernel rounds it.

    ``out`` may be ``grad``: then the mask is converted to the dtype of ``grad`` piece by piece, else in ``out``.
    """
    if out.data_ptr() != grad.data_ptr() or out.is_neg() != grad.is_neg():
        out.copy_(mask)
        torch.mul(grad, out, out=out)
    else:
        for part, mask_part in zip(_pieces(out), _pieces(mask), strict=True):
            part.mul_(mask_part.to(part.dtype))
    out.mul_(scale)


PIECE = 1 << 18
"""Elements of one piece of a tensor: enough for every core, few enough to stay in the cache."""


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """The tensor in parts of about ``PIECE`` elements, the same parts for all of one shape."""
    if tensor.numel() <= PIECE:
        return (tensor,)
    dim, length = _longest(tensor)
    parts: Sequence[Tensor] = tensor.split(length, dim)
    return parts


def _longest(tensor: Tensor) -> tuple[int, int]:
    """The longest dimension of a large tensor, and the length of one piece along it."""
    size, dim = max((size, dim) for dim, size in enumerate(tensor.shape))
    return dim, max(1, PIECE * size // tensor.numel())


def piece_elements(tensor: Tensor) -> int:
    """Return the number of elements in the largest piece in which a kernel works through ``tensor``.

    That is about :data:`PIECE`, or all elements of a smaller tensor.
    """
    if tensor.numel() <= PIECE:
        return tensor.numel()
    dim, length = _longest(tensor)
    return tensor.numel() // tensor.shape[dim] * length


@_writes(aten.embedding.default)
def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False,
    *, out: Tensor,
) -> None:  # fmt: skip
    """Write the rows of ``weight`` at ``indices`` to ``out``; ATen's own embedding is an ``index_select`` too.

    The other arguments matter only for gradients and are not read.
    """
    torch.index_select(weight, 0, indices.reshape(-1), out=out.view(-1, weight.size(1)))


@_writes(aten.embedding_dense_backward.default, devices=CPU_ONLY)
def embedding_dense_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool, *, out: Tensor
) -> None:
    """Write the gradient of the table to ``out``: each row of ``grad`` is added to the row of its index.

    Rows are added in the order of ATen's CPU kernel. Narrow dtypes go through ``index_put_``, which rounds after every
    row as the operator does; ``index_add_`` would sum them in float32.
    """
    if scale_grad_by_freq or math.prod(grad.shape) == 0:
        out.copy_(aten.embedding_dense_backward.default(grad, indices, num_weights, padding_idx, scale_grad_by_freq))
        return
    rows, flat = grad.reshape(-1, grad.size(-1)), indices.reshape(-1)
    if padding_idx >= 0:
        not_padding = flat != padding_idx
        rows, flat = rows[not_padding], flat[not_padding]
    out.zero_()
    if out.dtype in WIDE:
        out.index_add_(0, flat, rows)
    else:
        out.index_put_((flat,), rows, accumulate=True)


@_writes(aten.im2col.default, lean=True)
def im2col(self: Tensor, *window: Sequence[int], out: Tensor) -> None:
    """Write the windows of ``self`` as columns to ``out``; ATen's own operator first copies its argument.

    ``window`` is kernel size, dilation, padding and stride, in this order, each as (height, width).
    """
    aten.im2col.out(self, *window, out=out)


@_writes(aten.col2im.default, lean=True)
def col2im(self: Tensor, size: Sequence[int], *window: Sequence[int], out: Tensor) -> None:
    """Add columns up to an image in ``out``; the result of ATen's own keeps a storage as large as its argument.

    ``size`` is that of the image. ``window`` is kernel size, dilation, padding and stride, in this order. All are
    (height, width).
    """
    aten.col2im.out(self, size, *window, out=out)


@_writes(aten._native_batch_norm_legit_functional.default, devices=CPU_ONLY)
def batch_norm_functional(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    training: bool, momentum: float, eps: float, *, out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Write a batch norm's result, mean, inverse deviation and new running mean and variance to ``out``.

    The old running statistics stay as they are.
    """
    result, mean, invstd, new_mean, new_var = out
    new_mean.copy_(running_mean)
    new_var.copy_(running_var)
    aten._native_batch_norm_legit.out(
        input, weight, bias, new_mean, new_var, training, momentum, eps, out=result, save_mean=mean, save_invstd=invstd
    )
