"""Inputs of activations from their outputs: slopes there, tails, minima, NaN and infinity, geometries, workspace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from roamc.cost import workspace_bytes
from roamc.operators import activations
from roamc.operators.activations import ACTIVATIONS, ERRORS, TAKEN, activation_input, write_activation_input
from roamc.passes.retain.codecs.bits import bits_of
from tests.operator_calls import node_of_call

aten = torch.ops.aten
LARGEST = {torch.float32: 4e-4, torch.bfloat16: 0.013, torch.float16: 0.006}
FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_by_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": aten.gelu_backward.default,
    "gelu_by_tanh": lambda grad, x: aten.gelu_backward.default(grad, x, approximate="tanh"),
    "silu": aten.silu_backward.default,
}


def slope(name: str, x: Tensor) -> Tensor:
    """The derivative at ``x``, float64."""
    return BACKWARD[name](torch.ones_like(x, dtype=torch.float64), x.double())


def bits(right: Tensor) -> Tensor:
    """The bits of a mask, in the sequence of memory: element e of n is bit e // ceil(n / 8) of byte e % ceil(n / 8)."""
    flat = right.as_strided((right.numel(),), (1,)).byte()
    padded = functional.pad(flat, (0, -right.numel() % 8)).view(8, -1)
    return (padded << torch.arange(8, dtype=torch.uint8)[:, None]).sum(0, dtype=torch.uint8)


def found(name: str, x: Tensor, y: Tensor | None = None) -> Tensor:
    """The inputs made from the outputs of ``x`` and its side of the minimum."""
    outputs = FORWARD[name](x) if y is None else y
    inputs: Tensor = activation_input(outputs, bits(torch.ge(x, ACTIVATIONS[name].least)), name)
    return inputs


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_at_normal_inputs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = torch.randn(300_000).to(dtype)
    exact = slope(name, x)
    error = slope(name, found(name, x)) - exact
    assert error.norm() <= ERRORS[dtype] * exact.norm()
    assert error.abs().max() <= LARGEST[dtype]


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_tails_and_the_neighbourhood_of_the_minimum(name: str, dtype: torch.dtype) -> None:
    least = ACTIVATIONS[name].least
    near = torch.linspace(-1e-3, 1e-3, 20_001, dtype=torch.float64) + least
    x = torch.cat([torch.linspace(-40, 40, 80_001, dtype=torch.float64), near]).to(dtype)
    inputs = found(name, x)
    assert bool(inputs.isfinite().all())
    assert (slope(name, inputs) - slope(name, x)).abs().max() <= LARGEST[dtype]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_minimum_is_where_the_slope_is_zero(name: str) -> None:
    activation = ACTIVATIONS[name]
    least = torch.tensor([activation.least], dtype=torch.float64)
    assert abs(float(slope(name, least))) < 1e-15
    assert math.isclose(float(FORWARD[name](least)), activation.lowest, rel_tol=1e-7)


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_outputs_at_and_below_the_minimum(name: str, dtype: torch.dtype) -> None:
    """Other kernels round otherwise: an output may lie a few steps below the minimum."""
    lowest = torch.tensor([ACTIVATIONS[name].lowest]).to(dtype)
    outputs = [lowest]
    for _ in range(8):
        outputs.append(torch.nextafter(outputs[-1], torch.tensor([-1.0]).to(dtype)))
    y = torch.cat(outputs)
    for side in (False, True):
        inputs = activation_input(y, bits(torch.full(y.shape, side)), name)
        assert slope(name, inputs).abs().max() <= {torch.float32: 1e-4}.get(dtype, 0.1)


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinity_arrive_and_large_inputs_have_slope_one(name: str, dtype: torch.dtype) -> None:
    """Of infinity some of torch's kernels make NaN; others' outputs are given."""
    x = torch.tensor([math.nan, math.inf, 60_000.0, 30.0, 25.0]).to(dtype)
    inputs = found(name, x, y=x)
    assert bool(inputs[0].isnan())
    assert bool(inputs[1].isposinf())
    torch.testing.assert_close(inputs[2:], x[2:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_minus_infinity_has_no_output_and_far_inputs_no_slope(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([-math.inf, -60_000.0, -200.0, -torch.finfo(dtype).max]).to(dtype)
    inputs = found(name, x)
    assert bool(inputs[0].isnan())
    assert bool(FORWARD[name](x)[0].isnan())
    gradients = BACKWARD[name](torch.ones_like(inputs), inputs)
    assert float(gradients[1:].abs().max()) < 1e-30


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_where_outputs_are_zero_one_far_input_arrives(name: str) -> None:
    """GELU is -0.0 in float32 left of about -14, SiLU of -104."""
    x = torch.tensor([-120.0, -1e6])
    assert torch.equal(FORWARD[name](x), torch.tensor([-0.0, -0.0]))
    assert found(name, x).tolist() == [ACTIVATIONS[name].far] * 2


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_any_geometry_has_the_bits_of_a_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, 8, dtype=torch.float32).to(dtype)
    y, right = functional.gelu(x), x >= ACTIVATIONS["gelu"].least
    expected = activation_input(y.view(-1), bits(right.view(-1)), "gelu").view(x.shape)
    for dims in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        back = [dims.index(at) for at in range(3)]
        turned, side = (each.permute(dims).contiguous().permute(back) for each in (y, right))
        inputs = activation_input(turned, bits(side), "gelu")
        assert inputs.stride() == turned.stride()
        assert torch.equal(inputs, expected)
    apart = torch.empty(6, 5, 16, dtype=dtype)[..., ::2].copy_(y)
    assert torch.equal(activation_input(apart, bits(right), "gelu"), expected)
    assert activation_input(y[:0], bits(right[:0]), "gelu").shape == (0, 5, 8)
    assert torch.equal(activation_input(y[1, 2, 3], bits(right[1, 2, 3].clone()), "gelu"), expected[1, 2, 3])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1001])
def test_any_number_of_elements_has_the_bits_of_each_alone(count: int) -> None:
    torch.manual_seed(count)
    x = torch.randn(count).bfloat16()
    y, right = functional.gelu(x), x >= ACTIVATIONS["gelu"].least
    alone = [activation_input(each, side.byte().view(1), "gelu") for each, side in zip(y, right, strict=True)]
    assert torch.equal(activation_input(y, bits(right), "gelu"), torch.stack(alone))
    assert torch.equal(bits_of(x).encode(right), bits(right))


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_inputs_may_be_written_over_outputs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(activations.PIECES, "cpu", 10)
    x = torch.randn(1001).to(dtype)
    y, right = functional.gelu(x), bits(x >= ACTIVATIONS["gelu"].least)
    expected = activation_input(y.clone(), right, "gelu")
    write_activation_input(y, right, "gelu", out=y)
    assert torch.equal(y, expected)


def test_an_output_of_64_bits_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"outputs of torch.float64: inputs are found of torch.bfloat16"):
        activation_input(torch.zeros(3, dtype=torch.float64), torch.ones(1, dtype=torch.uint8), "gelu")


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_tables_are_made_once_and_hold_an_entry_for_each_output(dtype: torch.dtype) -> None:
    table = activations.table_of("silu", dtype, torch.device("cpu"))
    assert table is activations.table_of("silu", dtype, torch.device("cpu"))
    assert dtype is torch.float32 or table.numel() == 1 << 17


def test_workspace_is_a_piece_and_what_lies_in_another_order() -> None:
    def counted(y: Tensor) -> int:
        call: Any = node_of_call(activation_input, ((y, bits(torch.ones(y.shape, dtype=torch.bool)), "gelu"), {}))
        return workspace_bytes(call, 1)

    y = torch.zeros(1000, 1000)
    assert counted(y) == TAKEN[torch.float32] << 16
    assert counted(y.bfloat16()) == TAKEN[torch.bfloat16] << 16
    assert counted(y[:80]) == TAKEN[torch.float32] * 10_000
    assert counted(y[:2]) == TAKEN[torch.float32] * 250
    assert counted(y[:, ::2]) == TAKEN[torch.float32] * 62_500 + 4 * 500_000
