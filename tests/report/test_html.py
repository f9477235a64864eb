"""The page holds the plan's numbers, parses, loads nothing, and whatever the user's code is called stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from roamc.cli.request import Request, picture
from roamc.options import Options
from roamc.report.axis import SPAN
from roamc.report.box_chart import largest
from roamc.report.html import charts, levels, render, table, write
from roamc.report.picture import Box, Picture
from roamc.report.text import called, short
from roamc.units import format_bytes
from tests.graphs import model_graph
from tests.report.pictures import picture_of

SIZES = {"batch": 2, "seq": 16, "layers": 2, "width": 32, "heads": 4, "vocab": 64}

# Ends a script or an attribute, starts an element, or is a line end in JavaScript and not in JSON.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>&amp;<!--\u2028]]>{{ 7*7 }}\udc80"

VOID = {"input", "meta", "path", "rect"}
"""Elements without an end: HTML's, and those that the page closes with />."""


class Reader(HTMLParser):
    """Checks that elements nest, and collects names, attributes and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def data(self) -> dict[str, Any]:
        """The JSON of the page."""
        data: dict[str, Any] = json.loads(self.texts["script"][0])
        return data


def without_times(timed: Picture) -> Picture:
    plan = replace(timed.report.plan, seconds={})
    return replace(timed, report=replace(timed.report, plan=plan))


@pytest.fixture(scope="module")
def small() -> Picture:
    return picture(Request("gpt", sizes=SIZES), curve=True)


@pytest.fixture(scope="module")
def page(small: Picture) -> Reader:
    return Reader(render(small))


def test_page_has_the_numbers_of_the_terminal(small: Picture, page: Reader) -> None:
    shown = {text.strip() for texts in page.texts.values() for text in texts}
    for label, value, remark in small.report.plan.rows():
        assert {label, value, remark} <= {*shown, ""}
    assert "planned in" in shown


def test_page_begins_with_the_sentence_and_has_its_parts_in_their_order(small: Picture, page: Reader) -> None:
    (headline,) = page.texts["h1"]
    assert headline == small.report.plan.headline
    body = next(at for at, (tag, _) in enumerate(page.elements) if tag == "body")
    assert [tag for tag, _ in page.elements[body : body + 3]] == ["body", "header", "h1"]
    parts = [attributes.get("id") or attributes["class"] for tag, attributes in page.elements if tag == "section"]
    assert parts == ["modules", "curves", "layout", "storages", "listed", "numbers"]
    assert page.texts["h3"][:2] == ["By module of the model", "By line of the model"]
    assert render(small).index('id="seconds"') > render(small).index("How it was planned")


def test_page_adds_up_from_the_charts_to_the_total(small: Picture, page: Reader) -> None:
    plan, rows = small.report.plan, list(levels(small))
    peak = next(at for at, row in enumerate(rows) if row.style == "sum")
    for of, total in (("planned", plan.total_bytes), ("eager", plan.baseline_total_bytes)):
        sizes = [getattr(row, of) for row in rows]
        assert sum(sizes[:peak]) == sizes[peak]
        assert sizes[peak] + sum(sizes[peak + 1 : -1]) == sizes[-1] == total
    top = [chart.peak_at for chart in charts(small)["after"]]
    assert {round(240 * (1 - rows[peak].planned / charts(small)["after"][0].top), 1)} == set(top)
    assert format_bytes(rows[peak].planned) in "".join(page.texts["figcaption"])


def test_charts_name_their_axes_with_units(page: Reader) -> None:
    titles = [text for text in page.texts["p"] if text.strip()]
    assert titles.count("predicted time, µs") == titles.count("steps") == 4
    assert titles.count("memory, kB") == titles.count("address, kB") == 4
    assert {"added time, % of the step", "needed by a step, kB"} <= set(titles)


def test_charts_show_the_memory_of_the_device(small: Picture) -> None:
    plan = small.report.plan
    for room, expected in ((2 * plan.total_bytes, "T4"), (90 * plan.total_bytes, "↑ T4")):
        named = replace(plan, room="T4", room_bytes=room)
        for plot in charts(replace(small, report=replace(small.report, plan=named)))["after"]:
            (line,) = (line for line in plot.lines if line.name == "room")
            assert line.text == f"{expected} {format_bytes(room)}"
            assert line.at == max(0, round(plot.height * (1 - room / plot.top), 1))


def test_page_lists_the_largest_storages_of_the_layout(small: Picture, page: Reader) -> None:
    for boxes in (small.arena, small.outside):
        assert {called(box.storage) for box in largest(boxes)} <= set(page.texts["code"])


def test_page_lists_all_that_lives_at_both_peaks_largest_first(small: Picture, page: Reader) -> None:
    peaks = (small.report.planned, small.report.eager)
    expected = [called(storage) for peak in peaks for storage in peak.storages]
    section = next(part for part in render(small).split("<section ") if part.startswith('id="storages"'))
    cells = re.findall(r'<td class="number">[^<]*</td><td class=" code name">([^<]*)</td>', section)
    assert [unescape(cell) for cell in cells] == expected


def test_page_draws_the_curve(small: Picture, page: Reader) -> None:
    curve = small.report.curve
    assert curve is not None
    kinds = [attributes["class"] for _, attributes in page.elements if "spot" in (attributes.get("class") or "")]
    assert sorted(kinds) == ["spot"] * (len({*curve.spots, curve.now}) - 1) + ["spot now"]
    for spot in curve.spots:
        said = [title for title in page.texts["title"] if title.startswith(f"needs {format_bytes(spot.needed_bytes)},")]
        assert any(f"added time {spot.added_seconds / curve.step_seconds:.2%}" in title for title in said)


def test_page_loads_nothing(small: Picture, page: Reader) -> None:
    written = render(small)
    assert re.findall(r"https?:|url\(|@import|fetch\(|XMLHttp|innerHTML|[\"'(=]//", written) == []
    loading = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "style"}
    assert [(tag, attributes) for tag, attributes in page.elements if loading & set(attributes)] == []
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.elements}
    policies = [attributes["content"] or "" for tag, attributes in page.elements if "http-equiv" in attributes]
    assert [policy.partition(";")[0] for policy in policies] == ["default-src 'none'"]


def test_page_is_the_same_every_time(small: Picture) -> None:
    again = picture(Request("gpt", sizes=SIZES), curve=True)
    assert render(without_times(small)) == render(without_times(again))


def test_only_one_line_tells_the_time(small: Picture) -> None:
    timed, untimed = render(small).splitlines(), render(without_times(small)).splitlines()
    assert [line for line in timed if line not in untimed] == [line for line in timed if "planned in" in line]
    assert len(timed) == len(untimed) + 1


def test_page_says_nothing_of_where_its_files_are(small: Picture) -> None:
    folders = {str(Path(__file__).parents[2]), str(Path.home())}
    assert not [folder for folder in folders if len(folder) > 1 and folder in render(small)]


def words(data: dict[str, Any], numbers: Sequence[int]) -> list[str]:
    return [data["texts"][number] for number in numbers]


def check_boxes(data: dict[str, Any], boxes: Sequence[Box], rows: Sequence[Any]) -> None:
    for box, row in zip(boxes, rows, strict=True):
        s = box.storage
        assert words(data, row[:6]) == [called(s), s.kind, s.place, short(s.operator), s.source, s.module]
        assert row[6:10] == [s.nbytes, s.born, s.dead, box.low]
        assert tuple(words(data, row[10])) == box.tensors


def test_table_says_what_every_step_and_storage_is(small: Picture, page: Reader) -> None:
    data = page.data()
    assert data == json.loads(json.dumps(table(small)))
    for name, course in (("before", small.before), ("after", small.after)):
        assert data[name]["live"] == course.live.tolist()
        assert len(data[name]["time"]) == len(course.work)
        assert sum(data[name]["time"]) == SPAN
        for work, row in zip(course.work, data[name]["work"], strict=True):
            assert words(data, row) == [work.name, short(work.operator), work.phase, work.source, work.module]
    check_boxes(data, small.arena, data["boxes"]["arena"])
    check_boxes(data, small.outside, data["boxes"]["outside"])
    assert len(set(data["texts"])) == len(data["texts"])


def test_script_finds_every_plot_of_the_page(page: Reader) -> None:
    plots = [a for tag, a in page.elements if tag == "svg" and a.get("class") == "plot"]
    names = ["after", "before", "arena", "outside"]
    assert [plot["id"] for plot in plots] == [f"{name}-{axis}" for name in names for axis in ("time", "steps")]
    assert {name for name in page.data() if name in names} | set(page.data()["boxes"]) == set(names)
    groups = ["after", "before", "after", "after"]
    assert [plot["data-group"] for plot in plots] == [
        f"{group}-{axis}" for group in groups for axis in ("time", "steps")
    ]


@pytest.fixture(scope="module")
def hostile() -> Picture:
    graph, _ = model_graph("nanogpt", "step")
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = f'  File "{HOSTILE}.py", line 3, in forward'
    ports = tuple(replace(port, name=f"{HOSTILE}.{port.name}") for port in graph.inputs)
    return picture_of(graph.replace(name=HOSTILE, inputs=ports, notes=(HOSTILE,)), Options())[0]


def test_hostile_names_stay_text(hostile: Picture) -> None:
    friendly, _ = model_graph("nanogpt", "step")
    expected = Reader(render(picture_of(friendly.replace(notes=("note",)), Options())[0]))
    reader = Reader(render(hostile))
    # Source lines decide how many groups there are, and with them rows; nothing else differs.
    assert {tag for tag, _ in reader.elements} == {tag for tag, _ in expected.elements}
    assert sum(tag == "script" for tag, _ in reader.elements) == 2
    assert all(not name.startswith("on") for _, attributes in reader.elements for name in attributes)
    assert reader.texts["script"][1] == expected.texts["script"][1]
    assert HOSTILE in reader.texts["p"]
    line = hostile.report.planned.storages[0].source
    assert line in reader.texts["td"]
    assert line in reader.data()["texts"]
    assert "49" not in line


def test_hostile_names_can_be_written(hostile: Picture, tmp_path: Path) -> None:
    write(tmp_path / "page.html", hostile)
    Reader((tmp_path / "page.html").read_text("utf-8"))


def test_graph_without_an_update_is_drawn() -> None:
    graph, _ = model_graph("nanogpt", "joint")
    reader = Reader(render(picture_of(graph, Options())[0]))
    phases = [text for text in reader.texts["text"] if text in ("forward", "backward", "update")]
    assert len(phases) >= 6
    assert phases == ["forward", "backward"] * (len(phases) // 2)


def test_page_stays_small() -> None:
    gpt = picture(Request("gpt", sizes={**SIZES, "layers": 6}))
    steps = len(gpt.after.live)
    assert steps > 900
    assert len(render(gpt)) < 40_000 + 350 * steps


def test_path_that_cannot_be_written_is_an_error(small: Picture, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="folder"):
        write(tmp_path / "no" / "folder.html", small)
