"""Operator order and memory layout against the rivals, on the graphs of ROAM's evaluation; nothing is trained.

    python -m benchmarks.order_layout [MODEL ...] [--quick] [--seconds N]

Every row is one graph: a model at batch 1 or 32, the whole step with SGD or Adam, or forward and backward as
torch.compile has them. All rivals get the very same problem and one thread.

- PyTorch: program order, gradients kept to the end of the step, and what its CUDA caching allocator reserves
  for that, simulated: by default and with expandable segments. Parameters, state and batch stand apart (fixed).
- orders: torch's lpmf, bfs and dfs, LESCEA, and MODeL's integer program on CP-SAT, with a time limit.
- layouts, all of our order: greedy by size, best fit, long-lived first (LLFB), supermalloc (3 s).
- both: LESCEA with LLFB, and MODeL's two integer programs.
- XLA: temporary bytes of AlexNet and VGG-16 written in JAX, compiled for the CPU, workspace included.
- ours: the solvers on that problem; the same with in-place reuse (a result may take over the bytes of an input that
  dies there), where the problem says which inputs are reusable; and the plan of the whole road, whose peak counts what
  lies outside the arena too.

Seconds are processor seconds, for all but MODeL of the faster of two runs: a first run compiles and imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks._measure import fresh, save
from benchmarks.planning_models import COMPILED, KINDS, MODELS, choices, graph, normalized
from benchmarks.rivals import Missing, eager, inductor, lescea, model_ilp, supermalloc, xla
from benchmarks.rivals.precedence import is_legal
from roamc.budget import NO_TIME
from roamc.cost.caching_allocator import peak_reserved
from roamc.graph.memory import input_bytes
from roamc.options import Options
from roamc.planning import search
from roamc.rewriting.in_place import all_reuses
from roamc.rewriting.order_problem import order_problem
from roamc.solvers import layout as layouts
from roamc.solvers import order as orders
from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.layout import LayoutProblem
from roamc.solvers.layout.problem import arena_bytes, lower_bound
from roamc.solvers.order import OrderProblem
from roamc.solvers.order.evaluate import peak_bytes
from roamc.solvers.order.problem import consumers
from roamc.solvers.status import Status

Row = dict[str, Any]
Reuses = Sequence[tuple[int, int]]

PAPER = ("alexnet", "vgg16", "mnasnet", "mobilenet", "efficientnet", "vit", "bert")
"""The models that ROAM's paper takes its means over, at batch 1 and 32."""
QUICK = ("alexnet", "vgg16", "mnasnet")

MOST_OPERATORS, MOST_PAIRS = 700, 20_000
"""The largest problems that MODeL's integer programs are tried on; larger ones take a minute for a first answer."""

ORDERS: dict[str, Callable[[OrderProblem], IntArray]] = {
    "lpmf": lambda problem: inductor.order(problem, "lpmf"),
    "bfs": lambda problem: inductor.order(problem, "bfs"),
    "dfs": lambda problem: inductor.order(problem, "dfs"),
    "lescea": lescea.order,
}
LAYOUTS: dict[str, Callable[[LayoutProblem], LongArray]] = {
    "greedy_by_size": layouts.ALGORITHMS["greedy_by_size"],
    "best_fit": layouts.ALGORITHMS["best_fit"],
    "llfb": lescea.layout,
    "supermalloc": supermalloc.layout,
}


@dataclass(frozen=True)
class Timed:
    """A value and the processor seconds that it took."""

    value: Any
    seconds: float


def layout_problem(problem: OrderProblem, order: IntArray, reuses: Reuses = ()) -> LayoutProblem:
    """The lives of all buffers in an order, to be laid out in one arena.

    reuses: (reused, result) pairs; the result has the bytes of the reused buffer from the birth of that buffer on.
    """
    position = np.empty(problem.num_ops, dtype=np.int64)
    position[order] = np.arange(problem.num_ops)
    born = position[problem.producer]
    dead = born + 1
    for row, readers in enumerate(consumers(problem).lists()):
        dead[row] = problem.num_ops if problem.kept[row] else max(dead[row], 1 + max(position[readers], default=0))
    size = problem.size.copy()
    for reused, result in sorted(reuses, key=lambda pair: int(born[pair[1]])):
        born[result], size[reused] = born[reused], 0
    return layouts.make_problem(size, born, dead)


def measure(name: str, batch: int, kind: str, seconds: float) -> Row:
    """One row: capture a graph and give it to everybody.

    Args:
        name: a key of ``MODELS``.
        batch: number of samples.
        kind: ``"sgd"``, ``"adam"`` or ``"compiled"``.
        seconds: time limit of each integer program.
    """
    start = time.process_time()
    clean, memory = normalized(graph(name, batch, kind))
    captured = time.process_time() - start
    whole, _ = order_problem(clean, memory, all_reuses(memory))
    problem = orders.without_reuse(whole)  # as rivals get it: none lets a result take over the bytes of an input
    ours, order = _ours(problem)
    return {
        "model": name,
        "batch": batch,
        "kind": kind,
        "operators": problem.num_ops,
        "buffers": problem.num_buffers,
        "fixed": sum(input_bytes(clean).values()),
        "capture_seconds": round(captured, 3),
        "pytorch": _pytorch(problem, eager.trace(memory)),
        "orders": {key: _order(problem, rival) for key, rival in ORDERS.items()},
        "layouts": {key: _layout(layout_problem(problem, order), rival) for key, rival in LAYOUTS.items()},
        "lescea+llfb": _pair(problem),
        "model_ilp": _integer_programs(problem, seconds),
        "xla": _xla(name, batch, kind),
        "ours": ours,
        "reuse": _ours(whole)[0],
        "plan": _plan(clean),
    }


def _pytorch(problem: OrderProblem, trace: eager.Trace) -> Row:
    lives = trace.size, trace.born, trace.dead
    return {
        "program_peak": peak_bytes(problem, np.arange(problem.num_ops, dtype=np.int32)),
        "eager_peak": trace.peak_bytes,
        "reserved": peak_reserved(*lives),
        "expandable": peak_reserved(*lives, expandable=True),
    }


def _order(problem: OrderProblem, rival: Callable[[OrderProblem], IntArray]) -> Row:
    try:
        timed = _timed(lambda: rival(problem))
    except Missing as error:
        return {"missing": str(error)}
    return {"peak": _judged_peak(problem, timed.value), "seconds": timed.seconds}


def _layout(problem: LayoutProblem, rival: Callable[[LayoutProblem], LongArray]) -> Row:
    try:
        timed = _timed(lambda: rival(problem))
    except Missing as error:
        return {"missing": str(error)}
    return {"arena": _judged_arena(problem, timed.value), "bound": lower_bound(problem), "seconds": timed.seconds}


def _pair(problem: OrderProblem) -> Row:
    """LESCEA, and LLFB on its order."""
    order = _timed(lambda: lescea.order(problem))
    lives = layout_problem(problem, order.value)
    offset = _timed(lambda: lescea.layout(lives))
    return {
        "arena": _judged_arena(lives, offset.value),
        "bound": lower_bound(lives),
        "seconds": round(order.seconds + offset.seconds, 4),
    }


def _integer_programs(problem: OrderProblem, seconds: float) -> Row:
    """MODeL's order, and its layout of that order; what is missing was not found, or not tried."""
    if problem.num_ops > MOST_OPERATORS:
        return {"status": f"not tried: more than {MOST_OPERATORS} operators"}
    ordered = _timed(lambda: model_ilp.order(problem, seconds), runs=1)
    order, status = ordered.value
    if order is None:
        return {"status": status, "seconds": ordered.seconds}
    row = {"status": status, "peak": _judged_peak(problem, order), "seconds": ordered.seconds}
    lives = layout_problem(problem, order)
    if model_ilp.meetings(lives) > MOST_PAIRS:
        return row | {"layout_status": f"not tried: more than {MOST_PAIRS} pairs"}
    placed = _timed(lambda: model_ilp.layout(lives, seconds), runs=1)
    offset, layout_status = placed.value
    row |= {"layout_status": layout_status, "bound": lower_bound(lives), "layout_seconds": placed.seconds}
    return row if offset is None else row | {"arena": _judged_arena(lives, offset)}


def _xla(name: str, batch: int, kind: str) -> Row:
    if name not in xla.NETS or kind == COMPILED:
        return {"missing": "not written in JAX"}
    try:
        timed = _timed(lambda: xla.temporary_bytes(name, batch, kind), runs=1)
    except Missing as error:
        return {"missing": str(error)}
    return {"temporary": timed.value, "seconds": timed.seconds}


def _ours(problem: OrderProblem) -> tuple[Row, IntArray]:
    """Our order and our layout of it, with in-place reuse if the problem has reusable buffers."""
    ordered = _timed(lambda: orders.solve(problem))
    _require(orders.validate(problem, ordered.value))
    lives = layout_problem(problem, ordered.value.order, ordered.value.reuses)
    placed = _timed(lambda: layouts.solve(lives))
    _require(layouts.validate(lives, placed.value))
    row = {
        "peak": int(ordered.value.peak_bytes),
        "bound": int(ordered.value.bound_bytes),
        "algorithm": ordered.value.algorithm,
        "status": ordered.value.status.value,
        "seconds": ordered.seconds,
        "arena": int(placed.value.arena_bytes),
        "arena_bound": int(placed.value.bound_bytes),
        "layout_status": placed.value.status.value,
        "layout_seconds": placed.seconds,
    }
    return row, ordered.value.order


def _plan(clean: Any) -> Row:
    """What the whole road plans: the peak of the program that it would run."""
    start = time.process_time()
    plan = search.run(clean, Options(memory_budget=NO_TIME)).plan
    spent = time.process_time() - start
    return {"peak": plan.peak_bytes, "arena": plan.arena_bytes, "status": plan.status, "seconds": round(spent, 4)}


def _judged_peak(problem: OrderProblem, order: IntArray) -> int:
    """The peak of an order, after it was found legal."""
    if not is_legal(problem, order):
        raise RuntimeError("a rival's order is not legal")
    return peak_bytes(problem, order)


def _judged_arena(problem: LayoutProblem, offset: LongArray) -> int:
    """The arena of a layout, after the judge has looked at it."""
    arena, bound = arena_bytes(problem, offset), lower_bound(problem)
    status = Status.OPTIMAL if arena == bound else Status.GAP
    _require(layouts.validate(problem, layouts.LayoutSolution(offset, arena, bound, status, "rival", 0, ())))
    return arena


def _require(report: Any) -> None:
    if not report.good:
        raise RuntimeError(f"not legal: {report.detail}")


def _timed(work: Callable[[], Any], runs: int = 2) -> Timed:
    """The last value and the seconds of the fastest run."""
    spent = []
    for _ in range(runs):
        start = time.process_time()
        value = work()
        spent.append(time.process_time() - start)
    return Timed(value, round(min(spent), 4))


def saved(row: Row, *, allocator: str = "reserved", ours: str = "ours") -> float:
    """What share of fixed and temporary memory is saved against the simulated allocator.

    Args:
        row: of :func:`measure`.
        allocator: ``"reserved"`` or ``"expandable"``.
        ours: ``"ours"`` for the arena of order and layout alone, ``"reuse"`` with in-place reuse where it is known,
            ``"plan"`` for the peak of the program.
    """
    mine = row["plan"]["peak"] if ours == "plan" else (row.get(ours) or row["ours"])["arena"]
    return 1 - float(row["fixed"] + mine) / float(row["fixed"] + row["pytorch"][allocator])


def mean_saved(rows: Iterable[Row], kind: str, **how: str) -> float | None:
    """The mean of :func:`saved` over the paper's models; None if one of its graphs is not there."""
    shares = [saved(row, **how) for row in rows if row["model"] in PAPER and row["kind"] == kind]
    return statistics.mean(shares) if len(shares) == 2 * len(PAPER) else None


def best_order(row: Row) -> tuple[str, int]:
    """The rival heuristic with the lowest peak, the first of equals, and its peak."""
    peaks = {key: rival["peak"] for key, rival in row["orders"].items() if "peak" in rival}
    best = min(peaks, key=lambda key: peaks[key])
    return best, peaks[best]


def line(row: Row) -> str:
    """One row for people."""
    ours, pytorch, (rival, best) = row["ours"], row["pytorch"], best_order(row)
    return "  ".join([
        f"{row['model']:<14}b{row['batch']:<3}{row['kind']:<9}{row['operators']:>5} operators",
        f"fixed {_mb(row['fixed'])}",
        f"eager {_mb(pytorch['eager_peak'])} reserved {_mb(pytorch['reserved'])} or {_mb(pytorch['expandable'])}",
        f"{rival} {_mb(best)}",
        f"ilp {_mb(row['model_ilp'].get('peak'))}",
        f"ours {_mb(ours['peak'])} ({_over(ours['peak'], ours['bound'])} over the bound) in {ours['seconds']:.2f} s",
        f"with in-place reuse {_mb((row['reuse'] or {}).get('arena'))}",
        f"arena {_mb(ours['arena'])} ({_over(ours['arena'], ours['arena_bound'])}) in {ours['layout_seconds']:.2f} s",
        f"plan {_mb(row['plan']['peak'])} in {row['plan']['seconds']:.2f} s",
        f"saves {saved(row):.1%} or {saved(row, allocator='expandable'):.1%}",
    ])  # fmt: skip


def _over(value: int, bound: int) -> str:
    return f"{value / max(bound, 1) - 1:.4%}"


def _mb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}"


def _summary(rows: list[Row]) -> str:
    """The means over the paper's models, as far as all of them are there."""
    means = [
        f"{kind} {mean_saved(rows, kind):.1%} (expandable {mean_saved(rows, kind, allocator='expandable'):.1%}; "
        f"with in-place reuse {mean_saved(rows, kind, ours='reuse'):.1%}; "
        f"as planned {mean_saved(rows, kind, ours='plan'):.1%})"
        for kind in KINDS
        if mean_saved(rows, kind) is not None
    ]
    return "mean saved over the paper's models: " + ("; ".join(means) or "some are missing")


def main() -> None:
    """Measure the asked-for models, each in a fresh process; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, 5 s; writes no results")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of each integer program (20)")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "SECONDS"))
    options = parser.parse_args()
    if options.worker:
        name, seconds = options.worker
        print(json.dumps([measure(*choice, float(seconds)) for choice in choices([name], [1, 32])]))
        return
    names, seconds = (QUICK, 5.0) if options.quick else (options.models, options.seconds)
    rows: list[Row] = []
    for name in names:
        measured = fresh(__file__, name, str(seconds), threads=1)
        rows += measured
        print("\n".join(line(row) for row in measured), flush=True)
    if not options.quick:
        path = save("order_layout", rows, __doc__ or "")
        print(path)
        rows = json.loads(path.read_text())["rows"]
    print(_summary(rows))


if __name__ == "__main__":
    main()
