"""Plans from files, through each way in: the same decisions, bits and bytes; what is wrong with a file is said."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import roamc
from roamc.errors import BudgetError, PlanError
from roamc.planning import plan_files, search
from roamc.planning.plan import Plan
from tests.small_models import small_net, square

BUDGET = "70%"


def _step(model: nn.Module, x: Tensor, **options: object) -> tuple[list[Plan], Tensor]:
    step = roamc.train_step(model, square, torch.optim.AdamW(model.parameters()), **options)
    loss = step(x)
    return step.plans, loss


def _optimized(model: nn.Module, x: Tensor, **options: object) -> tuple[list[Plan], Tensor]:
    roamc.optimize(model, **options)
    loss = square(model, x)
    loss.backward()
    return roamc.plans(model), loss.detach()


def _compiled(model: nn.Module, x: Tensor, **options: object) -> tuple[list[Plan], Tensor]:
    loss = square(torch.compile(model, backend="roamc", options=options), x)  # type: ignore[call-overload]
    loss.backward()
    return roamc.plans()[-1:], loss.detach()


@pytest.mark.parametrize("way", [_step, _optimized, _compiled])
def test_a_saved_plan_is_applied(way, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    x, path = torch.randn(2048, 16), tmp_path / "plan.json"
    first, second = small_net(), small_net()
    planned, loss = way(first, x, memory_budget=BUDGET)
    planned[0].save(path)
    assert roamc.load_plan(path) == planned[0]
    torch.compiler.reset()
    applied, again = way(second, x, memory_budget=BUDGET, plan=path)
    assert applied[0] == planned[0]
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def _saved(path: Path, rows: int = 2048, **options: object) -> Plan:
    planned, _ = _step(small_net(), torch.randn(rows, 16), **options)
    planned[0].save(path)
    return planned[0]


@pytest.mark.parametrize("way", [_step, _optimized, _compiled])
def test_another_graph_is_planned_anew_with_a_warning_and_refused_if_strict(way, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path, x = tmp_path / "plan.json", torch.randn(8, 16)
    _saved(path, 32)
    torch.compiler.reset()
    with pytest.warns(UserWarning, match=rf"no plan of {path} is for this graph, .*; it is planned anew \(options"):
        planned, _ = way(small_net(), x, plan=path)
    assert any(f"no plan of {path} is for this graph" in note for note in planned[0].notes)
    torch.compiler.reset()
    with pytest.raises((PlanError, BackendCompilerFailed), match=rf"no plan of {path} is for this graph"):
        way(small_net(), x, plan=path, strict=True)


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ("min", r"was made for [0-9.]+ MB, which may need more than memory_budget='min' takes"),
        ("light", r"was made for [0-9.]+ MB, which may need more than memory_budget='light' takes"),
        ("+1%", r"adds [0-9.]+% of the step's time, above memory_budget='\+1%'"),
        ("+0%", r"adds [0-9.]+% of the step's time, above memory_budget='\+0%'"),
        ("60%", r"needs [0-9.]+ MB \([0-9]+ bytes\), above memory_budget='60%', [0-9]+ bytes here"),
    ],
)
@pytest.mark.parametrize("way", [_step, _compiled])
def test_a_plan_that_does_not_keep_the_budget_is_refused(way, budget: str, reason: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.json"
    planned, _ = way(small_net(), torch.randn(2048, 16), memory_budget=BUDGET)
    planned[0].save(path)
    torch.compiler.reset()
    message = rf"{path}: the plan of '\w+' ({reason}): leave plan out"
    with pytest.raises((BudgetError, BackendCompilerFailed), match=message) as raised:
        way(small_net(), torch.randn(2048, 16), memory_budget=budget, plan=path)
    error = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(error, BudgetError)
    assert error.plan == planned[0]


def test_plans_are_taken_under_the_budgets_that_they_keep(tmp_path: Path) -> None:
    paths = {budget: tmp_path / f"{budget}.json" for budget in ("min", "light", "+50%")}
    plans = {budget: _saved(path, memory_budget=budget) for budget, path in paths.items()}
    for budget, path in paths.items():
        assert _step(small_net(), torch.randn(2048, 16), memory_budget=budget, plan=path)[0] == [plans[budget]]
    for asked in ("90%", None, "100MB"):
        applied, _ = _step(small_net(), torch.randn(2048, 16), memory_budget=asked, plan=paths["min"])
        assert applied[0].decisions == plans["min"].decisions


def test_of_two_plans_of_a_graph_the_one_that_keeps_the_budget_is_taken_and_named(tmp_path: Path) -> None:
    large, small = tmp_path / "large.json", tmp_path / "small.json"
    _saved(large)
    low = _saved(small, memory_budget=BUDGET)
    for files, taken in (([large, small], small), ([small, large], small)):
        applied, _ = _step(small_net(), torch.randn(2048, 16), memory_budget=BUDGET, plan=files)
        assert applied[0].decisions == low.decisions
        other = large if taken == small else small
        assert f"the plan is that of {taken}; {other} would be for this graph, too" in applied[0].notes
    applied, _ = _step(small_net(), torch.randn(2048, 16), plan=[large, small])
    assert any(f"the plan is that of {large}" in note for note in applied[0].notes)


def test_files_are_read_once_for_all_graphs_and_graphs_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reads, hashes = tmp_path / "plan.json", list[str](), list[str]()
    _saved(path, 32)
    read, hashed = plan_files.load_plan, search.fingerprint
    monkeypatch.setattr(plan_files, "load_plan", lambda file: reads.append(file) or read(file))
    monkeypatch.setattr(search, "fingerprint", lambda graph: hashes.append(graph.name) or hashed(graph))
    model = small_net()
    step = roamc.train_step(model, square, torch.optim.AdamW(model.parameters()), plan=path)
    for rows in (32, 8, 16):
        with contextlib.nullcontext() if rows == 32 else pytest.warns(UserWarning, match="no plan of"):
            step(torch.randn(rows, 16))
    assert (len(reads), len(hashes)) == (1, 3)
    other = _saved(path, 64)  # a file that was written anew is read anew
    assert _step(small_net(), torch.randn(64, 16), plan=path)[0] == [other]


def test_files_that_are_no_plans_are_refused(tmp_path: Path) -> None:
    missing, damaged, lying, changed, bare = (
        tmp_path / f"{name}.json" for name in ("missing", "damaged", "lying", "changed", "bare")
    )
    damaged.write_text("{")
    model = small_net()
    step = roamc.train_step(model, square, torch.optim.AdamW(model.parameters()))
    step(torch.randn(32, 16))
    data = json.loads(step.plans[0].to_json())
    lies = {**data, "peak_bytes": data["peak_bytes"] - 1}
    Plan.from_json(json.dumps(lies)).save(lying)
    changed.write_text(lying.read_text().replace(str(lies["peak_bytes"]), str(data["peak_bytes"])))
    bare.write_text(json.dumps(data))
    for path, message in (
        (missing, "missing.json: no such file"), (damaged, "damaged.json: not a plan"), (lying, "lying.json: .*peak_"),
        (changed, "changed.json: it was changed after it was saved"), (bare, "bare.json: it has no checksum"),
    ):  # fmt: skip
        other = roamc.train_step(model, square, torch.optim.AdamW(model.parameters()), plan=str(path))
        with pytest.raises(PlanError, match=message):
            other(torch.randn(32, 16))
