"""Whether budgets are kept: what a step allocates, counted on the heap, against ``memory_budget``.

    python -m benchmarks.kept [MODEL ...] [--dtype DTYPE]

Every model, on both routes, under five budgets, in a process for each model and route. Measured is the third step: from
its start to the end of backward with ``optimize`` (the optimizer is not roamc's there; the loss is part of what is
compiled), to its end with ``train_step``.
"within" is the budget less what was measured; a budget that the planner refuses is a row without a measurement. Where
torch.compile splits a model, each piece has a plan and keeps the budget by itself; shown is the largest.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

from benchmarks._measure import Heap, rows_by_route, save
from benchmarks.models import WORKLOADS, Workload, make
from benchmarks.peak import eager_step

ROUTES = ("train_step", "optimize")
BUDGETS = ("100%", "70%", "50%", "30%", "min")


def worker(name: str, dtype: str, route: str) -> list[dict[str, Any]]:
    """One model under every budget."""
    from roamc.errors import BudgetError

    rows = []
    for budget in BUDGETS:
        row: dict[str, Any] = {"model": name, "dtype": dtype, "kind": f"{route} {budget}"}
        try:
            row |= _kept(name, dtype, route, budget)
        except Exception as error:
            cause = getattr(error, "inner_exception", error)  # torch.compile wraps what a backend raises
            if not isinstance(cause, BudgetError) or cause.plan is None:
                raise
            row |= {"refused": cause.plan.needed_bytes, "budget": cause.plan.budget_bytes}
        rows.append(row)
        gc.collect()
    return rows


def _kept(name: str, dtype: str, route: str, budget: str) -> dict[str, Any]:
    """Plan, take three steps, count the third."""
    import torch

    import roamc
    from roamc.runtime import blocks

    torch._dynamo.reset()
    work = make(name, dtype)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4)
    heap, peaks = Heap(), list[int]()

    def look() -> None:
        peaks.append(heap.peak())

    compiled = _with_loss(work)
    step = eager_step(compiled, optimizer, look)
    options: dict[str, Any] = {"memory_budget": budget, "strict": True, "idle_arena": "free"}
    if route == "train_step":
        planned = roamc.train_step(work.model, work.loss, optimizer, **options)

        def step() -> None:
            planned(*work.batch)
            look()
    else:
        roamc.optimize(compiled.model, **options)
    for _ in range(2):
        step()
    before = heap.live() - blocks.held()
    heap.reset()
    step()
    plans = planned.plans if route == "train_step" else roamc.plans(compiled.model)
    plan = max(plans, key=lambda found: found.needed_bytes)
    return {
        "budget": plan.budget_bytes or plan.needed_bytes,
        "pieces": len(plans),
        "planned": plan.peak_bytes,
        "needed": plan.needed_bytes,
        "measured": peaks[-1] - before,
        "reruns": len(plan.decisions["retain"]["reruns"]),
    }


def _with_loss(work: Workload) -> Workload:
    """The same with a model that returns the loss itself."""
    from torch import nn

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def forward(self, *batch: Any) -> Any:
            return work.loss(self.model, *batch)

    return Workload(Loss(), work.batch, lambda model, *batch: model(*batch))


def _line(row: dict[str, Any]) -> str:
    head = f"{row['model']:<16}{row['kind']:<17} budget {row['budget'] / 1e6:8.2f}"
    if "refused" in row:
        return f"{head}  refused: needs {row['refused'] / 1e6:.2f}"
    return (
        f"{head}  planned {row['planned'] / 1e6:8.2f}  with workspace {row['needed'] / 1e6:8.2f}  measured "
        f"{row['measured'] / 1e6:8.2f}  within {(row['budget'] - row['measured']) / 1e6:7.3f}  reruns {row['reruns']}"
        f"{'' if row['pieces'] == 1 else '  pieces ' + str(row['pieces'])}"
    )


def main() -> None:
    """Measure every model and route; print a line each; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "DTYPE", "ROUTE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(worker(*given.worker)))
        return
    rows = rows_by_route(__file__, given.models, ROUTES, _line, given.dtype, count_heap=True)
    print(save("kept", rows, __doc__ or ""))


if __name__ == "__main__":
    main()
