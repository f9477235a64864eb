"""Checkmate, Jain and others, arXiv 1910.02653: the integer program of equation 9, with its U and FREE variables.

In stage t of n operator t runs first; R[t,i]: operator i runs in stage t; S[t,i]: result i is there when it begins:

    minimise sum seconds(i) R[t,i]
    R[t,t] = 1,  R[t,i] = S[t,i] = 0 for i > t,  S[t,t] = 0
    R[t,j] <= R[t,i] + S[t,i]                                              j reads i
    S[t,i] <= R[t-1,i] + S[t-1,i]
    U[t,k] = bytes when operator k of stage t has run:  U[t,0] = sum size(i) S[t,i] + size(0) R[t,0]
    U[t,k] = U[t,k-1] - sum size(i) FREE[t,i,k-1] + size(k) R[t,k] <= budget        i read by k-1, or k-1 itself
    FREE[t,i,k] = 1 where k runs, i is not there in stage t + 1, and none of its readers behind k runs in stage t

The formulation is theirs (their frontier-advancing stages), the solver is CP-SAT on one thread in place of Gurobi.
"""

from __future__ import annotations

import math
from typing import Any

from ortools.sat.python import cp_model

from benchmarks.rivals.one_result import Graph

COST = 1_000_000
"""The dearest operator's time, as a whole number."""

Vars = dict[tuple[int, int], Any]


def rerun(graph: Graph, budget: int, seconds: float) -> tuple[list[tuple[int, int]] | None, str]:
    """(Step in front of which, operator) of each rerun, None if none were found in time, and CP-SAT's status."""
    model, n = cp_model.CpModel(), len(graph.size)
    run: Vars = {(t, i): _run(model, graph, t, i) for t in range(n) for i in range(t + 1)}
    save: Vars = {
        (t, i): model.new_constant(1) if graph.kept[i] else model.new_bool_var("")
        for t in range(1, n + 1)
        for i in range(min(t, n))
    }
    for (t, i), there in save.items():
        model.add(there <= run[t - 1, i] + save.get((t - 1, i), 0))
    for (t, j), runs in run.items():
        for i in graph.reads[j]:
            model.add(runs <= run[t, i] + save.get((t, i), 0))
    for stage in range(n):
        _stage(model, graph, budget, stage, run, save)
    most = max(graph.seconds) or 1.0
    model.minimize(sum(round(COST * graph.seconds[i] / most) * runs for (t, i), runs in run.items() if i < t))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.status_name(solver.solve(model))
    if status not in ("OPTIMAL", "FEASIBLE"):
        return None, status
    return [(t, i) for (t, i), runs in run.items() if i < t and solver.value(runs)], status


def _run(model: Any, graph: Graph, stage: int, op: int) -> Any:
    if stage == op:
        return model.new_constant(1)
    return model.new_bool_var("") if stage <= graph.last[op] else model.new_constant(0)


def _stage(model: Any, graph: Graph, budget: int, t: int, run: Vars, save: Vars) -> None:
    """The bytes of one stage."""
    unit = math.gcd(*graph.size) or 1
    room = budget // unit
    size = [each // unit for each in graph.size]
    used = sum(size[i] * save[t, i] for i in range(t))
    for k in range(t + 1):
        live = model.new_int_var(0, room, "")
        model.add(live == used + size[k] * run[t, k])
        freed = [size[i] * _free(model, graph, t, i, k, run, save) for i in (*graph.reads[k], k) if size[i]]
        used = live - sum(freed)


def _free(model: Any, graph: Graph, t: int, i: int, k: int, run: Vars, save: Vars) -> Any:
    """Whether result i is freed behind operator k of stage t: exactly where there is no hazard."""
    hazards = [~run[t, k], save[t + 1, i], *(run[t, j] for j in graph.readers[i] if k < j <= t)]
    free = model.new_bool_var("")
    for hazard in hazards:
        model.add_implication(free, ~hazard)
    model.add_bool_or(free, *hazards)
    return free
