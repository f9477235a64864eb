"""Small modules, each with one thing that a memory planner can get wrong. Table at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.end_to_end.helpers import noise, square


class Apply(nn.Module):
    """Linear, then a function of (module, tensor), then linear."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("mask", torch.arange(width) % 2 == 0)
        self.scale = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))


class Layers(nn.Sequential):
    """A model of our own: dynamo leaves the forward of torch's own classes alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


WIDE = 64


def wide() -> nn.Module:
    """Activations of 16 KiB for a batch of ``WIDE`` rows."""
    return Layers(nn.Linear(WIDE, WIDE), nn.GELU(), nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE))


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Tied(nn.Module):
    """One weight under two names, and one module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.mix = self.again = nn.Linear(8, 8)

    def forward(self, idx: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.mix(self.embed(idx)))))


class Buffers(nn.Module):
    """Buffers written in place, assigned anew, not persistent, and read after the write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.count += 1
        self.average.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        self.last = y.detach()[0] + self.last
        return y * self.count + self.average - self.last


class Outputs(nn.Module):
    """A nest of outputs: one saved for backward, one view of it, one given twice, a number and None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x).exp()
        return {"y": y, "nest": (y[:, :4], [y, (y * y).sum(1)]), "number": 3, "none": None}


def loss_of_outputs(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    assert out["number"] == 3
    assert out["none"] is None
    part, (whole, sums) = out["nest"]
    return part.sum() + (whole * out["y"]).mean() + sums.std()


class ViewOfInput(nn.Module):
    """Outputs that are the input, a view of it, and a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x.view(-1)[3:9], self.weight.t()[1:], x @ self.weight


def loss_of_views(model: nn.Module, x: Tensor) -> Tensor:
    same, part, rows, product = model(x)
    return same.sum() + part.prod() + rows.square().sum() + product.mean()


class Mutating(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        return self.linear(x) + x


def loss_of_mutating(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) + x.mean()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2.5 * grad * x * x  # not the true one: shows that this code is what runs


def in_place_on_slices(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 2:5] = m.scale[2:5] * x[:, 0:3]
    y[0] += 1
    y[:, ::2].mul_(2)
    return y


def view_of_view(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    inner = y.view(2, -1, 8).transpose(0, 2)[1:7].narrow(1, 0, 1)
    inner.add_(1)
    return y + inner.sum() + y.t().contiguous().t()


def rows_and_picks(m: Any, x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=1)
    a, b, *_ = first.unbind(1)
    values, places = x.sort(dim=1)
    top = x.topk(3, dim=1).values.sum(1, keepdim=True)
    joined = torch.cat([second, first], 1) + torch.stack([a, b], 1).sum(1, keepdim=True)
    return joined + values.gather(1, places) + top + x.cumsum(1)


def random_operators(m: Any, x: Tensor) -> Tensor:
    y = x + torch.rand_like(x) + torch.randn(8) * torch.randint(0, 3, (8,))
    return F.dropout(y, 0.3) + F.gumbel_softmax(y) + F.rrelu(x, training=True) + torch.bernoulli(x.detach().sigmoid())


def complex_numbers(m: Any, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * torch.polar(m.scale[:5].abs(), m.scale[:5]), n=8)


def constants(m: Any, x: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return torch.where(m.mask, x, table.repeat(2)) + torch.full((8,), float("-inf")).exp() + torch.arange(8) / 3


def expanded(m: Any, x: Tensor) -> Tensor:
    wide = m.scale.expand(x.shape[0], 3, 8)
    return torch.einsum("bk,bjk->bk", x, wide) + wide[:, 1].as_strided((x.shape[0], 8), (0, 1))


def scattered(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros(4, 8).index_add(0, torch.tensor([0, 2, 2, 3]), x)
    y[torch.tensor([1, 3]), torch.tensor([0, 5])] = x[0, :2]
    y = y.scatter_add(1, torch.arange(8).flip(0).expand(4, 8), x)
    return y.index_fill(1, torch.tensor([7]), 0.5) + y.roll(1, 0).flip(1)


def looped(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:1])
    rows = []
    for row in x.split(1):
        state = torch.tanh(row + state * m.scale)
        rows.append(state)
    return torch.cat(rows)


APPLIED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "relu in place": lambda m, x: F.relu(x, inplace=True),
    "add in place": lambda m, x: x.add_(m.scale).mul_(m.scale),
    "masked_fill in place": lambda m, x: x.masked_fill_(m.mask, 0.5),
    "in place on a saved tensor's twin": lambda m, x: (x.clone().mul_(3) * x.sigmoid()).sub_(x),
    "slice assignment": in_place_on_slices,
    "view of a view": view_of_view,
    "several results": rows_and_picks,
    "random operators": random_operators,
    "complex numbers": complex_numbers,
    "constants": constants,
    "expanded tensors": expanded,
    "autograd.Function": lambda m, x: Cube.apply(x),
    "detached part": lambda m, x: x * x.detach() + x.detach().max(),
    "no_grad part": lambda m, x: x + _no_grad(x),
    "integers": lambda m, x: x * (x.argmax(1, keepdim=True) % 3 + m.mask.long()),
    "double": lambda m, x: (x.double() @ m.scale.double().diag()).softmax(1).float(),
    "half": lambda m, x: (x.half() * m.scale.half()).float().logsumexp(1, keepdim=True) + x,
    "zero-size tensors": lambda m, x: torch.cat([x, x[:, :0]], 1) + x[:0].sum(),
    "reuse of one value": lambda m, x: x + x * x + (x + x).tanh() * x,
    "vmap": lambda m, x: torch.vmap(lambda row: row.outer(m.scale).sum(0))(x),
    "gradient in the forward": lambda m, x: x + torch.func.grad(lambda y: (y**3).sum())(x),
    "sliced dtype view": lambda m, x: x + x.detach().view(torch.int32)[:, :4].float().mean() * 1e-9,
    "scatter and index_put": scattered,
    "loop over steps": looped,
    "identity": lambda m, x: x,
}


def _no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.exp().sum(1, keepdim=True)


class ParametersOnly(nn.Module):
    """Gradients that are the tangent itself, that two parameters share, that are views, expanded or strided."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.twin = nn.Parameter(noise(4, 8)), nn.Parameter(noise(4, 8, seed=1))
        self.wide, self.scalar = nn.Parameter(noise(8, 4).t()), nn.Parameter(torch.tensor(0.5))
        self.strided = nn.Parameter(noise(8, 8, seed=2).t())
        self.row = nn.Parameter(noise(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        flat = (self.same + self.twin).view(-1) + self.wide.reshape(-1)[:1]
        return flat.view(4, 8) + (x @ self.strided) * self.scalar + self.row.expand(4, 8)


class OddNames(nn.Module):
    """Keys that are no Python names, and names that mean something to Python or to the emitted program."""

    def __init__(self) -> None:
        super().__init__()
        names = ["class", "a-b", "torch", "args", "arena", "0", "lr_0", "aten_mm", "bind", "\u00e4", "a b", "x'"]
        self.inside = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        self.lambda_ = nn.ParameterDict({"for": nn.Parameter(noise(8)), "step": nn.Parameter(noise(8, seed=1))})

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inside.values():
            x = module(x)
        return x * self.lambda_["for"] + self.lambda_["step"]


def weight_norm() -> nn.Module:
    return Layers(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh())


def with_hooks() -> nn.Module:
    model = Layers(nn.Linear(8, 8), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


@dataclass(frozen=True)
class Small:
    """A module, its batches and its loss.

    ``eager``: what torch.compile is compared with is eager; aot_eager itself is wrong.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor] = lambda: noise(4, 8)
    loss: Callable[..., Tensor] = square
    eager: bool = False


def frozen_part() -> nn.Module:
    model = Layers(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def unused_part() -> nn.Module:
    model = Layers(nn.Linear(8, 8), nn.Identity())
    model.register_parameter("idle", nn.Parameter(noise(3)))
    return model


SMALL: dict[str, Small] = {
    **{name: Small(lambda function=function: Apply(function)) for name, function in APPLIED.items()},
    "shared gradients": Small(ParametersOnly),
    "odd names": Small(OddNames),
    "weight norm": Small(weight_norm),
    "forward hooks": Small(with_hooks),
    "batch norm": Small(BatchNorm, lambda: noise(2, 3, 8, 8)),
    "channels last": Small(BatchNorm, lambda: noise(2, 3, 8, 8).to(memory_format=torch.channels_last)),
    "instance norm with statistics": Small(
        lambda: Layers(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)),
        lambda: noise(2, 3, 8, 8),
    ),
    "pooling and resizing": Small(
        lambda: Layers(
            nn.ConvTranspose2d(3, 4, 3), nn.MaxPool2d(2), nn.Upsample(scale_factor=1.5, mode="bilinear"),
            nn.AdaptiveAvgPool2d(3), nn.GroupNorm(2, 4), nn.PixelShuffle(2), nn.ReflectionPad2d(1), nn.AvgPool2d(3, 1),
        ),
        lambda: noise(2, 3, 8, 8),
    ),
    "attention": Small(
        lambda: Layers(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)), lambda: noise(2, 5, 8)
    ),
    "tied weights": Small(Tied, lambda: torch.tensor([[1, 2, 2, 9]])),
    "padded embedding": Small(
        lambda: Layers(nn.Embedding(10, 8, padding_idx=2), nn.Linear(8, 8)), lambda: torch.tensor([[1, 2, 2, 9]])
    ),
    "frozen parameters": Small(frozen_part),
    "unused parameter": Small(unused_part),
    "dropout": Small(lambda: Layers(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2))),
    "buffers": Small(Buffers, eager=True),
    "several outputs": Small(Outputs, loss=loss_of_outputs),
    "view of an input": Small(ViewOfInput, loss=loss_of_views),
    "input written to": Small(Mutating, lambda: noise(4, 8), loss_of_mutating),
    "strided input": Small(lambda: Layers(nn.Linear(8, 8)), lambda: noise(8, 12)[:, ::3].t()[:, :8]),
    "empty batch": Small(lambda: Layers(nn.Linear(8, 8), nn.ReLU()), lambda: noise(0, 8), loss=lambda m, x: m(x).sum()),
    "input with gradient": Small(lambda: Layers(nn.Linear(8, 8), nn.Tanh()), lambda: noise(4, 8).requires_grad_()),
    "module called twice": Small(
        lambda: Layers(nn.Linear(8, 8), nn.Tanh()), loss=lambda m, x: square(m, x) + square(m, m(x) * 2)
    ),
}  # fmt: skip
