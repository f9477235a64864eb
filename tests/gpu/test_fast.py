"""On a GPU: a language model of an odd vocabulary with fast numerics, its losses and its memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roamc
from roamc.cli import zoo
from tests.gpu.test_cuda import SHARE, WORKSPACE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("error:the Triton kernel"),
]
SIZES = {"layers": 2, "width": 256, "heads": 4, "vocab": 20011, "seq": 512, "batch": 16, "dtype": "bfloat16"}
STEPS = 5


def losses_of(model: nn.Module, batch: tuple[torch.Tensor, ...], loss_fn: object, disable: str) -> list[float]:
    """Losses of the first steps without dropout; the last of them keeps within what its plan says."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = roamc.train_step(model, loss_fn, optimizer, numerics="fast", strict=True, disable=disable)  # type: ignore[arg-type]
    losses = [float(step(*batch)) for _ in range(STEPS - 1)]
    (plan,) = roamc.plans(step)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    losses.append(float(step(*batch)))
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= plan.needed_bytes * (1 + SHARE) + WORKSPACE
    return losses


def test_padded_rows_and_picked_scores_train_as_before() -> None:
    """Losses are those of products by copies and of log-probabilities in memory."""
    torch.manual_seed(0)
    work = zoo.make("gpt", SIZES, "cuda")
    model, batch = work.model.eval(), tuple(torch.randint(0, 20011, x.shape, device="cuda") for x in work.batch)
    twin = copy.deepcopy(model)
    losses = losses_of(model, batch, work.loss_fn, "")
    wanted = losses_of(twin, batch, work.loss_fn, "padding,scores")
    assert losses[-1] < losses[0]
    assert torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=5e-3)


def test_decisions_are_made() -> None:
    torch.manual_seed(0)
    work = zoo.make("gpt", SIZES, "cuda")
    optimizer = torch.optim.AdamW(work.model.parameters(), fused=True)
    step = roamc.train_step(work.model, work.loss_fn, optimizer, numerics="fast", strict=True)  # type: ignore[arg-type]
    plan = step.plan(*work.batch)
    assert len(plan.decisions["padding"]["tensors"]) == 2
    assert len(plan.decisions["scores"]["losses"]) == 1
    assert not plan.decisions["products"]["aligned"]
