"""The judge accepts what is good and names each fault: mutate a good solution, demand the right verdict."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers import Status
from roamc.solvers.layout.portfolio import solve
from roamc.solvers.layout.problem import Gap, LayoutProblem, LayoutSolution, lower_bound, make_problem
from roamc.solvers.layout.validate import LayoutVerdict, validate
from tests.solvers.layout.cases import PROPERTY, is_valid, problems, room, special_problems

# 0 and 1 share step 1, 2 comes later and takes their place, 3 has no bytes. Arena and bound 24.
PROBLEM = make_problem([16, 5, 10, 0], [0, 1, 2, 0], [2, 2, 4, 9], 8)
GOOD = LayoutSolution(
    offset=np.array([0, 16, 8, 0]),
    arena_bytes=24,
    bound_bytes=24,
    status=Status.OPTIMAL,
    algorithm="by hand",
    work=4,
    candidates=(("by hand", 24),),
)


def with_offset(offset: list[int], **claims: int) -> LayoutSolution:
    """The good solution with other offsets, and maybe other claims."""
    return replace(GOOD, offset=np.array(offset, dtype=np.int64), **claims)


@PROPERTY
@given(problems(), st.sampled_from([0, 10, 1000]))
def test_solutions_are_good(problem: LayoutProblem, node_limit: int) -> None:
    assert validate(problem, solve(problem, node_limit=node_limit)).good


def test_solution_by_hand_is_good() -> None:
    assert validate(PROBLEM, GOOD).verdict is LayoutVerdict.GOOD


@pytest.mark.parametrize(
    ("solution", "verdict", "items"),
    [
        (with_offset([0, 16, 8]), LayoutVerdict.WRONG_LENGTH, (3, 4)),
        (with_offset([0, 16, 8, 0, 0]), LayoutVerdict.WRONG_LENGTH, (5, 4)),
        (with_offset([-8, 16, 8, 0]), LayoutVerdict.NEGATIVE_OFFSET, (0,)),
        (with_offset([0, 16, 8, -8]), LayoutVerdict.NEGATIVE_OFFSET, (3,)),
        (with_offset([0, 17, 8, 0]), LayoutVerdict.MISALIGNED, (1,)),
        (with_offset([0, 24, 8, 0]), LayoutVerdict.OUT_OF_ARENA, (1,)),
        (with_offset([0, 8, 8, 0]), LayoutVerdict.OVERLAP, (0, 1)),
        (with_offset([8, 8, 8, 0]), LayoutVerdict.OVERLAP, (0, 1)),
        (with_offset([0, 16, 8, 0], arena_bytes=32), LayoutVerdict.WRONG_ARENA, (32, 24)),
        (with_offset([0, 16, 8, 0], arena_bytes=21), LayoutVerdict.WRONG_ARENA, (21, 24)),
        (with_offset([0, 16, 8, 0], bound_bytes=21), LayoutVerdict.WRONG_BOUND, (21, 24)),
        (with_offset([0, 24, 8, 0], arena_bytes=32, bound_bytes=32), LayoutVerdict.WRONG_BOUND, (32, 24)),
    ],
)
def test_bad_layouts_are_named(solution: LayoutSolution, verdict: LayoutVerdict, items: tuple[int, ...]) -> None:
    report = validate(PROBLEM, solution)
    assert (report.verdict, report.items) == (verdict, items)
    assert report.detail


def test_a_storage_without_bytes_may_lie_anywhere() -> None:
    assert validate(PROBLEM, with_offset([0, 16, 8, 4096])).good


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"status": Status.GAP}, LayoutVerdict.WRONG_STATUS),
        ({"status": Status.LIMIT}, LayoutVerdict.WRONG_STATUS),
        ({"status": Status.INFEASIBLE}, LayoutVerdict.WRONG_STATUS),
        ({"candidates": (("by hand", 24), ("other", 16))}, LayoutVerdict.CANDIDATE_BELOW_ARENA),
    ],
)
def test_wrong_claims_are_named(change: dict, verdict: LayoutVerdict) -> None:
    assert validate(PROBLEM, replace(GOOD, **change)).verdict is verdict


# 0 is fixed at 8 and may lie at multiples of 8 only; 1 lies in its gap, 2 in the window that it leaves at step 4.
SPECIAL = make_problem(
    [16, 16, 8],
    [0, 2, 4],
    [9, 3, 5],
    1,
    own_alignment=[8, 1, 4],
    fixed=[8, -1, -1],
    gaps=[Gap(0, 2, 3), Gap(0, 4, 5, 8, 16)],
)


@pytest.mark.parametrize(
    ("offset", "verdict", "items"),
    [
        ([8, 8, 8], LayoutVerdict.GOOD, ()),
        ([8, 3, 4], LayoutVerdict.GOOD, ()),
        ([0, 8, 8], LayoutVerdict.MOVED, (0,)),
        ([8, 8, 6], LayoutVerdict.MISALIGNED, (2,)),
        ([8, 8, 12], LayoutVerdict.OVERLAP, (0, 2)),
    ],
)
def test_alignments_fixed_places_and_gaps_are_judged(offset, verdict, items) -> None:
    claim = replace(with_offset(offset), arena_bytes=24, bound_bytes=24, candidates=())
    report = validate(SPECIAL, claim)
    assert (report.verdict, report.items) == (verdict, items)


@pytest.mark.parametrize(
    ("capacity", "arena", "status", "good"),
    [
        (23, 24, Status.INFEASIBLE, True),
        (23, 24, Status.GAP, False),
        (23, 24, Status.LIMIT, False),
        (24, 24, Status.OPTIMAL, True),
        (24, 24, Status.INFEASIBLE, False),
        (24, 32, Status.INFEASIBLE, True),
        (24, 32, Status.LIMIT, True),
        (40, 32, Status.GAP, True),
        (40, 32, Status.LIMIT, False),
        (40, 32, Status.INFEASIBLE, False),
    ],
)
def test_status_agrees_with_the_capacity(capacity: int, arena: int, status: Status, good: bool) -> None:
    offset = [0, 16, 8, 0] if arena == 24 else [0, 24, 8, 0]
    claim = replace(with_offset(offset, arena_bytes=arena), status=status, candidates=(), capacity=capacity)
    assert (validate(PROBLEM, claim).verdict is LayoutVerdict.GOOD) == good


@pytest.mark.parametrize("status", [Status.OPTIMAL, Status.GAP, Status.LIMIT])
def test_an_arena_above_the_bound_may_have_any_status(status: Status) -> None:
    higher = with_offset([0, 24, 8, 0], arena_bytes=32)
    assert validate(PROBLEM, replace(higher, status=status, candidates=())).good


@PROPERTY
@given(problems(), st.data())
def test_a_moved_storage_is_never_good_by_mistake(problem: LayoutProblem, data: st.DataObject) -> None:
    solution = solve(problem, node_limit=0)
    if problem.num_storages == 0:
        return
    offset = solution.offset.tolist()
    moved = data.draw(st.integers(0, problem.num_storages - 1))
    offset[moved] += data.draw(st.sampled_from([-64, -8, -1, 1, 8, 64, 128]))
    report = validate(problem, replace(solution, offset=np.array(offset, dtype=np.int64)))
    size = room(problem)
    height = max((at + room for at, room in zip(offset, size, strict=True) if room), default=0)
    assert report.good == (is_valid(problem, offset) and height == solution.arena_bytes)


@PROPERTY
@given(special_problems(), st.data())
def test_random_offsets_of_special_storages_are_judged_as_the_definition_says(
    problem: LayoutProblem, data: st.DataObject
) -> None:
    offset = [
        data.draw(st.integers(0, 4)) * unit if fixed < 0 else fixed
        for unit, fixed in zip(problem.own_alignment.tolist(), problem.fixed.tolist(), strict=True)
    ]
    height = max((at + size for at, size in zip(offset, room(problem), strict=True) if size), default=0)
    bound = lower_bound(problem)
    status = Status.OPTIMAL if height == bound else Status.GAP
    claim = LayoutSolution(np.array(offset, dtype=np.int64), height, bound, status, "by chance", 0, ())
    assert (validate(problem, claim).verdict is not LayoutVerdict.OVERLAP) == is_valid(problem, offset)


@PROPERTY
@given(problems(), st.data())
def test_random_offsets_are_judged_as_the_definition_says(problem: LayoutProblem, data: st.DataObject) -> None:
    offset = [data.draw(st.integers(0, 4)) * problem.alignment for _ in range(problem.num_storages)]
    solution = solve(problem, node_limit=0)
    height = max((at + size for at, size in zip(offset, room(problem), strict=True) if size), default=0)
    status = Status.OPTIMAL if height == solution.bound_bytes else Status.GAP
    claim = replace(solution, offset=np.array(offset, dtype=np.int64), arena_bytes=height, status=status, candidates=())
    assert validate(problem, claim).good == is_valid(problem, offset)
