"""oneDNN's matrix product as torch has it inside, but offers only in part: written into a given tensor.

On a CPU ``torch.mm`` in float32 calls MKL, which on AMD's processors takes two to four times as long as oneDNN, whose
product is in the same library (``libtorch_cpu``), exported but private. It is looked up by its C++ name and tried once;
where it is not as expected, :func:`product_into` says so and nobody calls it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from roamc.compat import FakeTensor, without_modes

MATMUL = "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff"
"""``void at::native::mkldnn_matmul(const Tensor& mat1, const Tensor& mat2, const Tensor& result, float beta, float
alpha)``, as GCC and Clang name it; in torch 2.11 to 2.13. ``result = alpha * mat1 @ mat2 + beta * result``."""

Product = Callable[[Tensor, Tensor, Tensor, float], None]
"""Writes ``first @ second + beta * out`` to its third argument; beta is 0 or 1."""


@functools.cache
def product_into() -> Product | None:
    """Return oneDNN's matrix product for float32 tensors on a CPU; None where torch or the processor does not have it.

    The result is a function of (first, second, out, beta) that writes ``first @ second + beta * out`` to ``out``; beta
    is 0 or 1. Tensors have 2 dimensions, or 3 with a batch in front, and none of size 0. ``first`` and ``second`` may
    have any strides; ``out`` is contiguous.
    """
    if not torch.backends.mkldnn.is_available() or not sys.platform.startswith("linux") or not _takes_this_processor():
        return None
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = getattr(ctypes.CDLL(str(path)), MATMUL)
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p,) * 3 + (ctypes.c_float,) * 2
    function.restype = None

    def product(first: Tensor, second: Tensor, out: Tensor, beta: float) -> None:
        _check(first, second, out)
        function(_reference(first), _reference(second), _reference(out), beta, 1.0)

    return product if _is_right(product) else None


def _takes_this_processor() -> bool:
    """Whether the C++ function takes any tensors here: it asks for AVX-512 or AVX-NE-CONVERT, whatever their type.

    Its exception could not leave it, and would end the process: this asks what the function itself asks.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _check(*tensors: Tensor) -> None:
    """Refuse what the C++ function would refuse: its exception could not leave it and would end the process.

    Raises:
        TypeError: a tensor is no dense float32 tensor in a CPU's memory.
        ValueError: the sizes are not those of a product, or one of them is 0.
    """
    for tensor in tensors:
        dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.dtype is torch.float32
        if not dense or isinstance(tensor, FakeTensor):
            raise TypeError(
                f"oneDNN's product takes float32 tensors on a CPU, not {type(tensor).__name__} {tensor.dtype}"
            )
    first, second, out = (tuple(tensor.shape) for tensor in tensors)
    fits = len(first) == len(second) in (2, 3) and first[:-2] == second[:-2] and first[-1] == second[-2]
    if not fits or 0 in first + second or out != (*first[:-1], second[-1]):
        raise ValueError(f"{first} by {second} into {out} is no product of matrices")


def _reference(tensor: Tensor) -> ctypes.Array[ctypes.c_void_p]:
    """A C++ ``const Tensor&``: the address of a word that holds the address of the tensor's implementation."""
    return (ctypes.c_void_p * 1)(tensor._cdata)


def _is_right(product: Product) -> bool:
    """Whether ``product`` agrees with torch on small whole numbers, whose products are exact in any order."""
    with without_modes(), torch.no_grad():  # planning happens under fake tensors
        first, second, start, fresh = (_numbers(size) for size in (5 * 24, 24 * 9, 5 * 9, 5 * 9))
        a, b, start, fresh = first.view(5, 24), second.view(9, 24).t(), start.view(5, 9), fresh.view(5, 9)
        added, batched = start.clone(), torch.stack([start, start])
        product(a, b, fresh, 0.0)
        product(a, b, added, 1.0)
        product(a.expand(2, 5, 24), b.expand(2, 24, 9), batched, 0.0)
        expected = a @ b
        return all(map(torch.equal, (fresh, added, batched), (expected, expected + start, expected.expand(2, 5, 9))))


def _numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32, device="cpu") % 7 - 3
