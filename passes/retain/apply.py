"""Apply a decision of pass retain: codecs first, then the order, then the reruns."""

from __future__ import annotations

from roamc.graph import TrainGraph
from roamc.passes.retain.compress import Code, compress
from roamc.passes.retain.decision import Decision
from roamc.rewriting.arrange import arrange
from roamc.rewriting.rerun import Rerun, rerun


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Write the codecs, bring the operators into the decided order and write the reruns between them.

    The FX graph is changed in place.

    Raises:
        PlanError: the decision names unknown operators, storages or codecs, or some that cannot be used so.
    """
    if decision.codes:
        graph = compress(graph, [Code(*code[:2]) for code in decision.codes])
    if decision.order and (decision.codes or decision.reruns):
        graph = arrange(graph, decision.order)
    return rerun(graph, [Rerun(*again[:3]) for again in decision.reruns]) if decision.reruns else graph
