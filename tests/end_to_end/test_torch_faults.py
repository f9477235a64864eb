"""What torch.compile computes wrongly with any backend has eager's numbers by roamc, or is left to eager with one line.

Each test of a fault of torch's compares torch as well: where that is right, torch has mended it, and the row can go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _python_dispatch as modes

import roamc
from roamc.capture.torch_faults import FAULTS, unwatched
from tests.end_to_end.helpers import noise, optimized, warnings_of_roamc


class Zeroed(torch.autograd.Function):
    """A sine with a gradient of zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0


class Scaled(torch.autograd.Function):
    """Twice its input, written over it, with a gradient of seven."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 7


class Called(nn.Module):
    """A function of a parameter and a batch."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(noise(4)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight) + self.weight.sum() * 0


def zeroed_sum(x: Tensor) -> Tensor:
    return Zeroed.apply(x).sum()


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": lambda x: torch.func.grad(zeroed_sum)(x).sum(),
    "jacrev": lambda x: torch.func.jacrev(Zeroed.apply)(x).sum(),
    "vmap": lambda x: torch.func.vmap(zeroed_sum)(x[None].expand(3, 4)).sum(),
    "in and outside": lambda x: Zeroed.apply(torch.func.grad(zeroed_sum)(x) + x).sum(),
}


def in_a_graph_of_its_own(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "input": lambda x: Scaled.apply(in_a_graph_of_its_own(x)).sin().sum(),
    "view of an input": lambda x: Scaled.apply(in_a_graph_of_its_own(x)[1:]).sin().sum(),
    "twice": lambda x: Scaled.apply(Scaled.apply(in_a_graph_of_its_own(x))).sum(),
}
EXAMPLES = {"custom function in a transform": TRANSFORMS, "custom function that writes an input": IN_PLACE}
"""Name of a row of the table to functions with the fault."""
CASES = [pytest.param(row, kind, id=kind) for row, kinds in EXAMPLES.items() for kind in kinds]


def numbers(model: nn.Module, compiled: Callable[[Tensor], Tensor]) -> list[float]:
    """The result, and the gradient's elements."""
    result = compiled(torch.arange(1.0, 5.0))
    result.backward()
    gradient = model.get_parameter("weight").grad
    assert gradient is not None
    return [result.item(), *gradient.tolist()]


def test_every_row_has_examples() -> None:
    assert [row.name for row in FAULTS] == list(EXAMPLES)


@pytest.mark.parametrize(("row", "kind"), CASES)
def test_torch_has_not_mended_it(row: str, kind: str) -> None:
    right, wrong = Called(EXAMPLES[row][kind]), Called(EXAMPLES[row][kind])
    torch._dynamo.reset()
    by_torch = numbers(wrong, torch.compile(wrong, backend="aot_eager", dynamic=False))
    assert by_torch != numbers(right, right), "torch computes what eager does: take the row out of the table"


@pytest.mark.parametrize("way", ["optimize", "compile"])
@pytest.mark.parametrize(("row", "kind"), CASES)
def test_eager_runs_it_after_one_warning(row: str, kind: str, way: str) -> None:
    right, ours = Called(EXAMPLES[row][kind]), Called(EXAMPLES[row][kind])
    torch._dynamo.reset()
    compiled = roamc.optimize(ours) if way == "optimize" else torch.compile(ours, backend="roamc", dynamic=False)
    with warnings_of_roamc() as said:
        assert numbers(ours, compiled) == numbers(right, right)
        compiled(torch.ones(4))
    assert len(said) == 1
    assert "falls back to eager PyTorch: torch.compile drops the backward" in said[0]
    assert "roamc.train_step" in said[0]


@pytest.mark.parametrize(("row", "kind"), CASES)
def test_strict_raises_and_says_what_to_do(row: str, kind: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"use roamc\.train_step, or call the function"):
        optimized(Called(EXAMPLES[row][kind]))(torch.ones(4))


@pytest.mark.parametrize("function", [lambda x: x * 1, Tensor.detach], ids=["value of its own", "no gradient"])
def test_a_function_that_writes_something_else_is_planned(function: Callable[[Tensor], Tensor]) -> None:
    def called(x: Tensor) -> Tensor:
        y = in_a_graph_of_its_own(x)
        return (Scaled.apply(function(y)) * y.exp()).sum()

    right, ours = Called(called), Called(called)
    torch._dynamo.reset()
    optimized(ours)
    assert numbers(ours, ours) == numbers(right, right)


@pytest.mark.parametrize("kind", ["outside", "no gradient"])
def test_a_function_that_keeps_its_backward_is_planned(kind: str) -> None:
    """Masks of transformers are made with vmap, beside functions of the model's own."""

    def function(x: Tensor) -> Tensor:
        mask = torch.func.vmap(lambda row: row > 1)(torch.arange(4.0))
        return (Zeroed.apply(x) * mask + x).sum()

    right, ours = Called(function), Called(function)
    torch._dynamo.reset()
    optimized(ours)
    if kind == "no gradient":
        right.requires_grad_(False)
        ours.requires_grad_(False)
        assert torch.equal(ours(torch.ones(4)), right(torch.ones(4)))
    else:
        assert numbers(ours, ours) == numbers(right, right)
    assert len(roamc.plans(ours)) == 1


@torch.library.custom_op("roamc_tests::doubled_once", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_pinv_of_a_complex_matrix_is_eagers_in_the_first_call(custom: bool, trains: bool) -> None:
    """torch runs the first call in a dispatch mode, in which the kernel forgets a conjugation."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        inverse = torch.linalg.pinv(torch.view_as_complex(x)).real
        return ((doubled(w.detach()) if custom else w) * inverse).sum()

    def result(function: Callable[..., Tensor]) -> list[Tensor | None]:
        x = noise(5, 3, 2).double().requires_grad_(trains)
        value = function(x, noise(3, 5, seed=4).double())
        if trains:
            value.backward()
        return [value.detach(), x.grad]

    by = {}
    for backend, options in (("aot_eager", {}), ("roamc", {"options": {"strict": True}})):
        torch._dynamo.reset()
        by[backend] = result(torch.compile(loss, backend=backend, dynamic=False, **options))
    torch.testing.assert_close(by["roamc"], result(loss), rtol=1e-12, atol=1e-12)
    with pytest.raises(AssertionError):  # else torch has mended it
        torch.testing.assert_close(by["aot_eager"], result(loss))


@pytest.mark.parametrize("custom", [False, True])
def test_a_graph_with_custom_operators_stays_in_the_mode_that_checks_them(custom: bool) -> None:
    from torch._functorch._aot_autograd import runtime_wrappers  # dynamo, which roamc imports, must be there before

    gm = make_fx(doubled if custom else torch.sin)(torch.ones(4))
    run = unwatched(gm, lambda _: modes._get_current_dispatch_mode())
    with runtime_wrappers._AnalyzeCustomOpInputOutputMode():
        assert (run([]) is not None) == custom
    assert run([]) is None
