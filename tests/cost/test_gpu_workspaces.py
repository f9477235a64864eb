"""Workspace on a GPU: what was measured on an H200, and that every form of a reduction has an estimate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from roamc.cost.workspace import workspace_bytes
from roamc.graph import operators
from roamc.operators.costs import gpu
from tests.codegen.test_kernel_judge import on_gpu
from tests.graphs import traced

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_device", lambda: (132, 2048))


def workspace_of(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """The largest workspace of an operator of ``function``."""
    with torch.no_grad():
        nodes = operators(traced(function, *inputs).graph)
    return max(workspace_bytes(node, 1) for node in nodes)


def test_sums_over_rows_leave_the_parts_that_were_measured() -> None:
    """Torch's allocator counted 138,412,544 bytes, of which 512 are counters of the blocks."""
    assert workspace_of(lambda x: x.sum(0, keepdim=True), on_gpu((16384, 4096), HALF)) == 138_412_032


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(-1),  # a warp adds up a row
        lambda x: x.narrow(0, 0, 100).sum(0),  # a thread adds up a column
        lambda x: x.sum(),
    ],
    ids=["rows", "few rows", "all"],
)
def test_others_leave_none(function: Callable[[Tensor], Tensor]) -> None:
    assert workspace_of(function, on_gpu((16384, 1024), HALF)) == 0


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "no dimension": lambda x: x.sum((0, 1, 2)).sum(0),
    "negative": lambda x: x.sum((-3, -2)),
    "all kept": lambda x: x.sum((0, 1, 2), keepdim=True),
    "another dtype": lambda x: x.sum(0, dtype=torch.float64),
    "mean": lambda x: x.mean((0, 1)),
    "mean of all": lambda x: x.mean(),
    "expanded": lambda x: x.narrow(0, 0, 1).expand(5000, -1, -1).sum(0),
    "one column": lambda x: x.narrow(2, 0, 1).sum((0, 1)),
    "transposed": lambda x: x.transpose(0, 2).sum(0),
    "empty": lambda x: x.narrow(0, 0, 0).sum(0),
    "nothing left": lambda x: x.narrow(1, 0, 0).sum(0),
}


@pytest.mark.parametrize("shape", [(3000, 40, 64), (7, 1, 1)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_an_estimate(form: str, shape: tuple[int, ...]) -> None:
    assert 0 <= workspace_of(FORMS[form], on_gpu(shape)) < 1 << 28


def test_attention_backward_has_its_gradients_in_float32() -> None:
    """Measured: 68,157,952 bytes beside the results, by the flash, the memory-efficient and cuDNN's kernel."""
    query = on_gpu((16, 16, 1024, 64), HALF)
    call = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default

    def backward(q: Tensor) -> Tensor:
        out, lse, cum_q, cum_k, *_ = flash(q, q, q, 0.0, True)
        state = torch.zeros(2, dtype=torch.int64, device="cuda")
        return call(out, q, q, q, out, lse, cum_q, cum_k, 1024, 1024, 0.0, True, state, state)[0]

    assert workspace_of(backward, query) == 4 * 16 * 16 * 1024 * 65 == 68_157_440
