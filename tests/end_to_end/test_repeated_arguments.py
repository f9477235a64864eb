"""One tensor as several arguments of an operator: a result is not written over it where elements are read elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import assert_backward_equal, assert_same, assert_steps_equal, sgd, square

pytestmark = pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")

ROWS = 8

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "addmm": lambda h: torch.addmm(h, h, h),
    "addmm of a view": lambda h: torch.addmm(h, h.view(1, ROWS, ROWS)[0], h),
    "baddbmm": lambda h: torch.baddbmm(h[None] * 1, *(h[None] * 1,) * 2)[0],
    "baddbmm of one": lambda h: (lambda b: torch.baddbmm(b, b, b))(h[None])[0],
    "scatter_add": lambda h: h.scatter_add(0, h.argsort(0), h),
    "scatter": lambda h: h.scatter(0, h.argsort(0), h),
    "scatter reduced": lambda h: h.scatter(0, h.argsort(0), h, reduce="add"),
    "index_add": lambda h: h.index_add(0, h[0].argsort(), h),
    "index_put": lambda h: torch.index_put(h, (h[0].argsort(),), h),
    "index_put added up": lambda h: torch.index_put(h, (h[0].argsort() // 2,), h, accumulate=True),
    "slice_scatter": lambda h: torch.slice_scatter(h, h[: ROWS - 1], 0, 1, ROWS),
    "select_scatter": lambda h: torch.select_scatter(h, h[1], 1, 2),
    "diagonal_scatter": lambda h: torch.diagonal_scatter(h, h[3]),
    "masked_fill": lambda h: (lambda mask: mask.masked_fill(mask, False))(h > 0) * h,
    "indices of indices": lambda h: (lambda i: i.scatter(0, i, i))((h.abs() * 4).long() % ROWS) * h,
    "softmax backward": lambda h: torch._softmax_backward_data(h, h, -1, h.dtype),
    "where": lambda h: torch.where(h > 0, h, h),
    "addcmul": lambda h: torch.addcmul(h, h, h, value=0.3),
    "lerp": lambda h: torch.lerp(h, h, h),
    "clamp": lambda h: torch.clamp(h, min=h, max=h),
}


class Repeats(nn.Module):
    """A value that nobody reads behind the case, in forward, between two layers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(ROWS, ROWS), nn.Linear(ROWS, ROWS)
        self.case = CASES[name]

    def forward(self, x: Tensor) -> Tensor:
        repeated = self.case(self.first(x).detach() * 1.5)
        return self.second(repeated) + self.first(x)


def batch() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(ROWS, ROWS)


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_torch(name: str) -> None:
    assert_backward_equal(Repeats(name), square, [(batch(),)])
    assert_steps_equal(Repeats(name), square, sgd, [(batch(),)])


@pytest.mark.parametrize("name", CASES)
def test_a_buffer_that_is_written_from_itself(name: str) -> None:
    class Writes(Repeats):
        def __init__(self) -> None:
            super().__init__(name)
            self.state: Tensor
            self.register_buffer("state", torch.randn(ROWS, ROWS))

        def forward(self, x: Tensor) -> Tensor:
            self.state.copy_(self.case(self.state))
            return super().forward(x)

    model = Writes()
    plain = copy.deepcopy(model)
    compiled = roamc.optimize(model, strict=True)
    for _ in range(2):
        assert_same([compiled(batch()), model.state], [plain(batch()), plain.state])
