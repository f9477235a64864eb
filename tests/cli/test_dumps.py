"""Logs and printed graphs as targets of the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.capture.dump.archives import Mixed, Small, save, tokens
from tests.capture.dump.test_text import CLASS, PEAK
from tests.cli.test_cli import run


@pytest.fixture
def printed(tmp_path: Path) -> str:
    file = tmp_path / "issue.txt"
    file.write_text(CLASS + "\n" + CLASS.replace("net.py:3", "net.py:30"), "utf-8")
    return str(file)


def test_a_printed_graph_is_planned_and_explained(printed: str) -> None:
    plan = run("plan", printed).stdout
    assert plan.startswith("issue needs ")
    assert re.search(r"note: graph 0 of 2, the largest; --piece plans another: 1 \(6 operators\)", plan)
    assert json.loads(run("plan", printed, "--piece", "1", "--json").stdout)["peak_bytes"] == PEAK
    assert "net.py:30" in run("explain", printed, "--piece", "1", "--no-curve").stdout


def test_a_graph_of_a_cpu_is_planned_for_a_gpu_that_is_not_here(printed: str) -> None:
    plan = run("plan", printed, "--gpu", "rtx4090").stdout
    assert plan.startswith("issue fits ")
    assert "the file is of a CPU" in plan
    assert run("plan", printed, "--gpu", "2MB", code=2).exit_code == 2


def test_what_a_file_cannot_answer_is_said(printed: str) -> None:
    for option in (("--batch", "4"), ("--optimizer", "sgd"), ("--mesh", "dp=2"), ("--meta",)):
        result = run("plan", printed, *option, code=1)
        assert f"has the graph of a step without its model, which {option[0]} needs" in result.stderr
    assert "max-batch plans several: give it the model" in run("max-batch", printed, "--gpu", "h100", code=1).stderr
    assert "no graph '7' is in" in run("plan", printed, "--piece", "7", code=1).stderr
    assert "--piece names a graph of a log" in run("plan", "mlp", "--piece", "7", code=1).stderr
    assert "values of its symbolic sizes" in run("plan", printed, "--set", "s0=x", code=1).stderr


def test_a_file_without_a_graph_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text("step 1 loss 0.5\n", "utf-8")
    assert "TORCH_TRACE=folder python train.py" in run("plan", str(file), code=1).stderr
    (tmp_path / "traces").mkdir()
    said = run("explain", str(tmp_path / "traces"), code=1).stderr
    assert "has no config.json, and no log of TORCH_TRACE" in said


@pytest.fixture
def archive(tmp_path: Path) -> str:
    shapes = {"dynamic_shapes": ({0: torch.export.Dim("b", min=2)},)}
    return str(save(tmp_path / "model.pt2", Mixed(), (tokens(4),), **shapes))


def test_an_archive_is_planned_with_an_optimizer_sizes_and_a_gpu(archive: str) -> None:
    plan = run("plan", archive, "--clip-grad-norm", "1").stdout
    (size,) = re.findall(r"note: sizes as at the export: (s\d+) = 4; --set", plan)
    assert "AdamW the optimizer by default" in plan
    more = run("plan", archive, "--optimizer", "sgd", "--set", f"{size}=32", "--gpu", "h100").stdout
    assert more.startswith("model fits an H100")
    assert "as at the export" not in more
    assert "optimizer state" not in more


def test_what_an_archive_cannot_answer_is_said(archive: str, tmp_path: Path) -> None:
    assert "no size 'batch'; did" not in (said := run("plan", archive, "--batch", "8", code=1).stderr)
    assert "has no size 'batch'" in said
    assert "no layers that tp could split" in run("plan", archive, "--mesh", "tp=2", code=1).stderr
    assert "--size names the one" in run("max-batch", archive, "--gpu", "1GB", code=1).stderr
    assert "no such file" in run("plan", str(tmp_path / "none.pt2"), code=1).stderr
    small = str(save(tmp_path / "small.pt2", Small(), (torch.randn(2, 8),)))
    assert "has no loss_fn" in run("plan", small, "--optimizer", "adamw", code=1).stderr
    weights = tmp_path / "weights.pt"
    torch.save(Small().state_dict(), weights)
    assert "weights of torch.save, and no model" in run("plan", str(weights), code=1).stderr
