"""What codecs offer is what they write: the solver's schedule with offers is that of the graph with these codecs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from roamc import cost
from roamc.errors import PlanError
from roamc.graph.memory import build_memory
from roamc.graph.reader_kinds import ReaderKinds
from roamc.options import Options
from roamc.passes.retain import Choice, Code, compress
from roamc.passes.retain.fits import codings, values
from roamc.solvers.order.problem import dependencies
from roamc.solvers.retain import Offer, RetainProblem
from roamc.solvers.retain.offers import clash
from tests.passes.retain.test_compress import MODELS, ROUTES, check, cleaned
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


def without_clashes(offers: Sequence[Offer], places: Sequence[int]) -> tuple[int, ...]:
    """Those of ``places`` that may be taken together, the last ones first."""
    taken: list[int] = []
    for place in reversed(places):
        if not clash(offers[each] for each in (*taken, place)):
            taken.append(place)
    return tuple(sorted(taken))


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
    offers = choice.search.problem.offers
    for places in some_sets(len(choice.codes), random.Random(name)):
        taken = without_clashes(offers, places)
        assert difference(choice.search.encoded(taken).problem, choice.written(taken).problem) == [], taken


@pytest.mark.parametrize("allowed", ["all", "light"])
@pytest.mark.parametrize("route", ROUTES)
def test_what_reads_a_mask_runs_again_on_its_bits(route: str, allowed: str) -> None:
    """The dropped weights of attention are read behind forward, and made of softmax's result, which waits anyway."""
    graph, inputs = cleaned(*MODELS["attention"](), route)
    order = [op.node.name for op in build_memory(graph).operators]
    choice = Choice(graph, Options(memory_budget="min"), order, PROFILE, cost.prices(graph, PROFILE), allowed)
    (code,) = (code for code in choice.codes if code.again)
    assert code.codec == "bits"
    after = check(graph, inputs, lambda graph: compress(graph, [code]))
    left = {storage.name for storage in build_memory(after).saved}
    assert not left.intersection((code.storage, *code.again))


def test_what_is_not_made_of_the_value_is_refused_by_name() -> None:
    graph, _ = cleaned(*MODELS["attention"](), "joint")
    by_name, kinds = {value.storage.name: value for value in values(build_memory(graph))}, ReaderKinds(graph)
    masks = [name for name, value in by_name.items() if [codec for codec, _ in codings(value, (), kinds)] == ["bits"]]
    softmax = next(name for name in by_name if name.startswith("_softmax"))
    with pytest.raises(PlanError, match=f"'{softmax}' cannot be made again from what codec 'bits' keeps of"):
        compress(graph, [Code(masks[-1], "bits", (softmax,))])
