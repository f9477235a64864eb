"""A sample of torch's operators by torch's own road; ``python -m tests.sweeps.torch_road`` runs all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.sweeps.databases import Case, Entry, Operator
from tests.sweeps.torch_road import DTYPES, cases, entries, judge, unexplained


def odd(entry: Entry) -> str:
    """The verdict on the middle sample if nothing explains it."""
    samples = cases(entry)
    verdict = judge(samples[len(samples) // 2]) if samples else None
    return f"{entry}: {verdict}" if verdict is not None and unexplained(entry, verdict.outcome) else ""


@pytest.mark.parametrize("part", range(12))
def test_torchs_road_computes_what_eager_does(part: int) -> None:
    """Each part has every 48th operator in each dtype: together a quarter."""
    chosen = [entry for entry in entries() if not entry.name.startswith("jiterator")][part::48]
    assert [said for said in map(odd, chosen) if said] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dispatch_mode_changes_pinv_of_complex_matrices_alone(dtype: torch.dtype) -> None:
    """Where this fails, torch has mended it: ``FORGETS_FLAGS`` of ``roamc.capture.torch_faults`` can go."""
    case = Case(Operator(torch.linalg.pinv), (torch.randn(5, 3, dtype=dtype, requires_grad=True),), {})
    assert judge(case).outcome == ("mode" if dtype.is_complex else "same")


def test_no_entry_of_the_database_sets_a_seed_where_a_trace_would_lose_it() -> None:
    chosen = [entry for entry in entries() if entry.name in ("nn_functional_rrelu", "nn_functional_dropout2d")]
    assert chosen
    assert [judge(case).outcome for entry in chosen for case in cases(entry)[:1]] == ["same"] * len(chosen)


class Half(torch.autograd.Function):
    """A product with a gradient that is half of what it should be."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def test_wrong_gradients_and_other_values_are_found() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert judge(Case(Operator(Half.apply), (x,), {})).outcome == "slope"
    asked = Case(Operator(lambda x: x * (2 if type(x).__name__ == "FunctionalTensor" else 3)), (x,), {})
    assert judge(asked).outcome == "differs"
