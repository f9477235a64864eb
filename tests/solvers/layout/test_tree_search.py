"""The tree search finds the lowest arena of small problems and says when it has not."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from roamc.solvers.layout.first_fit import first_fit
from roamc.solvers.layout.problem import LayoutProblem, arena_bytes, lower_bound, make_problem, padded
from roamc.solvers.layout.section_search import FOUND, NONE, STOPPED, search
from roamc.solvers.layout.section_state import NODES, start
from roamc.solvers.layout.sequences import by_birth
from roamc.solvers.layout.tree_search import time_pieces, tree_search
from tests.solvers.layout.cases import PROPERTY, is_valid, lowest_arena, problems, training_problem


def stacked(problem: LayoutProblem) -> np.ndarray:
    """The most wasteful layout: each storage above all before it."""
    size = padded(problem)
    return np.where(size > 0, np.cumsum(size) - size, 0)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(problems(most_storages=6, most_steps=6))
def test_search_finds_and_proves_the_lowest_arena(problem: LayoutProblem) -> None:
    result = tree_search(problem, stacked(problem), lower_bound(problem), 100_000)
    assert result.proved
    assert is_valid(problem, result.offset.tolist())
    assert arena_bytes(problem, result.offset) == lowest_arena(problem)


@PROPERTY
@given(problems(), st.integers(0, 60))
def test_stopped_search_is_valid_and_keeps_its_limit(problem: LayoutProblem, node_limit: int) -> None:
    before = first_fit(problem, by_birth(problem))
    result = tree_search(problem, before, lower_bound(problem), node_limit)
    assert result.nodes <= node_limit
    assert is_valid(problem, result.offset.tolist())
    assert arena_bytes(problem, result.offset) <= arena_bytes(problem, before)


# Every step but a few is full, and still no layout is as low as the peak: (size, born, dead), bound, lowest arena.
ABOVE_BOUND = [
    ([(1, 1, 5), (2, 4, 6), (2, 0, 3), (1, 3, 5), (2, 5, 6), (1, 1, 4), (2, 0, 1)], 4, 5),
    ([(1, 2, 5), (3, 0, 3), (2, 5, 6), (2, 0, 2), (3, 4, 6), (1, 2, 4), (2, 3, 4), (1, 3, 5)], 5, 6),
]


def from_rows(rows: list[tuple[int, int, int]], alignment: int) -> LayoutProblem:
    """A problem from (size, born, dead), with sizes in units of the alignment."""
    return make_problem(
        [size * alignment for size, _, _ in rows],
        [born for _, born, _ in rows],
        [dead for _, _, dead in rows],
        alignment,
    )


@pytest.mark.parametrize(("rows", "bound", "lowest"), ABOVE_BOUND)
@pytest.mark.parametrize("alignment", [1, 64])
def test_search_proves_that_the_bound_cannot_be_met(rows, bound, lowest, alignment) -> None:
    problem = from_rows(rows, alignment)
    result = tree_search(problem, stacked(problem), lower_bound(problem), 100_000)
    assert lower_bound(problem) == bound * alignment
    assert lowest_arena(problem) == lowest * alignment
    assert arena_bytes(problem, result.offset) == lowest * alignment
    assert result.proved


def test_one_proved_piece_proves_the_arena() -> None:
    rows = ABOVE_BOUND[0][0]
    twice = from_rows([*rows, *((size, born + 9, dead + 9) for size, born, dead in rows)], 1)
    result = tree_search(twice, stacked(twice), lower_bound(twice), 100_000)
    assert arena_bytes(twice, result.offset) == 5
    assert result.proved


def test_pieces_are_cut_where_nothing_lives() -> None:
    problem = make_problem([8, 8, 8, 0, 8], [4, 0, 1, 0, 3], [6, 2, 3, 9, 5], 8)
    assert [piece.tolist() for piece in time_pieces(problem)] == [[1, 2], [4, 0]]
    assert time_pieces(make_problem([0], [0], [1])) == []


def test_only_pieces_above_the_target_are_searched() -> None:
    problem = make_problem([8] * 5, [0, 1, 10, 10, 11], [2, 3, 12, 11, 12], 8)
    incumbent = np.array([0, 8, 0, 8, 16])
    result = tree_search(problem, incumbent, 16, 1000)
    assert result.proved
    assert result.offset[:2].tolist() == [0, 8]
    assert 0 < result.nodes <= 3


@settings(derandomize=True, max_examples=100, deadline=None)
@given(problems(most_storages=6, most_steps=6), st.data())
def test_search_minds_alignments_of_storages(plain: LayoutProblem, data: st.DataObject) -> None:
    own = [data.draw(st.sampled_from([1, 3, 16])) for _ in range(plain.num_storages)]
    problem = make_problem(plain.size, plain.born, plain.dead, plain.alignment, own_alignment=own)
    before = first_fit(problem, by_birth(problem))
    result = tree_search(problem, before, lower_bound(problem), 100_000)
    assert result.proved
    assert is_valid(problem, result.offset.tolist())
    assert arena_bytes(problem, result.offset) == lowest_arena(problem)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(problems(most_storages=6, most_steps=6), st.randoms(use_true_random=False), st.integers(-20, 20))
def test_sets_that_are_ranked_again_lose_no_layout(problem: LayoutProblem, dice, more: int) -> None:
    columns = (column[problem.size > 0] for column in (problem.size, problem.born, problem.dead))
    part = make_problem(*columns, problem.alignment)
    assume(part.num_storages > 0)
    sequence, tie = (np.array(dice.sample(range(part.num_storages), part.num_storages), dtype=np.int64) for _ in "12")
    lowest = lowest_arena(problem)
    state = start(part, sequence, tie)
    ended = search(state, lowest + more, 1_000_000)
    assert ended == (FOUND if more >= 0 else NONE)
    if ended == FOUND:
        offset = state.offset[np.argsort(sequence)]
        assert is_valid(part, offset.tolist())
        assert arena_bytes(part, offset) <= lowest + more


def test_sets_that_fall_apart_are_ranked_by_the_bytes_that_wait_with_them() -> None:
    # above 0, 4 waits alone; 1, 2, 3 wait together, 2 and 3 under eleven bytes, 1 under eight
    problem = make_problem([8, 3, 5, 6, 1], [0, 6, 4, 4, 0], [8, 8, 8, 6, 4], 1)
    waiting = {}
    for name, tie in (("kept", None), ("again", np.arange(5)), ("backwards", np.arange(5)[::-1])):
        state = start(problem, np.arange(5), tie)
        assert search(state, 99, 1) == STOPPED
        here, end = state.children[0], state.children_end[0]
        children = state.lists[here:end].tolist()
        assert (np.diff(state.ranks[end - 3 : end]) > 0).all()
        waiting[name] = [children[:2], children[2:]]
    assert waiting == {
        "kept": [[1, 4], [3, 1, 2, 3]],
        "again": [[1, 4], [3, 2, 3, 1]],
        "backwards": [[1, 4], [3, 3, 2, 1]],
    }


def test_search_that_is_stopped_goes_on_to_the_same_end() -> None:
    problem = training_problem(6, seed=2)
    sequence = by_birth(problem)
    whole, slices = start(problem, sequence), start(problem, sequence)
    capacity = lower_bound(problem)
    ended = search(whole, capacity, 5000)
    for limit in range(10, 5001, 10):
        if search(slices, capacity, limit) != STOPPED:
            break
    assert search(slices, capacity, 5000) == ended
    assert slices.offset.tolist() == whole.offset.tolist()


def test_search_without_memory_left_is_stopped() -> None:
    problem = training_problem(6, seed=2)
    state = start(problem, by_birth(problem))
    short = state._replace(lists=state.lists[: 3 * problem.num_storages].copy())
    assert search(short, lower_bound(problem), 5000) == STOPPED
    assert search(short, lower_bound(problem), 10**9) == STOPPED


def test_a_clock_ends_the_search() -> None:
    problem = from_rows(ABOVE_BOUND[0][0], 1)
    asked = []

    def late() -> bool:
        asked.append(None)
        return len(asked) > 1

    result = tree_search(problem, stacked(problem), lower_bound(problem), 100_000, late)
    assert not result.proved
    assert result.offset.tolist() == stacked(problem).tolist()


def test_what_is_apart_in_time_does_not_multiply_the_work() -> None:
    # a problem without a solution, and a chain of small storages that begins at its end and has many
    rows = [(10 * size, born, dead) for size, born, dead in ABOVE_BOUND[0][0]]
    cost = []
    for length in (20, 40):
        chain = [(1 + step % 3, 5 + step, 7 + step) for step in range(length)]
        problem = from_rows([*rows, *chain], 1)
        state = start(problem, by_birth(problem))
        assert search(state, 49, 1_000_000) == NONE
        cost.append(int(state.at[NODES]))
    assert cost[1] <= cost[0] + 40
