"""The models that the tables are made of: real architectures at a size that trains in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Workload:
    """A model in training mode, its batch and its loss."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[..., Tensor]


def _tokens(batch: int, length: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1))


def _labelled(batch: int, side: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, side, side, generator=generator), torch.randint(0, 10, (batch,), generator=generator)


def language_loss(model: nn.Module, idx: Tensor) -> Tensor:
    """The loss that a language model of transformers computes itself."""
    loss: Tensor = model(input_ids=idx, labels=idx).loss
    return loss


def class_loss(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """The loss of an image classifier of transformers."""
    return F.cross_entropy(model(pixel_values=pixels).logits, labels)


def next_token(model: nn.Module, idx: Tensor) -> Tensor:
    """The loss of a model that gives logits, for predicting the next token."""
    logits = model(idx)
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), idx[:, 1:].reshape(-1))


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 256)

    def forward(self, idx: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embed(idx))[0])
        return logits


def _nanogpt(dropout: float) -> Workload:
    from tests.models import NanoGPT

    model = NanoGPT(vocab=256, width=384, heads=6, layers=6, dropout=dropout)
    model.places = nn.Embedding(256, 384)
    return Workload(model, (_tokens(4, 256, 256),), next_token)


def _gpt2(layers: int, width: int, batch: int, length: int) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64)
    return Workload(GPT2LMHeadModel(config), (_tokens(batch, length, 50257),), language_loss)


def _bert() -> Workload:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=8192, hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536,
        attn_implementation="eager",
    )  # fmt: skip
    return Workload(BertForMaskedLM(config), (_tokens(4, 128, 8192),), language_loss)


def _llama() -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    return Workload(LlamaForCausalLM(config), (_tokens(4, 128, 8192),), language_loss)


def _t5() -> Workload:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=8192, d_model=256, d_kv=64, d_ff=1024, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    return Workload(T5ForConditionalGeneration(config), (_tokens(4, 96, 8192),), language_loss)


def _vit() -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, image_size=112,
        patch_size=16, num_labels=10,
    )  # fmt: skip
    return Workload(ViTForImageClassification(config), _labelled(4, 112), class_loss)


def _resnet50() -> Workload:
    from transformers import ResNetConfig, ResNetForImageClassification

    return Workload(ResNetForImageClassification(ResNetConfig(num_labels=10)), _labelled(4, 112), class_loss)


def _mobilenet() -> Workload:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(num_labels=10, image_size=112)
    return Workload(MobileNetV2ForImageClassification(config), _labelled(8, 112), class_loss)


def _swin() -> Workload:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=112, embed_dim=48, depths=[2, 2, 4], num_heads=[3, 6, 12], num_labels=10)
    return Workload(SwinForImageClassification(config), _labelled(4, 112), class_loss)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "nanogpt": lambda: _nanogpt(0.0),
    "nanogpt-dropout": lambda: _nanogpt(0.1),
    "gpt2-124m": lambda: _gpt2(12, 768, 1, 256),
    "gpt2": lambda: _gpt2(4, 256, 4, 128),
    "bert": _bert,
    "llama": _llama,
    "t5": _t5,
    "vit": _vit,
    "resnet50": _resnet50,
    "mobilenetv2": _mobilenet,
    "swin": _swin,
    "lstm": lambda: Workload(_LSTM(), (_tokens(8, 32, 256),), next_token),
}


def make(name: str, dtype: str = "float32") -> Workload:
    """The workload called ``name``, with the same weights at every call."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    kind: Any = getattr(torch, dtype)
    batch = tuple(t.to(kind) if t.is_floating_point() else t for t in workload.batch)
    return Workload(workload.model.to(kind).train(), batch, workload.loss)
