"""Apply a decision of pass retain: codecs first, then the order, then the reruns."""

from __future__ import annotations

from roamc.budget import LIGHT
from roamc.errors import PlanError
from roamc.graph import TrainGraph, operators
from roamc.passes.retain.compress import Code, compress
from roamc.passes.retain.decision import Decision
from roamc.passes.retain.problem import ALLOWED
from roamc.rewriting.arrange import arrange
from roamc.rewriting.rerun import Rerun, rerun


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Write the codecs, bring the operators into the decided order and write the reruns between them.

    The FX graph is changed in place; the returned graph holds the same one. A decision without codecs and reruns leaves
    the graph as it is, the order of its operators included.

    Raises:
        PlanError: ``decision.allowed`` is unknown; the graph lacks an operator or storage of the decision; a codec is
            unknown or does not fit its storage; or an operator cannot run again, or may not under ``allowed``.
    """
    if decision.allowed not in ALLOWED:
        raise PlanError(f"{decision.allowed!r} is none of {', '.join(ALLOWED)}")
    if decision.codes:
        graph = compress(graph, [Code(*code[:2]) for code in decision.codes])
    if decision.order and (decision.codes or decision.reruns):
        graph = arrange(graph, decision.order)
    _check_allowed(graph, decision)
    return rerun(graph, [Rerun(*again[:3]) for again in decision.reruns]) if decision.reruns else graph


def _check_allowed(graph: TrainGraph, decision: Decision) -> None:
    """Refuse reruns that are not light where only such may be.

    Whether an operator can run again at all is seen when that is written.

    Raises:
        PlanError: names the operator.
    """
    if decision.allowed != LIGHT:
        return
    nodes = {node.name: node for node in operators(graph.graph)}
    for _, name, *_ in decision.reruns:
        if name in nodes and not ALLOWED[LIGHT](nodes[name]):
            raise PlanError(f"{name} would run again, and only light operators may under {LIGHT!r}: plan again")
