"""Fake kernels of ours note what the CPU's kernels make, and a step that torch's refuse runs as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roamc.compat import CaptureMode, fake_input
from roamc.operators.fakes import fake_kernel
from tests.end_to_end.helpers import assert_steps_equal, noise, sgd, square

ENDS = torch.tensor([2, 5], dtype=torch.int32)
OPERANDS = {
    "rows by matrices": lambda n, dtype: (noise(5, 8).to(dtype), noise(2, 8, n).to(dtype), ENDS),
    "columns by rows": lambda n, dtype: (noise(8, 8).to(dtype)[:, :5], noise(5, n).to(dtype), ENDS),
    "matrices by matrices": lambda n, dtype: (noise(2, 5, 8).to(dtype), noise(2, 8, n).to(dtype), None),
    "matrices by columns": lambda n, dtype: (noise(2, 4, 8).to(dtype), noise(8, n).to(dtype), ENDS),
}


def assert_same_geometry(*operands: Tensor | None) -> None:
    """Shape, stride and dtype of a grouped product are the same of fake and of real operands."""
    real = torch._grouped_mm(*operands)
    mode = CaptureMode(kernel_of=fake_kernel)
    fakes = [None if x is None else fake_input(mode, x, x.device) for x in operands]
    with mode:
        fake = torch._grouped_mm(*fakes)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize("name", OPERANDS)
def test_grouped_products_have_the_geometry_of_the_real_kernel(name: str, columns: int, dtype: torch.dtype) -> None:
    assert_same_geometry(*OPERANDS[name](columns, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 6])
def test_rows_of_grouped_products_are_padded(columns: int, dtype: torch.dtype) -> None:
    assert_same_geometry(noise(5, 8).to(dtype), noise(2, columns, 8).to(dtype).mT, ENDS)


class Branching(nn.Module):
    """A 16-bit product of an expanded operand: whether it lies in rows decides which kernels a linear layer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second((y[:, :1].expand_as(y) * y.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_step_runs_the_kernels_that_eager_chooses_by_strides(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batches = [(noise(9, 24, 24).to(dtype),)] * 2
    assert_steps_equal(Branching().to(dtype), square, sgd, batches)


class Experts(nn.Module):
    """A mixture of experts as Mixtral's: rows sorted by expert, one product a group."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.router = nn.Linear(8, 3)
        self.up, self.down = nn.Parameter(noise(3, width, 8)), nn.Parameter(noise(3, 8, width))

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = torch.histc(expert.float(), 3, 0, 2).cumsum(0).int()
        hidden = F.grouped_mm(x[order], self.up.mT, offs=ends).relu()
        return F.grouped_mm(hidden, self.down.mT, offs=ends) * share[order, None]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 12), (torch.bfloat16, 16)], ids=str)
def test_a_mixture_of_experts_equals_eager(dtype: torch.dtype, width: int) -> None:
    model, batch = Experts(width).to(dtype), (noise(6, 8).to(dtype),)
    assert_steps_equal(model, square, sgd, [batch] * 2)
    assert_steps_equal(model, square, sgd, [batch], memory_budget="min")


def test_mixtral_with_its_default_experts_equals_eager() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = MixtralConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, use_cache=False, pad_token_id=0
    )
    torch.manual_seed(1)
    tokens = torch.randint(1, 32, (2, 6))
    assert_steps_equal(MixtralForCausalLM(config), lambda m, x: m(input_ids=x, labels=x).loss, sgd, [(tokens,)])
