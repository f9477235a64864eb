"""Every model type of transformers at a small size: its config with small numbers, a batch, a loss. Random weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import roamc
from tests.sweeps.compare import OutOfTime, Verdict, different, time_limit
from tests.sweeps.databases import named

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION")
"""The first of these that a model type has a class for is what it is trained for."""

MOST = 30_000_000
"""Parameters of a model that still is small."""

DISABLED = ("fuse", "retain", "reorder")
"""Passes that search and that other sweeps run: here it is capture that may go wrong."""

NAMED: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "hidden_dim": 32, "dim": 32,
    "embedding_size": 32, "encoder_hidden_size": 32, "decoder_hidden_size": 32, "projection_dim": 32, "d_embed": 32,
    "word_embed_proj_dim": 32, "emb_dim": 32, "n_inner": 64, "output_hidden_size": 32, "out_hidden_size": 32,
    "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "d_ff": 64,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_dim": 64, "mlp_dim": 64, "d_inner": 64, "d_kv": 8,
    "dense_intermediate_size": 64, "decoder_intermediate_size": 64,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "depth": 2, "decoder_num_hidden_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "decoder_num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_kv_heads": 2,
    "attention_head_dim": 8, "d_head": 8, "attention_head_size": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_num_experts": 4, "moe_topk": 2, "moe_top_k": 2, "first_k_dense_replace": 1,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "q_lora_rank": 8,
    "qk_head_dim": 16, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4,
    "max_position_embeddings": 64, "n_positions": 64, "max_source_positions": 64, "max_target_positions": 64,
    "sliding_window": 8, "attention_chunk_size": 8, "image_size": 32, "patch_size": 8, "num_mel_bins": 16,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "state_size": 8, "ssm_state_size": 8,
    "mamba_n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8, "chunk_size": 8, "time_step_rank": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "neck_hidden_sizes": [16, 16, 32, 32], "num_labels": 4,
    "rotary_dim": 4, "num_groups": 4, "grid_size": 4, "prediction_length": 4, "context_length": 8,
    "conv_dim": (16, 16, 16), "conv_stride": (5, 4, 4), "conv_kernel": (10, 4, 4), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 3, "classifier_proj_size": 16, "num_queries": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 3,
    "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "layer_drop": 0.0,
}  # fmt: skip
"""Small numbers for what configs name; other attributes keep their defaults."""

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": None, "sliding_window": None, "qk_head_dim": None, "num_key_value_heads": 4},
    {"image_size": 64, "hidden_sizes": None, "depths": None, "depth": None},
    {"hidden_size": 64, "embed_dim": None, "patch_size": None, "num_heads": None, "num_mel_bins": None},
)
"""Changes of ``NAMED`` that are tried one after the other; None keeps a config's default."""


@dataclass(frozen=True)
class Entry:
    """A model type, and whether its config says ``use_cache``; None where it has no such attribute."""

    name: str
    cache: bool | None = None

    def __str__(self) -> str:
        return self.name if self.cache is None else f"{self.name} use_cache={self.cache}"


def entries() -> list[Entry]:
    """Every model type, twice where its config has ``use_cache``; those with a cache come last."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    chosen = []
    for name in CONFIG_MAPPING:
        with _quiet(), contextlib.suppress(Exception):  # what has no default config is no entry
            config = CONFIG_MAPPING[name]()
            has = any(hasattr(part, "use_cache") for part in (config, *_parts(config).values()))
            chosen += [Entry(name, cache) for cache in ((False, True) if has else (None,))]
    return sorted(chosen, key=lambda entry: entry.cache is True)


def _parts(config: Any) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    return {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


def _small(config: Any, cache: bool | None, variant: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make ``config`` small."""
    values: dict[str, Any] = {}
    small = {name: value for name, value in {**NAMED, **variant}.items() if value is not None}
    for name, value in vars(config).items():
        listed = isinstance(value, list | tuple)
        if name in small and value is not None and listed == isinstance(small[name], list | tuple):
            values[name] = small[name]
        elif isinstance(value, float) and value and re.search("drop(out|path|_path)?(_|$)", name):
            values[name] = 0.1
    for name, part in _parts(config).items():
        values[name] = {**_small(part, cache, variant), "model_type": part.model_type}
    if cache is not None and hasattr(config, "use_cache"):
        values["use_cache"] = cache
    return values


def _classes(config: Any) -> Iterator[type[nn.Module]]:
    """The classes of models for ``config``, those with a loss of their own first."""
    from transformers.models.auto import modeling_auto

    for task in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")
        if type(config) in mapping:
            yield mapping[type(config)]
    if type(config) in modeling_auto.MODEL_MAPPING:
        kinds = modeling_auto.MODEL_MAPPING[type(config)]
        yield from kinds if isinstance(kinds, tuple) else (kinds,)
        return
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for name, value in sorted(vars(module).items()):
        if not name.endswith("PreTrainedModel") and getattr(value, "config_class", None) is type(config):
            yield value


def _batches(config: Any, wanted: Any) -> Iterator[dict[str, Tensor]]:
    """Batches to try for a model whose forward has the parameters ``wanted``, with labels first."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 60, (2, 32), generator=draw)
    part = next((part for part in (config, *_parts(config).values()) if hasattr(part, "image_size")), config)
    size = getattr(part, "image_size", 32)
    size = size if isinstance(size, int) else 32
    offered = {
        "input_ids": ids,
        "decoder_input_ids": ids[:, :8],
        "bbox": torch.zeros(2, 32, 4, dtype=torch.int64),
        "pixel_values": torch.randn(2, getattr(part, "num_channels", 3), size, size, generator=draw),
        "input_values": torch.randn(2, 2000, generator=draw),
        "input_features": torch.randn(2, getattr(config, "num_mel_bins", 16), 128, generator=draw),
    }
    names = [name for name in offered if name in wanted]
    labels = [ids, ids[:, :8], torch.tensor([0, 1])] if "labels" in wanted else []
    for chosen in [names, *([name] for name in names), names[:2]]:
        for label in labels:
            yield {**{name: offered[name] for name in chosen}, "labels": label}
        yield {name: offered[name] for name in chosen}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, or the mean of the squares of its outputs."""
    output = model(**batch)
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return loss
    squared = [x for x in _tensors(output) if x.is_floating_point() and x.requires_grad]
    return torch.stack([x.float().square().mean() for x in squared]).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import transformers

    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class NotSmallError(Exception):
    """A model has too many parameters."""


def _seeded() -> None:
    torch.manual_seed(17)
    np.random.seed(17)  # masks of time in models of speech
    random.seed(17)


def built(entry: Entry) -> tuple[Callable[[], nn.Module], dict[str, Tensor]]:
    """What builds the model, the same each time, and a batch that it trains on in eager.

    Raises:
        Exception: no model and batch were found; the last error.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[entry.name]
    problem: Exception = ValueError("no class of models for this config")
    for variant in VARIANTS:
        try:
            config = kind(**_small(kind(), entry.cache, variant))
            classes = list(_classes(config))
        except Exception as error:
            problem = error
            continue
        for model_class in classes:
            build = functools.partial(_model, model_class, config)
            try:
                return build, _batch(model_class, build, config)
            except Exception as error:
                problem = error
    raise problem


def _model(kind: type[nn.Module], config: Any) -> nn.Module:
    _seeded()
    return kind(copy.deepcopy(config)).train()


def _batch(kind: type[nn.Module], build: Callable[[], nn.Module], config: Any) -> dict[str, Tensor]:
    """A batch that the model trains on.

    Raises:
        Exception: the model has too many parameters, cannot be built, or trains on no batch; the last error.
    """
    with torch.device("meta"):
        parameters = sum(x.numel() for x in kind(copy.deepcopy(config)).parameters())
    if parameters > MOST:
        raise NotSmallError(f"{parameters:,} parameters")
    model = build()
    problem: Exception = ValueError("no batch for what forward takes")
    for batch in _batches(config, inspect.signature(model.forward).parameters):
        try:
            _seeded()
            loss_of(model, batch).backward()
        except Exception as error:
            problem = error
        else:
            return batch
    raise problem


def stepped(build: Callable[[], nn.Module], batch: dict[str, Tensor], whole: bool) -> dict[str, Tensor | None]:
    """Loss, parameters and buffers after one step of SGD, by ``roamc.train_step`` or by eager."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _seeded()
    if whole:
        loss = roamc.train_step(model, loss_of, optimizer, strict=True, disable=DISABLED)(batch)
    else:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    return {"loss": loss.detach(), **{name: tensor.detach() for name, tensor in named(model)}}


def judge(entry: Entry, seconds: int = 120) -> Verdict:
    """One step against eager: "same", "differs", "refused" with roamc's text, "raises", "time" or "left out"."""
    step = "eager"
    try:
        with time_limit(seconds), _quiet():
            build, batch = built(entry)
            wanted = stepped(build, batch, whole=False)
            if said := different(stepped(build, batch, whole=False), wanted):
                return Verdict("left out", f"two runs of eager differ: {said}")
            step = "train_step"
            said = different(stepped(build, batch, whole=True), wanted)
            return Verdict("differs", said) if said else Verdict("same")
    except OutOfTime:
        return Verdict("left out" if step == "eager" else "time", f"{step}: over {seconds} s")
    except roamc.CaptureError as error:
        notes = " | ".join(getattr(error, "__notes__", ()))
        return Verdict("refused" if step != "eager" else "left out", f"{error} | {notes}")
    except Exception as error:  # whatever fails is a line of the log
        return Verdict("left out" if step == "eager" else "raises", f"{step}: {type(error).__name__}: {error}"[:600])
