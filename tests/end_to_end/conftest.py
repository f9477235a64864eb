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


AS_PLANNED = ("test_peak", "test_without_arena")
"""Modules whose small models have arenas only where that pays."""


@pytest.fixture(autouse=True)
def small_arenas(request: pytest.FixtureRequest) -> None:
    """All other tests run small models over arenas."""
    if request.module.__name__.rpartition(".")[2] not in AS_PLANNED:
        request.getfixturevalue("arenas_of_any_size")
