"""Ranks of a model whose activations or parameters are split plan together: the first rank decides for all.

    first rank       options, free bytes    plan, send the decisions            say how it went
    other ranks      options, free bytes    read them, apply and check them     say how it went

A rank of several groups has the decisions from whichever group the first rank is in, and hands them on in the others:

    ranks   0  1     group of rows 0 1: rank 0 decides, 1 takes it; that of 2 3: nothing yet
            2  3     groups of columns 0 2 and 1 3: ranks 2 and 3 take what ranks 0 and 1 hand on

With the budget ``"device"`` the smallest number of free bytes counts. A rank whose graph differs, as parts of unequal
size do, plans for itself; then no collective runs again on any rank. Where a rank fails, none goes on
alone: each gets an error before anything has run. What must be the same besides, batch and parameters,
:mod:`roamc.runtime.agreement` compares before the first step.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from roamc.compat_groups import is_planned_for, numbers_in, rank_in, ranks_in
from roamc.errors import BudgetError, OptionError, OtherStepError, RanksError, RoamcError
from roamc.exchange import FIRST_STEP, ON_SHARDS, PLANS, Opening, first_other, in_words, openings, other_batch, texts_of
from roamc.graph import TrainGraph
from roamc.graph.fingerprint import fingerprint
from roamc.graph.ranks import batch_of, collectives_of, with_agreements, with_same_plan
from roamc.options import Options
from roamc.passes.shard import choose
from roamc.planning import kept_plans, search
from roamc.planning.plan import Plan
from roamc.planning.plan_maker import limit_of
from roamc.planning.planned import Planned
from roamc.version import __version__

LARGEST = 4 << 20
"""Largest number of bytes of a plan that is sent; stores take 8 MiB. Of a larger one, each rank makes its own."""

FATAL: dict[str, type[RoamcError]] = {kind.__name__: kind for kind in (BudgetError, OptionError)}
"""Errors that end training on the rank where they are raised, by name; others may end in a fallback."""


def run(graph: TrainGraph, options: Options, meeting: Sequence[str] = ()) -> Planned:
    """Plan a graph as :func:`roamc.planning.search.run` does, on all ranks of its groups at the same time.

    Ranks talk to each other where ``options.shard`` is not "off" and forward sums over a group: its ranks need the
    same batch, and so make their plans at the same time. So do those of the groups in ``meeting``. The former meet
    again in every step, by the graph's agreements.

    Args:
        graph: the captured graph; it is changed in place.
        options: what the user set, the same on every rank.
        meeting: names of groups whose ranks plan at the same time for another reason, such as their first step.

    Raises:
        RanksError: another rank has other options, failed to plan, or does not plan; names it and the reason.
        OtherStepError: another rank runs a step that it has planned, or other collectives.
        RoamcError: as :func:`roamc.planning.search.run` raises, on the ranks where it does; a budget that one rank
            cannot keep, and an option that it refuses, is such an error on all ranks.
    """
    groups, by_tokens = groups_of(graph, options, meeting), _by_tokens(graph, options)
    if not groups:
        return kept_plans.run(graph, options)
    name = graph.name
    attempt = _Attempt(graph, options, FIRST_STEP if set(groups) <= set(meeting) else ON_SHARDS)
    for group in groups:
        attempt.meet(group, compared=options.shard == "whole" and group not in meeting)
    attempt.plan(groups, again=[group for group in groups if group not in meeting])
    _settle(groups, attempt.error, name, attempt.advice)
    assert attempt.planned is not None  # else there is an error
    planned = attempt.planned
    return dataclasses.replace(planned, graph=with_agreements(planned.graph, by_tokens))


def alone(graph: TrainGraph, options: Options, meeting: Sequence[str] = ()) -> Planned:
    """Plan a graph without waiting for another rank: as :func:`run` does where all ranks have the same.

    Args:
        graph: the captured graph; it is changed in place.
        options: what the user set.
        meeting: as for :func:`run`.

    Returns:
        The plan of this rank. Where :func:`run` would ask others, a note says that none was asked.

    Raises:
        RoamcError: as :func:`roamc.planning.search.run` raises.
    """
    return kept_plans.run(as_alone(graph, options, meeting), options)


def as_alone(graph: TrainGraph, options: Options, meeting: Sequence[str] = ()) -> TrainGraph:
    """Return the graph that :func:`alone` plans. Where :func:`run` would ask others, it notes that none was asked.

    Arguments are those of :func:`alone`.
    """
    groups = [group for group in groups_of(graph, options, meeting) if not is_planned_for(group)]
    if not groups:
        return graph
    same = ", options and free memory" if options.memory_budget == "device" else " and options"
    numbers = sorted({number for group in groups for number in numbers_in(group)})
    note = (
        f"planned without asking the other ranks: a step of {in_words(numbers)} takes this plan if all of them have "
        f"the same graph{same}"
    )
    graph = graph.replace(notes=(*graph.notes, note))
    return with_same_plan(graph, [group for group in groups if group not in meeting])


@contextlib.contextmanager
def on_all(groups: Sequence[object], name: str) -> Iterator[None]:
    """Context manager: what fails inside on one rank of the ``groups`` fails on all of them.

    Args:
        groups: what :func:`groups_of` returned; all of their ranks enter.
        name: of the graph.

    Raises:
        RanksError: it has failed on another rank; names it and the reason.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # it is raised once the other ranks know
        failed = error
    _settle(groups, failed, name)


def _settle(groups: Sequence[object], error: Exception | None, name: str, advice: str = ON_SHARDS) -> None:
    """Raise the ``error`` of this rank, or that another rank has one.

    Where the error of one rank may end in a fallback, so do those of all.
    """
    failure = _told(error)
    for group in groups:
        heard = _heard(group, texts_of(group, failure, name, "plan it", advice), name)
        if not failure or (heard and not _ends(heard)):
            failure = heard
    if error is not None and (type(error).__name__ not in FATAL or _ends(failure)):
        raise error
    if failure:
        kind, message = json.loads(failure)
        raise FATAL.get(kind, RanksError)(message)


def _ends(failure: str) -> bool:
    """Whether an error of which is told ends training on the rank where it is raised."""
    return json.loads(failure)[0] in FATAL


def _told(error: Exception | None) -> str:
    """Kind and first line of an error; empty if there is none."""
    return json.dumps([type(error).__name__, str(error).partition("\n")[0]]) if error is not None else ""


def groups_of(graph: TrainGraph, options: Options, meeting: Sequence[object] = ()) -> list[object]:
    """Return the groups whose ranks plan ``graph`` together; none where each plans for itself.

    Arguments are those of :func:`run`.
    """
    return list(dict.fromkeys((*_by_tokens(graph, options), *filter(_is_of_several, meeting))))


def _by_tokens(graph: TrainGraph, options: Options) -> list[object]:
    """The groups of several ranks that need the same batch in every step."""
    return list(filter(_is_of_several, choose.groups(graph))) if options.shard != "off" else []


def _is_of_several(group: object) -> bool:
    return (ranks_in(group) or 1) > 1


def any_of(groups: Sequence[object], said: bool, name: str, advice: str = ON_SHARDS) -> bool:
    """Return whether a rank of the ``groups`` passes True as ``said``; all of them call this at the same time.

    Args:
        groups: what :func:`groups_of` returned.
        said: what this rank says.
        name: of the graph.
        advice: what to do about a rank that does not come.

    Raises:
        RanksError: a rank does not come to say it.
    """
    for group in groups:
        said = "yes" in texts_of(group, "yes" if said else "no", name, "plan it", advice)
    return said


class _Attempt:
    """What a rank has come to so far: a plan, or the error that has ended its planning.

    Every rank exchanges the same texts in turn, whether it has failed or not: an empty text says nothing.
    """

    def __init__(self, graph: TrainGraph, options: Options, advice: str) -> None:
        self.graph, self.asked, self.options, self.name = graph, options, options, graph.name
        self.advice, self.mark = advice, fingerprint(graph, of_any_rank=True)
        self.alike, self.follows = True, False
        self.planned: Planned | None = None
        self.error: Exception | None = None

    def meet(self, group: object, *, compared: bool) -> None:
        """Compare options and versions; with the budget "device" take the smallest number of free bytes of all ranks.

        Args:
            group: its ranks.
            compared: whether they compare their collectives as well. Else they do so before the first step, if the
                graph has parts of tokens, or each may get a graph of its own at a later step.

        Raises:
            RanksError: a rank has other options or versions than the first; raised on all ranks of the group.
            OtherStepError: a rank runs other collectives than the first, or runs a step that it has planned; raised on
                all ranks of the group.
        """
        own = ("cache", "profile")  # each rank's own; a profile may be a path
        fields = (item.name for item in dataclasses.fields(self.asked) if item.name not in own)
        options = {name: repr(getattr(self.asked, name)) for name in fields}
        mine = {**options, "roamc": __version__, "torch": torch.__version__}
        collectives = list(collectives_of(self.graph, group)) if compared else []
        text = json.dumps([mine, self._free(), self.mark, collectives])
        opened = openings(group, Opening(PLANS, text, batch_of(self.graph)), self.name, self.advice)
        ranks = [json.loads(opening.text) for opening in opened]
        marks = [record[2] for record in ranks]
        self.alike = self.alike and set(marks) == {self.mark}
        self.follows = self.follows or self.mark in marks[: rank_in(group)]
        for number, (other, *_) in zip(numbers_in(group), ranks, strict=True):
            first = ranks[0][0]
            for key in mine:
                if other.get(key) != first.get(key):
                    raise RanksError(
                        f"{self.name} is on several ranks, and {in_words([number])} plans it with {key}="
                        f"{other.get(key)}, {in_words(numbers_in(group)[:1])} with {first.get(key)}: "
                        "give all ranks the same"
                    )
        self._compare(group, [record[3] for record in ranks], [opening.batch for opening in opened])
        if self.asked.memory_budget == "device":
            free = min((record[1] for record in ranks if record[1] is not None), default=None)
            self.options = dataclasses.replace(self.options, memory_budget=free, cache=False)

    def _compare(
        self, group: object, collectives: Sequence[Sequence[str]], batches: Sequence[Mapping[str, str]]
    ) -> None:
        """Check that all ranks of ``group`` run the same collectives: else one waits for ever, or adds other values."""
        numbers = numbers_in(group)
        differs = first_other(numbers, collectives)
        if differs is not None:
            (other, expected, runs), first = differs, in_words(numbers[:1])
            batch = next((batch for batch, sent in zip(batches, collectives, strict=True) if sent != collectives[0]))
            why = other_batch(batches[0], batch, first)
            raise OtherStepError(
                f"{self.name} is on several ranks, and {other} runs {runs} where {first} runs {expected}"
                f"{f' ({why})' if why else ''}: give all ranks the same model and batch"
            )

    def _free(self) -> int | None:
        """The budget in bytes so far, where it is what the device has free."""
        if self.options.memory_budget != "device":
            return self.options.limit_bytes
        try:
            return limit_of(self.graph, "device", 0)
        except OptionError as error:
            self.error = error
            return None

    def plan(self, groups: Sequence[object], *, again: Sequence[object]) -> None:
        """Plan on the first rank of those with one graph; elsewhere apply its decisions and check them.

        A rank to which no decisions for its graph come plans for itself.

        Args:
            groups: the groups that meet.
            again: those of them whose collectives may run again. Not where only first steps meet: a rank that gets
                another batch size later plans it alone, and would send other collectives than the ranks that go on with
                this plan.
        """
        if again and not any_of(groups, not self.alike, self.name, self.advice):
            self.graph = with_same_plan(self.graph, again)
        if not self.follows:
            self._search("")
        sent = _packed(self.planned.plan) if self.planned is not None else ""
        for group in groups:
            texts = texts_of(group, f"{self.mark} {sent}", self.name, "plan it", self.advice)
            handed = dict(reversed([text.split(" ", 1) for text in texts if not text.endswith(" ")]))
            sent = sent or handed.get(self.mark, "")
        if self.follows:
            self._search(sent)

    def _search(self, sent: str) -> None:
        """Plan, by the decisions of the plan ``sent`` if there is one; it is for this graph."""
        if self.error is not None:
            return
        try:
            if sent:
                self.planned = search.run(self.graph, self.options, self._received(sent))
            else:
                self.planned = kept_plans.run(self.graph, self.options)
        except Exception as error:  # it is raised once the other ranks know
            self.error = error

    def _received(self, text: str) -> Plan:
        """The plan that another rank has sent, for the graph of this one: both have the same :attr:`mark`."""
        plan = Plan.from_json(zlib.decompress(base64.b64decode(text)).decode())
        return dataclasses.replace(plan, fingerprint=fingerprint(self.graph))


def _packed(plan: Plan) -> str:
    text = base64.b64encode(zlib.compress(plan.to_json().encode())).decode()
    return text if len(text) <= LARGEST else ""


def _heard(group: object, texts: Sequence[str], name: str) -> str:
    """What this rank tells on of the failures of the group, kind and text of the first; empty if there is none.

    One that may end in a fallback goes before one that ends training.
    """
    failures = [(number, text) for number, text in zip(numbers_in(group), texts, strict=True) if text]
    for number, text in sorted(failures, key=lambda failure: _ends(failure[1])):
        kind, message = json.loads(text)
        return json.dumps([kind, f"{in_words([number])} could not plan {name}: {message or kind}"])
    return ""
