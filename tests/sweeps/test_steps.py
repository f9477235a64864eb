"""A sample of torch's operators by one ``train_step``; ``python -m tests.sweeps.steps`` runs all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.sweeps.databases import Case, Operator, cases
from tests.sweeps.steps import GOOD, entries, judge


@pytest.mark.parametrize("part", range(12))
def test_steps_have_eagers_bits(part: int) -> None:
    """Each part has the middle sample of every 48th operator: together a quarter."""
    verdicts = {}
    for entry in entries()[part::48]:
        samples = cases(entry)
        if samples:
            verdicts[str(entry)] = judge(samples[len(samples) // 2])
    assert not {name: verdict for name, verdict in verdicts.items() if verdict.outcome not in GOOD}
    assert any(verdict.outcome == "same" for verdict in verdicts.values())


class Uneven(torch.autograd.Function):
    """A product whose gradient is another in every second call."""

    calls = 0

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        Uneven.calls += 1
        return gradient * (2 if Uneven.calls < 3 else 3)


def test_another_gradient_than_eagers_is_found() -> None:
    case = Case(Operator(Uneven.apply), (torch.randn(3, requires_grad=True),), {})
    assert judge(case).outcome == "differs"
