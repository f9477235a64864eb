"""The min-cut lower bound: for operator v, the least live bytes while v runs over all sets that may run before.

Such a set is the source side of a cut, and its live bytes are the capacity of the cut, in this network:

    operator --endless--> each operator that must run before it
    producer --bytes--> buffer --endless--> each reader           (counts if produced and not yet read by all)
    producer --bytes--> sink                                      (for a kept buffer)

with all that must run before v merged into the source, and v and all that must run after it into the sink. The
bound of v is the least cut plus what comes into being with v. Every order runs v at some point, so the greatest
over all v bounds the peak of every order. (Minimum closures as minimum cuts: Picard, Management Science 1976.)

In-place reuse: a result of v saves the bytes of an input whose other readers have all run. For each set of inputs that
the results could take over together, an input of the set counts in the cut only if one of its other readers is still
to run; the bound of v is the least over the sets. Where there are too many sets, all reusable inputs form one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from roamc.solvers.arrays import BoolArray, IntArray, LongArray
from roamc.solvers.compiled import compiled
from roamc.solvers.order.bound import hottest_ops, reachability_bound
from roamc.solvers.order.effort import EFFORT, Effort
from roamc.solvers.order.evaluate import live_bytes
from roamc.solvers.order.problem import Bytes, OpIndex, OrderProblem, dependencies, reusables

_SOURCE, _SINK = 0, 1
"""The numbers of these two nodes in every network."""

_ENDLESS = 2**61
"""Bytes of an arc that no least cut crosses: more than any memory has, and three of them still fit into int64."""


@dataclass(frozen=True, eq=False)
class _Cut:
    """A least cut: its bytes, the solved network, and how many arcs that has."""

    value: Bytes
    flow: max_flow.SimpleMaxFlow
    arcs: int


@dataclass(frozen=True, eq=False)
class Network:
    """The part of the cut network of a problem with one stage that is the same for every operator; n operators.

    problem: the problem.
    closure: int64[m, 2], pairs (operator, one that must run directly before it), sorted by the latter.
    need: int64[n] bytes, the results and the workspace of each operator.
    buffer, reader: int64[r], the buffer and the operator of each read; only of buffers that have bytes and are not
        kept.
    reusable: for each operator with a result that may take over a buffer, one list of such buffers for each such
        result.
    reuse_sets: up to how many sets of reused inputs of one operator are told apart.
    """

    problem: OrderProblem
    closure: LongArray
    need: LongArray
    buffer: LongArray
    reader: LongArray
    reusable: dict[OpIndex, list[list[int]]]
    reuse_sets: int


def min_cut_bound(
    problem: OrderProblem, order: IntArray, bound: Bytes, work_limit: int, effort: Effort = EFFORT
) -> tuple[Bytes, int]:
    """Return the greatest min-cut bound found, in bytes and at least `bound`, and the work done in arcs.

    The bound of an operator is the least live bytes while it runs, over all sets of operators that may run before it.
    Operators whose step in `order` has more bytes than the bound are tried, by turns the fullest step and the largest
    by reachability, until the bound meets the peak of `order`, `effort.min_cut_patience` operators in a row did not
    raise the bound, or `work_limit` is reached. The problem must have one stage.

    order: int32[n], any legal order; it only chooses the operators.
    bound: bytes, a lower bound that is already known.
    work_limit: arcs to look at, kept but for one operator.
    """
    hottest = hottest_ops(problem, order, bound)[: effort.bounded_ops]
    if len(hottest) == 0:
        return bound, 0
    network = make_network(problem, effort)
    largest = hottest[np.argsort(-reachability_bound(problem, hottest, effort), kind="stable")]
    live_at = dict(zip(order.tolist(), live_bytes(problem, order).tolist(), strict=True))
    work, in_vain = 0, 0
    for op in dict.fromkeys(np.stack([hottest, largest], axis=1).reshape(-1).tolist()):
        if work >= work_limit or in_vain >= effort.min_cut_patience:
            break
        if live_at[op] > bound:
            value, arcs = operator_bound(network, op)
            work += arcs
            in_vain = 0 if value > bound else in_vain + 1
            bound = max(bound, value)
    return bound, work


def make_network(problem: OrderProblem, effort: Effort = EFFORT) -> Network:
    """Return the part of the cut network that all operators of a problem with one stage share.

    effort: `effort.reuse_sets` is the number of sets of reused inputs of one operator that are told apart.
    """
    need = problem.workspace.copy()
    np.add.at(need, problem.producer, problem.size)
    buffer = np.repeat(np.arange(problem.num_buffers), np.diff(problem.consumer_start))
    reader = problem.consumer.astype(np.int64)
    counts = (problem.size > 0)[buffer] & ~problem.kept[buffer]
    reusable: dict[OpIndex, list[list[int]]] = {}
    rows = reusables(problem).lists()
    for result in np.flatnonzero(np.diff(problem.reusable_start)).tolist():
        reusable.setdefault(int(problem.producer[result]), []).append(rows[result])
    closure = dependencies(problem)[:, ::-1].astype(np.int64)
    return Network(problem, closure, need, buffer[counts], reader[counts], reusable, effort.reuse_sets)


def operator_bound(network: Network, op: OpIndex, later: Sequence[OpIndex] | IntArray = ()) -> tuple[Bytes, int]:
    """Return the least live bytes while `op` runs, if all of `later` run after `op`, and the number of arcs looked at.

    No order in which all of `later` run after `op` has a lower peak; with `later` empty, no order has.

    network: of the problem, made by `make_network`.
    later: operators that `op` does not wait for.
    """
    cuts = _cuts(network, op, later)
    return min(cut.value for cut in cuts) + int(network.need[op]), sum(cut.arcs for cut in cuts)


def least_before(network: Network, op: OpIndex) -> tuple[Bytes, BoolArray, int]:
    """Return the least live bytes while `op` runs, a set that attains them, and the number of arcs looked at.

    The set, bool[n], is true for the operators that run before `op`; with an operator, all that the operator waits for
    are in the set.

    network: of the problem, made by `make_network`.
    """
    cuts = _cuts(network, op, ())
    least = min(cuts, key=lambda cut: cut.value)
    node = contracted(network, op)
    before = node == _SOURCE
    before |= np.isin(node, least.flow.get_source_side_min_cut()) & (node != _SINK)
    return least.value + int(network.need[op]), before, sum(cut.arcs for cut in cuts)


def _cuts(network: Network, op: OpIndex, later: Sequence[OpIndex] | IntArray) -> list[_Cut]:
    """Return a least cut for each set of inputs that the results of `op` could take over together."""
    node = contracted(network, op, later)
    return [
        _least_cut(network, node, op, reused) for reused in _choices(network.reusable.get(op, []), network.reuse_sets)
    ]


def _choices(rows: list[list[int]], most: int) -> list[tuple[int, ...]]:
    """Return the largest sets of inputs that the results of an operator could take over together.

    If these would be more than `most`, or it has several results, one set of all inputs stands for them.
    """
    everything = tuple(sorted({reused for row in rows for reused in row}))
    if len(everything) <= len(rows) or len(rows) > 1 or len(everything) > most:
        return [everything]
    return [(reused,) for reused in everything]


def contracted(network: Network, op: OpIndex, later: Sequence[OpIndex] | IntArray = ()) -> LongArray:
    """Return the node of each operator in the network of `op`: int64[n].

    The node is 0, the source, for an operator that must run before `op`; 1, the sink, for `op`, for `later` and for
    operators that must run after `op` or after one of `later`; else a number of its own from 2 on.
    """
    node = np.arange(2, network.problem.num_ops + 2)
    node[np.asarray(later, dtype=np.int64)] = _SINK
    _contract(node, op, network.closure)
    return node


@compiled
def _contract(node: LongArray, op: OpIndex, closure: LongArray) -> None:
    """`closure` is sorted by the operator that runs before, so one sweep each way reaches everything."""
    node[op] = _SINK
    for row in range(len(closure)):
        if node[closure[row, 1]] == _SINK:
            node[closure[row, 0]] = _SINK
    is_before = np.zeros(len(node), dtype=np.bool_)
    is_before[op] = True
    for row in range(len(closure) - 1, -1, -1):
        if is_before[closure[row, 0]]:
            is_before[closure[row, 1]] = True
            node[closure[row, 1]] = _SOURCE


def _least_cut(network: Network, node: LongArray, op: OpIndex, reused: tuple[int, ...]) -> _Cut:
    """Return a cut with the least bytes live just before `op` that stay while it runs.

    reused: inputs of `op` that count only if another operator is still to read them.
    """
    problem = network.problem
    without = np.isin(network.buffer, reused) & (network.reader == op)
    buffer, reader = network.buffer[~without], network.reader[~without]
    box = problem.num_ops + 2 + np.arange(problem.num_buffers)
    kept = np.flatnonzero(problem.kept & (problem.size > 0))
    read = np.unique(buffer)
    endless = np.full(len(network.closure) + len(buffer), _ENDLESS)
    tail = np.concatenate([node[network.closure[:, 0]], box[buffer], node[problem.producer[read]]])
    head = np.concatenate([node[network.closure[:, 1]], node[reader], box[read]])
    tail = np.concatenate([tail, node[problem.producer[kept]]])
    head = np.concatenate([head, np.full(len(kept), _SINK)])
    capacity = np.concatenate([endless, problem.size[read], problem.size[kept]])
    useful = (tail != head) & (tail != _SINK) & (head != _SOURCE)
    return _max_flow(tail[useful], head[useful], capacity[useful])


def _max_flow(tail: LongArray, head: LongArray, capacity: LongArray) -> _Cut:
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tail, head, capacity)
    if flow.num_nodes() <= _SINK:
        return _Cut(0, flow, len(tail))
    flow.solve(_SOURCE, _SINK)
    return _Cut(int(flow.optimal_flow()), flow, len(tail))
