"""Logs and printed graphs as targets of the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roamc.cli import dumps
from roamc.cli.asked import Request
from roamc.frontends import workload
from roamc.frontends.workload import OPTIMIZERS, Workload
from roamc.gpus import CONTEXT, GPUS, LIBRARIES
from roamc.graph.memory import ASSUMED_STATE, input_bytes
from roamc.planning.planned import margin_of
from roamc.units import format_bytes
from tests.capture.dump.archives import Mixed, Small, save, tokens
from tests.capture.dump.logged import made
from tests.capture.dump.test_logs import write_log
from tests.capture.dump.test_text import CLASS, PEAK, PREFIX
from tests.cli.test_cli import run
from tests.planning.test_total import plan_or_refused


@pytest.fixture
def printed(tmp_path: Path) -> str:
    file = tmp_path / "issue.txt"
    file.write_text(CLASS + "\n" + CLASS.replace("net.py:3", "net.py:30"), "utf-8")
    return str(file)


def test_a_printed_graph_is_planned_and_explained(printed: str) -> None:
    plan = run("plan", printed).stdout
    assert plan.startswith("issue needs ")
    assert "note: graph 0 of 2, the one that needs most; --piece plans another\n" in plan
    assert re.search(r"\ngraph  operators  eager needs +keeps +fixed\s+0 +6 .* planned *\n1 +6 ", plan)
    assert json.loads(run("plan", printed, "--piece", "1", "--json").stdout)["peak_bytes"] == PEAK
    assert "net.py:30" in run("explain", printed, "--piece", "1", "--no-curve").stdout


def test_a_graph_of_a_cpu_is_planned_for_a_gpu_that_is_not_here(printed: str) -> None:
    plan = run("plan", printed, "--gpu", "rtx4090").stdout
    assert plan.startswith("issue fits ")
    assert "the file is of a CPU" in plan
    assert run("plan", printed, "--gpu", "2MB", code=2).exit_code == 2


def test_what_a_file_cannot_answer_is_said(printed: str) -> None:
    for option in (("--batch", "4"), ("--mesh", "dp=2"), ("--meta",)):
        result = run("plan", printed, *option, code=1)
        assert f"has the graph of a step without its model, which {option[0]} needs" in result.stderr
    assert "takes sgd, adam, adamw, none" in run("plan", printed, "--optimizer", "compact", code=1).stderr
    assert "max-batch plans several: give it the model" in run("max-batch", printed, "--gpu", "h100", code=1).stderr
    assert "no graph '7' is in" in run("plan", printed, "--piece", "7", code=1).stderr
    assert "--piece names a graph of a log" in run("plan", "mlp", "--piece", "7", code=1).stderr
    assert "values of its symbolic sizes" in run("plan", printed, "--set", "s0=x", code=1).stderr
    assert "has no size 's0'. All of its sizes are fixed" in run("plan", printed, "--set", "s0=8", code=1).stderr


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
    (size,) = re.findall(r"note: sizes as at the export: (s\d+) \(dimension 0 of x\) = 4; --set", plan)
    assert "AdamW the optimizer by default" in plan
    more = run("plan", archive, "--optimizer", "sgd", "--set", f"{size}=32", "--gpu", "h100").stdout
    assert more.startswith("model fits an H100")
    assert "as at the export" not in more
    assert "optimizer state" not in more


def test_what_an_archive_cannot_answer_is_said(archive: str, tmp_path: Path) -> None:
    assert "no size 'batch'; did" not in (said := run("plan", archive, "--batch", "8", code=1).stderr)
    assert re.search(r"has no size 'batch'\. Sizes: s\d+ \(dimension 0 of x\)", said)
    for axis in ("tp", "fsdp"):
        assert f"no layers that {axis} could split" in run("plan", archive, "--mesh", f"{axis}=2", code=1).stderr
    for option in (("--autocast", "bf16"), ("--gradient-checkpointing",)):
        said = run("plan", archive, *option, code=1).stderr
        assert f"has operators without layers, which {option[0]} needs: give the model" in said
    assert "--size names the one" in run("max-batch", archive, "--gpu", "1GB", code=1).stderr
    assert "no such file" in run("plan", str(tmp_path / "none.pt2"), code=1).stderr
    small = str(save(tmp_path / "small.pt2", Small(), (torch.randn(2, 8),)))
    for asked in (("--optimizer", "adamw"), ("--clip-grad-norm", "1")):
        said = run("plan", small, *asked, code=1).stderr
        assert f"small.pt2 has no loss, so {' '.join(asked[:2]).removesuffix(' 1')} has nothing to do; a .pt2" in said
    assert "export a module that returns its loss" in run("plan", small).stdout
    weights = tmp_path / "weights.pt"
    torch.save(Small().state_dict(), weights)
    assert "weights of torch.save, and no model" in run("plan", str(weights), code=1).stderr


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of one graph of each of three models, one after the other."""
    return write_log(tmp_path_factory.mktemp("several"), THREE)[0]


THREE = ("frozen", "bert", "written")
PIECES = ("0/0.0", "0/0.1", "0/0")
"""Graphs of a log in which dynamo was reset between models."""


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(("name", "piece"), list(zip(THREE, PIECES, strict=True)))
def test_assumed_states_are_those_of_a_captured_step(name: str, piece: str, optimizer: str, several: Path) -> None:
    asked = Request(str(several), piece=piece, optimizer=optimizer)
    graph = dumps.graph_in(asked)
    model, batch, loss = made(name)
    step = workload.capture(Workload(name, model, batch, loss, OPTIMIZERS[optimizer]))
    fixed, whole = input_bytes(graph), input_bytes(step)
    assert sum(fixed.values()) == sum(whole.values())
    assert fixed.get(ASSUMED_STATE) == whole.get("optimizer state")
    assert "optimizer state" not in fixed
    assert margin_of(graph) == margin_of(step)
    assert graph.notes[0].startswith("assumed for ")


def test_inputs_of_a_log_have_the_names_of_the_user(several: Path) -> None:
    names = [port.name for port in dumps.graph_in(Request(str(several), piece="0/0")).inputs]
    assert {f"layers.{number}.{part}" for number in range(3) for part in ("weight", "bias")} | {"x", "count"} < set(
        names
    )


def test_an_assumed_optimizer_counts_for_a_gpu_and_says_so(several: Path) -> None:
    plain = run("plan", str(several), "--piece", "0/0")
    assert "note: --optimizer adamw adds 25.34 kB of states; parameters that get a gradient: 6\n" in plain.stdout
    assert ", without the optimizer's states" in plain.stdout
    first, *lines = run("plan", str(several), "--piece", "0/0", "--optimizer", "adamw", "--gpu", "h100").stdout.split(
        "\n"
    )
    assert "fits an H100" in first
    assert "parameters, assumed optimizer state and inputs" in first
    assert "without the optimizer's states" not in first
    assert any(line.startswith("  fixed") and "assumed optimizer state 25.34 kB" in line for line in lines)
    assert any("note: assumed for --optimizer adamw: 25.34 kB of states; " in line for line in lines)
    budget = ("--memory-budget", "total:41kB")
    run("plan", str(several), "--piece", "0/0", *budget)
    run("plan", str(several), "--piece", "0/0", *budget, "--optimizer", "adamw", code=2)


def test_without_roles_nothing_is_assumed(printed: str) -> None:
    said = run("plan", printed, "--piece", "1", "--optimizer", "adam").stdout
    assert "the file does not say which inputs are parameters: nothing is assumed for --optimizer adam" in said
    assert "without the optimizer's states" in said


def test_sizes_among_the_inputs_move_no_parameter_and_no_gradient(tmp_path: Path) -> None:
    size = '        primals_0: "Sym(s0)"  # PlainAOTInput(idx=0)\n        primals_1: '
    text = CLASS.replace("        primals_1: ", size, 1).replace("None,  # None", "None, None,  # None")
    text = text.replace("PlainAOTInput(idx=1)\n", "ParamAOTInput(target='w')\n")
    file = tmp_path / "sizes.txt"
    file.write_text(text, "utf-8")
    said = run("plan", str(file), "--set", "s0=8").stdout
    assert "  fixed            1.536 kB  input 512 B, parameter 1.024 kB" in said
    assert "--optimizer adamw adds 2.048 kB of states; parameters that get a gradient: 1" in said
    assert "not every operator of backward was found" not in said


def test_comments_of_a_text_say_which_inputs_are_parameters(tmp_path: Path) -> None:
    file = tmp_path / "roles.txt"
    file.write_text(CLASS.replace("PlainAOTInput(idx=1)\n", "ParamAOTInput(target='w')\n"), "utf-8")
    said = run("plan", str(file), "--optimizer", "adam").stdout
    assert "parameter 1.024 kB, assumed optimizer state 2.048 kB" in said
    assert "does not say which inputs" not in said


BROKEN = """
import torch
from torch import nn

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        BREAK
        x = torch.tanh(self.second(x))
        return torch.sin(self.first(x)).square().mean()

step = torch.compile(Broken(), backend="aot_eager", dynamic=False)
for rows in (8, 32, 16):
    step(torch.randn(rows, 64)).backward()
"""
HELD = (64 * 64 + 64) * 4
"""Bytes of one of its layers."""


def _log(folder: Path, source: str) -> Path:
    program = folder / "program.py"
    folder.mkdir(exist_ok=True)
    program.write_text(source, "utf-8")
    environment = {**os.environ, "TORCH_TRACE": str(folder / "trace"), "OMP_NUM_THREADS": "1"}
    subprocess.run((sys.executable, str(program)), env=environment, check=True, capture_output=True, timeout=300)
    return folder / "trace"


def test_graphs_of_one_log_are_a_table_and_add_up(tmp_path: Path) -> None:
    trace = str(_log(tmp_path, BROKEN.replace("BREAK", "torch._dynamo.graph_break()")))
    said = run("plan", trace, "--json").stdout
    answer = json.loads(said)
    pieces = {each["name"]: each for each in answer["pieces"]}
    assert set(pieces) == {"0/0", "0/1", "0/2", "1/0", "1/1", "1/2"}
    most = max(answer["pieces"], key=lambda each: each["eager_bytes"])
    assert most["planned"]
    assert most["name"] == "1/1"
    assert answer["baseline_needed_bytes"] == most["eager_bytes"]
    # the first layer is read in both graphs, and its weights count once; the batch, and what is handed on, twice
    fixed = 2 * HELD + 2 * 32 * 64 * 4
    step = most["eager_bytes"] + pieces["0/1"]["kept_bytes"]
    (note,) = (note for note in answer["notes"] if "if all are saved at once" in note)
    assert f"at most {format_bytes(fixed + step)} = {format_bytes(fixed)} fixed + {format_bytes(step)} steps: " in note
    assert "one of 2 graphs at its peak" in note
    assert "alternatives: the largest counts" in note

    assert any("torch.compile broke the graph at program.py:" in note for note in answer["notes"])

    whole = _log(tmp_path / "whole", BROKEN.replace("BREAK", "").replace("(8, 32, 16)", "(32,)"))
    plan = json.loads(run("plan", str(whole), "--json").stdout)
    assert "pieces" not in plan
    assert not any("broke the graph" in note for note in plan["notes"])
    assert plan["baseline_needed_bytes"] + sum(plan["fixed_bytes"].values()) <= fixed + step


def test_a_graph_that_cannot_be_read_is_a_row_beside_the_others(tmp_path: Path) -> None:
    file = tmp_path / "two.txt"
    file.write_text(CLASS + "\n" + CLASS.replace('primals_2: "f32[16', 'primals_2: "f32[15'), "utf-8")
    said = run("plan", str(file)).stdout
    assert "without 1 that cannot be read" in said
    assert re.search(r"\n1 +6 +\S*two.txt:\d+: aten.mm.default refuses", said)


def test_a_prefix_names_the_graphs_of_a_text(tmp_path: Path) -> None:
    file = tmp_path / "logs.txt"
    lines = [PREFIX.replace("[0/0]", f"[{name}]") + line for name in ("0/0", "0/1") for line in CLASS.split("\n")]
    file.write_text("\n".join(lines), "utf-8")
    said = run("plan", str(file), "--piece", "0/1").stdout
    assert said.startswith("logs needs ")
    assert "0/0, 0/1" in run("plan", str(file), "--piece", "1", code=1).stderr


def test_logs_of_several_runs_in_a_folder_have_names_of_their_own(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.log").write_text(CLASS, "utf-8")
    assert "first:0, second:0" in run("plan", str(tmp_path), "--piece", "1", code=1).stderr
    assert "one of 1 graphs at its peak" in run("plan", str(tmp_path)).stdout
    (tmp_path / "died_early.log").write_text("", "utf-8")
    said = " ".join(run("plan", str(tmp_path)).stdout.split())
    assert "1 of 3 logs cannot be read" in said
    assert "one of 1 graphs at its peak" in said


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("rows", [8, 1 << 25, 1 << 28, 1 << 29, 1 << 30])
def test_a_files_total_is_the_sum_by_hand_and_the_verdict_right(rows: int, gpu: str, tmp_path: Path) -> None:
    """Two products of ``rows`` times 16 numbers, a weight with Adam's states, all as a GPU holds them."""
    text = CLASS.replace("f32[8, 16]", "f32[s0, 16]").replace("f32[16, 8][1, 16]", "f32[16, s0][1, 16]")
    file = tmp_path / "graph.txt"
    file.write_text(text.replace("PlainAOTInput(idx=1)\n", "ParamAOTInput(target='w')\n"), "utf-8")
    asked = Request(str(file), sets=(f"s0={rows}",), optimizer="adam", gpu=gpu, device="cuda")
    plan = plan_or_refused(dumps.graph_in(asked), {"gpu": gpu})
    batch, weight = rows * 16 * 4, 16 * 16 * 4
    held = batch + 3 * weight
    # the output and gradients at the ReLU, from above and below it; or behind the output what the last product reads
    # and makes
    step = max(3 * batch, 2 * batch + weight)
    assert plan.peak_bytes == step
    by_hand = held + plan.needed_bytes + CONTEXT + LIBRARIES + held // 50
    by_hand += (plan.needed_bytes - plan.arena_bytes) // 50
    assert plan.total_bytes == by_hand
    assert plan.fits == (by_hand <= GPUS[gpu].capacity)
    assert plan.notes[0].startswith("assumed for --optimizer adam")
