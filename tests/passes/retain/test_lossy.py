"""A codec with an error is used only where the options name it, whoever made the plan."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.errors import OptionError, PlanError, VerifyError
from roamc.options import Options, parse_options
from roamc.passes.retain import codecs
from roamc.passes.retain.codecs import Codec, Coding, Kind, Saved
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import aten, captured_step


@dataclass(frozen=True)
class Halves(Coding):
    """Keeps a float32 as a bfloat16."""

    error = 2.0**-8

    count: int
    serves: frozenset[Kind] = frozenset(Kind)

    @property
    def nbytes(self) -> int:
        return 2 * self.count

    def encode(self, value: Tensor, /, *_: Tensor) -> Tensor:
        return aten._to_copy.default(value, dtype=torch.bfloat16)

    def decode(self, code: Tensor, /, *_: Tensor) -> Tensor:
        return aten._to_copy.default(code, dtype=torch.float32)


def fit(saved: Saved, serves: frozenset[Kind] = frozenset(Kind)) -> Halves | None:
    tensor = saved.tensor
    return Halves(tensor.numel(), serves) if tensor.dtype is torch.float32 and tensor.is_contiguous() else None


@pytest.fixture(autouse=True)
def _halves_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "CODECS", (*codecs.CODECS, Codec("halves", fit, lossy=True)))


def graph() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(64, 64), nn.Tanh())))
    return captured_step(model, (torch.randn(256, 64),), lambda m, x: m(x).square().mean(), torch.optim.SGD).graph


def used(plan: Plan) -> set[str]:
    return {code[1] for code in plan.decisions["retain"]["codes"]}


def test_unnamed_it_is_in_no_plan() -> None:
    assert "halves" not in used(search.run(graph(), parse_options({"memory_budget": "min"})).plan)


def test_named_it_is_used_and_the_plan_is_refused_without_the_name() -> None:
    options = parse_options({"memory_budget": "light", "codecs": "halves"})
    plan = search.run(graph(), options).plan
    assert used(plan) == {"halves"}
    kept = Plan.from_json(plan.to_json())
    assert search.run(graph(), options, kept).plan.decisions == plan.decisions
    with pytest.raises(VerifyError, match=r"is kept by codec 'halves', which has an error of 0.0039.*: allow it with"):
        search.run(graph(), Options(), kept)


def test_plan_is_refused_where_the_codec_does_not_serve_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not offered there either."""
    options = parse_options({"memory_budget": "light", "codecs": "halves"})
    plan = search.run(graph(), options).plan
    only_weights = Codec("halves", functools.partial(fit, serves=frozenset({Kind.WEIGHT})), lossy=True)
    monkeypatch.setattr(codecs, "CODECS", (*codecs.CODECS[:-1], only_weights))
    says = r"retain: codec 'halves' does not fit \w+: tanh_backward\w* reads it as 'slope', which this codec, with its"
    with pytest.raises(PlanError, match=says):
        search.run(graph(), options, Plan.from_json(plan.to_json()))
    assert used(search.run(graph(), options).plan) == set()


def test_way_in_takes_the_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    step = roamc.train_step(
        model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters()), codecs=("halves",)
    )
    assert math.isfinite(step(torch.randn(4, 8)).item())


@pytest.mark.parametrize("name", ["bits", "nonsense"])
def test_name_that_is_no_codec_with_an_error_is_refused(name: str) -> None:
    says = f"codecs: '{name}' is not a codec with an error; there are tempo, compact, halves"
    with pytest.raises(OptionError, match=says):
        search.run(graph(), parse_options({"codecs": name}))


def test_mistyped_name_of_a_codec_has_the_nearest() -> None:
    says = r"tempo, compact, halves; did you mean 'halves'\? Exact ones, which need no name: bits, signs, integers$"
    with pytest.raises(OptionError, match=says):
        search.options_of({"codecs": "halfs"})
