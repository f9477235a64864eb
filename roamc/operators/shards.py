"""This rank's part of a tensor that all ranks of a group hold whole.

    y = roamc.own_part(x, ranks, group)      # rows [rank * n, (rank + 1) * n) of x, where n = x.shape[0] // ranks
    m = roamc.own_classes(l, n, i, ranks, group)  # classes l as a rank counts its own, [rank * n, (rank + 1) * n),
                                                  # from 0; FOREIGN for those of other ranks, and where l is i

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

FOREIGN = -100
"""What stands for a class of another rank; torch's losses leave it out unless they are told otherwise."""

LIBRARY.define("own_classes(Tensor input, int classes, int ignored, int group_size, Any group_name) -> Tensor")


def write_own_classes(
    input: Tensor, classes: int, ignored: int, group_size: int, group_name: Any, *, out: Tensor
) -> None:
    """Write ``input`` to ``out``, with this rank's classes counted from 0 and :data:`FOREIGN` for all others.

    ``classes`` is how many each of the ``group_size`` ranks of the process group ``group_name`` has, one rank's behind
    another's. Where ``input`` is ``ignored``, it may be any number.

    Raises:
        RuntimeError: ``input`` has a number that is no class of any rank; on a GPU the error comes later.
    """
    left_out = input == ignored
    valid = (input >= 0) & (input < classes * group_size) | left_out
    torch.ops.aten._assert_async.msg(valid.all(), "a target is out of bounds")
    torch.sub(input, rank_in(group_name) * classes, out=out)
    out.masked_fill_((out < 0) | (out >= classes) | left_out, FOREIGN)


@torch.library.impl(LIBRARY, "own_classes", "CompositeExplicitAutograd")
def _own_classes(input: Tensor, classes: int, ignored: int, group_size: int, group_name: Any) -> Tensor:
    out = input.new_empty(input.shape)
    write_own_classes(input, classes, ignored, group_size, group_name, out=out)
    return out


def _fake_classes(input: Tensor, classes: int, ignored: int, group_size: int, group_name: Any) -> Tensor:
    return input.new_empty(input.shape)


torch.library.register_fake("roamc::own_classes", _fake_classes, lib=LIBRARY)

own_classes: OpOverload = torch.ops.roamc.own_classes.default
"""``roamc::own_classes(target, classes, ignored, group_size, group_name)``: targets as a rank counts its classes."""

KERNELS: dict[OpOverload, Callable[..., None]] = {own_part: write_own_part, own_classes: write_own_classes}
"""Operator of this module to the function that writes its result to ``out``."""
