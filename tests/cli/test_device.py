"""Plans for a GPU on the command line, where no GPU need be."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import roamc
from roamc.capture.moved import built_for
from roamc.cli.request import Request, answer
from roamc.cost import load_profile, store_profile
from roamc.frontends.workload import from_file
from tests.cli.test_cli import SMALL, run

GPU = [*SMALL, "--device", "cuda"]
HALF = ["--set", "dtype=bfloat16"]

FILE = """
import torch
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True, dropout_p=0.1)
        return mixed.transpose(1, 2).flatten(2)

def make(width=64):
    return Attention(width).bfloat16(), torch.zeros(2, 32, width, dtype=torch.bfloat16), lambda m, x: m(x).float().sum()

context = torch.autocast("cuda", dtype=torch.bfloat16)

def under_autocast(width=64):
    def loss(model, x):
        with context:
            return model(x).sum()

    return nn.Linear(width, width, bias=False), torch.zeros(32, width), loss

class OnCpu(nn.Linear):
    def forward(self, x):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(super().forward(x), x, x)[0]

def on_a_cpu(width=64):
    return OnCpu(width, width), torch.zeros(1, 2, 8, width)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_source_is_the_program_of_a_gpu() -> None:
    source = run("explain", "gpt", *GPU, *HALF, "--option", "numerics=fast", "--source").stdout
    ast.parse(source)
    assert source.count("@triton.jit") == len(re.findall(r"^def fused_\w+\(.*tl\.constexpr", source, re.MULTILINE)) > 0
    assert "aten__scaled_dot_product_flash_attention(" in source
    assert "aten__scaled_dot_product_flash_attention_backward(" in source
    assert "for_cpu" not in source
    assert "cpu" not in "".join(re.findall(r'device="(\w+)', source))


def test_plan_says_the_profile_and_what_is_not_known(tmp_path: Path) -> None:
    shown = run("plan", "gpt", *GPU, "--save", str(tmp_path / "plan.json")).stdout
    assert "nothing was measured, and for workspaces of cuBLAS and cuDNN the margin has a fixed share" in shown
    assert "note: times are those of the device profile h100" in shown
    assert roamc.Plan.from_json((tmp_path / "plan.json").read_text()).device == "cuda"
    assert roamc.Plan.from_json(run_plan("gpt", *SMALL)).device == "cpu"


def run_plan(*arguments: str) -> str:
    data = json.loads(run("plan", *arguments, "--json").stdout)
    derived = ("fragmentation", "total_bytes", "fits", "baseline_total_bytes", "baseline_fits")
    return json.dumps({key: value for key, value in data.items() if key not in derived})


def test_profile_gives_the_times_and_not_the_bytes() -> None:
    named = [json.loads(run_plan("gpt", *GPU, "--memory-budget", "80%", *more)) for more in ((), ("--profile", "a100"))]
    assert named[0]["step_seconds"] < named[1]["step_seconds"]
    assert named[0]["baseline_bytes"] == named[1]["baseline_bytes"]
    assert "times are those of the device profile a100" in named[1]["notes"]
    as_option = json.loads(run_plan("gpt", *GPU, "--memory-budget", "80%", "--option", "profile=a100"))
    assert as_option["step_seconds"] == named[1]["step_seconds"]


def test_a_plan_for_a_cpu_says_if_its_times_are_not_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roamc.cost.profile.measured_folder", lambda: tmp_path)
    note = "times are those of a shipped profile; roamc calibrate measures this machine"
    assert note in json.loads(run_plan("gpt", *SMALL))["notes"]
    assert note not in json.loads(run_plan("gpt", *SMALL, "--profile", "cpu"))["notes"]
    store_profile(replace(load_profile("cpu", "cpu"), name="measured", threads=torch.get_num_threads()))
    assert note not in json.loads(run_plan("gpt", *SMALL))["notes"]


def test_profile_is_read_for_a_cpu_as_well() -> None:
    times = [
        json.loads(run_plan("gpt", *SMALL, "--memory-budget", "90%", "--profile", name))["step_seconds"]
        for name in ("cpu", "h100")
    ]
    assert times[0] != times[1]


@pytest.mark.parametrize("route", [[], ["--forward-backward"]], ids=["step", "joint"])
def test_function_of_a_file_is_planned_for_a_gpu(file: str, route: list[str]) -> None:
    arguments = [f"{file}:make", "--device", "cuda", "--set", "width=32", "--meta", *route]
    source = run("explain", *arguments, "--source").stdout
    assert re.search(r"_scaled_dot_product_flash_attention\(.* 0\.1, True, scale=.*# mine\.py:\d+", source)
    assert json.loads(run_plan(*arguments, "--memory-budget", "min"))["device"] == "cuda"


@pytest.mark.parametrize("name", ["bert", "llama", "resnet50", "t5", "vit", "mobilenetv2", "gpt2"])
def test_built_in_models_are_planned_for_a_gpu(name: str) -> None:
    pytest.importorskip("transformers")
    sizes = {
        "resnet50": ("--batch", "2", "--set", "image=64"),
        "mobilenetv2": ("--batch", "2", "--set", "image=64"),
        "vit": ("--batch", "2", "--layers", "1", "--set", "image=32"),
    }.get(name, ("--batch", "2", "--seq", "32", "--layers", "1", "--vocab", "128"))
    data = json.loads(run_plan(name, *sizes, *HALF, "--device", "cuda"))
    assert data["device"] == "cuda"
    assert data["peak_bytes"] <= data["baseline_bytes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model can go to the GPU that is here")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_that_goes_to_a_gpu_is_told_the_way_without(device: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 2).cuda(), torch.zeros(2, 2)\n")
    said = run("plan", f"{path}:make", "--device", device, code=1).stderr
    assert re.search(r"error: mine\.py:3: .*: leave \.cuda\(\) and device='cuda' out; --device cuda or --gpu", said)


@pytest.mark.parametrize("whole", [True, False], ids=["step", "joint"])
def test_plan_of_python_is_that_of_the_command_line(file: str, whole: bool) -> None:
    with built_for(torch.device("cuda")):
        workload = from_file(f"{file}:make", {})
    x = torch.zeros(2, 32, 64, dtype=torch.bfloat16)
    way = (
        {"optimizer": torch.optim.AdamW(workload.model.parameters(), lr=1e-3)} if whole else {"forward_backward": True}
    )
    plan = roamc.plan(workload.model, x, device="cuda", loss_fn=workload.loss_fn, **way)
    asked = answer(Request(f"{file}:make", device="cuda", forward_backward=not whole)).plan
    assert plan.device == "cuda"
    assert (plan.peak_bytes, plan.fixed_bytes, plan.decisions) == (asked.peak_bytes, asked.fixed_bytes, asked.decisions)
    assert set(asked.notes) == set(plan.notes)
    assert "times are those of the device profile h100" in plan.notes


def test_device_or_profile_of_python_that_cannot_be() -> None:
    model, x = torch.nn.Linear(2, 2), torch.zeros(2, 2)
    with pytest.raises(roamc.OptionError, match="device must be one of cpu, cuda, not 'tpu'"):
        roamc.plan(model, x, device="tpu")
    with pytest.raises(roamc.OptionError, match="gpu='h100' plans for a GPU, and device='cpu' for a CPU: leave one"):
        roamc.plan(model, x, device="cpu", gpu="h100")
    with pytest.raises(roamc.OptionError, match="profile 'cpu' describes a cpu; give a GPU's, such as h100"):
        roamc.plan(model, x, device="cuda", profile="cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpt", *SMALL, "--device", "tpu"], "--device must be one of cpu, cuda, not 'tpu'"),
        (["gpt", *GPU, "--profile", "cpu"], "profile 'cpu' describes a cpu; give a GPU's, such as h100"),
        (["gpt", *GPU, "--profile", "b900"], "'b900' is neither a file nor a shipped profile"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "explain"])
def test_device_or_profile_that_cannot_be(command: str, arguments: list[str], said: str) -> None:
    assert said in run(command, *arguments, code=1).stderr


def test_operator_of_the_cpu_alone_is_named_with_its_line(file: str) -> None:
    said = run("plan", f"{file}:on_a_cpu", "--device", "cuda", code=1).stderr
    assert re.search(r"flash_attention_for_cpu\.default \(mine\.py:\d+\) cannot be planned for cuda: only a CPU", said)


def test_autocast_that_a_file_makes_when_it_is_read_is_that_of_the_gpu(file: str) -> None:
    """As nanoGPT makes its own at the head of the script."""
    printed = run("explain", f"{file}:under_autocast", "--gpu", "h100", "--graph").stdout
    assert re.search(r"bfloat16.*aten\.mm|aten\.mm.*bfloat16", printed)


def test_kernels_belong_to_the_report() -> None:
    for text in ("--source", "--graph"):
        said = run("explain", "gpt", *GPU, "--kernels", text, code=1).stderr
        assert "--kernels adds to the report, which --source and --graph leave out" in said


def test_kernels_are_compiled_ahead_of_time() -> None:
    """In a process of its own, where Triton compiles and does not interpret; a GELU has several results."""
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    asked = ["explain", "gpt2", *GPU, *HALF, "--option", "numerics=fast", "--no-curve", "--kernels", "--json"]
    setting = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "roamc", *asked], capture_output=True, text=True, check=True, env=setting
    )
    data = json.loads(done.stdout)
    decided = data["plan"]["decisions"]["fuse"]
    groups, shared = decided["groups"], decided["launches"]
    assert shared, "updates of small parameters share a launch"
    assert sum(kernel["count"] for kernel in data["kernels"]) == len(groups) - sum(len(names) - 1 for names in shared)
    for kernel in data["kernels"]:
        functions = {target["kernel"] for target in kernel["targets"]}  # two, where the kernel adds up over rows
        taken = sorted((target["kernel"], target["target"]) for target in kernel["targets"])
        assert taken == sorted((function, name) for function in functions for name in ("sm_80", "sm_90"))
        for target in kernel["targets"]:
            assert 0 < target["registers"] < 256
            assert target["spilled_bytes"] == 0
