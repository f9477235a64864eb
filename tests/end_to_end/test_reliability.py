"""What goes wrong in a long run: leaks, failed and interrupted steps."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.operators.kernels import KERNELS
from tests.end_to_end.cases import WIDE, wide
from tests.end_to_end.helpers import (
    adamw,
    aot_eager,
    arenas_waiting,
    assert_same,
    eager_step,
    gradients_of,
    noise,
    optimized,
    run_backward,
    sgd,
    square,
    state_of,
    tensors_of,
)
from tests.models import NanoGPT, next_token, tokens

aten = torch.ops.aten
BAD = torch.full((2, 16), 64)  # one beyond the vocabulary
SLACK = 40_000  # bytes; one leaked arena, or one leaked tensor in every step, is more


# -- memory -------------------------------------------------------------------------------------


HEAP_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Heap(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_: ClassVar[list[Any]] = [(name, ctypes.c_size_t) for name in HEAP_FIELDS.split()]


def heap_bytes() -> int:
    """Bytes that malloc has handed out and not got back; every CPU tensor comes from there."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Heap
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def forward_and_backward(model: nn.Module) -> Callable[[], None]:
    return lambda: square(model, noise(WIDE, WIDE)).backward()


def forward_only(model: nn.Module) -> Callable[[], None]:
    return lambda: square(model, noise(WIDE, WIDE)) and None


def dropped_in_the_middle(model: nn.Module) -> Callable[[], None]:
    def run() -> None:
        kept, dropped = square(model, noise(WIDE, WIDE)), square(model, noise(WIDE, WIDE))
        del dropped
        kept.backward(retain_graph=True)

    return run


def without_gradients(model: nn.Module) -> Callable[[], None]:
    return lambda: torch.no_grad()(square)(model, noise(WIDE, WIDE)) and None


def whole_steps(model: nn.Module) -> Callable[[], None]:
    step = roamc.train_step(model, square, adamw(model), strict=True)
    return lambda: step(noise(WIDE, WIDE)) and None


def _fail(gradient: Tensor) -> Tensor:
    raise RuntimeError("no")


def hook_that_fails(model: nn.Module) -> Callable[[], None]:
    def run() -> None:
        y = model(noise(WIDE, WIDE))
        y.register_hook(_fail)
        with pytest.raises(RuntimeError, match="no"):
            y.sum().backward()

    return run


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize(
    "make",
    [forward_and_backward, forward_only, dropped_in_the_middle, without_gradients, hook_that_fails, whole_steps],
    ids=lambda f: f.__name__,
)
def test_two_hundred_steps_hold_the_memory_of_three(make: Callable[[nn.Module], Callable[[], None]]) -> None:
    model = wide()
    run = make(model if make is whole_steps else optimized(model))
    for _ in range(3):
        run()
    # A leak shows in every window of steps; what another thread of the test process allocates, in one of them.
    assert min(growth(run, 197) for _ in range(3)) < SLACK
    assert arenas_waiting() == 0


def growth(run: Callable[[], None], steps: int) -> int:
    """Bytes that the heap has grown by after ``steps`` runs."""
    before = heap_bytes()
    for _ in range(steps):
        run()
    return heap_bytes() - before


def test_a_dropped_loss_gives_its_arena_back_at_once() -> None:
    model = optimized(wide())
    square(model, noise(WIDE, WIDE)).backward()
    pool = pools(model)[0]
    loss = square(model, noise(WIDE, WIDE))
    assert (len(pool.waiting), len(pool.free)) == (1, 0)
    del loss
    assert (len(pool.waiting), len(pool.free)) == (0, 1)


def test_forwards_in_flight_have_an_arena_each() -> None:
    model = optimized(wide())
    losses = [square(model, noise(WIDE, WIDE, seed=seed)) for seed in range(3)]
    pool = pools(model)[0]
    assert (len(pool.waiting), len(pool.free)) == (3, 0)
    for loss in losses:
        loss.backward()
    assert (len(pool.waiting), len(pool.free)) == (0, 3)
    twin = aot_eager(wide())
    twin.load_state_dict(model.state_dict())
    for seed in range(3):
        square(twin, noise(WIDE, WIDE, seed=seed)).backward()
    assert_same(gradients_of(model), gradients_of(twin))


def test_plans_that_are_dropped_free_their_arenas() -> None:
    model = wide()
    step = roamc.train_step(model, square, sgd(model), strict=True, max_plans=1)
    step(noise(1, WIDE))
    with pytest.warns(UserWarning, match="max_plans=1"):
        step(noise(8 * WIDE, WIDE))
    large = heap_bytes()
    step(noise(1, WIDE))
    assert large - heap_bytes() > 2 * 8 * WIDE * WIDE * 4, "two activations of the large batch at the least"


def pools(model: nn.Module) -> list[Any]:
    """The arena pools behind an optimized module; roamc shows users only the plans."""
    from roamc.frontends.optimize import _RECORDS

    return [program.executable.pool for program in _RECORDS[model].programs]


# -- steps that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_at", [0, 2])
def test_a_failed_train_step_changes_nothing_and_training_goes_on(bad_at: int) -> None:
    model = NanoGPT()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, next_token, adamw(model), strict=True), adamw(twin)
    for number in range(4):
        if number == bad_at:
            before = tensors_of(model)
            with pytest.raises((IndexError, RuntimeError)):
                step(BAD)
            assert_same(tensors_of(model), before)
            assert not number or state_of(step.optimizer)[0]["step"] == number
        assert_same(step(tokens()), eager_step(twin, next_token, reference, tokens()))
    assert_same(tensors_of(model), tensors_of(twin))
    assert_same(state_of(step.optimizer), state_of(reference))


SGD_WITH_DAMPENING = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("entries", [None, {"momentum_buffer": None}])
def test_the_first_step_after_one_that_failed_is_the_first(fused: bool, entries: dict[str, None] | None) -> None:
    model = NanoGPT()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), **SGD_WITH_DAMPENING, fused=fused) for m in (model, twin))
    if entries is not None:
        ours.state.update({parameter: dict(entries) for parameter in model.parameters()})
    before = copy.deepcopy(ours.state_dict())
    step = roamc.train_step(model, next_token, ours, strict=True)
    with pytest.raises((IndexError, RuntimeError)):
        step(BAD)
    assert ours.state_dict() == before
    for _ in range(3):
        assert_same(step(tokens()), eager_step(twin, next_token, theirs, tokens()))
    assert_same(tensors_of(model), tensors_of(twin))
    assert_same(state_of(ours), state_of(theirs))


def test_a_failed_forward_of_an_optimized_module_does_no_harm() -> None:
    model = NanoGPT()
    twin = aot_eager(model)
    model = optimized(model)
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError)):
            next_token(model, BAD)
        assert_same(run_backward(model, next_token, (tokens(),)), run_backward(twin, next_token, (tokens(),)))
    assert all(len(pool.waiting) + len(pool.free) == 1 for pool in pools(model))


def test_a_failed_backward_does_no_harm() -> None:
    model = wide()
    twin = aot_eager(model)
    model = optimized(model)
    hook_that_fails(model)()
    batch = (noise(WIDE, WIDE),)
    assert_same(run_backward(model, square, batch), run_backward(twin, square, batch))
    assert [len(pool.free) for pool in pools(model)] == [1]


def interrupting(kernel: Any, at: int, number: int) -> Any:
    """The same kernel, with signal ``number`` sent during its run number ``at``."""
    runs = iter(range(1000))

    def function(*args: Any, **kwargs: Any) -> None:
        if next(runs) == at:
            signal.raise_signal(number)
        kernel.function(*args, **kwargs)

    return dataclasses.replace(kernel, function=function)


@pytest.fixture
def a_handler_that_raises() -> Iterator[None]:
    """That of Ctrl-C, for a time limit and a scheduler's notice, too."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGALRM, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("operator", [aten.embedding.default, aten.embedding_dense_backward.default], ids=str)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM, signal.SIGTERM])
@pytest.mark.usefixtures("a_handler_that_raises")
def test_a_signal_inside_a_step_lets_it_end(
    monkeypatch: pytest.MonkeyPatch, number: int, operator: Any, at: int
) -> None:
    monkeypatch.setitem(KERNELS, operator, interrupting(KERNELS[operator], at, number))
    train_until_interrupted()


WATCHED = tuple(
    f"roamc/{name}.py"
    for name in ("frontends/train_step", "frontends/bound_step", "runtime/program", "capture/optimizers")
)


@pytest.mark.parametrize("line", [1, 30, 100, 300, 400, 500, 600, 700, 800, 1000, 1500])
def test_ctrl_c_at_any_line_leaves_a_whole_number_of_steps(line: int) -> None:
    lines = iter(range(10**9))

    def trace(frame: Any, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line" and next(lines) == line:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        train_until_interrupted()
    finally:
        sys.settrace(before)


def test_ctrl_c_while_the_optimizer_state_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    make, calls = torch.full_like, iter(range(1000))

    def full_like(like: Tensor, value: float, **how: Any) -> Tensor:
        if type(like) is nn.Parameter and next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return make(like, value, **how)

    monkeypatch.setattr(torch, "full_like", full_like)
    train_until_interrupted()


@pytest.mark.parametrize("way", ["the first step", "train_step.plan", "plan"])
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_while_a_step_is_traced_waits_once(way: str, presses: int) -> None:
    reached = []

    class Pressing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not reached:
                for number in range(presses):
                    signal.raise_signal(signal.SIGINT)
                    reached.append(number)
            return super().forward(x)

    model = Pressing(4, 4)
    twin = copy.deepcopy(model)
    step = roamc.train_step(model, square, sgd(model), strict=True)
    first = {
        "the first step": lambda: step(noise(4, 4)),
        "train_step.plan": lambda: step.plan(noise(4, 4)),
        "plan": lambda: roamc.plan(model, noise(4, 4)),
    }[way]
    with pytest.raises(KeyboardInterrupt):
        first()
    assert reached == [0]
    assert_same(tensors_of(model), tensors_of(twin))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(step(noise(4, 4)), eager_step(twin, square, sgd(twin), noise(4, 4)))


def train_until_interrupted() -> None:
    """Train until Ctrl-C; what is left equals eager training for as many steps as the optimizer counts."""
    model = NanoGPT(layers=1)
    twin = copy.deepcopy(model)
    optimizer, reference = adamw(model), adamw(twin)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        step = roamc.train_step(model, next_token, optimizer, strict=True)
        for _ in range(20):
            step(tokens())
    states = state_of(optimizer)
    counts = {int(state.get("step", -1)) for state in states.values()} or {0}
    assert len(counts) == 1
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in states.values())
    for _ in range(*counts):
        eager_step(twin, next_token, reference, tokens())
    assert_same(tensors_of(model), tensors_of(twin))
    if counts != {0}:
        assert_same(states, state_of(reference))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    step = roamc.train_step(model, next_token, optimizer, strict=True)
    assert_same(step(tokens()), eager_step(twin, next_token, reference, tokens()))
    assert_same(eager_step(model, next_token, optimizer, tokens()), eager_step(twin, next_token, reference, tokens()))
