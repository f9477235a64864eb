"""Capture's rewritings are judged by value, as those of passes are: every operator reads what it read before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from roamc.graph import TrainGraph, operators, value_flow
from roamc.graph.storage_ids import number
from roamc.graph.value_numbers import Flow, Numbers
from roamc.operators import ops


def values_of(graph: TrainGraph) -> Flow | None:
    """Return what operators of ``graph`` read and its outputs hold, each value as a number.

    The result is for :func:`check` after a rewriting. It is None where no operator writes, as capture rewrites nothing
    there.
    """
    if not any(_writes(node.target) for node in operators(graph.graph)):
        return None
    number(graph.graph)
    return value_flow.read(graph, Numbers())


def check(graph: TrainGraph, before: Flow | None, *, handed_over: bool = False) -> Flow | None:
    """Compare the values of ``graph`` with those that :func:`values_of` returned before a rewriting.

    Args:
        graph: after the rewriting.
        before: the values before it; None for no comparison.
        handed_over: whether to compare outputs of forward as they are at its end only, not at the end of the step too.

    Returns:
        The values of ``graph`` now, for the next check; None if ``before`` is None.

    Raises:
        VerifyError: an operator, an output or a tensor of the caller gets another value.
    """
    if before is None:
        return None
    number(graph.graph)
    return value_flow.check(graph, before, "capture", handed_over=handed_over)


@contextlib.contextmanager
def values_kept(graph: TrainGraph) -> Iterator[None]:
    """Context manager: on exit, check that operators, outputs and tensors of the caller have their values on entry.

    Rewrite ``graph`` inside, in place.

    Raises:
        VerifyError: an operator, an output or a tensor of the caller would get another value.
    """
    before = values_of(graph)
    yield
    check(graph, before)


def _writes(target: object) -> bool:
    rule = ops.rule(target)
    return bool(rule.mutates) or rule.part is not None
