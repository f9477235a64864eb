"""What planning under a budget takes, and how far its answer can be from the best: from captured graphs, nothing runs.

    python -m benchmarks.planning [MODEL ...]

The built-in models on the meta device, whole steps and compiled ones, with "+0%" and under falling shares of
what eager takes, each planned by itself in processor seconds, capture apart. The gap is the predicted step time over
the least that is proved for any choice of reruns and smaller forms within the budget. For GPT-2 XL compiled also the
seconds of torch's own partitioner, min_cut_rematerialization_partition, on the same joint graph.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks._measure import rows_by_route, save

MODELS = ("gpt", "bert", "llama", "t5", "vit", "resnet50", "mobilenetv2", "gpt2", "gpt2-xl")
ROUTES = ("train_step", "optimize")
BUDGETS = ("none", "70%", "50%", "30%", "min")
LARGE = ("gpt2-xl",)
"""torch's partitioner is timed on these."""


def worker(name: str, route: str) -> list[dict[str, Any]]:
    """Plan one graph under every budget."""
    from roamc.cost import load_profile, step_seconds
    from roamc.graph import copied
    from roamc.solvers.warm_up import warm_up

    warm_up()
    graph, torchs = _captured(name, route)
    alone, operators = step_seconds(graph, load_profile("cpu", "cpu")), _operators(graph)
    rows = []
    for budget in BUDGETS:
        row = {"model": name, "kind": f"{route} {budget}", "operators": operators}
        rows.append(row | _planned(copied(graph), budget, alone) | (torchs if budget == "none" else {}))
    return rows


def _captured(name: str, route: str) -> tuple[Any, dict[str, float]]:
    """The graph, and what torch's partitioner took for it."""
    from roamc import compat_aot
    from roamc.cli.request import Request, workload_of
    from roamc.frontends.workload import capture

    compiled, seconds = route == "optimize", dict[str, float]()
    split = compat_aot.default_partition

    def partition(joint: Any, inputs: Any, **how: Any) -> Any:
        seconds["torch"] = _timed(lambda: _min_cut(copy.deepcopy(joint), inputs, how))
        return split(joint, inputs, **how)

    work = workload_of(Request(name, forward_backward=compiled))
    if not compiled or name not in LARGE:
        return capture(work, forward_backward=compiled), seconds
    with mock.patch.object(compat_aot, "default_partition", partition):
        return capture(work, forward_backward=True), seconds


def _min_cut(joint: Any, inputs: Any, how: dict[str, Any]) -> None:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    min_cut_rematerialization_partition(joint, inputs, **how)


def _timed(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _operators(graph: Any) -> int:
    from roamc.graph.memory import build_memory

    return len(build_memory(graph).operators)


def _planned(graph: Any, budget: str, alone: float) -> dict[str, Any]:
    from roamc.errors import BudgetError
    from roamc.options import parse_options
    from roamc.planning import search

    options = parse_options({"profile": "cpu", "memory_budget": "+0%" if budget == "none" else budget})
    start = time.process_time()
    try:
        plan, refused = search.run(graph, options).plan, False
    except BudgetError as error:
        if error.plan is None:
            raise
        plan, refused = error.plan, True
    seconds = time.process_time() - start
    least = plan.added_bound_seconds
    return {
        "seconds": round(seconds, 2),
        "refused": refused,
        "budget": plan.budget_bytes,
        "needed": plan.needed_bytes,
        "baseline": plan.baseline_bytes,
        "added": plan.added_seconds / alone,
        "gap": (alone + plan.added_seconds) / (alone + least) - 1,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:<12}{row['kind']:<16} operators {row['operators']:5d}  needs {row['needed'] / 1e6:9.1f} MB"
        f"{' (refused)' if row['refused'] else ''}  added {row['added']:.2%}  gap {row['gap']:.2%}  "
        f"{row['seconds']:.2f} s{'  torch partitioner {:.2f} s'.format(row['torch']) if 'torch' in row else ''}"
    )


def main() -> None:
    """Plan every model on both routes; print a line each; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "ROUTE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(*options.worker)))
        return
    rows = rows_by_route(__file__, options.models, ROUTES, _line)
    print(save("planning", rows, __doc__ or ""))


if __name__ == "__main__":
    main()
