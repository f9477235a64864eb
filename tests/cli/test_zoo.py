"""Built-in models by name, and models from a user's file."""

from __future__ import annotations

import operator
import sys
from collections import UserDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from roamc.cli import zoo
from roamc.cli.commands import app
from roamc.cli.models import MODELS
from roamc.errors import CaptureError, OptionError
from roamc.frontends.workload import capture, from_file, made
from roamc.graph import Phase, operators, source_line
from roamc.options import Options
from roamc.planning import search
from roamc.settings import parse_setting

TEXT = {"batch": 2, "seq": 16, "layers": 2, "width": 32, "heads": 4, "vocab": 64}
SMALL: dict[str, dict[str, int]] = {
    "gpt": TEXT,
    "gpt2": TEXT,
    "gpt2-xl": TEXT,
    "bert": {**TEXT, "hidden": 64},
    "llama": {**TEXT, "hidden": 64, "kv_heads": 2},
    "t5": {**TEXT, "hidden": 64, "head_width": 8},
    "vit": {"batch": 2, "image": 32, "patch": 8, "layers": 2, "width": 32, "heads": 4, "hidden": 64, "classes": 10},
    "resnet50": {"batch": 2, "image": 32, "classes": 10},
    "mobilenetv2": {"batch": 2, "image": 32, "classes": 10},
    "gpt3-22b": TEXT,
}
LARGER = {"gpt3-175b", "gpt3-530b", "gpt3-1t"}
"""Models that differ from one of SMALL in sizes alone."""

FILE = """
import torch
from dataclasses import dataclass
from torch import nn

@dataclass
class Sizes:
    width: int

def model(width=8, batch=2):
    sizes = Sizes(width)
    return nn.Sequential(nn.Linear(sizes.width, 8), nn.Linear(8, 1)), torch.zeros(batch, sizes.width)

def step():
    made, inputs = model()
    return made, (inputs,), lambda module, x: module(x).sum(), torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)

def with_factory():
    made, inputs = model()
    return made, [inputs], lambda module, x: module(x).sum(), lambda parameters: torch.optim.SGD(parameters, lr=0.1)

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, *, values):
        return self.linear(values)

def keywords():
    return Named(), {"values": torch.zeros(2, 4)}

def three():
    return 3

def odd_loss():
    return *model(), 3

def odd_optimizer():
    return *model(), lambda module, x: module(x).sum(), 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_every_model_has_a_small_case() -> None:
    assert set(SMALL) == set(MODELS) - LARGER
    assert all(MODELS[name].settings.keys() == MODELS["gpt3-22b"].settings.keys() for name in LARGER)


@pytest.mark.parametrize("name", SMALL)
def test_model_is_planned_without_weights(name: str) -> None:
    if not name.startswith("gpt3") and name != "gpt":
        pytest.importorskip("transformers")
    workload = zoo.make(name, SMALL[name])
    assert {parameter.device.type for parameter in workload.model.parameters()} == {"meta"}
    plan = search.run(capture(workload), Options()).plan
    assert plan.name == name
    assert plan.peak_bytes >= plan.bound_bytes > 0
    assert plan.fixed_bytes["optimizer state"] == 2 * plan.fixed_bytes["parameter"]


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward_alone_are_planned_and_know_their_lines(name: str) -> None:
    if not name.startswith("gpt3") and name != "gpt":
        pytest.importorskip("transformers")
    graph = capture(zoo.make(name, SMALL[name]), forward_backward=True)
    own = (operator.getitem, torch.ops.aten.copy_.default)  # made by torch itself, such as updates of batch norm
    work = [node for node in operators(graph.graph) if node.target not in own]
    early = [node for node in work if graph.phase[node.name] is Phase.FORWARD]
    located = sum(bool(source_line(node)) for node in early)
    assert located > 0.9 * len(early)
    plan = search.run(graph, Options()).plan
    assert plan.peak_bytes >= plan.bound_bytes > 0
    assert "optimizer state" not in plan.fixed_bytes


def test_default_gpt_has_ten_million_parameters() -> None:
    model = zoo.make("gpt").model
    assert 10e6 < sum(parameter.numel() for parameter in model.parameters()) < 11e6


def test_gpt_trains_on_a_real_device() -> None:
    workload = zoo.make("gpt", {**TEXT, "dropout": 0.0, "tied": False}, device="cpu")
    assert workload.loss_fn is not None
    assert workload.model.head.weight is not workload.model.tokens.weight  # type: ignore[union-attr]
    loss = workload.loss_fn(workload.model, *workload.batch)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in workload.model.parameters())


def test_dtype_is_a_setting() -> None:
    workload = zoo.make("gpt", {**TEXT, "dtype": "bfloat16"})
    assert {parameter.dtype for parameter in workload.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("gtp2", {}, "did you mean 'gpt2'"),
        ("gpt", {"layer": 3}, "did you mean 'layers'"),
        ("gpt", {"image": 3}, "Settings: batch, seq"),
        ("gpt", {"batch": 0}, "whole number from 1"),
        ("gpt", {"batch": True}, "whole number from 1"),
        ("gpt", {"dropout": 1}, "not 1"),
        ("gpt", {"tied": 2}, "true or false"),
        ("gpt", {"dtype": "float23"}, "did you mean 'float32'"),
        ("gpt", {"width": 100}, "not a multiple of heads"),
    ],
)
def test_wrong_setting_is_named(name: str, settings: dict[str, int], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        zoo.make(name, settings)


def test_missing_transformers_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match="pip install"):
        zoo.make("bert", SMALL["bert"])


def test_function_of_a_file_gets_its_settings(file: str) -> None:
    workload = from_file(f"{file}:model", {"width": 4, "batch": 3})
    assert workload.name == "model"
    assert workload.batch[0].shape == (3, 4)
    assert capture(workload).boundary


def test_function_may_run_on_the_meta_device(file: str) -> None:
    workload = from_file(f"{file}:model", {}, meta=True)
    assert {parameter.device.type for parameter in workload.model.parameters()} == {"meta"}


@pytest.mark.parametrize("function", ["step", "with_factory"])
def test_function_may_bring_loss_and_optimizer(file: str, function: str) -> None:
    workload = from_file(f"{file}:{function}", {})
    assert not capture(workload).boundary
    assert capture(workload, forward_backward=True).boundary


def test_inputs_may_be_a_dictionary(file: str) -> None:
    assert capture(from_file(f"{file}:keywords", {})).boundary


class _Rows(nn.Module):
    """Takes keywords, or one dictionary of them."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.forward = self.named if by_name else self.whole

    def named(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x) * mask

    def whole(self, batch: dict[str, Tensor]) -> Tensor:
        return self.named(**batch)


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("by_name", [True, False], ids=["keywords", "one argument"])
def test_a_dictionary_of_inputs_goes_in_as_the_function_takes_it(by_name: bool, kind: type) -> None:
    """As ``step(**batch)`` and ``step(batch)`` do."""
    inputs = kind(x=torch.randn(4, 8), mask=torch.ones(4, 8))

    def loss_by_name(model: nn.Module, x: Tensor, **others: Tensor) -> Tensor:
        return _Rows.named(model, x, **others).sum()

    def loss_of_one(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_by_name(model, **batch)

    model = _Rows(by_name)
    assert capture(made("model", (model, inputs))).boundary
    loss_fn = loss_by_name if by_name else loss_of_one
    assert not capture(made("step", (model, inputs, loss_fn))).boundary
    assert capture(made("halves", (model, inputs, loss_fn)), forward_backward=True).boundary


def test_a_layer_that_refuses_its_input_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(
        "import torch\nfrom torch import nn\ndef make():\n"
        "    return nn.Sequential(nn.Linear(16, 32), nn.Linear(31, 4)), torch.randn(4, 16)\n"
    )
    said = CliRunner().invoke(app, ["plan", f"{path}:make"]).stderr
    assert "error: in Linear(in_features=31, out_features=4, bias=True): RuntimeError: a and b must have" in said


def test_none_in_the_place_of_loss_and_optimizer_is_as_if_left_out() -> None:
    workload = made("model", (nn.Linear(2, 2), torch.randn(3, 2), None, None))
    assert (workload.loss_fn, workload.optimizer) == (None, None)


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        ("modle", OptionError, "did you mean 'model'"),
        ("", OptionError, "names no function"),
        ("three", CaptureError, "must return .* not int"),
        ("odd_loss", CaptureError, "loss_fn is a int"),
        ("odd_optimizer", CaptureError, "the optimizer is a int"),
    ],
)
def test_wrong_function_is_named(file: str, function: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        from_file(f"{file}:{function}", {})


def test_missing_file_is_named() -> None:
    with pytest.raises(OptionError, match=r"nothing\.py: no such file"):
        from_file("nothing.py:model", {})


def test_unknown_argument_is_named(file: str) -> None:
    with pytest.raises(OptionError, match="model has no argument 'seq'"):
        from_file(f"{file}:model", {"seq": 3})


def test_misspelt_argument_and_a_module_in_the_place_of_a_function_are_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text("from torch import nn\nmodel = nn.Linear(2, 2)\ndef make(width=2, **more): ...\n")
    with pytest.raises(OptionError, match="model is a Linear, not a function; write a function that returns"):
        from_file(f"{path}:model", {})
    path.write_text("def make(width=2, depth=1): ...\n")
    with pytest.raises(OptionError, match=r"no argument 'wdith'; did you mean 'width'\? Arguments: width, depth"):
        from_file(f"{path}:make", {"wdith": 8})


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=1", 1), ("a=0.5", 0.5), ("a=true", True), ("a=False", False), ("a=x=y", "x=y"), ("a=6GiB", "6GiB")],
)
def test_setting_is_read(text: str, value: object) -> None:
    key, parsed = parse_setting(text)
    assert (key, parsed, type(parsed)) == ("a", value, type(value))


def test_setting_without_value_is_refused() -> None:
    with pytest.raises(OptionError, match="key=value"):
        parse_setting("layers")
