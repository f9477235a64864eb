"""Models of transformers as strangers train them, small and from configs; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweeps.strangers import Stranger, images

TOKENS = 64


def tokens(count: int = 2, length: int = 16) -> tuple[Tensor, ...]:
    return (torch.randint(3, TOKENS, (count, length)),)


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def config(name: str, **more: Any) -> Any:
    """A config of transformers, of two layers of width 32 with grouped keys unless ``more`` says otherwise."""
    import transformers

    sizes = {
        "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    return getattr(transformers, name)(**{**sizes, **more})


def model_of(name: str, of: Any) -> nn.Module:
    import transformers

    return getattr(transformers, name)(of)


class Lora(nn.Module):
    """A frozen linear layer and a trained update of rank 4."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(F.dropout(x, 0.1, self.training)))


def lora_llama() -> nn.Module:
    model = model_of("LlamaForCausalLM", config("LlamaConfig")).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Lora(layer.self_attn.q_proj), Lora(layer.self_attn.v_proj)
    return model


def mixtral() -> nn.Module:
    return model_of("MixtralForCausalLM", config("MixtralConfig", num_local_experts=4, output_router_logits=True))


def gemma3() -> nn.Module:
    of = config("Gemma3TextConfig", head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    return model_of("Gemma3ForCausalLM", of)


def mamba() -> nn.Module:
    of = config("MambaConfig", num_hidden_layers=1, state_size=4, time_step_rank=4)
    return model_of("MambaForCausalLM", of)


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    }  # fmt: skip
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    text = {**sizes, "vocab_size": TOKENS, "max_position_embeddings": 16, "eos_token_id": 2}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def contrast(model: nn.Module, ids: Tensor, pixels: Tensor) -> Tensor:
    return model(input_ids=ids, pixel_values=pixels, return_loss=True).loss


def wav2vec2() -> nn.Module:
    of = config(
        "Wav2Vec2Config", conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_length=2, num_hidden_layers=1,
        ctc_loss_reduction="mean",
    )  # fmt: skip
    return model_of("Wav2Vec2ForCTC", of)


def spoken(model: nn.Module, sound: Tensor, words: Tensor) -> Tensor:
    return model(sound, labels=words).loss


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=TOKENS, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64,
            decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4, max_source_positions=16,
            max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            suppress_tokens=[], begin_suppress_tokens=[],
        )
    )  # fmt: skip


def transcribed(model: nn.Module, mel: Tensor, words: Tensor) -> Tensor:
    return model(input_features=mel, labels=words).loss


def one_of(build: Callable[[], nn.Module]) -> Stranger:
    return Stranger(build, tokens, next_token)


OF_TRANSFORMERS: dict[str, Stranger] = {
    "lora_llama": one_of(lora_llama),
    "mixtral": one_of(mixtral),
    "gemma3": one_of(gemma3),
    "mamba": Stranger(mamba, lambda: tokens(2, 8), next_token),
    "clip": Stranger(clip, lambda: (*tokens(2, 12), images(2)), contrast),
    "wav2vec2": Stranger(
        wav2vec2,
        lambda: (torch.randn(2, 400), torch.randint(1, TOKENS, (2, 4))),
        spoken,
        limits={"train_step": "reads a tensor's value"},
    ),
    "whisper": Stranger(whisper, lambda: (torch.randn(2, 8, 32), *tokens(2, 8)), transcribed),
}
