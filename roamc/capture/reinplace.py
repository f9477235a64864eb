"""Writes in place, which functionalization has turned into values and copies, as eager has them (reinplacing).

AOTAutograd hands over a graph in which operators make values, and copies at its end write them to the caller's tensors.
Run as it stands, it takes memory that eager does not. One rewriting after the other:

    returned_inputs   an output that is a view of a written input is made of the input
    view_writes       a copy in the shape of the part that it is put into is no tensor
    caller_writes     what makes the value of an input writes to the input, or to a part of it
    part_writes       what makes a part of a value writes to that part
    view_writes       a part of a part is put into the whole at once

Judged by value: :mod:`roamc.capture.value_check`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from roamc.capture import value_check
from roamc.capture.caller_writes import to_callers
from roamc.capture.part_writes import to_parts
from roamc.capture.returned_inputs import return_views_of_inputs
from roamc.capture.sharing import Half
from roamc.capture.view_writes import put_at_once, without_copies
from roamc.compat import FakeTensorMode
from roamc.graph import Phase, TrainGraph, output_values


def reinplace(
    graph: TrainGraph, mode: FakeTensorMode | None, phase: dict[str, Phase], saved: Iterable[fx.Node] = ()
) -> None:
    """Put writes in place back into a graph of AOTAutograd's, where eager has them.

    Args:
        graph: changed in place. Its outputs keep their values; views of a value that is written to an input become
            views of the input.
        mode: the fake mode of its tensors; None for a graph without tensors, which stays as it is.
        phase: node name to phase, changed in place with the graph.
        saved: nodes whose values are saved for backward; they stay.

    Raises:
        VerifyError: an operator, an output or a tensor of the caller would get another value.
    """
    if mode is None:
        return
    values = value_check.values_of(graph)
    return_views_of_inputs(graph.graph, mode, phase)
    values = value_check.check(graph, values, handed_over=True)
    named = {node.name for node in (*output_values(graph.graph), *saved) if node is not None}
    erased = set(without_copies(graph.graph, mode, named))
    half = Half(graph.graph, mode, phase, named)
    for exchange in (to_callers, to_parts):
        for node in list(graph.graph.nodes):
            if node.name not in erased:
                erased.update(exchange(half, node))
    erased.update(put_at_once(graph.graph, mode, named))
    for name in erased:
        del phase[name]
    value_check.check(graph, values)
