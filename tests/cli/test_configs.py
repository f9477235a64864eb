"""Models by their configuration: planned from the file alone, as the same model built by hand; faults are one line."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.cli.request import Request, answer
from roamc.planning.plan import Plan

transformers = pytest.importorskip("transformers")

BATCH, SEQ = 2, 16
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 96,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4, "vocab_size": 96,
    "decoder_start_token_id": 0,
}  # fmt: skip
IMAGE = {**{key: TEXT[key] for key in list(TEXT)[:4]}, "image_size": 32, "patch_size": 8, "num_labels": 7}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}

MODELS_BY_HAND: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("LlamaConfig", "LlamaForCausalLM", {**TEXT, "tie_word_embeddings": True}),
    "grouped queries": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED),
    "grouped queries with bias": ("Qwen2Config", "Qwen2ForCausalLM", {**GROUPED, "dtype": "bfloat16"}),
    "learned places": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}),
    "experts": ("MixtralConfig", "MixtralForCausalLM", {**GROUPED, **FEW}),
    "windows": ("Gemma2Config", "Gemma2ForCausalLM", {**GROUPED, "sliding_window": 8}),
    "encoder": ("BertConfig", "BertForMaskedLM", {**TEXT, "max_position_embeddings": 64}),
    "classifier": (
        "RobertaConfig", "RobertaForSequenceClassification", {**TEXT, "max_position_embeddings": 66, "num_labels": 3},
    ),
    "encoder and decoder": ("T5Config", "T5ForConditionalGeneration", T5),
    "encoder and decoder with biases": ("BartConfig", "BartForConditionalGeneration", BART),
    "patches": ("ViTConfig", "ViTForImageClassification", IMAGE),
    "convolutions": (
        "ResNetConfig", "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 7, "image_size": 32},
    ),
}  # fmt: skip

ADAPTED = {
    "dense": ("r=4,targets=q_proj,v_proj", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "grouped queries with bias": ("r=8,targets=all-linear", {"r": 8, "target_modules": "all-linear"}),
    "encoder": (
        "r=2,alpha=16,dropout=0.1,targets=query,value",
        {"r": 2, "target_modules": ["query", "value"], "lora_alpha": 16, "lora_dropout": 0.1},
    ),
    "encoder and decoder": ("r=4", {"r": 4}),
}


def written(folder: Path, kind: str, **more: Any) -> str:
    """The path of a configuration's file, as ``save_pretrained`` writes it beside a model's weights."""
    name, architecture, fields = MODELS_BY_HAND[kind]
    getattr(transformers, name)(**fields, architectures=[architecture], **more).save_pretrained(folder)
    return str(folder / "config.json")


def built(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and its batch, as users write them."""
    name, architecture, fields = MODELS_BY_HAND[kind]
    config = getattr(transformers, name)(**fields)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    dtype = getattr(torch, fields.get("dtype", "float32"))
    with torch.device("meta"):
        model = getattr(transformers, architecture)._from_config(config, dtype=dtype)
        pixels = torch.zeros(BATCH, 3, 32, 32)
    tokens, classes, padded = (torch.ones(*shape, dtype=torch.long) for shape in ((BATCH, SEQ), (BATCH,), (BATCH, SEQ)))
    padded[0, -1] = 0
    if "image_size" in fields:
        return model, {"pixel_values": pixels, "labels": classes}
    batch = {"input_ids": tokens, "labels": classes if kind == "classifier" else tokens.clone()}
    masked = kind.startswith("encoder") or kind == "classifier"
    return model, {**batch, "attention_mask": padded} if masked else batch


def by_hand(model: nn.Module, batch: dict[str, Tensor]) -> Plan:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return roamc.plan(model.train(), **batch, loss_fn=lambda model, **named: model(**named).loss, optimizer=optimizer)


def from_file(path: str, **settings: Any) -> Plan:
    return answer(Request(path, sizes={"batch": BATCH, "seq": SEQ, **settings})).plan


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("kind", MODELS_BY_HAND)
def test_plan_of_a_configuration_is_that_of_the_model_built_by_hand(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, kind)
    plan, wanted = from_file(path), by_hand(*built(kind))
    assert plan.name == f"{MODELS_BY_HAND[kind][1]} of {path}"
    assert (plan.peak_bytes, plan.needed_bytes) == (wanted.peak_bytes, wanted.needed_bytes)
    assert plan.fixed_bytes == wanted.fixed_bytes
    assert plan.decisions == wanted.decisions


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_are_those_of_peft_and_nothing_else_is_trained(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    text, fields = ADAPTED[kind]
    model, batch = built(kind)
    with torch.device("meta"):
        model = peft.get_peft_model(model, peft.LoraConfig(**fields))
    plan, wanted = from_file(written(tmp_path, kind), lora=text), by_hand(model, batch)
    assert (plan.peak_bytes, plan.needed_bytes) == (wanted.peak_bytes, wanted.needed_bytes)
    assert plan.fixed_bytes == wanted.fixed_bytes
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    steps = 4 * sum(p.requires_grad for p in model.parameters())
    assert 0 < plan.fixed_bytes["optimizer state"] <= 2 * trained + steps
    assert any(note.endswith(f"LoRA with {text}") for note in plan.notes)
