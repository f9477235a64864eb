"""What capture rewrites is judged by value, as what passes rewrite is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from roamc.graph import TrainGraph, operators, value_flow
from roamc.graph.value_numbers import Numbers
from roamc.operators import ops


@contextlib.contextmanager
def values_kept(graph: TrainGraph, *, handed_over: bool = False) -> Iterator[None]:
    """While inside, writes may become values and values writes; behind it every operator reads what it read before.

    Graphs in which nothing is written are not looked at.

    Args:
        graph: changed in place while inside.
        handed_over: outputs of forward may become views of the caller's tensors, see :func:`value_flow.check`.

    Raises:
        VerifyError: an operator, an output or a tensor of the caller would get another value.
    """
    if not any(_writes(node.target) for node in operators(graph.graph)):
        yield
        return
    before = value_flow.read(graph, Numbers())
    yield
    value_flow.check(graph, before, "capture", handed_over=handed_over)


def _writes(target: object) -> bool:
    rule = ops.rule(target)
    return bool(rule.mutates) or rule.patches
