"""Links between ranks: the fit against rings that are known, and what several ranks measure together."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from roamc.compat_groups import planned_for
from roamc.cost import DeviceProfile, load_profile
from roamc.cost.collectives import collective_seconds, collectives, ring
from roamc.cost.links import SIZES, Placement, Sample, fit
from roamc.cost.profile import NETWORK, NODE
from roamc.errors import ProfileError
from tests.cost.test_collectives import graph_of, reduced
from tests.end_to_end.ranks import run_ranks

A100 = load_profile(profile="a100")


def rings(latency: float, bandwidth: float, overhead: float, ranks: int) -> list[Sample]:
    """An all-reduce and an all-gather of each size, in the seconds of such links."""
    turns_and_bytes = [ring(times, size, ranks) for times in (1, 2) for size in SIZES["cpu"]]
    return [Sample(turns, sent, overhead + turns * latency + sent / bandwidth) for turns, sent in turns_and_bytes]


@given(latency=st.floats(1e-6, 1e-3), bandwidth=st.floats(1e8, 1e11), ranks=st.integers(2, 64))
def test_fit_gives_latency_and_bandwidth_of_exact_rings(latency: float, bandwidth: float, ranks: int) -> None:
    fitted = fit(rings(latency, bandwidth, 5e-6, ranks), overhead=5e-6)
    assert fitted["latency"] == pytest.approx(latency, rel=1e-3)
    assert fitted["bandwidth"] == pytest.approx(bandwidth, rel=1e-3)


def test_fit_is_near_where_every_time_is_off_by_a_tenth() -> None:
    noise = np.random.default_rng(0).uniform(0.9, 1.1, 2 * len(SIZES["cpu"]))
    samples = [
        dataclasses.replace(sample, seconds=sample.seconds * factor)
        for sample, factor in zip(rings(3e-5, 2e9, 0.0, 4), noise, strict=True)
    ]
    fitted = fit(samples)
    assert fitted["latency"] == pytest.approx(3e-5, rel=0.1)
    assert fitted["bandwidth"] == pytest.approx(2e9, rel=0.1)


def test_latency_that_would_be_below_zero_is_the_least_of_a_profile() -> None:
    samples = [Sample(1, size, size / 1e9 - 1e-7) for size in (1000, 2000)]
    fitted = fit(samples)
    assert fitted["latency"] == 1e-15
    assert fitted["bandwidth"] == pytest.approx(1e9, rel=0.2)
    links = {NODE: {**fitted, "ranks": 2}}
    assert DeviceProfile.from_json(dataclasses.replace(A100, links=links).to_json()).links == links


def test_times_that_do_not_grow_with_bytes_are_refused() -> None:
    with pytest.raises(ProfileError, match="took no longer for more bytes"):
        fit([Sample(1, 1000, 2e-3), Sample(1, 1_000_000, 1e-3)])


def test_rings_lie_in_a_node_or_have_one_rank_of_each() -> None:
    assert Placement(0, 6, 3).rings() == {NODE: [[0, 1, 2], [3, 4, 5]], NETWORK: [[0, 3], [1, 4], [2, 5]]}
    assert Placement(1, 2, 2).rings() == {NODE: [[0, 1]]}
    assert Placement(1, 2, 1).rings() == {NETWORK: [[0, 1]]}


def test_links_that_were_not_measured_give_no_time() -> None:
    (node,) = collectives(graph_of(reduced))
    inside, between = ({link: A100.links[link]} for link in (NODE, NETWORK))
    for numbers, links, is_timed in (
        ((0, 1), inside, True),
        ((7, 8), inside, False),
        ((0, 1), between, True),  # of a node that has one rank
    ):
        with planned_for({"tp": numbers}):
            seconds = collective_seconds(node, dataclasses.replace(A100, links=links))
        assert (seconds is not None) == is_timed


TOGETHER = """
from roamc.cli import ranks as cli
from roamc.cost.links import Placement, measure_links
from roamc.errors import OptionError, RanksError

sizes = {2: [{"network"}, {"node"}], 4: [{"network"}, {"node", "network"}, {"node"}]}[ranks]
device = torch.device("cpu")
links = [measure_links(device, Placement(rank, ranks, 1 << at), 1e-6, quick=True) for at in range(len(sizes))]
gathered = [None] * ranks
dist.all_gather_object(gathered, links)
assert gathered == [links] * ranks
assert [set(link) for link in links] == sizes
assert [link["node"]["ranks"] for link in links[1:]] == [2, 4][: len(links) - 1]
assert all(0 < numbers["bandwidth"] < 1e12 for link in links for numbers in link.values())

together = cli.Ranks(Placement(rank, ranks, 2), "cpu", str)
assert together.first(lambda: rank) == 0
assert together.each(lambda: rank) == rank
def fails():
    if rank == 1:
        raise OSError("no such luck")
try:
    together.each(fails)
except RanksError as error:
    assert str(error) == "rank 1: no such luck"
    assert (error.__cause__ is not None) == (rank == 1)
else:
    raise AssertionError("nothing was raised")
try:
    cli._check_nodes(Placement(rank, ranks, 1 if rank == 1 else 3))
except OptionError as error:
    assert "nodes have 1, 3 ranks" in str(error)
else:
    raise AssertionError("nothing was raised")
print("together")
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_measure_one_profile_and_fail_together(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(tmp_path, TOGETHER, ranks).count("together") == ranks
