"""Inputs of layer norms and RMS norms from their outputs, and the inputs themselves in the columns that lose them.

    lost = roamc.lost_columns(weight, bias, count, eps)        # int64[count]: where |bias / weight| is largest
    kept = x[:, lost]
    y, mean, rstd = layer_norm(x, weight, bias)
    x = roamc.norm_input(kept, y, mean, rstd, weight, bias, lost)

In column j an output y = weight[j] (x - mean) rstd + bias[j] leaves x with an error of about eps |bias[j] / weight[j]|
in units of 1 / rstd of its row, eps being the spacing of the numbers of y's dtype at 1; where the weight is 0, nothing
is left. (In units of its spread, a row has a larger error where that is far below 1 / rstd, by the norm's own eps.) The
``count`` columns with the largest ratio keep their inputs. Which they are follows from the parameters of the step.
Where the ratio of another column makes that error more than ``MOST``, the first operator raises a RuntimeError, in
forward, on a GPU an assertion of the device: no input is ever made up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from roamc.compat import OpOverload
from roamc.operators.random import LIBRARY
from roamc.units import Bytes

MOST = 2.0**-6
"""The largest error that an input may have by its output's rounding, in units of 1 / rstd of its row."""

PIECES = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Type of a device to the elements that are worked through at a time, as far as these are whole rows."""

WIDE = (torch.float32, torch.float64)
"""Dtypes that are worked through in place; others in float32."""

BYTES_OF_AN_ELEMENT: Bytes = 4
"""What :func:`write_norm_input` takes for each element of a piece of another dtype."""

BYTES_OF_A_COLUMN: Bytes = 48
"""What :func:`write_lost_columns` takes for each column, at most."""

LIBRARY.define("lost_columns(Tensor weight, Tensor? bias, int count, float spacing) -> Tensor")
LIBRARY.define(
    "norm_input(Tensor kept, Tensor result, Tensor? mean, Tensor rstd, Tensor weight, Tensor? bias, Tensor lost) "
    "-> Tensor"
)


def write_lost_columns(weight: Tensor, bias: Tensor | None, count: int, spacing: float, *, out: Tensor) -> None:
    """Write the columns whose inputs a norm's output tells worst to ``out``, int64[count].

    Args:
        weight: of the norm, ``[n]``.
        bias: likewise; None for a norm without.
        count: a number of columns below n.
        spacing: of the numbers of the output's dtype at 1, as ``torch.finfo`` gives it as eps.
        out: is written.

    Raises:
        RuntimeError: another column leaves its input with an error of more than :data:`MOST`; says how many do.
    """
    size = weight.float().abs()
    offset = torch.zeros_like(size) if bias is None else bias.float().abs()
    ratio = torch.where(size > 0, offset / size, torch.inf)
    order = torch.argsort(ratio, descending=True, stable=True)
    out.copy_(order[:count])
    limit = MOST / spacing
    fits = ratio[order[count]] <= limit
    says = (
        f"codecs='tempo' makes the input of a norm over {weight.numel()} columns from its output, but in more than "
        f"{count} of them the weight is 0 or below {1 / limit:.2g} of the bias: leave 'tempo' out"
    )
    if weight.is_cuda:
        torch.ops.aten._assert_async.msg(fits, says)
    elif not bool(fits):
        raise RuntimeError(says)


def write_norm_input(
    kept: Tensor,
    result: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lost: Tensor,
    *,
    out: Tensor,
) -> None:
    """Write the input of a norm along the last dimension, of n elements, to ``out``.

    Args:
        kept: the input in the columns ``lost``, ``[rows, count]``.
        result: the norm's output, ``[..., n]``, contiguous, as ``out``.
        mean: of every row, ``[..., 1]``; None for an RMS norm.
        rstd: the factor of every row, likewise.
        weight: of the norm, ``[n]``.
        bias: likewise; None for a norm without.
        lost: what ``lost_columns`` returned.
        out: is written; may be ``result``.
    """
    columns = weight.numel()
    rows, outputs = out.view(-1, columns), result.view(-1, columns)
    factor, center = rstd.reshape(-1, 1), None if mean is None else mean.reshape(-1, 1)
    step = piece_elements(out, columns) // columns
    for begin in range(0, len(rows), step):
        of = slice(begin, begin + step)
        piece = rows[of].copy_(outputs[of]) if out.dtype in WIDE else outputs[of].float()
        if bias is not None:
            piece.sub_(bias)
        piece.div_(weight).div_(factor[of])
        if center is not None:
            piece.add_(center[of])
        if out.dtype not in WIDE:
            rows[of].copy_(piece)
            del piece
    rows.index_copy_(1, lost, kept)


def piece_elements(result: Tensor, columns: int) -> int:
    """Return how many elements of ``result``, whose rows have ``columns``, are worked through at a time."""
    return min(max(1, PIECES[result.device.type] // columns), max(1, result.numel() // columns)) * columns


def launches(kept: Tensor, result: Tensor, columns: int, *, biased: bool, centered: bool) -> tuple[int, Bytes]:
    """Return how many kernels :func:`write_norm_input` launches, and the bytes that they move.

    Args:
        kept: as there.
        result: likewise; its rows have ``columns``.
        columns: of a row.
        biased: whether the norm has a bias.
        centered: whether it subtracts a mean.
    """
    wide = result.dtype in WIDE
    inside, outside = result.itemsize if wide else BYTES_OF_AN_ELEMENT, result.itemsize
    steps, copies = 2 + biased + centered, 1 if wide else 2
    pieces = -(-result.numel() // piece_elements(result, columns)) if result.numel() else 0
    each = 2 * inside * steps + (inside + outside) * copies
    return pieces * (steps + copies) + 1, each * result.numel() + 2 * kept.numel() * outside


@torch.library.impl(LIBRARY, "lost_columns", "CompositeExplicitAutograd")
def _lost_columns(weight: Tensor, bias: Tensor | None, count: int, spacing: float) -> Tensor:
    out = _fake_columns(weight, bias, count, spacing)
    write_lost_columns(weight, bias, count, spacing, out=out)
    return out


def _fake_columns(weight: Tensor, bias: Tensor | None, count: int, spacing: float) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=weight.device)


@torch.library.impl(LIBRARY, "norm_input", "CompositeExplicitAutograd")
def _norm_input(
    kept: Tensor, result: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, lost: Tensor
) -> Tensor:
    out = torch.empty_like(result)
    write_norm_input(kept, result, mean, rstd, weight, bias, lost, out=out)
    return out


def _fake_input(
    kept: Tensor, result: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None, lost: Tensor
) -> Tensor:
    return torch.empty_like(result)


torch.library.register_fake("roamc::lost_columns", _fake_columns, lib=LIBRARY)
torch.library.register_fake("roamc::norm_input", _fake_input, lib=LIBRARY)

lost_columns: OpOverload = torch.ops.roamc.lost_columns.default
"""``roamc::lost_columns(weight, bias, count, spacing)``: the columns that keep their inputs."""

norm_input: OpOverload = torch.ops.roamc.norm_input.default
"""``roamc::norm_input(kept, result, mean, rstd, weight, bias, lost)``: the input of a norm."""

KERNELS: dict[OpOverload, Callable[..., None]] = {lost_columns: write_lost_columns, norm_input: write_norm_input}
"""Operator of this module to the function that writes its result to ``out``."""
