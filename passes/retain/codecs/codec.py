"""What a codec is: where it fits, and how it writes a value in fewer bytes and reads it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, fx

from roamc.operators.ops import Need
from roamc.units import Bytes


@dataclass(frozen=True)
class Read:
    """One reader of a value.

    Attributes:
        reader: operator that reads it.
        argument: node by which it does: the value's own, or a view of it; a mere other name counts as the value's own.
        position: of that argument; -1 for a keyword or inside of a list.
    """

    reader: fx.Node
    argument: fx.Node
    position: int


@dataclass(frozen=True)
class Saved:
    """A value that backward reads, as a codec sees it.

    Attributes:
        node: stands for it; its tensor fills its storage.
        early: who reads it in forward.
        late: who reads it behind forward, first to last, and looks at its elements.
    """

    node: fx.Node
    early: tuple[Read, ...]
    late: tuple[Read, ...]

    @property
    def tensor(self) -> Tensor:
        """The fake tensor."""
        value: Tensor = self.node.meta["val"]
        return value

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the value."""
        return int(self.tensor.numel() * self.tensor.itemsize)


class Coding(Protocol):
    """How one value is kept smaller. Equal for values of one geometry.

    ``encode`` and ``decode`` are functions of tensors that call ATen operators and nothing else, without regard to
    what is in the tensors: they are traced into the graph. What ``decode`` gives has the shape, the strides and the
    dtype of the value, and leads everybody who reads it behind forward to the same results, or near them by the
    codec's error.
    """

    def __hash__(self) -> int:
        """What was traced for a coding is found again by it."""

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the code."""

    def encode(self, value: Tensor) -> Tensor:
        """The code, in one storage of ``nbytes``."""

    def decode(self, code: Tensor) -> Tensor:
        """What the readers behind forward read."""


@dataclass(frozen=True)
class Codec:
    """One way to keep values smaller.

    Attributes:
        name: in plans and reports.
        error: the most by which what is read off an element may change; 0 for exact.
        fit: the coding of a value; None where this codec does not apply.
        keeps: what of the value is the same after decoding; operators that need more must not read it.
    """

    name: str
    error: float
    fit: Callable[[Saved], Coding | None]
    keeps: Need = Need.ELEMENTS


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as a row, in memory's sequence."""
    return torch.ops.aten.as_strided.default(tensor, [tensor.numel()], [1])  # type: ignore[no-any-return]
