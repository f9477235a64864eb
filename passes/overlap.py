"""overlap: split collectives into a start and a wait, and let other operators run in between.

    rewrite:  dx = mm(g, w); s = all_reduce(dx); dw = mm(g.t(), x); h = f(s)
              -->  dx = mm(g, w); s' = start_all_reduce(dx); dw = mm(g.t(), x); s = wait(s'); h = f(s)
    checks:   the order has every operator once, with the wait of each split collective, and each behind what it needs;
              the peak of live bytes is what the decision says

Argument and result of a split collective live until its wait. Collectives start in the order of the graph, so that it
is the same on all ranks, whatever each of them splits. No order with a higher peak than that of the graph is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roamc.cost import load_profile, prices, workspaces
from roamc.cost.collectives import collectives, exposed_seconds
from roamc.errors import PlanError, VerifyError
from roamc.graph import TrainGraph, copied, main_device
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory, rearranged
from roamc.operators.schemas import group_of
from roamc.options import Options
from roamc.rewriting.arrange import arrange
from roamc.rewriting.in_place import due, wanted
from roamc.rewriting.order_problem import HANDOVER, order_problem
from roamc.rewriting.split import split, splittable, wait_name
from roamc.solvers.arrays import read_only
from roamc.solvers.order import OverlapProblem, overlap
from roamc.units import Bytes, Seconds

NAME = "overlap"


@dataclass(frozen=True)
class Decision:
    """Which collectives are split, and the order of the operators with their waits.

    Attributes:
        collectives: names of the collectives that are split, in graph order.
        order: names of all operators, first to last, ``NAME_wait`` for the wait of collective NAME among them; empty if
            no collective is split.
        peak_bytes: most live bytes at one step behind the pass, results written over arguments where pass reuse will.
        link_seconds: predicted seconds of all collectives, while no other operator runs.
        exposed_seconds: those of them that no other operator hides.
        bound_seconds: lower bound of the exposed seconds for any order, whatever its peak.
        status: ``"optimal"`` if both meet, ``"limit"`` if the search reached its limit, else ``"gap"``.
    """

    collectives: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    peak_bytes: Bytes = 0
    link_seconds: Seconds = 0.0
    exposed_seconds: Seconds = 0.0
    bound_seconds: Seconds = 0.0
    status: str = "optimal"


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose the collectives to split, and an order that hides them; ``graph`` stays as it is.

    Raises:
        VerifyError: the solver's order breaks a constraint, or has a higher peak than the graph's own.
    """
    names = splittable(graph)
    if not names:
        return Decision()
    limits = _peaks(graph, options)
    trial = split(copied(graph), names)
    price = prices(trial, load_profile(main_device(graph), options.profile))
    problem, numbered = _problem(trial, options, price, limits)
    solution = overlap(problem)
    order = [numbered[index] for index in solution.order.tolist() if numbered[index] != HANDOVER]
    step = {name: at for at, name in enumerate(order)}
    apart = tuple(name for name in names if step[wait_name(name)] > step[name] + 1)
    if not apart:
        return Decision()
    joined = {wait_name(name) for name in names}.difference(map(wait_name, apart))
    decided = tuple(name for name in order if name not in joined)
    try:
        behind = arrange(split(copied(graph), apart), decided)
    except PlanError as error:
        raise VerifyError(f"pass {NAME!r}: the solver gave an order that is not legal: {error}") from error
    peaks = _peaks(behind, options)
    if peaks[0] > limits[0] or peaks[1] > limits[1]:
        raise VerifyError(f"pass {NAME!r}: the solver gave an order with the peaks {peaks}, above {limits}")
    return Decision(
        apart,
        decided,
        peaks[0],
        sum(price[node.name] for node in collectives(behind)),
        exposed_seconds(behind, price),
        solution.bound,
        str(solution.status.value),
    )


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Split the collectives that are not split yet, and bring the operators into the decided order, in place.

    Raises:
        PlanError: the graph has no such collective, or the order does not fit the graph.
    """
    if not decision.collectives:
        if decision.order:
            raise PlanError("the plan has an order, and splits no collective: plan again")
        return graph
    names = {node.name for node in graph.graph.nodes}
    return arrange(
        split(graph, [name for name in decision.collectives if wait_name(name) not in names]), decision.order
    )


def _peaks(graph: TrainGraph, options: Options) -> tuple[Bytes, Bytes]:
    """The most live bytes of the graph in its present order, with in-place reuse; without and with workspaces."""
    memory = build_memory(graph)
    order = range(len(memory.operators))
    reused = {one.result: one.reused for one in due(memory, order, wanted(memory, options))}
    live = live_bytes(rearranged(memory, order, reused))
    return int(live.max(initial=0)), int((live + workspaces(memory.operators, graph.threads)).max(initial=0))


def _problem(
    graph: TrainGraph, options: Options, price: Mapping[str, Seconds], limits: tuple[Bytes, Bytes]
) -> tuple[OverlapProblem, list[str]]:
    """A graph whose collectives are split as plain numbers, and the operators' names by their numbers."""
    memory = build_memory(graph)
    own = workspaces(memory.operators, graph.threads).tolist()
    operators, names = order_problem(graph, memory, wanted(memory, options), own)
    number = {name: at for at, name in enumerate(names)}
    seconds = np.array([price.get(name, 0.0) for name in names])
    sent, wait, channel = np.zeros(len(names)), np.full(len(names), -1, np.int32), np.full(len(names), -1, np.int32)
    groups: dict[str, int] = {}
    for node in collectives(graph):
        start = number[node.name]
        if wait_name(node.name) in number:
            wait[start] = number[wait_name(node.name)]
            channel[start] = groups.setdefault(str(group_of(node)), len(groups))
            sent[start], seconds[start] = seconds[start], 0.0
    arrays = read_only(seconds), read_only(wait), read_only(channel), read_only(sent)
    return OverlapProblem(operators, *arrays, *limits), names
