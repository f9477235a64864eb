"""Two depth-first orders: from the readers down to their operands, and from a result to its readers.

`post_order` is the order in which a compiler evaluates an expression tree: finish one operand, then the next,
then the operator, and start with the operand that needs most room beyond what it leaves (Sethi and Ullman,
JACM 1970; exact on trees, a heuristic on graphs). `last_ready_first` stays with the newest result: of all
operators that can run it takes the one that became ready last.
"""

from itertools import pairwise

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.order.problem import Bytes, OpIndex, OrderProblem, predecessors, successors


def post_order(problem: OrderProblem) -> IntArray:
    """Depth first from the sinks of each stage; the operand with the larger need first: int32[n]."""
    operands = _operands_by_need(problem)
    stage = problem.stage.tolist()
    has_reader = [False] * problem.num_ops
    for op, inputs in enumerate(operands):
        for operand in inputs:
            has_reader[operand] = has_reader[operand] or stage[operand] == stage[op]
    done = [False] * problem.num_ops
    order: list[OpIndex] = []
    for root in range(problem.num_ops):
        if not has_reader[root]:
            _finish(root, operands, done, order)
    return np.array(order, dtype=np.int32)


def last_ready_first(problem: OrderProblem) -> IntArray:
    """Always the ready operator that became ready last; ties in program order: int32[n]."""
    after = successors(problem).lists()
    waits_for = np.diff(predecessors(problem).start).tolist()
    order: list[OpIndex] = []
    for members in _stage_ranges(problem):
        ready = [op for op in reversed(members) if waits_for[op] == 0]
        while ready:
            op = ready.pop()
            order.append(op)
            for successor in reversed(after[op]):
                waits_for[successor] -= 1
                if waits_for[successor] == 0 and successor < members.stop:
                    ready.append(successor)
    return np.array(order, dtype=np.int32)


def _stage_ranges(problem: OrderProblem) -> list[range]:
    cuts = (np.flatnonzero(np.diff(problem.stage)) + 1).tolist()
    bounds = [0, *cuts, problem.num_ops]
    return [range(lo, hi) for lo, hi in pairwise(bounds)]


def _operands_by_need(problem: OrderProblem) -> list[list[OpIndex]]:
    """For each operator its predecessors, the one with the largest (need - result) first."""
    result = _result_bytes(problem).tolist()
    scratch = problem.scratch.tolist()
    operands = predecessors(problem).lists()
    need: list[Bytes] = []
    for op, inputs in enumerate(operands):
        inputs.sort(key=lambda operand: (result[operand] - need[operand], operand))
        held = 0
        most = 0
        for operand in inputs:
            most = max(most, held + need[operand])
            held += result[operand]
        need.append(max(most, held + result[op] + scratch[op]))
    return operands


def _result_bytes(problem: OrderProblem) -> LongArray:
    result = np.zeros(problem.num_ops, dtype=np.int64)
    np.add.at(result, problem.producer, problem.size)
    return result


def _finish(root: OpIndex, operands: list[list[OpIndex]], done: list[bool], order: list[OpIndex]) -> None:
    """Append `root` and everything below it that has not run, operands first."""
    path = [(root, iter(operands[root]))]
    done[root] = True
    while path:
        op, rest = path[-1]
        below = next((operand for operand in rest if not done[operand]), None)
        if below is None:
            order.append(op)
            path.pop()
        else:
            done[below] = True
            path.append((below, iter(operands[below])))
