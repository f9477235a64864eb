"""On a GPU: what users do around a step: streams, checkpoints, budgets, autocast and scalers, pinned batches, NCCL."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import roamc
from roamc.capture.moved import device_of
from roamc.frontends.workload import Workload, capture
from roamc.graph import TrainGraph, operators
from roamc.graph import tensors_of as values_of
from roamc.operators.fakes import kept_whole
from roamc.operators.schemas import name_of
from tests.end_to_end.helpers import (
    aot_eager,
    assert_same,
    assert_steps_equal,
    eager_step,
    noise,
    optimized,
    run_backward,
    seeded,
    sgd,
    square,
    tensors_of,
)
from tests.gpu.test_cuda import WORKSPACE, each_dtype
from tests.graphs import captured_step
from tests.models import NanoGPT, make, next_token, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("same_bits_every_time"),
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.filterwarnings("error:the Triton kernel"),
    pytest.mark.filterwarnings("error:.*roamc could not plan"),
]


def adam(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "foreach": False, **settings})


# -- random numbers ---------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Attention and two dropouts that run again in backward; with a mask attention is the memory-efficient kernel."""

    def __init__(self, *, again: bool, masked: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.again, self.masked = nn.Linear(32, 96), nn.Linear(32, 32), again, masked

    def inner(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = x.new_ones(16, 16, dtype=torch.bool).tril() if self.masked else None
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.2)
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.3) * torch.rand(32, device=x.device, dtype=x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        return x + F.dropout(y, 0.1)


@each_dtype
@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
def test_dropouts_draw_what_eager_draws(*, dtype: torch.dtype, budget: Any, masked: bool, again: bool) -> None:
    """The seed of attention's dropout, which backward reads by its address, and reruns by the generator's state."""
    model = Checkpointed(again=again, masked=masked).cuda().to(dtype)
    batches = [(noise(4, 16, 32, seed=number).cuda().to(dtype),) for number in range(2)]
    with enable_python_dispatcher(), kept_whole():
        wanted = [run_backward(copy.deepcopy(model), square, batch, seed=3) for batch in batches]
    compiled = optimized(copy.deepcopy(model), memory_budget=budget)
    for batch, want in zip(batches, wanted, strict=True):
        compiled.zero_grad()
        assert_same(run_backward(compiled, square, batch, seed=3), want)
    assert_steps_equal(model, square, sgd, batches, memory_budget=budget)


def test_the_same_seed_gives_the_same_masks_without_storing_them() -> None:
    """Under numerics="fast" dropouts take their masks from a counter: kernels and rows alike, tuned or not."""
    model, batch, loss_fn = make("nanogpt-dropout", torch.bfloat16)
    batch, trained = tuple(x.cuda() for x in batch), []
    for tune, budget in ((False, None), (True, None), (False, "min")):
        twin = copy.deepcopy(model).cuda()
        step = roamc.train_step(
            twin, loss_fn, adam(twin), strict=True, numerics="fast", tune=tune, memory_budget=budget
        )
        trained.append([[float(seeded(step, *batch, seed=seed)) for seed in range(3)], tensors_of(twin)])
    assert_same(trained[1], trained[0], "tuned")
    assert trained[2][0] == pytest.approx(trained[0][0], rel=2e-2), "other kernels round otherwise"


# -- streams and memory -----------------------------------------------------------------------------------------------


def test_steps_take_turns_on_two_streams() -> None:
    model, batch, loss_fn = make("nanogpt", torch.float32)
    model, batch = model.cuda(), tuple(x.cuda() for x in batch)
    twin = copy.deepcopy(model)
    optimizers = [adam(each) for each in (model, twin)]
    step, side, main = roamc.train_step(model, loss_fn, optimizers[0], strict=True), torch.cuda.Stream(), None
    main = torch.cuda.current_stream()
    for number in range(6):
        stream, other = (side, main) if number % 2 else (main, side)
        stream.wait_stream(other)
        with torch.cuda.stream(stream):
            loss = step(*batch)
        main.wait_stream(stream)
        assert_same(loss, eager_step(twin, loss_fn, optimizers[1], *batch), f"step {number}")
    assert_same(tensors_of(model), tensors_of(twin))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_backward_is_on_the_stream_of_its_forward() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    twin, side, x = aot_eager(model), torch.cuda.Stream(), noise(512, 256).cuda()
    model = optimized(model)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = model(x)
    torch.cuda.current_stream().wait_stream(side)
    second = model(2 * x)  # an arena of its own, in flight at the same time
    (first.square().sum() + second.sum()).backward()
    (twin(x).square().sum() + twin(2 * x).sum()).backward()
    torch.cuda.synchronize()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("way", ["step", "module"])
def test_batches_of_several_lengths_share_memory_without_waiting(way: str) -> None:
    model, _, _ = make("nanogpt", torch.bfloat16)
    model = model.cuda()
    batches = [tokens(4, length).cuda() for length in (32, 8, 24, 32, 12, 8)]
    twin = copy.deepcopy(model)
    if way == "step":
        optimizers = [adam(each) for each in (model, twin)]
        step = roamc.train_step(model, next_token, optimizers[0], strict=True)
        losses = [step(idx) for idx in batches]
        assert_same(losses, [eager_step(twin, next_token, optimizers[1], idx) for idx in batches])
    else:
        results = [run_backward(each, next_token, (idx,)) for each in (optimized(model),) for idx in batches]
        assert_same(results, [run_backward(each, next_token, (idx,)) for each in (aot_eager(twin),) for idx in batches])


@each_dtype
@pytest.mark.parametrize("budget", ["min", "light", "80%", "device"])
@pytest.mark.parametrize("name", ["nanogpt-dropout", "llama"])
def test_a_budget_changes_no_bit_and_is_kept(dtype: torch.dtype, budget: str, name: str) -> None:
    model, batch, loss_fn = make(name, dtype)
    batch, trained = tuple(x.cuda() for x in batch), []
    for limit in (None, budget):
        twin = copy.deepcopy(model).cuda()
        step = roamc.train_step(twin, loss_fn, adam(twin), strict=True, memory_budget=limit)
        losses = [seeded(step, *batch, seed=seed) for seed in range(2)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses.append(seeded(step, *batch, seed=2))
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= step.plans[0].needed_bytes + WORKSPACE
        trained.append([losses, tensors_of(twin)])
    assert_same(trained[1], trained[0])


def test_a_lower_budget_takes_less_memory() -> None:
    torch.manual_seed(0)
    model = NanoGPT(vocab=4096, width=1024, heads=16, layers=6)
    model.places = nn.Embedding(1024, 1024)
    model, idx, peaks = model.cuda().to(torch.bfloat16), tokens(16, 1024, 4096).cuda(), []
    for budget in (None, "60%"):
        step = roamc.train_step(model, next_token, sgd(model), strict=True, memory_budget=budget)
        step(idx)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step(idx)
        peaks.append(torch.cuda.max_memory_allocated())
        assert step.plans[0].needed_bytes <= (step.plans[0].budget_bytes or step.plans[0].needed_bytes)
        del step
        gc.collect()
    assert peaks[1] < 0.8 * peaks[0]


# -- settings of torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0**10, 2.0**40], ids=["plain", "with a step that is skipped"])
def test_a_scaler_around_a_module_under_autocast(scale: float) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)).cuda()
    x, trained = noise(32, 64).cuda(), []
    for each in (aot_eager(model), optimized(model)):
        scaler, optimizer = torch.amp.GradScaler("cuda", init_scale=scale), adam(each, fused=True, foreach=None)
        for _ in range(3):
            with torch.autocast("cuda", torch.float16):
                loss = each(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        trained.append([loss.detach(), tensors_of(each), scaler.get_scale()])
    assert_same(trained[1], trained[0])


def test_autocast_around_and_inside_a_step() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda(), noise(32, 64).cuda()

    def inside(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).float().square().mean()

    assert_steps_equal(copy.deepcopy(model), inside, sgd, [(x,)] * 2)
    with torch.autocast("cuda", torch.bfloat16):  # one step: eager keeps casts of weights to the end of the context
        assert_steps_equal(model, square, sgd, [(x,)])


@pytest.mark.parametrize("allowed", [False, True], ids=["fp32", "tf32"])
def test_products_are_those_that_the_user_allows(*, allowed: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        model, x = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda(), noise(128, 256).cuda()
        assert_steps_equal(model, square, sgd, [(x,)] * 2, memory_budget="min")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain": adam,
    "foreach": functools.partial(adam, foreach=True),
    "default": functools.partial(adam, foreach=None),
    "learning rate on the GPU": lambda model: adam(model, lr=torch.tensor(1e-2, device="cuda")),
    "learning rate on the CPU": lambda model: adam(model, lr=torch.tensor(1e-2)),
    "amsgrad": functools.partial(adam, amsgrad=True, weight_decay=0.0),
    "fused": functools.partial(adam, foreach=None, fused=True),
    "fused, learning rate on the GPU": lambda m: adam(m, lr=torch.tensor(1e-2).cuda(), foreach=None, fused=True),
    "fused SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "SGD": sgd,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_torch(name: str) -> None:
    """``foreach`` of torch may round otherwise: its results are compared with a tolerance."""
    model, x = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32)).cuda(), noise(16, 32)
    if name not in ("foreach", "default"):
        assert_steps_equal(model, square, OPTIMIZERS[name], [(x.cuda(),)] * 3)
        return
    twin = copy.deepcopy(model)
    step, other = roamc.train_step(model, square, OPTIMIZERS[name](model), strict=True), OPTIMIZERS[name](twin)
    for _ in range(3):
        torch.testing.assert_close(step(x.cuda()), eager_step(twin, square, other, x.cuda()))


# -- tensors of the CPU -----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Reads a batch of the CPU, and numbers of the CPU as operands among pointwise operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("factor", torch.tensor(2.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.linear.weight.device, non_blocking=True)
        y = self.linear(x * self.factor + torch.tensor(0.3)).relu() / torch.tensor(3.0)
        return y - y.new_tensor(0.5)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_operands_on_the_cpu(*, pinned: bool) -> None:
    model = Mixed()
    model.linear.cuda()  # the buffer stays on the CPU
    x = noise(128, 64).pin_memory() if pinned else noise(128, 64)
    twin = aot_eager(model)
    results = [run_backward(each, square, (x,)) for each in (optimized(copy.deepcopy(model)), twin)]
    assert_same(*results)
    assert_steps_equal(model, square, sgd, [(x.cuda(),)] * 2)
    assert_steps_equal(copy.deepcopy(model), square, sgd, [(x.cuda(),)] * 2, memory_budget="min")


# -- several devices --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_step_on_the_second_gpu_while_the_first_is_current(numerics: Any) -> None:
    model, batch, loss_fn = make("llama", torch.bfloat16)
    batch, trained = tuple(x.to("cuda:1") for x in batch), []
    for device in (0, 1):
        twin = copy.deepcopy(model).to("cuda:1")
        step = roamc.train_step(twin, loss_fn, adam(twin), strict=True, numerics=numerics)
        with torch.cuda.device(device):
            trained.append([[step(*batch) for _ in range(2)], tensors_of(twin)])
    assert_same(trained[0], trained[1])


class OnTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256).to("cuda:0"), nn.Linear(256, 64).to("cuda:1")

    def forward(self, x: Tensor) -> Tensor:
        return self.second((F.gelu(self.first(x)) * 2).to("cuda:1")).relu() * 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_two_gpus() -> None:
    assert_steps_equal(OnTwo(), square, sgd, [(noise(32, 64).cuda(),)] * 2)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("reuse", ["overlap", "plain"])
def test_collectives_of_nccl_end_before_their_memory_is_used_again(reuse: str) -> None:
    """Gradients of DistributedDataParallel, which NCCL writes on a stream of its own, in the arena."""
    model, batch, loss_fn = make("nanogpt", torch.float32)
    model, batch = model.cuda(), tuple(x.cuda() for x in batch)
    twin = copy.deepcopy(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizers = [adam(each) for each in (parallel, twin)]
    disable = () if reuse == "overlap" else ("overlap",)
    step = roamc.train_step(parallel, loss_fn, optimizers[0], strict=True, disable=disable)
    for number in range(4):
        assert_same(step(*batch), eager_step(twin, loss_fn, optimizers[1], *batch), f"step {number}")
    assert_same(tensors_of(model), tensors_of(twin))


# -- plans without a GPU ----------------------------------------------------------------------------------------------


def planned_operators(graph: TrainGraph) -> list[str]:
    """Names of operators with results; torch chooses cuDNN's attention on some GPUs, whose results are as large."""
    nodes = [node for node in operators(graph.graph) if any(one.numel() for _, one in values_of(node))]
    return [name_of(node.target).replace("_cudnn_attention", "_flash_attention") for node in nodes]


@each_dtype
@pytest.mark.parametrize("name", ["nanogpt", "nanogpt-dropout", "llama", "bert", "resnet50"])
def test_a_step_planned_without_a_gpu_is_the_step_that_is_captured_on_one(name: str, dtype: torch.dtype) -> None:
    model, batch, loss_fn = make(name, dtype)
    without = capture(Workload(name, copy.deepcopy(model), batch, loss_fn), device=device_of("cuda"))
    graph = captured_step(model.cuda(), tuple(x.cuda() for x in batch), loss_fn).graph
    names, wanted = (planned_operators(one) for one in (without, graph))
    missing = sorted({*wanted} - {*names})
    assert sorted(names) == sorted(wanted), f"missing {missing}, unexpected {sorted({*names} - {*wanted})}"


@pytest.mark.parametrize("name", ["resnet50", "bert", "llama", "nanogpt-dropout"])
def test_to_plan_a_step_runs_no_kernel(name: str) -> None:
    """torch runs operators without a fake kernel for real, on zeros, where a GPU is there."""
    model, batch, loss_fn = make(name, torch.float32)
    model, batch = model.cuda(), tuple(x.cuda() for x in batch)
    optimizer = adam(model)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    roamc.plan(model, *batch, loss_fn=loss_fn, optimizer=optimizer)
    assert torch.cuda.max_memory_allocated() == before
