"""Whether exact is exact: groups of operators and budgets against the program without either, bit for bit.

    python -m benchmarks.exact [MODEL ...] [--dtypes DTYPE,...] [--threads N,...] [--routes ROUTE,...]

Every model of benchmarks/models.py on the three ways in (torch.compile with backend "roamc", roamc.optimize,
roamc.train_step), in a process for each model, dtype, number of threads and way in. The reference adds no time
("+0%") and has `disable="fuse"`; against it stand programs with pass fuse that add none, by default, and under four
budgets. Compared are the losses of three steps with AdamW, the parameters behind them, and, but for train_step, whose
gradients die within the step, the gradients of the last. A budget that no plan keeps is a row that says so.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import fresh, refused_plan, save
from benchmarks.kept import with_loss
from benchmarks.models import WORKLOADS, make
from roamc.budget import NO_TIME

ROUTES = ("compile", "optimize", "train_step")
BUDGETS = (NO_TIME, None, "70%", "40%", "light", "min")
DTYPES = ("float32", "bfloat16")
THREADS = ("1", "2")
STEPS = 3


def worker(name: str, dtype: str, threads: str, route: str) -> list[dict[str, Any]]:
    """Return a row for one model, dtype, number of threads and way in under every budget."""
    torch.set_num_threads(int(threads))
    expected, _ = _stepped(name, dtype, route, {"disable": "fuse", "memory_budget": NO_TIME})
    rows = []
    for budget in BUDGETS:
        kind = f"{route} {budget or 'default'}"
        row: dict[str, Any] = {"model": name, "dtype": dtype, "kind": kind, "threads": int(threads)}
        try:
            values, counts = _stepped(name, dtype, route, {"memory_budget": budget})
            row |= counts | {"equal": len(expected) == len(values) and all(map(torch.equal, expected, values))}
        except Exception as error:
            row |= {"refused": refused_plan(error).needed_bytes}
        rows.append(row)
        gc.collect()
    return rows


def _stepped(name: str, dtype: str, route: str, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, int]]:
    """Train for some steps; return losses, gradients and parameters, and counts of what the plans hold."""
    import roamc

    torch._dynamo.reset()
    earlier = set(map(id, roamc.plans()))
    work = make(name, dtype)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4)
    losses: list[Tensor] = []
    options = {**options, "strict": True}
    if route == "train_step":
        planned = roamc.train_step(work.model, work.loss, optimizer, **options)
        for number in range(STEPS):
            torch.manual_seed(number)
            losses.append(planned(*work.batch).clone())
        plans, gradients = planned.plans, list[Tensor]()
    else:
        whole = with_loss(work, []).model
        if route == "optimize":
            roamc.optimize(whole, **options)
        model = torch.compile(whole, backend="roamc", options=options) if route == "compile" else whole
        for number in range(STEPS):
            torch.manual_seed(number)
            optimizer.zero_grad()
            loss = model(*work.batch)
            loss.backward()
            losses.append(loss.detach().clone())
            gradients = [parameter.grad.clone() for parameter in whole.parameters() if parameter.grad is not None]
            optimizer.step()
        plans = [plan for plan in roamc.plans() if id(plan) not in earlier]
    parameters = [parameter.detach() for parameter in work.model.parameters()]
    decisions = [plan.decisions for plan in plans]
    return [*losses, *gradients, *parameters], {
        "compared": len(losses) + len(gradients) + len(parameters),
        "groups": sum(len(decision["fuse"]["groups"]) for decision in decisions if decision.get("fuse")),
        "reruns": sum(len(decision["retain"]["reruns"]) for decision in decisions),
    }


def _line(row: dict[str, Any]) -> str:
    head = f"{row['model']:<16}{row['dtype']:<9} {row['threads']} threads  {row['kind']:<17}"
    if "refused" in row:
        return f"{head} refused: needs {row['refused'] / 1e6:.2f} MB"
    counts = f"{row['compared']} tensors, {row['groups']} groups, {row['reruns']} reruns"
    return f"{head} {'equal' if row['equal'] else 'DIFFER'}: {counts}"


def main() -> None:
    """Compare every model, dtype, number of threads and way in; print a line for each row; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(WORKLOADS))
    for name, values in (("dtypes", DTYPES), ("threads", THREADS), ("routes", ROUTES)):
        parser.add_argument(f"--{name}", default=",".join(values))
    parser.add_argument("--worker", nargs=4, metavar=("MODEL", "DTYPE", "THREADS", "ROUTE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(*options.worker)))
        return
    axes = (options.models, *(getattr(options, name).split(",") for name in ("dtypes", "threads", "routes")))
    for name, dtype, threads, route in itertools.product(*axes):
        rows = fresh(__file__, name, dtype, threads, route, threads=int(threads))
        print("\n".join(map(_line, rows)), flush=True)
        date = datetime.date.today().isoformat()
        save("exact", [{**row, "date": date} for row in rows], __doc__ or "", timeless=True)


if __name__ == "__main__":
    main()
