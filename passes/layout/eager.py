"""Whether a plan may take more than eager does, with workspace and with what runs outside of the graph.

Workspace is only estimated, and what the caller runs between forward and backward, or behind backward, is not known.
So every moment is compared, not the peaks. Where a plan holds no more than eager at that moment, whatever comes on top
leads to no higher peak than eager's. Where it holds more, the most that can come on top must keep it below what eager's
tensors alone take at their worst step.

            eager    ours
    conv    4 kB     5 kB  + at most 40 kB  above what eager surely holds, 30 kB: refused
    relu    20 kB    25 kB + at most 16 B   below it: good, though more than eager has here
    addmm   30 kB    28 kB + anything       good

Only for small graphs. In large ones the arena is trimmed where it is idle, see :mod:`roamc.solvers.layout.trim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roamc.graph.eager_memory import eager_lifetimes, of_eager
from roamc.graph.lifetimes import sizes, timeline
from roamc.graph.memory import Int64s, MemoryModel, Place
from roamc.units import Bytes

Bools = npt.NDArray[np.bool_]

NUMBERS: Bytes = 32
"""Bytes that any operator may take for the Python numbers among its arguments: tensors of one element."""

LOSS = 4
"""Bytes that the caller's loss takes, as a multiple of the tangents': ``square().mean()`` makes four such tensors."""

UPDATE = 2
"""Bytes that the optimizer takes in addition to the gradients, as a multiple of the gradients' bytes."""

BETWEEN, AFTER = "between forward and backward", "after backward"
"""Names, in a :data:`Floor`, of the two moments at which the caller's own code runs; no operator has these names."""

Floor = Mapping[str, tuple[Bytes, Bytes]]
"""Maps a moment (name of an operator, BETWEEN or AFTER) to the fewest bytes that eager holds there: if the caller keeps
the outputs of forward, and if the caller drops them."""


@dataclass(frozen=True)
class Moments:
    """Bytes that eager holds and bytes that may come on top, at the n operators of a graph and at two more moments.

    The two moments are the last two columns: between forward and backward, and after backward, when the caller's own
    code runs.

    Attributes:
        floor: int64[2, n + 2], fewest bytes that eager holds: row 0 if the caller keeps the outputs of forward, row 1
            if the caller drops them.
        most: int64[2, 1], the most of such bytes at any of eager's own operators or at the two moments, for each row.
        slack: int64[n + 2], upper bound on the bytes that come on top: workspace, the caller's loss, the optimizer.
        output: bool[k], which of the k storages are outputs, in the order of ``memory.counted``.
        idle: whether the arena keeps its memory after backward.
    """

    floor: Int64s
    most: Int64s
    slack: Int64s
    output: Bools
    idle: bool


def eager_floor(memory: MemoryModel, *, boundary: bool) -> Floor:
    """Return the fewest bytes that eager holds at each operator, and at BETWEEN and AFTER, when the caller's code runs.

    The result maps the name of each operator, and these two, to the bytes if the caller keeps the outputs of forward,
    and to the bytes if the caller drops them. Both are 0 at BETWEEN and AFTER without ``boundary``.

    Args:
        memory: memory model of the captured graph in program order, with every in-place reuse that is possible: eager
            may do each of them.
        boundary: whether forward and backward run apart, with the caller's code between them.
    """
    memory = of_eager(memory)
    born, dead = eager_lifetimes(memory)
    output, size = _outputs(memory), sizes(memory.counted)
    at = memory.boundary if boundary else 0
    _, drops = eager_lifetimes(memory, dropped=boundary)
    kept = at_moments(timeline(size, born, dead, len(memory.operators)), size, born, dead, output, at)
    dropped = at_moments(timeline(size, born, drops, len(memory.operators)), size, born, drops, output, at)
    names = [operator.node.name for operator in memory.operators]
    return dict(zip([*names, BETWEEN, AFTER], zip(kept.tolist(), dropped.tolist(), strict=True), strict=True))


def at_moments(live: Int64s, size: Int64s, born: Int64s, dead: Int64s, output: Bools, boundary: int) -> Int64s:
    """Append to live bytes, int64[n], those between forward and backward and those after backward: int64[n + 2].

    Both are 0 if ``boundary`` is 0. Outputs count between forward and backward even if the caller drops them at the
    boundary, because the loss is computed from them. An output with ``dead == born`` lies in another storage and does
    not count.

    Args:
        live: live bytes at each operator.
        size: int64[k], bytes of each of k storages.
        born: int64[k], first step of each storage.
        dead: int64[k], step behind the last of each storage.
        output: bool[k], which storages are outputs.
        boundary: step at which backward begins; 0 if all runs in one go.
    """
    if not boundary:
        return np.append(live, [0, 0])
    between = size[(born < boundary) & ((dead > boundary) | (output & (dead > born)))].sum()
    after = size[output & (dead == len(live))].sum()
    return np.append(live, [between, after])


def moments(memory: MemoryModel, workspace: Int64s, floor: Floor, *, idle: bool) -> Moments:
    """Return what eager holds at the moments of a planned graph, in its order of operators, and what may come on top.

    Args:
        memory: memory model of the planned graph, n operators.
        workspace: int64[n], estimated bytes that each operator takes for itself.
        floor: what eager holds, from :func:`eager_floor`, not empty; 0 bytes count for operators without an entry.
        idle: whether the arena keeps its memory after backward.
    """
    names = [operator.node.name for operator in memory.operators]
    fewest = np.array([floor.get(name, (0, 0)) for name in (*names, BETWEEN, AFTER)], dtype=np.int64).T
    most = np.array(list(floor.values()), dtype=np.int64).max(axis=0)
    loss = LOSS * sum(storage.nbytes for storage in memory.counted if storage.place is Place.TANGENT)
    update = UPDATE * int(sizes(memory.counted)[_late(memory)].sum())
    slack = np.append(workspace, [loss, update]) + NUMBERS
    return Moments(fewest, most[:, None], slack, _outputs(memory), idle)


def _late(memory: MemoryModel) -> Bools:
    """bool[k]: which storages are outputs of backward, such as gradients."""
    storages, first = memory.counted, memory.boundary
    return np.array([s.place is Place.OUTPUT and s.producer >= first for s in storages], dtype=bool)


def _outputs(memory: MemoryModel) -> Bools:
    return np.array([storage.place is Place.OUTPUT for storage in memory.counted], dtype=bool)
