"""Two ranks whose collectives are split: the bits of whole ones, by every way in; what is left where a rank fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.cost.tensor_objects import OBJECT
from tests.end_to_end.helpers import assert_same
from tests.end_to_end.ranks import run_ranks

STEPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "replicas": ("gpt", "DDP", {}),
    "parts": ("llama", "parallelize_module", {}),
    "parts, a budget": ("gpt", "plain collectives", {"memory_budget": "70%"}),
    "shards": ("gpt", "parallelize_module", {"shard": "sequence"}),
    "shards, lowest": ("bert", "parallelize_module", {"shard": "sequence", "memory_budget": "min"}),
}
SCRIPT = """
from tests.end_to_end import test_overlap as tests
tests.compare_started(rank)
tests.fail_on_one_rank(rank)
"""
TRAINING = """
from tests.end_to_end import test_overlap as tests
if sys.argv[4] == "halves":
    tests.compare_gradients()
else:
    tests.compare_steps(*tests.STEPS[sys.argv[4]])
"""


def compare_started(rank: int) -> None:
    """In each of the ranks: what is started and waited for is what the finished operators give."""
    from roamc.operators.split_collectives import _UNDER_WAY, KERNELS, STARTS, WAIT

    torch.manual_seed(rank)
    for finished, start in STARTS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            x = (torch.randn(6, 8) * 5).to(dtype)
            rest: tuple[Any, ...] = {
                "all_reduce": ("sum", "0"),
                "all_gather_into_tensor": (2, "0"),
                "reduce_scatter_tensor": ("sum", 2, "0"),
                "broadcast": (1, "0"),
                "all_to_all_single": ([4, 2], [4, 2], "0") if rank else ([2, 4], [2, 4], "0"),
            }[finished._schema.name.rpartition("::")[2]]
            if dtype.is_complex and "all_to_all" in str(finished):
                continue  # gloo refuses complex numbers there; what starts it sends pairs of real ones
            wanted = finished(x, *rest)
            arena = torch.empty(3, *wanted.shape, dtype=dtype)
            KERNELS[start](x, *rest, out=arena[1])  # of one storage, out of which two are under way
            KERNELS[start](x, *rest, out=arena[2])
            assert_same([WAIT(start(x, *rest)), WAIT(arena[2]), WAIT(arena[1])], [wanted] * 3, f"{start} of {dtype}")
    assert not _UNDER_WAY.works


def fail_on_one_rank(rank: int) -> None:
    """An operator between start and wait fails on one rank: no rank hangs, and later steps are right."""
    from roamc.operators.split_collectives import _UNDER_WAY, WAIT
    from roamc.options import Options
    from roamc.planning import search
    from roamc.runtime.program import Whole
    from tests.graphs import traced

    def function(x: Tensor, places: Tensor) -> Tensor:
        wide = torch.cat([x] * 8).exp().sum()
        summed = torch.ops.roamc_collective.all_reduce(x.sin(), "sum", "0")
        return (x.exp()[places].sum() + wide) * summed

    x, good, bad = torch.randn(64, 64), torch.tensor([1, 2]), torch.tensor([1, 64])
    planned = search.run(traced(function, x, good), Options(profile="cpu"))
    names = [node.target for node in planned.graph.graph.nodes]
    index = names.index(torch.ops.aten.index.Tensor)
    assert index < names.index(WAIT), "nothing stands in between"
    whole = Whole(planned)
    for _ in range(3):
        if rank == 0:
            with pytest.raises(IndexError):
                whole([x.clone(), bad])
        else:
            whole([x.clone(), good])
        assert not _UNDER_WAY.works
        assert_same(list(whole([x.clone(), good])), [function(x, good)], "behind a fault")


def steps(kind: str, split: str, options: dict[str, Any]) -> tuple[list[float], list[Tensor], Any]:
    """Losses, parameters and plan of three steps, in each of the ranks."""
    import roamc
    from tests.end_to_end.test_parallel_steps import OPTIMIZERS, loss_of, own_part
    from tests.parallel import SPLITS, batch, build

    model = SPLITS[split](build(kind, layers=1))
    step = roamc.train_step(model, loss_of, OPTIMIZERS["adamw"](model), strict=True, profile="cpu", **options)
    torch.manual_seed(0)
    losses = [step(batch()).item() for _ in range(3)]
    return losses, [own_part(parameter.detach()) for parameter in model.parameters()], step.plans[-1]


def compare_steps(kind: str, split: str, options: dict[str, Any]) -> None:
    """In each of the ranks: steps with split collectives have the bits of steps without, and are planned no larger."""
    said = f"{kind}, {split}, {options}"
    losses, parameters, plan = steps(kind, split, options)
    assert plan.decisions["overlap"]["collectives"] or options, f"{said}: nothing is split"
    wanted, others, whole = steps(kind, split, {**options, "disable": ("overlap",)})
    assert losses == wanted, said
    assert_same(parameters, others, said)
    split = plan.decisions["overlap"]["collectives"]
    limit = plan.budget_bytes or whole.needed_bytes + OBJECT * len(split)  # each may have a tensor more under way
    assert plan.budget_bytes or plan.peak_bytes <= whole.peak_bytes * 1.001, f"{said}: of tensors, more"
    assert plan.needed_bytes <= limit * 1.001, f"{said}: {plan.needed_bytes} of {limit}"


def compare_gradients() -> None:
    """In each of the ranks: no collective is left open between the halves that AOTAutograd calls."""
    import roamc
    from tests.parallel import SPLITS, build, run_backward, whole_gradients

    gradients = []
    for disable in ((), ("overlap",)):
        model = SPLITS["plain collectives"](build("llama", layers=1))
        compiled = roamc.optimize(model, strict=True, disable=disable, profile="cpu")
        for _ in range(2):
            run_backward(compiled, "plain collectives")
        gradients.append(whole_gradients(model, "plain collectives"))
        splits = [plan.decisions.get("overlap", {}).get("collectives") for plan in roamc.plans()[-1:]]
        assert bool(splits[0]) is not bool(disable)
    assert_same(*gradients, "gradients")


def test_started_collectives_give_the_bits_of_finished_ones_whatever_fails(tmp_path: Path) -> None:
    run_ranks(tmp_path, SCRIPT)


@pytest.mark.parametrize(
    "case", ["replicas", *(pytest.param(case, marks=pytest.mark.thorough) for case in (*list(STEPS)[1:], "halves"))]
)
def test_split_collectives_give_the_bits_of_whole_ones(case: str, tmp_path: Path) -> None:
    run_ranks(tmp_path, TRAINING, arguments=[case])
