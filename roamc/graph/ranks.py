"""What ranks of a group tell each other before a program runs: texts, by the store in which they have met."""

from __future__ import annotations

from collections.abc import Sequence

from roamc.compat_groups import exchanged, numbers_in
from roamc.errors import RanksError

ON_SHARDS = "give all ranks of the group the same batch and options, or set shard='off'"
"""What to do about a rank that is missing, where a graph is split along the tokens."""

FIRST_STEP = "let all ranks of the group take their first step together, with the same model and options"
"""What to do about a rank that is missing, where parameters are split."""


def texts_of(group: object, text: str, name: str, what: str, advice: str = ON_SHARDS) -> list[str]:
    """Return the ``text`` that each rank of a group passes to this function, in the order of the ranks.

    Every rank of the group must call it; the call waits for the others until the timeout of the process group.

    Args:
        group: the process group or its name, as collectives take it.
        text: what the other ranks get from this rank.
        name: of the graph, for the message.
        what: what a rank that is missing has not done, in words, such as "plan it".
        advice: what to do about a rank that is missing.

    Raises:
        RanksError: a rank is missing; names it.
    """
    texts = exchanged(group, text)
    numbers = numbers_in(group)
    missing = [number for number, found in zip(numbers, texts, strict=True) if found is None]
    if missing:
        raise RanksError(
            f"{name} is on shards, and {in_words(missing)} of the group of {in_words(numbers)} ran something else "
            f"and did not {what} within the timeout of the process group: {advice}"
        )
    return [found for found in texts if found is not None]


def in_words(numbers: Sequence[int]) -> str:
    """Return the ranks ``numbers`` in words, such as "rank 1" and "ranks 0, 1"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
