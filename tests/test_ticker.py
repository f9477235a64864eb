"""Messages of planning, told to whoever listens; and lines on stderr while something takes long."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import roamc
from roamc import ticker
from roamc.cli.request import Request, answer
from roamc.solvers import compiled


def test_only_a_listener_is_told() -> None:
    heard: list[str] = []
    ticker.say("before")
    with ticker.listening(heard.append):
        ticker.say("now")
        with ticker.listening(lambda text: heard.append(f"inner {text}")):
            ticker.say("here")
        ticker.say("again")
    ticker.say("after")
    assert heard == ["now", "inner here", "again"]


def test_planning_tells_of_its_passes_and_of_peak_and_bound() -> None:
    heard: list[str] = []
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocab": 32, "seq": 8, "batch": 2}
    answer(Request("gpt", sizes), say=heard.append)
    told = [text for text in heard if text.startswith("planning gpt, ")]
    assert [text for text in told if "order: peak" in text and "no order below" in text]
    assert [text.rpartition(" ")[2] for text in told if "order:" not in text][-2:] == ["reuse", "layout"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come at once, and a hundred in a second."""
    monkeypatch.setenv(ticker.SWITCH, "1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(ticker, "FIRST", 0.0)
    monkeypatch.setattr(ticker, "EVERY", 0.01)


FIRST = "roamc: planning Net for 80%: once per shape; roamc.progress=False silences it"


@pytest.mark.usefixtures("impatient")
def test_lines_say_what_is_done_how_to_silence_them_and_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    with ticker.planning("Net", "80%"):
        ticker.say("retain")
        time.sleep(0.3)
    lines = capsys.readouterr()
    first, *others, last = lines.err.splitlines()
    assert first == FIRST
    assert others
    assert all(re.fullmatch(r"roamc: planning Net for 80%: retain \(\d+ s\)", line) for line in others)
    assert re.fullmatch(r"roamc: planned Net for 80% in \d+\.\d s", last)
    assert lines.out == ""


def test_what_takes_two_seconds_is_done_in_silence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ticker.SWITCH, "1")
    with ticker.planning("Net", 1000):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("way", ["variable", "attribute", "rank"])
def test_lines_are_silenced(way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "variable":
        monkeypatch.setenv("ROAMC_PROGRESS", "0")
    elif way == "attribute":
        monkeypatch.setattr(roamc, "progress", False)
    else:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # whatever ran before
    with ticker.planning("Net", "80%"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("way", ["train_step", "plan", "optimize"])
def test_every_way_in_tells(way: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "train_step":
        roamc.train_step(model, lambda m, x: m(x).sum(), optimizer)(x)
    elif way == "plan":
        roamc.plan(model, x)
    else:
        roamc.optimize(model)(x)
    lines = capfd.readouterr()
    assert lines.err.startswith("roamc: planning Sequential: once per shape; ")
    assert "\nroamc: planned Sequential in " in lines.err
    assert lines.out == ""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_line_comes_behind_an_error(error: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()

    def plan() -> None:
        with ticker.planning("Net", None):
            time.sleep(0.1)
            raise error

    with pytest.raises(error):
        plan()
    written = capsys.readouterr().err
    assert written
    assert "planned" not in written
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
    assert threading.active_count() == before


@pytest.mark.usefixtures("impatient")
def test_a_ticker_that_was_dropped_ends() -> None:
    before, calls = threading.active_count(), list[str]()
    dropped = ticker.Ticker("waiting", calls.append)
    dropped.__enter__()
    time.sleep(0.1)
    assert calls
    del dropped
    time.sleep(0.2)
    assert threading.active_count() == before


@pytest.mark.usefixtures("impatient")
def test_threads_that_plan_at_once_have_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(name: str) -> None:
        with ticker.planning(name, None):
            ticker.say(f"stage of {name}")
            time.sleep(0.2)

    threads = [threading.Thread(target=plan, args=(f"Net{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = capsys.readouterr().err.splitlines()
    for number in range(4):
        own = [line for line in lines if f"Net{number}" in line]
        assert len(own) >= 3
        assert all(f"stage of Net{number}" in line for line in own[1:-1])
    assert all("Net" in line for line in lines)


@pytest.mark.usefixtures("impatient")
def test_a_forked_child_leaves_the_context_in_silence() -> None:
    with ticker.planning("Net", None):
        time.sleep(0.05)
        child = os.fork()
        if not child:
            ticker.say("in the child")
    if not child:
        os._exit(0)  # it came this far: no lock of the parent's thread held it
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("impatient")
def test_a_closed_stderr_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as closed_file:
        pass
    for closed in (None, closed_file):
        monkeypatch.setattr("sys.stderr", closed)
        with ticker.planning("Net", None):
            time.sleep(0.05)


def test_the_compilation_of_solvers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(ticker, "FIRST", 0.0)
    monkeypatch.setattr(compiled.compiling, "reason", "the processor lacks avx9")
    with ticker.Ticker("planning", said.append, 0.01):
        with compiled.compiling, compiled.compiling:
            time.sleep(0.1)
        time.sleep(0.1)
    assert said[-1] == "planning"
    assert [text for text in said if "not used (the processor lacks avx9); `roamc warm-up` does it beforehand" in text]


def test_solvers_that_are_being_imported_end_no_ticker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "roamc.solvers.compiled", ModuleType("half imported"))
    said: list[str] = []
    ticker.Ticker("importing", said.append).tick()
    assert said == ["importing"]


def test_time_of_compiling_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = compiled._Compiling()
    monkeypatch.setattr(compiled, "time", SimpleNamespace(monotonic=iter((1.0, 4.0)).__next__))
    with watch:
        with watch:
            pass
        assert watch.since is not None
    assert watch.since is None
    assert watch.seconds == 3
