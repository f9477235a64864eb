"""The builder refuses what is not a problem, and the helpers say what the arrays mean."""

import numpy as np
import pytest
from hypothesis import given

from roamc.solvers.order.evaluate import live_bytes
from roamc.solvers.order.portfolio import solve
from roamc.solvers.order.problem import (
    OrderProblem,
    consumers,
    make_problem,
    predecessors,
    reads,
    renumber,
    reusables,
    successors,
    without_reuse,
    writes,
)
from roamc.solvers.order.reuse import reuses
from tests.solvers.order.cases import PROPERTY, problems, simulated_live


@pytest.mark.parametrize(
    ("stage", "edges", "buffers", "workspace", "message"),
    [
        ([0, 0], [], [(-1, 0, [1], False)], None, "buffer 0 has a negative size: -1"),
        ([0, 0], [], [(1, 0, [], False), (1, 2, [], False)], None, "buffer 1 names an op out of range"),
        ([0, 0], [], [(1, 0, [2], False)], None, "buffer 0 names an op out of range"),
        ([0, 0], [], [(1, 1, [-1], False)], None, "buffer 0 names an op out of range"),
        ([0, 0], [], [(1, 1, [0], False)], None, "buffer 0 is read by op 0 before op 1 produces it"),
        ([0, 0], [(1, 0)], [], None, r"edge 0 \(1, 0\) goes against program order"),
        ([0, 0], [(0, 1), (1, 1)], [], None, r"edge 1 \(1, 1\) goes against program order"),
        ([0, 0], [(0, 2)], [], None, r"edge 0 \(0, 2\) names an op out of range"),
        ([0, 1, 0], [], [], None, "stage decreases at op 2: 1 to 0"),
        ([0, 0], [], [], [0], "2 stages but 1 workspace sizes"),
        ([0, 0], [], [], [0, -3], "workspace of op 1 is negative: -3"),
        ([0, 0], [], [(2**62, 0, [], False), (1, 0, [], False)], None, r"more than 2\*\*62"),
    ],
)
def test_builder_refuses(stage, edges, buffers, workspace, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_problem(stage, edges, buffers, workspace)


CHAIN = [(4, 0, [1], False), (4, 1, [2], True), (8, 1, [2], False), (4, 2, [], False)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[], [0]], "4 buffers but 2 rows of reusable buffers"),
        ([[], [4], [], []], r"buffer 1 names a reusable buffer out of range 0..3: 4"),
        ([[], [-1], [], []], r"buffer 1 names a reusable buffer out of range 0..3: -1"),
        ([[], [], [], [1]], "buffer 1, reusable for buffer 3, is kept"),
        ([[], [], [], [2]], "buffer 2, reusable for buffer 3, has 8 bytes, not 4"),
        ([[], [], [], [0]], "buffer 0, reusable for buffer 3, is not read by op 2"),
        ([[0], [], [], []], "buffer 0, reusable for buffer 0, is not read by op 0"),
    ],
)
def test_builder_refuses_reusable_buffers(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_problem([0] * 3, [], CHAIN, reusable=rows)


def test_in_place_reuse_ends_the_life_of_the_reused_where_that_of_the_result_begins() -> None:
    problem = make_problem([0] * 3, [], CHAIN, reusable=[[], [0], [], []])
    program = np.arange(3, dtype=np.int32)
    assert reuses(problem, program) == ((0, 1),)
    assert live_bytes(problem, program).tolist() == [4, 12, 16]
    assert live_bytes(without_reuse(problem), program).tolist() == [4, 16, 16]


def test_first_reusable_buffer_that_dies_is_taken_over_and_only_once() -> None:
    # op 2 makes buffers 2 and 3 from 0 and 1; op 3 may still have to read 0
    buffers = [(4, 0, [2, 3], False), (4, 1, [2], False), (4, 2, [], True), (4, 2, [], True)]
    problem = make_problem([0] * 4, [], buffers, reusable=[[], [], [0, 1], [0, 1]])
    assert reuses(problem, np.array([0, 1, 2, 3], dtype=np.int32)) == ((1, 2),)
    assert reuses(problem, np.array([0, 1, 3, 2], dtype=np.int32)) == ((0, 2), (1, 3))


def test_readers_are_sorted_unique_and_without_the_producer() -> None:
    problem = make_problem([0] * 4, [], [(1, 1, [3, 2, 3, 1], False), (1, 0, [], True)])
    assert consumers(problem).lists() == [[2, 3], []]
    assert reads(problem).lists() == [[], [], [0], [0]]
    assert writes(problem).lists() == [[1], [0], [], []]


def test_dependencies_come_from_edges_and_buffers_once() -> None:
    problem = make_problem([0, 0, 0, 1], [(0, 2), (0, 2), (1, 2)], [(1, 0, [1, 2], False)])
    assert successors(problem).lists() == [[1, 2], [2], [], []]
    assert predecessors(problem).lists() == [[], [0], [0, 1], []]


def test_arrays_are_read_only() -> None:
    problem = make_problem([0, 0], [(0, 1)], [(1, 0, [1], False)])
    with pytest.raises(ValueError, match="read-only"):
        problem.size[0] = 2


def test_empty_problem_has_an_empty_order() -> None:
    problem = make_problem([], [], [])
    assert live_bytes(problem, np.zeros(0, dtype=np.int32)).tolist() == []
    assert solve(problem).peak_bytes == 0


@PROPERTY
@given(problems())
def test_renumbered_problem_is_the_same_problem(problem: OrderProblem) -> None:
    order = solve(problem, ("list_backward",)).order
    renumbered = renumber(problem, order)
    program = np.arange(problem.num_ops, dtype=np.int32)
    assert live_bytes(renumbered, program).tolist() == simulated_live(problem, order.tolist())
    rebuilt = make_problem(
        renumbered.stage.tolist(),
        [(before, after) for before, after in renumbered.edges.tolist()],
        [
            (size, producer, readers, kept)
            for size, producer, readers, kept in zip(
                renumbered.size.tolist(),
                renumbered.producer.tolist(),
                consumers(renumbered).lists(),
                renumbered.kept.tolist(),
                strict=True,
            )
        ],
        renumbered.workspace.tolist(),
        reusables(renumbered).lists(),
    )
    assert rebuilt.consumer.tolist() == renumbered.consumer.tolist()
