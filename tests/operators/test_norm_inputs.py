"""Inputs of norms from their outputs: as good for backward as the inputs themselves, whatever the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roamc.operators.norm_inputs import lost_columns, norm_input

aten = torch.ops.aten


def off(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_gradients_of_a_layer_norm_are_as_exact_as_from_its_input(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    n = 320
    x, dy = (torch.randn(rows, n) * 2 + 0.5).to(dtype), torch.randn(rows, n).to(dtype)
    weight, bias = (1 + 0.2 * torch.randn(n)).to(dtype), (0.2 * torch.randn(n)).to(dtype)
    weight[[0, 17]], weight[250] = 0.0, 1e-6
    y, mean, rstd = aten.native_layer_norm(x, [n], weight, bias, 1e-5)
    lost = lost_columns(weight, bias, n // 32, torch.finfo(dtype).eps)
    assert {0, 17, 250} <= set(lost.tolist())
    again = norm_input(x[:, lost], y, mean, rstd, weight, bias, lost)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    torch.nn.functional.layer_norm(exact[0], [n], *exact[1:], 1e-5).backward(dy.double())
    by_input = aten.native_layer_norm_backward(dy, x, [n], mean, rstd, weight, bias, [True] * 3)
    by_output = aten.native_layer_norm_backward(dy, again, [n], mean, rstd, weight, bias, [True] * 3)
    for one, other, wanted in zip(by_output, by_input, exact, strict=True):
        assert wanted.grad is not None
        assert off(one, wanted.grad) <= 1.5 * off(other, wanted.grad) + 0.1 * torch.finfo(dtype).eps


def test_rms_norm_has_neither_mean_nor_bias() -> None:
    x, weight = torch.randn(4, 5, 64), torch.rand(64)
    weight[3] = 0.0
    y, rstd = aten._fused_rms_norm(x, [64], weight, 1e-6)
    lost = lost_columns(weight, None, 2, torch.finfo(torch.float32).eps)
    again = norm_input(x.view(20, 64)[:, lost], y, None, rstd, weight, None, lost)
    torch.testing.assert_close(again, x)


def test_more_small_weights_than_columns_wait_are_refused() -> None:
    weight, bias = torch.ones(64), torch.ones(64)
    weight[:3] = 0.0
    with pytest.raises(RuntimeError, match=r"a norm over 64 columns.*more than 2 of them.*leave 'tempo' out"):
        lost_columns(weight, bias, 2, 1e-7)
    assert lost_columns(weight, bias, 3, 1e-7).tolist() == [0, 1, 2]
    weight[5] = 1e-6
    with pytest.raises(RuntimeError, match=r"or below 7\.6e-06 of the bias"):
        lost_columns(weight, bias, 3, torch.finfo(torch.float32).eps)


def test_nan_and_infinity_arrive() -> None:
    x = torch.randn(3, 64)
    x[1, 5], x[2, 6] = torch.nan, torch.inf
    weight, bias = torch.ones(64), torch.zeros(64)
    y, mean, rstd = aten.native_layer_norm(x, [64], weight, bias, 1e-5)
    again = norm_input(x[:, :2], y, mean, rstd, weight, bias, torch.tensor([0, 1]))
    torch.testing.assert_close(again[0], x[0])
    assert not again[1:].isfinite().all(-1).any()
