"""Apply a decision of pass retain: gathers and codecs, then reruns, the order of the solver, and decodes in kernels."""

from __future__ import annotations

from collections.abc import Sequence

from roamc.budget import LIGHT
from roamc.errors import PlanError
from roamc.graph import TrainGraph, operators
from roamc.graph.memory import build_memory
from roamc.graph.ranks import with_agreements
from roamc.passes.retain.compress import Code, compress
from roamc.passes.retain.decision import Decision
from roamc.passes.retain.kernels import decoded_inside
from roamc.passes.retain.problem import ALLOWED, SAFE, able_in
from roamc.rewriting.arrange import arrange
from roamc.rewriting.expiry import guarded
from roamc.rewriting.gathers import gathered_once
from roamc.rewriting.rerun import rerun
from roamc.rewriting.reruns import Rerun


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Write the decision into the graph, and bring its operators into the decision's sequence.

    The FX graph is changed in place; the returned graph holds the same one, and says what the caller may write when
    forward has run. A decision that changes nothing leaves the order of the operators as it is. So does one without a
    sequence: pass reorder finds or has another. Where collectives may run again, the returned graph says that ranks
    have to agree on their sequence, see :attr:`roamc.graph.TrainGraph.agreements`.

    Raises:
        PlanError: ``decision.allowed`` is unknown; a gather that is not to run does not repeat one of forward; the
            graph lacks a storage that is to be encoded; a codec is unknown or does not fit its storage; the reruns do
            not fit the graph, see :func:`roamc.rewriting.reruns.places`; or an operator runs again that is not light,
            where only such may.
    """
    if decision.allowed not in ALLOWED:
        raise PlanError(f"{decision.allowed!r} is none of {', '.join(ALLOWED)}")
    graph = guarded(graph, inputs=decision.allowed == SAFE)  # the judge refuses reruns that read what is marked
    if decision.once:
        graph = gathered_once(graph, decision.once)
    if decision.codes:
        graph = compress(graph, [Code(*code[:2], code[5]) for code in decision.codes])
    _check_allowed(graph, decision)
    if decision.reruns:
        graph = rerun(graph, [Rerun(*again[:4]) for again in decision.reruns])
    graph = with_agreements(graph, [each.group for each in graph.same_plan])
    if decision.sequence and (decision.codes or decision.reruns):
        graph = arrange(graph, _completed(graph, decision.sequence))
    return decoded_inside(graph) if decision.codes else graph


def _completed(graph: TrainGraph, sequence: Sequence[str]) -> list[str]:
    """The operators of ``graph`` in ``sequence``; those that it does not name stay in front of what stands behind them.

    They save a generator's state. What the sequence names and the graph lacks is a first run that nothing reads.
    """
    named = set(sequence)
    ahead: dict[str, list[str]] = {}
    waiting: list[str] = []
    for operator in build_memory(graph).operators:
        waiting.append(operator.node.name)
        if operator.node.name in named:
            ahead[operator.node.name], waiting = waiting, []
    return [each for name in sequence for each in ahead.get(name, ())]


def _check_allowed(graph: TrainGraph, decision: Decision) -> None:
    """Refuse reruns that are not light where only such may be.

    Whether an operator can run again at all is seen when that is written.

    Raises:
        PlanError: names the operator.
    """
    if decision.allowed != LIGHT:
        return
    nodes, able = {node.name: node for node in operators(graph.graph)}, able_in(graph, LIGHT)
    for _, name, *_ in decision.reruns:
        if name in nodes and not able(nodes[name]):
            raise PlanError(f"{name} would run again, and only light operators may under {LIGHT!r}: plan again")
