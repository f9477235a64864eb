"""A third of the strangers' models, each by one way in and budget; `make sweep` runs all of them by all ways."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
from collections.abc import Iterator

import pytest
import torch

from benchmarks._measure import counter_library
from tests.sweeps import pool, strangers_compare
from tests.sweeps.run_strangers import work
from tests.sweeps.strangers_compare import BUDGETS, GOOD, ROUTES, STRANGERS, Run, judge

WAYS = list(itertools.product(ROUTES, BUDGETS))
CASES = list(zip(list(STRANGERS)[::3], itertools.cycle(WAYS), strict=False))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled here is left behind."""
    yield
    torch._dynamo.reset()
    strangers_compare.reference.cache_clear()


@pytest.mark.parametrize(("name", "way"), CASES, ids=str)
def test_bits_of_torch_within_the_plan_or_a_named_limit(name: str, way: tuple[str, str | None]) -> None:
    verdict = judge(name, *way)
    assert verdict.outcome in GOOD, verdict


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="the heap counter needs a C compiler")
def test_objects_of_many_small_tensors_are_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(counter_library()))
    ((*_, row),) = pool.run(functools.partial(work, [("train_step", "min")]), ["cells"], 1)
    assert row["outcome"] == "same", row
    peak, needed = (int(re.findall(rf"{word} \[(\d+)\]", row["text"])[0]) for word in ("peak", "needed"))
    assert peak <= needed


def test_other_bits_and_more_memory_are_found() -> None:
    ours = strangers_compare.run(STRANGERS["distil"], "train_step")
    theirs = strangers_compare.reference("distil", "train_step", torch.get_num_threads())
    assert strangers_compare.compared(ours, theirs, [(1, 0)]).outcome == "same"
    above = Run(ours.results, [ours.plans[0][0].needed_bytes + 1], ours.plans)
    assert strangers_compare.compared(above, theirs, [(1, 0)]).outcome == "above"
    other = {**ours.results, "loss 0 of turn 2": ours.results["loss 0 of turn 2"] + 1e-3}
    assert strangers_compare.compared(Run(other, ours.peaks, ours.plans), theirs, [(1, 0)]).outcome == "differs"


def test_what_is_no_number_is_near_only_to_what_is_none() -> None:
    wanted = {"loss": torch.tensor([1.0, torch.nan, torch.inf])}
    assert not strangers_compare.far({"loss": wanted["loss"] * 1.0001}, wanted, {})
    assert strangers_compare.far({"loss": torch.tensor([1.0, 2.0, torch.inf])}, wanted, {})
    assert strangers_compare.far({"loss": torch.tensor([1.0, torch.nan, -torch.inf])}, wanted, {})
    assert strangers_compare.far({}, wanted, {})


def test_bits_between_eager_and_torch_are_no_farther_than_either_or_a_rounding() -> None:
    eager, by_torch = {"bias": torch.tensor([1.0])}, {"bias": torch.tensor([1.001])}
    farther = functools.partial(strangers_compare.far, wanted=eager, moves={}, near=strangers_compare.ROUNDINGS)
    assert not farther({"bias": torch.tensor([1.000001])}, other=by_torch)
    assert farther({"bias": torch.tensor([1.0005])}, other=by_torch)
    assert farther({"bias": torch.tensor([1.000001])}, other=eager)
    assert farther({"bias": torch.tensor([torch.nan])}, other=by_torch)
