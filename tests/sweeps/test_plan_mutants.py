"""A plan from a file with one field changed is refused, or its program gives the same bits; never anything else.

Any field of a plan file changed is refused by the file's name, and where the checksum is forged, counted again.

A sample of ``python -m tests.sweeps.run_plans``, which tries 5,000 of both.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sweeps import plan_fields
from tests.sweeps.plan_mutants import mutate, outcome, valid_plan

PLANS = (0, 1, 10, 17)
"""With trims, by both routes; with reruns; of a random model with an arena of nothing."""


@settings(max_examples=24, derandomize=True, deadline=None)
@given(st.sampled_from(PLANS), st.integers(0, 10**6), st.booleans())
def test_changed_plan_is_refused_or_gives_the_same_bits(number: int, seed: int, believed: bool) -> None:
    valid = valid_plan(number)
    data, _ = mutate(valid.data, Random(seed))
    outcome(valid, data, believed=believed)  # raises on other bits and on errors that are not ours


def test_both_ends_are_met() -> None:
    valid = valid_plan(0)
    assert outcome(valid, valid.data) == "same bits"
    assert outcome(valid, {**valid.data, "fingerprint": "x"}) == "refused"


def test_valid_plans_have_what_is_changed() -> None:
    kept = [valid_plan(number).data["decisions"] for number in PLANS]
    assert any(one["retain"]["reruns"] for one in kept)
    assert any(one["layout"]["trims"] for one in kept)
    assert any(one["normalize"]["dropouts"] for one in kept)
    assert all(one["reuse"]["overwrites"] for one in kept)


@pytest.mark.parametrize("kind", ["plain", "light", "overlap", "gpu"])
def test_changed_files_are_refused_and_forged_numbers_are_counted(kind: str, tmp_path: Path) -> None:
    one = plan_fields.saved(kind, tmp_path)
    wrong = []
    for spot, other in plan_fields.sample(one, 200):
        said = plan_fields.of_file(plan_fields.changed(one.data, spot, other), tmp_path / "changed.json")
        wrong += [(spot, said)] if said != "refused" else []
    for spot, other in plan_fields.sample(one, 20, plan_fields.is_counted):
        said = plan_fields.forged(one, plan_fields.changed(one.data, spot, other))
        wrong += [(spot, said)] if said.startswith("believed") else []
    assert not wrong
