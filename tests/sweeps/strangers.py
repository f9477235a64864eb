"""Models as strangers write them, built small by hand: situations that no other test has, each with how it trains.

Those with attention stand in :mod:`tests.sweeps.strangers_attention`, those of transformers in
:mod:`tests.sweeps.strangers_hf`, training loops in :mod:`tests.sweeps.strangers_loops`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

Loss = Callable[..., Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
After = Callable[[nn.Module, Sequence[torch.optim.Optimizer], int], None]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)


def nothing(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], turn: int) -> None:
    """What most loops do after a step."""


@dataclass(frozen=True)
class Stranger:
    """A model and how it is trained.

    Attributes:
        build: makes the model, with random weights.
        batch: draws a batch; a list of tensors as a tuple.
        loss: of the model and a batch.
        optimizer: makes the optimizer of ``loss``.
        more: losses with optimizers of their own that are stepped on the same batch next, as in a GAN.
        after: runs after each turn with model, optimizers and number of the turn.
        clip: norm to which gradients are clipped.
        limits: way in to a regular expression of what is said there instead of "same": a documented limit.
        numerics: option of that name; "fast" may give other last bits.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    loss: Loss
    optimizer: MakeOptimizer = adamw
    more: tuple[tuple[Loss, MakeOptimizer], ...] = ()
    after: After = nothing
    clip: float | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    numerics: str = "exact"


def images(count: int = 4, side: int = 16, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, side, side)


def mean_square(model: nn.Module, *batch: Any) -> Tensor:
    return model(*batch).square().mean()


def classes(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def towards(model: nn.Module, *batch: Any) -> Tensor:
    """The last of the batch is what the output should be."""
    return F.mse_loss(model(*batch[:-1]), batch[-1])


def labelled(*shape: int, number: int = 10) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape), torch.randint(0, number, shape[:1]))


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.Flatten())
        self.mean, self.spread = nn.Linear(512, 16), nn.Linear(512, 16)
        self.decoder = nn.Sequential(
            nn.Linear(16, 512), nn.Unflatten(1, (32, 4, 4)), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        z = torch.distributions.Normal(self.mean(h), F.softplus(self.spread(h)) + 1e-3)
        kl = torch.distributions.kl_divergence(z, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
        return self.decoder(z.rsample()), kl


def elbo(model: nn.Module, x: Tensor) -> Tensor:
    y, kl = model(x)
    return F.binary_cross_entropy(y, x, reduction="sum") / len(x) + kl


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = mlp(8, 64, 64), nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.actor(h), self.critic(h).squeeze(-1)


def ppo(model: nn.Module, x: Tensor, action: Tensor, before: Tensor, gain: Tensor, reward: Tensor) -> Tensor:
    logits, value = model(x)
    policy = torch.distributions.Categorical(logits=logits, validate_args=False)
    ratio = (policy.log_prob(action) - before).exp()
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return -surrogate.mean() + 0.5 * F.mse_loss(value, reward) - 0.01 * policy.entropy().mean()


def rollout() -> tuple[Tensor, ...]:
    n = 256
    return torch.randn(n, 8), torch.randint(0, 4, (n,)), -torch.rand(n), torch.randn(n), torch.randn(n)


class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.score = nn.Linear(16, 32), nn.Linear(32, 10), nn.Linear(64, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h, (source, target) = self.first(x), edges.unbind()
        score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], 1))).squeeze(1)
        top = torch.full((len(x),), -1e9).scatter_reduce(0, target, score.detach(), "amax")
        weight = (score - top[target]).exp()
        weight = weight / torch.zeros(len(x)).index_add(0, target, weight)[target]
        h = torch.zeros_like(h).index_add(0, target, weight[:, None] * h[source])
        return self.second(F.elu(h))


def graph_nodes() -> tuple[Tensor, ...]:
    return torch.randn(200, 16), torch.randint(0, 200, (2, 1000)), torch.randint(0, 10, (200,))


def node_classes(model: nn.Module, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x, edges), labels)


def norms() -> nn.Module:
    weight, spectral = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    return nn.Sequential(
        weight(nn.Conv2d(3, 8, 3, padding=1)), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        spectral(nn.Conv2d(8, 8, 3, padding=1)), nn.GroupNorm(2, 8), nn.SiLU(inplace=True),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.LocalResponseNorm(3),
        nn.AvgPool2d(4), nn.Flatten(), nn.RMSNorm(128), weight(nn.Linear(128, 64)), nn.LayerNorm(64),
        spectral(nn.Linear(64, 10)),
    )  # fmt: skip


class Int8Lora(nn.Module):
    """A frozen weight of 8-bit numbers with a scale per row, and a trained update of rank 4."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (n, n), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(n, 1) / 1000)
        self.a, self.b = nn.Linear(n, 4, bias=False), nn.Linear(4, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).t() + 2.0 * self.b(self.a(F.dropout(x, 0.1)))


class Learner(nn.Module):
    """MAML: the loss after one inner step on other data, through that step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 32, 32, 1)

    def forward(self, x: Tensor, y: Tensor, later_x: Tensor, later_y: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        inner = F.mse_loss(functional_call(self.net, weights, (x,)), y)
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        return F.mse_loss(functional_call(self.net, weights, (later_x,)), later_y)


def itself(model: nn.Module, *batch: Any) -> Tensor:
    """The model gives its loss."""
    return model(*batch)


class VQVAE(nn.Module):
    codes: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 16, 4, 4), nn.ConvTranspose2d(16, 3, 4, 4)
        self.register_buffer("codes", torch.randn(32, 16))
        self.register_buffer("counts", torch.ones(32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        flat = z.permute(0, 2, 3, 1).reshape(-1, 16)
        nearest = torch.cdist(flat.detach(), self.codes).argmin(1)
        code = F.embedding(nearest, self.codes).view(len(x), 4, 4, 16).permute(0, 3, 1, 2)
        with torch.no_grad():
            of = F.one_hot(nearest, 32).to(flat.dtype)
            self.counts.mul_(0.99).add_(of.sum(0), alpha=0.01)
            self.codes.mul_(0.99).add_(of.t() @ flat / (of.sum(0)[:, None] + 1), alpha=0.01)
        return self.decoder(z + (code - z).detach()), F.mse_loss(z, code.detach())


def vq_loss(model: nn.Module, x: Tensor) -> Tensor:
    y, commitment = model(x)
    return F.mse_loss(y, x) + 0.25 * commitment


class DLRM(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(500, 16, mode="sum", sparse=sparse) for _ in range(3))
        self.bottom, self.top = mlp(13, 32, 16), mlp(16 + 6, 32, 1)

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(i, offsets) for table, i in zip(self.tables, ids.unbind(), strict=True))], 1)
        pairs = torch.bmm(rows, rows.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, -1).unbind()
        return self.top(torch.cat([x, pairs[:, i, j]], 1)).squeeze(1)


def clicks() -> tuple[Tensor, ...]:
    return torch.randn(64, 13), torch.randint(0, 500, (3, 256)), torch.arange(0, 256, 4), torch.rand(64).round()


def click_loss(model: nn.Module, dense: Tensor, ids: Tensor, offsets: Tensor, clicked: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(dense, ids, offsets), clicked)


class Reversible(torch.autograd.Function):
    """Two residual halves; backward computes their inputs again from the outputs, with autograd inside."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: nn.Module, g: nn.Module, *_: Tensor) -> tuple[Tensor, Tensor]:
        c = a + f(b)
        d = b + g(c)
        ctx.halves = f, g
        ctx.save_for_backward(c.detach(), d.detach())
        return c, d

    @staticmethod
    def backward(ctx: Any, dc: Tensor, dd: Tensor) -> tuple[Tensor | None, ...]:
        (f, g), (c, d) = ctx.halves, ctx.saved_tensors
        with torch.enable_grad():
            c = c.detach().requires_grad_()
            of_g = g(c)
            more, *g_grads = torch.autograd.grad(of_g, [c, *g.parameters()], dd)
            b = (d - of_g).detach().requires_grad_()
            dc = dc + more
            more, *f_grads = torch.autograd.grad(f(b), [b, *f.parameters()], dc)
        return dc, dd + more, None, None, *f_grads, *g_grads


class RevNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(mlp(16, 64, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        for f, g in zip(self.halves[::2], self.halves[1::2], strict=True):
            a, b = Reversible.apply(a, b, f, g, *f.parameters(), *g.parameters())
        return torch.cat([a, b], -1)


class FNO(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.past = nn.Linear(1, 8), nn.Linear(8, 1), nn.Conv2d(8, 8, 1)
        self.spectrum = nn.Parameter(torch.randn(8, 8, 4, 4, 2) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).permute(0, 3, 1, 2)
        modes = torch.fft.rfft2(x)
        kept = torch.einsum("bixy,ioxy->boxy", modes[..., :4, :4], torch.view_as_complex(self.spectrum))
        out = torch.zeros_like(modes)
        out[..., :4, :4] = kept
        return self.leave(F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.past(x)).permute(0, 2, 3, 1))


def under_autocast(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(x), labels)


def small_convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.GELU(),
        nn.Flatten(), nn.LayerNorm(1024), nn.Linear(1024, 64), nn.Softmax(-1), nn.Linear(64, 10),
    )  # fmt: skip


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(32, 64, 10), mlp(32, 128, 10).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


def distillation(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    mine, theirs = model(x)
    soft = F.kl_div(F.log_softmax(mine / 2, -1), F.softmax(theirs / 2, -1), reduction="batchmean")
    return F.cross_entropy(mine, labels) + 4 * soft


def triplet(model: nn.Module, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
    return F.triplet_margin_loss(model(anchor), model(near), model(far))


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(nn.Conv2d(3, 8, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), mlp(32, 6))
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.where(x).view(-1, 2, 3) + torch.eye(2, 3), x.shape, align_corners=False)
        return self.net(F.grid_sample(x, grid, align_corners=False))


class GaussianProcess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.length, self.noise, self.features = (
            nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(())), mlp(4, 16, 4),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The negative marginal likelihood."""
        x = self.features(x) * self.length.exp()
        kernel = torch.exp(-0.5 * torch.cdist(x, x).square()) + (F.softplus(self.noise) + 0.01) * torch.eye(len(x))
        low = torch.linalg.cholesky(kernel)
        solved = torch.cholesky_solve(y[:, None], low)
        return 0.5 * (y @ solved).sum() + low.diagonal().log().sum()


class NeRF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3 * 13, 64, 64, 4)

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        depth = torch.linspace(0.0, 1.0, 16)
        depth = depth + torch.rand(len(origin), 16) / 16
        x = origin[:, None] + depth[..., None] * direction[:, None]
        waves = [f(2.0**i * x) for i in range(6) for f in (torch.sin, torch.cos)]
        color, density = self.net(torch.cat([x, *waves], -1)).split([3, 1], -1)
        alpha = 1 - torch.exp(-F.relu(density.squeeze(-1)) * torch.diff(depth, append=depth[:, -1:] + 0.1))
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return ((alpha * clear)[..., None] * color.sigmoid()).sum(1)


class Flow(nn.Module):
    """Glow: an invertible product, then a coupling, with their log determinants."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.ParameterList(nn.init.orthogonal_(torch.empty(8, 8)) for _ in range(3))
        self.nets = nn.ModuleList(mlp(4, 32, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """The negative log likelihood."""
        total = torch.zeros(len(x))
        for mix, net in zip(self.mixes, self.nets, strict=True):
            a, b = (x @ mix).chunk(2, 1)
            shift, scale = net(a).chunk(2, 1)
            x = torch.cat([a, b * scale.tanh().exp() + shift], 1)
            total = total + torch.linalg.slogdet(mix)[1] + scale.tanh().sum(1)
        return -(torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(1) + total).mean()


class FakeQuantized(nn.Module):
    """Quantisation-aware training: observers that move their range in forward, and a straight-through round."""

    low: Tensor
    high: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 64, 10)
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))

    def rounded(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.low.lerp_(x.min(), 0.1)
            self.high.lerp_(x.max(), 0.1)
        scale = (self.high - self.low) / 255
        zero = (-self.low / scale).round().clamp(0, 255)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero.to(torch.int32), 0, 255)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        scale = weight.detach().abs().amax((1, 2, 3)) / 127
        weight = torch.fake_quantize_per_channel_affine(weight, scale, torch.zeros(8, dtype=torch.int32), 0, -128, 127)
        x = self.rounded(F.relu(F.conv2d(self.rounded(x), weight, self.conv.bias, padding=1)))
        return self.head(F.max_pool2d(x, 2).flatten(1))


SPARSE = "sparse"
DOUBLE = "double backward"
IN_EAGER = "^above"
"""The guide: what torch.compile runs in eager, as at a graph break in a loop, keeps no budget and is in no plan."""
THREE = ("train_step", "optimize", "compile")

BY_HAND: dict[str, Stranger] = {
    "vae": Stranger(VAE, lambda: (images(8),), elbo),
    "ppo": Stranger(ActorCritic, rollout, ppo, clip=0.5),
    "gnn": Stranger(GraphAttention, graph_nodes, node_classes),
    "norms": Stranger(norms, labelled(4, 3, 16, 16), classes, sgd),
    "qlora": Stranger(
        lambda: nn.Sequential(Int8Lora(64), nn.GELU(), Int8Lora(64)), lambda: (torch.randn(64, 64),), mean_square
    ),
    "maml": Stranger(
        Learner, lambda: tuple(torch.randn(32, n) for n in (4, 1, 4, 1)), itself, sgd,
        limits={"optimize": DOUBLE, "compile": DOUBLE},
    ),
    "vqvae": Stranger(VQVAE, lambda: (images(8),), vq_loss),
    "dlrm": Stranger(DLRM, clicks, click_loss, sgd),
    "dlrm_sparse": Stranger(
        lambda: DLRM(sparse=True), clicks, click_loss, lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        limits=dict.fromkeys(THREE, SPARSE),
    ),
    "revnet": Stranger(
        RevNet, lambda: (torch.randn(128, 32),), mean_square, limits={"optimize": IN_EAGER, "compile": IN_EAGER}
    ),
    "fno": Stranger(FNO, lambda: (torch.randn(2, 16, 16, 1), torch.randn(2, 16, 16, 1)), towards),
    "amp_bf16": Stranger(small_convnet, labelled(8, 3, 16, 16), under_autocast),
    "distil": Stranger(Distilled, labelled(64, 32), distillation),
    "triplet": Stranger(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 16)),
        lambda: tuple(images(8) for _ in range(3)), triplet,
    ),
    "stn": Stranger(SpatialTransformer, labelled(4, 3, 16, 16), classes),
    "gp": Stranger(GaussianProcess, lambda: (torch.randn(48, 4), torch.randn(48)), itself),
    "nerf": Stranger(NeRF, lambda: tuple(torch.randn(64, 3) for _ in range(3)), towards),
    "flow": Stranger(Flow, lambda: (torch.randn(128, 8),), itself),
    "qat": Stranger(FakeQuantized, labelled(4, 3, 16, 16), classes, sgd),
}  # fmt: skip
