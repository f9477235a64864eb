"""Workspace on a GPU: what torch's own kernels allocate beside their results. Measured on an H200 with torch 2.11.

Libraries take more: torch keeps about 33 MiB for cuBLAS on Hopper GPUs, allocated once, and cuDNN's convolutions choose
among algorithms that need more or less. Neither is known in advance.
"""

from __future__ import annotations

import functools
import math

import torch

from roamc.operators.call import Call, tensor_at
from roamc.operators.costs.arguments import computed_size, is_half
from roamc.units import Bytes, rounded_up

MULTIPROCESSORS, THREADS = 132, 2048
"""Of an H100: multiprocessors, and threads that each runs at a time; for plans without a GPU."""

BLOCK, WARP = 512, 32
"""Threads of the largest block in which ATen's reductions run, and of a warp."""

LEAST, MOST = 16, 256
"""Elements that a thread of a reduction adds up, if there are enough of them, and before several blocks share them."""

QUERIES = 128
"""Queries are padded to a multiple of it."""


def attention_gradient(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of fused attention backward: a number for each query, in float32.

    In half precision it is the gradient of the queries in float32 as well.
    """
    query = tensor_at(call, 1)
    *heads, length, width = query.shape
    return 4 * math.prod(heads) * rounded_up(length, QUERIES) * (1 + (width if is_half(query) else 0))


def staged_sums(call: Call, result: torch.Tensor) -> Bytes:
    """Workspace of a sum: what the blocks of a reduction leave, where several share a result.

    The rules are those of ATen's ``Reduce.cuh`` for results that lie side by side: a block has a column of threads for
    each, or for several of them, and several rows of threads that share its elements; what it leaves counts once for
    each column. Where the elements of one result lie side by side, the parts are a few kilobytes, and not counted.
    """
    operand, outputs = tensor_at(call, 0), result.numel()
    together = _results_of_a_thread(operand, _reduced(call, operand))
    if not together or not operand.numel():
        return 0
    columns, elements = outputs // together, operand.numel() // outputs
    most = BLOCK // together
    width = min(_power(columns, most), WARP)
    height = min(_power(elements, most), most // width)
    width = min(_power(columns, most), most // height)
    if elements < min(height * LEAST, MOST):
        return 0  # a thread adds up all elements of its results
    each, blocks = -(-elements // height), -(-columns // width)
    multiprocessors, threads = _device()
    at_once = multiprocessors * (threads // (width * height))
    if each < MOST or blocks > at_once:
        return 0
    sharing = max(min(-(-at_once // blocks), -(-each // LEAST)), -(-each // MOST))
    return 0 if sharing < 2 else computed_size(operand) * outputs * sharing * width * together


def _reduced(call: Call, operand: torch.Tensor) -> set[int]:
    """The dimensions that a call reduces."""
    dims = call.args[1] if len(call.args) > 1 else None
    if not isinstance(dims, int | list | tuple) or dims in ([], ()) or not operand.dim():
        return set(range(operand.dim()))
    return {at % operand.dim() for at in ([dims] if isinstance(dims, int) else dims)}


def _results_of_a_thread(operand: torch.Tensor, reduced: set[int]) -> int:
    """How many results a thread has, four at most; 0 where the elements of one result lie side by side in memory."""
    wide = [at for at in range(operand.dim()) if operand.shape[at] > 1]
    wide.sort(key=operand.stride)
    if not wide or wide[0] in reduced:
        return 0
    together, stride = 1, 1
    for at in wide:
        if at in reduced or operand.stride(at) != stride:
            break
        together *= operand.shape[at]
        stride *= operand.shape[at]
    return math.gcd(4, together)


def _power(number: int, most: int) -> int:
    """The largest power of two up to ``number``, and up to ``most``."""
    return min(1 << (number.bit_length() - 1), most)


@functools.cache
def _device() -> tuple[int, int]:
    """Multiprocessors of the GPU that is here, and threads of each; those of an H100 where there is none."""
    if not torch.cuda.is_available():
        return MULTIPROCESSORS, THREADS
    about = torch.cuda.get_device_properties(0)
    return about.multi_processor_count, about.max_threads_per_multi_processor
