"""Emitted programs that run: their errors, their checks, what they hold between steps."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import roamc
from roamc import compat, compat_aot
from roamc.capture import joint
from roamc.capture.step import capture_step
from roamc.capture.step_trace import StepRequest
from roamc.graph import TrainGraph
from roamc.graph.memory import Place, build_memory
from roamc.options import Options
from roamc.planning import search
from roamc.planning.planned import Planned
from roamc.runtime.arena import Arena
from roamc.runtime.program import Executable, Pair, Whole
from tests.end_to_end.cases import SMALL
from tests.end_to_end.helpers import assert_same, noise, seeded, sgd, square
from tests.models import NanoGPT, next_token, tokens

pytestmark = pytest.mark.usefixtures("arenas_of_any_size")


def planned_pair(name: str) -> tuple[Planned, list[torch.Tensor]]:
    """A planned module, and its inputs."""
    model, batch = seeded(SMALL[name].build), SMALL[name].batch()
    halves, outputs, static = compat_aot.forward_backward(model, (batch,))
    planned = search.run(joint.stitch(*halves, outputs, static, name), Options())
    return planned, [*(t.detach() for t in (*model.parameters(), *model.buffers())), batch]


def test_a_traceback_shows_the_line_of_the_program() -> None:
    model = NanoGPT(layers=1)
    step = roamc.train_step(model, next_token, sgd(model), strict=True)
    step(tokens())
    try:
        step(tokens() + 64)
    except (IndexError, RuntimeError) as error:
        text = "".join(traceback.format_exception(error))
    assert "<roamc NanoGPT" in text
    assert "out=embedding)" in text
    assert "models.py:" in text, "the line of the user's model stands beside it"


def test_the_source_is_one_statement_an_operator() -> None:
    model = NanoGPT(layers=1)
    step = roamc.train_step(model, next_token, sgd(model), strict=True)
    assert step.source == ""
    step(tokens())
    compile(step.source, "program", "exec")
    assert step.source.startswith("def bind(arena):")
    assert "arena.view(" in step.source


def test_a_graph_without_a_layout_does_not_run() -> None:
    planned, _ = planned_pair("dropout")
    with pytest.raises((roamc.VerifyError, roamc.PlanError), match="layout"):
        Executable(dataclasses.replace(planned, graph=planned.graph.replace(layout=None)), keep=True)


def test_a_result_of_another_shape_than_planned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "moved_views", lambda arena: ["addmm"])
    model = SMALL["dropout"].build()
    with pytest.raises(roamc.VerifyError, match="addmm another shape than was planned"):
        roamc.train_step(model, square, sgd(model), strict=True)(noise(4, 8))


@pytest.mark.parametrize(("argument", "said"), [(None, "NoneType"), (noise(4, 8).double(), "torch.float64")])
def test_an_argument_of_another_kind_than_planned_is_an_error(argument: object, said: str) -> None:
    planned, inputs = planned_pair("several outputs")
    with pytest.raises(roamc.StaleError, match=f"torch.float32 and now gets {said}"):
        Pair(planned).forward([*inputs[:-1], argument])


def test_arguments_are_given_up() -> None:
    planned, inputs = planned_pair("several outputs")
    args: list[Any] = list(inputs)
    Pair(planned).forward(args)
    assert args == []


@pytest.mark.parametrize("name", ["several outputs", "odd names", "complex numbers"])
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_backward_is_the_same_wherever_the_saved_tensors_lie(
    monkeypatch: pytest.MonkeyPatch, name: str, keeps_graph: bool
) -> None:
    monkeypatch.setattr(compat, "keeps_graph", lambda: keeps_graph)
    planned, inputs = planned_pair(name)
    pair = Pair(planned)
    parameter_count = len(pair.executable.program.entries["backward"].parameters)
    gradients = []
    for elsewhere in (False, True):
        arguments = [t.clone() for t in inputs]
        results = seeded(pair.forward, arguments)
        saved = list(results[pair.first_saved :])
        if elsewhere:
            saved = [t.clone() for t in saved]
        shapes = [n for n in planned.graph.graph.nodes if n.op == "placeholder"][-(parameter_count - len(saved)) :]
        tangents = [noise(*node.meta["val"].shape) for node in shapes]
        del results
        gradients.append([None if g is None else g.clone() for g in pair.backward([*saved, *tangents])])
        saved.clear()
    assert_same(gradients[1], gradients[0])
    pool = pair.executable.pool
    assert len(pool.waiting) == 0


def test_backward_over_memory_that_was_given_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "keeps_graph", lambda: False)  # outside of autograd torch says True
    planned, inputs = planned_pair("odd names")
    pair = Pair(planned)
    results = pair.forward(list(inputs))
    saved = list(results[pair.first_saved :])
    tangent_count = len(pair.executable.program.entries["backward"].parameters) - len(saved)
    tangents = [n.meta["val"] for n in planned.graph.graph.nodes if n.op == "placeholder"][-tangent_count:]
    args = [*saved, *(noise(*t.shape) for t in tangents)]
    pair.backward(list(args))
    with pytest.raises(roamc.BackwardTwiceError, match="retain_graph=True"):
        pair.backward(list(args))


class Tanh(torch.nn.Module):
    """Backward can write the gradient of ``tanh`` over its saved result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.outer(torch.tanh(self.inner(x)))
        return y


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_saved_tensor_outside_the_arena_is_written_over_only_if_nobody_reads_it_again(
    monkeypatch: pytest.MonkeyPatch, keeps_graph: bool
) -> None:
    monkeypatch.setattr(compat, "keeps_graph", lambda: keeps_graph)
    monkeypatch.setattr(search, "check_numbers", lambda *numbers: None)  # of a plan made by hand, nobody counted them
    model, x = seeded(Tanh), noise(4, 8)

    def graph() -> TrainGraph:
        halves, outputs, static = compat_aot.forward_backward(model, (x,))
        return joint.stitch(*halves, outputs, static, "tanh")

    first = search.run(graph(), Options(disable=("reuse",)))
    own = [s.name for s in build_memory(first.graph).counted if s.place is Place.TEMPORARY]
    apart = tuple(name for name in own if name != "tanh_backward")
    layout = first.plan.decisions["layout"] | {
        "with_allocator": apart,
        "offset": {},
        "arena_bytes": 0,
        "live_bytes": 0,
        "peak_bytes": 1 << 20,
        "needed_bytes": 1 << 20,
    }
    over = {"overwrites": (("tanh_backward", 1),), "nbytes": 128}
    decisions = first.plan.decisions | {"reuse": over, "layout": layout}
    pair = Pair(search.run(graph(), Options(), dataclasses.replace(first.plan, decisions=decisions)))
    results = pair.forward([*(p.detach() for p in model.parameters()), x])
    before = [t.clone() for t in results]
    once = pair.backward([*results[pair.first_saved :], noise(4, 8)])
    unchanged = all(torch.equal(after, then) for after, then in zip(results, before, strict=True))
    assert unchanged is keeps_graph
    again = pair.backward([*before[pair.first_saved :], noise(4, 8)])
    assert_same(list(again), list(once))


def test_a_whole_step_uses_one_arena_again_and_again() -> None:
    model = SMALL["dropout"].build()
    optimizer = sgd(model)
    request = StepRequest(model, square, optimizer, (noise(4, 8),), lambda leaves: tuple(leaves))
    whole = Whole(search.run(capture_step(request).graph, Options()))
    pool = whole.executable.pool
    assert (len(pool.free), len(pool.waiting)) == (0, 0), "no memory before the first step"
    arena = pool.acquire()
    pool.release(arena)
    step = roamc.train_step(model, square, optimizer, strict=True)
    for _ in range(3):
        step(noise(4, 8))
    assert pool.free == [arena]


def test_backward_with_more_threads_than_planned_warns_once_under_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(32, 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    run = roamc.optimize(model, memory_budget="100%", strict=True)
    loss = run(x).sum()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with pytest.warns(UserWarning, match="runs with 8 threads, and its plan counts the operators' own memory for 1"):
        loss.backward()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    loss = run(x).sum()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
