"""A plan from elsewhere is refused where its results may have other last bits than the user's options ask for."""

from __future__ import annotations

import functools

import pytest

from roamc.errors import PlanError
from roamc.graph import copied
from roamc.options import Options
from roamc.passes.shard import choose
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import model_graph
from tests.shards import captured


@functools.cache
def narrow() -> str:
    """A plan whose tensors begin at multiples of 8 bytes, where products of MKL may have other last bits."""
    return search.run(model_graph("nanogpt", "joint")[0], Options(alignment=8)).plan.to_json()


def test_a_smaller_alignment_than_torchs_own_is_refused() -> None:
    with pytest.raises(PlanError, match=r"layout: the plan aligns tensors to 8 bytes, .* at 64: allow it with"):
        search.run(model_graph("nanogpt", "joint")[0], Options(), Plan.from_json(narrow()))


@pytest.mark.parametrize("alignment", [1, 8])
def test_a_smaller_alignment_that_the_user_allows_is_taken(alignment: int) -> None:
    graph = model_graph("nanogpt", "joint")[0]
    planned = search.run(graph, Options(alignment=alignment), Plan.from_json(narrow()))
    assert planned.plan.decisions["layout"]["alignment"] == 8


@pytest.mark.parametrize("allowed", ["off", "whole"])
def test_values_split_among_ranks_are_refused_unless_asked_for(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "ranks_in", lambda group: 2)
    graph = captured("gpt")
    plan = Plan.from_json(search.run(copied(graph), Options(shard="sequence", profile="cpu")).plan.to_json())
    assert plan.decisions["shard"]["regions"]
    with pytest.raises(PlanError, match=r"shard: the plan splits values among ranks, .*'shard': 'sequence'"):
        search.run(copied(graph), Options(shard=allowed, profile="cpu"), plan)
    search.run(graph, Options(shard="sequence", profile="cpu"), plan)
