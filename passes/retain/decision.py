"""What pass retain decides."""

from __future__ import annotations

from dataclasses import dataclass

from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Decision:
    """A decision names the operators that run again, the storages that are encoded, and the order they are decided for.

    Attributes:
        order: names of all operators without the reruns, first to last; empty without a budget.
        reruns: for each rerun, in the order in which they run: name of the operator in front of which the rerun stands,
            name of the operator that runs again, names of the storages that the rerun makes anew, predicted seconds.
        peak_bytes: most live bytes at one step of ``order`` with the reruns, workspace included; later passes may lower
            this peak.
        added_seconds: predicted time of all reruns and of the operators that ``codes`` add.
        bound_seconds: lower bound on ``added_seconds`` of any choice within the same peak; 0 where none is known.
        status: ``"optimal"`` if no choice adds less, ``"gap"`` if that is not proved, ``"limit"`` if the solver's work
            limit ended the search, ``"infeasible"`` if the peak asked for was not reached.
        allowed: which operators were allowed to run again, ``"all"`` or ``"light"``; ``bound_seconds`` and ``status``
            hold for these operators.
        codes: (storage, codec, bytes of the storage, bytes of its code, predicted seconds that the codec adds) for each
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
"""The decision without a budget: no operator runs again and no storage is encoded."""
