"""Texts that the ranks of a group exchange before a program runs, by the store in which they have met."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from roamc.compat_groups import Absent, exchanged, numbers_in, withdraw
from roamc.errors import RanksError

ON_SHARDS = "give all ranks of the group the same batch and options, or set shard='off'"
"""What to do about a rank that is missing, where a graph is split along the tokens."""

FIRST_STEP = "let all ranks of the group take their first step together, with the same model and options"
"""What to do about a rank that is missing, where ranks have parts or copies of parameters."""


NOBODY = 0
"""Number of no graph: no rank gives it up."""


class _Attempts:
    """Numbers the graphs that this process compiles, alike on all ranks that compile the same ones.

    Attributes:
        present: number of the last one that was begun.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.present = 0

    def begin(self) -> None:
        self.present = next(self._numbers)


_attempts = _Attempts()


def begin() -> None:
    """Number the graph that this process begins to compile; :func:`give_up` and :func:`texts_of` then mean this one.

    Numbers count up: call this once for each graph, so that ranks that compile the same graphs in one order have the
    same numbers.
    """
    _attempts.begin()


def give_up(error: Exception) -> None:
    """Tell the other ranks that this one has failed to compile the graph that was begun last.

    Ranks that wait for this one in :func:`texts_of`, or will, learn the first line of ``error`` within seconds.
    """
    withdraw(_attempts.present, str(error).partition("\n")[0] or type(error).__name__)


def texts_of(
    group: object, text: str, name: str, task: str, advice: str = ON_SHARDS, *, compiling: bool = True
) -> list[str]:
    """Return the ``text`` that each rank of a group passes to this function, in the order of the ranks.

    Every rank of the group must call it; the call waits for the others until the timeout of the process group, or
    until one of them gives up.

    Args:
        group: the process group or its name, as collectives take it.
        text: what the other ranks get from this rank.
        name: of the graph, for the message.
        task: what a rank that is missing has not done, in words, such as "plan it".
        advice: what to do about a rank that is missing.
        compiling: whether the ranks compile the graph that was begun last, so that one that gives it up is missing.

    Raises:
        RanksError: a rank is missing; names it, and says why if it has given up. Or the store is gone in which the
            ranks meet.
    """
    numbers = numbers_in(group)
    try:
        texts = exchanged(group, text, _attempts.present if compiling else NOBODY)
    except ConnectionError as error:
        raise RanksError(
            f"{name} is on several ranks, and the store in which {in_words(numbers)} meet to {task} does not answer: "
            "the process that holds it has ended, which is rank 0 unless a launcher such as torchrun holds it"
        ) from error
    absent = {number: reply.why for number, reply in zip(numbers, texts, strict=True) if isinstance(reply, Absent)}
    missing = list(absent)
    for number, why in absent.items():
        if why:
            raise RanksError(f"{name} is on several ranks, and {in_words([number])} could not {task}: {why}")
    if missing:
        raise RanksError(
            f"{name} is on several ranks, and {in_words(missing)} of the group of {in_words(numbers)} did not "
            f"{task} within the timeout of the process group, as where it has ended or runs something else: {advice}"
        )
    return [reply for reply in texts if not isinstance(reply, Absent)]


def first_difference(group: object, mine: Sequence[str], name: str) -> tuple[str, str, str] | None:
    """Compare what the ranks of a group send at their first step; every rank must call it at the same time.

    Args:
        group: the process group or its name, as collectives take it.
        mine: what this rank sends, a name for each collective, in their order.
        name: of the graph, for the message.

    Returns:
        The first rank that sends something else than the first rank of the group does, in words, and what the first
        rank and that one send at the place where they differ; None if all send the same.

    Raises:
        RanksError: a rank is missing; names it, and says why if it has given up.
    """
    sent = [tuple(json.loads(text)) for text in texts_of(group, json.dumps(mine), name, "capture it", FIRST_STEP)]
    return first_other(numbers_in(group), sent)


def first_other(numbers: Sequence[int], sent: Sequence[Sequence[str]]) -> tuple[str, str, str] | None:
    """Compare what ranks have sent, as :func:`first_difference` returns it.

    Args:
        numbers: of the ranks.
        sent: of each of them, a text for each collective, in their order.
    """
    for number, other in zip(numbers, sent, strict=True):
        if other != sent[0]:
            return in_words([number]), *difference(sent[0], other)
    return None


def difference(first: Sequence[str], second: Sequence[str]) -> tuple[str, str]:
    """Return what stands in two sequences at the first place where they differ; "nothing" behind the end of one."""
    return next((a, b) for a, b in zip((*first, "nothing"), (*second, "nothing"), strict=False) if a != b)


def in_words(numbers: Sequence[int]) -> str:
    """Return the ranks ``numbers`` in words, such as "rank 1" and "ranks 0, 1"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
