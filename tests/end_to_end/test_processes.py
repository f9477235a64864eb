"""Several threads, copies and pickles, forked workers."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import roamc
from tests.end_to_end.cases import WIDE, wide
from tests.end_to_end.helpers import (
    TORCH,
    adamw,
    aot_eager,
    arenas_waiting,
    assert_same,
    eager_step,
    gradients_of,
    noise,
    optimized,
    run_backward,
    square,
    state_of,
    tensors_of,
)

TRACES_IN_THREADS = pytest.mark.skipif(
    TORCH < (2, 12),
    reason="FakeTensorMode of two threads at once ends the process in the next torch.compile, whatever backend",
)

# -- threads --------------------------------------------------------------------------------------


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run all at once; the results in order."""
    gate = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        gate.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


def gradient_of(model: nn.Module, seed: int) -> tuple[Tensor, ...]:
    return torch.autograd.grad(square(model, noise(16, WIDE, seed=seed)), list(model.parameters()))


def gradients_many(model: nn.Module, seed: int) -> list[tuple[Tensor, ...]]:
    return [gradient_of(model, seed + number) for number in range(20)]


@TRACES_IN_THREADS
def test_two_threads_with_a_compiled_model_each() -> None:
    models = [optimized(wide()), optimized(wide())]
    gradients = in_threads(
        *(lambda m=m, seed=seed: gradients_many(m, seed) for m, seed in zip(models, (0, 50), strict=True))
    )
    torch._dynamo.reset()
    wanted = [gradients_many(aot_eager(m), seed) for m, seed in zip(models, (0, 50), strict=True)]
    assert_same(gradients, wanted)


@TRACES_IN_THREADS
def test_two_threads_with_one_compiled_model() -> None:
    model = optimized(wide())
    gradients = in_threads(lambda: gradients_many(model, 0), lambda: gradients_many(model, 50))
    twin = aot_eager(model)
    assert_same(gradients, [gradients_many(twin, 0), gradients_many(twin, 50)])
    assert arenas_waiting() == 0


@TRACES_IN_THREADS
def test_two_threads_with_one_train_step() -> None:
    model = wide()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, adamw(model), strict=True), adamw(twin)
    losses = in_threads(*[lambda: [step(noise(8, WIDE)).item() for _ in range(10)]] * 2)
    wanted = [eager_step(twin, square, reference, noise(8, WIDE)).item() for _ in range(20)]
    assert sorted(losses[0] + losses[1]) == sorted(wanted)
    assert_same(tensors_of(model), tensors_of(twin))


def test_backward_in_another_thread_than_forward() -> None:
    model = optimized(wide())
    twin = aot_eager(model)
    loss = square(model, noise(WIDE, WIDE))
    in_threads(loss.backward)
    square(twin, noise(WIDE, WIDE)).backward()
    assert_same(gradients_of(model), gradients_of(twin))
    assert arenas_waiting() == 0


@torch.library.custom_op("roamc_tests::watched", mutates_args=())
def watched(x: Tensor) -> Tensor:
    return x.clone()


MEANWHILE: dict[str, Callable[[], object]] = {}
"""What is called whenever the operator above is traced."""


@watched.register_fake
def _(x: Tensor) -> Tensor:
    for call in MEANWHILE.values():
        call()
    return torch.empty_like(x)


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = wide()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(watched(x))  # type: ignore[no-any-return]


def another_size(model: nn.Module) -> list[Tensor]:
    return [square(model, noise(size, WIDE)) for size in (4, 5)]


def more_open_calls(model: nn.Module) -> list[Tensor]:
    return [torch.stack([square(model, noise(6, WIDE)) for _ in range(2)]).sum()]


@pytest.mark.skipif(not hasattr(torch.compiler, "_compile_session_context"), reason="nor does torch.compile so itself")
@pytest.mark.parametrize("before", [another_size, more_open_calls])
def test_other_threads_run_compiled_modules_while_one_plans_again(
    before: Callable[[nn.Module], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = wide()
    twin = copy.deepcopy(other)
    other.compile(backend="aot_eager")
    square(other, noise(4, WIDE))
    options = {"memory_budget": "min", "strict": True}
    model: Any = torch.compile(Watched(), backend="roamc", dynamic=True, options=options)
    for loss in before(model):
        loss.backward()
    ran: list[Tensor] = []
    monkeypatch.setitem(MEANWHILE, "call", lambda: ran.extend(in_threads(lambda: square(other, noise(4, WIDE)))))
    square(model, noise(6, WIDE)).backward()
    assert ran
    assert_same(ran, [square(twin, noise(4, WIDE))] * len(ran))
    assert not torch.compiler.is_compiling()


# -- copies ---------------------------------------------------------------------------------------


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


each_way = pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved], ids=lambda f: f.__name__)


@each_way
def test_copy_of_an_optimized_module(duplicate: Callable[[Any], Any]) -> None:
    model = optimized(wide(), memory_budget="min")
    batch = (noise(4, WIDE),)
    before = run_backward(model, square, batch)
    model.zero_grad()
    twin = duplicate(duplicate(model))
    assert roamc.plans(twin) == []
    assert_same(run_backward(twin, square, batch), before)
    assert_same(run_backward(model, square, batch), before)
    assert roamc.plans(twin) == roamc.plans(model)
    assert len(roamc.plans(twin)) == 1
    assert [name for name, _ in twin.named_modules()] == [name for name, _ in model.named_modules()]
    again = optimized(duplicate(model), memory_budget="1GiB")
    again.zero_grad()
    assert_same(run_backward(again, square, batch), before)
    assert roamc.plans(again)[0].budget_bytes == 1 << 30


@each_way
def test_copy_of_a_train_step_goes_on_by_itself(duplicate: Callable[[Any], Any]) -> None:
    model = wide()
    step = roamc.train_step(model, square, adamw(model), clip_grad_norm=0.1, strict=True)
    for seed in range(2):
        step(noise(4, WIDE, seed=seed))
    twin = duplicate(step)
    assert twin.options == step.options
    for seed in range(2, 4):
        assert_same(twin(noise(4, WIDE, seed=seed)), step(noise(4, WIDE, seed=seed)))
        assert_same(tensors_of(twin.model), tensors_of(step.model))
        assert_same(state_of(twin.optimizer), state_of(step.optimizer))
    step(noise(4, WIDE))
    assert not torch.equal(twin.model[0].weight, step.model[0].weight)


def test_a_copy_of_a_train_step_carries_what_it_was_made_from_alone() -> None:
    model = wide()
    step = roamc.train_step(model, square, adamw(model))
    step(noise(4, WIDE))  # programs, and process groups whose ranks share them, are not copied
    assert step.__getstate__().keys() == {"model", "loss_fn", "optimizer", "options", "clip_grad_norm"}


# -- forks ----------------------------------------------------------------------------------------


@pytest.fixture
def loader() -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(noise(24, WIDE)), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60
    )


def test_forked_data_loader_workers_while_training(loader: DataLoader[Any]) -> None:
    model = wide()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, adamw(model), strict=True), adamw(twin)
    step(noise(4, WIDE))
    eager_step(twin, square, reference, noise(4, WIDE))
    for _ in range(2):
        for (batch,) in loader:
            assert_same(step(batch), eager_step(twin, square, reference, batch))
    assert_same(tensors_of(model), tensors_of(twin))


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Torch uses one thread: in a child forked behind a parallel loop, GNU's OpenMP may wait forever, in eager too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("single_thread")
def test_forked_child_runs_the_parents_step() -> None:
    model = wide()
    step = roamc.train_step(model, square, adamw(model), strict=True)
    step(noise(4, WIDE))
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=lambda: send.send(step(noise(4, WIDE, seed=9)).item()))
    child.start()
    assert receive.poll(60)
    loss = receive.recv()
    child.join(60)
    assert child.exitcode == 0
    assert loss == step(noise(4, WIDE, seed=9)).item(), "the parent's parameters are its own"
