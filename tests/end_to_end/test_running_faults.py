"""A program that fails while it runs: the step ends with the right numbers, one line says so, later steps go on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel

import roamc
from roamc.codegen.source import Program
from roamc.runtime import program
from roamc.runtime.arena import Arena
from tests.end_to_end.cases import Layers
from tests.end_to_end.helpers import (
    adamw,
    aot_eager,
    arenas_waiting,
    assert_same,
    eager_step,
    noise,
    optimized,
    run_backward,
    seeded,
    sgd,
    square,
    state_of,
    tensors_of,
    warnings_of_roamc,
)
from tests.parallel import some_group


class Bug(Exception):
    """What an operator of the program raises."""


class Faults:
    """Counts the calls of operators of every program, and raises at one of them.

    Attributes:
        calls: how often each operator was called; "" for all of them.
        at: the operator that raises and its number among the calls, from 1.
        last: the operator that has raised.
        error: what is raised; None for a new one each time.
        behind: what is called behind the operator, which then raises nothing.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.at = ("", 0)
        self.last = ""
        self.error: Exception | None = None
        self.behind: Callable[[], None] | None = None

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        operator = name.removesuffix("_out")

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.update(("", operator))
            if self.at in (("", self.calls[""]), (operator, self.calls[operator])):
                self.last = operator
                if self.behind is None:
                    raise self.error or Bug("a mistake")
                results = function(*args, **kwargs)
                self.behind()
                return results
            return function(*args, **kwargs)

        return call


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """What programs made in the test call."""
    counter, load = Faults(), program.load

    def watched(emitted: Program, code: CodeType) -> Callable[[Arena], Any]:
        operators = {
            name: counter.watch(name, value) if callable(value) and name != "torch" else value
            for name, value in emitted.constants.items()
        }
        return load(dataclasses.replace(emitted, constants=operators), code)

    monkeypatch.setattr(program, "load", watched)
    return counter


def network() -> nn.Module:
    """Has buffers that forward updates, random numbers, views, in-place reuse and an operator with several results."""
    return Layers(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 8), nn.Softmax(-1))


def test_every_operator_of_two_steps_may_fail(faults: Faults) -> None:
    """Compiled once: what a step reads is put back, and the program is declared whole, before each fault.

    The only operators that do not run again are kernels of ours of several calls that write over what they read.
    """
    model = network()
    twin = aot_eager(model)
    start = copy.deepcopy(model.state_dict())
    model = roamc.optimize(model)
    steps = [((noise(4, 8, seed=seed),), seed) for seed in range(2)]
    wanted = [run_backward(twin, square, batch, seed=seed) for batch, seed in steps]
    results = [run_backward(model, square, batch, seed=seed) for batch, seed in steps]
    assert_same(results, wanted)
    executable = roamc.optimize.__globals__["_RECORDS"][model].programs[0].executable
    warned: list[Exception] = []
    executable._on_failure = warned.append
    total = faults.calls[""]
    assert total > 40
    raised = []
    for number in range(1, total + 1):
        model.load_state_dict(start)
        model.zero_grad()
        executable.broken, faults.at = False, ("", faults.calls[""] + number)
        try:
            results = [run_backward(model, square, batch, seed=seed) for batch, seed in steps]
        except roamc.UnfinishedError:
            raised.append(faults.last)
            continue
        assert_same(results, wanted, f"the fault is in {faults.last}, operator {number} of {total}")
    assert len(warned) == total - len(raised)
    assert set(raised) <= {"run_native_dropout_backward"}


OVER_ITS_INPUT = "run_native_dropout_backward"
"""A kernel of several calls that writes over what it reads, in the programs of :func:`network`."""


def test_what_cannot_be_finished_is_one_clear_error_and_training_goes_on(faults: Faults) -> None:
    model = network()
    twin = aot_eager(model)
    model = roamc.optimize(model)
    faults.at = OVER_ITS_INPUT, 1
    with pytest.raises(roamc.UnfinishedError) as caught:
        run_backward(model, square, (noise(4, 8),))
    said = str(caught.value)
    assert "Layers failed in native_dropout_by_mask (Bug: a mistake), which may have done half of its work" in said
    assert "cannot be finished with the same numbers; 3 of 9 parameters and buffers were updated in it: load" in said
    assert isinstance(caught.value.__cause__, Bug)
    model.zero_grad()
    twin.load_state_dict(model.state_dict())
    batch = (noise(4, 8, seed=1),)
    assert_same(run_backward(model, square, batch), run_backward(twin, square, batch))
    assert roamc.plans(model) == []
    assert arenas_waiting() == 0


def test_a_train_step_that_cannot_be_finished_says_what_was_updated(faults: Faults) -> None:
    model = network()
    step = roamc.train_step(model, square, adamw(model))
    faults.at = OVER_ITS_INPUT, 2  # in backward
    with pytest.raises(roamc.UnfinishedError, match=r"; [1-9] of 9 parameters and buffers were updated in it: load"):
        step(noise(4, 8))
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, square, sgd(model)), sgd(twin)
    assert_same(seeded(step, noise(4, 8)), seeded(eager_step, twin, square, reference, noise(4, 8)))


def test_a_collective_that_fails_ends_the_step_and_says_so(faults: Faults) -> None:
    """Other ranks may or may not have had their part of it: it does not run again."""
    with some_group():
        model = DistributedDataParallel(nn.Linear(8, 8))
        step = roamc.train_step(model, square, sgd(model))
        before = copy.deepcopy(model.state_dict())
        step(noise(4, 8))
        reduced = next(name for name in faults.calls if "all_reduce" in name)
        faults.at = reduced, faults.calls[reduced] + 1
        with pytest.raises(
            roamc.UnfinishedError, match=r"failed in all_reduce.*Bug: a mistake.*; parameters, buffers and"
        ):
            step(noise(4, 8))
        assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert torch.isfinite(step(noise(4, 8)))  # later steps run operator by operator


def test_an_error_that_was_raised_before_is_followed_to_where_it_is_raised_now(faults: Faults) -> None:
    """Its traceback has the frames of both times."""
    model = network()
    twin = aot_eager(model)
    model, faults.error = roamc.optimize(model), Bug("the same one")
    batch = (noise(4, 8),)
    start = copy.deepcopy(model.state_dict())
    wanted = run_backward(twin, square, batch)
    run_backward(model, square, batch)
    executable = roamc.optimize.__globals__["_RECORDS"][model].programs[0].executable
    for name in ("aten_mm", "aten_addmm"):
        model.load_state_dict(start)
        model.zero_grad()
        executable.broken, faults.at = False, (name, faults.calls[name] + 1)
        with warnings_of_roamc():
            assert_same(run_backward(model, square, batch), wanted)


PLACES = {
    "first forward": ("aten_addmm", 1),
    "first backward": ("aten_mm", 1),
    "second forward": ("aten_addmm", 4),
    "second backward": ("aten_mm", 5),
}
each_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


@each_place
def test_one_warning_that_names_the_fault_and_the_budget(faults: Faults, place: tuple[str, int]) -> None:
    model = network()
    twin = aot_eager(model)
    model = roamc.optimize(model, memory_budget="min" if place[1] == 1 else None)
    faults.at = place
    with warnings_of_roamc() as said:
        for seed in range(3):
            batch = (noise(4, 8, seed=seed),)
            results = run_backward(model, square, batch, seed=seed)
            assert_same(results, run_backward(twin, square, batch, seed=seed))
    (message,) = said
    assert "program of 'Layers' failed while it ran: Bug: a mistake" in message
    assert ("memory_budget='min' IS NOT KEPT" in message) == (place[1] == 1)
    assert "\n" not in message
    assert roamc.plans(model) == []


def test_strict_raises_what_the_operator_raised(faults: Faults) -> None:
    model = optimized(network())
    faults.at = PLACES["first backward"]
    with pytest.raises(Bug, match="a mistake"):
        run_backward(model, square, (noise(4, 8),))


class NoArena(Exception):
    """What taking memory may raise."""


@pytest.mark.parametrize("kind", [NoArena, MemoryError])
def test_an_arena_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise kind("no memory")

    model = Layers(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    twin = aot_eager(model)
    model = roamc.optimize(model)
    monkeypatch.setattr("roamc.runtime.arena.Arena.__init__", fail)
    with warnings_of_roamc() as said:
        for seed in range(2):
            batch = (noise(4, 8, seed=seed),)
            assert_same(run_backward(model, square, batch), run_backward(twin, square, batch))
    (message,) = said
    assert f"{kind.__name__}: no memory" in message
    assert ("takes more memory" in message) == (kind is MemoryError)


def test_a_shape_other_than_planned_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    twin = aot_eager(model)
    model = roamc.optimize(model)
    monkeypatch.setattr(Arena, "moved_views", lambda arena: ["addmm"])
    with warnings_of_roamc() as said:
        assert_same(run_backward(model, square, (noise(4, 8),)), run_backward(twin, square, (noise(4, 8),)))
    (message,) = said
    assert "addmm another shape than was planned" in message


def test_inference(faults: Faults) -> None:
    model = network().eval()
    twin = aot_eager(model)
    model = roamc.optimize(model)
    faults.at = PLACES["first forward"]
    with torch.no_grad(), warnings_of_roamc() as said:
        for seed in range(2):
            assert_same(model(noise(4, 8, seed=seed)), twin(noise(4, 8, seed=seed)))
    assert len(said) == 1


def test_a_graph_kept_for_a_second_backward_and_two_forwards_in_flight(faults: Faults) -> None:
    model = network()
    twin = aot_eager(model)
    model = roamc.optimize(model)

    def run(m: nn.Module) -> list[Tensor | None]:
        torch.manual_seed(1)
        first, second = square(m, noise(4, 8)), square(m, noise(4, 8, seed=1))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        return [p.grad for p in m.parameters()]

    run(model)
    model.zero_grad()
    twin.load_state_dict(model.state_dict())
    faults.at = ("aten_mm", faults.calls["aten_mm"] + 6)
    with warnings_of_roamc() as said:
        gradients = run(model)
    assert len(said) == 1
    assert_same(gradients, run(twin))


def test_a_mistake_of_the_callers_is_raised_as_it_is_and_the_program_stays() -> None:
    model = Layers(nn.Embedding(4, 8), nn.Linear(8, 8))
    model = roamc.optimize(model)
    good, bad = torch.tensor([0, 3]), torch.tensor([0, 4])
    with warnings_of_roamc() as said:
        square(model, good).backward()
        with pytest.raises(IndexError, match="out of range"):
            model(bad)
        square(model, good).backward()
    assert said == []
    assert len(roamc.plans(model)) == 1


@each_place
def test_a_train_step_ends_the_step_that_failed(faults: Faults, place: tuple[str, int]) -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer, reference = adamw(model), adamw(twin)
    step = roamc.train_step(model, square, optimizer)
    faults.at = place
    with warnings_of_roamc() as said:
        for seed in range(3):
            wanted = seeded(eager_step, twin, square, reference, noise(4, 8, seed=seed), seed=seed)
            assert_same(seeded(step, noise(4, 8, seed=seed), seed=seed), wanted)
            assert_same(tensors_of(model), tensors_of(twin))
            assert_same(state_of(optimizer), state_of(reference))
    assert len(said) == 1


def test_a_train_step_that_cannot_be_captured_changes_nothing_and_names_the_way_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise Bug("a mistake")

    model = network()
    before, random = tensors_of(model), torch.get_rng_state()
    step = roamc.train_step(model, square, sgd(model))
    monkeypatch.setattr("roamc.capture.step._Assembly.build", fail)
    with pytest.raises(Bug, match="a mistake") as caught:
        step(noise(4, 8))
    assert "roamc.optimize(model) takes it" in caught.value.__notes__[-1]
    assert_same(tensors_of(model), before)
    assert_same(torch.get_rng_state(), random)


PLANNING = (
    "roamc.planning.search.PlanSearch.run",
    "roamc.planning.layout_judge.check_layout",
    "roamc.runtime.program.emit",
    "roamc.runtime.program.load",
    "roamc.runtime.arena.Arena.__init__",
)


@pytest.mark.parametrize("where", PLANNING)
def test_a_train_step_that_cannot_be_planned_changes_nothing_and_names_the_way_in(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise Bug("a mistake\nin two lines")

    model = network()
    optimizer = sgd(model)
    before, random = tensors_of(model), torch.get_rng_state()
    step = roamc.train_step(model, square, optimizer)
    monkeypatch.setattr(where, fail)
    with pytest.raises(roamc.RoamcError, match=r"nothing was changed: Bug: a mistake\. Try roamc\.optimize\(model\)"):
        step(noise(4, 8))
    assert_same(tensors_of(model), before)
    assert_same(torch.get_rng_state(), random)
    assert state_of(optimizer) == {}
    assert all(p.grad is None for p in model.parameters())
    assert step.plans == []


class TimeIsUp(Exception):
    """What the handler of a signal raises."""


def time_is_up(number: int, frame: FrameType | None) -> None:
    """Raise, as a time limit does in the middle of a step."""
    raise TimeIsUp


class TimeLimit:
    """Handlers that keep nothing of what they are given."""

    def is_over(self, *arguments: object) -> None:
        del arguments
        raise TimeIsUp

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        raise TimeIsUp


@pytest.mark.parametrize(
    "handler",
    [TimeLimit(), TimeLimit().is_over, functools.partial(TimeLimit().is_over, 1)],
    ids=["object", "method", "partial"],
)
def test_a_handler_that_deletes_the_frame_is_known(handler: Callable[..., None], faults: Faults) -> None:
    model = network()
    step = roamc.train_step(model, square, sgd(model))
    step(noise(4, 8))
    faults.at, faults.behind = ("", faults.calls[""] + 30), signalled
    with handled_by(handler), warnings_of_roamc() as said, pytest.raises(TimeIsUp):
        step(noise(4, 8))
    assert said == []
    assert len(step.plans) == 1


def test_post_hooks_of_a_whole_step_run_before_a_handler_that_raises(faults: Faults) -> None:
    model = network()
    optimizer, calls = sgd(model), list[int]()
    optimizer.register_step_post_hook(lambda *_: calls.append(len(calls)))
    step = roamc.train_step(model, square, optimizer)
    step(noise(4, 8))
    faults.at, faults.behind = ("", faults.calls[""] + 30), signalled
    with handled_by(time_is_up), pytest.raises(TimeIsUp):
        step(noise(4, 8))
    assert calls == [0, 1]


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGUSR1, signal.SIGINT])
def test_a_handler_that_computes_while_a_step_is_traced(number: int) -> None:
    class Timed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                signal.raise_signal(number)
            return super().forward(x)

    model, sums = Timed(8, 8), list[float]()
    with handled_by(lambda *_: sums.append(float(model.weight.detach().sum())), number):
        roamc.train_step(model, square, sgd(model), strict=True)(noise(4, 8))
    assert len(sums) == 1


def test_a_handler_that_computes_while_a_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes at every seventh node that torch's trace or a pass of roamc makes."""
    model, makes, sums = network(), fx.Graph.create_node, list[Tensor]()
    expected = model[0].weight.detach().sum()
    nodes = itertools.count()

    def create_node(*args: Any, **how: Any) -> fx.Node:
        if next(nodes) % 7 == 6:
            signal.raise_signal(signal.SIGUSR1)
        return makes(*args, **how)

    with monkeypatch.context() as patch, handled_by(lambda *_: sums.append(model[0].weight.sum().detach())):
        patch.setattr(fx.Graph, "create_node", create_node)
        compiled = roamc.optimize(copy.deepcopy(model), strict=True)
        got = run_backward(compiled, square, (noise(4, 8),))
    assert len(sums) > 2
    for each in sums:
        assert_same(each, expected)
    assert_same(got, run_backward(aot_eager(model), square, (noise(4, 8),)))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_what_the_handler_of_a_signal_raises_is_the_users(faults: Faults, share: float) -> None:
    """The operator that it comes behind has run: nothing runs again, nobody swallows it, and the program stays."""
    model = network()
    model = roamc.optimize(model)
    batch = (noise(4, 8),)
    run_backward(model, square, batch)
    total = faults.calls[""]
    faults.at, faults.behind = ("", total + 1 + int(share * total)), signalled
    with handled_by(time_is_up), warnings_of_roamc() as said, pytest.raises(TimeIsUp):
        run_backward(model, square, batch)
    assert said == []
    assert len(roamc.plans(model)) == 1
    assert arenas_waiting() == 0
    twin = aot_eager(copy.deepcopy(network()))
    model.zero_grad()
    twin.load_state_dict(model.state_dict())
    assert_same(run_backward(model, square, batch), run_backward(twin, square, batch))


def test_what_the_handler_of_a_signal_raises_while_a_step_runs_or_is_planned(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    with handled_by(time_is_up):
        model = network()
        step = roamc.train_step(model, square, sgd(model))
        step(noise(4, 8))
        faults.at, faults.behind = ("", faults.calls[""] + 30), signalled
        with warnings_of_roamc() as said, pytest.raises(TimeIsUp):
            step(noise(4, 8))
        monkeypatch.setattr("roamc.planning.search.PlanSearch.run", signalled)
        other = roamc.train_step(model, square, sgd(model))
        with warnings_of_roamc() as more, pytest.raises(TimeIsUp):
            other(noise(4, 8))
        optimized = roamc.optimize(network())
        with warnings_of_roamc() as most, pytest.raises(BackendCompilerFailed) as caught:
            optimized(noise(4, 8))
    assert said == more == most == []
    assert isinstance(caught.value.inner_exception, TimeIsUp)


def test_a_handler_runs_in_the_modes_of_the_caller_and_behind_the_whole_step(faults: Faults) -> None:
    """It takes gradients, sees the caller's autocast, and the step that it came in counts for a scheduler."""
    model, other = network(), network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = roamc.train_step(model, square, optimizer)
    modes = []

    def handler(number: int, frame: FrameType | None) -> None:
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        square(other, noise(4, 8)).backward()
        raise TimeIsUp

    with torch.autocast("cpu", torch.bfloat16):
        step.plan(noise(4, 8))
        faults.calls.clear()
        faults.at, faults.behind = ("", 30), signalled
        with handled_by(handler), pytest.raises(TimeIsUp):
            step(noise(4, 8))
    assert modes == [(True, True)]
    assert all(p.grad is not None for p in other.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], object], number: int = signal.SIGUSR1) -> Iterator[None]:
    """Within this context, ``handler`` is that of signal ``number``."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def signalled(*_: Any, **__: Any) -> None:
    """A signal comes; Python calls its handler before the next line."""
    signal.raise_signal(signal.SIGUSR1)


def test_an_error_from_another_thread_is_the_users(faults: Faults) -> None:
    """It has no frame of its own, and comes behind an operator that has run."""
    model = network()
    model = roamc.optimize(model)
    batch = (noise(4, 8),)
    run_backward(model, square, batch)

    class Elsewhere(Exception):
        pass

    executable = roamc.optimize.__globals__["_RECORDS"][model].programs[0].executable
    error = Elsewhere()
    code = compile("raise error", executable._filename, "exec")
    try:
        exec(code, {"error": error})
    except Elsewhere as raised:
        with pytest.raises(Elsewhere):
            executable._finished("forward", None, raised.with_traceback(raised.__traceback__.tb_next))
    assert not executable.broken
