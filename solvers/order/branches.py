"""Update branches: small groups of operators on which nothing else waits, each moved to where it costs least.

Running a weight update as soon as its gradient exists frees the gradient early but may raise the peak; putting
it off keeps the gradient (ROAM, arXiv 2310.19295, Fig. 7). A branch is a connected set of at most
`Effort.largest_branch` operators whose successors all lie in it. It runs in one go:

    order     . . . . . . . . . . .          inputs of the branch live until it has run,
                    ^ branch                 what it leaves behind lives from there on

so the best place follows from the greatest live bytes before and after each place, in one sweep.
"""

import numpy as np

from roamc.solvers.arrays import BoolArray, IntArray, LongArray
from roamc.solvers.order.effort import EFFORT, NO_LIMIT, Effort
from roamc.solvers.order.evaluate import live_bytes
from roamc.solvers.order.problem import Bytes, OpIndex, OrderProblem, Step, predecessors, successors
from roamc.solvers.order.reuse import positions


def place_branches(
    problem: OrderProblem, order: IntArray, work_limit: int = NO_LIMIT, effort: Effort = EFFORT
) -> tuple[IntArray, int]:
    """Move each branch of a legal order to the place with the lowest peak, then with the lowest sum of live bytes.

    A branch is a connected set of at most `effort.largest_branch` operators on which no operator outside it waits.
    Branches move in the sequence of their first operators, and only where the peak falls, or the sum at the same peak.
    The problem must have one stage. O(branches * (n + b + reads)), vectorised.

    work_limit: no further branch moves once this much work is done; one branch is n / `effort.branch_ops_per_work` + 1.

    Returns the order, int32[n], which is `order` itself if nothing moved, and the work done.
    """
    best, best_cost, work = order, _cost(problem, order), 0
    before = predecessors(problem).lists()
    for branch in branches(problem, effort.largest_branch):
        if work >= work_limit:
            break
        work += 1 + problem.num_ops // effort.branch_ops_per_work
        moved = _moved(problem, best, np.array(branch, dtype=np.int32), before)
        cost = _cost(problem, moved)
        if cost < best_cost:
            best, best_cost = moved, cost
    return best, work


def branches(problem: OrderProblem, largest: int = EFFORT.largest_branch) -> list[list[OpIndex]]:
    """Return disjoint connected sets of at most `largest` operators on which no operator outside the set waits.

    Operators are looked at from the last in program order to the first. One on which nothing waits begins a set. One
    whose successors all are in sets joins these sets to one, if that has at most `largest` operators with it. Any other
    is in no set, so that none of the lists has it.

    Each set is a list of operators in program order; the lists are sorted by their first operators.
    """
    after = successors(problem).lists()
    of = list(range(problem.num_ops))
    members: dict[int, list[OpIndex]] = {}
    for op in range(problem.num_ops - 1, -1, -1):
        joined = {of[other] for other in after[op]}
        size = sum(len(members.get(branch, ())) for branch in joined)
        if -1 in joined or size >= largest:
            of[op] = -1
            continue
        members[op] = sorted([op, *(other for branch in joined for other in members.pop(branch))])
        for other in members[op]:
            of[other] = op
    return sorted(members.values())


def _cost(problem: OrderProblem, order: IntArray) -> tuple[Bytes, Bytes]:
    live = live_bytes(problem, order)
    return int(live.max(initial=0)), int(live.sum())


def _moved(problem: OrderProblem, order: IntArray, branch: IntArray, before: list[list[OpIndex]]) -> IntArray:
    """Return the order with the branch, in its own sequence, at the place that looks best."""
    inside = np.zeros(problem.num_ops, dtype=np.bool_)
    inside[branch] = True
    rest, own = order[~inside[order]], order[inside[order]]
    position = positions(np.concatenate([rest, own]))
    waits_for = [int(position[other]) for op in branch.tolist() for other in before[op] if not inside[other]]
    place = _best_place(problem, position, inside, len(rest), max(waits_for, default=-1) + 1)
    return np.concatenate([rest[:place], own, rest[place:]])


def _best_place(problem: OrderProblem, position: LongArray, inside: BoolArray, end: Step, first: Step) -> Step:
    """Return how many operators of the rest, from `first` to `end`, should run before the branch.

    In-place reuse is not counted here; the caller's comparison counts it. At steps before the place the inputs of the
    branch live on; from the place on what it leaves behind is live.
    """
    buffer_of = np.repeat(np.arange(problem.num_buffers), np.diff(problem.consumer_start))
    by_branch = inside[problem.consumer]
    own = inside[problem.producer]
    last = position[problem.producer].copy()
    np.maximum.at(last, buffer_of[~by_branch], position[problem.consumer[~by_branch]])
    last[problem.kept] = end
    is_input = np.zeros(problem.num_buffers, dtype=np.bool_)
    is_input[buffer_of[by_branch]] = True
    is_input &= ~own & ~problem.kept
    live = _timeline(position[problem.producer[~own]], last[~own] + 1, problem.size[~own], end)
    held = _timeline(last[is_input] + 1, np.full(int(is_input.sum()), end), problem.size[is_input], end)
    left_behind = int(problem.size[own & problem.kept].sum())
    zero = np.zeros(1, dtype=np.int64)
    peak_before = np.maximum.accumulate(np.concatenate([zero, live + held]))
    peak_from = np.maximum.accumulate(np.concatenate([live + left_behind, zero])[::-1])[::-1]
    added_sum = np.concatenate([zero, np.cumsum(held)]) + left_behind * np.arange(end, -1, -1)
    peak = np.maximum(peak_before, peak_from)[first:]
    return first + int(np.lexsort((added_sum[first:], peak))[0])


def _timeline(born: LongArray, dead: LongArray, size: LongArray, steps: Step) -> LongArray:
    """Return the bytes live at each of `steps` steps, int64[steps], for lives [born, dead)."""
    change = np.zeros(steps + 2, dtype=np.int64)
    np.add.at(change, np.minimum(born, steps), size)
    np.subtract.at(change, np.clip(dead, born, steps + 1), size)
    timeline: LongArray = np.cumsum(change)[:steps]
    return timeline
