"""What pass retain decides."""

from __future__ import annotations

from dataclasses import dataclass

from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Decision:
    """A decision names the operators that run again, the storages that are encoded, and the order they are decided for.

    Attributes:
        order: names of all operators without the reruns, first to last; empty without a budget.
        reruns: (operator in front of which it runs, operator that runs again, storages that it renews, predicted
            seconds), in the order in which they run.
        peak_bytes: live bytes at the worst step of that order with the reruns, workspace included; later passes may
            lower it.
        added_seconds: predicted time of all reruns and of the operators that ``codes`` add.
        bound_seconds: lower bound on ``added_seconds`` of any choice within the same peak; 0 where none is known.
        status: ``"optimal"`` if no choice adds less, ``"gap"`` if that is not proved, ``"limit"`` if the solver's work
            limit ended the search, ``"infeasible"`` if the peak asked for was not reached.
        allowed: what might run again, ``"all"`` or ``"light"`` operators; bound and status hold for these.
        codes: (storage, codec, bytes of the storage, bytes of its code, predicted seconds that this adds) of every
            storage that readers behind forward get decoded. ``order`` and ``reruns`` are of the graph with codecs.
    """

    order: tuple[str, ...]
    reruns: tuple[tuple[str, str, tuple[str, ...], Seconds], ...]
    peak_bytes: Bytes
    added_seconds: Seconds
    bound_seconds: Seconds
    status: str
    allowed: str
    codes: tuple[tuple[str, str, Bytes, Bytes, Seconds], ...] = ()


NOTHING = Decision((), (), 0, 0.0, 0.0, "optimal", "all")
"""Everything is kept, as eager PyTorch does."""
