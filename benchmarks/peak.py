"""Peak memory of a training step: predicted, measured, and eager's, every measurement in a fresh process.

    python -m benchmarks.peak [MODEL ...]

Measured bytes come from a counter under malloc and are above what the process holds before the step:
parameters, optimizer state and batch. The step is the third, so that nothing is made for the first time;
roamc's arenas that stay between steps are added back. Operators' own workspace is in the measured peak and not
in that of the tensors. It is shown apart: the largest rise inside one statement of the program above what its
results need, read at every line of the emitted source in a second run. roamc plans for "+0%".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks._measure import Heap, by_line, fresh, save
from benchmarks.models import WORKLOADS, make

ROUTES = ("eager", "train_step", "aot_eager", "optimize", "optimize_free")


def eager_step(work: Any, optimizer: Any, look: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Forward, backward, update; ``look`` is called between the last two."""

    def step() -> None:
        work.loss(work.model, *work.batch).backward()
        look()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def worker(name: str, dtype: str, route: str) -> dict[str, Any]:
    """Measure one route of one model in this process."""
    import torch

    import roamc
    from roamc.runtime import blocks

    work = make(name, dtype)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4)
    options: dict[str, Any] = {"memory_budget": "+0%", "strict": True}
    step, executables = eager_step(work, optimizer), []
    if route == "train_step":
        planned = roamc.train_step(work.model, work.loss, optimizer, **options)

        def step() -> None:
            planned(*work.batch)
    elif route in ("optimize", "optimize_free"):
        roamc.optimize(work.model, **options, idle_arena="free" if route == "optimize_free" else "keep")
    elif route == "aot_eager":
        work.model.compile(backend="aot_eager", dynamic=False)
    for _ in range(2):
        step()
    heap = Heap()
    result: dict[str, Any] = {}
    if route == "train_step":
        plan = planned.plans[0]
        executables = [planned.latest.executable]
        result = {key: getattr(plan, key) for key in ("peak_bytes", "needed_bytes", "arena_bytes", "live_bytes")}
        result |= {
            "bound_bytes": plan.bound_bytes,
            "baseline_bytes": plan.baseline_bytes,
            "status": plan.status,
            "seconds": dict(plan.seconds),
        }
    elif route in ("optimize", "optimize_free"):
        result = {"peak_bytes": [plan.peak_bytes for plan in roamc.plans(work.model)]}
    before = heap.live() - blocks.held()
    heap.reset()
    step()
    result["measured"] = heap.peak() - before
    if executables:
        result["workspace"] = by_line(heap, step).workspace
    return result


def main() -> None:
    """Measure every model and route; print a table; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "DTYPE", "ROUTE"))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(*options.worker)))
        return
    rows = []
    for name in options.models:
        for dtype in options.dtypes.split(","):
            by_route = {route: fresh(__file__, name, dtype, route, count_heap=True) for route in ROUTES}
            rows.append({"model": name, "dtype": dtype, **by_route})
            print(_line(rows[-1]), flush=True)
    print(save("peak", rows, __doc__ or ""))


def _line(row: dict[str, Any]) -> str:
    step, eager = row["train_step"], row["eager"]["measured"]
    return (
        f"{row['model']:<16}{row['dtype']:<9} eager {eager / 1e6:8.1f}  train_step {step['measured'] / 1e6:8.1f} "
        f"({step['measured'] / eager:.3f})  predicted {step['peak_bytes'] / 1e6:8.1f}  workspace "
        f"{step['workspace'] / 1e6:6.1f}  error {_error(step):+.2%}  fragmentation "
        f"{step['arena_bytes'] / max(step['live_bytes'], 1) - 1:.3%} baseline {step['baseline_bytes'] / 1e6:8.1f} "
        f"aot {row['aot_eager']['measured'] / 1e6:8.1f} optimize {row['optimize']['measured'] / 1e6:8.1f} "
        f"(predicted {_predicted(row['optimize'])}) free {row['optimize_free']['measured'] / 1e6:.1f}"
    )


def _predicted(optimize: dict[str, Any]) -> str:
    return " and ".join(f"{peak / 1e6:.1f}" for peak in optimize["peak_bytes"])


def _error(step: dict[str, Any]) -> float:
    """Measured less predicted, as a share of predicted; what workspace explains is taken off."""
    over = step["measured"] - step["peak_bytes"]
    return (over - min(max(over, 0), step["workspace"])) / step["peak_bytes"]


if __name__ == "__main__":
    main()
