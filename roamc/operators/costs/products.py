"""Workspace of matrix products by oneDNN on a CPU: the buffers of its kernels, a set for each thread.

Read off the heap with torch 2.13 on a machine with AVX-512 for bfloat16: of 2,400 products of 1 to 8,192 rows and
columns, in order and transposed, none takes more than this formula says, and half of them take 0.85 of it or more.
Where oneDNN has no bfloat16, ATen's own kernels sum in float32. Products of float32 are MKL's, but for those that roamc
gives to oneDNN, and take nothing but the addresses of batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from roamc.compat_operators import onednn_takes, tensors_in
from roamc.operators.aligned import copied_bytes
from roamc.operators.call import Call, fakes, tensor_at
from roamc.operators.costs.arguments import in_order, is_half, matrix
from roamc.units import Bytes, rounded_up

ROWS, COLUMNS = 256, 64
"""Most rows and columns of the block of the result that a thread makes in one round."""

WIDE, TALL = 1024, 4096
"""Most columns, or rows, of a block that is made in several rounds over the depth."""

DEPTH = 512
"""Columns of the first factor read in one round; up to twice as many if its rows are contiguous and longer."""

PADDED = 32
"""Columns added to a copied block of the first factor."""

POINTERS: Bytes = 24
"""Bytes of the addresses of three matrices, which MKL is given for each product of a batch."""

LEAST = 400
"""Multiplications in a product of a batch from which the batch is given to MKL."""

SELF: Bytes = 28 << 10
"""Bytes that a product by oneDNN takes in any case."""

BLOCK_ROWS, BLOCK_DEPTH, BLOCK_PADDED, BLOCK_SUMS = 320, 1024, 16, 384
"""In float32: most rows and columns of a block of the first factor, columns added to it, most columns of sums."""

PAGE = 1024
"""Elements of float32: where rows of the second factor are a multiple of it apart, they meet in the cache; a copy."""


def workspace(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``mm``, ``addmm``, ``bmm`` and ``baddbmm``.

    Conjugated factors are copied. Batched products also copy factors whose strides the kernel does not read: in half
    precision all matrices of the batch at once, else one after the other.
    """
    first, second = _factors(call)
    conjugated = sum(factor.nbytes for factor in (first, second) if factor.is_conj())
    shared = shared_bytes(first, second, result) + conjugated
    if result.dim() < 3:
        return shared
    if result.itemsize > 2 and prod(result.shape[1:]) * first.shape[-1] >= LEAST:
        shared += POINTERS * result.shape[0]
    fits = in_order if _by_onednn(result) else matrix
    odd = [tensor for tensor in (first, second) if not fits(tensor)]
    together = result.shape[0] if _by_onednn(result) else 1
    return shared + sum(tensor.nbytes // tensor.shape[0] * together for tensor in odd)


def per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``mm``, ``addmm``, ``bmm`` and ``baddbmm``: oneDNN's buffers."""
    first, second = _factors(call)
    return thread_bytes(first, second, result)


def _factors(call: Call) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(fakes(call.args)) if tensor.dim() > 1][-2:]


def shared_bytes(first: torch.Tensor, second: torch.Tensor, result: torch.Tensor) -> Bytes:
    """Return the bytes that ``result = first [..., rows, depth] @ second [..., depth, columns]`` takes once.

    They do not depend on the number of threads. See :func:`thread_bytes` for what each thread takes.
    """
    if _by_onednn(result):
        return SELF
    return 4 * first.shape[-2] * second.shape[-1] if is_half(result) and first.stride(-1) != 1 else 0


def thread_bytes(first: torch.Tensor, second: torch.Tensor, result: torch.Tensor) -> Bytes:
    """Return the bytes that each thread takes beside :func:`shared_bytes`, which has the same arguments."""
    if not _by_onednn(result):
        return 0
    rows, depth, columns = first.shape[-2], first.shape[-1], second.shape[-1]
    contiguous = first.stride(-1) == 1
    most = 2 * DEPTH if contiguous and depth > 2 * DEPTH else DEPTH
    deep = min(rounded_up(depth, COLUMNS), most)
    copied = not contiguous or (rows >= WIDE and depth >= TALL)
    high, broad = min(rows, ROWS), min(rounded_up(columns, COLUMNS), COLUMNS)
    block = high * broad
    if copied and depth > deep:
        block = max(high * min(rounded_up(columns, COLUMNS), WIDE), min(rows, TALL) * broad)
    copy = 2 * high * (deep + PADDED) if copied else 0
    return copy + 2 * deep * COLUMNS + 4 * block


def _by_onednn(result: torch.Tensor) -> bool:
    """Whether torch's products that give ``result`` run in oneDNN on this machine; others are MKL's or ATen's own."""
    return result.dtype is torch.bfloat16 and onednn_takes(torch.bfloat16)


def by_vector(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``mv``: the sums in float32, in half precision and if columns lie side by side; else 0."""
    return 4 * result.numel() if is_half(result) and tensor_at(call, 0).stride(1) != 1 else 0


def onednn(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of a product in float32 by roamc's oneDNN operators.

    All matrices of a batch are copied at once if they are not contiguous.
    """
    if result.dim() < 3:
        return SELF
    return SELF + sum(tensor.nbytes for tensor in _factors(call) if not tensor.is_contiguous())


def onednn_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in a product in float32 by roamc's oneDNN operators, at most.

    It holds blocks of transposed factors and, for products that add to an argument, the sums of a block. Measured with
    1, 2 and 4 threads on 450 products of 1 to 4,096 on a side: three quarters of this in the median, and at most 0.1 MB
    for each thread more.
    """
    first, second = _factors(call)
    rows, depth = min(first.shape[-2], BLOCK_ROWS), min(first.shape[-1], BLOCK_DEPTH)
    left = 4 * rows * (depth + BLOCK_PADDED) if first.stride(-1) != 1 else 0
    right = 4 * COLUMNS * depth if second.stride(-1) != 1 or second.stride(-2) % PAGE == 0 else 0
    sums = 4 * rows * min(second.shape[-1], BLOCK_SUMS) if len(call.args) > 2 else 0
    return left + right + sums


def aligned(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of a product by roamc's operators for rows that are not aligned: copies."""
    first, second = _factors(call)
    return copied_bytes(first, second, result)


def trilinear(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of ``_trilinear``.

    torch takes one index of the unrolled dimension after the other: two batched products, of which the second reads the
    result of the first. Each copies its factors unless they lie in its order.
    """
    first, second = _pairs(call)
    one = first.copied + first.product.nbytes + shared_bytes(first.left, first.right, first.product)
    two = second.copied + second.product.nbytes + shared_bytes(second.left, second.right, second.product)
    return max(one, first.product.nbytes + two)


def trilinear_per_thread(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of each thread in ``_trilinear``."""
    return max(thread_bytes(pair.left, pair.right, pair.product) for pair in _pairs(call))


@dataclass(frozen=True)
class _Pair:
    """One batched product ``left [b, i, k] @ right [b, k, j]`` of tensors on the meta device.

    Attributes:
        left, right: the factors as the product reads them.
        product: the result, ``[b, i, j]`` in the dimensions of the factors before they were put in order.
        copied: bytes of copies and sums of the factors.
    """

    left: torch.Tensor
    right: torch.Tensor
    product: torch.Tensor
    copied: Bytes


def _pairs(call: Call) -> tuple[_Pair, _Pair]:
    """Return the two products for one index of the unrolled dimension of a call of ``_trilinear``."""
    tensors, expanded = [tensor_at(call, at) for at in range(3)], call.args[3:6]
    unrolled = call.args[7] if len(call.args) > 7 else 1
    operands = []
    for tensor, dims in zip(tensors, expanded, strict=True):
        operand = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for dim in sorted(dims):
            operand = operand.unsqueeze(dim)
        operands.append(operand.narrow(unrolled, 0, 1))
    first = _pair(operands[0], operands[1], [dim for dim in call.args[6] if dim in expanded[2]])
    return first, _pair(first.product, operands[2], [dim for dim in call.args[6] if dim not in expanded[2]])


def _pair(left: torch.Tensor, right: torch.Tensor, summed: list[int]) -> _Pair:
    """Return the product of two tensors of one rank, summed over ``summed``, with size 1 in these dimensions."""
    if not summed:
        return _Pair(left[None, None], right[None, None], left * right, 0)
    copied: Bytes = 0
    for dim in summed:
        if left.shape[dim] != 1 and right.shape[dim] == 1:
            left = left.sum(dim, keepdim=True)
            copied += left.nbytes
        elif right.shape[dim] != 1 and left.shape[dim] == 1:
            right = right.sum(dim, keepdim=True)
            copied += right.nbytes
    kept = [dim for dim in range(left.dim()) if dim not in summed]
    both = [dim for dim in kept if left.shape[dim] != 1 and right.shape[dim] != 1]
    own = [dim for dim in kept if left.shape[dim] != 1 and right.shape[dim] == 1]
    others = [dim for dim in kept if left.shape[dim] == 1]
    batch, rows = (prod(left.shape[dim] for dim in dims) for dims in (both, own))
    depth, columns = (prod(right.shape[dim] for dim in dims) for dims in (summed, others))
    first, second = left.permute(*both, *own, *summed, *others), right.permute(*both, *summed, *others, *own)
    factors = first.reshape(batch, rows, depth), second.reshape(batch, depth, columns)
    copied += sum(one.nbytes for one, seen in zip(factors, (first, second), strict=True) if not _views(seen, one.shape))
    product = torch.bmm(*factors)
    dims = range(left.dim())
    sizes = [1 if dim in summed else (right if dim in others else left).shape[dim] for dim in dims]
    order = [*both, *own, *summed, *others]
    placed = product.view([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(left.dim())])
    return _Pair(*factors, placed, copied)


def _views(tensor: torch.Tensor, shape: torch.Size) -> bool:
    """Whether ``tensor`` has ``shape`` without a copy."""
    try:
        tensor.view(shape)
    except RuntimeError:
        return False
    return True
