"""Real models of a small size, with a batch and a loss each; weights are random, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    """One model: how to build it, its batch, and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(w, dim=2)
        q, k, v = (t.view(b, s, self.heads, w // self.heads).transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).contiguous().view(b, s, w)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class NanoGPT(nn.Module):
    def __init__(self, vocab: int = 64, width: int = 32, heads: int = 4, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.drop(self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 64)

    def forward(self, idx: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(idx))[0])


def tokens(batch: int = 2, length: int = 16, vocab: int = 64) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1))


def images(batch: int = 2, side: int = 32) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))


def next_token(model: nn.Module, idx: Tensor) -> Tensor:
    logits = model(idx)
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), idx[:, 1:].reshape(-1))


def hf_labels(model: nn.Module, idx: Tensor) -> Tensor:
    return model(input_ids=idx, labels=idx).loss


def hf_classes(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pixel_values=pixels).logits.float(), labels)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=32, attn_implementation="eager",
        )
    )  # fmt: skip


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
            pad_token_id=0,
        )
    )  # fmt: skip


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32,
            patch_size=8, num_labels=10, hidden_dropout_prob=0.1,
        )
    )  # fmt: skip


def _resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=10))


def _mobilenet() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=10, depth_multiplier=0.35, image_size=32))


def _labelled() -> tuple[Tensor, ...]:
    return images(), torch.tensor([3, 7])


MODELS: dict[str, Case] = {
    "nanogpt": Case(NanoGPT, lambda: (tokens(),), next_token),
    "nanogpt-dropout": Case(lambda: NanoGPT(dropout=0.1), lambda: (tokens(),), next_token),
    "gpt2": Case(_gpt2, lambda: (tokens(),), hf_labels),
    "bert": Case(_bert, lambda: (tokens(),), hf_labels),
    "llama": Case(_llama, lambda: (tokens(),), hf_labels),
    "t5": Case(_t5, lambda: (tokens(),), hf_labels),
    "vit": Case(_vit, _labelled, hf_classes),
    "resnet50": Case(_resnet50, _labelled, hf_classes),
    "mobilenetv2": Case(_mobilenet, _labelled, hf_classes),
    "lstm": Case(LSTM, lambda: (tokens(length=7),), next_token),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    """Model in training mode, batch, loss; the same weights at every call."""
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.build().to(dtype).train()
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in case.batch())
    return model, batch, case.loss
