"""This rank's part of a tensor that all ranks of a group hold whole.

    y = roamc.own_part(x, ranks, group)      # rows [rank * n, (rank + 1) * n) of x, where n = x.shape[0] // ranks

The rank is read where the operator runs, so that all ranks have the same graph, plan and program. The part is a copy:
where it alone is kept, the whole tensor is free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roamc.compat import OpOverload
from roamc.compat_groups import rank_in
from roamc.operators.random import LIBRARY

LIBRARY.define("own_part(Tensor input, int group_size, Any group_name) -> Tensor")


def write_own_part(input: Tensor, group_size: int, group_name: Any, *, out: Tensor) -> None:
    """Write this rank's rows of ``input`` to ``out``: one of ``group_size`` equal parts of dimension 0, by rank.

    The number of rows is a multiple of ``group_size``, the number of ranks of the process group ``group_name``.
    """
    length = input.shape[0] // group_size
    out.copy_(input.narrow(0, rank_in(group_name) * length, length))


@torch.library.impl(LIBRARY, "own_part", "CompositeExplicitAutograd")
def _own_part(input: Tensor, group_size: int, group_name: Any) -> Tensor:
    out = input.new_empty((input.shape[0] // group_size, *input.shape[1:]))
    write_own_part(input, group_size, group_name, out=out)
    return out


def _fake(input: Tensor, group_size: int, group_name: Any) -> Tensor:
    return input.new_empty((input.shape[0] // group_size, *input.shape[1:]))


torch.library.register_fake("roamc::own_part", _fake, lib=LIBRARY)

own_part: OpOverload = torch.ops.roamc.own_part.default
"""``roamc::own_part(input, group_size, group_name)``: this rank's rows of a tensor that every rank holds."""

KERNELS: dict[OpOverload, Callable[..., None]] = {own_part: write_own_part}
"""Operator of this module to the function that writes its result to ``out``."""
