"""Forward writes to a buffer and returns views of it: they are views of the buffer, and cost nothing, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import roamc
from tests.end_to_end.helpers import assert_same, gradients_of

SIZE = 512
"""Eager's bytes are compared one by one above 1 MiB: a matrix of this size has that."""


class Writes(nn.Module):
    """A linear layer, and what a function makes of a buffer."""

    def __init__(self, returned: Callable[[Tensor, Tensor], Tensor], size: int = SIZE) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.returned = returned
        self.buffer: Tensor
        self.register_buffer("buffer", torch.randn(size, size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.layer(x)
        return y, self.returned(self.buffer, y.detach())


def scaled(b: Tensor, _: Tensor) -> Tensor:
    b.mul_(0.9)
    return b[1:]


def chained(b: Tensor, y: Tensor) -> Tensor:
    b.mul_(0.9).add_(y)
    return b.t()


def part_scaled(b: Tensor, _: Tensor) -> Tensor:
    part = b[1:]
    part.mul_(0.9)
    return part


def part_assigned(b: Tensor, y: Tensor) -> Tensor:
    b[2:] = y[2:]
    return b[1:]


def copied(b: Tensor, y: Tensor) -> Tensor:
    b.copy_(y)
    return b[1:]


def filled(b: Tensor, _: Tensor) -> Tensor:
    b.fill_(2.0)
    return b[1:].t()


def one_of_several(b: Tensor, _: Tensor) -> Tensor:
    b.clamp_(-1, 0.8)
    return b.chunk(2)[1]


def diagonal(b: Tensor, _: Tensor) -> Tensor:
    b.t().mul_(2.0)
    return b.diagonal()


VIEWS = [scaled, chained, part_scaled, part_assigned, copied, filled, one_of_several, diagonal]


def made_beside(b: Tensor, _: Tensor) -> Tensor:
    y = b * 0.9
    b.copy_(y)
    return y[1:]


def written_beside(b: Tensor, _: Tensor) -> Tensor:
    y = b * 1.0
    y.mul_(0.9)
    b.copy_(y)
    return y[1:]


def copied_out(b: Tensor, _: Tensor) -> Tensor:
    b.mul_(0.9)
    return b.clone()[1:]


OWN = [made_beside, written_beside, copied_out]


class Complex(nn.Module):
    """A complex buffer is written through its conjugate, and returned as tensors of their own."""

    def __init__(self, returned: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.returned = returned
        self.buffer: Tensor
        self.register_buffer("buffer", torch.tensor([1 + 2j, 3 - 1j]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.returned(self.buffer)


def conjugate_resolved(z: Tensor) -> Tensor:
    z.conj().mul_(2j)
    return z.conj().resolve_conj()


def imaginary_part_resolved(z: Tensor) -> Tensor:
    z.conj().imag.mul_(2.0)
    return z.conj().imag.resolve_neg()


@pytest.mark.parametrize(
    "returned", [conjugate_resolved, imaginary_part_resolved], ids=lambda returned: returned.__name__
)
def test_a_resolved_view_of_a_complex_buffer_is_a_tensor_of_its_own(returned: Callable[[Tensor], Tensor]) -> None:
    model = Complex(returned)
    plain, x = copy.deepcopy(model), torch.randn(2, 4)
    compiled = roamc.optimize(model, strict=True)
    resolved, wanted = [compiled(x)[1] for _ in range(2)], [plain(x)[1] for _ in range(2)]
    assert_same([*resolved, model.buffer], [*wanted, plain.buffer])


def steps(model: nn.Module, call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[object]:
    """Two steps; what the first returned is looked at once more behind the second."""
    seen: list[object] = []
    returned: list[Tensor] = []
    for number in range(2):
        torch.manual_seed(number)
        y, views = call(torch.randn(SIZE, SIZE))
        seen += [y.detach().clone(), views.clone()]
        returned.append(views)
        y.square().mean().backward()
    shared = {views.untyped_storage().data_ptr() for views in returned}
    in_buffer = shared == {next(model.buffers()).untyped_storage().data_ptr()}
    return [*seen, *(views.clone() for views in returned), dict(model.named_buffers()), gradients_of(model), in_buffer]


@pytest.mark.parametrize("route", ["optimize", "compile"])
@pytest.mark.parametrize("returned", [*VIEWS, *OWN], ids=lambda returned: returned.__name__)
def test_a_returned_view_lies_in_its_buffer_and_other_tensors_do_not(
    returned: Callable[[Tensor, Tensor], Tensor], route: str
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Writes(returned)
    plain = copy.deepcopy(model)
    if route == "optimize":
        compiled = roamc.optimize(model, strict=True)
    else:
        compiled = torch.compile(model, backend="roamc", options={"strict": True}, dynamic=False)
    results, wanted = steps(model, compiled), steps(plain, plain)
    assert_same(results, wanted)
    assert results[-1] is (returned in VIEWS)
    plans = roamc.plans(compiled) if route == "optimize" else roamc.plans()[-1:]
    assert [plan for plan in plans if plan.peak_bytes > plan.baseline_bytes] == []


@pytest.mark.parametrize("returned", VIEWS, ids=lambda returned: returned.__name__)
def test_without_gradients(returned: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Writes(returned)
    plain, x = copy.deepcopy(model), torch.randn(SIZE, SIZE)
    with torch.no_grad():
        compiled = roamc.optimize(model, strict=True)
        assert_same([*compiled(x), model.buffer], [*plain(x), plain.buffer])
        assert_same([*compiled(x), model.buffer], [*plain(x), plain.buffer])
    (plan,) = roamc.plans(compiled)
    assert plan.peak_bytes <= plan.baseline_bytes


def test_a_view_of_a_written_buffer_that_backward_reads_keeps_its_values() -> None:
    """Between forward and backward the caller may write to the buffer again."""

    class Twice(Writes):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.buffer.mul_(0.9)
            return self.layer(x) * self.buffer, self.buffer[1:]

    torch.manual_seed(0)
    model = Twice(scaled)
    plain, x = copy.deepcopy(model), torch.randn(SIZE, SIZE)
    compiled = roamc.optimize(model, strict=True)
    y, views = compiled(x)
    wanted, plain_views = plain(x)
    wanted.square().mean().backward()
    model.buffer.zero_()
    y.square().mean().backward()
    assert_same(gradients_of(model), gradients_of(plain))
    assert not views.any()
    assert plain_views.any()
