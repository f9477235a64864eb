"""The builder refuses what is not a problem, and the bound is the peak of padded bytes."""

import pytest
from hypothesis import given

from roamc.solvers.layout.problem import Gap, LayoutProblem, arena_bytes, live_bytes, lower_bound, make_problem, padded
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


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"own_alignment": [1, 0]}, "storage 1 has an alignment of 0"),
        ({"own_alignment": [1]}, "1 own alignments for 2 storages"),
        ({"fixed": [-1, 4]}, "storage 1 is fixed at 4, alignment 8"),
        ({"fixed": [-2, -1]}, "storage 0 is fixed at -2"),
        ({"fixed": [2**62, -1]}, r"more than 2\*\*62"),
        ({"fixed": [8, 16]}, "storages 0 and 1 are fixed over each other"),
        ({"hint": [0]}, "1 hints for 2 storages"),
        ({"gaps": [Gap(2, 1, 2)]}, "a gap names storage 2 of 2"),
        ({"gaps": [Gap(0, 0, 2)]}, "storage 0 has a gap from step 0 to 2 outside of its life"),
        ({"gaps": [Gap(0, 3, 3)]}, "storage 0 has a gap from step 3 to 3 outside of its life"),
        ({"gaps": [Gap(0, 2, 3, 8, 17)]}, "with a window 8:17 outside of its bytes"),
        ({"gaps": [Gap(0, 3, 5), Gap(0, 2, 4)]}, "storage 0 has a gap from step 3 to 5 over another"),
    ],
)
def test_builder_refuses_what_storages_may_not_have(columns, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_problem([16, 16], [1, 1], [9, 9], 8, **columns)


def test_fixed_storages_may_share_bytes_in_a_gap() -> None:
    problem = make_problem([16, 16], [1, 2], [9, 3], 8, fixed=[8, 16], gaps=[Gap(0, 2, 3, 0, 8)])
    assert not problem.plain
    assert lower_bound(problem) == 32


def test_gaps_free_bytes() -> None:
    problem = make_problem([16, 8], [0, 2], [9, 3], 8, gaps=[Gap(0, 5, 9), Gap(0, 2, 3, 4, 6)])
    steps, live = live_bytes(problem)
    assert steps.tolist() == [0, 2, 3, 5]
    assert live.tolist() == [16, 10, 16, 0]


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    problem = make_problem([0, 1, 64, 65], [0] * 4, [1] * 4, 64)
    assert padded(problem).tolist() == [0, 64, 64, 128]


def test_live_bytes_are_half_open() -> None:
    problem = make_problem([1, 2, 4], [0, 1, 3], [1, 3, 4], 1)
    steps, live = live_bytes(problem)
    assert steps.tolist() == [0, 1, 3, 4]
    assert live.tolist() == [1, 2, 4, 0]
    assert lower_bound(problem) == 4


def test_empty_problem_has_no_bytes() -> None:
    problem = make_problem([], [], [])
    assert live_bytes(problem)[1].tolist() == []
    assert lower_bound(problem) == 0
    assert arena_bytes(problem, padded(problem)) == 0


@PROPERTY
@given(problems())
def test_bound_is_the_fullest_step(problem: LayoutProblem) -> None:
    rows = list(zip(room(problem), problem.born.tolist(), problem.dead.tolist(), strict=True))
    steps = range(max((dead for _, _, dead in rows), default=0))
    counted = [sum(size for size, born, dead in rows if born <= step < dead) for step in steps]
    live_at = dict(zip(*(column.tolist() for column in live_bytes(problem)), strict=True))
    assert all(counted[step] == live for step, live in live_at.items() if step < len(counted))
    assert lower_bound(problem) == max(counted, default=0)
