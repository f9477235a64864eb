"""Whether a plan may take more than eager does, what operators take for themselves and what runs outside included.

What an operator takes for itself is only estimated, and what the caller runs between forward and backward, or behind
backward, is not known. So the peaks are not compared, but every moment: with less there than eager holds, whatever is
taken on top of it leads to no higher peak than eager's. With more, the most that can come on top must stay below what
eager's tensors alone are at their worst step.

            eager    ours
    conv    4 kB     5 kB  + at most 40 kB  above what eager surely holds, 30 kB: refused
    relu    20 kB    25 kB + at most 16 B   below it: good, though more than eager has here
    addmm   30 kB    28 kB + anything       good

Only for small graphs. In large ones the arena is trimmed where it is idle, see :mod:`roamc.passes.layout.trim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roamc.graph.memory import Int64s, MemoryModel, Place, eager_lifetimes, sizes, timeline
from roamc.units import Bytes

Bools = npt.NDArray[np.bool_]

SMALL: Bytes = 8 << 20
"""Graphs of which eager holds less are compared moment by moment: their arenas are not trimmed."""

NUMBERS: Bytes = 32
"""What any operator may take for the Python numbers among its arguments: tensors of one element."""

LOSS = 4
"""What the caller's loss takes, in gradients of the model's output: ``square().mean()`` makes four such tensors."""

UPDATE = 2
"""What the optimizer takes beside the gradients, in their bytes."""

BETWEEN, AFTER = "between forward and backward", "after backward"
"""Names of the two moments at which the caller's own code runs; no operator is called so."""

Floor = Mapping[str, tuple[Bytes, Bytes]]
"""Moment to the least that eager holds there, if the caller keeps what forward hands out and if not."""


@dataclass(frozen=True)
class Moments:
    """What eager holds and what may come on top, at the n steps of a graph, and at the two moments of the caller's.

    Attributes:
        floor: int64[2, n + 2] bytes that eager holds at least, if the caller keeps what forward hands out and if not.
        most: int64[2, 1], the highest of them over eager's own steps.
        slack: int64[n + 2], at most so many bytes come on top.
        output: bool[k], the storages that are handed out.
        idle: the arena keeps its memory after backward.
    """

    floor: Int64s
    most: Int64s
    slack: Int64s
    output: Bools
    idle: bool


def eager_floor(memory: MemoryModel, *, boundary: bool) -> Floor:
    """The least that eager holds at every operator, and at the moments at which the caller's own code runs.

    Args:
        memory: of the captured graph in program order, every result that can be written over an argument being so:
            eager may do that, too.
        boundary: forward and backward are run apart.
    """
    born, dead = eager_lifetimes(memory)
    output, size = _outputs(memory), sizes(memory.counted)
    at = memory.boundary if boundary else 0
    _, drops = eager_lifetimes(memory, dropped=boundary)
    kept = at_moments(timeline(size, born, dead, len(memory.operators)), size, born, dead, output, at)
    dropped = at_moments(timeline(size, born, drops, len(memory.operators)), size, born, drops, output, at)
    names = [operator.node.name for operator in memory.operators]
    return dict(zip([*names, BETWEEN, AFTER], zip(kept.tolist(), dropped.tolist(), strict=True), strict=True))


def at_moments(live: Int64s, size: Int64s, born: Int64s, dead: Int64s, output: Bools, boundary: int) -> Int64s:
    """Live bytes of n steps, and behind them those of the caller's two moments; 0 where there is no ``boundary``.

    Between forward and backward the output is there, whoever drops it then: the loss is made of it. Only one without a
    life of its own lies in another storage.
    """
    if not boundary:
        return np.append(live, [0, 0])
    between = size[(born < boundary) & ((dead > boundary) | (output & (dead > born)))].sum()
    after = size[output & (dead == len(live))].sum()
    return np.append(live, [between, after])


def moments(memory: MemoryModel, workspace: Int64s, floor: Floor, *, idle: bool) -> Moments:
    """The moments of a graph in its present order; operators that eager does not have count as if it held nothing."""
    names = [operator.node.name for operator in memory.operators]
    known = np.array([floor.get(name, (0, 0)) for name in (*names, BETWEEN, AFTER)], dtype=np.int64).T
    most = np.array(list(floor.values()), dtype=np.int64).max(axis=0)
    loss = LOSS * sum(storage.nbytes for storage in memory.counted if storage.place is Place.TANGENT)
    update = UPDATE * int(sizes(memory.counted)[_late(memory)].sum())
    slack = np.append(workspace, [loss, update]) + NUMBERS
    return Moments(known, most[:, None], slack, _outputs(memory), idle)


def _late(memory: MemoryModel) -> Bools:
    """Which storages are handed out by backward."""
    storages, first = memory.counted, memory.boundary
    return np.array([s.place is Place.OUTPUT and s.producer >= first for s in storages], dtype=bool)


def _outputs(memory: MemoryModel) -> Bools:
    return np.array([storage.place is Place.OUTPUT for storage in memory.counted], dtype=bool)
