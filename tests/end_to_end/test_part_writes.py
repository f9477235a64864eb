"""Writes to parts of activations and buffers, and views of them behind: gradients bit for bit those of aot_eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.capture import view_writes
from roamc.capture.sharing import Sharing
from roamc.errors import VerifyError
from tests.end_to_end.helpers import adamw, assert_backward_equal, assert_steps_equal, noise, optimized, square

Written = Callable[[Tensor], Tensor]


def view_behind(h: Tensor) -> Tensor:
    h[:, ::2] *= 2
    return h.view(h.shape[0], 2, -1).transpose(0, 1).exp()


def another_slice_behind(h: Tensor) -> Tensor:
    h[:, :4] *= 0.5
    return h[:, 5:].sin()


def row_of_rows(h: Tensor) -> Tensor:
    h[:, :4] *= 0.5
    h[3:][:, 1].add_(1.0)
    return h.sin()


def part_of_part(h: Tensor) -> Tensor:
    h[:, ::2] += 1
    h[1:3, 4:9].zero_()
    return h


def transposed(h: Tensor) -> Tensor:
    h[0] += 1
    return h.t() @ h[1:].sum(0, keepdim=True).expand_as(h)


def piece(h: Tensor) -> Tensor:
    """A part of a piece is assigned once more, and a scatter of it is put into the whole."""
    first, second = h.unflatten(1, (2, 8)).unbind(1)
    left = h[:, :8]
    left[:, 1:] += left[:, :-1].detach()
    left.addcmul_(second.detach(), first.detach(), value=0.3)
    return h.tanh()


class Part(nn.Module):
    """A part of an activation is written, and the activation is read in backward."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        h = self.written(self.second(y) * 2)
        return self.second(y.sin()).sum() + (h * h.detach().cos()).sum()


WRITTEN = [view_behind, another_slice_behind, row_of_rows, part_of_part, transposed, piece]


@pytest.mark.parametrize("written", WRITTEN, ids=lambda function: function.__name__)
@pytest.mark.parametrize("budget", [None, "min"])
def test_gradients_are_those_of_eager(written: Written, budget: str | None) -> None:
    torch.manual_seed(0)
    batches = [(noise(32, 16, seed=seed),) for seed in range(2)]
    assert_backward_equal(Part(written), square, batches, lambda model: optimized(model, memory_budget=budget))


@pytest.mark.parametrize("written", WRITTEN, ids=lambda function: function.__name__)
def test_steps_are_those_of_eager(written: Written) -> None:
    torch.manual_seed(0)
    assert_steps_equal(Part(written), square, adamw, [(noise(32, 16, seed=seed),) for seed in range(2)])


def test_views_left_in_a_storage_that_is_gone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge of what capture rewrites finds it, whoever does it."""
    monkeypatch.setattr(Sharing, "put", lambda *_: None)
    model = optimized(Part(view_behind))
    with pytest.raises(Exception, match=r"after pass 'capture': .* is a view of .*, and lies in another storage"):
        model(noise(32, 16))


def test_a_write_to_another_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_writes, "_fills_with_itself", lambda *_: True)

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            h[:, :4] = h[:, 4:8]
            return h * 2

    model = roamc.optimize(Shifted(), strict=True)
    with pytest.raises(Exception, match="after pass 'capture'") as caught:
        model(noise(8, 16))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), VerifyError)
