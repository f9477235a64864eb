"""What the indices can be that an operator makes, or that it checks: functions for the operator table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx

from roamc.operators.schemas import argument_of


class Range(NamedTuple):
    """The smallest and the largest of what integers can be."""

    low: int
    high: int


Rule = Callable[[fx.Node], Range]
"""From a call of the operator to the range."""


def places(dims: int) -> Rule:
    """Positions in the last ``dims`` dimensions of ``self``, taken as one row."""

    def rule(node: fx.Node) -> Range:
        return _below(math.prod(_shape(node, "self")[-dims:]))

    return rule


def along(node: fx.Node) -> Range:
    """Positions in the dimension ``dim`` of ``self``, or in all of it as one row where no dimension is given."""
    shape, dim = _shape(node, "self"), _argument(node, "dim")
    return _below(shape[dim] if isinstance(dim, int) and shape else math.prod(shape))


def rows(node: fx.Node) -> Range:
    """Rows of ``weight``."""
    return _below(_shape(node, "weight")[0])


def classes(node: fx.Node) -> Range:
    """Classes that ``self`` has a score for, and the number that stands for none of them."""
    shape, ignored = _shape(node, "self"), int(_argument(node, "ignore_index"))
    known = _below(shape[1] if len(shape) > 1 else shape[0])
    return Range(min(ignored, known.low), max(ignored, known.high))


def _below(count: int) -> Range:
    return Range(0, max(count - 1, 0))


def _argument(node: fx.Node, name: str) -> Any:
    return argument_of(node.target, node.args, node.kwargs, name)


def _shape(node: fx.Node, name: str) -> tuple[int, ...]:
    return tuple(map(int, _argument(node, name).meta["val"].shape))
