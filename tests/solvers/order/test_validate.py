"""The judge accepts what is good and names each fault: mutate a good solution, demand the right verdict."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers import Status
from roamc.solvers.order.portfolio import ALGORITHMS, solve
from roamc.solvers.order.problem import (
    OrderProblem,
    OrderSolution,
    consumers,
    make_problem,
    reusables,
    without_reuse,
)
from roamc.solvers.order.validate import OrderVerdict, validate
from tests.solvers.order.cases import PROPERTY, is_legal, problems, simulated_live, simulated_reuses

# 0 → 1 by a buffer, 1 → 2 by an edge, 3 free, 4 in the next stage. Peak 17 at step 1: 10 + 7.
PROBLEM = make_problem([0, 0, 0, 0, 1], [(1, 2)], [(10, 0, [1], False), (7, 1, [], True), (5, 4, [], False)])
GOOD = solve(PROBLEM)


def with_order(order: list[int]) -> OrderSolution:
    """The good solution with another order."""
    return replace(GOOD, order=np.array(order, dtype=np.int32))


@PROPERTY
@given(problems(), st.sampled_from(sorted(ALGORITHMS)))
def test_solutions_are_good(problem: OrderProblem, name: str) -> None:
    assert validate(problem, solve(problem)).good
    assert validate(problem, solve(problem, (name,))).good


@PROPERTY
@given(problems(most_ops=7), st.randoms(use_true_random=False))
def test_any_permutation_is_judged_as_the_definition_says(problem: OrderProblem, dice) -> None:
    order = list(range(problem.num_ops))
    dice.shuffle(order)
    peak = max(simulated_live(problem, order))
    status = Status.OPTIMAL if peak == 0 else Status.GAP
    pairs = sorted(simulated_reuses(problem, order).items(), key=lambda pair: pair[1])
    claim = OrderSolution(np.array(order, dtype=np.int32), peak, 0, status, "shuffle", 0, (), tuple(pairs))
    assert validate(problem, claim).good == is_legal(problem, order)


@pytest.mark.parametrize(
    ("order", "verdict", "items"),
    [
        ([0, 1, 2, 3], OrderVerdict.NOT_A_PERMUTATION, (4, 5)),
        ([0, 1, 2, 3, 4, 4], OrderVerdict.NOT_A_PERMUTATION, (6, 5)),
        ([0, 1, 1, 3, 4], OrderVerdict.NOT_A_PERMUTATION, (1,)),
        ([0, 1, 2, 3, 5], OrderVerdict.NOT_A_PERMUTATION, (5,)),
        ([0, 1, 2, 3, -1], OrderVerdict.NOT_A_PERMUTATION, (-1,)),
        ([0, 2, 1, 3, 4], OrderVerdict.EDGE_BROKEN, (1, 2)),
        ([1, 0, 2, 3, 4], OrderVerdict.DATA_BROKEN, (0, 0, 1)),
        ([0, 1, 2, 4, 3], OrderVerdict.STAGE_BROKEN, (4, 3)),
    ],
)
def test_bad_orders_are_named(order: list[int], verdict: OrderVerdict, items: tuple[int, ...]) -> None:
    report = validate(PROBLEM, with_order(order))
    assert (report.verdict, report.items) == (verdict, items)
    assert report.detail


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"peak_bytes": 16}, OrderVerdict.WRONG_PEAK),
        ({"peak_bytes": 18}, OrderVerdict.WRONG_PEAK),
        ({"bound_bytes": 18}, OrderVerdict.BOUND_ABOVE_PEAK),
        ({"candidates": (("program", 17), ("other", 16))}, OrderVerdict.CANDIDATE_BELOW_PEAK),
        ({"bound_bytes": 16}, OrderVerdict.WRONG_STATUS),
        ({"status": Status.GAP}, OrderVerdict.WRONG_STATUS),
        ({"status": Status.LIMIT}, OrderVerdict.WRONG_STATUS),
        ({"status": Status.INFEASIBLE, "bound_bytes": 16}, OrderVerdict.WRONG_STATUS),
        ({"status": Status.GAP, "bound_bytes": 16}, OrderVerdict.GOOD),
        ({"status": Status.LIMIT, "bound_bytes": 16}, OrderVerdict.GOOD),
    ],
)
def test_wrong_claims_are_named(change: dict, verdict: OrderVerdict) -> None:
    assert (GOOD.peak_bytes, GOOD.bound_bytes, GOOD.status) == (17, 17, Status.OPTIMAL)
    assert validate(PROBLEM, replace(GOOD, **change)).verdict is verdict


@PROPERTY
@given(problems(), st.data())
def test_a_mutated_order_is_never_good_by_mistake(problem: OrderProblem, data: st.DataObject) -> None:
    solution = solve(problem)
    order = solution.order.tolist()
    one = data.draw(st.integers(0, problem.num_ops - 1))
    other = data.draw(st.integers(0, problem.num_ops - 1))
    order[one], order[other] = order[other], order[one]
    report = validate(problem, replace(solution, order=np.array(order, dtype=np.int32)))
    same_peak = max(simulated_live(problem, order)) == solution.peak_bytes
    same_pairs = simulated_reuses(problem, order) == dict(solution.reuses)
    assert report.good == (is_legal(problem, order) and same_peak and same_pairs)


# 0 makes 0 and 1; 1 makes 2 over 0 or 1; 2 makes 3 over 1, which 1 has not taken; 3 reads what is left.
REUSE = make_problem(
    [0] * 4,
    [],
    [(8, 0, [1], False), (8, 0, [1, 2], False), (8, 1, [3], False), (8, 2, [3], False)],
    reusable=[[], [], [1, 0], [1]],
)


@pytest.mark.parametrize(
    ("claimed", "items"),
    [
        (((1, 2), (1, 3)), (1, 2)),  # buffer 1 is still read by op 2
        (((0, 2), (0, 3)), (0, 3)),  # not reusable for buffer 3
        (((0, 2),), (3,)),  # one left out
        ((), (2,)),  # all left out
        (((1, 3), (0, 2)), (-1,)),  # not sorted by result
        (((0, 2), (0, 2), (1, 3)), (2,)),  # twice
        (((0, 2), (1, 3), (0, 9)), (0, 9)),  # no such buffer
    ],
)
def test_wrong_in_place_reuses_are_named(claimed: tuple[tuple[int, int], ...], items: tuple[int, ...]) -> None:
    good = solve(REUSE)
    assert good.order.tolist() == [0, 1, 2, 3]
    assert good.reuses == ((0, 2), (1, 3))
    assert good.peak_bytes == 16
    assert validate(REUSE, good).good
    report = validate(REUSE, replace(good, reuses=claimed))
    assert (report.verdict, report.items) == (OrderVerdict.WRONG_REUSE, items)


def test_an_undone_in_place_reuse_counts_twice() -> None:
    good = solve(REUSE)
    apart = replace(good, reuses=())
    report = validate(without_reuse(REUSE), apart)
    assert (report.verdict, report.items) == (OrderVerdict.WRONG_PEAK, (16, 24))


def swapped(order: np.ndarray, one: int, other: int) -> np.ndarray:
    """The order with two operators exchanged."""
    turned = order.copy()
    positions = [order.tolist().index(one), order.tolist().index(other)]
    turned[positions] = turned[positions[::-1]]
    return turned


def planted_faults(solution: OrderSolution) -> dict[OrderVerdict, OrderSolution]:
    """Seven faults in a good solution of a problem that `with_everything` made: 0 →edge 1, 2 →data 3, 4 | 5 stages."""
    order = solution.order
    twice = order.copy()
    twice[-1] = twice[0]
    return {
        OrderVerdict.NOT_A_PERMUTATION: replace(solution, order=twice),
        OrderVerdict.EDGE_BROKEN: replace(solution, order=swapped(order, 0, 1)),
        OrderVerdict.DATA_BROKEN: replace(solution, order=swapped(order, 2, 3)),
        OrderVerdict.STAGE_BROKEN: replace(solution, order=swapped(order, 4, 5)),
        OrderVerdict.WRONG_REUSE: replace(solution, reuses=()),
        OrderVerdict.WRONG_PEAK: replace(solution, peak_bytes=solution.peak_bytes - 1),
        OrderVerdict.BOUND_ABOVE_PEAK: replace(solution, bound_bytes=solution.peak_bytes + 1),
    }


def with_everything(problem: OrderProblem) -> OrderProblem:
    """The problem behind six operators that offer something to break, buffer 1 taking over the bytes of buffer 0."""
    shifted = [
        (size, producer + 6, [reader + 6 for reader in readers], kept)
        for size, producer, readers, kept in zip(
            problem.size.tolist(),
            problem.producer.tolist(),
            consumers(problem).lists(),
            problem.kept.tolist(),
            strict=True,
        )
    ]
    buffers = [(8, 2, [3], False), (8, 3, [], False), *shifted]
    reusable = [[], [0], *([reused + 2 for reused in row] for row in reusables(problem).lists())]
    edges = [(0, 1), *((before + 6, after + 6) for before, after in problem.edges.tolist())]
    stage = [0, 0, 0, 0, 0, 1, *(problem.stage + 1).tolist()]
    return make_problem(stage, edges, buffers, [0] * 6 + problem.workspace.tolist(), reusable)


@PROPERTY
@given(problems())
def test_each_of_seven_planted_faults_is_found(problem: OrderProblem) -> None:
    larger = with_everything(problem)
    solution = solve(larger)
    assert validate(larger, solution).good
    for verdict, wrong in planted_faults(solution).items():
        assert validate(larger, wrong).verdict is verdict
