"""Plans as data: JSON both ways, strict reading that runs nothing, and a run that follows a plan without deciding."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from roamc.codegen.source import emit
from roamc.errors import BudgetError, PlanError
from roamc.graph import TrainGraph, copied
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.planning import pipeline, search
from roamc.planning.plan import FORMAT, Plan
from roamc.units import format_bytes
from tests.graphs import assert_same, clones, graph_and_inputs, model_graph, run_real, traced
from tests.planning.test_pipeline import run_program
from tests.random_graphs import random_model

FUZZ = settings(derandomize=True, max_examples=300, deadline=None)


def small_graph() -> TrainGraph:
    return graph_and_inputs(*random_model(7, size=4), "step")[0]


@functools.cache
def small_plan() -> Plan:
    return search.run(small_graph(), Options()).plan


@functools.cache
def text() -> str:
    return small_plan().to_json()


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(text()), **fields})


@pytest.mark.parametrize(("name", "route"), [("nanogpt", "step"), ("nanogpt", "joint"), ("lstm", "joint")])
def test_round_trip_gives_an_equal_plan_and_the_same_text(name: str, route: str) -> None:
    plan = search.run(model_graph(name, route)[0], Options()).plan
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert back.to_json() == plan.to_json()


def test_text_is_the_same_for_the_same_graph() -> None:
    assert search.run(small_graph(), Options()).plan.to_json() == text()


def test_seconds_are_left_out_unless_asked_for() -> None:
    assert "seconds" not in json.loads(text())
    told = json.loads(small_plan().to_json(seconds=True))["seconds"]
    assert {"normalize", "reorder", "layout", "verify"} <= set(told)
    assert Plan.from_json(small_plan().to_json(seconds=True)) == small_plan()


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{",
        "nonsense",
        "[]",
        "null",
        "1",
        '"plan"',
        "{}",
        "\x00",
        "NaN",
        '{"format": 5}',
        "[" * 100_000,
        '{"a":' * 50_000,
    ],
    ids=range(13),
)
def test_text_that_is_no_plan(bad: str) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(bad)


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="not a plan: 'decisions' stands twice in one object"):
        Plan.from_json(text().rstrip()[:-1] + ', "decisions": {}}')


@pytest.mark.parametrize("version", [0, 1, 99, None, "2", 1.5, [1], True, float(FORMAT)])
def test_other_format_says_to_plan_again(version: object) -> None:
    with pytest.raises(PlanError, match=rf"plan format .*this roamc reads format {FORMAT}: plan again"):
        Plan.from_json(changed(format=version))


def test_plan_with_pass_reuse_under_its_former_name_says_to_plan_again() -> None:
    data = json.loads(text())
    data["decisions"]["donate"] = data["decisions"].pop("reuse", {"overwrites": [], "nbytes": 0})
    with pytest.raises(PlanError) as refused:
        Plan.from_json(json.dumps(data | {"format": 4}))
    assert str(refused.value) == f"plan format 4; this roamc reads format {FORMAT}: plan again"


FIELDS = [field.name for field in dataclasses.fields(Plan) if field.name != "seconds"]


@pytest.mark.parametrize("name", FIELDS)
def test_missing_field_is_named(name: str) -> None:
    data = json.loads(text())
    del data[name]
    with pytest.raises(PlanError, match=rf"plan must have the fields \[.*'{name}'.*\], not \["):
        Plan.from_json(json.dumps(data))


TEXTS = ("name", "fingerprint", "device", "status", "room")
MAPPINGS = ("versions", "margin_bytes", "fixed_bytes", "decisions")
LISTS, BUDGET = ("notes",), "budget_bytes"
TIMES = ("step_seconds", "added_seconds", "added_bound_seconds", "budget_added")
KIND = {**dict.fromkeys(TEXTS, str), **dict.fromkeys(MAPPINGS, dict), **dict.fromkeys(LISTS, list)}


def _may_be(name: str, value: object) -> bool:
    return type(value) is KIND.get(name, int) or (name in TIMES and value == 1.5) or (name, value) == (BUDGET, None)


VALUES = (None, True, 1.5, "x", 1, [], {})


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in FIELDS for value in VALUES if not _may_be(name, value)],
    ids=repr,
)
def test_field_of_another_type_is_named(name: str, value: object) -> None:
    with pytest.raises(PlanError, match=f"plan: {name} must be "):
        Plan.from_json(changed(**{name: value}))


def test_no_micro_batch_in_flight_is_refused() -> None:
    with pytest.raises(PlanError, match="plan: in_flight must be at least 1, not 0"):
        Plan.from_json(changed(in_flight=0))


@pytest.mark.parametrize("name", [name for name in FIELDS if name.endswith("_bytes") and name not in MAPPINGS])
def test_negative_size_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"plan: {name} must be int from 0 on, not '-1'"):
        Plan.from_json(changed(**{name: -1}))


@pytest.mark.parametrize(
    "fields",
    [
        {"notes": [1]},
        {"notes": [None, ["a"]]},
        {"fixed_bytes": {"parameter": "many"}},
        {"fixed_bytes": {"parameter": -4}},
        {"fixed_bytes": {"parameter": None}},
        {"versions": {"torch": 2}},
        {"decisions": {"reorder": 1}},
        {"decisions": {"reorder": None}},
        {"decisions": {"reorder": ["order"]}},
        {"seconds": 3},
        {"status": "splendid"},
    ],
    ids=repr,
)
def test_wrong_type_inside_a_field_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(changed(**fields))


@pytest.mark.parametrize(
    ("decision", "where"),
    [
        ({"layout": {"offset": {"mul": -64}}}, "layout: offset: mul"),
        ({"retain": {"reruns": [["a", "b", "forward", [["c", ["d"]]], -1.0]]}}, "retain: reruns"),
        ({"retain": {"added_seconds": float("nan")}}, "retain: added_seconds"),
        ({"anything": {"sizes": [[-1]]}}, "anything: sizes"),
    ],
    ids=repr,
)
def test_negative_number_inside_a_decision_is_refused(decision: dict[str, Any], where: str) -> None:
    with pytest.raises(PlanError, match=f"decision of pass {where} must be a number from 0 on, not "):
        Plan.from_json(changed(decisions=decision))


def test_size_that_nothing_has_is_refused() -> None:
    assert Plan.from_json(changed(peak_bytes=2**63 - 1)).peak_bytes == 2**63 - 1
    with pytest.raises(PlanError, match=f"plan: peak_bytes must be at most {2**63 - 1}, not {2**63}"):
        Plan.from_json(changed(peak_bytes=2**63))
    with pytest.raises(PlanError):
        Plan.from_json(text().replace('"peak_bytes": ', '"peak_bytes": ' + "9" * 5000))


@pytest.mark.parametrize("value", [10**400, math.inf, math.nan, 1e300], ids=["digits", "inf", "nan", "float"])
@pytest.mark.parametrize("name", TIMES)
def test_time_that_nothing_takes_is_refused(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"plan: {name} must be "):
        Plan.from_json(changed(**{name: value}))


@pytest.mark.parametrize("value", [10**400, math.inf, 1e300], ids=["digits", "inf", "float"])
def test_number_too_large_inside_a_decision_is_refused(value: float) -> None:
    with pytest.raises(PlanError, match="decision of pass retain: added_seconds must be at most "):
        Plan.from_json(changed(decisions={"retain": {"added_seconds": value}}))


@given(st.data())
@FUZZ
def test_cut_and_changed_text_is_refused_or_a_plan(data: st.DataObject) -> None:
    whole = text()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 40)))
    put = data.draw(st.text(alphabet='{}[]",:-+.0123456789eEntrufals \\\n', max_size=8) | st.text(max_size=4))
    refused_or_a_plan(whole[:start] + put + whole[end:])


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
@FUZZ
def test_changed_value_is_refused_or_a_plan_that_runs_or_is_refused(data: st.DataObject) -> None:
    whole = json.loads(text())
    parent: Any = whole
    key: Any = data.draw(st.sampled_from(sorted(whole)))
    while isinstance(parent[key], dict | list) and parent[key] and data.draw(st.booleans()):
        parent = parent[key]
        key = data.draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
    if data.draw(st.integers(0, 9)) == 0:
        del parent[key]
    else:
        parent[key] = data.draw(JUNK)
    refused_or_a_plan(json.dumps(whole))


def refused_or_a_plan(changed_text: str) -> None:
    """Reading gives PlanError or a plan that can be shown and written."""
    try:
        plan = Plan.from_json(changed_text)
    except PlanError:
        return
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan)


def test_reading_opens_imports_and_executes_nothing() -> None:
    seen: list[str] = []
    watched = {"open", "import", "exec", "compile", "os.system", "subprocess.Popen", "pickle.find_class"}
    active = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        if active and event in watched:
            seen.append(f"{event} {args}")

    samples = [
        text(),
        changed(name="__import__('os').system('true')"),
        changed(decisions={"os": {"system": "true"}}),
        "{",
    ]
    try_to_read(text())  # what is done once in a process, such as reading our own annotations
    sys.addaudithook(hook)  # hooks cannot be taken out again: `active` ends it
    try:
        for sample in samples:
            try_to_read(sample)
    finally:
        active = False
    assert seen == []


def try_to_read(sample: str) -> None:
    try:
        Plan.from_json(sample)
    except PlanError:
        return


# -- following a plan ------------------------------------------------------------------------------


def never(*_: object) -> None:
    raise AssertionError("a run with a plan must not decide")


def without_deciding(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = tuple(dataclasses.replace(step, decide=never) for step in pipeline.PIPELINE)
    monkeypatch.setattr(pipeline, "PIPELINE", steps)


@pytest.mark.parametrize(("name", "route"), [("nanogpt", "step"), ("nanogpt-dropout", "joint")])
def test_plan_from_json_skips_decide_and_gives_the_same_program(
    name: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = search.run(model_graph(name, route)[0], Options())
    without_deciding(monkeypatch)
    again = search.run(model_graph(name, route)[0], Options(), Plan.from_json(original.plan.to_json()))
    assert again.graph.layout == original.graph.layout
    assert str(again.graph.graph) == str(original.graph.graph)
    assert again.plan.to_json() == original.plan.to_json()


@pytest.mark.parametrize("route", ["step", "joint"])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_plan_with_reruns_gives_the_same_program_and_bits_on_a_fresh_capture(seed: int, route: str) -> None:
    graph, inputs = graph_and_inputs(*random_model(seed), route)
    used, again = clones(inputs), clones(inputs)
    torch.manual_seed(seed)
    expected, _ = run_real(copied(graph), used)
    original = search.run(graph, Options(memory_budget="min"))
    fresh = graph_and_inputs(*random_model(seed), route)[0]
    planned = search.run(fresh, Options(), Plan.from_json(original.plan.to_json()))
    assert emit(planned.graph).source == emit(original.graph).source
    assert planned.plan.to_json() == original.plan.to_json()
    torch.manual_seed(seed)
    assert_same([*expected, *used], [*run_program(planned, again), *again], f"seed {seed}, {route}")


@pytest.mark.parametrize("route", ["step", "joint"])
def test_sequence_of_reruns_in_a_plan_says_nothing(route: str) -> None:
    graph, _ = graph_and_inputs(*random_model(5), route)
    original = search.run(copied(graph), Options(memory_budget="min"))
    data = json.loads(original.plan.to_json())
    data["decisions"]["retain"]["reruns"].reverse()
    planned = search.run(graph, Options(), Plan.from_json(json.dumps(data)))
    assert len(data["decisions"]["retain"]["reruns"]) > 5
    assert emit(planned.graph).source == emit(original.graph).source


@pytest.mark.parametrize("route", ["step", "joint"])
def test_plan_without_reorder_keeps_program_order_and_is_taken_again(route: str) -> None:
    graph, _ = graph_and_inputs(*random_model(0), route)
    options = Options(memory_budget="min", disable=("reorder",))
    free, original = (search.run(copied(graph), each) for each in (Options(disable=("reorder",)), options))
    assert original.plan.decisions["retain"]["reruns"]
    assert ("lower bound", "unknown", "pass reorder was left out") in original.plan.rows()
    order = [op.node.name for op in build_memory(original.graph).operators]
    kept = [op.node.name for op in build_memory(free.graph).operators if op.node.name in order]
    assert [name for name in order if name in kept] == kept
    planned = search.run(graph, Options(), Plan.from_json(original.plan.to_json()))
    assert emit(planned.graph).source == emit(original.graph).source


def test_plan_of_another_graph_is_refused_by_name() -> None:
    other = traced(lambda x: x.sin().cos(), torch.zeros(4))
    with pytest.raises(
        PlanError, match="plan of 'RandomModel' was made for another graph than this 'traced': plan again"
    ):
        search.run(other, Options(), small_plan())


def bent(name: str, **fields: Any) -> Plan:
    """The plan with fields of one decision changed; a field given as None is left out."""
    decisions = {key: dict(value) for key, value in json.loads(text())["decisions"].items()}
    decisions[name].update(fields)
    decisions[name] = {key: value for key, value in decisions[name].items() if value is not None}
    return Plan.from_json(changed(decisions=decisions))


def test_decision_with_a_field_missing_or_too_many_is_refused() -> None:
    for plan in (bent("reorder", order=None), bent("layout", more=1)):
        with pytest.raises(PlanError, match=r"the plan's decision of pass '\w+' must have the fields .*, not "):
            search.run(small_graph(), Options(), plan)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("reorder", {"order": 1}),
        ("reorder", {"order": "abc"}),
        ("reorder", {"order": [1, 2]}),
        ("reorder", {"order": [["a"]]}),
        ("normalize", {"dead": ["no_such_node"]}),
        ("normalize", {"dead": 3}),
        ("normalize", {"aliases": ["arg0_1"]}),
        ("normalize", {"aliases": [1]}),
        ("normalize", {"dead": ["output"]}),
        ("layout", {"arena_bytes": 10**30}),
        ("layout", {"offset": []}),
        ("layout", {"offset": {"x": 0}}),
        ("layout", {"arena_bytes": "big"}),
        ("layout", {"arena_bytes": 0.5}),
        ("layout", {"alignment": 0}),
        ("layout", {"with_allocator": 1}),
    ],
    ids=repr,
)
def test_decision_bent_by_hand_is_an_error_of_ours(name: str, fields: dict[str, Any]) -> None:
    from roamc.errors import RoamcError

    with pytest.raises(RoamcError):
        search.run(small_graph(), Options(), bent(name, **fields))


def test_plan_without_a_pass_that_every_program_needs_is_refused() -> None:
    with pytest.raises(PlanError, match="no decision of pass layout: plan again"):
        search.run(small_graph(), Options(), Plan.from_json(changed(decisions={})))


def test_str_is_a_short_table() -> None:
    lines = str(small_plan()).splitlines()
    assert lines[0] == small_plan().headline
    assert lines[0].startswith("RandomModel needs ")
    for label in ("total", "peak", "eager's peak", "lower bound", "arena", "fixed", "status"):
        assert sum(line.startswith(f"  {label} ") for line in lines) == 1, label
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 120
    assert "note: gradients" in str(dataclasses.replace(small_plan(), notes=("gradients are held",)))


def test_repr_is_short() -> None:
    assert len(repr(small_plan())) < 1000


@functools.cache
def planned_gpt() -> tuple[TrainGraph, str]:
    """A graph, and a plan of it under a budget."""
    graph = model_graph("nanogpt", "step")[0]
    return graph, search.run(copied(graph), Options(memory_budget="70%")).plan.to_json()


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("decisions", "reorder", "bound_bytes"), 10**12, "bound_bytes above its peak_bytes"),
        (("decisions", "reorder", "peak_bytes"), 1, "reorder: the plan says peak_bytes 1, and what it does makes"),
        (("decisions", "reorder", "status"), "optimum", "reorder: the status must be one of optimal, gap, limit, not"),
        (("decisions", "layout", "live_bytes"), 10**12, "live_bytes above its arena_bytes"),
        (("decisions", "layout", "peak_bytes"), 10**12, "peak_bytes above its needed_bytes"),
        (("decisions", "layout", "needed_bytes"), 10**12, "layout: the plan says needed_bytes 1000000000000, and"),
        (("decisions", "layout", "outside_bytes"), 1, "layout: the plan says outside_bytes 1, and"),
        (("decisions", "layout", "copied_bytes"), 1, "layout: the plan says copied_bytes 1, and"),
        (("decisions", "layout", "allocator_bytes"), 1, "layout: the plan says allocator_bytes 1, and"),
        (("decisions", "layout", "trimmed_bytes"), 1, "layout: the plan says trimmed_bytes 1, and"),
        (("decisions", "layout", "alignment"), 2**40, "layout: alignment must be at most 2097152 bytes"),
        (("decisions", "layout", "status"), "", "layout: the status must be one of optimal, gap, limit, not"),
        (("decisions", "reuse", "nbytes"), 1, "reuse: the plan says nbytes 1, and its results have"),
        (("decisions", "retain", "bound_seconds"), 1e9, "bound_seconds above its added_seconds"),
        (("decisions", "retain", "added_seconds"), 1e9, "retain: the plan says added_seconds 1000000000.0, and what"),
        (
            ("decisions", "retain", "status"),
            "fine",
            "one of optimal, gap, limit, infeasible, not 'fine'",
        ),
        (("peak_bytes",), 1, "plan: the plan says peak_bytes 1, and what it does makes"),
        (("added_seconds",), 0, "plan: the plan says added_seconds 0, and what it does makes"),
        (("decisions", "retain", "allowed"), "banana", "'banana' is none of all, light"),
        (
            ("decisions", "retain", "sequence"),
            ["a"],
            "the plan's decision of pass 'retain' must have the fields",
        ),
        (("decisions", "reorder", "order"), ["a"], "^reorder: the plan's order is not a permutation of"),
        (
            ("decisions", "checkpoint", "reruns"),
            [["nobody_1", "nobody", "backward", [["nobody", ["a"]]]]],
            "^checkpoint: this graph has no operator 'nobody' that could run again",
        ),
        (
            ("decisions", "retain", "reruns"),
            [["nobody_1", "nobody", "backward", [["nobody", ["a"]]], 0.0]],
            "^retain: this graph has no operator 'nobody' that could run again",
        ),
        (("decisions", "normalize", "dropouts"), ["nobody"], "^normalize: the plan names "),
        (("decisions", "evil"), {"a": 1}, "a decision of evil, which is no pass"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_numbers_that_contradict_each_other_are_refused(place: tuple[str, ...], value: Any, says: str) -> None:
    graph, text = planned_gpt()
    data = json.loads(text)
    *path, last = place
    inner = data
    for key in path:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(PlanError, match=says):
        search.run(copied(graph), Options(), Plan.from_json(json.dumps(data)))


@pytest.mark.parametrize("name", ["live_bytes", "copied_bytes", "trimmed_bytes", "outside_bytes"])
def test_numbers_of_an_arena_are_counted_again(name: str, arenas_of_any_size: None) -> None:
    graph = traced(lambda x: (x.sin() @ x).exp().sum(), torch.randn(512, 512))
    data = json.loads(search.run(copied(graph), Options()).plan.to_json())
    assert data["arena_bytes"]
    data["decisions"]["layout"][name] += 1 if name != "live_bytes" else -1
    with pytest.raises(PlanError, match=f"layout: the plan says {name} .*, and what it does makes"):
        search.run(graph, Options(), Plan.from_json(json.dumps(data)))


def test_plan_that_did_not_keep_its_budget_is_taken_without_one() -> None:
    graph = model_graph("nanogpt", "step")[0]
    with pytest.raises(BudgetError) as refused:
        search.run(copied(graph), Options(memory_budget="5%"))
    lowest = refused.value.plan
    assert lowest is not None
    assert lowest.needed_bytes > lowest.budget_bytes > 0
    again = search.run(graph, Options(), Plan.from_json(lowest.to_json())).plan
    assert again.needed_bytes == lowest.needed_bytes
    said = next(line for line in str(again).splitlines() if line.startswith("  budget "))
    assert said.endswith(f"exceeded: {format_bytes(again.needed_bytes)} needed")


def test_budget_that_is_kept_is_named_without_a_remark() -> None:
    graph, text = planned_gpt()
    budget = Plan.from_json(text).budget_bytes
    lines = str(search.run(copied(graph), Options(), Plan.from_json(text)).plan).splitlines()
    assert next(line for line in lines if line.startswith("  budget ")).endswith(format_bytes(budget))


@functools.cache
def lowest_gpt() -> tuple[TrainGraph, Plan]:
    """A graph, and a plan of it that runs matrix products again."""
    graph = model_graph("nanogpt", "step")[0]
    plan = search.run(copied(graph), Options(memory_budget="min")).plan
    assert any("mm" in operator for _, operator, *_ in plan.decisions["retain"]["reruns"])
    return graph, plan


def test_plan_that_runs_heavy_operators_again_is_refused_under_light() -> None:
    graph, plan = lowest_gpt()
    search.run(copied(graph), Options(memory_budget="min"), plan)
    with pytest.raises(PlanError, match=r"\w*mm\w* would run again, and only light operators may under 'light'"):
        search.run(copied(graph), Options(memory_budget="light"), plan)


def test_plan_that_says_light_and_runs_heavy_operators_again_is_refused() -> None:
    graph, plan = lowest_gpt()
    with pytest.raises(PlanError, match=r"retain: \w*mm\w* would run again"):
        search.run(copied(graph), Options(), plan.with_light_reruns())


@pytest.mark.parametrize("budget", ["light", "min", None])
def test_plan_with_light_reruns_is_taken_under_any_budget(budget: str | None) -> None:
    graph = model_graph("nanogpt-dropout", "step")[0]
    plan = search.run(copied(graph), Options(memory_budget="light")).plan
    assert plan.decisions["retain"]["reruns"]
    again = search.run(graph, Options(memory_budget=budget), Plan.from_json(plan.to_json())).plan
    assert again.to_json() == plan.to_json()


def in_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def test_what_a_plan_needs_is_counted_for_the_threads_that_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 2, 256, 64)
    graph = traced(lambda x: F.scaled_dot_product_attention(x, x, x).sum(), query)
    plans = []
    for count in (1, 16):
        in_threads(monkeypatch, count)
        plans.append(search.run(copied(graph), Options()).plan)
    one, many = plans
    assert (one.threads, many.threads) == (1, 16)
    assert one.peak_bytes == many.peak_bytes
    assert many.needed_bytes - one.needed_bytes > 15 * 4 * 64 * 256, "a block of scores for each"


def test_plan_for_fewer_threads_is_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = model_graph("llama", "step")[0]
    in_threads(monkeypatch, 1)
    plan = search.run(copied(graph), Options(memory_budget="70%")).plan
    in_threads(monkeypatch, 16)
    more = search.run(copied(graph), Options(), plan).plan
    assert more.threads == 16
    assert plan.needed_bytes < more.needed_bytes
    assert (plan.peak_bytes, plan.decisions["reorder"]) == (more.peak_bytes, more.decisions["reorder"])
    assert search.run(copied(graph), Options(), Plan.from_json(more.to_json())).plan == more
    with pytest.raises(BudgetError, match=f"needs .*{more.needed_bytes} bytes"):
        search.run(copied(graph), Options(memory_budget=more.needed_bytes - 1), plan)


def test_plan_for_more_threads_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = model_graph("nanogpt", "step")[0]
    in_threads(monkeypatch, 16)
    plan = search.run(copied(graph), Options()).plan
    in_threads(monkeypatch, 1)
    assert search.run(copied(graph), Options(), plan).plan == plan


@pytest.mark.parametrize("count", [0, 2**16 + 1, 2**61])
def test_plan_for_no_or_too_many_threads_is_refused(count: int) -> None:
    with pytest.raises(PlanError, match=f"threads must be at least 1 and at most 65536, not {count}"):
        Plan.from_json(changed(threads=count))
