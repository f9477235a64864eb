"""Models by their configuration: planned from the file alone, as the same model built by hand; faults are one line."""

from __future__ import annotations

import functools
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import roamc
from roamc.cli import configs
from roamc.cli.request import Request, answer
from roamc.planning.plan import Plan
from tests.cli.test_cli import run

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


def test_autocast_is_that_of_a_loss_under_it_and_weights_are_in_float32(tmp_path: Path) -> None:
    kind = "grouped queries with bias"  # in bfloat16 by itself
    path = written(tmp_path, kind)
    plan = answer(Request(path, sizes={"batch": BATCH, "seq": SEQ}, autocast="bf16", gpu="h100", device="cuda")).plan
    model, batch = built(kind)
    model = model.float()

    def loss(model: nn.Module, **named: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(**named).loss  # type: ignore[no-any-return]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wanted = roamc.plan(model.train(), **batch, loss_fn=loss, optimizer=optimizer, gpu="h100")
    assert (plan.peak_bytes, plan.baseline_bytes) == (wanted.peak_bytes, wanted.baseline_bytes)
    assert plan.fixed_bytes == wanted.fixed_bytes
    assert plan.fixed_bytes["parameter"] == 4 * sum(each.numel() for each in model.parameters())
    assert "forward and loss run under autocast to bfloat16" in plan.notes


def test_gradient_checkpointing_is_that_of_transformers_and_eagers_peak_has_it(tmp_path: Path) -> None:
    path = written(tmp_path, "dense")
    plan = answer(Request(path, sizes={"batch": BATCH, "seq": SEQ}, gradient_checkpointing=True)).plan
    model, batch = built("dense")
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    wanted = by_hand(model, batch)
    assert (plan.peak_bytes, plan.baseline_bytes) == (wanted.peak_bytes, wanted.baseline_bytes)
    assert plan.baseline_bytes < from_file(path).baseline_bytes
    assert any("eager's peak is that with them" in note for note in plan.notes)


def test_settings_override_the_configuration(tmp_path: Path) -> None:
    path = written(tmp_path / "llama", "dense")
    one = configs.make(str(tmp_path / "llama"), {"layers": 1, "vocab": 64, "seq": 8, "batch": 3, "dtype": "bfloat16"})
    assert len(one.model.model.layers) == 1  # type: ignore[union-attr]
    assert one.model.lm_head.weight.shape == (64, 32)  # type: ignore[union-attr]
    assert {parameter.dtype for parameter in one.model.parameters()} == {torch.bfloat16}
    assert {parameter.device.type for parameter in one.model.parameters()} == {"meta"}
    assert one.named["input_ids"].shape == (3, 8)
    assert one.notes == ("LlamaForCausalLM for causal-lm: batch 3, sequence length 8, bfloat16",)
    assert len(configs.make(path, {"num_hidden_layers": 3}).model.model.layers) == 3  # type: ignore[union-attr]
    assert configs.make(path, {}).named["input_ids"].shape == (1, 2048)
    masked = configs.make(path, {"attention_mask": True, "seq": 8}).named["attention_mask"]
    assert not bool(masked.all())


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("learned places", {"n_layer": 3}),
        ("encoder and decoder", {"num_layers": 3, "num_decoder_layers": 3}),
        ("encoder and decoder with biases", {"encoder_layers": 3, "decoder_layers": 3}),
        ("windows", {"num_hidden_layers": 3}),
    ],
)
def test_layers_are_those_of_every_stack(kind: str, layers: dict[str, int], tmp_path: Path) -> None:
    config = configs.make(written(tmp_path, kind), {"layers": 3, "seq": 8}).model.config
    assert {name: getattr(config, name) for name in layers} == layers  # type: ignore[arg-type]


def test_dtype_is_the_configurations_if_none_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, "grouped queries with bias")
    for dtype, settings in ((torch.bfloat16, {}), (torch.float16, {"dtype": "float16"})):
        assert {each.dtype for each in configs.make(path, {"seq": 8, **settings}).model.parameters()} == {dtype}


def test_size_of_images_is_the_configurations(tmp_path: Path) -> None:
    path = written(tmp_path, "patches")
    assert configs.make(path, {}).named["pixel_values"].shape == (1, 3, 32, 32)
    assert configs.make(path, {"image": 64}).named["pixel_values"].shape == (1, 3, 64, 64)


@pytest.mark.parametrize(
    ("kind", "task", "model"),
    [
        ("encoder", None, "BertForMaskedLM"),
        ("encoder", "token-classification", "BertForTokenClassification"),
        ("encoder", "question-answering", "BertForQuestionAnswering"),
        ("dense", "sequence-classification", "LlamaForSequenceClassification"),
        ("encoder and decoder", None, "T5ForConditionalGeneration"),
        ("patches", None, "ViTForImageClassification"),
    ],
)
def test_task_is_that_of_the_architecture_or_the_one_asked_for(
    kind: str, task: str | None, model: str, tmp_path: Path
) -> None:
    for architectures in ([MODELS_BY_HAND[kind][1]], None):
        path = written(tmp_path, kind)
        data = json.loads(Path(path).read_text())
        Path(path).write_text(json.dumps({**data, "architectures": architectures}))
        workload = configs.make(path, {"seq": 8, **({"task": task} if task else {})})
        assert type(workload.model).__name__ == model


@pytest.mark.parametrize("task", ["token-classification", "question-answering"])
def test_other_tasks_are_planned(task: str, tmp_path: Path) -> None:
    assert from_file(written(tmp_path, "encoder"), task=task).peak_bytes > 0


def test_classifier_of_a_decoder_is_planned(tmp_path: Path) -> None:
    assert from_file(written(tmp_path, "dense"), task="sequence-classification").peak_bytes > 0


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TEXT}

FAULTS: dict[str, tuple[Any, list[str], str]] = {
    "no JSON": ("{", [], "is no JSON: "),
    "lists in lists": ("[" * 100_000, [], "is no JSON: it has more than 64 lists and objects in one another"),
    "a list": ([1], [], "is no configuration of a transformers model: it has no model_type"),
    "no model type": ({"a": 1}, [], "is no configuration of a transformers model: it has no model_type"),
    "diffusers": ({"_class_name": "UNet2DConditionModel"}, [], "is of diffusers, not of a transformers model:"),
    "unknown type": (
        {**LLAMA, "model_type": "lama"}, [],
        f"transformers {transformers.__version__} has no model type 'lama'; did you mean 'llama'? A newer",
    ),
    "remote code": ({**LLAMA, "auto_map": {"AutoModel": "x.Y"}}, [], "names code of its own (auto_map), which roamc "),
    "quantized": ({**LLAMA, "quantization_config": {"bits": 4}}, [], "has quantized weights (quantization_config), "),
    "no class for the task": (LLAMA, ["--task", "masked-lm"], "of model type 'llama' for masked-lm;"),
    "no class at all": ({"model_type": "vits"}, [], "of model type 'vits' for a task that roamc knows ("),
    "unknown task": (LLAMA, ["--task", "causal"], "unknown task 'causal'; did you mean 'causal-lm'?"),
    "bare architecture": (
        {**LLAMA, "architectures": ["LlamaModel"]}, [],
        "is of LlamaModel, which has no loss that roamc knows: write a function that returns (model, batch), and plan "
        "FILE.py:FUNCTION; or plan another class: --task causal-lm for LlamaForCausalLM, --task ",
    ),
    "architecture": ({**LLAMA, "architectures": 5}, [], "model.json: architectures must be a list of names, not 5"),
    "layers": (LLAMA, ["--layers", "0"], "layers must be a whole number from 1, not 0"),
    "layers of the file": (
        {**LLAMA, "num_hidden_layers": -1}, [], "model.json: num_hidden_layers must be a whole number from 0, not -1",
    ),
    "three sides": (
        {"model_type": "vit", "image_size": [8, 8, 8]}, [],
        "image_size must be one or two whole numbers from 1, not [8, 8, 8]",
    ),
    "no side": ({"model_type": "vit", "image_size": -8}, [], "image_size must be one or two whole numbers from 1, "),
    "unknown field": (LLAMA, ["--set", "num_hiden_layers=1"], "has no field 'num_hiden_layers'; did you mean "),
    "value of a field": (LLAMA, ["--set", "num_hidden_layers=x"], "is refused by transformers: Validation"),
    "sizes": (LLAMA, ["--heads", "5"], "is refused by transformers: "),
    "batch": (LLAMA, ["--batch", "0"], "batch must be a whole number from 1, not 0"),
    "dtype": (LLAMA, ["--dtype", "bfloat"], "float16, float64, not 'bfloat'"),
    "its dtype": ({**LLAMA, "dtype": "int8"}, [], "float16, float64, not 'int8'"),
    "places": (LLAMA, ["--seq", "4096"], "seq 4096 is above the 2048 places of "),
    "checkpoints": (
        {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}, ["--gradient-checkpointing"],
        "ResNetForImageClassification does not support ",
    ),
    "adapters": (LLAMA, ["--lora", "rank=4"], "--lora takes r=16,targets=q_proj,v_proj,alpha=32,dropout=0.05, not 'ra"),
    "rank": (LLAMA, ["--lora", "r=0"], "--lora: r must be a whole number from 1, not '0'"),
    "dropout": (LLAMA, ["--lora", "dropout=1"], "--lora: dropout must be a number from 0 up to but not 1, not '1'"),
    "targets": (LLAMA, ["--lora", "r=2,targets=nope"], "--lora r=2,targets=nope is refused by peft: Target modules "),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_configuration_is_one_line_that_says_what_to_do(name: str, tmp_path: Path) -> None:
    content, arguments, said = FAULTS[name]
    if "--lora" in arguments:
        pytest.importorskip("peft")
    path = tmp_path / "model.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    result = run("plan", str(path), *arguments, code=1)
    error = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert said in error[0]
    assert "Traceback" not in result.stderr


def test_path_without_a_configuration(tmp_path: Path) -> None:
    assert "no such file or folder; roamc downloads nothing" in run("plan", "meta-llama/Llama-3-8B", code=1).stderr
    assert "no.json: no such file or folder" in run("plan", "no.json", code=1).stderr
    assert f"{tmp_path} has no config.json" in run("plan", str(tmp_path), code=1).stderr
    assert "/dev/zero: file too large" in run("plan", "/dev/zero", code=1).stderr
    (tmp_path / "model_index.json").write_text("{}")
    assert f"{tmp_path} is of diffusers" in run("plan", str(tmp_path), code=1).stderr


@pytest.mark.parametrize(("module", "said"), [("transformers", "a configuration needs"), ("peft", "--lora needs peft")])
def test_missing_library_is_named(module: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "dense")
    monkeypatch.setitem(sys.modules, module, None)
    stderr = run("plan", path, "--lora", "r=2,targets=q_proj", code=1).stderr
    assert said in stderr
    assert "pip install" in stderr


def test_settings_of_configurations_are_no_settings_of_a_built_in_model() -> None:
    for setting in ("task", "lora"):
        assert f"gpt has no setting '{setting}'" in run("plan", "gpt", f"--{setting}", "x", code=1).stderr


def test_a_folder_named_like_a_built_in_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text("{}", "utf-8")
    monkeypatch.chdir(tmp_path)
    small = ("--layers", "1", "--width", "16", "--heads", "2", "--batch", "2", "--seq", "8", "--vocab", "32")
    assert "this is the built-in model; ./gpt plans the folder of that name" in run("plan", "gpt", *small).stdout
