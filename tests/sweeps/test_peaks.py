"""Measured peaks of a few small models; `make sweep` measures more of them by every route."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.end_to_end.helpers import TORCH
from tests.sweeps.measured_peaks import eagers, judge

CASES = {
    "batch norm, whose backward takes a tensor for itself, and running statistics": (4, "optimize"),
    "the loss stands beside the arena": (17, "optimize"),
    "the output stands beside the loss that is made of it": (110, "optimize"),
    "a convolution takes more than all tensors are": (18, "compile with its loss"),
    "the same where gradients die early": (15, "step"),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled here is left behind."""
    yield
    torch._dynamo.reset()
    eagers.cache_clear()


@pytest.mark.parametrize(("seed", "route"), CASES.values(), ids=CASES)
def test_a_step_takes_no_more_than_eagers(seed: int, route: str) -> None:
    if route == "optimize" and TORCH < (2, 13):
        pytest.skip("AOTAutograd holds saved tensors to the end of backward before torch 2.13")
    verdict = judge(seed, route)
    assert verdict.outcome == "same", verdict
