"""Models whose eager peak is easy to get wrong: edges, complex weights, many terms in a loss, scans, tied heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import Case, hf_labels


class GraphLayer(nn.Module):
    """Messages along edges, added up where they arrive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        sent = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
        arrived = torch.zeros_like(x).index_add_(0, target, sent)
        return x + F.relu(self.update(torch.cat([x, arrived], -1)))


class GraphNet(nn.Module):
    """Three layers over many edges, and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x)


class Spectral(nn.Module):
    """A convolution in the frequencies, by complex weights for the lowest of them."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.low, self.high = (nn.Parameter(torch.randn(width, width, modes, modes, 2) / width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        m, waves = self.modes, torch.fft.rfft2(x)
        low, high = torch.view_as_complex(self.low), torch.view_as_complex(self.high)
        out = torch.zeros_like(waves)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", waves[:, :, :m, :m], low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", waves[:, :, -m:, :m], high)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FourierNet(nn.Module):
    """A Fourier neural operator."""

    def __init__(self, width: int = 16, modes: int = 8) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.spectral = nn.ModuleList(Spectral(width, modes) for _ in range(3))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x)


class ActorCritic(nn.Module):
    """A trunk with two heads, and the loss of proximal policy optimisation."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, 8), nn.Linear(width, 1)

    def forward(self, seen: Tensor, action: Tensor, old: Tensor, advantage: Tensor, gain: Tensor) -> Tensor:
        hidden = self.trunk(seen)
        chances = torch.distributions.Categorical(logits=self.policy(hidden))
        ratio = (chances.log_prob(action) - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        surrogate = torch.min(ratio * advantage, clipped * advantage).mean()
        return 0.5 * F.mse_loss(self.value(hidden).squeeze(-1), gain) - surrogate - 0.01 * chances.entropy().mean()


class Attending(nn.Module):
    """Graph attention: scores along edges, a softmax over the edges that arrive at a node."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.values, self.head = nn.Linear(width, width), nn.Linear(width, 4)
        self.score = nn.Linear(2 * width, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for _ in range(2):
            h = self.values(x)
            scores = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1))).squeeze(-1)
            most = torch.full((len(x),), -1e9).scatter_reduce(0, target, scores, "amax")
            shares = (scores - most[target]).exp()
            total = torch.zeros(len(x)).scatter_add(0, target, shares)
            sent = h[source] * (shares / total[target])[:, None]
            x = torch.zeros_like(h).scatter_add(0, target[:, None].expand_as(sent), sent).relu()
        return self.head(x)


class Averaging(nn.Module):
    """Messages that nothing but their sum reads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for layer in self.layers:
            arrived = torch.zeros_like(x).index_add_(0, target, layer(x[source]))
            x = torch.layer_norm(x + arrived, x.shape[-1:])
        return x


def output_squared(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch).square().mean()


def output(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch)


def _graph_batch() -> tuple[Tensor, ...]:
    return torch.randn(2000, 32), torch.randint(0, 2000, (2, 20_000))


def _rollout(steps: int = 4096) -> tuple[Tensor, ...]:
    return torch.randn(steps, 32), torch.randint(0, 8, (steps,)), *(torch.randn(steps) for _ in range(3))


def _tokens(vocabulary: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, vocabulary, (2, length)),)


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(vocab_size=256, hidden_size=64, state_size=16, num_hidden_layers=2, use_cache=False)
    )


def _gemma() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=16_384, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, sliding_window=32, use_cache=False,
        )
    )  # fmt: skip


MODELS: dict[str, Case] = {
    "gnn": Case(GraphNet, _graph_batch, output_squared),
    "attending": Case(Attending, _graph_batch, output_squared),
    "averaging": Case(Averaging, _graph_batch, output_squared),
    "fno": Case(FourierNet, lambda: (torch.randn(4, 1, 64, 64),), output_squared),
    "ppo": Case(ActorCritic, _rollout, output),
    "mamba": Case(_mamba, _tokens(256, 32), hf_labels),
    "gemma3": Case(_gemma, _tokens(16_384, 128), hf_labels),
}
