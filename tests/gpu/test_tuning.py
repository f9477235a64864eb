"""On a GPU: kernels are timed once, have the same bits in all shapes, and leave no memory behind."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import roamc
from roamc.graph import placeholders
from roamc.operators.gpu import here, kept, tuning
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kept import Kept
from roamc.operators.gpu.launch_shapes import LaunchShape, shape_of
from tests.codegen.test_kernel_judge import group_of, on_gpu
from tests.end_to_end.helpers import assert_same, tensors_of
from tests.models import make
from tests.operators.test_launch_shapes import ALONE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("error:the Triton kernel"),
]
DEVICE = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kept, "measured_folder", lambda: tmp_path)
    kept.forget()


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def large() -> FusedKernel:
    half = torch.bfloat16
    return group_of(lambda x, y: (x * 2 + y).relu(), on_gpu((4096, 4096), half), on_gpu((4096, 4096), half))


def inputs_of(group: FusedKernel) -> list[Tensor]:
    """Random operands of a group, in the order in which it takes them."""
    fakes = [node.meta["val"] for node in placeholders(group.body)]
    return [torch.randn(fake.shape, device=DEVICE).to(fake.dtype) for fake in fakes]


def test_a_kernel_is_timed_once_and_the_second_time_read(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    seconds_of = here.seconds_of

    def counted(runs: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
        timed.append(len(runs))
        return seconds_of(runs, device)

    monkeypatch.setattr(here, "seconds_of", counted)
    first, second = large(), large()
    tuning.tune([first])
    kept.forget()
    tuning.tune([second])
    assert timed == [len(first.shapes)]
    assert shape_of(second.text) == shape_of(first.text)


def test_times_are_those_of_the_kernel_and_not_of_its_launch() -> None:
    group = large()
    assert tuning.fastest(group, DEVICE) in group.shapes
    x, out = torch.zeros(1 << 28, device=DEVICE), torch.empty(1 << 28, device=DEVICE)
    short, long = here.seconds_of([lambda: out[:1024].copy_(x[:1024]), lambda: out.copy_(x)], DEVICE)
    assert 0 < short < long


def test_tuning_leaves_no_memory_behind() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    tuning.tune([large()])
    gc.collect()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_shapes_of_a_kernel_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    function, operands = ALONE[name][:2]
    group = group_of(function, *(on_gpu(tuple(one.shape), dtype) for one in operands))
    torch.manual_seed(0)
    inputs = inputs_of(group)
    outputs: list[Tensor] = []
    for shape in group.shapes:
        group.launch_in(shape)
        outputs.append(torch.empty(group.results[0].meta["val"].shape, dtype=dtype, device=DEVICE))
        group.write(*inputs, out=outputs[-1])
    assert all(torch.equal(one, outputs[0]) for one in outputs)


def test_a_first_result_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    members = FusedKernel.run_members

    def counted(group: FusedKernel, args: Sequence[Any]) -> tuple[Tensor, ...]:
        runs.append(args)
        return members(group, args)

    monkeypatch.setattr(FusedKernel, "run_members", counted)
    for _ in range(2):
        kept.forget()
        group = group_of(ALONE["flat"][0], *(on_gpu((40, 400)) for _ in range(2)))
        group.write(*inputs_of(group), out=torch.empty(40, 400, device=DEVICE))
        kept.write()
    assert len(runs) == 1
    machine = here.machine(DEVICE)
    assert machine is not None
    assert kept.of(machine, group.key) == Kept(None, LaunchShape(1024, 4))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_steps_have_the_same_bits_tuned_or_not(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_BYTES", 1)
    trained = []
    model, batch, loss_fn = make("llama", torch.bfloat16)
    for tune in (False, True, True):
        kept.forget()
        twin = copy.deepcopy(model).cuda()
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, foreach=False)
        step = roamc.train_step(twin, loss_fn, optimizer, strict=True, numerics=numerics, tune=tune)
        losses = [step(*(x.cuda() for x in batch)) for _ in range(2)]
        trained.append([losses, tensors_of(twin)])
    assert_same(trained[1], trained[0], "timed now")
    assert_same(trained[2], trained[0], "read from the file")
