"""Same graph, options and versions: the same plan, in every process; and a plan can be kept and used again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import roamc
from roamc import compat_aot
from roamc.capture import joint
from roamc.capture.step import capture_step
from roamc.capture.step_trace import StepRequest
from roamc.graph import TrainGraph
from roamc.options import Options
from roamc.planning import search
from roamc.runtime.program import Executable
from tests.end_to_end.helpers import assert_same, seeded, sgd
from tests.models import make

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch, roamc
from tests.models import make
step, module = sys.argv[1:]
model, batch, loss = make(step)
optimizer = torch.optim.AdamW(model.parameters())
print(roamc.plan(model, *batch, loss_fn=loss, optimizer=optimizer).to_json())
model, batch, loss = make(module)
print(roamc.plan(model, *batch).to_json())
roamc.optimize(model, strict=True)
loss(model, *batch).backward()
print(roamc.plans(model)[0].to_json())
"""


def environment(**more: str) -> dict[str, str]:
    """Of a process that finds the tests and this installation."""
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}


def captured(name: str, way: str) -> TrainGraph:
    """A graph straight from capture."""
    model, batch, loss_fn = make(name)
    if way == "step":
        return capture_step(StepRequest(model, loss_fn, sgd(model), batch, lambda leaves: tuple(leaves))).graph
    halves, outputs, static = compat_aot.forward_backward(model, batch)
    return joint.stitch(*halves, outputs, static, name)


each_way = pytest.mark.parametrize("way", ["step", "module"])


@pytest.mark.parametrize("names", [("nanogpt-dropout", "nanogpt"), ("bert", "gpt2")])
def test_two_processes_with_other_hash_seeds_agree(names: tuple[str, str]) -> None:
    def start(seed: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *names], cwd=ROOT, env=environment(PYTHONHASHSEED=seed), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    running = [start(seed) for seed in ("1", "4242")]
    first, second = (process.communicate(timeout=200)[0] for process in running)
    assert [process.returncode for process in running] == [0, 0]
    assert first.count('"fingerprint"') == 3
    assert first == second


@each_way
def test_a_plan_is_read_back_as_it_was(way: str) -> None:
    plan = search.run(captured("nanogpt", way), Options()).plan
    assert roamc.Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    assert json.loads(plan.to_json())["peak_bytes"] == plan.peak_bytes
    timed = roamc.Plan.from_json(plan.to_json(seconds=True))
    assert timed.seconds == plan.seconds


@each_way
@pytest.mark.parametrize("name", ["nanogpt-dropout", "vit"])
def test_a_kept_plan_gives_the_same_order_layout_and_program(name: str, way: str) -> None:
    first = search.run(captured(name, way), Options())
    kept = roamc.Plan.from_json(first.plan.to_json())
    second = search.run(captured(name, way), Options(), plan=kept)
    assert second.graph.layout == first.graph.layout
    assert second.plan.to_json() == first.plan.to_json()
    assert [str(node) for node in second.graph.graph.nodes] == [str(node) for node in first.graph.graph.nodes]
    assert Executable(second).program.source == Executable(first).program.source


def test_a_kept_plan_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = search.run(captured("nanogpt", "step"), Options()).plan

    def decide(*args: object) -> None:
        raise AssertionError("a pass decided although there is a plan")

    monkeypatch.setattr("roamc.passes.reorder.solve", decide)
    monkeypatch.setattr("roamc.passes.layout.choose.solve", decide)
    assert search.run(captured("nanogpt", "step"), Options(), plan=kept).plan == kept


def test_a_plan_of_another_graph_is_refused() -> None:
    kept = search.run(captured("nanogpt", "step"), Options()).plan
    with pytest.raises(roamc.PlanError, match="another graph"):
        search.run(captured("vit", "step"), Options(), plan=kept)
    with pytest.raises(roamc.PlanError, match="another graph"):
        search.run(captured("nanogpt", "module"), Options(), plan=kept)


def test_plans_of_one_process_agree_whatever_ran_before() -> None:
    texts = [search.run(captured("nanogpt", "step"), Options()).plan.to_json() for _ in range(2)]
    seeded(lambda: search.run(captured("nanogpt-dropout", "module"), Options()), seed=5)
    texts.append(search.run(captured("nanogpt", "step"), Options()).plan.to_json())
    assert_same(texts, [texts[0]] * 3)
