"""The judge has teeth: what it accepts, broken in one place, it refuses, and says where."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from roamc import cost
from roamc.errors import OptionError, VerifyError, way_out
from roamc.graph import Phase, Port, Role, TrainGraph, operators, output_node, placeholders
from roamc.graph.layout import Layout, Trim
from roamc.graph.lifetimes import lifetimes
from roamc.graph.memory import Place, build_memory
from roamc.graph.verify import Constraints, check_graph, constraints
from roamc.operators import ops
from roamc.operators.fused import Fused, fuse
from roamc.options import Options
from roamc.planning import pipeline, search
from roamc.planning.layout_judge import check_layout
from tests.graphs import graph_and_inputs, model_graph, traced
from tests.random_graphs import random_model

pytestmark = pytest.mark.usefixtures("arenas_of_any_size")

CASES = [("random", "step"), ("random", "joint"), ("nanogpt-dropout", "step"), ("nanogpt-dropout", "joint")]
STEPS = [case for case in CASES if case[1] == "step"]
JOINTS = [case for case in CASES if case[1] == "joint"]
X = torch.randn(4, 4)


def planned(name: str, route: str) -> TrainGraph:
    graph = graph_and_inputs(*random_model(5), route)[0] if name == "random" else model_graph(name, route)[0]
    return search.run(graph, Options()).graph


def refused(check: Callable[[], None], says: str, shows: str | None = None) -> None:
    """``check`` raises one line that has ``says`` and the pass; the log marks node ``shows`` among its neighbours."""
    logged = Logged()
    with logged, pytest.raises(VerifyError, match=says) as caught:
        check()
    line = str(caught.value)
    assert "after pass 'broken'" in line
    assert "\n" not in line
    if shows is not None:
        assert "leave the pass out with options={'disable': 'broken'}" in line
        assert line.endswith('TORCH_LOGS="+roamc" shows the graph around it')
        (text,) = logged.texts
        assert re.search(rf"^  > %{re.escape(shows)} :", text, re.MULTILINE), text
        assert 2 <= sum(shown.startswith("    %") for shown in text.splitlines()) <= 10, text


class Logged(logging.Handler):
    """What ``roamc.graph.verify`` logs at debug level while inside."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []
        self.logger = logging.getLogger("roamc.graph.verify")

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> None:
        self.level_before = self.logger.level
        self.logger.setLevel(logging.DEBUG)
        self.logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self.logger.setLevel(self.level_before)
        self.logger.removeHandler(self)


def judge(graph: TrainGraph, kept: Constraints | None = None, *, deep: bool = False) -> Callable[[], None]:
    return lambda: check_graph(graph, "broken", kept, deep=deep)


@pytest.mark.parametrize(("name", "route"), CASES)
def test_planned_graph_passes(name: str, route: str) -> None:
    graph = planned(name, route)
    check_graph(graph, "layout", constraints(graph), deep=True)
    check_layout(graph)


@pytest.mark.parametrize(("name", "route"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_node_before_what_it_reads(name: str, route: str, seed: int) -> None:
    graph = planned(name, route)
    pairs = [(n, a) for n in operators(graph.graph) for a in n.all_input_nodes if a.op == "call_function"]
    node, argument = random.Random(seed).choice(pairs)
    argument.prepend(node)
    refused(judge(graph), f"malformed: .* of Node '{node.name}' was used before it has been defined")


def test_malformed_graph_is_not_printed_whole() -> None:
    graph = planned("nanogpt-dropout", "step")
    nodes = operators(graph.graph)
    nodes[50].all_input_nodes[0].prepend(nodes[50])
    with pytest.raises(VerifyError, match="malformed") as caught:
        check_graph(graph, "broken")
    assert len(str(caught.value).splitlines()) <= 20


def with_group() -> tuple[TrainGraph, fx.Node, Fused]:
    """A graph whose operators all run as one group."""
    graph = traced(lambda x, y: torch.sigmoid(x * y) + x, X, X + 1)
    nodes = operators(graph.graph)
    group, read = fuse(nodes[-1], nodes)
    with graph.graph.inserting_before(output_node(graph.graph)):
        node = graph.graph.call_function(group, tuple(read))
    node.meta = dict(nodes[-1].meta)
    nodes[-1].replace_all_uses_with(node)
    for old in reversed(nodes):
        graph.graph.erase_node(old)
    return graph.replace(phase={node.name: Phase.FORWARD}), node, group


def reads_too_early(node: fx.Node, group: Fused) -> None:
    first, *_, last = operators(group.body)
    first.prepend(last)


def loses_its_output(node: fx.Node, group: Fused) -> None:
    group.body.erase_node(output_node(group.body))


def loses_a_value(node: fx.Node, group: Fused) -> None:
    del operators(group.body)[0].meta["val"]


def gets_an_argument_more(node: fx.Node, group: Fused) -> None:
    node.args = (*node.args, node.args[0])


def writes_what_it_does_not_have(node: fx.Node, group: Fused) -> None:
    node.target = dataclasses.replace(group, writes=(7,))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (reads_too_early, "its body is no graph: .* was used before it has been defined"),
        (loses_its_output, "its body is not made of inputs, at least one operator and one output"),
        (loses_a_value, "mul of its body has no value"),
        (gets_an_argument_more, "it is called with 3 arguments and has 2"),
        (writes_what_it_does_not_have, r"it writes arguments \(7,\), of 2, with 1 results"),
    ],
)
def test_a_malformed_group(spoil: Callable[[fx.Node, Fused], None], says: str) -> None:
    check_graph(with_group()[0], "broken", deep=True)
    graph, node, group = with_group()
    spoil(node, group)
    refused(judge(graph), f"is a malformed group: {says}")


def test_two_random_operators_swapped() -> None:
    graph = traced(lambda x: (torch.rand_like(x), x.sin(), x.cos(), torch.randn_like(x)), X)
    kept = constraints(graph)
    first, *_, last = operators(graph.graph)
    first.prepend(last)
    refused(judge(graph, kept), "rand(n)?_like must stay behind rand(n)?_like.*random", "randn_like")


@pytest.mark.parametrize(("name", "route"), STEPS)
def test_update_before_forward_has_read_the_parameter(name: str, route: str) -> None:
    graph = planned(name, route)
    kept = constraints(graph)
    inputs = placeholders(graph.graph)
    write = next(
        node
        for node in operators(graph.graph)
        if graph.phase[node.name] is Phase.UPDATE
        and all(argument in inputs for argument in node.all_input_nodes)
        and graph.inputs[inputs.index(node.args[0])].role is Role.PARAMETER
    )
    operators(graph.graph)[0].prepend(write)
    refused(judge(graph, kept), "must stay behind .*write")


def test_write_before_a_read() -> None:
    graph = traced(lambda x: ((a := x * 2), a.sum(), a.add_(1), a.cos())[1:], X)
    kept = constraints(graph)
    mul, _, write, _ = operators(graph.graph)
    mul.append(write)
    refused(judge(graph, kept), "add_ must stay behind sum_1", "add_")


def test_read_of_another_view_before_the_write() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x * 2
        view = a.t()
        a.add_(1)
        return a, view.cos()

    graph = traced(function, X)
    kept = constraints(graph)
    _, view, _, cos = operators(graph.graph)
    view.append(cos)
    refused(judge(graph, kept), "cos must stay behind add_", "cos")


def test_collective_order_is_kept() -> None:
    kept = Constraints(order=(("first", "second"), ("gone", "second"), ("first", "gone")))
    graph = fx.Graph()
    x = graph.placeholder("x")
    for name in ("second", "first", "third"):
        graph.create_node("call_function", torch.ops.aten.sin.default, (x,), name=name)
    graph.output(())
    phase = dict.fromkeys(("first", "second", "third"), Phase.FORWARD)
    whole = TrainGraph("hand", fx.GraphModule({}, graph), (Port("x", Role.INPUT),), (), phase)
    refused(judge(whole, kept), "second must stay behind first", "second")


@pytest.mark.parametrize(("name", "route"), CASES)
def test_node_without_a_phase(name: str, route: str) -> None:
    graph = planned(name, route)
    node = random.Random(0).choice(operators(graph.graph)[5:-5])
    phase = {key: value for key, value in graph.phase.items() if key != node.name}
    refused(judge(graph.replace(phase=phase)), f"{node.name} has no phase", node.name)


@pytest.mark.parametrize(("name", "route"), JOINTS)
@pytest.mark.parametrize("how", ["backward called forward", "forward reads a tangent"])
def test_boundary_is_crossed(name: str, route: str, how: str) -> None:
    graph = planned(name, route)
    work = [n for n in operators(graph.graph) if not ops.is_view(n.target)]
    late = [n for n in work if graph.phase[n.name] is Phase.BACKWARD]
    if how == "forward reads a tangent":
        node = next(n for n in reversed(work) if graph.phase[n.name] is Phase.FORWARD)
        tangent = next(
            n for n, p in zip(placeholders(graph.graph), graph.inputs, strict=True) if p.role is Role.TANGENT
        )
        node.replace_input_with(node.all_input_nodes[0], tangent)
    else:
        node = late[len(late) // 2]
        graph = graph.replace(phase={**graph.phase, node.name: Phase.FORWARD})
    refused(judge(graph), f"{node.name} belongs to FORWARD but stands behind or reads from BACKWARD", node.name)


def test_an_output_of_forward_that_backward_makes() -> None:
    graph = planned("random", "joint")
    end = output_node(graph.graph)
    late = next(
        n for n in reversed(operators(graph.graph)) if not ops.is_view(n.target) and isinstance(n.meta["val"], Tensor)
    )
    first = next(at for at, port in enumerate(graph.outputs) if port.phase is Phase.FORWARD)
    end.args = ((*end.args[0][:first], late, *end.args[0][first + 1 :]),)  # type: ignore[index]
    refused(judge(graph), f"{late.name} is an output of FORWARD and does not belong to it", late.name)


def test_an_update_in_a_graph_with_a_boundary() -> None:
    graph = planned("random", "joint")
    node = next(n for n in reversed(operators(graph.graph)) if not ops.is_view(n.target))
    graph = graph.replace(phase={**graph.phase, node.name: Phase.UPDATE})
    refused(judge(graph), f"{node.name} belongs to UPDATE, which this graph does not have", node.name)


@pytest.mark.parametrize(("name", "route"), CASES)
@pytest.mark.parametrize("change", ["shape", "dtype", "strides"])
def test_noted_geometry_is_wrong(name: str, route: str, change: str) -> None:
    graph = planned(name, route)
    involved = [n for n in operators(graph.graph) if n.name in graph.reuse]
    kept = {*graph.reuse, *(argument.name for n in involved for argument in n.all_input_nodes)}
    candidates = (n for n in operators(graph.graph)[9:] if is_matrix(n) and not ops.rule(n.target).view_of)
    node = next(n for n in candidates if n.name not in kept)
    right = node.meta["val"]
    with right.fake_mode:
        wrong = {
            "shape": lambda: right.new_empty((right.shape[0] + 1, right.shape[1])),
            "dtype": lambda: torch.empty_like(right, dtype=torch.float64),
            "strides": lambda: right.new_empty(right.shape[::-1]).t(),
        }
        node.meta["val"] = wrong[change]()
    refused(judge(graph, deep=True), "is noted as .*, its operator gives ")


def is_matrix(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dim() == 2 and min(value.shape) > 1 and value.dtype is torch.float32


@pytest.mark.parametrize(("name", "route"), CASES)
def test_result_that_shares_storage_without_a_row_in_the_table(name: str, route: str) -> None:
    graph = planned(name, route)
    rules = {n: ops.rule(n.target) for n in operators(graph.graph)[9:] if is_matrix(n)}
    node = next(n for n, rule in rules.items() if rule == ops.OpRule(cost=rule.cost, multiplies=rule.multiplies))
    shared = next(a for a in node.all_input_nodes if isinstance(a.meta["val"], Tensor))
    node.meta["val"] = shared.meta["val"]
    refused(judge(graph), f"{node.name} shares storage with an input; the operator table has no row", node.name)


def test_pick_that_is_not_a_result_of_its_operator() -> None:
    graph = traced(lambda x: x.max(dim=1), X)
    pick = operators(graph.graph)[-1]
    with pick.meta["val"].fake_mode:
        pick.meta["val"] = torch.empty_like(pick.meta["val"])
    refused(judge(graph), f"{pick.name} is not a result of max_1", pick.name)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_roles_do_not_match_the_graph(side: str) -> None:
    graph = traced(lambda x: x.sin(), X)
    ports = (*getattr(graph, side), Port("more", Role.INPUT))
    refused(judge(graph.replace(**{side: ports})), rf"1 {side}, 2 roles")


@pytest.mark.parametrize(("name", "route"), JOINTS)
def test_saved_node_is_gone(name: str, route: str) -> None:
    graph = planned(name, route)
    refused(judge(graph.replace(saved=(*graph.saved, "ghost"))), "saved node ghost is gone")


def test_operator_without_a_row_is_one_line_that_names_it() -> None:
    graph = traced(lambda x: x.sin().view(-1), X)
    node = next(node for node in operators(graph.graph) if node.name == "view")
    node.target = torch.ops.aten.cos.default
    with pytest.raises(VerifyError) as caught:
        check_graph(graph, "capture")
    assert str(caught.value) == (
        "after pass 'capture': view shares storage with an input; the operator table has no row for aten.cos.default; "
        'TORCH_LOGS="+roamc" shows the graph around it'
    )


@pytest.mark.parametrize("name", ["add_", "rand_like", "_assert_async"])
def test_effect_is_gone(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        torch._assert_async(x.sum() == x.sum())
        torch.rand_like(x)
        result = x.sin()
        x.add_(1)
        return result

    graph = traced(function, X)
    kept = constraints(graph)
    gone = next(node for node in operators(graph.graph) if node.name == name)
    graph.graph.erase_node(gone)
    refused(judge(graph, kept), f"{name}, which writes, draws or asserts, is gone")


# -- layouts ---------------------------------------------------------------------------------------


def with_layout(graph: TrainGraph, **changes: Any) -> TrainGraph:
    assert isinstance(graph.layout, Layout)
    return graph.replace(layout=dataclasses.replace(graph.layout, **changes))


def neighbours(graph: TrainGraph, seed: int) -> tuple[str, str]:
    """Two placed storages that live at the same step and have bytes."""
    memory = build_memory(graph)
    born, dead = lifetimes(memory)
    assert graph.layout is not None
    rows = [r for r, s in enumerate(memory.counted) if s.name in graph.layout.offset and s.nbytes]
    pairs = [(a, b) for a in rows for b in rows if a < b and born[a] < dead[b] and born[b] < dead[a]]
    first, second = random.Random(seed).choice(pairs)
    return memory.counted[first].name, memory.counted[second].name


def refused_layout(graph: TrainGraph, says: str) -> None:
    with pytest.raises(VerifyError, match=says) as caught:
        check_layout(graph)
    assert "after pass 'layout'" in str(caught.value)


@pytest.mark.parametrize("route", ["step", "joint"])
def test_what_is_the_callers_lies_outside_the_arena(route: str) -> None:
    graph = planned("nanogpt-dropout", route)
    storages = build_memory(graph).storages
    for place in (Place.INPUT, Place.OUTPUT):
        name = next(storage.name for storage in storages if storage.place is place)
        assert graph.layout is not None
        arena = graph.layout.offset | {name: 0}
        refused_layout(with_layout(graph, offset=arena), f"{name} lies in the arena and is the caller's")


@pytest.mark.parametrize(("name", "route"), CASES)
@pytest.mark.parametrize("seed", range(5))
def test_storages_that_live_together_overlap(name: str, route: str, seed: int) -> None:
    graph = planned(name, route)
    assert graph.layout is not None
    first, second = neighbours(graph, seed)
    offset = {**graph.layout.offset, first: graph.layout.offset[second]}
    refused_layout(with_layout(graph, offset=offset, arena_bytes=2**40), "alive in steps .* overlap")


@pytest.mark.parametrize(("name", "route"), CASES)
@pytest.mark.parametrize("offset", [1, 63, -64, 2**40], ids=str)
def test_offset_is_misaligned_or_outside(name: str, route: str, offset: int) -> None:
    graph = planned(name, route)
    assert graph.layout is not None
    last = list(graph.layout.offset)[-1]
    changed = {**graph.layout.offset, last: offset}
    refused_layout(with_layout(graph, offset=changed), f"{re.escape(last)} at .* is misaligned or outside the arena")


@pytest.mark.parametrize(("name", "route"), CASES)
def test_offset_inside_of_an_element(name: str, route: str) -> None:
    """An alignment of 1 allows every offset; tensors do not."""
    graph = planned(name, route)
    assert graph.layout is not None
    moved = {name: offset + 1 for name, offset in graph.layout.offset.items()}
    nbytes = {storage.name: storage.nbytes for storage in build_memory(graph).storages}
    end = max(offset + nbytes[name] for name, offset in moved.items())
    changed = with_layout(graph, offset=moved, alignment=1, arena_bytes=end)
    refused_layout(changed, "is misaligned: .* has elements of [248] bytes")


@pytest.mark.parametrize(("name", "route"), CASES)
def test_arena_is_too_small(name: str, route: str) -> None:
    graph = planned(name, route)
    assert graph.layout is not None
    refused_layout(with_layout(graph, arena_bytes=graph.layout.arena_bytes // 2), "outside the arena")


@pytest.mark.parametrize(("name", "route"), CASES)
def test_arena_is_larger_than_its_tensors(name: str, route: str) -> None:
    graph = planned(name, route)
    assert graph.layout is not None
    larger = graph.layout.arena_bytes + graph.layout.alignment
    refused_layout(with_layout(graph, arena_bytes=larger), f"the arena has {larger} bytes and its last tensor ends at")


@pytest.mark.parametrize(("name", "route"), CASES)
def test_the_peak_is_too_low(name: str, route: str) -> None:
    graph = planned(name, route)
    assert graph.layout is not None
    low = graph.layout.peak_bytes - 1
    refused_layout(with_layout(graph, peak_bytes=low), f"bytes at .*, above the {low} that the layout says")


def test_what_operators_take_for_themselves_is_left_out() -> None:
    x = torch.randn(64, 64)
    graph = search.run(traced(lambda x: torch.linalg.eigh(x @ x.T)[1].sum(), x), Options()).graph
    assert graph.layout is not None
    low = graph.layout.peak_bytes
    refused_layout(with_layout(graph, needed_bytes=low), f"at _linalg_eigh, above the {low} that the layout says")


def test_objects_of_tensors_and_an_arena_taken_as_a_whole_are_left_out(arenas_of_any_size: None) -> None:
    x = torch.randn(512, 512)
    graph = search.run(traced(lambda x: (x.sin() @ x).exp().sum(), x), Options()).graph
    layout = graph.layout
    assert layout is not None
    low = layout.peak_bytes + cost.objects(layout.peak_bytes) - 1
    refused_layout(with_layout(graph, needed_bytes=low), f"above the {low} that the layout says")
    first = operators(graph.graph)[0].name
    trims = (Trim(0, 256 << 10, "", first),)
    whole = layout.arena_bytes + (2 << 20)
    check_layout(with_layout(graph, trims=trims, needed_bytes=max(whole, layout.needed_bytes)))
    refused_layout(with_layout(graph, trims=trims, needed_bytes=whole - 1), f"{whole} bytes at")


@pytest.mark.parametrize(
    "borders", [(0, 4000), (4096, 8192), (0, 4096), (256 << 10, (256 << 10) + 1), (1, 256 << 10)], ids=repr
)
def test_a_trim_that_the_system_cannot_take_back_as_whole_pages(
    borders: tuple[int, int], arenas_of_any_size: None
) -> None:
    x = torch.randn(512, 512)
    graph = search.run(traced(lambda x: (x.sin() @ x).exp().sum(), x), Options()).graph
    trims = (Trim(*borders, "", operators(graph.graph)[0].name),)
    refused_layout(with_layout(graph, trims=trims, needed_bytes=2**40), "at multiples of 262144 bytes")


def test_a_trim_may_end_with_the_arena(arenas_of_any_size: None) -> None:
    x = torch.randn(521, 521)
    graph = search.run(traced(lambda x: (x.sin() @ x).exp().sum(), x), Options()).graph
    assert graph.layout is not None
    assert graph.layout.arena_bytes % 4096
    trims = (Trim(256 << 10, graph.layout.arena_bytes, "", operators(graph.graph)[0].name),)
    check_layout(with_layout(graph, trims=trims, needed_bytes=2**40))


def test_a_result_that_is_copied_into_the_arena_exists_twice(arenas_of_any_size: None) -> None:
    x = torch.randn(64, 64)
    graph = search.run(traced(lambda x: torch.roll(x.sin(), 3, 0).sum(), x), Options()).graph
    assert graph.layout is not None
    assert list(graph.layout.offset) == ["sin"], "roll makes its result itself"
    offset = {"sin": 0, "roll": x.nbytes}
    both = with_layout(graph, offset=offset, arena_bytes=2 * x.nbytes, peak_bytes=3 * x.nbytes, needed_bytes=2**30)
    check_layout(both)
    refused_layout(with_layout(both, peak_bytes=3 * x.nbytes - 1), f"{3 * x.nbytes} bytes at roll")


def test_layout_is_missing() -> None:
    refused_layout(traced(lambda x: x.sin(), X), "no layout")


def test_order_changed_behind_the_layout() -> None:
    """The same offsets in another legal order: lives are derived anew from the graph as it will run."""
    graph = traced(lambda x: (x.sin().sum(), x.cos().sum()), torch.zeros(256))
    done = search.run(graph, Options()).graph
    assert done.layout is not None
    assert done.layout.arena_bytes == 1024
    sin, _, cos, *_ = operators(done.graph)
    sin.append(cos)
    refused_layout(done, "overlap")


def test_output_is_the_last_node() -> None:
    graph = planned("random", "step")
    operators(graph.graph)[3].prepend(output_node(graph.graph))
    with pytest.raises(VerifyError, match="after pass 'broken'"):
        check_graph(graph, "broken")


def test_only_a_pass_that_can_be_left_out_is_advised_to_be() -> None:
    for step in pipeline.PIPELINE:
        advised = f"'disable': {step.name!r}" in way_out(step.name)
        try:
            search.run(small_graph(), Options(disable=(step.name,)))
        except OptionError:
            assert not advised
        else:
            assert advised


def small_graph() -> TrainGraph:
    return traced(lambda x: x.sin().cos(), torch.randn(4, 4))
