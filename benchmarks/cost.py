"""Predicted against measured seconds of a planned training step, whole and by operator, with a fresh calibration.

    python -m benchmarks.cost [MODEL ...] [--steps N] [--threads N ...]

One process per model and number of threads: it calibrates, plans the step with ``train_step`` and AdamW, runs it for
the whole time, and runs it again with the clock read before every operator. What an operator takes reaches to the start
of the next one, copies into the arena included. Everywhere the least of the rounds counts, as in the calibration:
whatever else runs on the machine only adds; one thread is measured by the time that it had a processor. Operators of
the same name and shapes are one row; those above 1 % of the step are compared. ``load`` is that of the
machine: above the number of its cores, times of several threads mean little.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks._measure import fresh, save
from benchmarks.models import make

MODELS = ("nanogpt-dropout", "gpt2-124m", "gpt2", "bert", "resnet50")
THREADS = (1, 2)
SHARE = 0.01

Clock = Callable[[], float]


def worker(name: str, threads: int, rounds: int) -> dict[str, Any]:
    """Calibrate, measure and compare one model."""
    import torch

    import roamc
    from roamc.cost import step_seconds
    from roamc.cost.measure import calibrate, clock

    torch.set_num_threads(threads)
    read_clock = clock(torch.device("cpu"))
    profile = calibrate("cpu")
    work = make(name)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4)
    step = roamc.train_step(work.model, work.loss, optimizer, memory_budget="+0%", strict=True)
    step(*work.batch)
    graph = step.latest.executable.planned.graph
    whole = min(_run(step, work.batch, read_clock) for _ in range(rounds))
    stamps = _stamped(step.latest.executable, read_clock)
    taken = [_operator_seconds(step, work.batch, stamps, read_clock) for _ in range(rounds)][1:]
    measured = [min(times) for times in zip(*taken, strict=True)]
    rows = _rows(graph, measured, profile)
    predicted = step_seconds(graph, profile)
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    return {
        "model": name,
        "kind": f"{threads} threads",
        "threads": threads,
        "rounds": rounds,
        "load": round(os.getloadavg()[0], 1),
        "step": {"predicted": predicted, "measured": whole, "operators": sum(measured)},
        "predicted / measured": round(predicted / whole, 4),
        "median operator error": round(statistics.median(errors), 4),
        "compared": {"operators": len(rows), "share": round(sum(row["measured"] for row in rows) / sum(measured), 4)},
        "operators": rows,
        "kinds": _kinds(graph, measured, profile),
    }


def _run(step: Any, batch: Any, read_clock: Clock) -> float:
    start = read_clock()
    step(*batch)
    return read_clock() - start


def _operators(graph: Any) -> list[Any]:
    """The nodes that the program calls, in its order."""
    from roamc.graph import operators
    from roamc.operators import ops

    return [node for node in operators(graph.graph) if not ops.is_view(node.target)]


def _stamped(executable: Any, read_clock: Clock) -> list[float]:
    """Make the program read the clock before every operator, into the list that is returned."""
    from roamc.compat_operators import direct
    from roamc.operators import ops
    from roamc.runtime.program import compiled, load

    stamps: list[float] = []

    def stamp(function: Callable[..., Any]) -> Callable[..., Any]:
        def stamped(*args: Any, **kwargs: Any) -> Any:
            stamps.append(read_clock())
            return function(*args, **kwargs)

        return stamped

    constants = {
        name: stamp(direct(value)) if name != "torch" and callable(value) and not ops.is_view(value) else value
        for name, value in executable.program.constants.items()
    }
    stamped_program = dataclasses.replace(executable.program, constants=constants)
    executable.pool.bind = load(stamped_program, compiled(stamped_program, "<stamped>"))
    executable.pool.free.clear()
    return stamps


def _operator_seconds(step: Any, batch: Any, stamps: list[float], read_clock: Clock) -> list[float]:
    stamps.clear()
    step(*batch)
    stamps.append(read_clock())
    return [after - before for before, after in itertools.pairwise(stamps)]


def _rows(graph: Any, measured: list[float], profile: Any) -> list[dict[str, Any]]:
    """Operators by name and shapes, those above ``SHARE`` of the step, longest first."""
    from roamc.cost import kind_of, seconds
    from roamc.graph import tensors_of

    by_shapes: dict[tuple[str, str], dict[str, Any]] = {}
    for node, took in zip(_operators(graph), measured, strict=True):
        shapes = [tuple(tensor.shape) for value in (*node.all_input_nodes, node) for _, tensor in tensors_of(value)]
        key = (str(node.target), str(shapes))
        row = by_shapes.setdefault(key, {"operator": key[0], "kind": kind_of(node), "shapes": key[1], "count": 0})
        row["count"] += 1
        row["measured"] = row.get("measured", 0.0) + took
        row["predicted"] = row.get("predicted", 0.0) + seconds(node, profile)
    large = [row for row in by_shapes.values() if row["measured"] >= SHARE * sum(measured)]
    return sorted(large, key=lambda row: -row["measured"])


def _kinds(graph: Any, measured: list[float], profile: Any) -> dict[str, dict[str, float]]:
    """Seconds by kind of operator."""
    from roamc.cost import kind_of, seconds

    by_kind: dict[str, dict[str, float]] = {}
    for node, took in zip(_operators(graph), measured, strict=True):
        row = by_kind.setdefault(kind_of(node), {"measured": 0.0, "predicted": 0.0})
        row["measured"] += took
        row["predicted"] += seconds(node, profile)
    return dict(sorted(by_kind.items(), key=lambda item: -item[1]["measured"]))


def main() -> None:
    """Compare every model with one and two threads; print a table; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=7, help="rounds per model")
    parser.add_argument("--threads", type=int, nargs="*", default=list(THREADS))
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "THREADS", "ROUNDS"))
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker[0], int(options.worker[1]), int(options.worker[2]))))
        return
    rows = []
    for name in options.models:
        for threads in options.threads:
            rows.append(fresh(__file__, name, str(threads), str(options.steps), threads=threads))
            print({key: value for key, value in rows[-1].items() if key not in ("operators", "kinds")}, flush=True)
    print(save("cost", rows, __doc__ or ""))


if __name__ == "__main__":
    main()
