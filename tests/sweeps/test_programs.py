"""A few random training programs, each by one way in; `make sweep` runs 500 of them by all of theirs."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator

import pytest
import torch

from tests.sweeps import program_lines, strangers_compare
from tests.sweeps.programs import KINDS, PRELUDE, program
from tests.sweeps.run_programs import GOOD, WAYS, ways_of
from tests.sweeps.strangers_compare import far, judge

SEEDS = range(10)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled here is left behind."""
    yield
    torch._dynamo.reset()
    strangers_compare.reference.cache_clear()


@pytest.mark.parametrize("seed", range(500, 504))
def test_bits_of_torch_within_the_plan_and_the_budget(seed: int) -> None:
    ((threads, budget, route),) = ways_of(seed, 1)
    verdict = judge(f"program {seed}", route, budget, threads=threads)
    assert verdict.outcome in GOOD, (verdict, program(seed).text)


def test_numbers_give_lines_of_all_kinds() -> None:
    lines = [program(seed).text.removeprefix(PRELUDE) for seed in SEEDS]
    text = "\n".join(lines)
    assert min(len(re.findall(r"^        \w", one, re.MULTILINE)) for one in lines) >= 20
    calls = (r"checkpoint\(self", r"_\(", r"\.half\(", r"\.apply\(", r"\.index_", r"\.double\(")
    words = ("no_grad", "bfloat16", "Conv2d", "BatchNorm", "dropout", "gather", "scatter", "scaled_dot_product")
    for word in (*calls, *words, "cross_entropy", "Embedding"):
        assert re.search(word, text), word
    used = [collections.Counter(re.findall(r"\bself\.(m\d+)\(", one)) for one in lines]
    assert any(max(counts.values(), default=0) > 1 for counts in used)  # the same weights twice


def test_a_number_gives_the_same_program_twice_and_it_trains() -> None:
    torch.manual_seed(5)
    first = program(3).text
    program.cache_clear()
    assert program(3).text == first
    stranger = program(3).stranger()
    stranger.loss(stranger.build(), *stranger.batch()).backward()


def test_ways_are_taken_equally_often() -> None:
    counts = collections.Counter(way for seed in range(300) for way in ways_of(seed, 1))
    assert set(counts) == set(WAYS)
    assert set(counts.values()) == {10}
    assert sorted(ways_of(5, len(WAYS)), key=str) == sorted(WAYS, key=str)


def test_a_number_that_is_farther_away_than_sums_in_another_order_is_found() -> None:
    torch.manual_seed(0)
    near = torch.randn(100)
    assert not far([near * (1 + 1e-5)], [near], {})
    assert far([near * 1.01], [near], {})
    assert far([near * torch.nan], [near], {})


def test_a_gradient_that_is_only_roundings_may_be_far_and_a_loss_may_not() -> None:
    stranger = program(24).stranger()  # a bias before a batch norm
    theirs = strangers_compare.reference("program 24", "train_step", 1).results
    moves = strangers_compare.moved_by("program 24", 1)
    ours = strangers_compare.run(strangers_compare.with_other_last_bits(stranger, 7), "eager").results
    assert far(ours, theirs, {})
    assert not far(ours, theirs, moves)
    assert far({**theirs, "loss 0 of turn 2": theirs["loss 0 of turn 2"] * 1.01}, theirs, moves)


def test_fast_programs_have_no_line_that_turns_small_changes_into_large_ones() -> None:
    fast = [program(seed) for seed in SEEDS if program(seed).fast]
    assert len(fast) == len(SEEDS) // 5
    assert not any(re.search(r"argsort|\.round\(|topk|argmax", p.text.removeprefix(PRELUDE)) for p in fast)
    assert KINDS.keys() <= vars(program_lines).keys()
