"""Codecs for tests, of what is there anyway: the input of a softplus from its output and one bit, or nearly none.

And that of a layer norm from all that the norm has made, its weight and its bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import roamc
from roamc.passes.retain.codecs import Codec, Coding, Kind, Saved
from roamc.passes.retain.codecs.bits import Bits, bits_of
from tests.graphs import aten

ERROR = 1e-5


def inverse(y: Tensor) -> Tensor:
    """The x of which ``y`` is the softplus."""
    result: Tensor = aten.log.default(aten.expm1.default(y))
    return result


def least(value: Tensor) -> Tensor:
    """A code of one element."""
    code: Tensor = aten.amin.default(value)
    return code


@dataclass(frozen=True)
class Unsoft(Coding):
    """Makes x from the output of its softplus and the least x."""

    error, serves, nbytes = ERROR, frozenset({Kind.SLOPE}), 4

    count: int

    def beside(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return (softened(node),)

    def encode(self, value: Tensor, /, *_: Tensor) -> Tensor:
        return least(value)

    def decode(self, code: Tensor, /, *beside: Tensor) -> Tensor:
        decoded: Tensor = aten.maximum.default(inverse(*beside), code)
        return decoded


@dataclass(frozen=True)
class Signed(Coding):
    """Makes x from the output of its softplus and its sign."""

    error, serves = ERROR, frozenset({Kind.SLOPE})

    mask: Bits

    @property
    def nbytes(self) -> int:
        return self.mask.nbytes

    def beside(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return (softened(node),)

    def encode(self, value: Tensor, /, *_: Tensor) -> Tensor:
        return self.mask.encode(aten.ge.Scalar(value, 0))

    def decode(self, code: Tensor, /, *beside: Tensor) -> Tensor:
        (y,) = beside
        x = aten.abs.default(inverse(y))
        decoded: Tensor = aten.where.self(self.mask.decode(code), x, aten.neg.default(x))
        return decoded


def softened(node: fx.Node) -> fx.Node:
    return next(user for user in node.users if user.target is aten.softplus.default)


def reads_slope(saved: Saved) -> bool:
    read = {read.reader.target for read in saved.early}, {read.reader.target for read in saved.late}
    return read == ({aten.softplus.default}, {aten.softplus_backward.default})


def fit_unsoft(saved: Saved) -> Unsoft | None:
    return Unsoft(saved.tensor.numel()) if reads_slope(saved) else None


def fit_signed(saved: Saved) -> Signed | None:
    return Signed(bits_of(saved.tensor)) if reads_slope(saved) else None


UNSOFT = Codec("unsoft", fit_unsoft, lossy=True)
SIGNED = Codec("signed", fit_signed, lossy=True)


@dataclass(frozen=True)
class Unnorm(Coding):
    """Makes the input of a layer norm from its output, statistics, weight and bias, and the least element."""

    error, serves, nbytes = ERROR, frozenset({Kind.NORM}), 4

    def beside(self, node: fx.Node) -> tuple[fx.Node, ...]:
        norm = normed(node)
        results = {user.args[1]: user for user in norm.users}
        return *(results[at] for at in range(3)), norm.args[2], norm.args[3]  # type: ignore[return-value]

    def encode(self, value: Tensor, /, *_: Tensor) -> Tensor:
        return least(value)

    def decode(self, code: Tensor, /, *beside: Tensor) -> Tensor:
        y, mean, rstd, weight, bias = beside
        x = aten.div.Tensor(aten.div.Tensor(aten.sub.Tensor(y, bias), weight), rstd)
        decoded: Tensor = aten.maximum.default(aten.add.Tensor(x, mean), code)
        return decoded


def normed(node: fx.Node) -> fx.Node:
    return next(user for user in node.users if user.target is aten.native_layer_norm.default)


def fit_unnorm(saved: Saved) -> Unnorm | None:
    read = {read.reader.target for read in saved.early}, {read.reader.target for read in saved.late}
    normal = {aten.native_layer_norm.default}, {aten.native_layer_norm_backward.default}
    return Unnorm() if read == normal else None


UNNORM = Codec("unnorm", fit_unnorm, lossy=True)


class Normed(nn.Module):
    """Linear layers with a layer norm behind each, of which the user keeps the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = layer(x)
            with roamc.keep():
                x = norm(x)
        return x


class Soft(nn.Module):
    """Linear layers with a softplus behind each, of which the user keeps the outputs if asked for."""

    def __init__(self, width: int = 64, layers: int = 4, keep: bool = True) -> None:
        super().__init__()
        self.layers, self.keep = nn.ModuleList(nn.Linear(width, width) for _ in range(layers)), keep

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.keep:
                with roamc.keep():
                    x = F.softplus(x)
            else:
                x = F.softplus(x)
        return x


def soft(*, keep: bool = True) -> tuple[Soft, Tensor]:
    torch.manual_seed(0)
    return Soft(keep=keep), torch.randn(512, 64)


def normal() -> tuple[Normed, Tensor]:
    torch.manual_seed(0)
    return Normed(), torch.randn(512, 64)
