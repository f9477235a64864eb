"""The judge of reruns: good answers pass, each planted fault is named."""

from dataclasses import replace

import pytest

from roamc.solvers.order import make_problem as make_order
from roamc.solvers.retain import Rerun, RetainProblem, RetainSolution, RetainVerdict, make_problem, validate
from roamc.solvers.status import Status

V = RetainVerdict


def example(expires: list[int] | None = None) -> RetainProblem:
    """0 makes a; 1 makes b and c of a; 2 reads b and makes d; 3 is large; 4 reads b, c, d; 5 makes e, which is kept."""
    buffers = [
        (2, 0, [1], False),  # a
        (8, 1, [2, 4], False),  # b
        (1, 1, [4], False),  # c
        (1, 2, [4], False),  # d
        (9, 3, [], False),  # the large one
        (4, 4, [5], False),
        (1, 5, [], True),  # e
    ]
    order = make_order([0] * 6, [], buffers, reusable=[[], [], [], [], [], [], []])
    repeatable = [True, True, True, False, True, True]
    droppable = [True, True, False, True, False, True, False]
    return make_problem(order, range(6), [1.0, 2.0, 4.0, 1.0, 1.0, 1.0], repeatable, droppable, expires)


PROBLEM = example()
GOOD = RetainSolution((Rerun(4, 0, (0,)), Rerun(4, 1, (1,))), 14, 3.0, 0.0, 14, Status.GAP, 1)


def test_the_example_is_good() -> None:
    assert validate(PROBLEM, 15, GOOD).good
    without = RetainSolution((), 19, 0.0, 0.0, 19, Status.OPTIMAL, 1)
    assert validate(PROBLEM, 19, without).good


@pytest.mark.parametrize(
    ("reruns", "verdict"),
    [
        ((Rerun(6, 0, (0,)),), V.OUT_OF_RANGE),
        ((Rerun(4, 6, (0,)),), V.OUT_OF_RANGE),
        ((Rerun(4, 0, (7,)),), V.OUT_OF_RANGE),
        ((Rerun(4, 0, (0,)), Rerun(3, 1, (1,))), V.NOT_SORTED),
        ((Rerun(4, 3, ()),), V.NOT_REPEATABLE),
        ((Rerun(2, 2, (3,)),), V.NOT_RUN_YET),
        ((Rerun(1, 4, (5,)),), V.NOT_RUN_YET),
        ((Rerun(4, 0, (1,)),), V.NOT_A_RESULT),
        ((Rerun(4, 1, (1, 2)),), V.NOT_DROPPABLE),
        ((Rerun(4, 0, (0,)),), V.WRONG_PEAK),
    ],
)
def test_faults_in_the_list_are_named(reruns: tuple[Rerun, ...], verdict: RetainVerdict) -> None:
    report = validate(PROBLEM, 15, replace(GOOD, reruns=reruns))
    assert report.verdict is verdict
    assert report.detail


def test_expiry_is_named() -> None:
    assert validate(example([6, 4, 6, 6, 6, 6]), 15, GOOD).verdict is V.EXPIRED
    assert validate(example([6, 5, 6, 6, 6, 6]), 15, GOOD).good


@pytest.mark.parametrize(
    ("change", "budget", "verdict"),
    [
        ({"peak_bytes": 13}, 15, V.WRONG_PEAK),
        ({"seconds": 2.0}, 15, V.WRONG_SECONDS),
        ({}, 13, V.OVER_BUDGET),
        ({"bound_seconds": 3.5}, 15, V.BOUND_ABOVE_SECONDS),
        ({"bound_seconds": -1.0}, 15, V.BOUND_ABOVE_SECONDS),
        ({"bound_seconds": float("nan")}, 15, V.BOUND_ABOVE_SECONDS),
        ({"least_peak_bytes": 15}, 15, V.LEAST_ABOVE_PEAK),
        ({"status": Status.INFEASIBLE}, 15, V.WRONG_STATUS),
        ({"bound_seconds": 3.0}, 15, V.WRONG_STATUS),
        ({"status": Status.INFEASIBLE, "bound_seconds": float("inf")}, 13, V.GOOD),
        ({"status": Status.OPTIMAL, "bound_seconds": 3.0}, 15, V.GOOD),
        ({"status": Status.LIMIT}, 15, V.GOOD),
    ],
)
def test_wrong_claims_are_named(change: dict, budget: int, verdict: RetainVerdict) -> None:
    assert validate(PROBLEM, budget, replace(GOOD, **change)).verdict is verdict


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sequence": [0, 2, 1, 3, 4, 5]}, "buffer 1"),
        ({"sequence": [0, 0, 1, 3, 4, 5]}, "permutation"),
        ({"sequence": [0]}, "sequence has shape"),
        ({"seconds": [1.0, -1.0, 0, 0, 0, 0]}, "seconds of op 1"),
        ({"droppable": [True] * 7}, "kept"),
        ({"repeatable": [False] * 6}, "not repeatable"),
    ],
)
def test_problems_that_make_no_sense_are_refused(change: dict, text: str) -> None:
    parts = {
        "sequence": range(6), "seconds": PROBLEM.seconds, "repeatable": PROBLEM.repeatable,
        "droppable": PROBLEM.droppable,
    }  # fmt: skip
    with pytest.raises(ValueError, match=text):
        make_problem(PROBLEM.order, **{**parts, **change})
