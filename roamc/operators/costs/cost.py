"""One row of the chapter on costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from roamc.operators.call import Call
from roamc.units import Bytes

Ordered = Callable[[torch.Tensor], bool]
FlopFormula = Callable[..., int]
Workspace = Callable[[Call, torch.Tensor], Bytes]
"""From a call and its first result to the bytes beside its arguments and results while it runs."""


@dataclass(frozen=True)
class Cost:
    """What bounds the time of an operator, what it reads, and what it takes for itself.

    Attributes:
        kind: one of :data:`roamc.operators.costs.kinds.KINDS`; "" for what the operator's tags say.
        flops: from its arguments to the multiplications and additions of its products, where
            ``torch.utils.flop_counter`` has no formula in some supported version.
        any_dtypes: torch on a CPU has vector code for it whatever the dtypes of its arguments.
        exponent: position of an exponent, of which some are taken by multiplications or a root.
        causal_blocks: under a causal mask it leaves out whole blocks of hidden scores, not every one.
        unread: positions of arguments of which it reads no element.
        unread_in_place: used instead of ``unread`` when the operator writes in place.
        picks_from: position of the argument of which it reads no more elements than results, or indices, there are.
        written_into: only for kind "scatter": position of the tensor written into, whose elements are not counted as
            work; None if there is none.
        read_as: position of an argument to a test of its strides; a CPU's kernel copies an argument that fails it.
        like_first: a CPU's kernel copies the second argument unless both have channels last, or neither has.
        workspace: bytes that it takes for itself on a CPU; None: only arguments converted to another dtype count.
        eager_workspace: the same in eager PyTorch, where that is not what a kernel of ours takes.
    """

    kind: str = ""
    flops: FlopFormula | None = None
    any_dtypes: bool = False
    exponent: int | None = None
    causal_blocks: bool = False
    unread: tuple[int, ...] = ()
    unread_in_place: tuple[int, ...] = ()
    picks_from: int | None = None
    written_into: int | None = 0
    read_as: Mapping[int, Ordered] = field(default_factory=dict)
    like_first: bool = False
    workspace: Workspace | None = None
    eager_workspace: Workspace | None = None
