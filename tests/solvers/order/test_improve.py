"""Local improvement and the placing of update branches never raise the peak, and do what they are for."""

from dataclasses import replace

import numpy as np
from hypothesis import given

from roamc.solvers.order.branches import branches, place_branches
from roamc.solvers.order.effort import EFFORT
from roamc.solvers.order.evaluate import live_bytes, peak_bytes
from roamc.solvers.order.improve import improve
from roamc.solvers.order.list_schedule import lescea
from roamc.solvers.order.problem import OrderProblem, make_problem
from tests.solvers.order.cases import PROPERTY, is_legal, problems, training_problem


@PROPERTY
@given(problems(stages=1))
def test_improved_order_is_legal_and_has_no_higher_peak(problem: OrderProblem) -> None:
    order = lescea(problem)
    improved = improve(problem, order)
    assert is_legal(problem, improved.tolist())
    assert peak_bytes(problem, improved) <= peak_bytes(problem, order)


@PROPERTY
@given(problems(stages=1))
def test_placed_branches_leave_a_legal_order_with_no_higher_peak(problem: OrderProblem) -> None:
    order = lescea(problem)
    placed, _ = place_branches(problem, order, effort=replace(EFFORT, largest_branch=4))
    assert is_legal(problem, placed.tolist())
    assert peak_bytes(problem, placed) <= peak_bytes(problem, order)


def test_swaps_bring_a_release_forward() -> None:
    # 3 frees what 0 made and may run at once; 1 and 2 behind it allocate
    buffers = [(10, 0, [3], False), (5, 1, [4], False), (5, 2, [4], False)]
    problem = make_problem([0] * 5, [(0, 1), (0, 2)], buffers)
    improved = improve(problem, np.arange(5, dtype=np.int32))
    assert live_bytes(problem, improved).tolist() == [10, 10, 5, 10, 10]


def test_improvement_keeps_an_order_that_nothing_improves() -> None:
    problem = make_problem([0] * 3, [], [(5, op, [], True) for op in range(3)])
    assert improve(problem, np.arange(3, dtype=np.int32)).tolist() == [0, 1, 2]


def test_branches_are_the_updates() -> None:
    # 0 → 1 → 2 is the spine; 3, 4 update with what 0 made, 5 with what 1 made
    buffers = [(8, 0, [1, 3], False), (8, 1, [2, 5], False), (8, 3, [4], False), (1, 2, [6, 7, 8], False)]
    problem = make_problem([0] * 9, [], buffers)
    assert branches(problem, largest=2) == [[3, 4], [5], [6], [7], [8]]


def test_an_update_runs_where_its_gradient_is_freed_or_where_its_bytes_fit() -> None:
    # gradient 0 may be freed by update 3 at once; 1 → 2 needs 20 bytes in between
    buffers = [(10, 0, [3], False), (20, 1, [2], False)]
    early = make_problem([0] * 4, [(0, 1)], buffers)
    single = replace(EFFORT, largest_branch=1)
    assert place_branches(early, np.array([0, 1, 2, 3], dtype=np.int32), effort=single)[0].tolist() == [0, 3, 1, 2]
    late = make_problem([0] * 4, [(0, 1)], [(1, 0, [3], False), (20, 1, [2], False), (10, 3, [], True)])
    assert place_branches(late, np.array([0, 3, 1, 2], dtype=np.int32), effort=single)[0].tolist() == [0, 1, 2, 3]


def test_placing_stops_at_its_limit() -> None:
    problem = training_problem(10)
    program = np.arange(problem.num_ops, dtype=np.int32)
    untouched, work = place_branches(problem, program, work_limit=0)
    assert (untouched.tolist(), work) == (program.tolist(), 0)
    assert 0 < place_branches(problem, program, work_limit=1)[1] < place_branches(problem, program)[1]


def test_branches_free_the_gradients_of_a_training_step() -> None:
    problem = training_problem(10)
    flat = make_problem(
        [0] * problem.num_ops,
        [],
        zip(
            problem.size.tolist(),
            problem.producer.tolist(),
            np.split(problem.consumer, problem.consumer_start[1:-1]),
            problem.kept.tolist(),
            strict=True,
        ),
    )
    program = np.arange(flat.num_ops, dtype=np.int32)
    placed, _ = place_branches(flat, program, effort=replace(EFFORT, largest_branch=3))
    assert peak_bytes(flat, placed) < 0.8 * peak_bytes(flat, program)
