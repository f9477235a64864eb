"""Whether budgets are kept: what a step allocates, counted on the heap, against ``memory_budget``.

    python -m benchmarks.kept [MODEL ...] [--dtype DTYPE]

Every model, on both routes, under five budgets, in a process for each model and route. Measured is the third step: from
its start to the end of backward with ``optimize`` (the optimizer is not roamc's there; the loss is part of what is
compiled), to its end with ``train_step``. "equal" says whether the losses of the three steps and the parameters after
them are, bit for bit, those of the same route with "+0%".
"within" is the budget less what was measured; a budget that the planner refuses is a row without a measurement. Where
torch.compile splits a model, each piece has a plan and keeps the budget by itself; shown is the largest.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._measure import Heap, refused_plan, rows_by_route, save
from benchmarks.models import WORKLOADS, Workload, make
from benchmarks.peak import eager_step
from roamc.budget import NO_TIME

ROUTES = ("train_step", "optimize")
BUDGETS = ("100%", "70%", "50%", "30%", "min")


def worker(name: str, dtype: str, route: str) -> list[dict[str, Any]]:
    """One model under every budget."""
    expected, _ = _stepped(name, dtype, route, NO_TIME)
    rows = []
    for budget in BUDGETS:
        row: dict[str, Any] = {"model": name, "dtype": dtype, "kind": f"{route} {budget}"}
        try:
            values, counts = _stepped(name, dtype, route, budget)
            row |= counts | {"equal": all(map(torch.equal, expected, values))}
        except Exception as error:
            plan = refused_plan(error)
            row |= {"refused": plan.needed_bytes, "budget": plan.budget_bytes}
        rows.append(row)
        gc.collect()
    return rows


def _stepped(name: str, dtype: str, route: str, budget: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Plan, take three steps, count the third. Returns its losses and parameters, and what was counted."""
    import roamc
    from roamc.runtime import blocks

    torch._dynamo.reset()
    work = make(name, dtype)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4)
    heap, peaks, losses = Heap(), list[int](), list[Tensor]()

    def look() -> None:
        peaks.append(heap.peak())

    compiled = with_loss(work, losses)
    step = eager_step(compiled, optimizer, look)
    options: dict[str, Any] = {"memory_budget": budget, "strict": True, "idle_arena": "free"}
    if route == "train_step":
        planned = roamc.train_step(work.model, work.loss, optimizer, **options)

        def step() -> None:
            losses.append(planned(*work.batch).clone())
            look()
    else:
        roamc.optimize(compiled.model, **options)
    for number in range(3):
        torch.manual_seed(number)
        before = heap.live() - blocks.held()
        heap.reset()
        step()
    plans = planned.plans if route == "train_step" else roamc.plans(compiled.model)
    plan = max(plans, key=lambda piece: piece.needed_bytes)
    return [*losses, *(parameter.detach() for parameter in work.model.parameters())], {
        "budget": plan.budget_bytes or plan.needed_bytes,
        "pieces": len(plans),
        "planned": plan.peak_bytes,
        "needed": plan.needed_bytes,
        "measured": peaks[-1] - before,
        "reruns": len(plan.decisions["retain"]["reruns"]),
    }


def with_loss(work: Workload, losses: list[Tensor]) -> Workload:
    """The same with a model that returns the loss itself; each loss is added to ``losses``."""
    if getattr(work.model, "loss_type", "known") is None:
        # transformers logs which loss it takes then, and torch.compile splits the model there.
        work.model.loss_type = "ForCausalLM"

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def forward(self, *batch: Any) -> Any:
            return work.loss(self.model, *batch)

    def kept(model: nn.Module, *batch: Any) -> Tensor:
        loss: Tensor = model(*batch)
        losses.append(loss.detach().clone())
        return loss

    return Workload(Loss(), work.batch, kept)


def _line(row: dict[str, Any]) -> str:
    head = f"{row['model']:<16}{row['kind']:<17} budget {row['budget'] / 1e6:8.2f}"
    if "refused" in row:
        return f"{head}  refused: needs {row['refused'] / 1e6:.2f}"
    return (
        f"{head}  planned {row['planned'] / 1e6:8.2f}  with workspace {row['needed'] / 1e6:8.2f}  measured "
        f"{row['measured'] / 1e6:8.2f}  within {(row['budget'] - row['measured']) / 1e6:7.3f}  reruns {row['reruns']}"
        f"{'' if row['pieces'] == 1 else '  pieces ' + str(row['pieces'])}"
        f"  values {'equal' if row['equal'] else 'DIFFER'}"
    )


def main() -> None:
    """Measure every model and route; print a line each; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "DTYPE", "ROUTE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(*options.worker)))
        return
    rows = rows_by_route(__file__, options.models, ROUTES, _line, options.dtype, count_heap=True)
    print(save("kept", rows, __doc__ or ""))


if __name__ == "__main__":
    main()
