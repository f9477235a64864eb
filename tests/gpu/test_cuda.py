"""On a GPU: the bits of aot_eager, and the memory that the plan said."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roamc
from tests.end_to_end.helpers import (
    aot_eager,
    assert_same,
    differences,
    eager_step,
    optimized,
    run_backward,
    seeded,
    sgd,
    square,
    state_of,
    tensors_of,
)
from tests.models import NanoGPT, make, next_token, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("same_bits_every_time"),
]
WORKSPACE = 40 * 2**20
"""Bytes that libraries may take beyond the plan: cuBLAS alone keeps 33 MiB on Hopper."""
SHARE = 0.02
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def on_gpu(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...], Callable[..., Any]]:
    model, batch, loss_fn = make(name, dtype)
    return model.cuda(), tuple(x.cuda() for x in batch), loss_fn


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@each_dtype
@pytest.mark.parametrize("name", ["nanogpt", "nanogpt-dropout", "llama", "resnet50"])
def test_optimize_and_torch_compile_equal_aot_eager(name: str, dtype: torch.dtype) -> None:
    model, batch, loss_fn = on_gpu(name, dtype)
    wanted = [run_backward(twin, loss_fn, batch, seed=s) for twin in [aot_eager(model)] for s in range(3)]
    torch._dynamo.reset()
    by_optimize = optimized(copy.deepcopy(model))
    assert_same([run_backward(by_optimize, loss_fn, batch, seed=s) for s in range(3)], wanted)
    torch._dynamo.reset()
    model.compile(backend="roamc", options={"strict": True}, dynamic=False)
    assert_same([run_backward(model, loss_fn, batch, seed=s) for s in range(3)], wanted)
    assert all(plan.peak_bytes for plan in roamc.plans()[-2:])


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@each_dtype
@pytest.mark.parametrize("name", ["nanogpt", "nanogpt-dropout", "llama", "resnet50"])
def test_train_step_equals_eager(name: str, dtype: torch.dtype) -> None:
    model, batch, loss_fn = on_gpu(name, dtype)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, twin)]
    step = roamc.train_step(model, loss_fn, optimizers[0], strict=True)
    for seed in range(3):
        loss = seeded(step, *batch, seed=seed)
        wanted = seeded(eager_step, twin, loss_fn, optimizers[1], *batch, seed=seed)
        assert_same(loss, wanted, f"loss of step {seed}")
        assert_same(tensors_of(model), tensors_of(twin), f"after step {seed}")
        assert_same(state_of(optimizers[0]), state_of(optimizers[1]), f"after step {seed}")


def test_fused_optimizer_equals_eager() -> None:
    model, batch, loss_fn = on_gpu("nanogpt", torch.float32)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, twin)]
    step = roamc.train_step(model, loss_fn, optimizers[0], strict=True)
    for _ in range(3):
        assert_same(step(*batch), eager_step(twin, loss_fn, optimizers[1], *batch))
    # Only the embedding's atomic additions may differ between two runs of eager itself.
    assert len(differences(tensors_of(model), tensors_of(twin))) <= 1


def test_input_on_the_cpu_is_refused() -> None:
    model = nn.Linear(8, 8).cuda()
    step = roamc.train_step(model, square, sgd(model))
    with pytest.raises(roamc.CaptureError, match=r"an input is on cpu, the parameters are on cuda:0"):
        step(torch.zeros(4, 8))


def large() -> tuple[nn.Module, torch.Tensor]:
    """Activations of some gigabytes: workspace is small beside them."""
    torch.manual_seed(0)
    model = NanoGPT(vocab=4096, width=1024, heads=16, layers=6)
    model.places = nn.Embedding(1024, 1024)
    return model.cuda().to(torch.bfloat16), tokens(16, 1024, 4096).cuda()


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes above the start at the worst moment of ``run``."""
    gc.collect()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - start


def assert_as_planned(measured: int, planned: int) -> None:
    assert measured <= planned + WORKSPACE
    assert abs(measured - planned) <= SHARE * planned + WORKSPACE


def test_train_step_takes_the_memory_of_its_plan() -> None:
    model, idx = large()
    step = roamc.train_step(model, next_token, torch.optim.AdamW(model.parameters()), strict=True)
    plan = step.plan(idx)
    held = sum(p.numel() * p.element_size() for p in model.parameters()) * 2  # the optimizer's state is made first
    assert_as_planned(peak_of(lambda: step(idx)) - held, plan.needed_bytes)
    arena = step.plans[0].arena_bytes
    again = peak_of(lambda: step(idx))
    assert again <= plan.needed_bytes - arena + WORKSPACE, "the arena is there already"


def test_optimized_module_takes_the_memory_of_its_plan() -> None:
    model, idx = large()
    model = optimized(model)

    def run() -> None:
        model(idx).sum().backward()

    measured = peak_of(run)
    plan = roamc.plans(model)[0]
    tangent = idx.numel() * 4096 * 2
    assert plan.peak_bytes - tangent <= measured + WORKSPACE
    assert measured <= plan.needed_bytes + 2 * tangent + WORKSPACE


def test_planning_for_the_gpu_allocates_nothing_on_it() -> None:
    model, idx = large()
    optimizer = torch.optim.AdamW(model.parameters())
    grown = peak_of(lambda: roamc.plan(model, idx, loss_fn=next_token, optimizer=optimizer))
    assert grown == 0
