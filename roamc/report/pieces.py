"""The graphs of one log side by side: what each takes, and what all of them take at once at most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from roamc.graph import Phase, TrainGraph
from roamc.graph.eager_memory import eager_live_bytes
from roamc.graph.in_flight import call_bytes
from roamc.graph.memory import Place, build_memory, input_bytes
from roamc.planning.plan_maker import eager_needs
from roamc.report.tables import show_rows
from roamc.units import Bytes, format_bytes

HEADINGS = ("graph", "operators", "eager needs", "keeps", "fixed", "")
"""Of the table that :func:`show_pieces` prints; "keeps" is what it holds while other graphs run."""


@dataclass(frozen=True)
class Piece:
    """What one graph of a log takes with eager PyTorch.

    Attributes:
        name: of the graph in its log.
        frame: what it was compiled from; graphs of one frame are alternatives.
        operators: how many there are.
        reason: why it cannot be planned; "" where it can. The numbers that follow are then 0.
        eager_bytes: what its forward and backward need at their worst step.
        kept_bytes: most that it holds while others run: outputs and what is saved, or outputs and gradients.
        fixed_bytes: parameters, assumed optimizer state and inputs.
        shared: name of each parameter that the log tells apart from those of other graphs to its part of
            ``fixed_bytes``.
        planned: whether it is the one that is planned.
    """

    name: str
    frame: str
    operators: int
    reason: str = ""
    eager_bytes: Bytes = 0
    kept_bytes: Bytes = 0
    fixed_bytes: Bytes = 0
    shared: Mapping[str, Bytes] = field(default_factory=dict, repr=False)
    planned: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, ready for JSON."""
        names = ("name", "operators", "reason", "eager_bytes", "kept_bytes", "fixed_bytes", "planned")
        return {name: getattr(self, name) for name in names}


def piece_of(graph: TrainGraph, name: str, frame: str, operators: int, shared: Mapping[str, Bytes]) -> Piece:
    """Return what a captured ``graph`` takes; the other arguments are as for :class:`Piece`."""
    memory = build_memory(graph)
    late = {index for index, operator in enumerate(memory.operators) if operator.phase is not Phase.FORWARD}
    outputs = [each for each in memory.counted if each.place is Place.OUTPUT]
    return Piece(
        name,
        frame,
        operators,
        eager_bytes=eager_needs(graph, memory, eager_live_bytes(memory), torch.get_num_threads()),
        kept_bytes=max(call_bytes(memory), sum(each.nbytes for each in outputs) if late else 0),
        fixed_bytes=sum(input_bytes(graph).values()),
        shared=shared,
    )


def at_once(pieces: Sequence[Piece]) -> tuple[Bytes, Bytes]:
    """Return the bytes of (what is fixed, the steps) with eager PyTorch where every graph keeps what it may.

    Parameters that several share count once. Of the graphs of one frame the largest counts, as if it ran once: one
    runs, and all others hold what they keep.
    """
    frames: dict[str, list[Piece]] = defaultdict(list)
    for each in pieces:
        frames[each.frame].append(each)
    shared: dict[str, Bytes] = {}
    for each in pieces:
        shared |= {name: max(size, shared.get(name, 0)) for name, size in each.shared.items()}
    own = sum(max(each.fixed_bytes - sum(each.shared.values()) for each in some) for some in frames.values())
    kept = [max(each.kept_bytes for each in some) for some in frames.values()]
    most = [max(each.eager_bytes for each in some) for some in frames.values()]
    running = max(needs - keeps for needs, keeps in zip(most, kept, strict=True))
    return sum(shared.values()) + own, sum(kept) + running


def in_words(pieces: Sequence[Piece]) -> str:
    """Return a sentence on what all of ``pieces`` take at once at most, and how it is added up."""
    readable = [each for each in pieces if not each.reason]
    fixed, step = at_once(readable)
    frames = len({each.frame for each in readable})
    reasons = [each.reason for each in pieces if each.reason]
    others = f"; without {len(reasons)} that cannot be read: {reasons[0]}" if reasons else ""
    again = " (compilations of one function are alternatives: the largest counts)" if frames < len(readable) else ""
    return (
        f"if all are saved at once, eager needs at most {format_bytes(fixed + step)} = {format_bytes(fixed)} fixed + "
        f"{format_bytes(step)} steps: one of {frames} graphs at its peak, the others with what they keep, each run "
        f"once{again}{others}"
    )


def show_pieces(out: Console, pieces: Sequence[Piece]) -> None:
    """Print one row for each of ``pieces`` to ``out``, those first that need most."""
    if not pieces:
        return
    out.print()
    rows = []
    for each in sorted(pieces, key=lambda each: -each.eager_bytes):
        numbers = map(format_bytes, (each.eager_bytes, each.kept_bytes, each.fixed_bytes))
        remark = each.reason or ("planned" if each.planned else "")
        rows.append((each.name, str(each.operators), *(("", "", "") if each.reason else numbers), remark))
    show_rows(out, HEADINGS, rows, (1, 2, 3, 4))
