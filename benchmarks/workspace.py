"""Memory that operators take for themselves: what roamc.cost.workspace estimates against the heap.

    python -m benchmarks.workspace [MODEL ...] [--operators] [--dtype DTYPE] [--threads N]

Every distinct operator call of a model's training step runs on tensors of its shapes, in a process whose heap is
counted. A row is one call that takes, or is said to take, at least a hundredth of the largest storage of its graph.
With --operators the calls of :mod:`benchmarks.operator_cases` instead, which have arguments of several layouts; printed
are those of which the estimate is off by more than 128 KiB.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from benchmarks._measure import Heap, fresh, save
from benchmarks.models import make

MODELS = ("nanogpt-dropout", "bert", "vit", "resnet50", "mobilenetv2", "lstm")
SHARE = 0.01
"""Of the largest storage; calls that take less are left out."""

NEAR = 128 << 10
"""With --operators, bytes that an estimate may be off."""


def worker(name: str, dtype: str, threads: int) -> dict[str, Any]:
    """Measure one model's operators."""
    import torch

    from roamc.cost.workspace import workspace_bytes
    from roamc.frontends import workload
    from roamc.graph.memory import build_memory

    torch.set_num_threads(threads)
    work = make(name, dtype)
    step = workload.Workload(name, work.model, work.batch, work.loss, torch.optim.AdamW)
    graph = workload.capture(step)
    memory = build_memory(graph)
    largest = max(storage.nbytes for storage in memory.counted)
    heap, rows = Heap(), {}
    for operator in memory.operators:
        call = (str(operator.node.target), str([_geometry(node) for node in operator.node.all_input_nodes]))
        if call not in rows:
            rows[call] = {"operator": call[0], "arguments": call[1], "count": 0}
            rows[call]["estimated"] = workspace_bytes(operator.node, threads, eager=True)
            rows[call]["measured"] = _measured(operator.node, heap)
        rows[call]["count"] += 1
    large = [row for row in rows.values() if max(row["estimated"], row["measured"]) >= SHARE * largest]
    large.sort(key=lambda row: -row["measured"])
    return {"model": name, "dtype": dtype, "kind": f"{threads} threads", "largest storage": largest, "operators": large}


def operators_worker(dtype: str, threads: int) -> list[dict[str, Any]]:
    """Measure every operator on every layout."""
    import torch

    from benchmarks.operator_cases import CASES
    from roamc import compat
    from roamc.cost.workspace import workspace_bytes
    from roamc.graph import operators

    torch.set_num_threads(threads)
    heap, rows = Heap(), []
    for layout, cases in CASES.items():
        for name, (function, makers) in cases.items():
            mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
            arguments = [mode.from_tensor(make(getattr(torch, dtype))) for make in makers]
            calls = operators(compat.trace(function, arguments, mode).graph)
            node = next(node for node in reversed(calls) if getattr(node.target, "_schema", None) is not None)
            row = {"operator": name, "arguments": layout, "count": 1}
            rows.append(
                row | {"estimated": workspace_bytes(node, threads, eager=True), "measured": _measured(node, heap)}
            )
    return rows


def _geometry(node: Any) -> list[Any]:
    from roamc.graph import tensors_of

    return [(tuple(t.shape), tuple(t.stride()), str(t.dtype)) for _, t in tensors_of(node)]


def _measured(node: Any, heap: Heap, rounds: int = 2) -> int:
    """Most bytes of the heap during the call, above those before it and those behind it."""
    import torch
    from torch import fx
    from torch.utils._pytree import tree_map

    fakes = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    args, kwargs = tree_map(lambda value: _real(value) if isinstance(value, torch.Tensor) else value, fakes)
    node.target(*args, **kwargs)
    workspaces = []
    for _ in range(rounds):
        before = heap.live()
        heap.reset()
        result = node.target(*args, **kwargs)
        workspaces.append(heap.peak() - max(before, heap.live()))
        del result
    return min(workspaces)


def _real(fake: Any) -> Any:
    """Memory of the same geometry; numbers between 0 and 1, indices 0, masks true."""
    import torch

    count = fake.untyped_storage().nbytes() // fake.itemsize
    flat = torch.zeros(count, dtype=fake.dtype)
    if fake.is_floating_point():
        flat.uniform_(0.1, 0.9)
    if fake.dtype is torch.bool:
        flat.fill_(True)
    return flat.as_strided(tuple(fake.shape), tuple(fake.stride()), fake.storage_offset())


def _lines(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['model']} {row['dtype']}, {row['kind']}"
    yield from map(_line, row["operators"])


def _line(row: dict[str, Any]) -> str:
    ratio = row["estimated"] / max(1, row["measured"])
    return (
        f"  {row['measured'] / 1e6:9.2f} MB  estimated {row['estimated'] / 1e6:9.2f} MB  {ratio:8.2f}  "
        f"{row['count']:3d} x {row['operator']}  {row['arguments'][:150]}"
    )


def main() -> None:
    """Run every model in a process of its own and print estimates beside measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--operators", action="store_true", help="operators on several layouts; nothing is written")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    how = options.dtype, options.threads
    if options.worker:
        print(json.dumps(operators_worker(*how) if options.operators else worker(*options.models, *how)))
        return
    asked = (f"--dtype={options.dtype}", f"--threads={options.threads}")
    if options.operators:
        rows = fresh(__file__, "--operators", *asked, count_heap=True, threads=options.threads)
        off = [row for row in rows if abs(row["estimated"] - row["measured"]) > NEAR]
        print("\n".join(map(_line, sorted(off, key=lambda row: row["estimated"] - row["measured"]))))
        print(f"{len(rows)} calls, {len(off)} of them off by more than {NEAR >> 10} KiB")
        return
    rows = []
    for name in options.models:
        rows.append(fresh(__file__, name, *asked, count_heap=True, threads=options.threads))
        print("\n".join(_lines(rows[-1])), flush=True)
    save("workspace", rows, __doc__ or "")


if __name__ == "__main__":
    main()
