"""What a model holds: as torch says, in its order."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from roamc.compat_modules import buffers_of, modules_of, parameters_of


def model(seed: int) -> nn.Module:
    """Modules in each other, some of them twice, with shared and missing parameters, buffers and submodules."""
    rng, modules = random.Random(seed), list[nn.Module]()
    for number in range(rng.randint(1, 12)):
        module = nn.Linear(2, 2, bias=rng.random() < 0.5) if rng.random() < 0.5 else nn.Module()
        for name, child in enumerate(rng.sample(modules, rng.randint(0, min(3, len(modules))))):
            module.add_module(f"child_{name}", child if rng.random() < 0.9 else None)
        module.register_buffer("buffer", torch.zeros(1) if rng.random() < 0.5 else None)
        tied = [parameter for other in modules for parameter in other.parameters()]
        if tied and rng.random() < 0.5:
            module.register_parameter(f"tied_{number}", rng.choice(tied))
        modules.append(module)
    return modules[-1]


@pytest.mark.parametrize("seed", range(50))
def test_modules_and_tensors_are_torchs(seed: int) -> None:
    whole = model(seed)
    modules = modules_of(whole)
    assert list(map(id, modules)) == list(map(id, whole.modules()))
    assert list(map(id, parameters_of(modules))) == list(map(id, whole.parameters()))
    assert list(map(id, buffers_of(modules))) == list(map(id, whole.buffers()))
