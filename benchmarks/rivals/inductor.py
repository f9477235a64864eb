"""The orders of PyTorch's own compiler: torch/_inductor/memory.py, called and not copied.

Its functions take scheduler nodes; they get stand-ins with the attributes that they read. An ordering
constraint without data becomes a buffer of no bytes that counts for the order only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.rivals import Missing
from benchmarks.rivals.precedence import ordering_pairs
from roamc.solvers.arrays import IntArray
from roamc.solvers.order import OrderProblem

METHODS = ("lpmf", "bfs", "dfs")


@dataclass(eq=False)
class _Buffer:
    name: str
    mpi_buffer: Any

    def get_name(self) -> str:
        return self.name


@dataclass(eq=False)
class _Node:
    index: int
    outputs: list[_Buffer] = field(default_factory=list)
    unmet_dependencies: list[_Buffer] = field(default_factory=list)
    mpi_node: Any = None

    def get_outputs(self) -> list[_Buffer]:
        return self.outputs

    def get_buffer_names(self) -> list[str]:
        return [buffer.name for buffer in self.outputs]


def order(problem: OrderProblem, method: str) -> IntArray:
    """The order of ``method``, one of :data:`METHODS`: int32[n].

    Raises:
        Missing: this torch keeps its orders elsewhere.
    """
    memory = _torch_memory()
    nodes, outputs = _stand_ins(problem, memory)
    sort = getattr(memory, f"topological_sort_{method}", None)
    if sort is None:
        raise Missing(f"this torch has no torch._inductor.memory.topological_sort_{method}")
    with _deep_recursion(10 * problem.num_ops + 1000):
        if method == "lpmf":
            buffers = {buffer.name: buffer for node in nodes for buffer in node.outputs}
            ordered = sort(nodes, {}, buffers, outputs)
        else:
            ordered = sort(nodes)
    return np.array([node.index for node in ordered], dtype=np.int32)


def _torch_memory() -> Any:
    try:
        from torch._inductor import memory
    except ImportError as error:
        raise Missing(f"this torch keeps its orders elsewhere than in torch._inductor.memory: {error}") from None
    return memory


def _stand_ins(problem: OrderProblem, memory: Any) -> tuple[list[_Node], set[str]]:
    """One node per operator with its buffers, and the names of the buffers that are kept."""
    nodes = [_Node(op) for op in range(problem.num_ops)]
    outputs = set()
    for number in range(problem.num_buffers):
        lo, hi = problem.consumer_start[number : number + 2]
        readers = [nodes[op] for op in problem.consumer[lo:hi].tolist()]
        _add(nodes[problem.producer[number]], f"buffer{number}", int(problem.size[number]), readers, readers, memory)
        if problem.kept[number]:
            outputs.add(f"buffer{number}")
    after: dict[int, list[_Node]] = {}
    for first, second in ordering_pairs(problem):
        after.setdefault(first, []).append(nodes[second])
    for op, later in after.items():
        _add(nodes[op], f"token{op}", 0, [], later, memory)
    _describe(nodes, memory)
    return nodes, outputs


def _add(node: _Node, name: str, size: int, readers: list[_Node], later: list[_Node], memory: Any) -> None:
    ordered = memory.OrderedSet
    buffer = _Buffer(name, memory.MemoryPlanningInfoForBuffer(size, size, ordered(readers), ordered(later)))
    node.outputs.append(buffer)
    for reader in later:
        reader.unmet_dependencies.append(buffer)


def _describe(nodes: list[_Node], memory: Any) -> None:
    """Give every node the summary that the scheduler would."""
    ordered = memory.OrderedSet
    maker = {id(buffer): node for node in nodes for buffer in node.outputs}
    for node in nodes:
        node.mpi_node = memory.MemoryPlanningInfoForNode(
            index=node.index,
            size=sum(buffer.mpi_buffer.size_alloc for buffer in node.outputs),
            pred_buffers=ordered(b for b in node.unmet_dependencies if node in b.mpi_buffer.succ_nodes),
            pred_nodes=ordered(maker[id(buffer)] for buffer in node.unmet_dependencies),
            succ_nodes=ordered(n for buffer in node.outputs for n in buffer.mpi_buffer.succ_nodes_for_ordering),
        )


@contextmanager
def _deep_recursion(limit: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, limit))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
