"""This rank's part of a tensor that all ranks of a group hold whole.

    y = roamc.own_part(x, ranks, group)      # rows [rank * n, (rank + 1) * n) of x, where n = x.shape[0] // ranks
    m = roamc.own_classes(l, n, i, ranks, group)  # classes l as a rank counts its own, [rank * n, (rank + 1) * n),
                                                  # from 0; FOREIGN for those of other ranks, and where l is i
    j = roamc.own_indices(l, n, i, ranks, group)  # own_part(l, ranks, group), where l is i or in [0, n)

The rank is read where the operator runs, so that all ranks have the same graph, plan and program. The part is a copy:
where it alone is kept, the whole tensor is free.

An index out of range ends the step on all ranks: each looks at those of all ranks before it takes its own. If only the
rank that has the index raised, the others would wait for it in the next collective.
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
        IndexError: as :func:`check_indices` raises.
    """
    check_indices(input, classes * group_size, ignored)
    torch.sub(input, rank_in(group_name) * classes, out=out)
    out.masked_fill_((out < 0) | (out >= classes) | (input == ignored), FOREIGN)


def check_indices(input: Tensor, size: int, ignored: int | None) -> None:
    """Check numbers of classes, or of a table's rows, as torch's losses and look-ups do.

    Args:
        input: the numbers, which all ranks have.
        size: what they must be less than; they must be 0 or more.
        ignored: the class that a loss leaves out, which may be any number; None for rows of a table.

    Raises:
        IndexError: a number is out of range; what torch says where it reads one. On a GPU the error comes later, as
            torch's own does.
    """
    indices = input.to(torch.int64)
    valid = (indices >= 0) & (indices < size)
    if ignored is not None:
        valid |= indices == ignored
    if input.device.type != "cpu":
        torch.ops.aten._assert_async.msg(valid.all(), "an index is out of range")
    elif not valid.all():
        first = int(indices[~valid][0])
        raise IndexError("index out of range in self" if ignored is None else f"Target {first} is out of bounds.")


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

LIBRARY.define("own_indices(Tensor input, int size, int? ignored, int group_size, Any group_name) -> Tensor")


def write_own_indices(
    input: Tensor, size: int, ignored: int | None, group_size: int, group_name: Any, *, out: Tensor
) -> None:
    """Write to ``out`` what :func:`write_own_part` does, once :func:`check_indices` has found all ranks' in range.

    Raises:
        IndexError: as :func:`check_indices` raises.
    """
    check_indices(input, size, ignored)
    write_own_part(input, group_size, group_name, out=out)


@torch.library.impl(LIBRARY, "own_indices", "CompositeExplicitAutograd")
def _own_indices(input: Tensor, size: int, ignored: int | None, group_size: int, group_name: Any) -> Tensor:
    out = _fake(input, group_size, group_name)
    write_own_indices(input, size, ignored, group_size, group_name, out=out)
    return out


def _fake_indices(input: Tensor, size: int, ignored: int | None, group_size: int, group_name: Any) -> Tensor:
    return _fake(input, group_size, group_name)


torch.library.register_fake("roamc::own_indices", _fake_indices, lib=LIBRARY)

own_indices: OpOverload = torch.ops.roamc.own_indices.default
"""``roamc::own_indices(input, size, ignored, group_size, group_name)``: this rank's of indices that are in range."""

KERNELS: dict[OpOverload, Callable[..., None]] = {
    own_part: write_own_part,
    own_classes: write_own_classes,
    own_indices: write_own_indices,
}
"""Operator of this module to the function that writes its result to ``out``."""
