"""retain: what is kept for its later readers, and what is dropped and made again, under a budget in bytes of peak."""

from __future__ import annotations

from roamc.graph import TrainGraph
from roamc.passes import reorder
from roamc.passes.retain.decide import NOTHING, Decision, Question, choose, decide, question
from roamc.passes.retain.recompute import Rerun, rerun

__all__ = ["NAME", "NOTHING", "Decision", "Question", "Rerun", "apply", "choose", "decide", "question", "rerun"]

NAME = "retain"


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Bring the operators into the decided order and write the reruns between them.

    Raises:
        PlanError: the decision names operators or storages that this graph does not have.
    """
    if not decision.reruns:
        return graph
    return rerun(reorder.arrange(graph, decision.order), [Rerun(*again[:3]) for again in decision.reruns])
