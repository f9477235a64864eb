"""The picture's numbers are those of the memory model and of the layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from roamc.cost import load_profile
from roamc.graph import main_device
from roamc.graph.eager_memory import eager_live_bytes
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.planning.planned import Planned
from roamc.report.explain import find_peak, lives_of
from roamc.report.picture import Box, Picture, follow
from tests.graphs import joint_graph, model_graph
from tests.report.pictures import picture_of

ROUTES = ("step", "joint")


@pytest.fixture(scope="module", params=ROUTES)
def drawn(request: pytest.FixtureRequest) -> tuple[Picture, Planned]:
    graph, _ = model_graph("nanogpt-dropout", request.param)
    return picture_of(graph, Options(memory_budget="100%"))  # with a budget, small graphs have arenas


def overlapping(boxes: Sequence[Box]) -> list[tuple[str, str]]:
    """Pairs of storages that share a step and a byte."""
    return [
        (a.storage.name, b.storage.name)
        for a, b in itertools.combinations(boxes, 2)
        if a.storage.born < b.storage.dead and b.storage.born < a.storage.dead and a.low < b.high and b.low < a.high
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_before_is_what_eager_holds(route: str) -> None:
    graph, _ = model_graph("nanogpt-dropout", route)
    lives = lives_of(graph, eager=True)
    course, peak = follow(graph, lives, load_profile(main_device(graph))), find_peak(graph, lives)
    assert np.array_equal(course.live, eager_live_bytes(build_memory(graph)))
    assert (course.peak, course.live[course.peak]) == (peak.step, peak.live_bytes)
    assert {kind: live[peak.step] for kind, live in course.by_kind.items() if live[peak.step]} == peak.by_kind


def test_after_is_the_planned_order(drawn: tuple[Picture, Planned]) -> None:
    picture, planned = drawn
    assert np.array_equal(picture.after.live, live_bytes(build_memory(planned.graph)))
    assert picture.after.live.max() == picture.report.planned.live_bytes == picture.after.live[picture.after.peak]


def test_kinds_add_up_at_every_step(drawn: tuple[Picture, Planned]) -> None:
    for course in (drawn[0].before, drawn[0].after):
        assert np.array_equal(np.sum(list(course.by_kind.values()), axis=0), course.live)
        assert all((live >= 0).all() for live in course.by_kind.values())


def test_work_names_every_operator_in_its_order(drawn: tuple[Picture, Planned]) -> None:
    picture, planned = drawn
    operators = build_memory(planned.graph).operators
    assert [work.name for work in picture.after.work] == [operator.node.name for operator in operators]
    peak = picture.report.planned
    assert picture.after.work[peak.step].source == peak.source


def test_the_time_of_all_work_is_the_step_time_of_the_plan(drawn: tuple[Picture, Planned]) -> None:
    picture, planned = drawn
    expected = planned.plan.step_seconds + planned.plan.added_seconds
    assert sum(work.seconds for work in picture.after.work) == pytest.approx(expected)


def test_boxes_are_those_of_the_layout(drawn: tuple[Picture, Planned]) -> None:
    picture, planned = drawn
    layout = planned.graph.layout
    assert layout is not None
    assert {box.storage.name: box.low for box in picture.arena} == layout.offset
    assert max(box.high for box in picture.arena) <= layout.arena_bytes
    assert {box.storage.place for box in picture.arena} == {"arena"}
    assert {box.storage.name for box in picture.outside if box.storage.place == "allocator"} == layout.with_allocator


def test_boxes_at_a_step_add_up_to_its_live_bytes(drawn: tuple[Picture, Planned]) -> None:
    picture, _ = drawn
    for step in (0, picture.after.peak, len(picture.after.live) - 1):
        alive = [b.storage for b in (*picture.arena, *picture.outside) if b.storage.born <= step < b.storage.dead]
        assert sum(storage.nbytes for storage in alive) == picture.after.live[step]


def test_no_two_boxes_overlap(drawn: tuple[Picture, Planned]) -> None:
    picture, _ = drawn
    assert len(picture.arena) > 1
    assert len(picture.outside) > 1
    assert overlapping(picture.arena) == []
    assert overlapping(picture.outside) == []


def test_tensors_that_share_a_box_are_named_in_their_order(drawn: tuple[Picture, Planned]) -> None:
    picture, planned = drawn
    memory, step = build_memory(planned.graph), {work.name: i for i, work in enumerate(picture.after.work)}
    results = {name: box for box in (*picture.arena, *picture.outside) for name in box.tensors[1:]}
    assert set(results) == set(planned.graph.reuse)
    assert results
    for name, box in results.items():
        assert memory.storages[memory.owner[name, 0]].name == box.storage.name == box.tensors[0]
        assert [step[other] for other in box.tensors[1:]] == sorted(step[other] for other in box.tensors[1:])


class Ignoring(nn.Module):
    """The gradient of its second output is handed in and never read."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.up(x).tanh(), torch.zeros_like(x).requires_grad_()


def test_storage_without_a_life_is_not_drawn() -> None:
    graph = joint_graph(Ignoring(), [torch.randn(4, 8)])
    picture, _ = picture_of(graph, Options())
    boxes = {box.storage.name for box in (*picture.arena, *picture.outside)}
    assert [(s.kind, s.born - s.dead) for s in picture.after.storages if s.name not in boxes] == [("tangent", 0)]
