"""norms, a part of tempo: the input of a norm is made again from its output, which is there anyway.

    x  -->  y, mean, rstd = layer_norm(x, weight, bias)          x itself in the few columns that y does not tell
            dx, .. = layer_norm_backward(dy, x, mean, rstd, ..)  x = norm_input(these, y, mean, rstd, weight, bias)

The second technique of Tempo (Andoorveedu et al., NeurIPS 2022, section 3.2) divides by the weight in all columns. Here
a few of them wait, those where the weight is smallest beside the bias, so that a weight may be 0; and the step refuses
weights of which more are, see :mod:`roamc.operators.norm_inputs`. So x has its digits, up to those of y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import getitem

import torch
from torch import Tensor, fx

from roamc.graph.memory import fills_storage
from roamc.operators.norm_inputs import MOST, lost_columns, norm_input
from roamc.operators.table import Kind
from roamc.passes.retain.codecs.codec import Coding, Saved
from roamc.passes.retain.codecs.readings import readings
from roamc.units import Bytes

aten = torch.ops.aten

SHARE = 32
"""One column of so many waits as it is."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Norm(Coding):
    """A coding of inputs of a layer norm or RMS norm along the last dimension, which has a weight.

    Attributes:
        shape: of the inputs.
        dtype: of the inputs and outputs.
        centered: whether it is a layer norm, which subtracts a mean.
        biased: whether it has a bias.
    """

    error, serves = MOST, frozenset({Kind.NORM})

    shape: tuple[int, ...]
    dtype: torch.dtype
    centered: bool
    biased: bool

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the columns that wait."""
        return math.prod(self.shape[:-1]) * self._count * self.dtype.itemsize

    @property
    def shared(self) -> int:
        """How many parameters the norm has, by which its columns are told apart."""
        return 1 + self.biased

    def beside(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return output, mean and rstd of the norm that reads ``node``, its weight and bias, as far as there are."""
        norm = _norm(node)
        return () if norm is None else tuple(each for each in norm if each is not None)

    def encode(self, value: Tensor, /, *shared: Tensor) -> Tensor:
        """Return the columns of ``value`` that the output does not tell, [rows, count]."""
        rows = aten.view.default(value, [math.prod(self.shape[:-1]), self.shape[-1]])
        code: Tensor = aten.index_select.default(rows, 1, self._lost(*shared))
        return code

    def decode(self, code: Tensor, /, *beside: Tensor) -> Tensor:
        """Return the input, of whose norm ``beside`` are output, statistics and parameters."""
        result, *statistics = beside[: len(beside) - self.shared]
        parameters = beside[len(beside) - self.shared :]
        weight, bias = (*parameters, None)[:2]
        mean, rstd = statistics if self.centered else (None, *statistics)
        value: Tensor = norm_input(code, result, mean, rstd, weight, bias, self._lost(*parameters))
        return value

    @property
    def _count(self) -> int:
        return -(-self.shape[-1] // SHARE)

    def _lost(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        columns: Tensor = lost_columns(weight, bias, self._count, torch.finfo(self.dtype).eps)
        return columns


def fit(saved: Saved) -> Norm | None:
    """Return the coding of a contiguous value that a norm with a weight reads along its last dimension; else None.

    That only backwards of norms read it behind forward is seen by the kinds of these readers.
    """
    tensor, norm = saved.tensor, _norm(saved.node)
    if norm is None or tensor.dtype not in DTYPES or tensor.dim() < 2 or tensor.shape[-1] < 2 or not tensor.numel():
        return None
    result = norm[0].meta["val"]
    if not all(each.is_contiguous() and fills_storage(each) for each in (tensor, result)):
        return None
    if (result.dtype, result.shape) != (tensor.dtype, tensor.shape):
        return None
    return Norm(tuple(map(int, tensor.shape)), tensor.dtype, norm[1] is not None, norm[4] is not None)


_Parts = tuple[fx.Node, fx.Node | None, fx.Node, fx.Node, fx.Node | None]
"""Nodes of a norm: output, mean, rstd, weight, bias."""


def _norm(node: fx.Node) -> _Parts | None:
    """The first norm along the last dimension alone, with a weight, that reads ``node``, if all its parts are there."""
    for read in readings(node):
        call = read.call
        layer = call.target is aten.native_layer_norm.default
        if not layer and call.target is not aten._fused_rms_norm.default:
            continue
        value, sizes, weight, bias = (*call.args, None)[:4]
        same = read.argument.meta["val"].shape == node.meta["val"].shape and read.argument.meta["val"].is_contiguous()
        if value is not read.argument or not same or len(sizes) != 1 or weight is None:  # type: ignore[arg-type]
            continue
        picks = {pick.args[1]: read.outside(pick) for pick in call.users if pick.target is getitem}
        result, *statistics = (picks.get(at) for at in range(3 if layer else 2))
        parameters = [read.outside(each) for each in (weight, bias if layer else None) if each is not None]  # type: ignore[arg-type]
        if result is None or None in (*statistics, *parameters):
            continue
        mean, rstd = (None, *statistics)[-2:]
        return result, mean, rstd, *(*parameters, None)[:2]  # type: ignore[return-value]
    return None
