"""Bytes that the process takes for the objects of tensors: what is small for one tensor, and not for a thousand.

A tensor that an operator makes is an object for as long as its storage lives: views of it refer to it, also when the
program has deleted its name. A view is one from the statement that makes it to the last that reads it. Views of what
lies in the arena are made once, when the program is bound, and are none of a step's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from roamc.graph import tensors_of
from roamc.graph.lifetimes import timeline
from roamc.graph.memory import Int64s, MemoryModel, Place
from roamc.operators.costs.arguments import INLINE_DIMS
from roamc.units import Bytes

LARGE_STEP: Bytes = 256 << 10
"""Bytes that :func:`objects` counts at most by the size of a step."""

SHARE = 96
"""In a small step, :func:`objects` counts one byte for this many bytes of tensors."""

OBJECT: Bytes = 512
"""Bytes of a tensor object. Measured: 500 of a view, 350 of a tensor with a storage of its own."""


def objects(nbytes: Bytes, of_tensors: Bytes = 0) -> Bytes:
    """Estimate the bytes that the process takes for tensor objects and the like while a step runs.

    Measured: 50 to 120 kB, and 150 kB for the 364 tensors of an LSTM.

    Args:
        nbytes: bytes of the step's tensors and workspaces.
        of_tensors: bytes of the tensor objects that are alive together; 0 where they are not known.
    """
    return max(min(LARGE_STEP, nbytes // SHARE), of_tensors)


def view_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of the object of ``tensor``, a view."""
    return OBJECT + (16 * tensor.dim() + 8 if tensor.dim() > INLINE_DIMS else 0)


@dataclass(frozen=True)
class TensorObjects:
    """The m objects of a program of n statements, with half-open lives ``[born, dead)`` in statements.

    Attributes:
        statements: n; views, picks and inputs count as such.
        nbytes: int64[m], the bytes of each object.
        born: int64[m], the statement that makes it.
        dead: int64[m], the statement after the last that needs it.
        view_of: int64[m], the position in ``memory.counted`` of the storage that it is a view of; -1 for what is no
            view, and for views of others, such as inputs.
    """

    statements: int
    nbytes: Int64s
    born: Int64s
    dead: Int64s
    view_of: Int64s

    def live(self, inside: npt.NDArray[np.bool_] | None = None) -> Int64s:
        """Return int64[n], the bytes of the objects that are alive at each statement.

        Args:
            inside: bool[k], which storages of ``memory.counted`` lie in the arena; None if there is none.
        """
        exists = True if inside is None else ~np.append(inside, False)[self.view_of]
        return timeline(self.nbytes * exists, self.born, self.dead, self.statements)

    def peak(self, inside: npt.NDArray[np.bool_] | None = None) -> Bytes:
        """Return the most of :meth:`live`."""
        return int(self.live(inside).max(initial=0))


def tensor_objects(memory: MemoryModel, statements: Sequence[fx.Node], born: Int64s, dead: Int64s) -> TensorObjects:
    """Return the objects of a program.

    Args:
        memory: of its graph; k counted storages.
        statements: all nodes in the order in which they run, the output's last.
        born: int64[k], the first step of the life of each of ``memory.counted``, in steps of ``memory``.
        dead: int64[k], the step after the last.
    """
    at = {node: number for number, node in enumerate(statements)}
    runs = np.array([at[operator.node] for operator in memory.operators], dtype=np.int64)
    handed = np.array([storage.place is Place.OUTPUT for storage in memory.counted], dtype=bool)
    begins = np.append(runs, len(at))[born]
    ends = np.where(handed & (born < dead), len(at), np.maximum(np.append(0, runs + 1)[dead], begins))
    row = {storage.index: number for number, storage in enumerate(memory.counted)}
    own = np.array([np.full(len(row), OBJECT), begins, ends, np.full(len(row), -1)])
    views = np.array(list(_views(memory, at, row)), dtype=np.int64).reshape(-1, 4).T
    return TensorObjects(len(at), *np.append(own, views, axis=1))


def _views(memory: MemoryModel, at: dict[fx.Node, int], row: dict[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (bytes, first statement, statement after the last, row of its storage or -1) of each view."""
    operators = {operator.node for operator in memory.operators}
    last = dict(at)
    for node, number in at.items():
        last |= dict.fromkeys(node.all_input_nodes, number)
    for start, wait in memory.ends.items():
        for read in memory.operators[start].node.all_input_nodes:
            last[read] = max(last[read], at[memory.operators[wait].node])
    for operator in reversed(memory.operators):
        place = None if operator.births else memory.owner.get((operator.node.name, 0))
        for argument in operator.node.all_input_nodes if place is not None else ():
            if memory.owner.get((argument.name, 0)) == place:  # its object is the result's
                last[argument] = max(last[argument], last[operator.node])
    for node, number in at.items():
        if node.op != "call_function" or node in operators or node.target is getitem:
            continue
        picked: dict[object, int] = {}  # picks follow at once, and hold what the tuple held
        for user in node.users:
            if user.target is getitem and user in at:
                picked[user.args[1]] = max(picked.get(user.args[1], 0), last[user])
        for position, tensor in tensors_of(node):
            storage = row.get(memory.owner[node.name, position], -1)
            yield view_bytes(tensor), number, picked.get(position, last[node]) + 1, storage
