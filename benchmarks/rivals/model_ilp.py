"""MODeL (OLLA), Steiner and others, arXiv 2210.12924: order, then offsets, as two integer programs.

The formulation is theirs (github.com/facebookresearch/MODel_opt), the solver is CP-SAT on one thread in place
of Gurobi. Time is cut into 1.01 times as many steps as the longest path has operators, and several operators
may share a step. With generate G[v,t] (operator v runs at step t, inside its earliest and latest step) and
preserve P[e,t] (tensor e is kept from before step t):

    sum over t of G[v,t] = 1                          every operator runs once
    P[e,t] + G[v,t] <= 1                              v produces e
    P[e,t] <= P[e,t-1] + G[v,t-1]                     kept only if it was there
    G[u,t] <= P[e,t]                                  u reads e
    sum over e of size(e) (P[e,t] + G[v,t]) <= peak   every t; minimise peak

An ordering constraint without data is a tensor of no bytes. The second program takes the lives as given, puts
nested long-lived tensors on one another at the bottom by hand, as theirs does, and decides for every other
pair that lives at the same time which of the two lies below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from benchmarks.rivals.precedence import ordering_pairs
from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.layout import LayoutProblem
from roamc.solvers.layout.problem import padded
from roamc.solvers.order import OrderProblem
from roamc.solvers.order.problem import consumers

SLACK = 1.01
ORDER_GAP, LAYOUT_GAP = 0.005, 0.001
"""Where MODeL stops: relative gap of the first and of the second program."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the first program: bytes, the operator that makes it, those that read it."""

    size: int
    producer: int
    readers: tuple[int, ...]
    kept: bool


@dataclass(frozen=True, eq=False)
class Instance:
    """The ordering problem as the first program sees it."""

    num_ops: int
    tensors: tuple[Tensor, ...]

    @cached_property
    def windows(self) -> tuple[list[int], list[int], int]:
        """Earliest and latest step of every operator, and the number of steps."""
        earliest, tail = [0] * self.num_ops, [0] * self.num_ops
        pairs = sorted({(tensor.producer, reader) for tensor in self.tensors for reader in tensor.readers})
        for before, after in pairs:
            earliest[after] = max(earliest[after], earliest[before] + 1)
        for before, after in reversed(pairs):
            tail[before] = max(tail[before], tail[after] + 1)
        steps = math.ceil(SLACK * (max(earliest, default=0) + 1))
        return earliest, [steps - 1 - behind for behind in tail], steps


def instance(problem: OrderProblem) -> Instance:
    """Tensors of the problem's buffers, and one of no bytes per operator that others merely wait for."""
    readers = consumers(problem).lists()
    rows = zip(problem.size.tolist(), problem.producer.tolist(), readers, problem.kept.tolist(), strict=True)
    tensors = [Tensor(size, producer, tuple(ops), kept) for size, producer, ops, kept in rows]
    waiting: dict[int, list[int]] = {}
    for before, after in ordering_pairs(problem):
        waiting.setdefault(before, []).append(after)
    tensors += [Tensor(0, op, tuple(after), False) for op, after in waiting.items()]
    return Instance(problem.num_ops, tuple(tensors))


def order(problem: OrderProblem, seconds: float) -> tuple[IntArray | None, str]:
    """The order (None if none was found in time) and CP-SAT's status; operators of one step in program order."""
    graph = instance(problem)
    model = cp_model.CpModel()
    earliest, latest, _ = graph.windows
    generate = [{t: model.new_bool_var("") for t in range(earliest[op], latest[op] + 1)} for op in range(graph.num_ops)]
    for choices in generate:
        model.add_exactly_one(choices.values())
    _minimise_peak(model, graph, generate, _preserve(model, graph, generate))
    solver, status = _solve(model, seconds, ORDER_GAP)
    if status not in ("OPTIMAL", "FEASIBLE"):
        return None, status
    step = [next(t for t, chosen in choices.items() if solver.value(chosen)) for choices in generate]
    return np.lexsort((np.arange(graph.num_ops), step)).astype(np.int32), status


def _preserve(model: Any, graph: Instance, generate: list[dict[int, Any]]) -> list[dict[int, Any]]:
    """P[e,t] with the constraints that tie it to G."""
    _, latest, steps = graph.windows
    preserve = []
    for tensor in graph.tensors:
        produced = generate[tensor.producer]
        end = steps - 1 if tensor.kept else max((latest[op] for op in tensor.readers), default=-1)
        keep = {t: model.new_bool_var("") for t in range(min(produced) + 1, end + 1)}
        for t, kept in keep.items():
            if t in produced:
                model.add_at_most_one(kept, produced[t])
            model.add_bool_or(
                *[~kept], *(from_[t - 1] for from_ in (keep, produced) if t - 1 in from_)
            )  # kept <= kept before + produced before
        for reader in tensor.readers:
            for t, runs in generate[reader].items():
                model.add_implication(runs, keep[t])
        if tensor.kept:
            model.add_bool_or(*(from_[steps - 1] for from_ in (keep, produced) if steps - 1 in from_))
        preserve.append(keep)
    return preserve


def _minimise_peak(model: Any, graph: Instance, generate: list[dict[int, Any]], preserve: list[dict[int, Any]]) -> None:
    """The objective; sizes are divided by what divides them all."""
    unit = math.gcd(*(tensor.size for tensor in graph.tensors)) or 1
    peak = model.new_int_var(0, sum(tensor.size for tensor in graph.tensors) // unit, "peak")
    for t in range(graph.windows[2]):
        terms = [
            (tensor.size // unit) * from_[t]
            for tensor, keep in zip(graph.tensors, preserve, strict=True)
            for from_ in (keep, generate[tensor.producer])
            if tensor.size and t in from_
        ]
        model.add(sum(terms) <= peak)
    model.minimize(peak)


def layout(problem: LayoutProblem, seconds: float) -> tuple[LongArray | None, str]:
    """Offsets in bytes, int64[n] (None if none was found in time), and CP-SAT's status."""
    size = padded(problem)
    fixed = pyramid(problem)
    unit = problem.alignment
    model = cp_model.CpModel()
    rows = np.flatnonzero(size).tolist()
    height = int(size.sum()) // unit
    top = model.new_int_var(0, height, "arena")
    offset: dict[int, Any] = {
        row: fixed[row] // unit if row in fixed else model.new_int_var(0, height - int(size[row]) // unit, "")
        for row in rows
    }
    for row in rows:
        model.add(offset[row] + int(size[row]) // unit <= top)
    for one, other in _meeting(problem, rows):
        if one in fixed and other in fixed:
            continue
        below = model.new_bool_var("")
        model.add(offset[one] + int(size[one]) // unit <= offset[other]).only_enforce_if(below)
        model.add(offset[other] + int(size[other]) // unit <= offset[one]).only_enforce_if(~below)
    model.minimize(top)
    solver, status = _solve(model, seconds, LAYOUT_GAP)
    if status not in ("OPTIMAL", "FEASIBLE"):
        return None, status
    offset_bytes = np.zeros(problem.num_storages, dtype=np.int64)
    for row in rows:
        offset_bytes[row] = fixed[row] if row in fixed else unit * solver.value(offset[row])
    return offset_bytes, status


def pyramid(problem: LayoutProblem) -> dict[int, int]:
    """Storages that are stacked at the bottom, each living within the life of the one below: row to offset."""
    size = padded(problem)
    life = problem.dead.astype(np.int64) - problem.born
    offsets: dict[int, int] = {}
    first, end, height = 0, int(problem.dead.max(initial=0)), 0
    for row in np.lexsort((problem.born, -size, -life)).tolist():
        if size[row] and first <= problem.born[row] and problem.dead[row] <= end:
            offsets[row] = height
            first, end, height = int(problem.born[row]), int(problem.dead[row]), height + int(size[row])
    return offsets


def meetings(problem: LayoutProblem) -> int:
    """How many pairs live at the same time: the size of the second program."""
    return len(_meeting(problem, np.flatnonzero(padded(problem)).tolist()))


def _meeting(problem: LayoutProblem, rows: list[int]) -> list[tuple[int, int]]:
    born, dead = problem.born.tolist(), problem.dead.tolist()
    return [
        (one, other)
        for place, one in enumerate(rows)
        for other in rows[place + 1 :]
        if born[one] < dead[other] and born[other] < dead[one]
    ]


def _solve(model: Any, seconds: float, gap: float) -> tuple[Any, str]:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.relative_gap_limit = gap
    return solver, solver.status_name(solver.solve(model))
