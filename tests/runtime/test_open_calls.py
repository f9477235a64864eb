"""Open calls are counted when the backward of one begins, of those alone whose own backward comes."""

from __future__ import annotations

import random

import pytest
import torch

from roamc.runtime.open_calls import Held, OpenCalls


def run(events: str, calls: OpenCalls | None = None) -> OpenCalls:
    """Each letter opens a call; again, in upper case, its backward begins; "a*" keeps it open, "a-" drops it."""
    calls, tokens = calls or OpenCalls(), dict[str, torch.Tensor]()
    for event, what in zip(events, events[1:] + " ", strict=False):
        if what == "-":
            del tokens[event]
        elif event.isupper():
            calls.backward(tokens[event.lower()], kept=what == "*")
        elif event.isalpha():
            tokens[event] = torch.zeros(4)
            calls.open(tokens[event], 100)
    return calls


@pytest.mark.parametrize(
    ("events", "most"),
    [
        ("", 0),
        ("abc", 0),
        ("aAbBcC", 1),
        ("abcCBA", 3),
        ("abcABC", 3),
        ("abBcCA", 2),
        ("abcBCa-", 2),
        ("abcdeEd-c-b-a-", 1),
        ("abBcdeEDCA", 4),
        ("abA*B", 2),
        ("aA*bB", 2),
        ("aA*a-bB", 1),
        ("abcCBAdeED", 3),
    ],
)
def test_most(events: str, most: int) -> None:
    assert run(events).most == most


@pytest.mark.parametrize("seed", range(50))
def test_most_of_random_calls_is_that_of_counting_afterwards(seed: int) -> None:
    """Each call is opened, and later begins its backward or is dropped; some are kept open by their backward."""
    draw = random.Random(seed)
    names = "abcdefghij"
    events, live, begun, spans = "", list[str](), set[str](), []
    fate = {name: draw.choice(["backward", "backward", "drop", "keep"]) for name in names}
    left = list(names)
    while left or live:
        if left and (not live or draw.random() < 0.5):
            live.append(left.pop(0))
            events += live[-1]
            continue
        name = draw.choice(live)
        if fate[name] == "drop" or name in begun:
            events += f"{name}-"
            live.remove(name)
            continue
        spans.append({each for each in live if fate[each] != "drop"})
        begun.add(name)
        events += name.upper() + ("*" if fate[name] == "keep" else "")
        if fate[name] == "backward":
            live.remove(name)
    assert run(events).most == max(map(len, spans), default=0), events


def test_bytes_are_held_until_the_backward_and_counted_for_other_graphs() -> None:
    held = Held()
    first, second = OpenCalls(held), OpenCalls(held)
    first.begin(1000)
    run("abA", first)
    assert (first.nbytes, held.nbytes, held.most, first.beside) == (0, 0, 1000, 0), "b was dropped as run() returned"
    token = torch.zeros(4)
    first.open(token, 300)
    second.begin(50)
    assert (second.beside, second.nbytes, held.nbytes, held.most) == (300, 0, 300, 1000)
    second.begin(5000)
    assert held.most == 5300
    first.backward(token, kept=False)
    assert held.nbytes == first.nbytes == 0


def test_nothing_is_remembered_of_calls_that_are_over() -> None:
    calls = run("abcCBAdefgGD")
    assert not calls._open
    assert not calls._moments
    assert not calls._begun
