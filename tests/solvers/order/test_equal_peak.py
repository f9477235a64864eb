"""Other orders of no higher peak: legal, different, the same in every run, and with room where there can be."""

import numpy as np
from hypothesis import given

from roamc.solvers.order.equal_peak import equal_peaks, relieve
from roamc.solvers.order.evaluate import live_bytes, peak_bytes
from roamc.solvers.order.list_schedule import lpmf
from roamc.solvers.order.portfolio import NO_PIECES, solve
from roamc.solvers.order.problem import OrderProblem, make_problem
from tests.solvers.order.cases import PROPERTY, is_legal, problems, random_layers, training_problem


@PROPERTY
@given(problems())
def test_every_order_is_legal_and_has_no_higher_peak(problem: OrderProblem) -> None:
    start = solve(problem, pieces=NO_PIECES).order
    peak = peak_bytes(problem, start)
    others = list(equal_peaks(problem, start))
    for other in others:
        assert is_legal(problem, other.order.tolist()), other.name
        assert peak_bytes(problem, other.order) == other.peak_bytes <= peak, other.name
    different = {tuple(other.order.tolist()) for other in others} | {tuple(start.tolist())}
    assert len(different) == len(others) + 1
    again = [(other.name, other.order.tolist()) for other in equal_peaks(problem, start)]
    assert again == [(other.name, other.order.tolist()) for other in others]


@PROPERTY
@given(problems(stages=1))
def test_relief_keeps_the_peak(problem: OrderProblem) -> None:
    start = np.arange(problem.num_ops, dtype=np.int32)
    relieved = relieve(problem, start)
    assert is_legal(problem, relieved.tolist())
    assert peak_bytes(problem, relieved) <= peak_bytes(problem, start)


def test_relief_lowers_what_lies_beside_the_peak() -> None:
    # 0 needs 100 bytes in any order; behind it two branches of 40 bytes, which program order makes side by side
    buffers = [(100, 0, [1], False), (40, 2, [4], False), (40, 3, [5], False), (1, 4, [6], False), (1, 5, [6], False)]
    problem = make_problem([0] * 7, [(1, 2), (1, 3)], buffers)
    start = np.arange(7, dtype=np.int32)
    relieved = relieve(problem, start)
    assert max(live_bytes(problem, start)[2:]) == 81
    assert max(live_bytes(problem, relieved)[2:]) == 42
    assert peak_bytes(problem, relieved) == 100


def test_large_problems_have_several_orders() -> None:
    for problem in (training_problem(30), random_layers(80, 10)):
        assert len(list(equal_peaks(problem, lpmf(problem) if len(set(problem.stage)) == 1 else solve(problem).order)))
