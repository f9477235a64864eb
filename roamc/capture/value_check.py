"""What capture rewrites is judged by value, as what passes rewrite is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from roamc.graph import TrainGraph, operators, value_flow
from roamc.graph.value_numbers import Flow, Numbers
from roamc.operators import ops


def values_of(graph: TrainGraph) -> Flow | None:
    """The values of ``graph`` as they are; None where nothing is written, so that nothing is rewritten."""
    if not any(_writes(node.target) for node in operators(graph.graph)):
        return None
    return value_flow.read(graph, Numbers())


def check(graph: TrainGraph, before: Flow | None, *, handed_over: bool = False) -> Flow | None:
    """Compare the values of ``graph`` with those that :func:`values_of` has found before a rewriting.

    Returns:
        The values of ``graph`` as they are.

    Raises:
        VerifyError: see :func:`value_flow.check`, also for ``handed_over``.
    """
    return None if before is None else value_flow.check(graph, before, "capture", handed_over=handed_over)


@contextlib.contextmanager
def values_kept(graph: TrainGraph) -> Iterator[None]:
    """While inside, writes may become values and values writes; behind it every operator reads what it read before.

    Raises:
        VerifyError: an operator, an output or a tensor of the caller would get another value.
    """
    before = values_of(graph)
    yield
    check(graph, before)


def _writes(target: object) -> bool:
    rule = ops.rule(target)
    return bool(rule.mutates) or rule.part is not None
