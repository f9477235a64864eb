"""Layout of published instances: arena, bound, fragmentation and seconds, beside rivals where they are installed.

    python -m benchmarks.layout_instances FOLDER|FILE.csv ... [--nodes N] [--seconds S] [--synthetic N]

The files are in minimalloc's CSV form. One named A.1048576.csv is solved twice, at this capacity and for the lowest
arena. The files are not in this repository: those of the minimalloc paper are in
google/minimalloc under benchmarks/asplos2024, training graphs recorded by MindSpore in cappadokes/idealloc under
somas_tensors. --synthetic N adds a training graph of about N storages that is made here. Rivals are those of
omnimalloc (pip install omnimalloc --no-deps): supermalloc, greedy by size and best fit, asked for the lowest arena,
supermalloc with as many seconds as we took and no less than three. Our seconds are processor seconds, theirs
pass on the clock. Compilation, once per installation, is timed apart.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks._measure import save
from roamc.solvers.layout import LayoutProblem, make_problem, solve, validate
from roamc.solvers.layout.csv_form import read_csv
from roamc.solvers.warm_up import warm_up

NODES = 400_000
RIVALS = {
    "supermalloc": "SupermallocAllocator",
    "greedy_by_size": "GreedyBySizeAllocator",
    "best_fit": "BestFitAllocator",
}
RIVAL_SECONDS = 3.0


def synthetic(storages: int, seed: int = 0) -> LayoutProblem:
    """Saved activations with nested lives, short temporaries, gradients and their updates; sizes of a few kinds."""
    dice = random.Random(seed)
    layers = storages // 14
    kinds = [2**power * base for power in range(10, 24, 2) for base in (3, 4)]
    rows: list[tuple[int, int, int]] = []
    end = 12 * layers
    for step in range(0, 6 * layers):
        back = end - step + dice.randrange(3)
        rows.append((dice.choice(kinds), step, back if dice.random() < 0.5 else step + dice.choice((2, 2, 3, 5))))
        rows.append((dice.choice(kinds), end - step - 1, end - step + dice.choice((1, 2, 3))))
        if step % 3 == 0:
            rows.append((dice.choice(kinds), end - step - 1, end - step + dice.choice((2, 4, 60))))
    return make_problem(*(list(column) for column in zip(*rows, strict=True)))


def instances(paths: list[Path], storages: int | None) -> Iterator[tuple[str, LayoutProblem]]:
    """Name and problem of every file named or in a folder named, by name; then the synthetic one."""
    for path in paths:
        for file in sorted(path.glob("*.csv")) if path.is_dir() else [path]:
            yield file.stem, read_csv(file).problem
    if storages is not None:
        yield f"synthetic-{storages}", synthetic(storages)


def measure(name: str, problem: LayoutProblem, limits: dict[str, Any]) -> dict[str, Any]:
    """Our row."""
    began = time.process_time()
    solution = solve(problem, **limits)
    took = time.process_time() - began
    report = validate(problem, solution)
    if not report.good:
        raise AssertionError(f"{name}: {report.detail}")
    return {
        "model": name,
        "storages": problem.num_storages,
        "arena_bytes": solution.arena_bytes,
        "bound_bytes": solution.bound_bytes,
        "fragmentation": solution.arena_bytes / max(solution.bound_bytes, 1) - 1,
        "seconds": round(took, 4),
        "status": solution.status.value,
        "algorithm": solution.algorithm,
        "work": solution.work,
    }


def rivals() -> dict[str, Callable[[LayoutProblem, float], int]]:
    """Name of each rival that is installed, and a function from problem and seconds to its arena in bytes."""
    try:
        import omnimalloc
        from omnimalloc import allocators
    except ImportError as error:
        print(f"no rivals: omnimalloc cannot be imported ({error}); pip install omnimalloc --no-deps")
        return {}

    def run(kind: str, problem: LayoutProblem, seconds: float) -> int:
        columns = (problem.size.tolist(), problem.born.tolist(), problem.dead.tolist())
        rows = [omnimalloc.Allocation(i, *row) for i, row in enumerate(zip(*columns, strict=True))]
        limit = {"timeout": seconds} if kind == "SupermallocAllocator" else {}
        placed = getattr(allocators, kind)(**limit).allocate(tuple(rows))
        return max(int(row.offset) + int(row.size) for row in placed)

    return {
        name: lambda problem, seconds, kind=kind: run(kind, problem, seconds)  # type: ignore[misc]
        for name, kind in RIVALS.items()
        if hasattr(allocators, kind)
    }


def against(problem: LayoutProblem, others: dict[str, Callable[[LayoutProblem, float], int]], least: float) -> Any:
    """Arena, fragmentation and seconds of every rival on a problem of plain storages of any alignment."""
    outcomes = {}
    for name, run in others.items():
        began = time.perf_counter()
        arena = run(problem, max(least, RIVAL_SECONDS))
        outcomes[name] = {"arena_bytes": arena, "seconds": round(time.perf_counter() - began, 4)}
    return outcomes


def main() -> None:
    """Measure every instance; print a line each; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--synthetic", type=int, metavar="N")
    parser.add_argument("--no-rivals", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    warm_up()
    solve(synthetic(200), node_limit=100)
    print(f"compiled, or read from the cache, in {time.perf_counter() - began:.1f} s")
    limits = {"node_limit": options.nodes, "seconds": options.seconds}
    others = {} if options.no_rivals else rivals()
    rows = []
    for name, problem in instances(options.paths, options.synthetic):
        capacity = name.rpartition(".")[2]
        for asked in (int(capacity), None) if capacity.isdecimal() else (None,):
            row = measure(name, problem, {**limits, "capacity": asked})
            row["dtype"] = "lowest" if asked is None else f"capacity {asked}"
            row["rivals"] = against(problem, others, row["seconds"]) if problem.plain and asked is None else {}
            rows.append(row)
            print(_line(row), flush=True)
    if not rows:
        parser.error("name a folder or a file of instances, or --synthetic N")
    print(f"together {sum(row['seconds'] for row in rows):.2f} s")
    print(save("layout_instances", rows, __doc__ or ""))


def _line(row: dict[str, Any]) -> str:
    beside = "  ".join(
        f"{name} {rival['arena_bytes'] / max(row['bound_bytes'], 1) - 1:.4%} in {rival['seconds']:.2f} s"
        for name, rival in row["rivals"].items()
    )
    return (
        f"{row['model']:<16} {row['dtype']:<16} {row['storages']:>6} storages  arena {row['arena_bytes']:>12}"
        f"  bound {row['bound_bytes']:>12}  {row['fragmentation']:8.4%}  {row['seconds']:7.2f} s"
        f"  {row['status']:<8}  {beside}"
    )


if __name__ == "__main__":
    main()
