"""Which reruns to choose, against Moccasin and Checkmate: seconds added under a budget, and seconds to find them.

    python -m benchmarks.retain_rivals [GRAPH ...] [--seconds N] [--budgets 80,60,...] [--quick]

All get the same sequence of operators, sizes, times and budget, and one thread; :mod:`benchmarks.retain_graphs` says
which graphs. Every operator has one result, and there is no in-place reuse, which the rivals cannot express. Budgets
are shares of the way from the lowest peak that ours finds to the peak without reruns. A rival stops at its proof or
after --seconds; every answer is judged by `solvers/retain/validate.py`. Moccasin runs each operator again once at most,
as published; "infeasible" then means just that. The bound holds for any order of the operators.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from typing import Any

from benchmarks._measure import fresh, save
from benchmarks.rivals import checkmate, moccasin
from benchmarks.rivals.one_result import Graph, as_graph, judged
from roamc.solvers.order import peak_bytes
from roamc.solvers.retain import RetainProblem, solve
from roamc.solvers.status import Status

Rival = Callable[[Graph, int, float], tuple[list[tuple[int, int]] | None, str]]
RIVALS: dict[str, Rival] = {"moccasin": moccasin.rerun, "checkmate": checkmate.rerun}
BUDGETS = (60, 30, 0)
"""Percent of the way from the lowest peak to that without reruns."""

SECONDS = 200.0
LEAST_TIME = 1e-9
"""Of two answers, differences below this share of the seconds are rounding."""


def worker(name: str, percents: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """All rows of one graph."""
    from benchmarks.retain_graphs import GRAPHS
    from roamc.solvers.warm_up import warm_up

    warm_up()
    problem = GRAPHS[name]()
    full, low = peak_bytes(problem.order, problem.sequence), solve(problem, 0).least_peak_bytes
    return [row(name, problem, percent, low + (full - low) * percent // 100, seconds) for percent in percents]


def row(name: str, problem: RetainProblem, percent: int, budget: int, seconds: float) -> dict[str, Any]:
    """Ours and the rivals' for one budget in bytes."""
    begun = time.perf_counter()
    ours = solve(problem, budget)
    taken = time.perf_counter() - begun
    theirs = {rival: _rival(answer, problem, budget, seconds) for rival, answer in RIVALS.items()}
    proved = [each["added"] for each in theirs.values() if each["status"] == "OPTIMAL" and each["added"] is not None]
    return {
        "model": name,
        "kind": f"{percent}%",
        "operators": problem.num_ops,
        "peak": peak_bytes(problem.order, problem.sequence),
        "budget": budget,
        "step": float(problem.seconds.sum()),
        "limit": seconds,
        "ours": {
            "added": None if ours.status is Status.INFEASIBLE else ours.seconds,
            "bound": ours.bound_seconds if math.isfinite(ours.bound_seconds) else None,
            "status": ours.status.value,
            "seconds": taken,
        },
        **theirs,
        "least": min(proved, default=None),
    }


def _rival(answer: Rival, problem: RetainProblem, budget: int, seconds: float) -> dict[str, Any]:
    begun = time.perf_counter()
    runs, status = answer(as_graph(problem), budget, seconds)
    taken = time.perf_counter() - begun
    added = None if runs is None else judged(problem, budget, runs).seconds
    return {"added": added, "status": status, "seconds": taken}


def worse(result: dict[str, Any]) -> list[str]:
    """The rivals that add less than ours does, or that have an answer where ours has none."""
    ours = result["ours"]["added"]
    rivals = {rival: result[rival]["added"] for rival in RIVALS}
    ours = math.inf if ours is None else ours
    return [rival for rival, added in rivals.items() if added is not None and added < ours * (1 - LEAST_TIME)]


def line(result: dict[str, Any]) -> str:
    """One row for the terminal."""
    parts = [f"{result['model']:<12}{result['operators']:>4} ops {result['kind']:>4}"]
    for who in ("ours", *RIVALS):
        each = result[who]
        added = "-" if each["added"] is None else f"{each['added'] / result['step']:.4f}"
        parts.append(f"{who} {added:>7} in {each['seconds']:6.2f} s {each['status'].lower():<10}")
    bound = result["ours"]["bound"]
    parts.append(f"bound {'-' if bound is None else format(bound / result['step'], '.4f')}")
    return "  ".join(parts) + "".join(f"  FEWER SECONDS: {rival}" for rival in worse(result))


def main() -> None:
    """Measure the graphs; print lines; write the results file."""
    from benchmarks.retain_graphs import GRAPHS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", default=list(GRAPHS), metavar="GRAPH", help=", ".join(GRAPHS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of a rival for one budget")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="percent of the way down, see above")
    parser.add_argument("--quick", action="store_true", help="a second for each rival; nothing is written")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, percents, seconds = options.worker
        print(json.dumps(worker(name, tuple(map(int, percents.split(","))), float(seconds))))
        return
    seconds = 1.0 if options.quick else options.seconds
    for name in options.graphs:
        rows = fresh(__file__, name, options.budgets, str(seconds), threads=1)
        for result in rows:
            print(line(result), flush=True)
        if not options.quick:
            save("retain_rivals", rows, __doc__ or "")


if __name__ == "__main__":
    main()
