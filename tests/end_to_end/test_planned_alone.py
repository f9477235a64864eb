"""Two gloo ranks: a plan that one of them asks for alone, and a rank that fails where the others wait for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import roamc
from roamc.frontends import train_step
from roamc.planning import search
from tests.end_to_end.ranks import run_ranks
from tests.end_to_end.test_agreement import Tiny

SCRIPT = """
from tests.end_to_end import test_planned_alone as tests
tests.check_plan_without_the_others(rank)
tests.check_plan_of_a_forward(rank)
for stage in ("capture", "plan"):
    tests.check_failure_is_heard(rank, stage)
"""
NOTE = (
    "planned without asking the other ranks: a step of ranks 0, 1 takes this plan if all of them have the same graph "
    "and options"
)


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


def check_plan_without_the_others(rank: int) -> None:
    """Rank 0 plans while rank 1 waits for it to say so; then both take the step, with the same plan."""
    torch.manual_seed(0)
    model = Tiny()
    step = roamc.train_step(
        model, loss_of, torch.optim.SGD(model.parameters(), 0.1), shard="sequence", memory_budget="min"
    )
    shown = step.plan(torch.zeros(4, 7, 8)) if rank == 0 else None
    dist.barrier()
    torch.manual_seed(0)
    step(torch.randn(4, 7, 8))
    (taken,) = step.plans
    if shown is not None:
        assert NOTE in shown.notes
        assert tuple(note for note in shown.notes if note != NOTE) == taken.notes
        assert shown.decisions == taken.decisions
        assert shown.needed_bytes == taken.needed_bytes


def check_plan_of_a_forward(rank: int) -> None:
    """``roamc.plan`` of forward and backward waits for nobody either, and a replica is planned like any model."""
    if rank == 1:
        plan = roamc.plan(Tiny(), torch.zeros(4, 7, 8), shard="whole", memory_budget="min")
        assert NOTE in plan.notes
        assert roamc.plan(Tiny(), torch.zeros(4, 7, 8)).notes.count(NOTE) == 0
    dist.barrier()


def check_failure_is_heard(rank: int, stage: str) -> None:
    """A rank under DistributedDataParallel that cannot capture or plan ends the wait of the other within seconds."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    step = roamc.train_step(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), 0.1))
    owner: Any
    owner, name = {"capture": (train_step, "capture_step"), "plan": (search, "run")}[stage]
    right = getattr(owner, name)

    def failing(*args: Any, **named: Any) -> Any:
        if rank == 1:
            raise roamc.CaptureError("a planted fault")
        return right(*args, **named)

    begun = time.monotonic()
    told = r"^a planted fault" if rank else r"^(\w+ is on several ranks, and )?rank 1 could not .*: a planted fault"
    with mock.patch.object(owner, name, failing), pytest.raises(roamc.RoamcError, match=told):
        step(torch.ones(2, 8))
    print(f"[{rank}] {stage}: heard within 60 s: {time.monotonic() - begun < 60}")
    dist.barrier()  # else the second try of rank 1 meets the first of rank 0
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(torch.ones(2, 8))
    assert not all(map(torch.equal, before, model.parameters()))


def test_a_plan_waits_for_no_rank_and_a_failure_is_heard(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, SCRIPT).count("True") == 4
