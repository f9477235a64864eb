"""compact: inputs of products that only gradients of weights read wait as random projections to fewer columns.

    forward     z  = x P            P [n, r] of N(0, 1 / r), another one in every step
    backward    x' = z P^T          read in the place of x:  dW = dY^T x P P^T, whose mean is that without the codec

This is the part of CompAct (arXiv 2410.15352, equation 3) that concerns activations, for models whose optimizer stays
as it is: the gradient keeps its shape, and its mean over P. One gradient is off by about sqrt((n + 1) / r) of itself.
Loss, and gradients of inputs and of all other parameters, keep their bits. With :class:`roamc.optim.CompAct` nothing is
decoded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, fx

from roamc.errors import OptionError, nearest
from roamc.graph import tensors_of
from roamc.graph.memory import fills_storage
from roamc.operators import ops
from roamc.operators.projection import BASES, COMPACT, columns_of, count, counted, is_rank
from roamc.operators.table import Kind
from roamc.passes.retain.codecs.codec import Codec, Coding, Read, Saved
from roamc.units import Bytes

aten = torch.ops.aten

RANK = 1 / 4
"""Columns of projections, as a share of n, where the options name none."""


@dataclass(frozen=True)
class Compact(Coding):
    """A coding of contiguous tensors whose rows, along the last dimension, are projected.

    All storages of one step that have as many columns share P.

    Attributes:
        shape: of the tensors.
        columns: those of a projection.
        dtype: of the tensors and their projections.
        device: likewise.
        basis: as for :func:`roamc.operators.projection.write_projection`.
    """

    serves = frozenset({Kind.WEIGHT})

    shape: tuple[int, ...]
    columns: int
    dtype: torch.dtype
    device: torch.device
    basis: str

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the projection."""
        return math.prod(self.shape[:-1]) * self.columns * self.dtype.itemsize

    @property
    def shared(self) -> int:
        """The count of steps."""
        return 1

    @property
    def error(self) -> float:
        """Of one gradient, as a share of its norm: sqrt((n + 1) / r) for a Gaussian basis, else sqrt(n / r - 1)."""
        n = self.shape[-1]
        return math.sqrt((n + 1) / self.columns if self.basis == BASES[0] else n / self.columns - 1)

    def beside(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the count of the program's steps; nothing where it does not count."""
        return tuple(node.graph.find_nodes(op="call_function", target=count))

    def encode(self, value: Tensor, /, *shared: Tensor) -> Tensor:
        """Return the projection of ``value``, [rows, columns]."""
        rows = aten.view.default(value, [math.prod(self.shape[:-1]), self.shape[-1]])
        code: Tensor = aten.mm.default(rows, self._projection(*shared))
        return code

    def decode(self, code: Tensor, /, *beside: Tensor) -> Tensor:
        """Return what ``code`` is in all columns."""
        rows = aten.mm.default(code, aten.t.default(self._projection(*beside)))
        value: Tensor = aten.view.default(rows, self.shape)
        return value

    def _projection(self, counter: Tensor) -> Tensor:
        size = self.shape[-1], self.columns
        p: Tensor = counted(counter, 0, 0, *size, self.basis, dtype=self.dtype, device=self.device)
        return p


def fit(saved: Saved, rank: float, basis: str) -> Compact | None:
    """Return the coding of a contiguous floating-point matrix, or batch of such, that products read in its rows.

    None for any other value, where the program does not count its steps, and where all columns are kept.

    Args:
        saved: the value, with its readers.
        rank: columns of projections, as a share of the value's up to 1, or as a number above 1.
        basis: as for :func:`roamc.operators.projection.write_projection`.
    """
    tensor = saved.tensor
    if tensor.dim() < 2 or not tensor.is_floating_point() or not tensor.is_contiguous() or not fills_storage(tensor):
        return None
    columns = columns_of(rank, int(tensor.shape[-1]))
    if columns >= tensor.shape[-1] or not all(_in_rows(read, int(tensor.shape[-1])) for read in saved.late):
        return None
    coding = Compact(tuple(map(int, tensor.shape)), columns, tensor.dtype, tensor.device, basis)
    return coding if coding.beside(saved.node) else None


def _in_rows(read: Read, columns: int) -> bool:
    """Whether ``read`` is that of a product over all rows of ``columns`` elements."""
    matrices = [tensor for _, tensor in tensors_of(read.argument)]
    return bool(ops.rule(read.reader.target).multiplies) and all(
        tensor.dim() == 2 and columns in tensor.shape for tensor in matrices
    )


def set_to(settings: Mapping[str, str]) -> Codec:
    """Return the codec with these settings: "rank", by default :data:`RANK`, and "basis", by default "gaussian".

    Raises:
        OptionError: names a setting that there is not, or that is out of its range.
    """
    for name in settings:
        if name not in ("rank", "basis"):
            raise OptionError(f"codecs: {COMPACT} has no setting {name!r}{nearest(name, ('rank', 'basis'))}")
    text, basis = settings.get("rank", str(RANK)), settings.get("basis", BASES[0])
    try:
        rank = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        rank = 0.0
    if not is_rank(rank):
        raise OptionError(
            f"codecs: the rank of {COMPACT} is a share of columns above 0 and up to 1, such as 0.25 or 1/4, or a "
            f"number of them above 1, not {text!r}"
        )
    if basis not in BASES:
        raise OptionError(
            f"codecs: the basis of {COMPACT} is {' or '.join(BASES)}, not {basis!r}{nearest(basis, BASES)}"
        )
    name = f"{COMPACT}:rank={rank:g}" + (f":basis={basis}" if basis != BASES[0] else "")
    return Codec(name, functools.partial(fit, rank=rank, basis=basis), lossy=True)


CODEC = Codec(COMPACT, functools.partial(fit, rank=RANK, basis=BASES[0]), lossy=True, set_to=set_to)
"""The codec as it stands in ``CODECS``; plans name it with its settings."""
