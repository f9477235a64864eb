"""reorder: put the operators into the order with the lowest peak of live bytes that the solvers find.

    rewrite:  a = f(x); b = g(x); s = sum(a); t = sum(b)   -->  a = f(x); s = sum(a); b = g(x); t = sum(b)
    checks:   the order is a permutation of the graph's operators and keeps every constraint: data, writes after
              reads, random and collective operators among themselves, the boundary between forward and backward

Views and results picked out of tuples do no work: they move with the operator that they belong to. The constraints
come from :mod:`roamc.graph.memory`, the order from :mod:`roamc.solvers.order`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from roamc import progress
from roamc.errors import OptionError, PlanError, VerifyError
from roamc.graph import TrainGraph, output_node
from roamc.graph.memory import MemoryModel, Place, Storage, build_memory
from roamc.options import Options
from roamc.passes import reuse
from roamc.solvers.order import ALGORITHMS, WORK_LIMIT, OrderProblem, make_problem, solve, validate
from roamc.units import Bytes, format_bytes

NAME = "reorder"

TRIAL_WORK = 1_000_000
"""The order solver's work limit under a budget: several plans are tried, and only those with reruns are hard."""


@dataclass(frozen=True)
class Decision:
    """The chosen order.

    Attributes:
        order: names of all operators (views and picks left out), first to last.
        peak_bytes: live bytes at the worst step.
        bound_bytes: no order of this graph has a lower peak.
        status: ``"optimal"`` if peak and bound meet, else ``"gap"``, or ``"limit"`` if the search reached its limit.
        algorithm: the member of the portfolio that found it.
        candidates: (algorithm, peak) of every member that ran.
        laid_out: (order, bytes of its arena and outside of it) of every order that was laid out to choose among
            orders with no higher peak, the first one included; none if the layout of that did not fall short.
    """

    order: tuple[str, ...]
    peak_bytes: Bytes
    bound_bytes: Bytes
    status: str
    algorithm: str
    candidates: tuple[tuple[str, Bytes], ...]
    laid_out: tuple[tuple[str, Bytes], ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Run the portfolio, or the one algorithm that ``options.order`` names."""
    memory = build_memory(graph)
    if options.order != "best" and options.order not in ALGORITHMS:
        raise OptionError(f"unknown order {options.order!r}; valid: best, {', '.join(ALGORITHMS)}")
    chosen = tuple(ALGORITHMS) if options.order == "best" else (options.order,)
    problem, names = order_problem(graph, memory, () if reuse.NAME in options.disable else reuse.all_reuses(memory))
    limit = WORK_LIMIT if options.limit_bytes is None else TRIAL_WORK
    solution = solve(problem, algorithms=chosen, work_limit=limit, progress=_tell)
    report = validate(problem, solution)
    if not report.good:
        raise VerifyError(f"pass 'reorder': {solution.algorithm} gave an order that is not legal: {report.detail}")
    return Decision(
        order=tuple(names[index] for index in solution.order.tolist() if names[index]),
        peak_bytes=int(solution.peak_bytes),
        bound_bytes=int(solution.bound_bytes),
        status=str(solution.status.value),
        algorithm=solution.algorithm,
        candidates=tuple((name, int(peak)) for name, peak in solution.candidates),
    )


def _tell(peak_bytes: Bytes, bound_bytes: Bytes) -> None:
    progress.say(f"order: peak {format_bytes(peak_bytes)}, no order below {format_bytes(bound_bytes)}")


HANDOVER = ""
"""Stands in the list of names for the moment at which the caller hands the tangents to backward."""


def order_problem(
    graph: TrainGraph, memory: MemoryModel, reuses: Iterable[reuse.Reuse] = (), workspace: Sequence[Bytes] | None = None
) -> tuple[OrderProblem, list[str]]:
    """The graph as plain numbers (stages at the boundary, buffers, constraints), and the name behind each number.

    Between forward and backward stands one operator more, which brings the tangents into being. ``reuses`` are the
    results that may take over the bytes of an argument; ``workspace`` is what each operator of ``memory`` takes for
    itself, to be counted or not.
    """
    names = [op.node.name for op in memory.operators]
    stage = [2 * int(op.phase) if graph.boundary else 0 for op in memory.operators]
    at = memory.boundary
    new = [*range(at), *range(at + 1, len(names) + 1)] if graph.boundary else [*range(len(names))]
    if graph.boundary:
        names.insert(at, HANDOVER)
        stage.insert(at, 1)
    own = [0] * len(stage)
    for operator_, count in zip(new, workspace or (), strict=False):
        own[operator_] = count
    edges = [(new[before], new[after]) for before, after in memory.edges]
    buffers: list[tuple[Bytes, int, list[int], bool]] = []
    number: dict[int, int] = {}
    for storage in buffers_of(memory):
        users = [new[user] for user in memory.uses[storage.index]]
        maker = new[storage.producer] if storage.producer >= 0 else at
        number[storage.index] = len(buffers)
        buffers.append((storage.nbytes, maker, users, storage.place is Place.OUTPUT))
    reusable: list[list[int]] = [[] for _ in buffers]
    for possible in reuses:
        reusable[number[possible.result]].append(number[possible.reused])
    return make_problem(stage, edges, buffers, own, reusable), names


def buffers_of(memory: MemoryModel) -> tuple[Storage, ...]:
    """The storages behind the problem's buffers: all but tangents that nobody uses."""
    return tuple(s for s in memory.counted if s.producer >= 0 or memory.uses[s.index] or s.place is Place.OUTPUT)


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Bring the operators into the decided order.

    Raises:
        PlanError: the decision names other operators than the graph has.
    """
    return arrange(graph, decision.order)


def arrange(graph: TrainGraph, order: Sequence[str]) -> TrainGraph:
    """Move the nodes: picks right behind their operator, views right before the first that reads them.

    Raises:
        PlanError: ``order`` is not a legal order of the graph's operators.
    """
    by_name = {node.name: node for node in graph.graph.nodes}
    wanted = {op.node.name for op in build_memory(graph).operators}
    if set(order) != wanted or len(order) != len(wanted):
        raise PlanError("reorder: the plan's order is not a permutation of this graph's operators")
    placed: dict[fx.Node, None] = {n: None for n in graph.graph.nodes if n.op in ("placeholder", "get_attr")}
    for name in order:
        _place(by_name[name], wanted, placed)
        for user in by_name[name].users:
            if user.target is operator.getitem:
                placed[user] = None
    for argument in output_node(graph.graph).all_input_nodes:
        _place(argument, wanted, placed)
    _relink(graph.graph, list(placed))
    phase = {name: found for name, found in graph.phase.items() if by_name[name] in placed}
    return graph.replace(phase=phase)


def _place(node: fx.Node, wanted: set[str], placed: dict[fx.Node, None]) -> None:
    """List ``node`` behind the views that it reads, which are listed now if they were not before."""
    pending = [node]
    while pending:
        current = pending[-1]
        missing = [n for n in current.all_input_nodes if n not in placed]
        early = [n.name for n in missing if n.name in wanted]
        if early:
            raise PlanError(f"reorder: {current.name} would run before {early[0]}, which it reads")
        if missing:
            pending.extend(missing)
            continue
        placed[current] = None
        pending.pop()


def _relink(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Put the graph's nodes in the order of ``nodes``; views that nothing reads are erased."""
    kept = set(nodes)
    for node in reversed(list(graph.nodes)):
        if node not in kept and node.op == "call_function":
            graph.erase_node(node)
    end = output_node(graph)
    for node in nodes:
        if node.op == "call_function":
            end.prepend(node)
