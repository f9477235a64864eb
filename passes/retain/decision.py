"""What pass retain decides."""

from __future__ import annotations

from dataclasses import dataclass

from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Decision:
    """What runs again, and in which order of the operators that was decided.

    Attributes:
        order: names of all operators, first to last; empty if nothing was asked.
        reruns: (operator in front of which it runs, operator that runs again, storages that it renews, predicted
            seconds), in the order in which they run.
        peak_bytes: live bytes at the worst step of that order, what operators take for themselves included; the passes
            behind may lower it.
        added_seconds: predicted time of all reruns, and of what ``codes`` add.
        bound_seconds: no choice within the same peak adds less; 0 where that is not known.
        status: ``"optimal"``, ``"gap"``, ``"limit"``, or ``"infeasible"`` if the peak asked for was not reached.
        allowed: what might run again, ``"all"`` or ``"light"``; the bound and the status hold for that.
        codes: (storage that is kept in a smaller form for its readers behind forward, codec, its bytes, those of the
            form, predicted seconds that this adds). They are written first; order and reruns are of that graph.
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
