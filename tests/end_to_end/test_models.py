"""Every model of the zoo, by each way in: the bits of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roamc
from tests.end_to_end.helpers import aot_eager, assert_same, assert_steps_equal, onednn, run_backward
from tests.models import MODELS, make

STEPS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
each_model = pytest.mark.parametrize("name", MODELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@pytest.fixture(autouse=True)
def lstm_is_traced() -> Iterator[None]:
    """Dynamo leaves recurrent modules to eager unless told not to."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


@each_dtype
@each_model
def test_train_step_equals_eager(name: str, dtype: torch.dtype) -> None:
    """An LSTM without oneDNN, whose own has other last bits on some processors."""
    model, batch, loss_fn = make(name, dtype)
    with onednn(enabled=name != "lstm"):
        step = assert_steps_equal(model, loss_fn, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), [batch] * STEPS)
    assert len(step.plans) == 1


@pytest.mark.parametrize("ways", [(torch.float32, "both"), (torch.bfloat16, "optimize")], ids=DTYPES)
@each_model
def test_optimize_and_torch_compile_equal_aot_eager(name: str, ways: tuple[torch.dtype, str]) -> None:
    dtype, way = ways
    model, batch, loss_fn = make(name, dtype)
    wanted = trace_of(aot_eager(model), batch, loss_fn)
    torch._dynamo.reset()
    by_optimize = roamc.optimize(copy.deepcopy(model), strict=True)
    assert_same(trace_of(by_optimize, batch, loss_fn), wanted)
    assert roamc.plans(by_optimize)
    if way == "optimize":
        return
    torch._dynamo.reset()
    model.compile(backend="roamc", options={"strict": True}, dynamic=False)
    assert_same(trace_of(model, batch, loss_fn), wanted)


def trace_of(model: nn.Module, batch: tuple[Any, ...], loss_fn: Any) -> list[dict[str, Any]]:
    """Everything that is seen of a few backwards, gradients adding up."""
    return [run_backward(model, loss_fn, batch, seed=seed) for seed in range(STEPS)]
