"""What pass retain decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from roamc.decode import NOT_DATA
from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Decision:
    """A decision names the operators that run again with the readers of each run, and the storages that are encoded.

    Its seconds are those above a step in which the gathers that ``once`` names do not run.

    Attributes:
        reruns: the fields of a :class:`roamc.rewriting.reruns.Rerun`, and its predicted seconds, for each rerun.
        peak_bytes: most live bytes at one step in the order that the solver had, workspace included; later passes may
            lower this peak.
        added_seconds: predicted time of all reruns and of the operators that ``codes`` add.
        bound_seconds: lower bound on ``added_seconds`` of any choice within the same peak; 0 where none is known.
        status: ``"optimal"`` if no choice adds less, ``"gap"`` if that is not proved, ``"limit"`` if the solver's work
            limit ended the search, ``"infeasible"`` if the peak asked for was not reached.
        allowed: which operators were allowed to run again, one of :data:`roamc.passes.retain.problem.ALLOWED`;
            ``bound_seconds`` and ``status`` hold for these operators.
        codes: (storage, codec, bytes of the storage, bytes of its code, predicted seconds that this adds, storages that
            readers behind forward get made again from what is decoded) for each storage that readers behind forward get
            decoded, or read the projections of. ``reruns`` are of the graph with codecs.
        once: (gather, gather of forward) for each gather behind forward that does not run, as its readers read what is
            gathered in forward. ``codes`` and ``reruns`` are of the graph without these.
        sequence: names of all operators and reruns in the order that the solver had, in which the peak is
            ``peak_bytes``: where pass reorder begins to search. It is no part of a plan, which has the order that
            reorder decided; a decision from a plan, or of a graph that keeps its order, has none.
        offered: (codec, number of storages that it could keep smaller) for each codec with an error that the options
            name. It is no part of a plan either, which has a note.
    """

    reruns: tuple[tuple[str, str, str, tuple[tuple[str, tuple[str, ...]], ...], Seconds], ...]
    peak_bytes: Bytes
    added_seconds: Seconds
    bound_seconds: Seconds
    status: str
    allowed: str
    codes: tuple[tuple[str, str, Bytes, Bytes, Seconds, tuple[str, ...]], ...] = ()
    once: tuple[tuple[str, str], ...] = ()
    sequence: tuple[str, ...] = field(default=(), compare=False, repr=False, metadata=NOT_DATA)
    offered: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False, metadata=NOT_DATA)


NOTHING = Decision((), 0, 0.0, 0.0, "optimal", "all")
"""The decision without a limit: no operator runs again that ran once in the graph, and no storage is encoded."""
