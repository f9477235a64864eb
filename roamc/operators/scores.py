"""A negative log-likelihood by the scores of its labels alone: one number for each row, not one for each class.

    picked = roamc.label_scores(scores, labels, [1], False, ignored)   # [rows] of [rows, classes]; 0 without a label
    loss, total = roamc.nll_of_scores(picked, labels, classes, reduction, ignored)

Together they give the bits of ``aten.nll_loss_forward(scores, labels, None, reduction, ignored)``, which they leave the
sum to. A kernel that makes ``scores`` picks them in its registers, so that the log-probabilities need no memory; pass
``scores`` puts the two in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from roamc.compat import OpOverload
from roamc.operators.random import LIBRARY
from roamc.units import Bytes

aten = torch.ops.aten

IGNORED = -100
"""Stands for the labels that a loss leaves out, where classes are no longer told apart."""

BYTES_OF_A_LABEL: Bytes = 10
"""What :func:`write_nll_of_scores` takes for a row while it runs: a label, and two bytes for whether it counts.

:func:`write_label_scores` takes one byte less.
"""

LIBRARY.define("label_scores(Tensor self, Tensor target, int[1] dim, bool keepdim, int ignore_index) -> Tensor")
LIBRARY.define(
    "nll_of_scores(Tensor self, Tensor target, int classes, int reduction, int ignore_index) -> (Tensor, Tensor)"
)


def write_label_scores(
    self: Tensor, target: Tensor, dim: Sequence[int], keepdim: bool, ignore_index: int, *, out: Tensor
) -> None:
    """Write the score of each row's label to ``out``, and 0 where the label is left out or is no class.

    Args:
        self: scores ``[rows, classes]``.
        target: labels ``[rows]``, int64.
        dim: the dimension of the classes, ``[1]``, as for ``aten.sum``.
        keepdim: whether ``out`` has that dimension, with size 1.
        ignore_index: the label that is left out.
        out: is written.
    """
    absent = (target == ignore_index) | (target < 0) | (target >= self.shape[1])
    place = target.masked_fill(absent, 0).unsqueeze(1)
    picked = out if keepdim else out.unsqueeze(1)
    torch.gather(self, 1, place, out=picked)
    picked.masked_fill_(absent.unsqueeze(1), 0)


def write_nll_of_scores(
    self: Tensor, target: Tensor, classes: int, reduction: int, ignore_index: int, *, out: tuple[Tensor, Tensor]
) -> None:
    """Write the loss of labels with the scores ``self``, and how many labels count, to ``out``.

    Args:
        self: what ``label_scores`` gives, ``[rows]``.
        target: labels ``[rows]``, int64.
        classes: how many classes were scored.
        reduction: what is made of the losses of rows, in ATen's numbers: 0 for nothing, 1 for the mean, 2 for the sum.
        ignore_index: the label that is left out.
        out: the loss, as ``self`` for ``reduction`` 0 and else one number, and the number of labels that count.

    Raises:
        IndexError: a label is no class, as ATen's operator says; on a GPU the error comes later, as ATen's does.
    """
    beyond = (target < 0) | (target >= classes)
    labels = beyond.to(torch.int64)  # all that are there score in class 0 of 1
    labels.masked_fill_(target == ignore_index, IGNORED)
    aten.nll_loss_forward.output(
        self.unsqueeze(1), labels, None, reduction, IGNORED, output=out[0], total_weight=out[1]
    )


def _scores(self: Tensor, target: Tensor, dim: Sequence[int], keepdim: bool, ignore_index: int) -> Tensor:
    out = self.new_empty((self.shape[0], 1) if keepdim else (self.shape[0],))
    write_label_scores(self, target, dim, keepdim, ignore_index, out=out)
    return out


def _fake_scores(self: Tensor, target: Tensor, dim: Sequence[int], keepdim: bool, ignore_index: int) -> Tensor:
    return self.new_empty((self.shape[0], 1) if keepdim else (self.shape[0],))


def _nll(self: Tensor, target: Tensor, classes: int, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    out = _fake_nll(self, target, classes, reduction, ignore_index)
    write_nll_of_scores(self, target, classes, reduction, ignore_index, out=out)
    return out


def _fake_nll(self: Tensor, target: Tensor, classes: int, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    return self.new_empty((self.shape[0],) if reduction == 0 else ()), self.new_empty(())


for _name, _run, _fake in (("label_scores", _scores, _fake_scores), ("nll_of_scores", _nll, _fake_nll)):
    torch.library.impl(LIBRARY, _name, "CompositeExplicitAutograd")(_run)
    torch.library.register_fake(f"roamc::{_name}", _fake, lib=LIBRARY)

label_scores: OpOverload = torch.ops.roamc.label_scores.default
"""``roamc::label_scores(scores, labels, [1], keepdim, ignored)``: the score of each row's label."""

nll_of_scores: OpOverload = torch.ops.roamc.nll_of_scores.default
"""``roamc::nll_of_scores(picked, labels, classes, reduction, ignored)``: the loss, and how many labels count."""

KERNELS: dict[OpOverload, Callable[..., None]] = {
    label_scores: write_label_scores,
    nll_of_scores: write_nll_of_scores,
}
"""Operator of this module to the function that writes its results to ``out``."""
