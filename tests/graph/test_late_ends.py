"""Operators that end later than they start, and results in another memory: planned, judged and run, on graphs by hand.

tests/passes/test_overlap.py has the collectives that are such operators. Here ``start`` notes its argument and its
result, and computes when ``wait`` is called: whoever frees or writes over either of them in between changes the
numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.errors import VerifyError
from roamc.graph.layout import Layout
from roamc.graph.lifetimes import lifetimes, live_bytes
from roamc.graph.memory import build_memory
from roamc.graph.verify import check_graph
from roamc.operators import ops
from roamc.operators.table import ROWS, Row, Space
from roamc.options import Options
from roamc.passes import reuse
from roamc.planning import layout_judge, search
from roamc.planning.planned import Planned
from roamc.runtime.program import Whole
from tests.graphs import assert_same, node_named, run_real, traced

KB = 1024
X = torch.randn(16, 16)  # 1 KB
UNDER_WAY: list[tuple[Tensor, Tensor]] = []

LIBRARY = torch.library.Library("roamc", "FRAGMENT")
LIBRARY.define("late_start(Tensor x) -> Tensor")
LIBRARY.define("late_start.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.define("late_start_alone(Tensor x) -> Tensor")
LIBRARY.define("late_wait(Tensor(a) y) -> Tensor(a)")
LIBRARY.define("late_to_host(Tensor x) -> Tensor")
LIBRARY.define("late_from_host(Tensor x) -> Tensor")
late = torch.ops.roamc


def _start(x: Tensor) -> Tensor:
    return _start_out(x, out=torch.full_like(x, torch.nan))


def _start_out(x: Tensor, *, out: Tensor) -> Tensor:
    UNDER_WAY.append((x, out))
    return out.fill_(torch.nan)


def _wait(y: Tensor) -> Tensor:
    x, out = UNDER_WAY.pop(0)
    assert out.data_ptr() == y.data_ptr()
    out.copy_(x * 2 + 1)
    return y.view(y.shape)


for name, function in {
    "late_start": _start, "late_start.out": _start_out, "late_start_alone": _start, "late_wait": _wait,
    "late_to_host": lambda x: x.clone(), "late_from_host": lambda x: x.clone(),
}.items():  # fmt: skip
    LIBRARY.impl(name, function, "CPU")
for name in ("late_start", "late_start_alone", "late_to_host", "late_from_host"):
    LIBRARY.impl(name, torch.empty_like, "Meta")
LIBRARY.impl("late_wait", lambda y: y.view(y.shape), "Meta")


@pytest.fixture(autouse=True)
def rows(arenas_of_any_size: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rows of these operators."""
    for name in ("late_start", "late_start_alone"):
        monkeypatch.setitem(ROWS, f"roamc::{name}", Row(asynchronous=True, recomputable=False))
    monkeypatch.setitem(ROWS, "roamc::late_wait", Row(finishes=0, recomputable=False))
    monkeypatch.setitem(ROWS, "roamc::late_to_host", Row(space=Space.HOST))
    ops.RULES.clear()
    yield
    ops.RULES.clear()
    assert not UNDER_WAY


def started(start: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Five operators run between start and wait, of which some could write over what ``start`` reads."""

    def function(x: Tensor) -> Tensor:
        a = x.sin()
        y = start(a)
        b = x.cos().exp().neg().tanh()
        c = b.sigmoid()
        z = late.late_wait(y)
        return (z * c).exp().sum()

    return function


STARTS: dict[str, Callable[[Tensor], Tensor]] = {"out": late.late_start, "alone": late.late_start_alone}


def run_program(planned: Planned, x: Tensor) -> Any:
    return Whole(planned)([x.clone()])


@pytest.mark.parametrize("start", STARTS)
def test_what_an_operator_reads_and_makes_lives_until_it_ends(start: str) -> None:
    graph = traced(started(STARTS[start]), X)
    memory = build_memory(graph)
    names = [operator.node.name for operator in memory.operators]
    wait = names.index("late_wait")
    lives = dict(zip([s.name for s in memory.counted], zip(*lifetimes(memory), strict=True), strict=True))
    assert lives["sin"] == (0, wait + 1)
    assert lives[names[1]] == (1, names.index("mul") + 1)
    expected, measured = run_real(graph, [X.clone()])
    assert measured == live_bytes(memory).tolist()
    x = X.sin() * 2 + 1
    assert_same(expected, [(x * X.cos().exp().neg().tanh().sigmoid()).exp().sum()], "by hand")


@pytest.mark.parametrize("start", STARTS)
def test_nobody_writes_over_what_is_under_way(start: str) -> None:
    graph = traced(started(STARTS[start]), X)
    overwrites = dict(reuse.decide(graph, Options()).overwrites)
    assert "exp" in overwrites
    assert not {"late_start", "late_start_alone", "late_wait"} & set(overwrites)
    assert {"mul"} <= set(overwrites)  # behind the end


@pytest.mark.parametrize(
    "options",
    [Options(), Options(order="lpmf"), Options(disable=("reuse",))],
    ids=["best order", "lpmf", "without reuse"],
)
@pytest.mark.parametrize("start", STARTS)
def test_the_planned_program_gives_the_numbers(start: str, options: Options) -> None:
    graph = traced(started(STARTS[start]), X)
    expected, _ = run_real(graph, [X.clone()])
    planned = search.run(graph, options, deep=True)
    layout = planned.graph.layout
    assert layout is not None
    assert ("late_start" in layout.offset) is (start == "out")  # the other's result is copied by nobody
    outputs = run_program(planned, X)
    assert_same(list(outputs), expected, start)


def test_a_wait_stays_whose_result_nobody_reads() -> None:
    def function(x: Tensor) -> Tensor:
        y = late.late_start(x.sin())
        late.late_wait(y)
        return (y + 1).exp()

    graph = traced(function, X)
    assert_same(list(run_program(search.run(graph, Options(), deep=True), X)), [(X.sin() * 2 + 1 + 1).exp()], "waited")


def test_a_start_that_nobody_waits_for_in_time_is_refused() -> None:
    graph = traced(started(late.late_start), X)
    mul, wait = node_named(graph, "mul"), node_named(graph, "late_wait")
    mul.args = (node_named(graph, "late_start"), mul.args[1])
    wait.prepend(mul)
    with pytest.raises(VerifyError, match="mul needs the memory of late_start, which has not ended"):
        check_graph(graph, "reorder")


def test_a_start_that_nobody_waits_for_is_refused() -> None:
    graph = traced(lambda x: late.late_start(x.sin()).exp(), X)
    with pytest.raises(VerifyError, match="late_start may not be finished when it returns"):
        check_graph(graph, "capture")


def test_memory_that_is_under_way_is_not_reused() -> None:
    graph = traced(lambda x: ((a := x.sin()), (y := late.late_start(a)), a.exp(), late.late_wait(y))[2:], X)
    with pytest.raises(VerifyError, match="exp needs the memory of late_start, which has not ended"):
        check_graph(graph.replace(reuse={"exp": 0}), "reuse")


def test_waiting_twice_is_refused() -> None:
    graph = traced(lambda x: ((y := late.late_start(x.sin())), late.late_wait(y), late.late_wait(y))[1:], X)
    with pytest.raises(VerifyError, match="late_wait_1 waits for late_start, which has ended"):
        check_graph(graph, "capture")


def test_a_place_that_is_taken_while_an_operator_is_under_way_is_refused() -> None:
    planned = search.run(traced(started(late.late_start), X), Options(disable=("reuse", "reorder")))
    graph, layout = planned.graph, planned.graph.layout
    assert layout is not None
    taken = {**layout.offset, "cos": layout.offset["sin"]}
    with pytest.raises(VerifyError, match="overlap"):
        layout_judge.check_layout(graph.replace(layout=_with(layout, taken)))


def test_a_result_that_would_be_copied_before_it_is_there_is_refused() -> None:
    planned = search.run(traced(started(late.late_start_alone), X), Options())
    graph, layout = planned.graph, planned.graph.layout
    assert layout is not None
    taken = dataclasses.replace(
        _with(layout, {**layout.offset, "late_start_alone": layout.arena_bytes}),
        arena_bytes=layout.arena_bytes + KB,
        with_allocator=layout.with_allocator - {"late_start_alone"},
    )
    with pytest.raises(VerifyError, match="late_start_alone would be copied into the arena while it is being written"):
        layout_judge.check_layout(graph.replace(layout=taken))


def test_a_tensor_on_another_device_than_the_arena_is_refused() -> None:
    planned = search.run(traced(lambda x: (x.sin().exp().sum(), x.to("meta").exp().sum()), X), Options())
    graph, layout = planned.graph, planned.graph.layout
    assert layout is not None
    assert "exp_1" in layout.with_allocator
    with pytest.raises(VerifyError, match="exp_1 lies in the arena and belongs into another memory"):
        layout_judge.check_layout(graph.replace(layout=_with(layout, {**layout.offset, "exp_1": 0})))


def _with(layout: Layout, offset: dict[str, int]) -> Layout:
    return dataclasses.replace(layout, offset=offset)


def offloaded(x: Tensor) -> Tensor:
    a = x.sin()
    kept = late.late_to_host(a)
    b = (a.exp() @ x).tanh()
    return (late.late_from_host(kept) * b).sum()


def test_a_result_on_the_device_is_not_written_over_one_on_the_host() -> None:
    graph = traced(lambda x: late.late_to_host(x.sin()).exp(), X)
    assert not reuse.decide(graph, Options()).overwrites
    with pytest.raises(VerifyError, match="exp is to be written over late_to_host, in another memory"):
        check_graph(graph.replace(reuse={"exp": 0}), "reuse")
    assert_same(list(run_program(search.run(graph, Options(), deep=True), X)), [X.sin().exp()], "host")


def test_bytes_of_the_host_are_not_counted_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced(offloaded, X)
    memory = build_memory(graph)
    host = [storage.name for storage in memory.storages if storage.space is Space.HOST]
    assert host == ["late_to_host"]
    assert "late_to_host" not in [storage.name for storage in memory.counted]
    device = live_bytes(memory).tolist()
    monkeypatch.delitem(ROWS, "roamc::late_to_host")
    ops.RULES.clear()
    both = live_bytes(build_memory(traced(offloaded, X))).tolist()
    names = [operator.node.name for operator in memory.operators]
    kept = range(names.index("late_to_host"), names.index("late_from_host") + 1)
    assert [more - less for more, less in zip(both, device, strict=True)] == [
        KB * (at in kept) for at in range(len(names))
    ]


def test_a_program_with_results_on_the_host_gives_the_numbers() -> None:
    graph = traced(offloaded, X)
    expected, _ = run_real(graph, [X.clone()])
    planned = search.run(graph, Options(), deep=True)
    layout = planned.graph.layout
    assert layout is not None
    assert "late_to_host" not in {*layout.offset, *layout.with_allocator}
    assert_same(list(run_program(planned, X)), expected, "host")
    taken = {**layout.offset, "late_to_host": 0}
    with pytest.raises(VerifyError, match="late_to_host lies in the arena and belongs into another memory"):
        layout_judge.check_layout(planned.graph.replace(layout=_with(layout, taken)))
