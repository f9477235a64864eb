"""``roamc max-batch``: the largest batch, sequence or other size of a built-in model or a function of a file."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import roamc
from roamc.cli.commands import app
from tests.cli.test_cli import run as run_command

run = functools.partial(run_command, "max-batch")

SMALL = ["--seq", "16", "--layers", "1", "--width", "32", "--heads", "4", "--vocab", "64"]

FILE = """
import torch
from torch import nn

def make(batch, width=16):
    model = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
    assert model[0].weight.is_meta
    return model, torch.empty(batch, width), lambda model, x: model(x).square().mean()

def without():
    return nn.Linear(2, 2), torch.empty(2, 2)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_batch_of_a_built_in_model() -> None:
    first, *table = run("gpt", *SMALL, "--memory-budget", "700kB").stdout.splitlines()
    assert first.startswith("gpt: the largest batch that fits is ")
    assert " does not fit; recomputation adds " in first
    assert table[0].startswith("gpt needs ")


def test_json_is_what_plan_says_of_both_sizes() -> None:
    answer = json.loads(run("gpt", *SMALL, "--memory-budget", "700kB", "--device", "cuda", "--json").stdout)
    assert answer["what"] == "batch"
    assert answer["too_large"] == answer["size"] + 1
    assert answer["fits"]
    for size, code in ((answer["size"], 0), (answer["too_large"], 2)):
        arguments = ["plan", "gpt", *SMALL, "--memory-budget", "700kB", "--device", "cuda", "--batch", str(size)]
        assert CliRunner().invoke(app, arguments).exit_code == code


@pytest.mark.parametrize(
    ("asked", "command"),
    [
        (("--memory-budget", "100kB", "--stage", "0", "--mesh", "pp=1"), "--mesh pp=1 --stage 0 --memory-budget 100kB"),
        (("--gpu", "577MB", "--set", "batch=9"), "--gpu 577MB"),
        (("--gpu", "577MB", "--memory-budget", "100%"), "--gpu 577MB"),
        (("--gpu", "577MB", "--memory-budget", "total:1GB"), "--gpu 577MB"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_command_that_looks_for_a_smaller_batch(
    asked: tuple[str, ...], command: str
) -> None:
    result = CliRunner().invoke(app, ["plan", "gpt", *SMALL, "--batch", "64", *asked])
    said = " ".join(result.output.split())
    assert result.exit_code == 2
    assert f"or use a smaller batch: roamc max-batch gpt {' '.join(SMALL)} {command}" in said
    assert said.count("--memory-budget") == command.count("--memory-budget"), "one that max-batch takes"
    assert "--batch 64" not in said
    assert "batch=9" not in said


def test_the_command_that_is_named_finds_the_batch() -> None:
    budget = ("--memory-budget", "total:300kB", "--optimizer", "sgd")
    said = CliRunner().invoke(app, ["plan", "gpt", *SMALL, "--batch", "64", *budget]).output
    _, _, words = said.rstrip().rpartition(": roamc max-batch ")
    assert re.match(r"gpt: the largest batch that fits is \d+; \d+ does not fit", run(*words.split()).stdout)


def test_no_command_is_named_for_a_function_that_may_have_no_batch(file: str) -> None:
    said = CliRunner().invoke(app, ["plan", f"{file}:without", "--memory-budget", "1kB"]).output
    assert said.rstrip().endswith("or use a smaller batch")
    said = (
        CliRunner().invoke(app, ["plan", f"{file}:make", "--meta", "--batch", "999", "--memory-budget", "100kB"]).output
    )
    assert said.rstrip().endswith(f"roamc max-batch {file}:make --meta --memory-budget 100kB")


def test_gpu_is_a_limit_of_the_whole_process() -> None:
    small = ["gpt", "--seq", "512", *SMALL[2:], "--gpu", "640MB"]
    answer = json.loads(run(*small, "--json").stdout)
    assert answer["too_large"] == answer["size"] + 1
    for size, code in ((answer["size"], 0), (answer["too_large"], 2)):
        assert CliRunner().invoke(app, ["plan", *small, "--batch", str(size)]).exit_code == code


def test_sequence_is_another_size() -> None:
    small = ["--batch", "2", *SMALL[2:]]
    answer = run("gpt", *small, "--memory-budget", "2MB", "--size", "seq", "--largest", "40", "--no-recomputation")
    first = answer.stdout.splitlines()[0]
    assert first.startswith("gpt: the largest seq that fits is 40; no larger one was tried; nothing is recomputed (")


def test_function_of_a_file_is_called_on_the_meta_device(file: str) -> None:
    answer = json.loads(run(f"{file}:make", "--memory-budget", "100kB", "--json").stdout)
    scope: dict[str, Any] = {}
    exec(FILE, scope)
    fit = roamc.max_batch(scope["make"], "100kB")
    assert (answer["size"], answer["too_large"]) == (fit.size, fit.too_large)


def test_mesh_halves_a_model() -> None:
    budget = ["--memory-budget", "700kB", "--json"]
    whole, half = (json.loads(run("gpt", *SMALL, *budget, *mesh).stdout) for mesh in ((), ("--mesh", "tp=2")))
    assert half["size"] > whole["size"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["gpt", *SMALL, "--memory-budget", "20kB"], 2, "does not fit: not even size 1, the smallest that is"),
        (["gpt", "--memory-budget", "80%"], 1, "a memory_budget in bytes, in all such as 'total:40GB', or 'device', "),
        (["gpt"], 1, "max_batch needs a memory_budget in bytes"),
        (["gpt", "--memory-budget", "1GB", "--batch", "2"], 1, "--batch is what max-batch looks for: leave it out"),
        (["gpt", "--memory-budget", "1GB", "--memory-budget", "2GB"], 1, "max-batch takes one --memory-budget"),
        (["gpt", "--memory-budget", "1GB", "--size", "baych"], 1, "gpt has no setting 'baych'; did you mean"),
        (["gpt", "--memory-budget", "1GB", "--smallest", "4", "--largest", "3"], 1, "largest must be a whole number"),
        (["FILE:without", "--memory-budget", "1GB"], 1, "has no argument 'batch'. It has none; --size names"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(arguments: list[str], code: int, said: str, file: str) -> None:
    arguments = [argument.replace("FILE", file) for argument in arguments]
    assert said in run(*arguments, code=code).stderr
