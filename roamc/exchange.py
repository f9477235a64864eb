"""Texts that the ranks of a group exchange before a program runs, by the store in which they have met."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from roamc.compat_groups import Absent, exchanged, leave_text, numbers_in, withdraw
from roamc.errors import OtherStepError, RanksError

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
        met: whether this process has met other ranks for it.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.present = 0
        self.met = False

    def begin(self) -> None:
        self.present = next(self._numbers)
        self.met = False


_attempts = _Attempts()


def begin() -> None:
    """Number the graph that this process begins to compile; :func:`give_up` and :func:`texts_of` then mean this one.

    Numbers count up: call this once for each graph, so that ranks that compile the same graphs in one order have the
    same numbers.
    """
    _attempts.begin()


def give_up(error: Exception, groups: Iterable[object] = ()) -> None:
    """Tell the other ranks that this one has failed to compile the graph that was begun last.

    Ranks that wait for this one in :func:`texts_of`, or will, learn the first line of ``error`` within seconds. So do
    those that run a program, and have nothing to compile, where this rank has met nobody yet.

    Args:
        error: what failed.
        groups: those whose ranks run earlier programs of the same step together.
    """
    why = str(error).partition("\n")[0] or type(error).__name__
    for group in groups if not _attempts.met else ():
        leave_text(group, json.dumps((FAILED, why, {})))
    withdraw(_attempts.present, why)


PLANS, RUNS, FAILED = "plans it", "runs it", "failed"


class Opening(NamedTuple):
    """What a rank is about to do with a step.

    Attributes:
        does: ``PLANS``, or ``RUNS`` if it has a program for the step.
        text: what it tells the other ranks besides.
        batch: name of each tensor of its batch to dtype and sizes.
    """

    does: str
    text: str
    batch: Mapping[str, str]


def openings(group: object, mine: Opening, name: str, advice: str = ON_SHARDS) -> list[Opening]:
    """Return what each rank of a group is about to do; all of them call this first in every step that they share.

    Args:
        group: the process group or its name, as collectives take it.
        mine: what this rank is about to do.
        name: of the graph, for the message.
        advice: what to do about a rank that is missing.

    Raises:
        OtherStepError: some ranks plan a step and others run one; raised on all ranks, names the first difference.
        RanksError: a rank has failed before it could plan the step, or is missing.
    """
    plans = mine.does == PLANS
    task = "plan it" if plans else "compare its batch"
    texts = texts_of(group, json.dumps(mine), name, task, advice, compiling=plans)
    numbers, ranks = numbers_in(group), [Opening(*json.loads(text)) for text in texts]
    if not plans and any(rank.does != RUNS for rank in ranks):
        begin()  # that rank has, and all count alike
    for number, rank in zip(numbers, ranks, strict=True):
        if rank.does == FAILED:
            raise RanksError(f"{name} is on several ranks, and {in_words([number])} could not plan it: {rank.text}")
        if rank.does != ranks[0].does:
            first = in_words(numbers[:1])
            why = other_batch(ranks[0].batch, rank.batch, first) or (
                "their batches have the same sizes, so another number of the batch, or what forward, hooks or the loss "
                "read, has changed on one of them, or one has planned in a call that failed (torch.compiler.reset() on "
                "all ranks lets them plan anew)"
            )
            raise OtherStepError(
                f"{name} is on several ranks, and at this step {in_words([number])} {_at_step(rank)} while {first} "
                f"{_at_step(ranks[0])}: {why}; {advice}"
            )
    return ranks


def _at_step(rank: Opening) -> str:
    return "plans a step" if rank.does == PLANS else "runs one that it has planned"


def other_batch(first: Mapping[str, str], other: Mapping[str, str], who: str) -> str:
    """Say in which tensor two batches differ first, such as "batch[0] is float32 [2], on rank 0 float32 [4]".

    Args:
        first: a batch, see :attr:`Opening.batch`.
        other: the batch that the answer is about.
        who: whose the first batch is, such as "rank 0".

    Returns:
        The difference; empty if there is none.
    """
    for name in dict.fromkeys((*first, *other)):
        if first.get(name) != other.get(name):
            return f"{name} is {other.get(name, 'not there')}, on {who} {first.get(name, 'not there')}"
    return ""


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
    _attempts.met |= compiling
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
