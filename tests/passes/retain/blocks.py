"""Transformer blocks of Korthikanti et al. (arXiv 2205.05198) and LLaMA, to count what they save for backward."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc

DROPOUT = 0.1


class GPTBlock(nn.Module):
    """Layer norms, attention and a GELU MLP; dropout behind softmax, attention and MLP.

    Args:
        width: of the residual stream.
        heads: of attention.
        fused: attention in one operator, without dropout; else its scores are written out.
        pinned: all but the core of attention (scores, softmax and dropout) is kept by hand.
    """

    def __init__(self, width: int, heads: int, *, fused: bool, pinned: bool = False) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.rest = roamc.keep if pinned else contextlib.nullcontext
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        with self.rest():
            inner = self.norm1(x)
        mixed = self.attention(inner)
        with self.rest():
            x = x + F.dropout(self.proj(mixed.transpose(1, 2).flatten(2)), DROPOUT)
            return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), DROPOUT)

    def attention(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to (batch, heads, sequence, width / heads), in front of the projection."""
        with self.rest():
            parts = self.qkv(x).chunk(3, dim=-1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            if not self.fused:
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        weights = None if self.fused else self.core(q, k)
        with self.rest():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True) if weights is None else weights @ v

    def core(self, q: Tensor, k: Tensor) -> Tensor:
        """The weights of the values: (batch, heads, sequence, sequence)."""
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return F.dropout(torch.softmax(scores, dim=-1), DROPOUT)


class BertBlock(GPTBlock):
    """The same layers with norms behind the sums, and the GELU of the error function."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        mixed = self.attention(x)
        with self.rest():
            x = self.norm1(x + F.dropout(self.proj(mixed.transpose(1, 2).flatten(2)), DROPOUT))
            return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), DROPOUT))


class LlamaBlock(nn.Module):
    """RMS norms, fused attention and a gated MLP."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))
