"""The whole process: its bytes by hand, and whether they fit what was named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import roamc
from roamc.errors import BudgetError, OptionError
from roamc.frontends.workload import Workload, capture
from roamc.gpus import CONTEXT, GPUS, LIBRARIES, MIB
from roamc.graph import TrainGraph
from roamc.options import parse_options
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.report.frontier import frontier
from roamc.report.text import show_points
from roamc.units import format_bytes
from tests.cli.test_cli import run


def _loss(model: nn.Module, *batch: Tensor) -> Tensor:
    result: Tensor = model(*batch)
    return result.float().square().mean()


def _mlp(width: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 1)), (torch.zeros(8, width),)


def _convolutions() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (torch.zeros(2, 3, 16, 16),)


def _words() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 16)), (torch.zeros(4, 8, dtype=torch.int64),)


def _encoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (torch.zeros(2, 4, 16),)


MODELS = {
    "mlp": lambda: _mlp(32), "convolutions": _convolutions, "words": _words, "encoder": _encoder,
    "huge": lambda: _mlp(1 << 16),
}  # fmt: skip
OPTIMIZERS = {"mlp": (torch.optim.AdamW, 2), "encoder": (torch.optim.SGD, 0)}


def _graph(name: str) -> tuple[TrainGraph, int]:
    """The captured step, and the bytes of parameters, buffers, optimizer state and batch by hand."""
    kind, states = OPTIMIZERS.get(name, (torch.optim.AdamW, 2))
    with torch.device("meta"):
        model, batch = MODELS[name]()
    held = sum(p.numel() * p.element_size() * (1 + states) for p in model.parameters())
    held += sum(b.nbytes for b in model.buffers()) + sum(b.nbytes for b in batch)
    workload = Workload(name, model, batch, _loss, lambda parameters: kind(parameters, lr=1e-3))
    return capture(workload, device=torch.device("cuda")), held


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", MODELS)
def test_total_is_the_sum_by_hand_and_the_verdict_right(name: str, gpu: str) -> None:
    graph, held = _graph(name)
    plan = plan_or_refused(graph, {"gpu": gpu})
    by_hand = held + plan.needed_bytes + CONTEXT + LIBRARIES + held // 50
    by_hand += (plan.needed_bytes - plan.arena_bytes) // 50
    assert plan.total_bytes == by_hand
    fits = by_hand <= GPUS[gpu].capacity
    assert plan.fits == fits
    words = plan.headline
    assert f"{'fits' if fits else 'does not fit'} {'a' if gpu == 'b200' else 'an'} {GPUS[gpu].title}" in words
    assert f": {format_bytes(plan.total_bytes)} = {format_bytes(held)} parameters" in words
    assert str(plan).splitlines()[0] == words
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", ["mlp", "words", "convolutions", "encoder"])
def test_eagers_total_is_the_sum_by_hand_and_has_its_own_verdict(name: str) -> None:
    graph, _ = _graph(name)
    plan = plan_or_refused(graph, {"gpu": "h200"})
    workspace = plan.baseline_needed_bytes - plan.baseline_bytes
    by_hand = 2 * MIB + workspace + CONTEXT + LIBRARIES  # all its tensors lie in one segment of the allocator
    assert plan.baseline_total_bytes == plan.report()["baseline_total_bytes"] == by_hand
    assert plan.report()["baseline_fits"] == (by_hand <= GPUS["h200"].capacity)
    row = f"{format_bytes(by_hand)} {'fits' if plan.baseline_fits else 'does not fit'} an H200 (141 GB), the same step"
    assert _shown(plan, "eager's total").startswith(row)


def test_eagers_total_of_what_fits_no_gpu_says_so() -> None:
    graph, held = _graph("huge")
    plan = plan_or_refused(graph, {"gpu": "h200"})
    by_hand = held + plan.baseline_needed_bytes + CONTEXT + LIBRARIES + plan.baseline_lost_bytes
    assert plan.baseline_total_bytes == by_hand > GPUS["h200"].capacity
    assert 0 < plan.baseline_lost_bytes < by_hand // 50
    assert plan.report()["baseline_fits"] is False
    row = f"{format_bytes(by_hand)} does not fit an H200 (141 GB), the same step"
    assert _shown(plan, "eager's total").startswith(row)


def test_eagers_total_may_not_fit_where_the_plan_does() -> None:
    free = search.run(_graph("convolutions")[0], parse_options({"profile": "h100"})).plan
    assert _shown(free, "eager's total").endswith(" of it lost by its allocator")
    assert free.report()["baseline_fits"] is None
    between = (free.total_bytes + free.baseline_total_bytes) // 2
    plan = search.run(_graph("convolutions")[0], parse_options({"memory_budget": f"total:{between}"})).plan
    assert (plan.fits, plan.baseline_fits) == (True, False)
    assert "does not fit 605.1 MB, " in _shown(plan, "eager's total")


@pytest.mark.parametrize("name", ["mlp", "convolutions", "encoder"])
def test_what_the_allocator_loses_outside_the_arena_is_part_of_what_has_to_fit(name: str) -> None:
    def planned(budget: str | None) -> Plan:
        return search.run(_graph(name)[0], parse_options({"memory_budget": budget})).plan

    free, lowest = planned(None), planned("min")
    assert lowest.needed_bytes > lowest.arena_bytes
    for part in range(4):
        total = lowest.total_bytes + max(0, free.total_bytes - lowest.total_bytes) * part // 4
        plan = planned(f"total:{total}")
        assert plan.fits
        assert plan.total_bytes <= total
    kept = planned(f"total:{free.total_bytes}")
    assert (kept.added_seconds, kept.fits) == (0, True)


def _short_of(plan: Plan) -> str:
    """A budget on the total that holds all but half of what torch's allocator loses of ``plan``."""
    lost = plan.limited_bytes(total=True) - plan.needed_bytes
    assert lost > 1
    return f"total:{plan.total_bytes - lost // 2}"


def test_a_plan_file_keeps_a_total_only_with_what_the_allocator_loses(tmp_path: Path) -> None:
    free, lowest = (
        search.run(_graph("convolutions")[0], parse_options({"memory_budget": b})).plan for b in (None, "min")
    )
    files = [str(tmp_path / name) for name in ("free", "lowest")]
    for plan, file in zip((free, lowest), files, strict=True):
        plan.save(file)
    budget = _short_of(free)
    taken = search.run(_graph("convolutions")[0], parse_options({"memory_budget": budget, "plan": files})).plan
    assert taken.decisions == lowest.decisions
    taken_bytes = free.limited_bytes(total=True)
    with pytest.raises(BudgetError, match=rf"free: .* \({taken_bytes} bytes, with what .*\), above .*: leave plan out"):
        search.run(_graph("convolutions")[0], parse_options({"memory_budget": budget, "plan": files[:1]}))
    assert "exceeded" in _shown(_under(free, budget), "budget")


def _under(plan: Plan, budget: str) -> Plan:
    """The plan with a budget on the total, whether it keeps it or not."""
    room = int(budget.removeprefix("total:"))
    plan = replace(plan, room=format_bytes(room), room_bytes=room)
    return replace(plan, budget_bytes=plan.left_bytes)


def test_several_totals_get_the_verdict_that_each_gets_alone() -> None:
    lowest = search.run(_graph("mlp")[0], parse_options({"memory_budget": "min"})).plan
    budget = _short_of(lowest)
    with pytest.raises(BudgetError, match="does not fit"):
        search.run(_graph("mlp")[0], parse_options({"memory_budget": budget}))
    points = frontier(_graph("mlp")[0], parse_options({}), [budget, f"total:{lowest.total_bytes}"])
    assert [point.fits for point in points] == [point.plan.fits for point in points] == [False, True]
    assert [point.plan.room for point in points] == [format_bytes(int(budget[6:])), format_bytes(lowest.total_bytes)]
    out = Console(width=160, record=True, file=io.StringIO())
    show_points(out, "mlp", points)
    title, _, *rows = out.export_text().splitlines()
    assert "is to fit" not in title, "each row has a total of its own"
    assert [row.rstrip().rpartition("  ")[2] for row in rows] == ["does not fit", "fits"]


def plan_or_refused(graph: TrainGraph, options: dict[str, object]) -> Plan:
    try:
        return search.run(graph, parse_options(options)).plan
    except BudgetError as error:
        return error.plan  # type: ignore[return-value]


@pytest.mark.parametrize("budget", [10**12, "100%", "total:1TB", "device"])
def test_the_tighter_of_budget_and_gpu_leads(budget: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roamc.budget._free", lambda device: 10**12)
    free = search.run(_graph("convolutions")[0], parse_options({"profile": "h100"})).plan
    gpu = free.total_bytes - 5000
    alone = search.run(_graph("convolutions")[0], parse_options({"gpu": gpu})).plan
    assert alone.needed_bytes < free.needed_bytes
    assert search.run(_graph("convolutions")[0], parse_options({"gpu": gpu, "memory_budget": budget})).plan == alone
    assert any(label == "budget" and "leaves for the step" in remark for label, _, remark in alone.rows())
    tight = search.run(
        _graph("convolutions")[0], parse_options({"gpu": "h100", "memory_budget": alone.needed_bytes})
    ).plan
    assert tight.budget_bytes == alone.needed_bytes
    with pytest.raises(BudgetError, match=r"above memory_budget=1\.001 kB, .*\. Raise the budget"):
        search.run(_graph("convolutions")[0], parse_options({"gpu": gpu, "memory_budget": 1001}))


def test_a_larger_gpu_is_advised_where_one_was_named() -> None:
    both = {"gpu": "h100", "memory_budget": "total:600MB"}
    total = {"memory_budget": "total:600MB"}
    cases = ({"gpu": "600MB"}, "Take a larger GPU"), (total, "Raise the budget"), (both, "Raise the budget")
    for options, advice in cases:
        with pytest.raises(BudgetError, match=rf"does not fit (a GPU of )?600 MB.*\. {advice}") as raised:
            search.run(_graph("encoder")[0], parse_options(options))
        error = raised.value
        assert error.verdict
        assert str(error) == f"{error.reason}. {advice}, or use a smaller batch"


def _shown(plan: Plan, label: str) -> str:
    return next(" ".join((value, remark)) for name, value, remark in plan.rows() if name == label)


def test_a_total_on_a_cpu_says_that_python_and_torch_come_on_top() -> None:
    workload = Workload("small", nn.Linear(4, 4), (torch.zeros(2, 4),), _loss)
    for budget, of in ((None, "the whole process"), ("total:1MB", "1 MB")):
        plan = search.run(capture(workload), parse_options({"memory_budget": budget})).plan
        assert _shown(plan, "total").endswith(f" of {of}, without what Python and torch take for themselves")
    assert "Python" not in _shown(search.run(_graph("mlp")[0], parse_options({})).plan, "total")


def test_sizes_have_the_digits_that_show_the_verdict() -> None:
    plan = search.run(_graph("encoder")[0], parse_options({"memory_budget": "total:1GB"})).plan
    assert _shown(plan, "total") == f"{format_bytes(plan.total_bytes)} of 1 GB"
    above = replace(plan, room="80 GB", room_bytes=80 * 10**9, needed_bytes=80 * 10**9 - plan.total_bytes + 2_000_000)
    above = replace(above, needed_bytes=above.needed_bytes + plan.needed_bytes - 1_000_000)
    assert above.total_bytes == 80_001_000_000
    assert "does not fit 80 GB: 80.001 GB = " in above.headline
    assert _shown(above, "total") == "80.001 GB of 80 GB"
    named = replace(above, room="GPU of 80 GB")
    assert _shown(named, "total") == "80.001 GB of a GPU of 80 GB"
    budget = replace(plan, needed_bytes=80_000_100_000, budget_bytes=80_000_000_000)
    assert _shown(budget, "budget").startswith("80 GB ")
    assert _shown(budget, "budget").endswith("exceeded: 80.0001 GB needed")


def test_a_budget_that_does_not_bind_says_what_is_needed() -> None:
    free = search.run(_graph("convolutions")[0], parse_options({"memory_budget": "100TB", "profile": "h100"})).plan
    assert _shown(free, "budget") == f"100 TB it does not bind: {format_bytes(free.needed_bytes)} needed"
    lower = search.run(_graph("convolutions")[0], parse_options({"memory_budget": free.needed_bytes - 5000})).plan
    assert "bind" not in _shown(lower, "budget")


def test_the_table_of_several_budgets_has_totals_and_verdicts() -> None:
    free = search.run(_graph("convolutions")[0], parse_options({"profile": "h100"})).plan
    gpu = free.total_bytes - 5000
    points = frontier(_graph("convolutions")[0], parse_options({"gpu": gpu}), [10**12, "min", 2000])
    out = Console(width=160, record=True, file=io.StringIO())
    show_points(out, "convolutions", points)
    first, heading, *rows = out.export_text().splitlines()
    assert first.endswith("the total is to fit a GPU of 604.04 MB")
    assert heading.split()[:3] == ["budget", "needs", "total"]
    assert [row.split()[-1] for row in rows] == ["fits", "fits", "budget"]
    assert rows[-1].endswith("above the budget")
    assert points[0].to_dict()["total_bytes"] == points[0].plan.total_bytes


def test_a_budget_on_the_total_leaves_out_what_is_held() -> None:
    free = search.run(_graph("encoder")[0], parse_options({})).plan
    enough = search.run(_graph("encoder")[0], parse_options({"memory_budget": f"total:{free.total_bytes}"})).plan
    assert (enough.budget_bytes, enough.needed_bytes) == (free.limited_bytes(total=True), free.needed_bytes)
    assert enough.fits
    held = free.total_bytes - free.needed_bytes
    assert f"encoder fits {format_bytes(free.total_bytes)}" in enough.headline
    with pytest.raises(BudgetError, match=r"encoder does not fit 603\.99 MB even .*: 604\.02 MB"):
        search.run(_graph("encoder")[0], parse_options({"memory_budget": f"total:{held + 1000}"}))


def test_wrong_totals_are_refused() -> None:
    for budget, message in (("total:", "is not a size"), ("total:80%", "is not a size"), ("total:40", "did you mean")):
        with pytest.raises(OptionError, match=message):
            parse_options({"memory_budget": budget})
    with pytest.raises(OptionError, match="unknown GPU"):
        parse_options({"gpu": "v1"})
    model = nn.Linear(4, 4)
    workload = Workload("small", model, (torch.zeros(2, 4),), _loss)
    with pytest.raises(OptionError, match="gpu='h100' is for steps on a GPU, and 'small' runs on cpu"):
        search.run(capture(workload), parse_options({"gpu": "h100"}))


def test_every_plan_says_how_long_a_step_takes() -> None:
    plan = search.run(_graph("mlp")[0], parse_options({})).plan
    assert plan.step_seconds > 0
    assert plan.budget_bytes is None
    assert json.loads(plan.to_json())["budget_bytes"] is None


def test_a_total_without_an_update_says_what_it_lacks() -> None:
    workload = Workload("halves", nn.Linear(4, 4), (torch.zeros(2, 4),), _loss)
    options = parse_options({"memory_budget": "total:1MB"})
    plan = search.run(capture(workload, forward_backward=True), options).plan
    assert plan.headline.startswith("halves fits 1 MB, without the optimizer's states: ")
    assert "without the optimizer's states" not in search.run(capture(workload), options).plan.headline


class Two(nn.Module):
    """Reads two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + y


ROWS = 32 * 16 * 4
"""Bytes of a tensor of 32 rows."""

SHARED: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], int]] = {
    "two tensors": (lambda rows: (rows[:32].clone(), rows[32:64].clone()), 2 * ROWS),
    "one twice": (lambda rows: (rows, rows), 2 * ROWS),
    "detached": (lambda rows: (rows, rows.detach()), 2 * ROWS),
    "halves": (lambda rows: (rows[:32], rows[32:]), 2 * ROWS),
    "shifted": (lambda rows: (rows[:-1], rows[1:]), 2 * ROWS),
}


def _by_plan(model: nn.Module, batch: tuple[Tensor, ...]) -> Plan:
    return roamc.plan(model, *batch, loss_fn=_loss, optimizer=torch.optim.SGD(model.parameters()))


def _by_step(model: nn.Module, batch: tuple[Tensor, ...]) -> Plan:
    step = roamc.train_step(model, _loss, torch.optim.SGD(model.parameters()))
    step(*batch)
    return roamc.plans(step)[0]


def _by_optimize(model: nn.Module, batch: tuple[Tensor, ...]) -> Plan:
    _loss(roamc.optimize(model), *batch).backward()
    return roamc.plans(model)[0]


def _by_compile(model: nn.Module, batch: tuple[Tensor, ...]) -> Plan:
    _loss(torch.compile(model, backend="roamc"), *batch).backward()  # type: ignore[arg-type]
    return roamc.plans()[-1]


WAYS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Plan]] = {
    "plan": _by_plan,
    "plan of a module": lambda model, batch: roamc.plan(model, *batch, forward_backward=True),
    "train_step": _by_step,
    "optimize": _by_optimize,
    "compile": _by_compile,
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("way", WAYS)
def test_memory_that_inputs_share_counts_once(way: str, case: str) -> None:
    pair, held = SHARED[case]
    assert WAYS[way](Two(), pair(torch.randn(64, 16))).fixed_bytes["input"] == held


def test_memory_that_inputs_share_counts_once_on_the_meta_device_and_with_parameters() -> None:
    with torch.device("meta"):
        model, rows = Two(), torch.empty(16, 16)
    assert _by_plan(model, (rows, rows[:])).fixed_bytes["input"] == rows.nbytes
    model = nn.Linear(16, 16)
    held = _by_plan(model, (model.weight.detach(),)).fixed_bytes
    assert sum(held.values()) == model.weight.nbytes + model.bias.nbytes


def test_a_step_has_a_plan_for_tensors_that_are_one_and_another_for_two() -> None:
    step: Any = roamc.train_step(model := Two(), _loss, torch.optim.SGD(model.parameters()), memory_budget="total:1GB")
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    for batch, held in (((x, y), 2 * ROWS), ((x, x), ROWS), ((y, x), 2 * ROWS), ((y, y), ROWS)):
        step(*batch)
        assert roamc.plans(step)[-1].fixed_bytes["input"] == held
    assert len(roamc.plans(step)) == 2


def test_without_a_budget_on_the_total_one_plan_serves_both() -> None:
    step: Any = roamc.train_step(model := Two(), _loss, torch.optim.SGD(model.parameters()))
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    for batch in ((x, y), (x, x)):
        step(*batch)
    assert len(roamc.plans(step)) == 1


ONE_TENSOR = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, input_ids, labels):
        return (self.layer(input_ids) - labels).square().mean()


def make():
    ids = torch.zeros(32, 16)
    return Net(), {"input_ids": ids, "labels": ids}, lambda m, **b: m(**b)
"""


def test_memory_that_inputs_share_counts_once_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(ONE_TENSOR)
    answer = json.loads(run("plan", f"{path}:make", "--json").stdout)
    assert answer["fixed_bytes"]["input"] == ROWS
