"""Every heuristic gives a valid layout that is no lower than the bound."""

import random
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.layout import sequences
from roamc.solvers.layout.best_fit import best_fit
from roamc.solvers.layout.effort import EFFORT
from roamc.solvers.layout.first_fit import first_fit
from roamc.solvers.layout.improve import Improvement
from roamc.solvers.layout.portfolio import ALGORITHMS
from roamc.solvers.layout.problem import (
    Gap,
    LayoutProblem,
    arena_bytes,
    live_bytes,
    live_pairs,
    lower_bound,
    make_problem,
    padded,
)
from tests.solvers.layout.cases import PROPERTY, is_valid, problems, room, special_problems, training_problem


@pytest.mark.parametrize("name", ALGORITHMS)
@PROPERTY
@given(problem=problems())
def test_layout_is_valid_and_not_below_the_bound(name: str, problem: LayoutProblem) -> None:
    offset = ALGORITHMS[name](problem)
    assert offset.dtype == np.int64
    assert is_valid(problem, offset.tolist())
    assert arena_bytes(problem, offset) >= lower_bound(problem)
    assert all(at == 0 for at, size in zip(offset.tolist(), room(problem), strict=True) if size == 0)


SEQUENCES = [
    sequences.by_size,
    sequences.by_size_and_birth,
    sequences.outward_by_size,
    sequences.outward_by_short_life,
    sequences.by_lifetime,
    sequences.by_area,
    sequences.by_birth,
    sequences.by_pressure,
    sequences.by_hint,
    sequences.long_lived_below,
    sequences.by_width_area_total,
    sequences.by_total_area_width,
    sequences.by_total_width_area,
]
PATIENT = replace(EFFORT, improve_patience=9)


@PROPERTY
@given(special_problems())
def test_every_sequence_is_a_permutation(problem: LayoutProblem) -> None:
    for sequence in SEQUENCES:
        assert sorted(sequence(problem).tolist()) == list(range(problem.num_storages))


@PROPERTY
@given(special_problems(), st.sampled_from(SEQUENCES))
def test_first_fit_minds_alignments_fixed_places_and_gaps(problem: LayoutProblem, sequence) -> None:
    offset = first_fit(problem, sequence(problem))
    assert is_valid(problem, offset.tolist())
    assert arena_bytes(problem, offset) >= lower_bound(problem)


@PROPERTY
@given(problems(), st.sampled_from([sequences.outward_by_size, sequences.outward_by_short_life]))
def test_outward_sequences_lose_no_byte_at_the_fullest_step(problem: LayoutProblem, sequence) -> None:
    offset, size = first_fit(problem, sequence(problem)), padded(problem)
    steps, live = live_bytes(problem)
    step = steps[live.argmax()] if len(live) else 0
    lives = (problem.born <= step) & (step < problem.dead)
    assert (offset + size)[lives].max(initial=0) == live.max(initial=0)


@PROPERTY
@given(problems())
def test_equal_sizes_by_birth_take_no_more_than_the_bound(drawn: LayoutProblem) -> None:
    problem = make_problem([64] * drawn.num_storages, drawn.born, drawn.dead, 64)
    offset = first_fit(problem, sequences.by_size_and_birth(problem))
    assert arena_bytes(problem, offset) == lower_bound(problem)


def test_long_lived_storages_lie_below_so_that_segments_share_what_is_above() -> None:
    # two saved activations through everything, and two segments of temporaries larger than both
    problem = make_problem([8, 8, 64, 32, 64, 32], [0, 1, 2, 3, 20, 21], [40, 39, 4, 5, 22, 23], 8)
    offset = first_fit(problem, sequences.long_lived_below(problem))
    assert offset.tolist() == [0, 8, 16, 80, 16, 80]


def test_hinted_storages_come_first_by_their_hints() -> None:
    problem = make_problem([8, 8, 64], [0, 0, 0], [9, 9, 9], 8, hint=[8, 0, -1])
    assert first_fit(problem, sequences.by_hint(problem)).tolist() == [8, 0, 16]


def test_a_storage_lies_in_the_gap_of_another() -> None:
    problem = make_problem([16, 16], [0, 3], [9, 6], 8, gaps=[Gap(0, 3, 6)])
    assert first_fit(problem, np.array([0, 1])).tolist() == [0, 0]


def test_a_window_leaves_only_the_rest_of_a_storage_to_others() -> None:
    # during the gap storage 0 needs its bytes 0:8, so that storage 1 begins above them and reaches over its end
    problem = make_problem([16, 16], [0, 3], [9, 6], 8, gaps=[Gap(0, 3, 6, 0, 8)])
    assert first_fit(problem, np.array([0, 1])).tolist() == [0, 8]


def test_a_storage_with_gaps_rises_until_all_its_parts_are_free() -> None:
    # 2 is born onto 0 and, behind its gap, onto 1, which is higher
    problem = make_problem([8, 24, 8], [0, 6, 0], [3, 9, 9], 8, gaps=[Gap(2, 3, 6)])
    assert first_fit(problem, np.array([0, 1, 2])).tolist() == [0, 0, 24]


@PROPERTY
@given(problems(), st.randoms(use_true_random=False))
def test_first_fit_takes_the_lowest_gap(problem: LayoutProblem, dice) -> None:
    sequence = list(range(problem.num_storages))
    dice.shuffle(sequence)
    size, born, dead = room(problem), problem.born.tolist(), problem.dead.tolist()
    offset = [0] * len(size)
    placed: list[int] = []
    for i in sequence:
        if size[i]:
            others = [j for j in placed if born[i] < dead[j] and born[j] < dead[i]]
            offset[i] = next(
                place
                for place in sorted([0, *(offset[j] + size[j] for j in others)])
                if all(place + size[i] <= offset[j] or offset[j] + size[j] <= place for j in others)
            )
            placed.append(i)
    assert first_fit(problem, np.array(sequence, dtype=np.int64)).tolist() == offset


@PROPERTY
@given(problems(), st.integers(0, 5))
def test_improvement_is_valid_and_never_worse(problem: LayoutProblem, rounds: int) -> None:
    layouts = [algorithm(problem) for algorithm in ALGORITHMS.values()]
    before = min(layouts, key=lambda offset: arena_bytes(problem, offset))
    out_of_reach = lower_bound(problem) // 2
    run = Improvement(problem, before, out_of_reach, PATIENT)
    run.go_on(rounds)
    assert is_valid(problem, run.best.tolist())
    assert run.best_arena == arena_bytes(problem, run.best) <= arena_bytes(problem, before)
    assert run.rounds <= rounds


@pytest.mark.parametrize("seed", range(4))
def test_improvement_forgets_the_rounds_that_were_worse(seed: int) -> None:
    problem = training_problem(10, seed)
    before = ALGORITHMS["greedy_by_birth"](problem)
    target = lower_bound(problem) - 1
    turns = Improvement(problem, before, target, PATIENT)
    arenas = []
    for rounds in range(10):
        whole = Improvement(problem, before, target, PATIENT)
        whole.go_on(rounds)
        assert whole.best.tolist() == turns.best.tolist()
        arenas.append(whole.best_arena)
        turns.go_on(1)
    assert arenas == sorted(arenas, reverse=True)
    assert arenas[-1] < arenas[0]


@PROPERTY
@given(problems())
def test_live_pairs_are_those_that_share_a_step(problem: LayoutProblem) -> None:
    born, dead = problem.born, problem.dead
    share = (born[:, None] < dead) & (born < dead[:, None])
    assert live_pairs(problem) == int(np.triu(share, 1).sum())


@pytest.mark.parametrize("births", [1, 5, 40])
@pytest.mark.parametrize("seed", range(6))
def test_first_fit_in_slices_of_time_is_first_fit(seed: int, births: int) -> None:
    dice = random.Random(seed)
    born = [dice.randrange(100) for _ in range(300)]
    dead = [first + dice.choice((2, 3, 5, 30)) for first in born]
    gaps = [Gap(i, born[i] + 1, dead[i] - 1, 0, 1) for i in range(0, 300, 7) if dead[i] - born[i] > 2]
    problem = make_problem([dice.randrange(1, 30) for _ in born], born, dead, 1, gaps=gaps)
    whole = [first_fit(problem, sequence(problem)).tolist() for sequence in SEQUENCES]
    effort = replace(EFFORT, slice_births=births)
    assert [first_fit(problem, sequence(problem), effort).tolist() for sequence in SEQUENCES] == whole


def test_gap_between_two_storages_is_used_again() -> None:
    # 0 below 1 for all time; 2 dies between them, and 3 takes its place
    problem = make_problem([8, 8, 8, 8], [0, 0, 0, 5], [9, 9, 5, 9], 8)
    offset = first_fit(problem, np.array([0, 2, 1, 3]))
    assert offset.tolist() == [0, 16, 8, 8]


def test_best_fit_puts_the_longest_lived_at_the_bottom() -> None:
    problem = make_problem([8, 8, 8], [2, 0, 1], [3, 9, 4], 8)
    assert best_fit(problem).tolist() == [16, 0, 8]


def test_best_fit_raises_a_stretch_in_which_nothing_fits() -> None:
    # steps 0..1 and 1..2 are filled to 8 and 16; what lives through both sits on the higher
    problem = make_problem([8, 16, 8, 8], [0, 1, 0, 0], [1, 2, 2, 2], 8)
    offset = best_fit(problem).tolist()
    assert is_valid(problem, offset)
    assert arena_bytes(problem, np.array(offset)) == lower_bound(problem) == 32


def test_ctrl_c_still_interrupts_after_cp_sat() -> None:
    script = """
        import signal
        from roamc.solvers.layout.cp_sat import cp_sat
        from roamc.solvers.layout.problem import make_problem

        cp_sat(make_problem([4, 4, 8], [0, 1, 2], [2, 3, 4], 1), floor=8, roof=16, node_limit=1000, seconds=None)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("interrupted")
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "interrupted\n"), ran.stderr
