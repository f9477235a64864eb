"""What a codec is: where it fits, and how it writes a value in fewer bytes and reads it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from roamc.operators.ops import Need
from roamc.operators.table import Kind
from roamc.units import Bytes


@dataclass(frozen=True)
class Read:
    """One reader of a value.

    Attributes:
        reader: the operator that reads the value.
        argument: the node that it reads: the value's own, or a view of it; a mere other name counts as the value's own.
        position: of that argument in ``reader``, see :func:`roamc.graph.reader_kinds.position_in`.
    """

    reader: fx.Node
    argument: fx.Node
    position: int


@dataclass(frozen=True)
class Saved:
    """A value that backward reads, as a codec sees it.

    Attributes:
        node: the node of the value; its tensor fills its storage.
        early: reads in forward, first to last.
        late: reads behind forward that look at elements, first to last.
    """

    node: fx.Node
    early: tuple[Read, ...]
    late: tuple[Read, ...]

    @property
    def tensor(self) -> Tensor:
        """The fake tensor of ``node``."""
        value: Tensor = self.node.meta["val"]
        return value

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the value's elements."""
        return int(self.tensor.numel() * self.tensor.itemsize)


class Coding(ABC):
    """How a codec keeps values of one geometry smaller; codings of values of one geometry are equal.

    ``encode`` and ``decode`` are traced into the graph: they call operators of ATen or roamc only, and do the same
    whatever the tensors hold. ``decode`` returns a tensor with the shape, strides and dtype of the value, from which
    every reader behind forward computes the same result, or one that differs by no more than follows from the codec's
    error. A coding is a frozen dataclass, the key of a cache: equal codings encode and decode alike.
    """

    @property
    def shared(self) -> int:
        """How many of the last nodes that :meth:`beside` returns :meth:`encode` reads too."""
        return 0

    @property
    def error(self) -> float:
        """Of a lossy codec: how far off what readers compute is, in the terms of :attr:`roamc.graph.Encoding.error`."""
        return 0.0

    @property
    def serves(self) -> frozenset[Kind]:
        """Of a lossy codec: the kinds of readers that it may decode for; a value with another is not offered to it."""
        return frozenset()

    @property
    @abstractmethod
    def nbytes(self) -> Bytes:
        """Bytes of the tensor that :meth:`encode` returns."""

    def beside(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return what :meth:`decode` reads besides the code: values of forward, or inputs of the graph, that are there.

        Each fills its storage, and nothing writes it between forward and the readers of the value, see
        :func:`roamc.passes.retain.fits.unfit`. It was made by an operator that reads the value, or is read by one
        that makes such another (a norm's weight), or :meth:`encode` reads it too: the judge of values takes nothing
        else, unless ``decode`` runs the very operators that make the value. Other readers' codecs do not change what is
        read: it is the value itself, or another run of it. Most codings need nothing besides the code.

        Args:
            node: the node of a value with this coding.
        """
        return ()

    @abstractmethod
    def encode(self, value: Tensor, /, *shared: Tensor) -> Tensor:
        """Return the code of ``value``: a tensor whose storage has ``self.nbytes`` bytes.

        Args:
            value: the value.
            shared: the tensors of the last nodes that :meth:`beside` returns, as many as ``self.shared``.
        """

    @abstractmethod
    def decode(self, code: Tensor, /, *beside: Tensor) -> Tensor:
        """Return the tensor that readers behind forward read in place of the value, with its shape, strides and dtype.

        Args:
            code: what :meth:`encode` returned for the value.
            beside: the tensors of the nodes that :meth:`beside` returns.
        """


@dataclass(frozen=True)
class Codec:
    """A codec keeps some saved values in fewer bytes between forward and their readers behind it.

    Attributes:
        name: the name in plans, reports and ``options.codecs``.
        fit: returns the coding of a value; None if this codec does not apply to it.
        keeps: what decoding preserves of each element: its value, or only whether it is above zero. Operators that need
            more than that must not read the decoded tensor.
        lossy: whether its codings have an ``error``. Other codecs change nothing of what ``keeps`` names.
        set_to: of a codec that has settings, a function of their texts by name that returns the codec with these, whose
            name tells all of them: "compact:rank=0.25". It raises an OptionError.
    """

    name: str
    fit: Callable[[Saved], Coding | None]
    keeps: Need = Need.ELEMENTS
    lossy: bool = False
    set_to: Callable[[Mapping[str, str]], Codec] | None = None


def flat(tensor: Tensor) -> Tensor:
    """Return the n elements of a dense tensor of any shape as a view [n], in the sequence of memory."""
    return torch.ops.aten.as_strided.default(tensor, [tensor.numel()], [1])  # type: ignore[no-any-return]
