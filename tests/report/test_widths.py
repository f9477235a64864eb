"""Reports on narrow and wide screens: no line is wider than the screen, no word or number is broken, none is lost."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import pytest
from rich.console import Console
from typer.testing import CliRunner

from roamc.cli.commands import app
from roamc.cli.request import Request, answer, points
from roamc.cost import load_profile
from roamc.report import device, text
from roamc.report.explain import Explanation
from roamc.report.frontier import Point
from roamc.report.tables import say, show_rows
from roamc.units import format_bytes

WIDTHS = (60, 80, 120, 200)
ENDLESS = 10_000
SMALL = Request(
    "gpt", sizes={"batch": 4, "seq": 64, "layers": 2, "width": 64, "heads": 4, "vocab": 64}, memory_budget="min"
)


@pytest.fixture(scope="module")
def explained() -> Explanation:
    return answer(SMALL, curve=True)


@pytest.fixture(scope="module")
def compared() -> tuple[Point, ...]:
    return points(SMALL, ["80%", "min"])


def on(width: int, terminal: bool, show: Callable[[Console], None]) -> list[str]:
    out = Console(width=width, file=io.StringIO(), force_terminal=terminal, no_color=True, highlight=False)
    with out.capture() as caught:
        show(out)
    return [line.rstrip() for line in caught.get().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_lines_fit_and_words_are_whole(
    width: int, terminal: bool, explained: Explanation, compared: tuple[Point, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    note = "a sentence with 12.5 MB, 1.25 GB and 3.5 ms in it, which is longer than most screens are wide, and goes on "
    shows: tuple[Callable[[Console], None], ...] = (
        lambda out: text.show_explanation(out, explained, 20),
        lambda out: text.show_explanation(out, explained, 20, "line"),
        lambda out: text.show_curve(out, explained),
        lambda out: text.show_points(out, "gpt", compared),
        lambda out: show_rows(out, ("what", "speed", "remark"), device.rows(load_profile(profile="h100"))),
        lambda out: say(out, note * 3),
    )
    for show in shows:
        lines, whole = on(width, terminal, show), on(ENDLESS, terminal, show)
        assert max(map(len, lines)) <= width
        words = {word for line in whole for word in line.split()}
        assert {word for line in lines for word in line.split() if set(word) != {"─"}} <= words
        for unit in ("MB", "kB", "ms"):
            assert not any(line.split()[:1] == [unit] for line in lines), "a number is parted from its unit"


def test_wide_screens_show_all_columns(explained: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wide = on(200, False, lambda out: text.show_explanation(out, explained, 20))
    assert wide == on(ENDLESS, False, lambda out: text.show_explanation(out, explained, 20))
    narrow = on(60, False, lambda out: text.show_explanation(out, explained, 20))
    heads = [next(line for line in lines if "largest storages" in line).split() for lines in (wide, narrow)]
    assert {"place", "phase", "steps", "line", "module"} <= set(heads[0])
    assert set(heads[1]) < set(heads[0])
    assert "module" in heads[1]


def test_the_two_peaks_are_one_number_or_both_are_explained(explained: Explanation) -> None:
    def below(peak_bytes: int) -> str:
        one = dataclasses.replace(explained, plan=dataclasses.replace(explained.plan, peak_bytes=peak_bytes))
        lines = on(ENDLESS, False, lambda out: text.show_explanation(out, one, 5))
        return next(line for line in lines if "live at step" in line)

    live = explained.planned.live_bytes
    assert (
        below(live).strip()
        == f"{format_bytes(live)} live at step {explained.planned.step + 1} of {explained.planned.steps}"
    )
    more = f"; the peak of {format_bytes(2 * live)} counts the whole arena, used or not, and what lies outside it"
    assert below(2 * live) == below(live) + more
    assert explained.plan.baseline_bytes == explained.eager.live_bytes


@pytest.mark.parametrize("width", WIDTHS)
def test_models_fit(width: int) -> None:
    lines = CliRunner().invoke(app, ["models"], env={"COLUMNS": str(width)}).stdout.splitlines()
    words = set(CliRunner().invoke(app, ["models"], env={"COLUMNS": str(ENDLESS)}).stdout.split())
    assert max(len(line.rstrip()) for line in lines) <= width
    assert {word for line in lines for word in line.split()} == words


@pytest.mark.parametrize("width", [60, 80])
def test_the_largest_batch_fits(width: int) -> None:
    sizes = ["--seq", "16", "--layers", "1", "--width", "32", "--heads", "4", "--vocab", "64", "--largest", "4"]
    command = ["max-batch", "gpt", *sizes, "--memory-budget", "1GB", "--no-recomputation"]
    lines = CliRunner().invoke(app, command, env={"COLUMNS": str(width)}).stdout.splitlines()
    assert lines[0].startswith("gpt: the largest batch")
    assert max(map(len, lines)) <= width
