"""What a rank has of the values of a graph on shards, and the call that stands for an operator there: plain data.

A *row* is what belongs to one token: the leading dimensions of a value count tokens, and the rest is its row. Which
dimensions count tokens follows from the value itself: its elements lie in rows one after the other, so they are the
leading ones whose sizes multiply to the number of tokens. That a value is sharded at all is never told from sizes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx


class Form(enum.Enum):
    """What a rank has of a value of the captured graph.

    Attributes:
        SHARD: the rows of its own tokens.
        SUM: an addend in the value's own shape; the value is the sum over all ranks.
    """

    SHARD = "shard"
    SUM = "sum"


@dataclass(frozen=True)
class Part:
    """An argument in the form of this rank's rows.

    Attributes:
        node: the value of the captured graph.
        expanded: the shape to which the value is expanded first; () for its own.
    """

    node: fx.Node
    expanded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Indices:
    """Numbers of classes or of a table's rows, in the form of this rank's, once those of all ranks are in range.

    Attributes:
        node: the value of the captured graph.
        size: what they must be less than.
        ignored: a number that may be out of range; None for rows of a table.
    """

    node: fx.Node
    size: int
    ignored: int | None


@dataclass(frozen=True)
class Whole:
    """An argument as in the captured graph.

    Attributes:
        node: the value of the captured graph.
        shape: the shape in which it is viewed; None for its own.
    """

    node: fx.Node
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Addend:
    """An argument in the form of this rank's addend; ``node`` is the value of the captured graph, the sum of them."""

    node: fx.Node


@dataclass(frozen=True)
class Turned:
    """An argument that has this rank's rows as its columns.

    Attributes:
        view: the value of the captured graph, a view of a matrix with its dimensions exchanged.
    """

    view: fx.Node

    @property
    def node(self) -> fx.Node:
        """The matrix, of which a rank has rows."""
        return self.view.all_input_nodes[0]


@dataclass(frozen=True)
class Local:
    """The call that stands for an operator of the captured graph on this rank.

    Attributes:
        target: what is called; None if the result is the first argument itself.
        args: positional arguments; :class:`Part`, :class:`Indices`, :class:`Turned`, :class:`Whole` and
            :class:`Addend` stand for tensors.
        forms: form of every result, None for one that is no tensor; a single result counts as one.
        kwargs: keyword arguments, without tensors.
    """

    target: Any
    args: tuple[Any, ...]
    forms: tuple[Form | None, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """What the rules must know of a graph and the region in it.

    Attributes:
        tokens: how many tokens the region's values have.
        ranks: how many ranks share them.
        form: gives the form of a value, None for one that all ranks have whole.
        varies: whether a value may differ from rank to rank.
    """

    tokens: int
    ranks: int
    form: Callable[[fx.Node], Form | None]
    varies: Callable[[fx.Node], bool]

    def lead(self, shape: Sequence[int]) -> int | None:
        """Return how many leading dimensions of ``shape`` count the tokens; None if none do.

        They count the tokens if their sizes multiply to ``tokens``; the fewest such dimensions are taken.
        """
        product = 1
        for position, size in enumerate(shape):
            product *= size
            if product == self.tokens:
                return position + 1
        return None

    def own(self, shape: Sequence[int], lead: int) -> tuple[int, ...]:
        """Return the shape of this rank's rows of a value of ``shape`` whose ``lead`` first dimensions count tokens."""
        return (self.tokens // self.ranks, *shape[lead:])
