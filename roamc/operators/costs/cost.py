"""One row of the chapter on costs, and the signatures of the formulas in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from roamc.operators.call import Call
from roamc.units import Bytes

Ordered = Callable[[torch.Tensor], bool]
"""From a fake argument to whether a CPU's kernel reads it as it is; if not, the kernel copies it first."""

FlopFormula = Callable[..., int]
"""From the positional arguments of a call, fake tensors for nodes, to FLOPs."""

Workspace = Callable[[Call, torch.Tensor], Bytes]
"""From a call and its first fake result to the bytes beside its arguments and results while it runs."""

Launches = Callable[[Call, torch.Tensor], tuple[int, Bytes]]
"""From a call and its first fake result to a number of kernels, and the bytes that they move together."""


@dataclass(frozen=True)
class Cost:
    """What bounds the time of an operator, what it reads, and its workspace. Positions count its arguments from 0.

    Attributes:
        kind: one of :data:`roamc.operators.costs.kinds.KINDS`; "" for the kind that the operator's tags say.
        flops: formula for the FLOPs of its products; None to use that of ``torch.utils.flop_counter``, if it has one.
        any_dtypes: torch on a CPU has vector code for it even if its arguments differ in dtype.
        exponent: position of the exponent of a power; some exponents cost only multiplications or a root. None if the
            operator is no power.
        causal_blocks: under a causal mask it leaves out only whole blocks of hidden scores, not every hidden score.
        unread: positions of arguments of which it reads no element.
        unread_in_place: replaces ``unread``, unless empty, for the form of the operator that writes in place.
        picks_from: position of a table; of it the operator reads at most one element for each element of its result or
            of another argument. None if it reads all arguments whole.
        written_into: only for kind "scatter": position of the tensor written into, whose elements are not counted as
            work; None if there is none.
        elements: formula for the elements of ``kind`` that it works through; None for those of its largest argument or
            result.
        read_as: position of an argument to a test of its strides; a CPU's kernel copies an argument that fails it.
        like_first: a CPU's kernel copies the second argument unless both have channels last, or neither has.
        workspace: formula for the workspace on a CPU beside the copies of ``read_as`` and ``like_first``; None if that
            is only what arguments take that are converted to another dtype.
        fixed_workspace: formula for what it takes beside ``workspace`` on a CPU, the same for any number of rows; None
            for nothing.
        single_workspace: replaces ``workspace`` where torch computes with one thread; None if they agree.
        thread_workspace: formula for what each of torch's threads takes beside ``workspace``; None for nothing.
        eager_workspace: the same for eager PyTorch, where a kernel of roamc takes another amount; None if they agree.
        launches: formula for the kernels that it launches on a device that is no CPU, one behind the other, and for
            the bytes that all of them move; None for one kernel, which moves arguments and results.
        buffers: formula for tensors that it makes for itself on a device that is no CPU; None for none that are known.
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
    elements: Callable[[Call, torch.Tensor], int] | None = None
    read_as: Mapping[int, Ordered] = field(default_factory=dict)
    like_first: bool = False
    workspace: Workspace | None = None
    fixed_workspace: Workspace | None = None
    single_workspace: Workspace | None = None
    thread_workspace: Workspace | None = None
    eager_workspace: Workspace | None = None
    launches: Launches | None = None
    buffers: Workspace | None = None
