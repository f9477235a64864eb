"""Two ranks under DistributedDataParallel: the gradients of one rank with the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.end_to_end.helpers import assert_same
from tests.end_to_end.test_determinism import ROOT, environment
from tests.models import NanoGPT, next_token, tokens

SCRIPT = """
import sys, torch, roamc
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.end_to_end.test_ddp import BATCH, WAYS, build
from tests.models import next_token

folder, rank = sys.argv[1], int(sys.argv[2])
dist._DEFAULT_FIRST_BUCKET_BYTES = 8_000  # so that even a small model has several buckets
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

def compiled(way):
    if way == "optimize, then wrap":
        return DistributedDataParallel(roamc.optimize(build(), strict=True))
    model = DistributedDataParallel(build(), bucket_cap_mb=0.03 if way == "several buckets" else 25)
    return torch.compile(model, backend="roamc", options={"strict": True}, dynamic=False)

for way in WAYS:
    torch._dynamo.reset()
    model, before = compiled(way), len(roamc.plans())
    for step in range(2):
        model.zero_grad()
        next_token(model, BATCH.chunk(2)[rank]).backward()
    plans = len(roamc.plans()) - before
    assert plans > (2 if way == "several buckets" else 0), f"{way}: {plans} plans"
    torch.save([p.grad for p in model.parameters()], f"{folder}/{way} {rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""
BATCH = tokens(4)
WAYS = ("optimize, then wrap", "wrap, then compile", "several buckets")


def build() -> NanoGPT:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return NanoGPT()


def run_two_ranks(folder: Path) -> None:
    """Every rank leaves its gradients of each way in ``folder``."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(rank)],
            cwd=ROOT, env=environment(GLOO_SOCKET_IFNAME="lo"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)[-4000:]


def test_gradients_are_those_of_one_rank_with_the_whole_batch(tmp_path: Path) -> None:
    run_two_ranks(tmp_path)
    model = build()
    next_token(model, BATCH).backward()
    for way in WAYS:
        first, second = (torch.load(tmp_path / f"{way} {rank}.pt") for rank in range(2))
        assert_same(first, second, way)
        for gradient, whole in zip(first, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, whole.grad, rtol=1e-5, atol=1e-6)
