"""Random small models of the kinds that people write: for what holds at any size, planned in a moment each."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Layer = Callable[[Tensor], Tensor]
Built = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]
Draw = random.Random

SIZES = (1, 2, 3, 5, 8, 16, 17, 32, 64)
BATCHES = (1, 2, 3, 8, 32)


def small_model(seed: int) -> Built:
    """A model of some random layers, sizes 1 to 64, in training mode; its batch of 1 to 32; its loss.

    One in five has a frozen parameter. Where none is trained, the batch needs a gradient.
    """
    draw = Draw(seed)
    torch.manual_seed(seed)
    layers, x = draw.choice((_dense, _convolutional, _transformer, _embedded, _formula))(draw)
    model = Layers(layers)
    if draw.random() < 0.2:
        for parameter in list(model.parameters())[:1]:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        x.requires_grad_()
    return model.train(), (x,), draw.choice((square, cross_entropy))


def small_net() -> nn.Module:
    """The same weights at every call; it takes rows of 16 numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def square(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that depends on every element of the output."""
    return model(x).square().mean()


def cross_entropy(model: nn.Module, x: Tensor) -> Tensor:
    """As of a classifier, the first class being right."""
    scores = model(x).flatten(1)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


class Layers(nn.Module):
    """Modules and functions, one after the other."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = layers
        self.registered = nn.ModuleList(layer for layer in layers if isinstance(layer, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Residual(nn.Module):
    """``x + inner(x)``; added in place, or ``inner`` under a checkpoint."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner = inner
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpoint":
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x).add_(x) if self.kind == "in place" else x + self.inner(x)


class Attention(nn.Module):
    """Self-attention of (batch, places, width), by torch's function or by hand."""

    def __init__(self, width: int, heads: int, *, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if self.by_hand:
            y = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Noise(nn.Module):
    """Multiplied by random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


POINTWISE: tuple[Layer, ...] = (
    *(F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.elu, F.softplus),
    nn.Dropout(0.3),
    Noise(),
    lambda x: torch.relu_(x * 0.5),
    lambda x: x.mul(2).add_(1).clamp_(-1, 3),
    lambda x: x.reshape(-1).view(x.shape) + x.flip(-1),
    lambda x: torch.cat([x[..., :1], x[..., 1:] * 2], dim=-1),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x.softmax(-1) * x,
)
KINDS = ("", "in place", "checkpoint")


def _dense(draw: Draw) -> tuple[list[Layer], Tensor]:
    """A perceptron with norms, gates, residuals and shared layers."""
    batch, width = draw.choice(BATCHES), draw.choice(SIZES)
    x, layers = torch.randn(batch, width), list[Layer]()
    for _ in range(draw.randint(1, 5)):
        kind = draw.choice(("linear", "linear", "norm", "residual", "shared", "gate"))
        if kind == "linear":
            after = draw.choice(SIZES)
            layers.append(nn.Linear(width, after, bias=draw.random() < 0.7))
            width = after
        elif kind == "norm":
            layers.append(nn.BatchNorm1d(width) if batch > 1 and draw.random() < 0.5 else nn.LayerNorm(width))
        elif kind == "residual":
            layers.append(Residual(_perceptron(width), draw.choice(KINDS)))
        elif kind == "shared":
            layers += [linear := nn.Linear(width, width), draw.choice(POINTWISE), linear]
        else:
            layers += [nn.Linear(width, 2 * width), nn.GLU(dim=-1)]
        if draw.random() < 0.7:
            layers.append(draw.choice(POINTWISE))
    return layers, x


def _perceptron(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def _convolutional(draw: Draw) -> tuple[list[Layer], Tensor]:
    """Convolutions with norms and pooling, and a linear head."""
    batch, channels, side = draw.choice(BATCHES), draw.choice((1, 2, 3, 8)), draw.choice((8, 16))
    x, layers = torch.randn(batch, channels, side, side), list[Layer]()
    for _ in range(draw.randint(1, 2)):
        after = draw.choice((1, 2, 4, 8, 16))
        layers.append(nn.Conv2d(channels, after, size := draw.choice((1, 3)), padding=size // 2))
        channels = after
        layers.append(draw.choice((nn.BatchNorm2d(channels), nn.GroupNorm(1, channels), nn.InstanceNorm2d(channels))))
        layers += [draw.choice(POINTWISE), draw.choice((nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Dropout2d(0.2)))]
        if draw.random() < 0.3:
            layers.append(Residual(nn.Conv2d(channels, channels, 3, padding=1), draw.choice(KINDS)))
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, draw.choice(SIZES))], x


def _transformer(draw: Draw) -> tuple[list[Layer], Tensor]:
    """Blocks of attention and perceptrons."""
    heads = draw.choice((1, 2, 4))
    width = heads * draw.choice((1, 2, 4, 8, 16))
    return _blocks(draw, width, heads), torch.randn(draw.choice((1, 2, 4)), draw.choice(SIZES), width)


def _blocks(draw: Draw, width: int, heads: int) -> list[Layer]:
    layers = list[Layer]()
    for _ in range(draw.randint(1, 2)):
        mixed = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, by_hand=draw.random() < 0.5))
        kind = draw.choice(KINDS)
        layers += [Residual(mixed, kind), draw.choice(POINTWISE)]
        layers.append(Residual(nn.Sequential(nn.LayerNorm(width), _perceptron(width)), kind))
    return layers


def _embedded(draw: Draw) -> tuple[list[Layer], Tensor]:
    """Tokens, some blocks, and a head that may share the embedding's weight."""
    heads, classes = draw.choice((1, 2)), draw.choice((2, 8, 64))
    width = heads * draw.choice((2, 8, 32))
    embedding, head = nn.Embedding(classes, width), nn.Linear(width, classes, bias=False)
    if draw.random() < 0.5:
        head.weight = embedding.weight
    tokens = torch.randint(0, classes, (draw.choice(BATCHES), draw.choice((1, 4, 16))))
    return [embedding, *_blocks(draw, width, heads), head], tokens


def _formula(draw: Draw) -> tuple[list[Layer], Tensor]:
    """No module at all, or one linear layer behind functions."""
    x = torch.randn(draw.choice(BATCHES), draw.choice(SIZES))
    layers = [draw.choice(POINTWISE) for _ in range(draw.randint(1, 6))]
    return ([*layers, nn.Linear(x.shape[1], draw.choice(SIZES))] if draw.random() < 0.5 else layers), x
