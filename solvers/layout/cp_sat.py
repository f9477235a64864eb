"""Small problems with gaps or fixed storages: rectangles that do not overlap, solved by CP-SAT.

The section search knows storages that are one rectangle each and may lie anywhere. What it does not know goes
here: every part is a rectangle of fixed steps and of a place in the arena that moves with its storage. CP-SAT is
exact on a few dozen of them; on hundreds it is far behind the section search.
"""

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from roamc.solvers.arrays import LongArray
from roamc.solvers.layout.effort import EFFORT, Effort
from roamc.solvers.layout.problem import Bytes, LayoutProblem, padded, parts


@dataclass(frozen=True, eq=False)
class CpSatResult:
    """A layout found by CP-SAT, or none.

    offset: int64[n] bytes; None if no layout was found.
    proved: whether it is proved that no layout is lower than `offset`, or, if `offset` is None, that none exists.
    """

    offset: LongArray | None
    proved: bool


def cp_sat(
    problem: LayoutProblem,
    floor: Bytes,
    roof: Bytes,
    node_limit: int,
    seconds: float | None,
    effort: Effort = EFFORT,
) -> CpSatResult:
    """Search for the lowest layout with an arena of at least `floor` and at most `roof` bytes.

    floor: bytes, a lower bound on every arena.
    roof: bytes; below `floor` the answer is that no layout exists.
    node_limit: CP-SAT stops after node_limit / `effort.cp_sat_unit_nodes` units of its deterministic time, and returns
        the best layout so far.
    seconds: a limit on wall-clock time in addition, which makes the answer depend on the machine; None for none.
    effort: its `cp_sat_unit_nodes` says how many nodes one unit of CP-SAT's deterministic time stands for.
    """
    if roof < floor:
        return CpSatResult(None, proved=True)
    model = cp_model.CpModel()
    arena = model.new_int_var(floor, roof, "arena")
    offset = _places(problem, model, arena, roof)
    model.minimize(arena)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    # CP-SAT would leave SIGINT with the system's default: from then on Ctrl-C would end the process without a word.
    solver.parameters.catch_sigint_signal = False
    solver.parameters.max_deterministic_time = max(node_limit / effort.cp_sat_unit_nodes, 0.01)
    if seconds is not None:
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        solved_offset = np.array([solver.value(place) for place in offset], dtype=np.int64)
        return CpSatResult(solved_offset, status == cp_model.OPTIMAL)
    return CpSatResult(None, status == cp_model.INFEASIBLE)


def _places(
    problem: LayoutProblem, model: cp_model.CpModel, arena: cp_model.IntVar, roof: Bytes
) -> list[cp_model.LinearExprT]:
    """Offsets in bytes as expressions; storages without bytes lie where they are fixed, or at 0."""
    rectangle, size = parts(problem), padded(problem).tolist()
    offset: list[cp_model.LinearExprT] = []
    times, spaces = [], []
    for storage, fixed in enumerate(problem.fixed.tolist()):
        unit = int(problem.own_alignment[storage])
        highest = max(roof - size[storage], 0) // unit
        place = unit * model.new_int_var(0, highest, f"place {storage}") if size[storage] else max(fixed, 0)
        offset.append(place)
        if size[storage] == 0:
            continue
        model.add(place + size[storage] <= arena)
        if fixed >= 0:
            model.add(place == fixed)
        for part in range(rectangle.start[storage], rectangle.start[storage + 1]):
            room = int(rectangle.high[part] - rectangle.low[part])
            bottom = place + int(rectangle.low[part])
            life = int(rectangle.dead[part] - rectangle.born[part])
            times.append(model.new_fixed_size_interval_var(int(rectangle.born[part]), life, ""))
            spaces.append(model.new_interval_var(bottom, room, bottom + room, ""))
    model.add_no_overlap_2d(times, spaces)
    return offset
