"""Which operators of a captured graph run again what forward has run, as those of ``torch.utils.checkpoint`` do."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from roamc.operators import ops
from roamc.operators.call import call_of


def second_runs(graph: fx.Graph, forward: Collection[fx.Node]) -> set[fx.Node]:
    """Return the operators of ``graph`` outside of ``forward`` that compute what one in ``forward`` has computed.

    A random operator counts as drawing the same again.

    Args:
        graph: in program order.
        forward: its operators of forward.
    """
    numbers: dict[fx.Node, int] = {}
    forward_numbers: dict[str, int] = {}
    again: set[fx.Node] = set()
    for node in graph.nodes:
        numbers[node] = len(numbers)
        if node.op != "call_function":
            continue
        if ops.rule(node.target).renames:
            numbers[node] = numbers[node.all_input_nodes[0]]
            continue
        call = call_of(node)
        key = f"{call.target} {fx.map_arg((call.args, call.kwargs), lambda argument: f'%{numbers[argument]}')}"
        if node in forward:
            forward_numbers.setdefault(key, numbers[node])
        elif key in forward_numbers:
            again.add(node)
        numbers[node] = forward_numbers.get(key, numbers[node])
    return again
