"""retain: what is kept for its later readers, whole or in a smaller form, and what is dropped and made again.

All of it under a budget in bytes of peak. Read ``choose.py`` first."""

from __future__ import annotations

from roamc.graph import TrainGraph
from roamc.passes import reorder
from roamc.passes.retain.choose import Choice
from roamc.passes.retain.compress import Code, compress
from roamc.passes.retain.decide import NOTHING, Decision, decide
from roamc.passes.retain.recompute import Rerun, rerun

__all__ = ["NAME", "NOTHING", "Choice", "Code", "Decision", "Rerun", "apply", "compress", "decide", "rerun"]

NAME = "retain"


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Write the codecs, bring the operators into the decided order and write the reruns between them.

    Raises:
        PlanError: the decision names operators, storages or codecs that there are not.
    """
    if decision.codes:
        graph = compress(graph, [Code(*code[:2]) for code in decision.codes])
    if not decision.reruns:
        return graph
    return rerun(reorder.arrange(graph, decision.order), [Rerun(*again[:3]) for again in decision.reruns])
