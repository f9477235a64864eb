"""The order that drops are made in: nothing that no rerun can free waits in it."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.order import OrderProblem, make_problem, peak_bytes
from roamc.solvers.retain import make_problem as make_retain
from roamc.solvers.retain import reference_order, solve, validate
from roamc.solvers.status import Status
from tests.solvers.order.cases import PROPERTY
from tests.solvers.order.cases import problems as order_problems
from tests.solvers.retain.cases import legal_sequence


@PROPERTY
@given(order_problems(10, stages=1), st.integers(0, 1000))
def test_it_is_legal_and_its_peak_no_higher(order: OrderProblem, seed: int) -> None:
    sequence = np.array(legal_sequence(order, random.Random(seed)), dtype=np.int32)
    reference = reference_order(order, sequence)
    everything = [True] * order.num_ops, [False] * order.num_buffers
    make_retain(order, reference, [0.0] * order.num_ops, *everything)
    assert peak_bytes(order, reference) <= peak_bytes(order, sequence)


@PROPERTY
@given(order_problems(10))
def test_stages_stay_in_their_sequence(order: OrderProblem) -> None:
    reference = reference_order(order, np.arange(order.num_ops, dtype=np.int32))
    assert (np.diff(order.stage[reference]) >= 0).all()


def test_updates_that_wait_no_longer_hide_a_budget() -> None:
    """A gradient step makes a gradient from a saved buffer and the flow; the updates come last, and cannot be rerun."""
    blocks = 6
    forward, backward, update = range(blocks), range(blocks, 2 * blocks), range(2 * blocks, 3 * blocks)
    buffers = [(100, op, [*({op + 1} - {blocks}), 2 * blocks - 1 - op], False) for op in forward]
    buffers += [(1, op, [*({op + 1} - {2 * blocks})], False) for op in backward]
    buffers += [(90, op, [op + blocks], False) for op in backward]
    order = make_problem([0] * 3 * blocks, [], buffers)
    sequence = np.arange(3 * blocks, dtype=np.int32)
    once = [op in update for op in range(3 * blocks)]
    droppable = [producer < blocks for producer in order.producer.tolist()]
    rest = [1.0] * 3 * blocks, [not one for one in once], droppable
    late = make_retain(order, sequence, *rest)
    prompt = make_retain(order, reference_order(order, sequence), *rest)
    assert solve(late, 450).status is Status.INFEASIBLE
    solution = solve(prompt, 450)
    assert validate(prompt, 450, solution).good
    assert solution.peak_bytes <= 450


def test_what_reads_nothing_runs_when_it_is_needed() -> None:
    """Operators 0 to 2 draw masks in turn, 3 to 5 read one each and what came before; 2 waits for the second stage."""
    buffers = [(10, 0, [3], False), (10, 1, [4], False), (10, 2, [5], False), (1, 3, [4], False), (1, 4, [5], False)]
    order = make_problem([0, 0, 0, 0, 0, 2], [(0, 1), (1, 2)], buffers)
    assert reference_order(order, np.arange(6, dtype=np.int32)).tolist() == [0, 3, 1, 4, 2, 5]
