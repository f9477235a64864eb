"""Orders that hide transfers: legal, within the limits, no worse than the first, and hidden as a plain count says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roamc.solvers.order.evaluate import live_bytes
from roamc.solvers.order.overlap import OverlapProblem, OverlapSolution, lower_bound, overlap
from roamc.solvers.order.problem import OrderProblem, make_problem, without_reuse
from roamc.solvers.status import Status
from tests.solvers.order.cases import PROPERTY, is_legal, problems

MUCH = 2**40


def counted(problem: OverlapProblem, order: list[int]) -> float:
    """Seconds in which the device waits, counted in a way of its own."""
    ends: dict[int, float] = {}
    free: dict[int, float] = {}
    clock = waited = 0.0
    for op in order:
        if problem.channel[op] >= 0:
            channel = int(problem.channel[op])
            free[channel] = max(clock, free.get(channel, 0.0)) + float(problem.sent[op])
            ends[int(problem.wait[op])] = free[channel]
        idle = max(0.0, ends.get(op, 0.0) - clock)
        waited += idle
        clock += idle + float(problem.seconds[op])
    return waited


def with_transfers(base: OrderProblem, chosen: list[int], seconds: list[float]) -> OverlapProblem:
    """``base`` with each of ``chosen`` operators started at its place, and waited for right behind by a new one.

    The wait reads what the operator reads and makes, and stands in front of whoever reads that.
    """
    number: dict[int, int] = {}
    wait_of: dict[int, int] = {}
    count = 0
    for op in range(base.num_ops):
        number[op] = count
        count += 1
        if op in chosen:
            wait_of[op] = count
            count += 1
    stage = [0] * count
    for op in range(base.num_ops):
        stage[number[op]] = stage[wait_of.get(op, number[op])] = int(base.stage[op])
    edges = [(number[before], wait_of[before]) for before in chosen]
    for before, after in base.edges.tolist():
        edges.append((wait_of.get(before, number[before]), number[after]))
    starts = base.consumer_start.tolist()
    buffers = []
    for buffer, maker in enumerate(base.producer.tolist()):
        readers = base.consumer[starts[buffer] : starts[buffer + 1]].tolist()
        edges += [(wait_of.get(maker, number[maker]), number[reader]) for reader in readers]
        users = [number[reader] for reader in readers]
        users += [wait_of[op] for op in (maker, *readers) if op in wait_of]
        buffers.append((int(base.size[buffer]), number[maker], users, bool(base.kept[buffer])))
    operators = make_problem(stage, edges, buffers, None, None)
    taken, sent = np.ones(count), np.zeros(count)
    wait, channel = np.full(count, -1, np.int32), np.full(count, -1, np.int32)
    for at, op in enumerate(chosen):
        taken[number[op]] = taken[wait_of[op]] = 0.0
        wait[number[op]], channel[number[op]], sent[number[op]] = wait_of[op], at % 2, seconds[at]
    limit = int(live_bytes(operators, np.arange(count, dtype=np.int32)).max(initial=0))
    return OverlapProblem(operators, taken, wait, channel, sent, limit, limit)


@st.composite
def overlaps(draw: st.DrawFn) -> OverlapProblem:
    base = without_reuse(draw(problems()))
    few = st.lists(st.integers(0, max(base.num_ops - 1, 0)), unique=True, max_size=min(4, base.num_ops))
    chosen = sorted(draw(few))
    seconds = draw(st.lists(st.sampled_from([0.5, 1.0, 2.5]), min_size=len(chosen), max_size=len(chosen)))
    return with_transfers(base, chosen, seconds)


def judged(problem: OverlapProblem) -> OverlapSolution:
    solution = overlap(problem)
    order = solution.order.tolist()
    assert is_legal(problem.operators, order)
    assert solution.exposed == pytest.approx(counted(problem, order))
    live = live_bytes(problem.operators, solution.order)
    assert solution.need_bytes == live.max(initial=0)
    assert solution.need_bytes <= problem.need_limit
    assert solution.live_bytes <= problem.live_limit
    assert solution.bound <= solution.exposed + 1e-9
    assert (solution.status is Status.OPTIMAL) == (solution.exposed <= solution.bound + 1e-6)
    return solution


@PROPERTY
@given(overlaps())
def test_the_order_is_legal_within_the_limits_and_no_worse(problem: OverlapProblem) -> None:
    solution = judged(problem)
    assert solution.exposed <= counted(problem, list(range(problem.operators.num_ops))) + 1e-9
    assert overlap(problem).order.tolist() == solution.order.tolist()


@PROPERTY
@given(overlaps())
def test_no_legal_order_exposes_less_than_the_bound(problem: OverlapProblem) -> None:
    count = problem.operators.num_ops
    if count > 7:
        return
    legal = [order for order in itertools.permutations(range(count)) if is_legal(problem.operators, list(order))]
    assert lower_bound(problem) <= min((counted(problem, list(order)) for order in legal), default=0.0) + 1e-9


def test_a_wait_stands_behind_work_that_does_not_need_it() -> None:
    # 0 makes what is sent, 1 → 2 is the transfer, 3 and 4 are other work, 5 reads the result
    buffers = [(4, 0, [1, 2], False), (4, 1, [2, 5], False), (1, 3, [5], False), (1, 4, [5], False)]
    operators = make_problem([0] * 6, [(1, 2), (2, 5)], buffers)
    none = np.full(6, -1, np.int32)
    wait, channel = none.copy(), none.copy()
    wait[1], channel[1] = 2, 0
    sent = np.array([0, 2.0, 0, 0, 0, 0])
    problem = OverlapProblem(operators, np.array([1.0, 0, 0, 1, 1, 1]), wait, channel, sent, MUCH, MUCH)
    solution = judged(problem)
    assert solution.order.tolist() == [0, 1, 3, 4, 2, 5]
    assert (solution.exposed, solution.status) == (0.0, Status.OPTIMAL)
    tight = overlap(replace(problem, live_limit=9))  # 3 fits beside both buffers, 4 does not
    assert tight.order.tolist() == [0, 1, 3, 2, 4, 5]
    assert (tight.exposed, tight.live_bytes) == (1.0, 9)
    assert overlap(replace(problem, need_limit=8)).order.tolist() == list(range(6))
    assert overlap(replace(problem, live_limit=0)).exposed == 2.0


def test_transfers_of_one_channel_follow_each_other() -> None:
    # two transfers of 2 seconds each start at once; 2 seconds of work hide one of them, or both on two channels
    operators = make_problem([0] * 6, [(0, 1), (2, 3), (1, 5), (3, 5)], [])
    wait = np.array([1, -1, 3, -1, -1, -1], np.int32)
    sent, taken = np.array([2.0, 0, 2, 0, 0, 0]), np.array([0, 0, 0, 0, 2.0, 0])
    exposed = []
    for channels in ([0, -1, 0, -1, -1, -1], [0, -1, 1, -1, -1, -1]):
        problem = OverlapProblem(operators, taken, wait, np.array(channels, np.int32), sent, MUCH, MUCH)
        exposed.append(judged(problem).exposed)
    assert exposed == [2.0, 0.0]
