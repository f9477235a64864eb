"""Ranges of the indices that an operator makes, or that it checks: functions for the operator table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx

from roamc.operators.schemas import argument_of


class Range(NamedTuple):
    """Bounds of integers, both included: ``low`` the smallest that can occur, ``high`` the largest."""

    low: int
    high: int


Rule = Callable[[fx.Node], Range]
"""From the node of a call, whose arguments have fake values, to the range of the indices."""


def places(dims: int) -> Rule:
    """Return the rule for indices into the last ``dims`` dimensions of argument ``self`` of a call, flattened."""

    def rule(node: fx.Node) -> Range:
        return _below(math.prod(_shape(node, "self")[-dims:]))

    return rule


def along(node: fx.Node) -> Range:
    """Return the range of indices along dimension ``dim`` of argument ``self`` of the call ``node``.

    Without ``dim`` it is the range of indices into ``self`` flattened.
    """
    shape, dim = _shape(node, "self"), _argument(node, "dim")
    return _below(shape[dim] if isinstance(dim, int) and shape else math.prod(shape))


def rows(node: fx.Node) -> Range:
    """Return the range of indices of the rows, along dimension 0, of argument ``weight`` of the call ``node``."""
    return _below(_shape(node, "weight")[0])


def classes(node: fx.Node) -> Range:
    """Return the range of class labels of the loss ``node``: those that ``self`` scores, and ``ignore_index``."""
    shape, ignored = _shape(node, "self"), int(_argument(node, "ignore_index"))
    scored = _below(shape[1] if len(shape) > 1 else shape[0])
    return Range(min(ignored, scored.low), max(ignored, scored.high))


def _below(count: int) -> Range:
    return Range(0, max(count - 1, 0))


def _argument(node: fx.Node, name: str) -> Any:
    return argument_of(node.target, node.args, node.kwargs, name)


def _shape(node: fx.Node, name: str) -> tuple[int, ...]:
    return tuple(map(int, _argument(node, name).meta["val"].shape))
