"""The ordering problem and its answer, as data.

Operators are numbered 0..n-1 in program order, which is itself legal. An order is legal when

- it is a permutation of the operators,
- every edge (before, after) is respected,
- every buffer is produced before it is read,
- all operators of one stage run before any operator of the next.

A buffer is live on the half-open steps [position of producer, last position of a consumer + 1): one step if
it has no reader, and to the end if it is kept. Live bytes at a step are the sizes of the buffers live there
plus the workspace bytes of the operator that runs there; the peak is their maximum.

In-place reuse: an operator may write a result over an input that dies there. The buffers whose bytes buffer k may
take over are part of the problem (`reusable`); the one that it does take over follows from the order. Each buffer k,
in the sequence of their numbers, takes over the first of its reusable buffers whose last reader is the producer of k
and whose bytes no other buffer has taken over. The life of the reused buffer then ends where that of k begins, so that
the two count once:

    without   reused |=========|           with   reused |=======|
              result         |=====|              result         |=====|
                             ^ step of the producer of the result
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roamc.solvers.arrays import BoolArray, Csr, IntArray, LongArray, group_by, read_only
from roamc.solvers.status import Status

Bytes = int
Step = int
OpIndex = int
BufferIndex = int
BufferSpec = tuple[Bytes, OpIndex, Iterable[OpIndex], bool]
"""One buffer as `make_problem` takes it: size in bytes, producer, consumers, and whether it is kept."""

MOST_BYTES = 2**62
"""The most bytes of all buffers and workspaces of a problem together: sums and differences then fit into int64."""


@dataclass(frozen=True, eq=False)
class OrderProblem:
    """An ordering problem of n operators, m edges and b buffers, as read-only arrays.

    Build it with `make_problem`, which checks it. Operators are numbered 0..n-1 in program order, which is a legal
    order.

    stage: int32[n], non-decreasing; all operators of one stage run before any operator of the next.
    edges: int32[m, 2], rows (before, after) with before < after; need not repeat what the buffers imply.
    size: int64[b] bytes.
    producer: int32[b], the operator that writes each buffer.
    consumer_start, consumer: int64[b + 1] and int32[...]; the operators that read buffer k are
        `consumer[consumer_start[k]:consumer_start[k + 1]]`, sorted, without duplicates and without the producer.
    kept: bool[b], true if the buffer lives to the end of every order.
    workspace: int64[n], bytes that each operator needs in addition to the buffers while it runs.
    reusable_start, reusable: int64[b + 1] and int32[...]; buffer k may take over the bytes of one of
        `reusable[reusable_start[k]:reusable_start[k + 1]]`, the best first. Each of them is as large as k, is read by
        the producer of k, and is not kept.
    """

    stage: IntArray
    edges: IntArray
    size: LongArray
    producer: IntArray
    consumer_start: LongArray
    consumer: IntArray
    kept: BoolArray
    workspace: LongArray
    reusable_start: LongArray
    reusable: IntArray

    @property
    def num_ops(self) -> int:
        """Number of operators, n."""
        return len(self.stage)

    @property
    def num_buffers(self) -> int:
        """Number of buffers, b."""
        return len(self.size)


@dataclass(frozen=True, eq=False)
class OrderSolution:
    """An order, its peak, a lower bound, and how they were found.

    order: int32[n], read-only; order[t] is the operator that runs at step t.
    peak_bytes: the most live bytes, workspace included, at one step of that order.
    bound_bytes: no legal order has a lower peak than this.
    status: OPTIMAL exactly when peak_bytes == bound_bytes (a proof raises the bound to the peak); else LIMIT if a
        search ran and could not close the gap, and GAP if none ran.
    algorithm: the name of the algorithm or piece that found the order, followed by "+" and the name of each piece that
        then changed it.
    work: operators scheduled, and operators and arcs that searches and bounds looked at.
    candidates: (name, peak bytes) of every order that was compared, in the sequence in which they were made.
    reuses: (reused, result) for every buffer that takes over the bytes of another in that order, sorted by result.
    """

    order: IntArray
    peak_bytes: Bytes
    bound_bytes: Bytes
    status: Status
    algorithm: str
    work: int
    candidates: tuple[tuple[str, Bytes], ...]
    reuses: tuple[tuple[BufferIndex, BufferIndex], ...]


def make_problem(
    stage: Sequence[int],
    edges: Iterable[tuple[OpIndex, OpIndex]],
    buffers: Iterable[BufferSpec],
    workspace: Sequence[Bytes] | None = None,
    reusable: Sequence[Sequence[BufferIndex]] | None = None,
) -> OrderProblem:
    """Check the parts of an ordering problem and pack them into an `OrderProblem`.

    stage: stage[v] is the stage of operator v; all operators of one stage run before any of the next. Its length is n.
    edges: pairs (before, after) of operators that must run in this sequence.
    buffers: (size in bytes, producer, consumers, kept); the consumers may be unsorted, repeat, or name the producer. A
        buffer that is kept lives to the end, any other to its last consumer.
    workspace: workspace[v] is the bytes that operator v needs for itself while it runs; all zero if left out.
    reusable: reusable[k] are the buffers whose bytes buffer k may take over, the best first; none if left out.

    Raises ValueError, naming the item, for a negative size, an operator out of range, an edge or a read that goes
    against program order, a stage that decreases, a list of the wrong length, sizes that add up to more than 2**62
    bytes, or a reusable buffer that is kept, has another size than the result, or is not read by the result's producer.
    """
    num_ops = len(stage)
    workspace_bytes = [0] * num_ops if workspace is None else list(workspace)
    edge_list = list(edges)
    _check_ops(stage, workspace_bytes)
    _check_edges(edge_list, num_ops)
    size, producer, consumers, kept = _check_buffers(buffers, num_ops)
    if sum(size) + sum(workspace_bytes) > MOST_BYTES:
        raise ValueError(f"sizes add up to {sum(size) + sum(workspace_bytes)} bytes, more than 2**62")
    rows = [[] for _ in size] if reusable is None else [list(row) for row in reusable]
    _check_reusable(rows, size, producer, consumers, kept)
    return OrderProblem(
        stage=read_only(np.array(stage, dtype=np.int32)),
        edges=read_only(np.array(edge_list, dtype=np.int32).reshape(-1, 2)),
        size=read_only(np.array(size, dtype=np.int64)),
        producer=read_only(np.array(producer, dtype=np.int32)),
        consumer_start=read_only(_starts(consumers)),
        consumer=read_only(_flat(consumers)),
        kept=read_only(np.array(kept, dtype=np.bool_)),
        workspace=read_only(np.array(workspace_bytes, dtype=np.int64)),
        reusable_start=read_only(_starts(rows)),
        reusable=read_only(_flat(rows)),
    )


def without_reuse(problem: OrderProblem) -> OrderProblem:
    """Return the same problem with no reusable buffers, so that no buffer takes over the bytes of another."""
    nobody = np.zeros(0, dtype=np.int32)
    return replace(problem, reusable_start=read_only(np.zeros_like(problem.reusable_start)), reusable=read_only(nobody))


def renumber(problem: OrderProblem, order: IntArray) -> OrderProblem:
    """Return the same problem with operator order[t] numbered t: a legal `order` becomes the program order.

    Buffers keep their numbers.
    """
    position = np.empty(problem.num_ops, dtype=np.int32)
    position[order] = np.arange(problem.num_ops, dtype=np.int32)
    buffer_of = np.repeat(np.arange(problem.num_buffers), np.diff(problem.consumer_start))
    consumer = position[problem.consumer]
    return OrderProblem(
        stage=read_only(problem.stage[order]),
        edges=read_only(position[problem.edges]),
        size=problem.size,
        producer=read_only(position[problem.producer]),
        consumer_start=problem.consumer_start,
        consumer=read_only(consumer[np.lexsort((consumer, buffer_of))]),
        kept=problem.kept,
        workspace=read_only(problem.workspace[order]),
        reusable_start=problem.reusable_start,
        reusable=problem.reusable,
    )


def dependencies(problem: OrderProblem) -> IntArray:
    """Return all (before, after) pairs that edges and buffers give: int32[k, 2], sorted, each once. Stages add none."""
    per_buffer = np.diff(problem.consumer_start)
    from_buffers = np.stack([np.repeat(problem.producer, per_buffer), problem.consumer], axis=1)
    pairs = np.concatenate([problem.edges, from_buffers]).astype(np.int64)
    width = max(problem.num_ops, 1)
    keys = np.unique(pairs[:, 0] * width + pairs[:, 1])
    return np.stack([keys // width, keys % width], axis=1).astype(np.int32)


def predecessors(problem: OrderProblem) -> Csr:
    """Return a table whose row v holds the operators that v waits for directly, by an edge or a buffer, sorted."""
    pairs = dependencies(problem)
    return group_by(pairs[:, 1], pairs[:, 0], problem.num_ops)


def successors(problem: OrderProblem) -> Csr:
    """Return a table whose row v holds the operators that wait for v directly, by an edge or a buffer, sorted."""
    pairs = dependencies(problem)
    return group_by(pairs[:, 0], pairs[:, 1], problem.num_ops)


def consumers(problem: OrderProblem) -> Csr:
    """Return a table whose row k holds the operators that read buffer k, sorted, without its producer."""
    return Csr(start=problem.consumer_start, index=problem.consumer)


def reads(problem: OrderProblem) -> Csr:
    """Return a table whose row v holds the buffers that operator v reads, sorted, without those that it produces."""
    buffer_of = np.repeat(np.arange(problem.num_buffers, dtype=np.int32), np.diff(problem.consumer_start))
    return group_by(problem.consumer, buffer_of, problem.num_ops)


def writes(problem: OrderProblem) -> Csr:
    """Return a table whose row v holds the buffers that operator v produces, sorted."""
    return group_by(problem.producer, np.arange(problem.num_buffers, dtype=np.int32), problem.num_ops)


def reusables(problem: OrderProblem) -> Csr:
    """Return a table whose row k holds the buffers whose bytes buffer k may take over, the best first."""
    return Csr(start=problem.reusable_start, index=problem.reusable)


def _starts(rows: Sequence[Sequence[int]]) -> LongArray:
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start


def _flat(rows: Sequence[Sequence[int]]) -> IntArray:
    return np.array([item for row in rows for item in row], dtype=np.int32)


def _check_ops(stage: Sequence[int], workspace: Sequence[Bytes]) -> None:
    if len(workspace) != len(stage):
        raise ValueError(f"{len(stage)} stages but {len(workspace)} workspace sizes")
    for op in range(1, len(stage)):
        if stage[op] < stage[op - 1]:
            raise ValueError(f"stage decreases at op {op}: {stage[op - 1]} to {stage[op]}")
    for op, num_bytes in enumerate(workspace):
        if num_bytes < 0:
            raise ValueError(f"workspace of op {op} is negative: {num_bytes}")


def _check_edges(edges: Sequence[tuple[OpIndex, OpIndex]], num_ops: int) -> None:
    for number, (before, after) in enumerate(edges):
        if not (0 <= before < num_ops and 0 <= after < num_ops):
            raise ValueError(f"edge {number} ({before}, {after}) names an op out of range 0..{num_ops - 1}")
        if before >= after:
            raise ValueError(f"edge {number} ({before}, {after}) goes against program order")


def _check_buffers(
    buffers: Iterable[BufferSpec], num_ops: int
) -> tuple[list[Bytes], list[OpIndex], list[list[OpIndex]], list[bool]]:
    size: list[Bytes] = []
    producer: list[OpIndex] = []
    consumers: list[list[OpIndex]] = []
    kept: list[bool] = []
    for number, (num_bytes, source, readers, stays) in enumerate(buffers):
        if num_bytes < 0:
            raise ValueError(f"buffer {number} has a negative size: {num_bytes}")
        others = sorted({op for op in readers if op != source})
        if not 0 <= source < num_ops or (others and not 0 <= others[0] <= others[-1] < num_ops):
            raise ValueError(f"buffer {number} names an op out of range 0..{num_ops - 1}: {source} -> {others}")
        if others and others[0] < source:
            raise ValueError(f"buffer {number} is read by op {others[0]} before op {source} produces it")
        size.append(num_bytes)
        producer.append(source)
        consumers.append(others)
        kept.append(bool(stays))
    return size, producer, consumers, kept


def _check_reusable(
    reusable: list[list[BufferIndex]],
    size: list[Bytes],
    producer: list[OpIndex],
    consumers: list[list[OpIndex]],
    kept: list[bool],
) -> None:
    if len(reusable) != len(size):
        raise ValueError(f"{len(size)} buffers but {len(reusable)} rows of reusable buffers")
    for result, row in enumerate(reusable):
        for reused in row:
            if not 0 <= reused < len(size):
                raise ValueError(f"buffer {result} names a reusable buffer out of range 0..{len(size) - 1}: {reused}")
            if kept[reused]:
                raise ValueError(f"buffer {reused}, reusable for buffer {result}, is kept")
            if size[reused] != size[result]:
                sizes = f"{size[reused]} bytes, not {size[result]}"
                raise ValueError(f"buffer {reused}, reusable for buffer {result}, has {sizes}")
            if producer[result] not in consumers[reused]:
                raise ValueError(f"buffer {reused}, reusable for buffer {result}, is not read by op {producer[result]}")
