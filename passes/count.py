"""count: a program whose codecs project takes a number from the process, so that each step has its own projections.

    rewrite:  (first operator of forward)  -->  n = roamc.count(), (first operator of forward)
    checks:   the operator is one of forward, and the graph does not count already

All programs of a process count together. Codec ``compact`` makes its projections from ``n``, in forward and again
behind it, see :mod:`roamc.passes.retain.codecs.compact`. No generator of the user's moves: all random numbers of the
model are those that it draws without the codec.
"""

from __future__ import annotations

from dataclasses import dataclass

from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, copied, operators
from roamc.graph.rewrite import Writer, mode_of
from roamc.operators.projection import COMPACT, count
from roamc.options import Options
from roamc.rewriting.versions import up_to_date

NAME = "count"


@dataclass(frozen=True)
class Decision:
    """A decision says where the program counts its steps.

    Attributes:
        before: name of the operator of forward in front of which it counts; "" if it does not.
    """

    before: str = ""


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Let the program count where ``options.codecs`` names a codec that projects, and there is a backward."""
    named = any(name.partition(":")[0] == COMPACT for name in options.codecs)
    forward = [node.name for node in operators(graph.graph) if graph.phase[node.name] is Phase.FORWARD]
    return Decision(forward[0] if named and forward and Phase.BACKWARD in graph.phase.values() else "")


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Return ``graph`` with the count in its place, on a new FX graph; the given one stays as it is.

    Raises:
        PlanError: the decision names no operator of forward, or the graph counts already.
    """
    if not decision.before:
        return graph
    graph = copied(graph)
    nodes = operators(graph.graph)
    first = next((node for node in nodes if node.name == decision.before), None)
    mode = mode_of(graph.graph)
    if first is None or graph.phase[first.name] is not Phase.FORWARD or mode is None:
        raise PlanError(
            f"this graph has no operator {decision.before!r} of forward, in front of which steps are counted"
        )
    if any(node.target is count for node in nodes):
        raise PlanError("this graph counts its steps already")
    writer = Writer(graph.graph, mode, Phase.FORWARD)
    writer.insert(first, count)
    return up_to_date(graph, {**graph.phase, **writer.phase})
