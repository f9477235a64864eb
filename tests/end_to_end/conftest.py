"""Every test compiles from scratch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget what dynamo compiled for the test before; same weights in every run."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def small_arenas(request: pytest.FixtureRequest) -> None:
    """Every test but those of peaks runs small models over arenas."""
    if request.module.__name__.rpartition(".")[2] != "test_peak":
        request.getfixturevalue("arenas_of_any_size")
