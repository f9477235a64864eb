"""Kernels are timed once on a machine, a first result is compared once, and what is kept is checked; without a GPU."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import roamc
from roamc import files, ticker
from roamc.codegen import group_judge
from roamc.operators.gpu import fused_kernel, here, kept, tuning
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kept import Kept
from roamc.operators.gpu.kernel import KernelText
from roamc.operators.gpu.launch_shapes import LaunchShape, shape_of
from roamc.operators.gpu.results import first_of
from tests.codegen.test_kernel_judge import group_of
from tests.kernel_groups import use_kernels

MACHINE = {"device": "A GPU", "capability": [9, 0], "torch": "2.13.0", "triton": "3.9.0", "roamc": "0.1.0"}
FIRST, FASTEST = LaunchShape(1024, 4), LaunchShape(2048, 4)


@dataclass
class Gpu:
    """A GPU that is not there.

    Attributes:
        machine: what it says of itself.
        fastest: the shape in which every kernel is fastest.
        timed: shapes that were timed, kernel by kernel.
        launched: shapes of all launches, in order.
        fails: shapes that do not compile.
        wrong: whether kernels give wrong results.
        short: whether there is no memory.
    """

    machine: dict[str, Any] = field(default_factory=lambda: dict(MACHINE))
    fastest: LaunchShape = FASTEST
    timed: list[list[LaunchShape]] = field(default_factory=list)
    launched: list[LaunchShape] = field(default_factory=list)
    fails: frozenset[LaunchShape] = frozenset()
    wrong: bool = False
    short: bool = False

    def launcher(self, text: KernelText) -> Callable[..., None]:
        shape = shape_of(text)

        def launch(*args: Tensor, out: Tensor) -> None:
            self.launched.append(shape)
            if shape in self.fails:
                raise RuntimeError("no compiler")
            out.copy_(-(args[0] * 2 + args[1]))
            out.view(-1)[0] += self.wrong

        return launch

    def seconds_of(self, runs: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
        if self.short:
            raise torch.OutOfMemoryError("of 8 bytes")
        begun = len(self.launched)
        for run in runs:
            run()
        self.timed.append(self.launched[begun:])
        return [1.0 if shape == self.fastest else 2.0 for shape in self.timed[-1]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    fake_gpu = Gpu()
    monkeypatch.setattr(here, "machine", lambda device: fake_gpu.machine)
    monkeypatch.setattr(here, "seconds_of", fake_gpu.seconds_of)
    monkeypatch.setattr(here, "borrowed", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tuning, "launcher", fake_gpu.launcher)
    monkeypatch.setattr(fused_kernel, "launcher", fake_gpu.launcher)
    monkeypatch.setattr(tuning, "LEAST_BYTES", 1)
    monkeypatch.setattr(kept, "measured_folder", lambda: tmp_path / "profiles")
    kept.forget()
    return fake_gpu


def group(rows: int = 64, factor: int = 2) -> FusedKernel:
    """On the CPU; a kernel of its own for each factor."""
    operands = torch.ones(rows, 100), torch.ones(rows, 100)
    return group_of(lambda x, y: (x * factor + y).neg(), *operands)


def test_kernels_of_another_gpu_are_not_timed_on_the_first(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(tuning, "fastest", lambda group, device: asked.append(first_of(group.nodes[-1]).device))
    groups = []
    for number, function in enumerate((lambda x, y: x * 2 + y, lambda x, y: x * 3 + y)):
        with FakeTensorMode():
            operands = [torch.empty(64, 100, device=f"cuda:{number}") for _ in range(2)]
        groups.append(group_of(function, *operands))
    tuning.tune(groups)
    assert asked == [torch.device("cuda:0")]


def in_next_process(groups: Sequence[FusedKernel]) -> list[LaunchShape]:
    """Tune groups in a process that knows only what is in the file; return their shapes."""
    kept.forget()
    tuning.tune(groups)
    return [shape_of(group.text) for group in groups]


def file_of(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "profiles").glob("kernels-*.json")
    return path


def test_the_fastest_shape_is_taken_wherever_a_kernel_stands(gpu: Gpu) -> None:
    first, second = group(), group()
    tuning.tune([first, second])
    assert gpu.timed == [list(first.shapes)]
    assert [shape_of(one.text) for one in (first, second)] == [FASTEST, FASTEST]
    assert first.text.programs == -(-6400 // 2048)


def test_a_kernel_is_timed_once_on_a_machine(gpu: Gpu) -> None:
    tuning.tune([group()])
    assert in_next_process([group(), group()]) == [FASTEST, FASTEST]
    assert len(gpu.timed) == 1


@pytest.mark.parametrize("change", MACHINE)
def test_times_of_another_machine_or_version_do_not_count(gpu: Gpu, change: str) -> None:
    tuning.tune([group()])
    gpu.machine[change] = "another"
    in_next_process([group()])
    assert len(gpu.timed) == 2


def test_results_of_two_processes_are_both_kept(gpu: Gpu, tmp_path: Path) -> None:
    tuning.tune([group(factor=2)])
    text = file_of(tmp_path).read_text()
    file_of(tmp_path).unlink()
    kept.forget()
    tuning.tune([group(factor=3)])
    file_of(tmp_path).write_text(text)  # the other process ends
    tuning.tune([group(factor=4)])
    in_next_process([group(factor=factor) for factor in (2, 3, 4)])
    assert len(gpu.timed) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 3}', "\x00", "[" * 100000])
def test_a_file_that_is_none_is_measured_anew(
    gpu: Gpu, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    tuning.tune([group()])
    file_of(tmp_path).write_text(text)
    assert in_next_process([group()]) == [FASTEST]
    assert len(gpu.timed) == 2
    assert in_next_process([group()]) == [FASTEST]
    assert len(gpu.timed) == 2


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, "0" * 64, "another hash"),
        (1, [4096, 8], "another hash"),
        (3, "", "another hash"),
        (1, None, "another hash"),
        (slice(0, 3), [], "left out"),
    ],
)
def test_an_entry_that_was_changed_is_left_out_with_a_word(
    gpu: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: Any, value: Any, said: str
) -> None:
    tuning.tune([group()])
    data = json.loads(file_of(tmp_path).read_text())
    data["kernels"][0][place] = value
    file_of(tmp_path).write_text(json.dumps(data))
    assert in_next_process([group()]) == [FASTEST]
    assert said in caplog.text
    assert len(gpu.timed) == 2


def test_a_shape_that_the_kernel_has_not_is_measured_anew_with_a_word(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    kept.note(gpu.machine, {group().key: Kept(LaunchShape(1000, 3))})
    kept.write()
    assert in_next_process([group()]) == [FASTEST]
    assert "has no shape" in caplog.text


@pytest.mark.parametrize("first", ["fastest", "compared"])
def test_what_another_process_has_kept_of_a_kernel_stays(gpu: Gpu, first: str) -> None:
    """The other one writes between a note and its writing."""
    notes = {"fastest": Kept(fastest=FASTEST), "compared": Kept(compared=FIRST)}
    kept.note(gpu.machine, {"key": notes.pop(first)})
    mine = dict(kept._unwritten)
    kept.forget()
    (other,) = notes.values()
    kept.note(gpu.machine, {"key": other, "second": other})
    kept.write()
    held = {path: dict(one) for path, (_, one) in mine.items()}
    kept._held.clear()
    kept._held.update(held)
    kept._unwritten.update(mine)
    kept.write()
    kept.forget()
    assert kept.of(gpu.machine, "key") == Kept(FASTEST, FIRST)
    assert kept.of(gpu.machine, "second") == other


def test_processes_that_write_at_once_lose_nothing(gpu: Gpu) -> None:
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            for count in range(10):
                kept.note(gpu.machine, {f"{number} {count}": Kept(FASTEST)})
                kept.write()
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    kept.forget()
    assert all(kept.of(gpu.machine, f"{n} {count}") == Kept(FASTEST) for n in range(4) for count in range(10))


def test_a_lock_that_is_never_given_back_is_not_waited_for(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.01)
    kept.note(gpu.machine, {"first": Kept(FASTEST)})
    (path,) = kept._unwritten
    path.parent.mkdir()
    with files.locked(path):
        kept.write()
    kept.forget()
    assert kept.of(gpu.machine, "first") == Kept(FASTEST)


def test_a_folder_that_cannot_be_written_is_said(gpu: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profiles").write_text("a file")
    one = group()
    tuning.tune([one])
    assert shape_of(one.text) == FASTEST
    assert "is not kept" in caplog.text


def test_timing_ends_and_kernels_that_move_most_come_first(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 3))
    monkeypatch.setattr(tuning, "clock", lambda: float(next(ticks)))
    groups = [group(rows=64), group(rows=128), group(rows=192)]
    said: list[str] = []
    with ticker.listening(said.append):
        tuning.tune(groups)
    assert said == ["timing kernel 1 of 3"]
    assert [shape_of(one.text) for one in groups] == [FIRST, FIRST, FASTEST]


def test_small_kernels_are_not_timed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    one = group()
    monkeypatch.setattr(tuning, "LEAST_BYTES", tuning.bytes_of(one) + 1)
    tuning.tune([one])
    assert tuning.bytes_of(one) == 3 * 6400 * 4
    assert not gpu.timed


def test_kernels_with_sums_are_not_timed(gpu: Gpu) -> None:
    tuning.tune([group_of(lambda x: x - x.sum(-1, keepdim=True), torch.ones(64, 100))])
    assert not gpu.timed


def test_without_a_gpu_nothing_is_timed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "machine", lambda device: None)
    tuning.tune([group()])
    tuning.tune([])
    assert not gpu.launched


def test_a_shape_that_does_not_compile_is_left_out(gpu: Gpu) -> None:
    gpu.fails = frozenset({FASTEST})
    one = group()
    tuning.tune([one])
    assert gpu.timed == [[shape for shape in one.shapes if shape != FASTEST]]
    assert shape_of(one.text) == FIRST


@pytest.mark.parametrize("short", [True, False])
def test_a_kernel_that_cannot_be_timed_runs_as_it_is_printed(gpu: Gpu, *, short: bool) -> None:
    gpu.short, gpu.fails = short, frozenset() if short else frozenset({FIRST})
    one = group()
    tuning.tune([one])
    assert shape_of(one.text) == FIRST
    assert kept.of(gpu.machine, one.key) == Kept()


def test_operands_lie_as_those_of_the_group_and_are_in_none_of_its_memory(gpu: Gpu) -> None:
    operands = torch.ones(100, 64).t(), torch.ones(100).expand(64, 100)
    one = group_of(lambda x, y: (x * 2 + y).neg(), *operands)
    tuning_operands = [tuning._operand(one, at, torch.device("cpu")) for at in range(2)]
    assert [operand.stride() for operand in tuning_operands if isinstance(operand, Tensor)] == [(1, 64), (0, 1)]
    assert not any(operand.any() for operand in tuning_operands if isinstance(operand, Tensor))


class Scaled(nn.Module):
    """Pointwise operators whose bits are the same on every device, around a product."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner((x * 2 + 1) * x) * 3) - x


@pytest.mark.parametrize("route", ["train_step", "optimize"])
@pytest.mark.parametrize("tune", [True, False])
def test_the_kernels_of_a_program_are_tuned_unless_the_user_says_no(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, route: str, *, tune: bool
) -> None:
    use_kernels(monkeypatch)
    monkeypatch.setattr(tuning, "launcher", lambda text: lambda *args, out: gpu.launched.append(shape_of(text)))
    judged: list[LaunchShape] = []
    monkeypatch.setattr(group_judge, "judge_launch", lambda printed, text: judged.append(shape_of(text)))
    gpu.fastest = LaunchShape(1024, 8)
    model, x = Scaled(), torch.randn(256, 32)
    twin = copy.deepcopy(model)
    if route == "train_step":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = roamc.train_step(model, lambda m, batch: m(batch).sum(), optimizer, strict=True, tune=tune)(x)
    else:
        loss = roamc.optimize(model, strict=True, tune=tune)(x).sum()
        loss.backward()
    assert torch.equal(loss.detach(), twin(x).sum().detach())
    assert bool(gpu.timed) == tune
    assert set(judged) == {gpu.fastest if tune else FIRST}


@pytest.mark.parametrize(("route", "writes"), [("train_step", 1), ("optimize", 2)])
def test_first_results_of_a_step_are_written_at_once(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, writes: int
) -> None:
    """Forward and backward, called apart, write once each."""
    use_kernels(monkeypatch)
    written: list[Path] = []
    write_text = files.write_text
    monkeypatch.setattr(files, "write_text", lambda path, text: (written.append(path), write_text(path, text)))
    model, x = Scaled(), torch.randn(256, 32)
    if route == "train_step":
        optimizer = torch.optim.SGD(model.parameters())
        step = roamc.train_step(model, lambda m, x: m(x).sum(), optimizer, strict=True, tune=False)
        losses = [step(x) for _ in range(2)]
    else:
        planned = roamc.optimize(model, strict=True, tune=False)
        losses = [planned(x).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    assert len(losses) == 2
    assert written == [file_of(tmp_path)] * writes
    assert len(json.loads(written[0].read_text())["kernels"]) >= 3


class Event:
    """An event of CUDA whose time is that of a clock."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = Event.now

    def synchronize(self) -> None:
        assert self.time == Event.now

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time


def test_the_shortest_time_of_all_rounds_counts_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(here, "FLUSHED", 8)
    milliseconds = {"one": itertools.chain([5.0], itertools.repeat(3.0)), "other": itertools.count(4.0)}
    order: list[str] = []

    def run(name: str) -> None:
        order.append(name)
        Event.now += next(milliseconds[name])

    seconds = here.seconds_of([functools.partial(run, name) for name in milliseconds], torch.device("cpu"))
    assert seconds == [0.003, 0.004]
    assert order == ["one", "other"] * here.ROUNDS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_kept_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert here.machine(torch.device(device)) is None


# -- the first result ---------------------------------------------------------------------------------------------


def run(one: FusedKernel) -> tuple[Tensor, int]:
    """Run a group for the first time; return its result, and how often its operators ran."""
    count = 0
    members = one.run_members

    def counted(args: Sequence[Any]) -> tuple[Tensor, ...]:
        nonlocal count
        count += 1
        return members(args)

    one.__dict__["run_members"] = counted
    operands = torch.randn(64, 100), torch.randn(64, 100)
    out = torch.empty(64, 100)
    one.write(*operands, out=out)
    assert torch.equal(out, -(operands[0] * 2 + operands[1]))
    return out, count


def test_a_first_result_is_compared_once_on_a_machine(gpu: Gpu) -> None:
    assert run(group())[1] == 1
    assert run(group())[1] == 0
    kept.write()
    kept.forget()
    assert run(group())[1] == 0
    gpu.machine["triton"] = "4.0.0"
    kept.forget()
    assert run(group())[1] == 1


def test_the_first_result_of_every_shape_is_compared(gpu: Gpu) -> None:
    assert run(group())[1] == 1
    tuned = group()
    tuning.tune([tuned])
    assert run(tuned)[1] == 1
    assert gpu.launched[-1] == FASTEST
    assert kept.of(gpu.machine, tuned.key) == Kept(FASTEST, FASTEST)


def test_a_wrong_result_is_not_kept_as_right(gpu: Gpu) -> None:
    gpu.wrong = True
    for _ in range(2):
        kept.forget()
        with pytest.warns(RuntimeWarning, match="not that of the operators"):
            run(group())
    gpu.wrong = False
    assert run(group())[1] == 1


def test_a_kernel_that_was_right_and_does_not_compile_now_is_given_up(gpu: Gpu) -> None:
    run(group())
    gpu.fails = frozenset({FIRST})
    with pytest.warns(RuntimeWarning, match="operators run one by one"):
        run(group())


def test_a_changed_entry_is_no_proof(gpu: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(group(factor=2))
    kept.write()
    data = json.loads(file_of(tmp_path).read_text())
    data["kernels"][0][0] = group(rows=32).key
    file_of(tmp_path).write_text(json.dumps(data))
    kept.forget()
    with caplog.at_level(logging.WARNING):
        assert run(group(factor=2))[1] == 1
    assert "another hash" in caplog.text
