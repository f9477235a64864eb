"""Products that run with collectives on two ranks: the bits of both one after the other, and torch's own operators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import roamc
from roamc.operators import products_sent as ours
from roamc.passes import async_tp
from tests.end_to_end.ranks import run_ranks
from tests.parallel import SPLITS, build, run_backward, whole_gradients

BUDGETS = (None, "min")
OPERATORS = """
from tests.end_to_end.test_async_tp import check_operators
check_operators(rank, ranks)
print("the same")
"""
STEPS = """
from tests.end_to_end.test_async_tp import BUDGETS, step
for budget in BUDGETS:
    torch.save([step(budget, at_once) for at_once in ("off", "on")], f"{folder}/{budget}.{rank}.pt")
"""


def check_operators(rank: int, ranks: int) -> None:
    """Compare ours with what torch's operators do on a CPU, and call torch's operators as on a GPU, with no numbers."""
    from torch.distributed import _symmetric_memory as symmetric

    generator = torch.Generator().manual_seed(rank)
    x, a, b = (torch.randn(size, generator=generator) for size in ((6, 8), (8, 4), (8, 10)))
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    gathered, products = symmetric._fused_all_gather_matmul_fallback(x, [a, b], 0, name)
    scattered = symmetric._fused_matmul_reduce_scatter_fallback(x, a, "sum", 0, name)
    results = [*ours.ALL_GATHER_MM(x, [a, b], ranks, name, True), ours.MM_REDUCE_SCATTER(x, a, "sum", ranks, name)]
    wanted = [*products, gathered, scattered]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(results, wanted, strict=True))
    x, a, b = (tensor.to("meta") for tensor in (x, a, b))
    by_torch = ours.all_gather_mm_at_once(x, [a, b], name, True)
    by_torch.append(ours.mm_reduce_scatter_at_once(x, a, "sum", name))
    assert [one.shape for one in by_torch] == [one.shape for one in wanted]
    assert len(ours.all_gather_mm_at_once(x, [a, b], name, False)) == 2


def step(budget: str | None, at_once: str) -> tuple[float, dict[str, torch.Tensor], str]:
    """Loss, gradients and plan of the second of two steps, in each of the ranks."""
    torch._dynamo.reset()
    async_tp._faster = lambda graph, decision, options: decision  # however small
    split = "parallelize_module"
    options: dict[str, Any] = {"strict": True, "shard": "sequence", "disable": "products", "numerics": "fast"}
    options |= {"async_tp": at_once, **({"memory_budget": budget} if budget else {})}
    compiled = roamc.optimize(SPLITS[split](build("llama", layers=1)), **options)
    for _ in range(2):
        loss = run_backward(compiled, split)  # type: ignore[arg-type]
    return loss, whole_gradients(compiled, split), roamc.plans()[-1].to_json()


def test_operators_do_what_those_of_torch_do(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, OPERATORS).count("the same") == 2


@pytest.mark.thorough
def test_steps_have_the_bits_of_collectives_and_products(tmp_path: Path) -> None:
    run_ranks(tmp_path, STEPS)
    for budget in BUDGETS:
        for rank in range(2):
            (loss, gradients, _), (other_loss, others, plan) = torch.load(tmp_path / f"{budget}.{rank}.pt")
            assert loss == other_loss
            torch.testing.assert_close(others, gradients, rtol=0, atol=0)
            decision = json.loads(plan)["decisions"]["async_tp"]
            assert len(decision["gathers"]) > 2
            assert decision["scatters"]
