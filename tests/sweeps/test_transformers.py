"""Steps of some model types of transformers, bit for bit; `make sweep` takes all types that it can build small."""

from __future__ import annotations

import pytest

from tests.sweeps.transformers_models import Entry, judge

NAMES = (
    "llama", "albert", "bamba", "bart", "bloom", "canine", "clip", "gemma", "deberta", "dinov2", "falcon", "fnet",
    "lfm2", "ctrl", "exaone4", "flex_olmo", "mixtral", "olmo3", "qwen3", "solar_open", "voxtral",
)  # fmt: skip
CACHED = {"albert": None, "canine": None, "clip": None, "deberta": None, "dinov2": None, "fnet": None}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_has_the_bits_of_eager(name: str) -> None:
    verdict = judge(Entry(name, CACHED.get(name, False)))
    assert verdict.outcome == "same", verdict


def test_a_step_that_reads_numbers_of_its_batch_is_refused_with_the_line() -> None:
    verdict = judge(Entry("flaubert"))
    assert verdict.outcome == "refused"
    assert "batch[0]: only yes or no may, no number" in verdict.text
    assert "modeling_flaubert.py" in verdict.text
