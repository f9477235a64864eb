"""The search along budgets: which peak is asked for next, on made-up answers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from roamc.planning import budget_search
from roamc.planning.effort import EFFORT


@dataclass(frozen=True)
class Guess:
    needed_bytes: int
    asked_bytes: int
    added_seconds: float
    strained: bool = False

    @property
    def asked_seconds(self) -> float:
        return self.added_seconds


@pytest.mark.parametrize("seed", range(50))
def test_search_keeps_the_budget_wherever_the_passes_are_off_by_a_little(seed: int) -> None:
    """Peaks come in steps, and differ by some noise from what was asked for; lower peaks cost more."""
    rng = random.Random(seed)
    step, noise = rng.choice((1, 10, 70)), rng.choice((0, 5, 40))
    asked: list[int] = []

    first = Guess(1000, 1000, 0.0)

    def attempt(target: int) -> Guess:
        asked.append(target)
        foreseen = max(200, target // step * step)
        return Guess(foreseen + random.Random(seed + target).randint(-noise, noise), foreseen, 1000 - foreseen)

    best = budget_search.best(budget_search.search(lambda: first, 0, attempt, 600), 600)
    assert len(asked) <= EFFORT.budget_rounds
    assert best.needed_bytes <= 600
    assert best.needed_bytes >= 600 - step - 3 * noise - 600 * EFFORT.close_share
    assert budget_search.search(lambda: first, 0, attempt, 1000) == [first]
    asked.clear()
    assert min(guess.needed_bytes for guess in budget_search.search(lambda: first, 0, attempt, 100)) <= 200 + noise
    assert len(asked) == 1, "there is nothing lower to ask for"


def test_plan_without_reruns_is_not_made_where_it_cannot_be_the_answer() -> None:
    calls: list[str] = []

    def first() -> Guess:
        calls.append("first")
        return Guess(950, 900, 0.0)

    def attempt(target: int) -> Guess:
        return Guess(max(target, 500), max(target, 500), 1.0)

    assert budget_search.search(first, 900, attempt, 600)[-1].needed_bytes <= 600
    assert not calls, "900 is above the budget"
    assert budget_search.search(first, 900, attempt, 920)[-1].needed_bytes <= 920
    assert calls == ["first"], "it might have fitted"


LOWEST = Guess(98, 98, 9.0)


@pytest.mark.parametrize(
    ("tried", "limit", "needed"),
    [
        (Guess(90, 90, 1.0), 0, 98),  # "min"
        (Guess(130, 130, 1.0), 140, 130),  # kept
        (Guess(130, 130, 1.0, strained=True), 140, 130),  # kept, and the lowest plan takes longer
        (Guess(105, 105, 1.0), 100, 98),  # kept by the lowest plan alone
        (Guess(105, 105, 1.0), 97, 98),  # refused
        (Guess(95, 95, 1.0, strained=True), 97, 98),  # refused, though the search has happened on a lower plan
    ],
)
def test_budget_is_kept_exactly_from_the_lowest_plan_on(tried: Guess, limit: int, needed: int) -> None:
    assert budget_search.fit(lambda limit: [tried], lambda: LOWEST, limit).needed_bytes == needed


def test_lowest_plan_is_not_made_where_it_cannot_be_the_answer() -> None:
    def lowest() -> Guess:
        raise AssertionError("not asked for")

    assert budget_search.fit(lambda limit: [Guess(130, 130, 1.0)], lowest, 140).needed_bytes == 130
    assert budget_search.fit(lambda limit: [Guess(130, 130, 1.0)], lowest, 100, quick=True).needed_bytes == 130
    with pytest.raises(AssertionError, match="not asked for"):
        budget_search.fit(lambda limit: [Guess(105, 105, 1.0)], lowest, 100, quick=True)


def test_lowest_plan_is_looked_for_between_the_lowest_and_that_with_the_fewest_live_bytes() -> None:
    """One with fewer live bytes may need more, and one with more less; plans above their target end it, unseen."""
    asked: list[int] = []

    def attempt(target: int) -> Guess:
        asked.append(target)
        live = max(88_000, target // 100 * 100)
        return Guess(live + (40_000 if live < 88_500 else 20_000), live, 1.0, strained=live > target)

    guesses = [Guess(120_000, 120_000, 0.0), Guess(110_000, 70_000, 9.0)]
    assert 108_500 <= budget_search.lower(guesses, attempt).needed_bytes < 109_000
    assert asked == sorted(asked, reverse=True)
    assert asked[-1] < 88_000 <= asked[-2]


def test_lowest_plan_is_looked_for_so_often_and_no_more() -> None:
    asked: list[int] = []

    def falling(target: int) -> Guess:
        asked.append(target)
        return Guess(target, target, 1.0)

    assert budget_search.lower([Guess(100_000, 100_000, 0.0)], falling).needed_bytes == asked[-1] < 96_500
    assert len(asked) == EFFORT.descents
    asked.clear()
    budget_search.lower([Guess(100_000, 100_000, 0.0)], falling, dataclasses.replace(EFFORT, descents=2))
    assert len(asked) == 2
    asked.clear()
    budget_search.lower([Guess(100_000, 100_000, 0.0)], falling, refused=98_000)
    assert min(asked) > 98_000


@pytest.mark.parametrize("seed", range(50))
def test_lowest_peak_within_a_time_is_as_low_as_that_of_all_targets(seed: int) -> None:
    """Peaks come in steps down to one below which there is nothing; each lower one takes longer."""
    rng = random.Random(seed)
    lowest, step, seconds = rng.randint(1, 900), rng.choice((1, 10, 70)), rng.choice((0.5, 20, 300, 2000))
    asked: list[int] = []

    def attempt(target: int) -> Guess:
        asked.append(target)
        peak = max(lowest, target // step * step)
        return Guess(peak, peak, (1000 - peak) * rng.choice((1, 1.2)), strained=peak > target)

    peaks = {max(lowest, target // step * step) for target in range(1000)}
    kept = budget_search.within(attempt, 0, 1000, seconds)
    assert len(asked) <= EFFORT.time_rounds
    assert kept == sorted(kept, key=lambda one: one.asked_bytes)
    assert all(one.asked_seconds <= seconds and one.asked_bytes < 1000 for one in kept)
    surely = [peak for peak in peaks if 1.2 * (1000 - peak) <= seconds]
    if surely:
        assert kept[0].asked_bytes <= min(surely) + step + 1000 * EFFORT.left_share


@pytest.mark.parametrize(
    ("seconds_of", "most"),
    [
        (lambda saved: 10 * saved, 6.8),
        (lambda saved: 10 * saved, 7.2),
        (lambda saved: 5 * saved**2, 0.01),
        (lambda saved: max(0.0, saved - 0.4), 0.0),
        (lambda saved: 0.0 if saved < 0.4 else 1e9, 0.01),
        (lambda saved: 0.3 if saved else 0.0, 0.01),
    ],
    ids=["even", "even again", "convex", "free first", "steep then", "never"],
)
def test_lowest_peak_within_a_time_is_asked_for_with_few_questions(
    seconds_of: Callable[[float], float], most: float
) -> None:
    asked: list[int] = []

    def attempt(target: int) -> Guess:
        asked.append(target)
        return Guess(target, target, seconds_of(1 - target / 100_000))

    kept = budget_search.within(attempt, 10_000, 100_000, most)
    lowest = min(peak for peak in range(10_000, 100_001, 10) if seconds_of(1 - peak / 100_000) <= most)
    assert (kept[0].asked_bytes if kept else 100_000) <= lowest + 100_000 * EFFORT.left_share + 10
    assert len(asked) <= 9
    assert not budget_search.within(attempt, 100_000, 100_000, most)


@pytest.mark.parametrize("slack", [1.0, 1.05, 1.1])
def test_bound_on_the_seconds_spares_questions(slack: float) -> None:
    """Answers add more than the bound says, by a share that hardly changes."""

    def seconds(peak: int) -> float:
        return (1 - peak / 100_000) ** 6

    def asked(least: Callable[[int], float] | None) -> tuple[int, int]:
        targets: list[int] = []

        def attempt(target: int) -> Guess:
            targets.append(target)
            return Guess(target, target, slack * seconds(target))

        return budget_search.within(attempt, 30_000, 100_000, 0.13, least=least)[0].asked_bytes, len(targets)

    peak, questions = asked(seconds)
    lowest = min(peak for peak in range(30_000, 100_000) if slack * seconds(peak) <= 0.13)
    assert peak <= lowest + 100_000 * EFFORT.left_share
    assert questions <= 4 < asked(None)[1]


@pytest.mark.parametrize("bound", [0, 900])
def test_peak_that_cannot_be_reached_does_not_hide_one_that_adds_as_little(bound: int) -> None:
    """Below 930 there is nothing, and what is found there takes too long."""

    def attempt(target: int) -> Guess:
        return Guess(max(target, 930), max(target, 930), 30.0 if target < 935 else 1.0, strained=target < 930)

    assert budget_search.within(attempt, bound, 1000, 10.0)[0].asked_bytes < 940


def test_an_answer_at_the_bound_ends_the_questions() -> None:
    kept = budget_search.within(lambda target: Guess(600, 600, 0.5), 600, 1000, 1.0, least=lambda peak: 0.0)
    assert [one.asked_bytes for one in kept] == [600]
