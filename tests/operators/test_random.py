"""Random operators draw again what they drew, wherever the state of the generator lies."""

from __future__ import annotations

import pytest
import torch

from roamc.operators.random import replay, save_rng_state

CPU = torch.device("cpu")


@pytest.mark.parametrize("offset", [0, 64, 1 << 18])
def test_replay_reads_a_state_that_lies_in_an_arena(offset: int) -> None:
    state = save_rng_state(CPU)
    place = torch.zeros(1 << 20, dtype=torch.uint8)[offset : offset + state.numel()]
    place.copy_(state)
    drawn = torch.rand(5)
    after = save_rng_state(CPU)
    assert torch.equal(replay(place, torch.rand, 5), drawn)
    assert torch.equal(save_rng_state(CPU), after)
