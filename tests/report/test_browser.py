"""The page in a real browser, where one is installed: it fits narrow and wide windows, and its script works."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roamc.cli.request import Request, picture
from roamc.report.html import render
from roamc.report.picture import Picture
from roamc.units import format_bytes

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

WIDTHS = (390, 800, 1400)

# Windows of browsers have a least width; frames do not.
FRAMES = """<!doctype html><body>{frames}<pre id="windows"></pre><script>
addEventListener("load", () => {{
  const shown = (node) => node.getClientRects().length > 0;
  const windows = [...document.querySelectorAll("iframe")].map((frame) => {{
    const page = frame.contentDocument, root = page.documentElement, broken = [];
    page.querySelectorAll("details").forEach((each) => {{ each.open = true; }});
    const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {{
      const node = texts.currentNode;
      for (const word of shown(node.parentElement) ? node.data.matchAll(/\\w+/g) : []) {{
        const range = page.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((part) => Math.round(part.top))).size > 1) broken.push(word[0]);
      }}
    }}
    const letters = [...page.querySelectorAll("svg text")].filter(shown);
    const axes = () => [...page.querySelectorAll(".chart")].filter(shown).map((chart) => chart.className);
    const sides = letters.map((text) => text.getBoundingClientRect()).filter((side) => side.width);
    const plot = page.getElementById("after-time"), box = plot.getBoundingClientRect();
    const dot = plot.querySelector(".dot").getAttribute("d").match(/[\\d.]+/)[0] / plot.dataset.span;
    const event = new frame.contentWindow.PointerEvent("pointermove", {{
      clientX: box.left + box.width * dot, clientY: box.top + 20 }});
    plot.dispatchEvent(event);
    const told = page.querySelector("#tip b").textContent, byTime = axes();
    page.getElementById("by-steps").click();
    return {{
      scrolls: root.scrollWidth, width: root.clientWidth, broken, told, byTime, bySteps: axes(),
      letters: Math.min(...sides.map((side) => side.height)), left: Math.min(...sides.map((side) => side.left)),
      right: Math.max(...sides.map((side) => side.right)), links: frame.contentWindow.performance
        .getEntriesByType("resource").map((entry) => entry.name),
    }};
  }});
  document.getElementById("windows").textContent = JSON.stringify(windows);
}});
</script>"""


@pytest.fixture(scope="module")
def small() -> Picture:
    sizes = {"batch": 2, "seq": 16, "layers": 2, "width": 32, "heads": 4, "vocab": 64}
    return picture(Request("gpt", sizes=sizes), curve=True)


@pytest.fixture(scope="module")
def windows(small: Picture, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each width's frame shows."""
    return measured(render(small), tmp_path_factory.mktemp("browser"))


def measured(page: str, folder: Path) -> list[dict[str, Any]]:
    source = html.escape(page)
    frames = "".join(
        f'<iframe srcdoc="{source}" style="border:0;width:{width}px;height:900px"></iframe>' for width in WIDTHS
    )
    (folder / "frames.html").write_text(FRAMES.format(frames=frames), "utf-8")
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
    )
    command = [str(BROWSER), *flags, "--virtual-time-budget=20000", (folder / "frames.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    answer = re.findall(r'<pre id="windows">(.*?)</pre>', shown, re.DOTALL)[-1]
    results: list[dict[str, Any]] = json.loads(html.unescape(answer))
    return results


def test_page_is_never_wider_than_the_window(windows: list[dict[str, Any]]) -> None:
    assert [each["width"] for each in windows] == list(WIDTHS)
    assert all(each["scrolls"] <= each["width"] for each in windows)


def test_no_word_is_broken(windows: list[dict[str, Any]]) -> None:
    assert [each["broken"] for each in windows] == [[], [], []]


def test_labels_are_readable_and_inside_the_window(windows: list[dict[str, Any]]) -> None:
    for each in windows:
        assert each["letters"] >= 10
        assert each["left"] >= 0
        assert each["right"] <= each["width"]


def test_switch_changes_the_axis_of_all_charts(windows: list[dict[str, Any]]) -> None:
    for each in windows:
        assert each["byTime"] == ["chart by-time"] * 2 + ["chart"] + ["chart by-time"] * 2
        assert each["bySteps"] == ["chart by-steps"] * 2 + ["chart"] + ["chart by-steps"] * 2


def test_pointer_at_the_peak_finds_it(small: Picture, windows: list[dict[str, Any]]) -> None:
    peak = small.report.planned
    told = f"{format_bytes(peak.live_bytes)} live at step {peak.step + 1} of {peak.steps}"
    assert [each["told"] for each in windows] == [told] * 3


def test_page_asks_the_network_for_nothing(windows: list[dict[str, Any]]) -> None:
    assert [each["links"] for each in windows] == [[], [], []]
