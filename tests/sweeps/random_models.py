"""Random models from a number: nested blocks of most of what models are made of, on batches of odd shapes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_": lambda x: F.relu(x.clone(), inplace=True),
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "sin of exp": lambda x: torch.sin(torch.exp(x.clamp(max=2))),
    "glu": lambda x: F.glu(torch.cat([x, x.flip(-1)], -1)),
    "square": torch.square,
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(1),
    "roll": lambda x: torch.roll(x, 1, dims=1),
    "halves": lambda x: torch.cat(x.tensor_split(2, dim=-1)[::-1], -1),
    "transposed twice": lambda x: x.mT.contiguous().mT + x,
    "expanded": lambda x: x[:, :1].expand_as(x) * x,
    "strided": lambda x: F.pad(x[:, ::2], (0, 0, 0, x.shape[1] - (x.shape[1] + 1) // 2)),
    "unbound": lambda x: torch.stack(x.unbind(-1), -1),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "sorted": lambda x: x.sort(dim=-1).values,
    "cumulated": lambda x: x.cumsum(1) / (x.shape[1] + 1),
    "gathered": lambda x: x.gather(-1, x.argsort(dim=-1)),
}


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :1].mul_(0.5)
    y.add_(x.detach().mean())
    return y


def _filled(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., 1:] = x[..., :-1]
    y.masked_fill_(x > 1.5, 0.25)
    return y + x


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": _written,
    "fill": _filled,
    "addcmul_": lambda x: x.clone().addcmul_(x, x, value=0.1),
}


class Apply(nn.Module):
    """A function by its name in a table."""

    def __init__(self, table: dict[str, Callable[[Tensor], Tensor]], name: str) -> None:
        super().__init__()
        self.name, self.function = name, table[name]

    def extra_repr(self) -> str:
        return self.name

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Channels(nn.Module):
    """A module that wants channels second, on rows that have them last."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Plane(nn.Module):
    """A two-dimensional convolution and a pooling over rows taken for an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(self.conv(x.unsqueeze(1)), 3, stride=1, padding=1)
        return x + y.mean(1)


class Attention(nn.Module):
    """Self-attention with heads of their own, by torch's kernel or by hand."""

    def __init__(self, width: int, heads: int, causal: bool, by_hand: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.by_hand, self.dropout = heads, causal, by_hand, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.by_hand:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if self.causal:
                mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(mask, float("-inf"))
            y = F.dropout(scores.softmax(-1), self.dropout, self.training) @ v
        else:
            p = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    """The outputs of an RNN, GRU or LSTM of one or two layers."""

    def __init__(self, kind: type[nn.RNNBase], width: int, layers: int) -> None:
        super().__init__()
        self.cell = kind(width, width, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Averaged(nn.Module):
    """Subtracts a mean that it keeps in a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().sum((0, 1)).to(self.mean.dtype), 0.1)
        return x - self.mean


class Scaled(nn.Module):
    """Multiplies by a parameter of one element; another one is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.idle = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Checkpointed(nn.Module):
    """Its inner block runs again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Cast(nn.Module):
    """Its inner block runs under autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.inner(x)
        return y.to(x.dtype)


class Model(nn.Module):
    """Blocks one after the other, on a tensor or on a dictionary of them; the output has one number per row."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(width, 1)

    def forward(self, x: Tensor | dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
        if isinstance(x, dict):
            x, mask = x["rows"], x["mask"]
        for block in self.blocks:
            x = block(x)
        y = self.head(x).squeeze(-1)
        return y if mask is None else y.masked_fill(mask, 0)


@dataclass(frozen=True)
class Example:
    """A model and its batches; ``make`` gives it anew with the same weights."""

    seed: int
    make: Callable[[], nn.Module]
    batches: list[tuple[Any, ...]]
    adam: bool


class _Maker:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.width = self.draw.choice([1, 2, 4, 6, 8, 16, 32, 64])
        self.dtype = self.draw.choice(DTYPES)
        self.made: list[nn.Module] = []

    def block(self, depth: int = 0) -> nn.Module:
        """A block that keeps the shape; now and then one that is there already."""
        if self.made and self.draw.random() < 0.1:
            return self.draw.choice(self.made)
        makers = [self._plain, self._plain, self._norm, self._shape, self._mixing, self._small]
        if depth < 2:
            makers += [self._nested, self._nested]
        block = self.draw.choice(makers)(depth)
        self.made.append(block)
        return block

    def _plain(self, depth: int) -> nn.Module:
        inner = self.draw.choice([self.width, 2 * self.width, 3])
        act = Apply(ACTIVATIONS, self.draw.choice(list(ACTIVATIONS)))
        bias = self.draw.random() < 0.7
        return nn.Sequential(nn.Linear(self.width, inner, bias=bias), act, nn.Linear(inner, self.width, bias=bias))

    def _norm(self, depth: int) -> nn.Module:
        width = self.width
        affine = self.draw.random() < 0.7
        return self.draw.choice(
            [
                lambda: nn.LayerNorm(width, elementwise_affine=affine),
                lambda: nn.RMSNorm(width),
                lambda: Channels(nn.BatchNorm1d(width, affine=affine)),
                lambda: Channels(nn.GroupNorm(self._divisor(), width)),
                lambda: Channels(nn.InstanceNorm1d(width, affine=affine)),
            ]
        )()

    def _shape(self, depth: int) -> nn.Module:
        table = self.draw.choice([VIEWS, VIEWS, WRITES])
        return Apply(table, self.draw.choice(list(table)))

    def _mixing(self, depth: int) -> nn.Module:
        width, heads = self.width, self._divisor()
        causal, by_hand = self.draw.random() < 0.5, self.draw.random() < 0.5
        dropout = self.draw.choice([0.0, 0.3])
        kind = self.draw.choice([nn.RNN, nn.GRU, nn.LSTM])
        layers = self.draw.choice([1, 2])
        return self.draw.choice(
            [
                lambda: Attention(width, heads, causal, by_hand, dropout),
                lambda: Attention(width, heads, causal, by_hand, dropout),
                lambda: Channels(nn.Conv1d(width, width, 3, padding=1, groups=self.draw.choice([1, heads]))),
                lambda: Channels(nn.Conv1d(width, width, 1)),
                lambda: Plane(2),
                lambda: Recurrent(kind, width, layers),
            ]
        )()

    def _small(self, depth: int) -> nn.Module:
        return self.draw.choice([lambda: nn.Dropout(0.3), Scaled, lambda: Averaged(self.width)])()

    def _nested(self, depth: int) -> nn.Module:
        inner = nn.Sequential(*(self.block(depth + 1) for _ in range(self.draw.choice([1, 2, 3]))))
        kinds = [Residual, Residual, Checkpointed, nn.Sequential]
        if self.dtype is torch.float32:
            kinds.append(Cast)
        return self.draw.choice(kinds)(inner)

    def _divisor(self) -> int:
        return self.draw.choice([n for n in (1, 2, 4) if self.width % n == 0])

    def model(self) -> nn.Module:
        model = Model([self.block() for _ in range(self.draw.choice([1, 2, 3, 5]))], self.width).to(self.dtype)
        for parameter in model.blocks.parameters():
            parameter.requires_grad_(self.draw.random() < 0.85)
        return model.train(self.draw.random() < 0.85)

    def batches(self) -> list[tuple[Any, ...]]:
        shape = (self.draw.choice([0, 1, 2, 3, 5, 8, 8]), self.draw.choice([1, 2, 3, 7, 8, 32, 33]), self.width)
        form = self.draw.choice(["tensor", "tensor", "dictionary", "two"])
        return [self._batch(shape, form) for _ in range(2)]

    def _batch(self, shape: tuple[int, ...], form: str) -> tuple[Any, ...]:
        rows, mask = torch.randn(shape).to(self.dtype), torch.rand(shape[:2]) < 0.2
        if form == "dictionary":
            return ({"rows": rows, "mask": mask},)
        return (rows, mask) if form == "two" else (rows,)


def example(seed: int) -> Example:
    """The model of a number: the same one in every process."""

    def make() -> nn.Module:
        with generator_kept():
            torch.manual_seed(seed)
            return _Maker(seed).model()

    maker = _Maker(seed)
    with generator_kept():
        torch.manual_seed(seed)
        maker.model()
        batches = maker.batches()
    return Example(seed, make, batches, adam=maker.draw.random() < 0.5)


@contextlib.contextmanager
def generator_kept() -> Iterator[None]:
    """What draws inside leaves torch's random numbers outside as they are."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
