"""What Python does only while a step is traced is refused, or says so where its result is read (docs/limits.md)."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import noise, sgd, square

X = noise(4, 8)


@pytest.mark.parametrize("place", ["batch", "closure", "default", "partial"])
def test_an_iterator_that_gives_the_batches_is_refused(place: str) -> None:
    """Every step would train on the first batch."""
    model, batches = nn.Linear(8, 8), (x for x in (X, X + 1, X + 2))

    def from_closure(m: nn.Module) -> Tensor:
        return square(m, next(batches))

    def from_default(m: nn.Module, rows: Iterator[Tensor] = batches) -> Tensor:
        return square(m, next(rows))

    def from_argument(rows: Iterator[Tensor], m: nn.Module) -> Tensor:
        return square(m, next(rows))

    losses = {"closure": from_closure, "default": from_default, "partial": functools.partial(from_argument, batches)}
    step = roamc.train_step(model, losses.get(place, lambda m, rows: square(m, next(rows))), sgd(model))
    with pytest.raises(roamc.CaptureError, match=r"a generator, an iterator, .*: every later step would"):
        step(*([batches] if place == "batch" else []))


def test_files_and_counters_may_be_named_by_the_loss_function() -> None:
    model, numbers, file = nn.Linear(8, 8), itertools.count(), io.StringIO()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        print(next(numbers), file=file)
        return square(m, x)

    roamc.train_step(model, loss, sgd(model))(X)
    assert file.getvalue() == "0\n"


def test_a_value_that_the_loss_keeps_in_a_dict_is_refused_when_it_is_read() -> None:
    model, kept, mean = nn.Linear(8, 8), dict[str, Tensor](), torch.zeros(())
    expected = model(X).mean().detach()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        y = m(x)
        kept["mean"] = y.mean()
        mean.copy_(y.mean().detach())
        return y.square().mean()

    roamc.train_step(model, loss, sgd(model))(X)
    with pytest.raises(roamc.CaptureError, match=r"roamc.train_step traced the step, in a dict .* total\.copy_"):
        float(kept["mean"])
    assert torch.equal(mean, expected)


def test_a_method_of_the_model_as_the_loss_function_is_told_how_to_be_one() -> None:
    class Trained(nn.Sequential):
        def training_step(self, x: Tensor, y: Tensor) -> Tensor:
            return (self(x) - y).square().mean()

    model = Trained(nn.Linear(8, 8))
    step = roamc.train_step(model, model.training_step, sgd(model))
    with pytest.raises(roamc.CaptureError, match=r"write lambda model, \*batch: model\.training_step\(\*batch\)"):
        step(X, X)
    roamc.train_step(model, lambda model, *batch: model.training_step(*batch), sgd(model))(X, X)
