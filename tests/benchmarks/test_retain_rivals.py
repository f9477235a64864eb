"""The published formulations of rematerialisation: exact on small problems, and judged on the same problem as ours."""

from __future__ import annotations

import random

import pytest

from benchmarks import retain_rivals, table
from benchmarks.retain_graphs import chain as linear
from benchmarks.retain_graphs import layers
from benchmarks.rivals import checkmate, moccasin
from benchmarks.rivals.one_result import as_graph, judged, one_result
from roamc.solvers.order import peak_bytes
from roamc.solvers.retain import RetainProblem, solve
from roamc.solvers.status import Status
from tests.solvers.retain.cases import chain, layered

RIVALS = {"moccasin": moccasin.rerun, "checkmate": checkmate.rerun}
SECONDS = 60


def least(name: str, problem: RetainProblem, budget: int) -> float | None:
    """Seconds that the rival adds, None if it has proved that the budget cannot be met."""
    runs, status = RIVALS[name](as_graph(problem), budget, SECONDS)
    assert status in ("OPTIMAL", "INFEASIBLE")
    return None if runs is None else judged(problem, budget, runs).seconds


@pytest.mark.parametrize("percent", [80, 65])
@pytest.mark.parametrize("seed", range(3))
def test_both_find_the_same_least_seconds_and_none_below_the_bound(seed: int, percent: int) -> None:
    problem = one_result(layered(1, seed))
    budget = peak_bytes(problem.order, problem.sequence) * percent // 100
    ours = solve(problem, budget)
    theirs = {name: least(name, problem, budget) for name in RIVALS}
    assert theirs["moccasin"] == pytest.approx(theirs["checkmate"])
    if ours.status is Status.INFEASIBLE:
        assert theirs["checkmate"] is None
    else:
        assert ours.bound_seconds <= theirs["checkmate"] * (1 + 1e-6)
        assert ours.seconds == pytest.approx(theirs["checkmate"])


@pytest.mark.parametrize("name", RIVALS)
def test_chain_is_solved_to_the_optimum(name: str) -> None:
    problem = one_result(chain(2, inner=1))
    budget = peak_bytes(problem.order, problem.sequence) * 7 // 10
    assert least(name, problem, budget) == pytest.approx(solve(problem, budget).seconds)


@pytest.mark.parametrize(("count", "budget"), [(25, 114), (25, 101), (50, 138)])
def test_random_layers_add_no_more_than_moccasin_does(count: int, budget: int) -> None:
    problem = layers(count)
    added = least("moccasin", problem, budget)
    assert added is not None
    assert solve(problem, budget).seconds <= added


@pytest.mark.parametrize("name", RIVALS)
def test_full_budget_costs_nothing(name: str) -> None:
    problem = one_result(layered(2, 1))
    assert least(name, problem, peak_bytes(problem.order, problem.sequence)) == 0


@pytest.mark.parametrize("name", RIVALS)
def test_no_budget_at_all_is_infeasible(name: str) -> None:
    assert least(name, one_result(layered(1, 2)), 1) is None


def test_one_result_keeps_bytes_and_seconds() -> None:
    problem = layered(3, random.Random(3).randrange(100))
    alone = one_result(problem)
    assert int(alone.order.size.sum()) == int(problem.order.size.sum())
    assert alone.seconds.tolist() == problem.seconds[problem.sequence].tolist()
    assert alone.num_buffers == alone.num_ops == problem.num_ops


def test_answer_above_the_budget_is_no_answer() -> None:
    problem = one_result(layered(2, 1))
    with pytest.raises(ValueError, match="above the budget"):
        judged(problem, 1, [])


@pytest.mark.parametrize("problem", [linear(3), layers(12)], ids=["chain", "layers"])
def test_row_is_judged_printed_and_put_into_the_table(problem: RetainProblem) -> None:
    problem = one_result(problem)
    budget = peak_bytes(problem.order, problem.sequence) * 4 // 5
    row = retain_rivals.row("made up", problem, 80, budget, 30.0)
    assert row["least"] is not None
    bound = row["ours"]["bound"]
    assert bound is None or bound <= row["least"] * (1 + 1e-6)
    assert retain_rivals.line(row).startswith("made up")
    shown = "\n".join(table._retain_rivals([row]))
    assert f"| made up | {problem.num_ops} | 80% |" in shown
    assert f"{row['least'] / row['step']:.2%}*" in shown


def test_rival_with_less_time_is_named() -> None:
    row = {"ours": {"added": 2.0}, "moccasin": {"added": 1.0}, "checkmate": {"added": None}}
    assert retain_rivals.worse(row) == ["moccasin"]
    assert retain_rivals.worse({**row, "ours": {"added": 1.0}}) == []
    assert retain_rivals.worse({**row, "ours": {"added": None}}) == ["moccasin"]
