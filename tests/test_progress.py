"""News: told to whoever listens, and to nobody else."""

from __future__ import annotations

from roamc import progress
from roamc.cli.request import Request, answer


def test_only_a_listener_is_told() -> None:
    heard: list[str] = []
    progress.say("before")
    with progress.listening(heard.append):
        progress.say("now")
        with progress.listening(lambda text: heard.append(f"inner {text}")):
            progress.say("here")
        progress.say("again")
    progress.say("after")
    assert heard == ["now", "inner here", "again"]


def test_planning_tells_of_its_passes_and_of_peak_and_bound() -> None:
    heard: list[str] = []
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocab": 32, "seq": 8, "batch": 2}
    answer(Request("gpt", sizes), say=heard.append)
    told = [text for text in heard if text.startswith("planning gpt, ")]
    assert [text for text in told if "order: peak" in text and "no order below" in text]
    assert [text.rpartition(" ")[2] for text in told if "order:" not in text][-2:] == ["reuse", "layout"]
