"""Moccasin, Bartan and others, arXiv 2304.14463: retention intervals, by constraint programming.

Stage j of the n stages has an event for each of the operators 0 to j, and operator j runs first in the last event of
stage j. Result v is retained in at most C intervals [start, end]; interval 0 starts where v runs first, another, if it
is there, at the event of v in a later stage, where v runs again:

    minimise    sum over v, i >= 1 of seconds(v) a(v,i)
    start(v,i) in {event(j, v): j > v},  start <= end,  end(v,i) < start(v,i+1)
    sum over intervals that cover an event, of size(v) <= budget                    cumulative
    a(v,i) implies, for every u that v reads, some k with start(u,k) < start(v,i) <= end(u,k)

The formulation and C = 2 are theirs, as is a first phase that looks for any schedule within the budget, by minimising
the memory that is needed, and hands it to the second. The solver is CP-SAT on one thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from benchmarks.rivals.one_result import Graph

INTERVALS = 2
"""C, for every result."""

COST = 1_000_000
"""The dearest operator's time, as a whole number."""


@dataclass(frozen=True, eq=False)
class _Program:
    """Variables by operator and interval, the memory that is needed in units, and the cost."""

    model: Any
    start: list[list[Any]]
    end: list[list[Any]]
    active: list[list[Any]]
    room: Any
    cost: Any

    def hint(self, values: Mapping[int, int]) -> None:
        """Begin with these values, by number of the variable."""
        self.model.clear_hints()
        for variable in self.variables():
            if variable.index in values:
                self.model.add_hint(variable, values[variable.index])

    def variables(self) -> list[Any]:
        """Each once: constants are shared."""
        every = [var for rows in (self.start, self.end, self.active) for row in rows for var in row]
        return list({var.index: var for var in every}.values())


def event(stage: int, op: int) -> int:
    """The number of the event of operator ``op`` in a stage not before it."""
    return stage * (stage + 1) // 2 + op


def rerun(graph: Graph, budget: int, seconds: float) -> tuple[list[tuple[int, int]] | None, str]:
    """(Step in front of which, operator) of each rerun, None if none were found in time, and CP-SAT's status."""
    begun = time.perf_counter()
    program = _program(graph, budget)
    program.hint({again.index: 0 for row in program.active for again in row[1:]})
    program.model.minimize(program.room)
    solver, status = _solve(program, begun + seconds)
    unit = _unit(graph)
    if status not in ("OPTIMAL", "FEASIBLE") or solver.value(program.room) > budget // unit:
        return None, "INFEASIBLE" if status in ("OPTIMAL", "INFEASIBLE") else "UNKNOWN"
    values = {variable.index: solver.value(variable) for variable in program.variables()}
    program.hint(values)
    program.model.add(program.room <= budget // unit)
    program.model.minimize(program.cost)
    solver, status = _solve(program, begun + seconds)
    if status not in ("OPTIMAL", "FEASIBLE"):  # no time for the second phase
        return _runs(graph, program, values), "FEASIBLE"
    return _runs(graph, program, {variable.index: solver.value(variable) for variable in program.variables()}), status


def _unit(graph: Graph) -> int:
    return math.gcd(*graph.size) or 1


def _program(graph: Graph, budget: int) -> _Program:
    model, n = cp_model.CpModel(), len(graph.size)
    last = event(n - 1, n - 1)
    start: list[list[Any]] = []
    end: list[list[Any]] = []
    active: list[list[Any]] = []
    for op in range(n):
        stages = range(op + 1, graph.last[op] + 1)
        start.append([model.new_constant(event(op, op))])
        end.append([model.new_int_var(last if graph.kept[op] else event(op, op), last, "")])
        active.append([model.new_constant(1)])
        for _ in range((INTERVALS - 1) * bool(stages)):
            where = cp_model.Domain.from_values([event(stage, op) for stage in stages])
            start[op].append(model.new_int_var_from_domain(where, ""))
            end[op].append(model.new_int_var(0, last, ""))
            active[op].append(model.new_bool_var(""))
    room = _memory(model, graph, budget, start, end, active)
    _reads(model, graph, start, end, active)
    most = max(graph.seconds) or 1.0
    price = [round(COST * each / most) for each in graph.seconds]
    cost = sum(price[op] * again for op, row in enumerate(active) for again in row[1:])
    return _Program(model, start, end, active, room, cost)


def _memory(model: Any, graph: Graph, budget: int, start: Any, end: Any, active: Any) -> Any:
    """Intervals of one result in turn, all of them under a capacity, which is a variable not below the budget."""
    unit, n = _unit(graph), len(graph.size)
    most = event(n - 1, n - 1) + 1
    intervals, demand = [], []
    for op in range(n):
        for i, present in enumerate(active[op]):
            length = model.new_int_var(1, most, "")
            model.add(start[op][i] + length == end[op][i] + 1).only_enforce_if(present)
            behind = end[op][i] + 1
            intervals.append(model.new_optional_interval_var(start[op][i], length, behind, present, ""))
            demand.append(graph.size[op] // unit)
            if i:
                model.add(start[op][i] > end[op][i - 1]).only_enforce_if(present)
                model.add_implication(present, active[op][i - 1])
    room = model.new_int_var(budget // unit, max(sum(graph.size), budget) // unit, "")
    model.add_cumulative(intervals, demand, room)
    return room


def _reads(model: Any, graph: Graph, start: Any, end: Any, active: Any) -> None:
    """Every run finds what it reads inside one of its intervals."""
    for op, row in enumerate(graph.reads):
        for result in row:
            for i, runs in enumerate(active[op]):
                covers = []
                for k, there in enumerate(active[result]):
                    cover = model.new_bool_var("")
                    model.add_implication(cover, there)
                    model.add(start[result][k] < start[op][i]).only_enforce_if(cover)
                    model.add(end[result][k] >= start[op][i]).only_enforce_if(cover)
                    covers.append(cover)
                model.add_bool_or(*covers, ~runs)


def _solve(program: _Program, until: float) -> tuple[Any, str]:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(until - time.perf_counter(), 0.01)
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    return solver, solver.status_name(solver.solve(program.model))


def _runs(graph: Graph, program: _Program, values: Mapping[int, int]) -> list[tuple[int, int]]:
    """The reruns of an answer, given by number of the variable."""
    stage_of = {event(stage, op): stage for op in range(len(graph.size)) for stage in range(op, len(graph.size))}
    return [
        (stage_of[values[start.index]], op)
        for op, rows in enumerate(zip(program.active, program.start, strict=True))
        for again, start in list(zip(*rows, strict=True))[1:]
        if values[again.index]
    ]
