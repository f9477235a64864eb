"""Handlers of signals wait for what must not be cut short, and then run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from roamc.interruptions import uninterrupted

HANDLED = (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Came(Exception):
    """What the handlers of these tests raise."""


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals whose handlers have run; each raises, but that of SIGUSR1."""
    numbers: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        if number != signal.SIGUSR1:
            raise Came(number)

    before = {number: signal.signal(number, handler) for number in HANDLED}
    yield numbers
    installed = {number: signal.signal(number, before[number]) for number in HANDLED}
    assert set(installed.values()) == {handler}


@pytest.mark.parametrize("number", HANDLED)
def test_a_handler_waits_for_the_end_and_runs_once(heard: list[int], number: int) -> None:
    ended = []
    with contextlib.suppress(Came), uninterrupted("all is done"):
        for _ in range(3):
            signal.raise_signal(number)
        ended.append(list(heard))
    assert ended == [[]]
    assert heard == [number]


def test_an_error_of_a_handler_says_what_was_done(heard: list[int]) -> None:
    with pytest.raises(Came) as caught, uninterrupted("all is done"):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.__notes__ == ["all is done"]


def test_every_handler_runs_though_one_before_it_raises(heard: list[int]) -> None:
    with pytest.raises(Came), uninterrupted("all is done"):  # noqa: PT012
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
            signal.raise_signal(number)
    assert heard == [signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM]


def test_a_handler_runs_though_what_it_waited_for_fails(heard: list[int]) -> None:
    with pytest.raises(Came) as caught, uninterrupted("all is done"):  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)
    assert not hasattr(caught.value, "__notes__")  # not all is done


def test_only_pythons_own_handler_takes_effect_in_a_trace(heard: list[int]) -> None:
    installed = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(Came), uninterrupted("all is done", traces=True):  # noqa: PT012
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert heard == []
    assert heard == [signal.SIGTERM]
    signal.signal(signal.SIGINT, installed)


def test_what_is_let_through_runs_at_once(heard: list[int]) -> None:
    def another(number: int, frame: FrameType | None) -> None:
        heard.append(-number)

    before = signal.getsignal(signal.SIGALRM)
    with uninterrupted("all is done") as signals:
        signal.raise_signal(signal.SIGUSR1)
        with signals.let_through():
            assert heard == [signal.SIGUSR1]
            signal.raise_signal(signal.SIGUSR1)
            assert heard == [signal.SIGUSR1] * 2
            signal.signal(signal.SIGALRM, another)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGALRM)
        assert heard == [signal.SIGUSR1] * 2 + [-signal.SIGALRM]
    assert signal.signal(signal.SIGALRM, before) is another
    assert heard == [signal.SIGUSR1] * 2 + [-signal.SIGALRM, signal.SIGUSR1]


def test_one_more_that_comes_in_code_of_the_user_takes_effect_at_once(heard: list[int]) -> None:
    with pytest.raises(Came), uninterrupted("all is done") as signals:  # noqa: PT012
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        signals.wait_once()
        signal.raise_signal(signal.SIGTERM)
        assert heard == []
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError
    assert heard == [signal.SIGTERM]


def test_signals_of_a_timer_wait_in_code_of_the_user_as_well(heard: list[int]) -> None:
    with pytest.raises(Came), uninterrupted("all is done") as signals:  # noqa: PT012
        signals.wait_once()
        for _ in range(5):
            signal.raise_signal(signal.SIGALRM)
        assert heard == []
    assert heard == [signal.SIGALRM]


def test_a_handler_that_is_set_inside_stays(heard: list[int]) -> None:
    def another(number: int, frame: FrameType | None) -> None:
        heard.append(-number)

    before = signal.getsignal(signal.SIGALRM)
    with uninterrupted("all is done"):
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGALRM, another)
        signal.raise_signal(signal.SIGALRM)
    assert signal.signal(signal.SIGALRM, before) is another
    assert heard == [-signal.SIGALRM, signal.SIGUSR1]


@pytest.mark.parametrize("hold", ["outside", "inside"])
def test_contexts_nest(heard: list[int], hold: str) -> None:
    with pytest.raises(Came), uninterrupted("outer"):  # noqa: PT012
        if hold == "outside":
            signal.raise_signal(signal.SIGTERM)
        with uninterrupted("inner"):
            if hold == "inside":
                signal.raise_signal(signal.SIGTERM)
        assert heard == []
    assert heard == [signal.SIGTERM]


def test_a_signal_amid_the_first_lines_leaves_every_handler(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when some signals are held already and it is not: its handler raises there."""
    install: Callable[[int, object], object] = signal.signal

    def installing(number: int, handler: object) -> object:
        if number == signal.SIGTERM and not heard:
            signal.raise_signal(signal.SIGTERM)
        return install(number, handler)

    with monkeypatch.context() as patch, pytest.raises(Came):  # noqa: PT012
        patch.setattr(signal, "signal", installing)
        with uninterrupted("all is done"):
            raise AssertionError
    assert heard == [signal.SIGTERM]
