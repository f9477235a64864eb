"""The whole process: its bytes by hand, and whether they fit what was named."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from roamc.errors import BudgetError, OptionError
from roamc.frontends.workload import Workload, capture
from roamc.gpus import CONTEXT, GPUS, LIBRARIES
from roamc.graph import TrainGraph
from roamc.options import parse_options
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.units import format_bytes


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


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200", "a100-40", "a100-80", "l40s", "l4", "rtx4090"])
@pytest.mark.parametrize("name", MODELS)
def test_total_is_the_sum_by_hand_and_the_verdict_right(name: str, gpu: str) -> None:
    graph, held = _graph(name)
    # "100%" rather than the GPU's own budget, so that a plan that does not fit is made and not refused
    plan = search.run(graph, parse_options({"gpu": gpu, "memory_budget": "100%"})).plan
    by_hand = held + plan.needed_bytes + CONTEXT + LIBRARIES + held // 50
    assert plan.total_bytes == by_hand
    fits = by_hand <= GPUS[gpu].capacity
    assert plan.fits == fits
    words = plan.headline
    assert f"{'fits' if fits else 'does not fit'} {'a' if gpu == 'b200' else 'an'} {GPUS[gpu].title}" in words
    assert f": {format_bytes(plan.total_bytes)} = {format_bytes(held)} parameters" in words
    assert str(plan).splitlines()[0] == words
    assert Plan.from_json(plan.to_json()) == plan


def test_some_pairs_do_not_fit() -> None:
    with pytest.raises(BudgetError, match=r"huge does not fit an L4 \(24 GB\).* Take a larger GPU, or use a smaller"):
        search.run(_graph("huge")[0], parse_options({"gpu": "l4"}))


def test_a_budget_on_the_total_leaves_out_what_is_held() -> None:
    free = search.run(_graph("encoder")[0], parse_options({})).plan
    enough = search.run(_graph("encoder")[0], parse_options({"memory_budget": f"total:{free.total_bytes}"})).plan
    assert (enough.budget_bytes, enough.needed_bytes) == (free.needed_bytes, free.needed_bytes)
    assert enough.fits
    held = free.total_bytes - free.needed_bytes
    assert f"encoder fits {format_bytes(free.total_bytes)}" in enough.headline
    with pytest.raises(BudgetError, match=f"encoder does not fit {format_bytes(held + 1000)}"):
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
