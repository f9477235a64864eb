"""What codecs offer is what they write: the solver's schedule with offers is that of the graph with these codecs."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from roamc import cost
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.passes.retain import Choice
from roamc.solvers.order.problem import dependencies
from roamc.solvers.retain import RetainProblem
from tests.passes.retain.test_compress import MODELS, ROUTES, cleaned
from tests.passes.retain.test_search import PROFILE, tower

ORDER = ("stage", "size", "producer", "consumer_start", "consumer", "kept", "workspace", "reusable_start", "reusable")
REST = ("sequence", "seconds", "repeatable", "droppable", "expires")
CASES = {**MODELS, "tower": tower}


def difference(left: RetainProblem, right: RetainProblem) -> list[str]:
    """Names of the parts in which two problems differ."""
    pairs = [(name, getattr(left.order, name), getattr(right.order, name)) for name in ORDER]
    pairs += [(name, getattr(left, name), getattr(right, name)) for name in REST]
    pairs.append(("dependencies", dependencies(left.order), dependencies(right.order)))
    return [name for name, one, other in pairs if not np.array_equal(one, other)]


def some_sets(count: int, dice: random.Random) -> list[tuple[int, ...]]:
    """All offers, each alone, and a few sets of any size."""
    singles = [(place,) for place in range(count)]
    mixed = [tuple(sorted(dice.sample(range(count), size))) for size in range(2, count)]
    return list(itertools.islice(dict.fromkeys([tuple(range(count)), *singles, *mixed]), 14))


@pytest.mark.parametrize("disable", [(), ("reuse",)])
@pytest.mark.parametrize("allowed", ["all", "light"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CASES)
def test_offers_are_what_codecs_write(name: str, route: str, allowed: str, disable: tuple[str, ...]) -> None:
    graph, _ = cleaned(*CASES[name](), route)
    order = [op.node.name for op in build_memory(graph).operators]
    options = Options(memory_budget="min", disable=disable)
    choice = Choice(graph, options, order, PROFILE, cost.prices(graph, PROFILE), allowed)
    assert choice.codes
    for taken in some_sets(len(choice.codes), random.Random(name)):
        assert difference(choice.search.encoded(taken).problem, choice.written(taken).problem) == [], taken
