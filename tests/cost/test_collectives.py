"""Bytes and seconds of collectives, by the algorithm of a ring."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from roamc.compat_groups import planned_for
from roamc.cost import DeviceProfile, load_profile, prices, seconds, step_seconds
from roamc.cost.collectives import collectives, exposed_seconds, note, sent_bytes, traffic
from roamc.cost.workspace import workspace_bytes
from roamc.errors import ProfileError
from roamc.graph import TrainGraph
from roamc.rewriting.arrange import arrange
from roamc.rewriting.split import split
from tests.graphs import traced
from tests.shards import COLLECTIVES

A100 = load_profile(profile="a100")
X = torch.zeros(64, 32)  # 8,192 bytes


def graph_of(*functions: Callable[[Tensor], Tensor]) -> TrainGraph:
    return traced(lambda x: [function(x) for function in functions], X)


def reduced(x: Tensor) -> Tensor:
    return COLLECTIVES.all_reduce(x, "sum", "tp")  # type: ignore[no-any-return]


def gathered(x: Tensor) -> Tensor:
    return COLLECTIVES.all_gather_into_tensor(x, 8, "tp")  # type: ignore[no-any-return]


def scattered(x: Tensor) -> Tensor:
    return COLLECTIVES.reduce_scatter_tensor(x, "sum", 8, "tp")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "sent", "turns"),
    [(reduced, 2 * 7 * 1024, 14), (gathered, 7 * 8192, 7), (scattered, 7 * 1024, 7)],
)
@pytest.mark.parametrize(("numbers", "link"), [(range(8), "node"), (range(4, 12), "network")])
def test_a_ring_takes_latency_of_its_turns_and_time_of_its_bytes(
    function: Callable[[Tensor], Tensor], sent: int, turns: int, numbers: range, link: str
) -> None:
    (node,) = collectives(graph_of(function))
    rates = A100.links[link]
    with planned_for({"tp": tuple(numbers)}):
        assert sent_bytes(node, 8) == sent
        wanted = A100.overhead + turns * rates["latency"] + sent / rates["bandwidth"]
        assert seconds(node, A100) == pytest.approx(wanted)


def test_without_group_or_links_the_time_is_that_of_an_unknown_operator() -> None:
    (node,) = collectives(graph_of(reduced))
    unknown = A100.overhead + 32 * 2 * 8192 / A100.cache_bandwidth
    assert seconds(node, A100) == pytest.approx(unknown)
    with planned_for({"tp": tuple(range(8))}):
        assert seconds(node, dataclasses.replace(A100, links={})) == pytest.approx(unknown)


def test_a_plan_says_what_is_sent_and_how_long_that_takes() -> None:
    graph = graph_of(reduced, gathered, scattered)
    priced = functools.partial(prices, graph)
    assert note(graph, priced, "a100") == ()
    with planned_for({"tp": tuple(range(8))}):
        (said,) = note(graph, priced, "a100")
        (less,) = note(graph, priced, "cpu")
        taken = 1e3 * sum(seconds(node, A100) for node in collectives(graph))
    assert said == f"{less}: {taken:.3g} ms on the links of profile a100, {taken:.3g} ms exposed"
    assert less == "collectives: each rank sends 78.85 kB in a step"
    assert str(traffic(graph, "tp", 8)).startswith("1 all-reduce, 1 all-gather, 1 reduce-scatter, 78.85 kB")


def test_what_runs_between_start_and_wait_hides_a_collective() -> None:
    """Two collectives of a group queue up; one of another group, which is not split, stands in nobody's way."""

    def function(x: Tensor) -> list[Tensor]:
        first, second = reduced(x), gathered(x)
        return [x.sin(), x.cos(), first, second, COLLECTIVES.all_reduce(x, "sum", "dp")]

    groups = {"tp": tuple(range(8)), "dp": tuple(range(4))}
    with planned_for(groups):
        graph = traced(function, X)
        whole = prices(graph, A100)
        names = ("all_reduce", "all_gather_into_tensor", "all_reduce_1")
        sent = [whole[name] for name in names]
        assert exposed_seconds(graph, whole) == pytest.approx(sum(sent))
        order = ("all_reduce", "all_gather_into_tensor", "sin", "all_reduce_wait", "cos", "all_gather_into_tensor_wait")
        graph = arrange(split(graph, names[:2]), (*order, names[2]))
        priced = {**prices(graph, A100), "sin": sent[0] / 2, "cos": sent[1] / 4}
        assert exposed_seconds(graph, priced) == pytest.approx(sent[0] / 2 + sent[1] * 3 / 4 + sent[2])
        longer = {**priced, "sin": sent[0] + sent[1], "cos": 0.0}
        assert exposed_seconds(graph, longer) == pytest.approx(sent[2])
        assert step_seconds(graph, A100) == pytest.approx(
            sum(whole.values()) - sum(sent) + exposed_seconds(graph, prices(graph, A100))
        )


def test_links_of_a_profile_are_read_and_checked() -> None:
    assert DeviceProfile.from_json(A100.to_json()) == A100
    data = json.loads(A100.to_json())
    del data["links"]
    assert DeviceProfile.from_json(json.dumps(data)).links == {}
    for links in ({"node": {"latency": 1e-6}}, {"nodes": {}}):
        with pytest.raises(ProfileError, match="links may have the numbers"):
            DeviceProfile.from_json(json.dumps({**data, "links": links}))
    text = json.dumps({**data, "links": {**A100.links, "network": {"latency": 1e-6, "bandwidth": 0}}})
    with pytest.raises(ProfileError, match="links of network in bandwidth must be a number"):
        DeviceProfile.from_json(text)
    for ranks in (0.5, 1.5):
        text = json.dumps({**data, "links": {**A100.links, "node": {**A100.links["node"], "ranks": ranks}}})
        with pytest.raises(ProfileError, match=rf"links of node in ranks must be a whole number from 1, not {ranks}"):
            DeviceProfile.from_json(text)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (reduced, 4096),
        (gathered, 8 * 8192),
        (scattered, 8192 + 1024),
        (lambda x: COLLECTIVES.all_reduce_coalesced([x, x], "sum", "tp")[0], 2 * 8192 + 8192),
        (lambda x: COLLECTIVES.all_reduce(x.expand(1024, 64, 32).contiguous(), "sum", "tp"), 2 << 20),
    ],
)
def test_gloo_copies_what_it_gathers_and_scatters_and_sends_two_pieces_at_a_time(
    function: Callable[[Tensor], Tensor], wanted: int
) -> None:
    (node,) = collectives(graph_of(function))
    assert workspace_bytes(node, threads=1) == wanted
