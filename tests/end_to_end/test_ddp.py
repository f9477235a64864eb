"""Ranks under DistributedDataParallel: the gradients of one rank with the whole batch, and the steps of eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.nn import functional as F

from tests.end_to_end.helpers import assert_same, noise
from tests.end_to_end.ranks import run_ranks
from tests.models import NanoGPT, next_token, tokens

GRADIENTS = """
from torch.nn.parallel import DistributedDataParallel
from tests.end_to_end.test_ddp import BATCH, WAYS, build
from tests.models import next_token

dist._DEFAULT_FIRST_BUCKET_BYTES = 8_000  # so that even a small model has several buckets

def compiled(way):
    if way == "optimize, then wrap":
        return DistributedDataParallel(roamc.optimize(build(), strict=True))
    model = DistributedDataParallel(build(), bucket_cap_mb=0.03 if way == "several buckets" else 25)
    return torch.compile(model, backend="roamc", options={"strict": True}, dynamic=False)

for way in WAYS[sys.argv[4]]:
    torch._dynamo.reset()
    model, before = compiled(way), len(roamc.plans())
    for step in range(2):
        model.zero_grad()
        next_token(model, BATCH.chunk(2)[rank]).backward()
    plans = len(roamc.plans()) - before
    assert plans > (2 if way == "several buckets" else 0), f"{way}: {plans} plans"
    torch.save([p.grad for p in model.parameters()], f"{folder}/{way} {rank}.pt")
"""
STEPS = """
from tests.end_to_end import test_ddp
test_ddp.compare_steps(rank)
test_ddp.check_disagreement(rank)
"""
BATCH = tokens(4)
WAYS = {"quick": ("optimize, then wrap", "several buckets"), "rest": ("wrap, then compile",)}


def build() -> NanoGPT:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return NanoGPT()


@pytest.mark.parametrize("which", ["quick", pytest.param("rest", marks=pytest.mark.thorough)])
def test_gradients_are_those_of_one_rank_with_the_whole_batch(which: str, tmp_path: Path) -> None:
    run_ranks(tmp_path, GRADIENTS, arguments=[which])
    model = build()
    next_token(model, BATCH).backward()
    for way in WAYS[which]:
        first, second = (torch.load(tmp_path / f"{way} {rank}.pt") for rank in range(2))
        assert_same(first, second, way)
        for gradient, whole in zip(first, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, whole.grad, rtol=1e-5, atol=1e-6)


class Net(nn.Module):
    """Buffers that forward changes, dropout, a weight in channels-last order, tied weights, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm, self.drop = nn.BatchNorm2d(8), nn.Dropout(0.2)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 5).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.conv(x)).relu().mean((2, 3)))
        return self.frozen(self.second(self.first(x).relu()))


class Twin(Net):
    """The reference: with the decompositions that AOTAutograd has too, which must not be on around collectives."""

    def forward(self, x: Tensor) -> Tensor:
        with enable_python_dispatcher():
            return super().forward(x)


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Calls the wrapped module, and looks at the plain one as well."""
    assert isinstance(model.module, Net)
    return F.cross_entropy(model(x), y)


def compare_steps(rank: int) -> None:
    """In each of the ranks: steps on batches of this rank, of sizes of its own, are those of eager, bit for bit."""
    from torch.nn.parallel import DistributedDataParallel

    import roamc
    from tests.end_to_end.helpers import eager_step, seeded, state_of, tensors_of

    sizes = (4, 4, 3 + rank)
    batches = [(noise(n, 3, 6, 6, seed=10 * rank + i), torch.arange(n) % 5) for i, n in enumerate(sizes)]
    settings = {
        "sgd": (lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), None, {}),
        "adamw": (lambda model: torch.optim.AdamW(model.parameters(), 1e-2), 0.05, {"memory_budget": "min"}),
    }
    for name, (optimizer_of, clip, options) in settings.items():
        torch.manual_seed(rank)  # the wrapper gives all the weights of the first rank
        mine, twin = (DistributedDataParallel(kind(), find_unused_parameters=True) for kind in (Net, Twin))
        twin.load_state_dict(mine.state_dict())
        optimizer, reference = optimizer_of(mine), optimizer_of(twin)
        step = roamc.train_step(mine, loss_of, optimizer, clip_grad_norm=clip, strict=True, **options)
        for number, batch in enumerate(batches):
            seed = 100 * rank + number
            loss = seeded(step, *batch, seed=seed)
            torch.manual_seed(seed)
            wanted = eager_step(twin, loss_of, reference, *batch, clip=clip)
            assert_same(loss, wanted, f"{name}: loss of step {number}")
            assert_same(tensors_of(mine), tensors_of(twin), f"{name}: after step {number}")
            assert_same(state_of(optimizer), state_of(reference), f"{name}: after step {number}")


def check_disagreement(rank: int) -> None:
    """In each of the ranks: ways through the model that differ are an error on all, before anything has run."""
    from torch.nn.parallel import DistributedDataParallel

    import roamc
    from roamc.errors import CaptureError

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a if rank else self.b)(x)

    model = DistributedDataParallel(Fork(), find_unused_parameters=True)
    before = [p.detach().clone() for p in model.parameters()]
    step = roamc.train_step(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(CaptureError, match=r"first rank 'module\.b\..*', rank 1 'module\.a\..*'; let all take"):
        step(torch.ones(2, 4))
    assert_same([p.detach() for p in model.parameters()], before)


def test_steps_are_those_of_eager(tmp_path: Path) -> None:
    run_ranks(tmp_path, STEPS)
