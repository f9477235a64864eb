"""What tests on a GPU share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def same_bits_every_time() -> Iterator[None]:
    """Deterministic kernels where there is a choice; a fresh compiler."""
    torch._dynamo.reset()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
