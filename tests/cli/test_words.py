"""Errors of usage that need no torch are said without it, and name the word that is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from roamc.cli.asked import _LEFT_OUT
from roamc.cli.commands import app
from roamc.cli.models import MODELS
from roamc.cli.saved import WITHOUT_GRAPH
from roamc.cli.words import NEED_TORCH, OF_LAYERS, PLAIN, WITHOUT_MODEL, check_optimizer
from roamc.cli.zoo import DTYPES, RECIPES
from roamc.errors import OptionError
from roamc.options import Options

PROGRAM = """
import sys
from roamc.cli.commands import app
try:
    app(prog_name="roamc")
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""


def ended(*words: str) -> tuple[str, str]:
    """The last line on stdout, of exit code and whether torch was imported, and what is on stderr."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1], done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "nosuchmodel"], "unknown model 'nosuchmodel'"),
        (["explain", "gpt", "--optimizer", "foo"], "unknown optimizer 'foo'"),
        (["max-batch", "gpt", "--memory-budget", "abc"], "'abc' is not a size"),
        (["plan", "gpt", "--gpu", "foo"], "unknown GPU 'foo'"),
        (["plan", "gpt", "--option", "ordr=x"], "unknown option 'ordr'; did you mean 'order'?"),
        (["plan", "gpt", "--option", "order=x"], "unknown order 'x'"),
        (["plan", "gpt", "--set", "foo=1"], "gpt has no setting 'foo'"),
        (["plan", "gpt", "--device", "tpu"], "--device must be one of cpu, cuda, not 'tpu'"),
        (["plan", "gpt", "--gpu", "h100", "--device", "cpu"], "--gpu h100 plans for a GPU, and --device cpu for a CPU"),
        (["plan", "config.json", "--task", "causal"], "unknown task 'causal'; did you mean 'causal-lm'? Tasks: "),
        (["plan", "no/such/model"], "no/such/model: no such file or folder; roamc downloads nothing"),
        (["plan", "gpt", "--autocast", "fp8"], "--autocast takes bf16 or fp16, not 'fp8'"),
        (["plan", "a.py:f", "--autocast", "bf16", "--gpu", "h100"], "call it under torch.autocast('cuda', torch."),
        (["plan", "a.py:f", "--gradient-checkpointing"], "call model.gradient_checkpointing_enable() or torch.utils."),
        (["plan", "gpt", "--frobnicate"], "No such option: --frobnicate"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused_without_torch(words: list[str], said: str) -> None:
    end, error = ended(*words)
    assert end == "1 False"
    assert said in error


def test_an_optimizer_that_is_no_choice_is_refused() -> None:
    with pytest.raises(OptionError, match=r"unknown optimizer 'compact'.* Optimizers: sgd, adam, adamw, none"):
        check_optimizer("compact", PLAIN)


def test_rules_about_parameters_and_options_name_some_that_there_are() -> None:
    commands: Any = typer.main.get_command(app)
    parameters = {each.name for command in commands.commands.values() for each in command.params}
    assert {*WITHOUT_MODEL, *OF_LAYERS, *WITHOUT_GRAPH, *_LEFT_OUT} <= parameters
    assert set(NEED_TORCH) <= {field.name for field in fields(Options)}


def test_models_are_listed_without_torch() -> None:
    assert ended("models")[0] == "0 False"
    assert MODELS.keys() == RECIPES.keys()
    assert {model.settings["dtype"] for model in MODELS.values()} <= DTYPES.keys()


def test_a_saved_plan_is_no_model_of_max_batch(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": 1, "fingerprint": "", "decisions": {}}')
    assert ended("max-batch", str(path)) == (
        "1 False", f"error: {path} is a saved plan of one size, and max-batch plans several: give it the model\n",
    )  # fmt: skip


FILE = """
import torch
from torch import nn

def by_default(width=8):
    return nn.Linear(width, 4), torch.zeros(2, width)

def annotated(width: int):
    return nn.Linear(width, 4), torch.zeros(2, width)
"""


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("by_default", ["--set", "width=abc"], "width is a number, and width=abc gives a text"),
        ("annotated", ["--set", "width=abc"], "width is a number, and width=abc gives a text"),
        ("annotated", [], "missing a required argument: 'width'; --set NAME=VALUE gives an argument"),
    ],
)
def test_settings_of_a_function_are_blamed_and_not_its_lines(
    name: str, more: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(FILE)
    end, error = ended("plan", f"{tmp_path / 'net.py'}:{name}", *more)
    assert end == "1 True"
    assert said in error
