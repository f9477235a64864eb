"""Bytes that torch's allocator hands out in a training step of a small model, by roamc and by eager."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import roamc.frontends.backend
from roamc.cli.demo.worker import peak_bytes
from roamc.runtime import blocks
from tests.graphs import WithLoss
from tests.small_models import small_model
from tests.sweeps.compare import Verdict

ROUTES = ("optimize", "compile with its loss", "step")
STEPS = 2
"""Run before the one that is measured: roamc plans in the first."""

Step = Callable[[], object]


def judge(seed: int, route: str) -> Verdict:
    """ "same" where no more than eager takes is taken, else "above"; what is measured stands in the text."""
    if route == "step" and not _trained(small_model(seed)[0]):
        return Verdict("left out", "nothing to train")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = eagers(seed), measured(seed, route)
    return Verdict("same" if ours <= theirs else "above", f"{ours} bytes, eager {theirs}")


@functools.lru_cache(maxsize=1)
def eagers(seed: int) -> int:
    """What eager takes."""
    return measured(seed, "eager")


def measured(seed: int, route: str) -> int:
    """Most bytes in one step beside parameters, optimizer state and batch; arenas of steps before count."""
    torch._dynamo.reset()
    roamc.frontends.backend.LATEST.clear()
    gc.collect()
    before = blocks.held()
    step = _step(seed, route)
    torch.manual_seed(seed)
    for _ in range(STEPS):
        step()
    gc.collect()
    arenas = max(0, blocks.held() - before)  # those of other tests, held by what torch caches, may go in the meantime
    return peak_bytes(step)[1] + arenas


def _step(seed: int, route: str) -> Step:
    """Forward, backward and update; without parameters, the batch has a gradient and nothing is updated."""
    model, batch, loss_of = small_model(seed)
    optimizer = torch.optim.AdamW(_trained(model) or [nn.Parameter(torch.zeros(0))], lr=0.01)
    if route == "step":
        planned = roamc.train_step(model, loss_of, optimizer, strict=True)
        return lambda: planned(*batch)
    call: Callable[..., Tensor] = functools.partial(loss_of, model)
    if route == "compile with its loss":
        call = torch.compile(WithLoss(model, loss_of), backend="roamc", dynamic=False, options={"strict": True})
    elif route == "optimize":
        roamc.optimize(model, strict=True)

    def step() -> None:
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        batch[0].grad = None

    return step


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
