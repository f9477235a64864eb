"""Models with attention as strangers write them, small: diffusion, detection, packed documents, preferences."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from tests.models import NanoGPT
from tests.sweeps.strangers import THREE, Stranger, images, mean_square, mlp, towards


class Residual(nn.Module):
    """A block of a diffusion U-Net: two convolutions, a time, and a 1×1 convolution past them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(32, after)
        self.norm2, self.conv2 = nn.GroupNorm(4, after), nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.dropout(F.silu(self.norm2(h)), 0.1, self.training))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.down, self.middle, self.up = Residual(16, 32), Residual(32, 32), Residual(32 + 16, 16)
        self.shrink, self.attention = nn.Conv2d(32, 32, 3, 2, 1), nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(torch.arange(8) * -1.0)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        skip = self.enter(x)
        h = self.middle(self.shrink(self.down(skip, time)), time)
        flat = h.flatten(2).transpose(1, 2)
        h = h + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).reshape(h.shape)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        return self.leave(F.silu(self.up(torch.cat([h, skip], 1), time)))


def noised() -> tuple[Tensor, ...]:
    return images(2), torch.rand(2) * 100, torch.randn(2, 3, 16, 16)


class Attention(nn.Module):
    """Self-attention under a mask of documents, or by flex_attention."""

    def __init__(self, flex: bool = False) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)
        self.flex = flex

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.flex:
            y = flex_attention(q, k, v)
        else:
            mask = (documents[:, :, None] == documents[:, None]).tril()[:, None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(x + y.transpose(1, 2).flatten(2))


def documents() -> tuple[Tensor, ...]:
    return torch.randint(0, 64, (2, 32)), (torch.rand(2, 32) < 0.2).cumsum(1)


def next_in_document(model: nn.Module, tokens: Tensor, documents: Tensor) -> Tensor:
    logits = model(tokens, documents)
    goal = tokens[:, 1:].masked_fill(documents[:, 1:] != documents[:, :-1], -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), goal.flatten())


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]


class DiT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.patches, self.leave, self.time = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 48), mlp(1, 32, 32)
        self.tables = nn.ModuleList(nn.Linear(32, 6 * 32) for _ in range(layers))
        self.attention = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(layers))
        self.mlps = nn.ModuleList(mlp(32, 64, 32) for _ in range(layers))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, time = self.patches(x).flatten(2).transpose(1, 2), self.time(t[:, None])
        for table, attention, perceptron in zip(self.tables, self.attention, self.mlps, strict=True):
            s1, c1, g1, s2, c2, g2 = table(F.silu(time)).chunk(6, -1)
            y = modulated(h, s1, c1)
            h = h + g1[:, None] * attention(y, y, y, need_weights=False)[0]
            h = h + g2[:, None] * perceptron(modulated(h, s2, c2))
        return F.pixel_shuffle(self.leave(h).transpose(1, 2).unflatten(-1, (4, 4)), 4)


class JointBlock(nn.Module):
    """Stable Diffusion 3: words and patches with weights of their own and one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Linear(32, 3 * 32) for _ in range(2))
        self.qkv, self.out = (nn.ModuleList(nn.Linear(32, n) for _ in range(2)) for n in (96, 32))
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    def forward(self, words: Tensor, patches: Tensor, time: Tensor) -> Tensor:
        both, parts = (words, patches), []
        tables = [table(F.silu(time)).chunk(3, -1) for table in self.tables]
        for x, (shift, scale, _), qkv in zip(both, tables, self.qkv, strict=True):
            parts.append(qkv(modulated(x, shift, scale)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4))
        q, k, v = torch.cat(parts, 3).unbind()
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v).transpose(1, 2).flatten(2)
        ends = y.split([words.shape[1], patches.shape[1]], 1)
        streams = [x + t[2][:, None] * o(e) for x, t, o, e in zip(both, tables, self.out, ends, strict=True)]
        return torch.cat(streams, 1)


class DETR(nn.Module):
    """An encoder and decoder of torch over patches, with queries; classes and boxes in the order of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.queries = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.randn(8, 32))
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, 0.1, batch_first=True)
        self.classes, self.boxes = nn.Linear(32, 5), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = self.transformer(h, self.queries.expand(len(x), -1, -1))
        return self.classes(h), self.boxes(h).sigmoid()


def boxes_and_classes(model: nn.Module, x: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
    logits, near = model(x)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 5 * F.l1_loss(near, boxes)


class Preference(nn.Module):
    """A policy and its frozen reference, each of which gives the likelihood of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = NanoGPT(), NanoGPT().requires_grad_(False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            theirs = self._likelihood(self.reference, ids)
        return self._likelihood(self.policy, ids), theirs

    @staticmethod
    def _likelihood(model: nn.Module, ids: Tensor) -> Tensor:
        scores = model(ids)[:, :-1].log_softmax(-1)
        return scores.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)


def dpo(model: nn.Module, chosen: Tensor, rejected: Tensor) -> Tensor:
    mine, theirs = model(torch.cat([chosen, rejected]))
    (won, lost), (won_before, lost_before) = mine.chunk(2), theirs.chunk(2)
    return -F.logsigmoid(0.1 * ((won - lost) - (won_before - lost_before))).mean()


def scene() -> tuple[Tensor, ...]:
    return images(2), torch.randint(0, 5, (2, 8)), torch.rand(2, 8, 4)


def two_texts() -> tuple[Tensor, ...]:
    return torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16))


NO_FLEX = "FlexAttention does not support backward on CPU"

WITH_ATTENTION: dict[str, Stranger] = {
    "unet": Stranger(UNet, noised, towards),
    "flex": Stranger(lambda: Attention(flex=True), documents, next_in_document, limits=dict.fromkeys(THREE, NO_FLEX)),
    "packed": Stranger(Attention, documents, next_in_document),
    "dit": Stranger(DiT, noised, towards),
    "sd3": Stranger(
        JointBlock, lambda: (torch.randn(2, 8, 32), torch.randn(2, 16, 32), torch.randn(2, 32)), mean_square
    ),
    "detr": Stranger(DETR, scene, boxes_and_classes),
    "dpo": Stranger(Preference, two_texts, dpo),
}  # fmt: skip
