"""The builder refuses what is not a problem, and the bound is the peak of padded bytes."""

import pytest
from hypothesis import given

from roamc.solvers.layout.problem import (
    LayoutProblem,
    arena_bytes,
    live_bytes,
    lower_bound,
    make_problem,
    padded,
)
from tests.solvers.layout.cases import PROPERTY, problems, room


@pytest.mark.parametrize(
    ("size", "born", "dead", "alignment", "message"),
    [
        ([-1], [0], [1], 64, "storage 0 has a negative size: -1"),
        ([1, 1], [0, 2], [1, 2], 64, "storage 1 lives from step 2 to 2"),
        ([1], [-1], [2], 64, "storage 0 lives from step -1 to 2"),
        ([1], [0], [2**31], 64, "storage 0 lives from"),
        ([1], [0, 1], [2], 64, "1 sizes, 2 births and 1 deaths"),
        ([1], [0], [2], 0, "alignment 0 is not a power of two"),
        ([1], [0], [2], 48, "alignment 48 is not a power of two"),
        ([2**62], [0], [1], 64, r"more than 2\*\*62"),
    ],
)
def test_builder_refuses(size, born, dead, alignment, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_problem(size, born, dead, alignment)


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    problem = make_problem([0, 1, 64, 65], [0] * 4, [1] * 4, 64)
    assert padded(problem).tolist() == [0, 64, 64, 128]


def test_live_bytes_are_half_open() -> None:
    problem = make_problem([1, 2, 4], [0, 1, 3], [1, 3, 4], 1)
    assert live_bytes(problem).tolist() == [1, 2, 2, 4]
    assert lower_bound(problem) == 4


def test_empty_problem_has_no_bytes() -> None:
    problem = make_problem([], [], [])
    assert live_bytes(problem).tolist() == []
    assert lower_bound(problem) == 0
    assert arena_bytes(problem, padded(problem)) == 0


@PROPERTY
@given(problems())
def test_bound_is_the_fullest_step(problem: LayoutProblem) -> None:
    rows = list(zip(room(problem), problem.born.tolist(), problem.dead.tolist(), strict=True))
    steps = range(max((dead for _, _, dead in rows), default=0))
    counted = [sum(size for size, born, dead in rows if born <= step < dead) for step in steps]
    assert live_bytes(problem).tolist() == counted
    assert lower_bound(problem) == max(counted, default=0)
