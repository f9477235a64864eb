"""Collectives that run again, on two gloo ranks: no bit of a step changes, and no rank goes on alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import roamc
from roamc.graph import ranks
from roamc.planning import together
from tests.end_to_end.helpers import assert_same
from tests.end_to_end.ranks import run_ranks
from tests.parallel import SPLITS, Rows, batch, build, run_backward

Case = tuple[str, str, str, str, str]
"""Model, how it is split, way in (R, O or S), option ``shard``, type of the parameters."""

BUDGETS = (None, "70%", "40%", "min")
CASES: dict[str, tuple[Case, ...]] = {
    "whole": (
        ("llama", "parallelize_module", "O", "whole", "float32"),
        ("bert", "plain collectives", "S", "whole", "float32"),
        ("gpt", "plain collectives", "R", "whole", "bfloat16"),
    ),
    "sequence": (
        ("gpt", "plain collectives", "R", "sequence", "float32"),
        ("bert", "parallelize_module", "O", "sequence", "float32"),
        ("llama", "plain collectives", "S", "sequence", "float32"),
        ("bert", "plain collectives", "R", "sequence", "bfloat16"),
    ),
}
SCRIPT = """
from tests.end_to_end import test_collectives_again as tests
for number, case in enumerate(tests.CASES[sys.argv[4]]):
    for budget in tests.BUDGETS:
        torch.save(tests.step(*case, budget), f"{folder}/{number}.{budget}.{rank}.pt")
"""
SMALL = """
from tests.end_to_end import test_collectives_again as tests
tests.repeat_sums()
tests.compare_budgets()
tests.plan_apart()
"""

ON_A_MESH = """
from tests.end_to_end import test_collectives_again as tests
torch.save([tests.mesh_step(budget) for budget in (None, "min")], f"{folder}/{rank}.pt")
"""


def repeat_sums() -> None:
    """gloo adds up in one order: another run of a sum over the ranks has the same bits."""
    rank = dist.get_rank()
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    sums: Any = torch.ops.roamc_collective
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for size in (2, 1_000, 100_002):
            mine = torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)
            whole, part = sums.all_reduce(mine, "sum", group), sums.reduce_scatter_tensor(mine, "sum", 2, group)
            for _ in range(5):
                assert torch.equal(sums.all_reduce(mine, "sum", group), whole), (dtype, size)
                assert torch.equal(sums.reduce_scatter_tensor(mine, "sum", 2, group), part), (dtype, size)


def sums() -> nn.Module:
    """Sums over the ranks, one behind the other."""
    torch.manual_seed(0)
    layers = [Rows(nn.Linear(32, 16, bias=False)) for _ in range(6)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def small_step(budget: Any = None) -> list[Tensor]:
    """Gradients of :func:`sums` on this rank, by torch.compile."""
    torch._dynamo.reset()
    model, x = sums(), torch.randn(128, 16, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"strict": True, "shard": "whole", "memory_budget": budget, "layout_nodes": 1000}
    torch.compile(model, backend="roamc", options=options, dynamic=False)(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def compare_budgets() -> None:
    """Sums run again under a budget, and no gradient changes."""
    wanted = small_step()
    assert roamc.plans()[-1].decisions["retain"]["reruns"] == ()
    gradients = small_step("80%")
    again = [name for _, name, *_ in roamc.plans()[-1].decisions["retain"]["reruns"] if "all_reduce" in name]
    assert again
    assert_same(gradients, wanted, "80%")


def plan_apart() -> None:
    """Ranks that make plans of their own, of which one runs no sum again, are refused before the first step."""
    sums_again = mock.patch.object(ranks, "sums_in_one_order", return_value=dist.get_rank() == 0)
    said = pytest.raises(roamc.RanksError, match="rank 1 has another plan")
    with mock.patch.object(together, "LARGEST", 0), sums_again, said:
        small_step("min")


@pytest.mark.thorough
def test_sums_run_again_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    run_ranks(tmp_path, SMALL, 2)


class OnAMesh(nn.Module):
    """On a mesh of 2 by 2: columns of ranks are gathered, and then each rank takes its part of them again."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh = mesh
        sizes = [(Shard(1), (16, 32)), (Shard(0), (32, 16))] * 3
        whole = [(torch.randn(shape) / 4, [Replicate(), placement]) for placement, shape in sizes]
        self.weights = nn.ParameterList(distribute_tensor(weight, mesh, placements) for weight, placements in whole)

    def forward(self, part: Tensor) -> Tensor:
        rows = [Shard(0), Replicate()]
        x = DTensor.from_local(part, self.mesh, rows, run_check=False)
        for first, second in zip(self.weights[::2], self.weights[1::2], strict=True):
            inner = (x @ first).redistribute(self.mesh, rows).tanh()
            own = inner.redistribute(self.mesh, [Shard(0), Shard(1)])
            x = (own @ second).redistribute(self.mesh, rows).tanh()
        return x.to_local()  # type: ignore[no-any-return]


def mesh_step(budget: str | None) -> tuple[list[Tensor], list[str], list[str]]:
    """Gradients, reruns and notes of the plan, on each of four ranks."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, row = OnAMesh(mesh), mesh.get_coordinate()[0]  # type: ignore[index]
    options: dict[str, Any] = {"strict": True, "shard": "whole", **({"memory_budget": budget} if budget else {})}
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(row))
    torch.compile(model, backend="roamc", options=options, dynamic=False)(x).square().sum().backward()
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]
    plan = roamc.plans()[-1]
    return gradients, [name for _, name, *_ in plan.decisions["retain"]["reruns"]], list(plan.notes)


@pytest.mark.thorough
def test_collectives_run_again_on_a_mesh_whose_ranks_take_their_parts(tmp_path: Path) -> None:
    """Each rank's graph cuts out another part of what all ranks have; one plan fits all of them."""
    run_ranks(tmp_path, ON_A_MESH, 4)
    steps = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for rank, (free, least) in enumerate(steps):
        assert free[1] == []
        assert least[1:] == steps[0][1][1:], f"rank {rank} has another plan than the first"
        assert_same(least[0], free[0], f"rank {rank}")
    again = steps[0][1][1]
    assert [name for name in again if "all_reduce" in name]
    assert [name for name in again if "all_gather" in name]


def step(kind: str, split: str, way: str, shard: str, dtype: str, budget: str | None) -> dict[str, Any]:
    """What two steps in each of the ranks leave: tensors, the plan, and the collectives that run again."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"strict": True, "shard": shard, **({"memory_budget": budget} if budget else {})}
    model = SPLITS[split](build(kind, layers=2 if shard == "whole" else 1).to(getattr(torch, dtype)))
    try:
        if way == "S":
            plan = trained(model, options)
        else:
            compiled: Any = model
            if way == "R":
                compiled = torch.compile(model, backend="roamc", options=options, dynamic=False)
            else:
                roamc.optimize(model, **options)
            for _ in range(2):
                run_backward(compiled, split, LENGTH)
            plan = roamc.plans()[-1]
    except Exception as error:
        cause = getattr(error, "inner_exception", error)  # torch.compile wraps what a backend raises
        if not isinstance(cause, roamc.BudgetError):
            raise
        return {"refused": str(cause)}
    tensors = [parameter if way == "S" else parameter.grad for parameter in model.parameters()]
    kept = plan.decisions["retain"]
    again = [name for _, name, *_ in kept["reruns"] if "all_" in name or "scatter" in name]
    return {
        "tensors": [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors],
        "plan": plan.to_json(),
        "again": len(again),
    }


LENGTH = 48
"""Tokens in a row: activations outweigh the gradients then, which no budget makes smaller."""


def trained(model: Any, options: dict[str, Any]) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = roamc.train_step(model, lambda model, x: model(x), optimizer, **options)
    torch.manual_seed(0)
    for _ in range(2):
        train(batch(length=LENGTH))
    return train.plans[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("which", CASES)
def test_budgets_change_no_bit_where_collectives_run_again(which: str, tmp_path: Path) -> None:
    run_ranks(tmp_path, SCRIPT, 2, [which], seconds=900)
    sent_again = 0
    for number, case in enumerate(CASES[which]):
        free = [torch.load(tmp_path / f"{number}.None.{rank}.pt") for rank in (0, 1)]
        for budget in BUDGETS:
            said = f"{case}, budget {budget}"
            first, second = (torch.load(tmp_path / f"{number}.{budget}.{rank}.pt") for rank in (0, 1))
            assert ("refused" in first) == ("refused" in second), said
            if "refused" in first:
                continue
            assert first["plan"] == second["plan"], said
            for rank, result in enumerate((first, second)):
                assert_same(result["tensors"], free[rank]["tensors"], said)
            sent_again += first["again"]
    assert sent_again
