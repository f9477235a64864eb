"""Which collectives of a graph the ranks of a group may run again, and what its ranks must have the same.

A collective that one rank runs again and another does not would wait for ever, or take the bytes of the next one: it
may run again only where all ranks of its group run one plan (:attr:`roamc.graph.TrainGraph.same_plan`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import fx

from roamc.compat_groups import is_planned_for, sums_in_one_order
from roamc.errors import VerifyError, way_out
from roamc.graph.train_graph import Agreement, Phase, Role, SamePlan, TrainGraph, operators, placeholders, tensors_of
from roamc.operators import ops
from roamc.operators.schemas import group_of, name_of
from roamc.operators.table import Together


def runs_together(node: fx.Node, same_plan: Sequence[SamePlan]) -> bool:
    """Return whether ``node`` is a collective that may run again: on all ranks of its group, with the same bits.

    Args:
        node: any operator.
        same_plan: of the graph that ``node`` belongs to.
    """
    gives = ops.rule(node.target).together if same_plan else None
    if gives is None:
        return False
    group = group_of(node)
    return any(plan.group == group and (plan.sums or gives is Together.MOVED) for plan in same_plan)


def plans_apart(graph: TrainGraph) -> object | None:
    """Return the first group over which forward adds up, and whose ranks may run other plans; None if there is none.

    Its ranks hold copies of parameters whose gradients nobody adds up: each rank must get the same bits by itself.

    Args:
        graph: any graph.
    """
    one_plan = {plan.group for plan in graph.same_plan}
    sums = (
        group_of(node)
        for node in operators(graph.graph)
        if graph.phase[node.name] is Phase.FORWARD and ops.rule(node.target).together is Together.SUMMED
    )
    return next((group for group in sums if group not in one_plan), None)


def check_again(graph: TrainGraph, again: Collection[object], after: str) -> None:
    """Check that ranks compare which collectives they run, where a pass has some run again.

    Args:
        graph: what the pass left.
        again: groups of ranks of which more collectives run again than before the pass.
        after: name of the pass, for the message.

    Raises:
        VerifyError: names a group whose ranks do not compare.
    """
    compared = {agreement.group for agreement in graph.agreements}
    missing = next((group for group in again if group not in compared), None)
    if missing is not None:
        raise VerifyError(
            f"after pass {after!r}: collectives of {missing!r} run again, and its ranks do not compare which; "
            f"{way_out(after)}"
        )


def with_same_plan(graph: TrainGraph, groups: Sequence[object]) -> TrainGraph:
    """Return ``graph`` with a note that all ranks of each of ``groups`` run the plan that is made for it.

    Args:
        graph: the captured graph.
        groups: names of groups, as operators are called with them.
    """
    return graph.replace(same_plan=tuple(SamePlan(group, sums_in_one_order(group)) for group in groups))


def with_agreements(graph: TrainGraph, groups: Iterable[object]) -> TrainGraph:
    """Return ``graph`` with an agreement for each of ``groups``: its ranks compare the collectives that they run.

    A rank on which nothing is split or runs again has it as well; else the others would wait for it.

    Args:
        graph: any graph.
        groups: names of groups, as operators are called with them; those that have an agreement keep it.
    """
    compared = {agreement.group for agreement in graph.agreements}
    more = [Agreement(group, (), (), (), "") for group in groups if group not in compared]
    return graph.replace(agreements=(*graph.agreements, *more)) if more else graph


def batch_of(graph: TrainGraph) -> dict[str, str]:
    """Return the name of each tensor that the caller hands in to dtype and sizes, in words."""
    ports = zip(graph.inputs, placeholders(graph.graph), strict=True)
    values = {port.name: node.meta.get("val") for port, node in ports if port.role is Role.INPUT}
    return {name: _described(value) for name, value in values.items() if isinstance(value, torch.Tensor)}


def _described(tensor: torch.Tensor) -> str:
    rows = " with 0 rows" if tensor.shape[:1] == (0,) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{rows}"


def groups(graph: TrainGraph) -> list[object]:
    """Return the groups of ranks that ``graph`` sends to, each once."""
    return list(dict.fromkeys(group_of(node) for node in operators(graph.graph) if ops.rule(node.target).collective))


def planned_groups(graph: TrainGraph) -> list[object]:
    """Return the groups of ``graph`` that need not be there: one process plans for all of their ranks."""
    return [group for group in groups(graph) if is_planned_for(group)]


def collectives_of(graph: TrainGraph, group: object) -> Iterator[str]:
    """Yield a line for each collective of a group, in the order in which they run: what its ranks must have the same.

    Where collectives may run again, it names the operator: of two equal layers, all ranks must gather the same one.

    Args:
        graph: any graph.
        group: name of the group, as operators are called with it.
    """
    named = any(each.group == group for each in graph.same_plan)
    for node in operators(graph.graph):
        if group_of(node) == group:
            sizes = "" if "all_to_all" in name_of(node.target) else [tuple(t.shape) for _, t in tensors_of(node)]
            dtypes = [str(tensor.dtype) for _, tensor in tensors_of(node)]
            name = name_of(node.target).replace("start_", "")  # no matter where a rank waits
            yield f"{name} {node.name if named else ''} {graph.phase[node.name].name} {dtypes} {sizes}"
