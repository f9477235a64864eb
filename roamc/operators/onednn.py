"""Matrix products in float32 on a CPU by oneDNN: operators of roamc's own, which pass ``products`` puts in place.

They take the arguments of ``aten.mm``, ``addmm`` and ``bmm`` and sum in another order than these, so they stand in a
program only with ``numerics="fast"``. Where torch has no such product, as in other builds, they call torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from roamc.compat import OpOverload
from roamc.compat_onednn import product_into
from roamc.operators.random import LIBRARY

aten = torch.ops.aten


def onednn_mm(self: Tensor, mat2: Tensor, *, out: Tensor) -> None:
    """Write ``self @ mat2``, a product of matrices, to ``out``, which must not overlap them.

    All tensors are float32 on a CPU, without a size of 0. ``out`` is contiguous and has the result's shape.

    Raises:
        TypeError: a tensor has another dtype, or is not on a CPU.
        ValueError: the shapes do not fit, or a size is 0.
    """
    product = product_into()
    if product is None:
        torch.mm(self, mat2, out=out)
    else:
        product(self, mat2, out, 0.0)


def onednn_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, out: Tensor) -> None:
    """Write ``self + mat1 @ mat2`` to ``out``; tensors and errors are as for :func:`onednn_mm`.

    ``self`` is broadcast to the shape of ``out``, and may be ``out`` itself; the other two must not overlap ``out``.
    """
    product = product_into()
    if product is None:
        torch.addmm(self, mat1, mat2, out=out)
        return
    if out.data_ptr() != self.data_ptr():
        out.copy_(self)
    product(mat1, mat2, out, 1.0)


def onednn_bmm(self: Tensor, mat2: Tensor, *, out: Tensor) -> None:
    """Write ``self @ mat2`` to ``out``, one product for each entry of the batch, the first dimension of all three.

    Tensors and errors are otherwise as for :func:`onednn_mm`.
    """
    product = product_into()
    if product is None:
        torch.bmm(self, mat2, out=out)
    else:
        product(self, mat2, out, 0.0)


def product_operator(original: OpOverload, writer: Callable[..., None], *devices: str) -> OpOverload:
    """Define and return the operator of ``torch.ops.roamc`` that has the name of ``writer``.

    It takes the positional arguments of ``original``, all tensors, and returns a new tensor into which ``writer`` has
    written. Its fake kernel is that of ``original``.

    Args:
        original: a product of ATen.
        writer: takes the same arguments and ``out``.
        devices: torch's dispatch keys of the devices on which it runs, such as "CPU".
    """
    names = [argument.name for argument in original._schema.arguments if not argument.kwarg_only]

    def empty(*args: Tensor) -> Tensor:
        first, second = args[-2:]
        return first.new_empty((*first.shape[:-1], second.shape[-1]))

    return defined(writer, names, empty, *devices, fake=original)


def defined(
    writer: Callable[..., None],
    names: Sequence[str],
    empty: Callable[..., Tensor],
    *devices: str,
    fake: Callable[..., Tensor] | None = None,
) -> OpOverload:
    """Define and return the operator of ``torch.ops.roamc`` that has the name of ``writer``, and gives one tensor.

    Args:
        writer: takes the arguments of the operator and ``out``, which it writes.
        names: of the arguments, which are tensors.
        empty: takes the same arguments and returns memory for the result.
        devices: torch's dispatch keys of the devices on which it runs, such as "CPU".
        fake: its fake kernel; None for ``empty``.
    """
    name = writer.__name__
    LIBRARY.define(f"{name}({', '.join(f'Tensor {argument}' for argument in names)}) -> Tensor")

    def allocated(*args: Tensor) -> Tensor:
        out = empty(*args)
        writer(*args, out=out)
        return out

    for device in devices:
        torch.library.impl(LIBRARY, name, device)(allocated)
    torch.library.register_fake(f"roamc::{name}", fake or empty, lib=LIBRARY)
    overload: OpOverload = getattr(torch.ops.roamc, name).default
    return overload


WRITERS: dict[OpOverload, Callable[..., None]] = {
    aten.mm.default: onednn_mm,
    aten.addmm.default: onednn_addmm,
    aten.bmm.default: onednn_bmm,
}
"""ATen's operator to the function that writes oneDNN's result for the same arguments to ``out``."""

ONEDNN: dict[OpOverload, OpOverload] = {
    original: product_operator(original, writer, "CPU") for original, writer in WRITERS.items()
}
"""ATen's operator to that of oneDNN; both take the same arguments, which are tensors of float32 on a CPU."""

KERNELS: dict[OpOverload, Callable[..., None]] = {ONEDNN[original]: writer for original, writer in WRITERS.items()}
"""Operator of this module to the function that writes its result to ``out``."""
