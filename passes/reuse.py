"""reuse: write results over an input whose last use this is, instead of into memory of their own (in-place reuse).

    rewrite:  y = t * 2   -->  mul(t, 2, out=t), if nothing reads t afterwards

              bytes of x  ####                      ####
                       t     ####                      ####
                       y        ####                      (in t's bytes)
    checks:   the operator table allows writing over this argument; no later operator uses its storage; argument and
              result have the same shape, strides and dtype; the operator reads that storage in no other geometry

The bits are those of the operator that allocates its result. What may be written over what stands in
:mod:`roamc.rewriting.in_place`.
"""

from __future__ import annotations

from dataclasses import dataclass

from roamc.errors import PlanError
from roamc.graph import TrainGraph
from roamc.graph.memory import MemoryModel, build_memory
from roamc.options import Options
from roamc.rewriting.in_place import PASS, Reuse, all_reuses, due, possible
from roamc.units import Bytes

NAME = PASS


@dataclass(frozen=True)
class Decision:
    """A decision names the operators that write their result over an argument.

    Attributes:
        overwrites: (name of the operator, position of the positional argument that the operator writes its result
            over), in graph order.
        nbytes: sum of the bytes of the results, for which no memory is allocated.
    """

    overwrites: tuple[tuple[str, int], ...]
    nbytes: Bytes


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Let every result take over an argument's bytes if the graph's present order allows that.

    ``options`` are not read, and ``graph`` stays as it is.
    """
    memory = build_memory(graph)
    chosen = due(memory, range(len(memory.operators)), all_reuses(memory))
    return Decision(
        overwrites=tuple((_maker(memory, reuse), reuse.position) for reuse in chosen),
        nbytes=sum(memory.storages[reuse.result].nbytes for reuse in chosen),
    )


def _maker(memory: MemoryModel, reuse: Reuse) -> str:
    """The name of the operator that makes the result."""
    return memory.operators[memory.storages[reuse.result].producer].node.name


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Return the graph with the decision in ``reuse``: each result, with its views, takes over its argument's memory.

    The FX graph stays as it is.

    Raises:
        PlanError: the graph lacks an operator of the decision, the operator cannot write over that argument, or the
            bytes of the results do not add up to ``decision.nbytes``.
    """
    memory = build_memory(graph)
    reuses = possible(memory, range(len(memory.operators)), all_reuses(memory))
    allowed = {(_maker(memory, reuse), reuse.position): memory.storages[reuse.result].nbytes for reuse in reuses}
    for name, position in decision.overwrites:
        if (name, position) not in allowed:
            raise PlanError(f"{name} cannot write over its argument {position} in this graph")
    nbytes = sum(allowed[overwrite] for overwrite in decision.overwrites)
    if decision.nbytes != nbytes:
        raise PlanError(f"the plan says nbytes {decision.nbytes}, and its results have {nbytes}: plan again")
    return graph.replace(reuse=dict(decision.overwrites))
