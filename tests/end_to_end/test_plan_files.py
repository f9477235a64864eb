"""Plans from files, through each way in: the same decisions, bits and bytes; what is wrong with a file is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.errors import PlanError
from roamc.planning.plan import Plan

BUDGET = "70%"


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x).square().mean()
    return result


def _step(model: nn.Module, x: Tensor, **options: object) -> tuple[list[Plan], Tensor]:
    step = roamc.train_step(model, _loss, torch.optim.AdamW(model.parameters()), **options)
    loss = step(x)
    return step.plans, loss


def _optimized(model: nn.Module, x: Tensor, **options: object) -> tuple[list[Plan], Tensor]:
    roamc.optimize(model, **options)
    loss = _loss(model, x)
    loss.backward()
    return roamc.plans(model), loss.detach()


def _compiled(model: nn.Module, x: Tensor, **options: object) -> tuple[list[Plan], Tensor]:
    loss = _loss(torch.compile(model, backend="roamc", options=options), x)  # type: ignore[call-overload]
    loss.backward()
    return roamc.plans()[-1:], loss.detach()


@pytest.mark.parametrize("way", [_step, _optimized, _compiled])
def test_a_saved_plan_is_applied(way, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    x, path = torch.randn(2048, 16), tmp_path / "plan.json"
    first, second = _net(), _net()
    planned, loss = way(first, x, memory_budget=BUDGET)
    planned[0].save(path)
    assert roamc.load_plan(path) == planned[0]
    torch.compiler.reset()
    applied, again = way(second, x, memory_budget=BUDGET, plan=path)
    assert applied[0] == planned[0]
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_another_graph_is_planned_anew_with_a_note(tmp_path: Path) -> None:
    model, path = _net(), tmp_path / "plan.json"
    step = roamc.train_step(model, _loss, torch.optim.AdamW(model.parameters()))
    step(torch.randn(32, 16))
    step.plans[0].save(path)
    other = roamc.train_step(model, _loss, torch.optim.AdamW(model.parameters()), plan=path)
    other(torch.randn(8, 16))
    assert any(f"no plan of {path} is for this graph" in note for note in other.plans[0].notes)


def test_files_that_are_no_plans_are_refused(tmp_path: Path) -> None:
    missing, damaged, lying, changed, bare = (
        tmp_path / f"{name}.json" for name in ("missing", "damaged", "lying", "changed", "bare")
    )
    damaged.write_text("{")
    model = _net()
    step = roamc.train_step(model, _loss, torch.optim.AdamW(model.parameters()))
    step(torch.randn(32, 16))
    data = json.loads(step.plans[0].to_json())
    lies = {**data, "peak_bytes": data["peak_bytes"] - 1}
    Plan.from_json(json.dumps(lies)).save(lying)
    changed.write_text(lying.read_text().replace(str(lies["peak_bytes"]), str(data["peak_bytes"])))
    bare.write_text(json.dumps(data))
    for path, message in (
        (missing, "missing.json: no such file"), (damaged, "damaged.json: not a plan"), (lying, "peak_bytes"),
        (changed, "changed.json: it was changed after it was saved"), (bare, "bare.json: it has no checksum"),
    ):  # fmt: skip
        other = roamc.train_step(model, _loss, torch.optim.AdamW(model.parameters()), plan=str(path))
        with pytest.raises(PlanError, match=message):
            other(torch.randn(32, 16))
