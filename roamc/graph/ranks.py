"""What ranks of a group tell each other before a program runs, and which collectives they may therefore run again.

Texts go by the store in which the ranks have met. A collective that one rank runs again and another does not would wait
for ever, or take the bytes of the next one: it may run again only where all ranks of its group run one plan
(:attr:`roamc.graph.TrainGraph.same_plan`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Sequence

from torch import fx

from roamc.compat_groups import Absent, exchanged, is_planned_for, numbers_in, sums_in_one_order, withdraw
from roamc.errors import RanksError, VerifyError, way_out
from roamc.graph.train_graph import Phase, SamePlan, TrainGraph, operators, tensors_of
from roamc.operators import ops
from roamc.operators.schemas import group_of, name_of
from roamc.operators.table import Together

ON_SHARDS = "give all ranks of the group the same batch and options, or set shard='off'"
"""What to do about a rank that is missing, where a graph is split along the tokens."""

FIRST_STEP = "let all ranks of the group take their first step together, with the same model and options"
"""What to do about a rank that is missing, where ranks have parts or copies of parameters."""


def runs_together(node: fx.Node, same_plan: Sequence[SamePlan]) -> bool:
    """Return whether ``node`` is a collective that may run again: on all ranks of its group, with the same bits.

    Args:
        node: any operator.
        same_plan: of the graph that ``node`` belongs to.
    """
    gives = ops.rule(node.target).together if same_plan else None
    if gives is None:
        return False
    group = group_of(node)
    return any(plan.group == group and (plan.sums or gives is Together.MOVED) for plan in same_plan)


def plans_apart(graph: TrainGraph) -> object | None:
    """Return the first group over which forward adds up, and whose ranks may run other plans; None if there is none.

    Its ranks hold copies of parameters whose gradients nobody adds up: each rank must get the same bits by itself.

    Args:
        graph: any graph.
    """
    one_plan = {plan.group for plan in graph.same_plan}
    sums = (
        group_of(node)
        for node in operators(graph.graph)
        if graph.phase[node.name] is Phase.FORWARD and ops.rule(node.target).together is Together.SUMMED
    )
    return next((group for group in sums if group not in one_plan), None)


def check_again(graph: TrainGraph, again: Collection[object], after: str) -> None:
    """Check that ranks compare which collectives they run, where a pass has some run again.

    Args:
        graph: what the pass left.
        again: groups of ranks of which more collectives run again than before the pass.
        after: name of the pass, for the message.

    Raises:
        VerifyError: names a group whose ranks do not compare.
    """
    compared = {agreement.group for agreement in graph.agreements}
    missing = next((group for group in again if group not in compared), None)
    if missing is not None:
        raise VerifyError(
            f"after pass {after!r}: collectives of {missing!r} run again, and its ranks do not compare which; "
            f"{way_out(after)}"
        )


def with_same_plan(graph: TrainGraph, groups: Sequence[object]) -> TrainGraph:
    """Return ``graph`` with a note that all ranks of each of ``groups`` run the plan that is made for it.

    Args:
        graph: the captured graph.
        groups: names of groups, as operators are called with them.
    """
    return graph.replace(same_plan=tuple(SamePlan(group, sums_in_one_order(group)) for group in groups))


def planned_groups(graph: TrainGraph) -> list[object]:
    """Return the groups of ``graph`` that need not be there: one process plans for all of their ranks."""
    groups = dict.fromkeys(group_of(node) for node in operators(graph.graph) if ops.rule(node.target).collective)
    return [group for group in groups if is_planned_for(group)]


def collectives_of(graph: TrainGraph, group: object) -> Iterator[str]:
    """Yield a line for each collective of a group, in the order in which they run: what its ranks must have the same.

    Where collectives may run again, it names the operator: of two equal layers, all ranks must gather the same one.

    Args:
        graph: any graph.
        group: name of the group, as operators are called with it.
    """
    named = any(each.group == group for each in graph.same_plan)
    for node in operators(graph.graph):
        if group_of(node) == group:
            sizes = "" if "all_to_all" in name_of(node.target) else [tuple(t.shape) for _, t in tensors_of(node)]
            dtypes = [str(tensor.dtype) for _, tensor in tensors_of(node)]
            name = name_of(node.target).replace("start_", "")  # no matter where a rank waits
            yield f"{name} {node.name if named else ''} {graph.phase[node.name].name} {dtypes} {sizes}"


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
