"""Seconds to capture whole steps of deep models for a plan: layers that are alike traced once, and every layer traced.

    python -m benchmarks.repeats [MODEL ...]

Both in one process, interleaved, in processor seconds of one thread; the graphs are compared by fingerprint. The models
of arXiv 2205.05198 are one rank's part of eight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks._measure import fresh, interleaved, ratio, save

MODELS = ("gpt2-xl", "llama", "gpt3-22b", "gpt3-1t")
ROUNDS = 3


def worker(name: str) -> dict[str, Any]:
    """Capture one model both ways."""
    from roamc.capture import repeats
    from roamc.cli import zoo
    from roamc.frontends.mesh import Mesh, on_mesh
    from roamc.frontends.workload import capture
    from roamc.graph.fingerprint import fingerprint

    mesh = Mesh(tp=8) if name.startswith("gpt3") else Mesh()
    workload = zoo.make(name)
    graphs: dict[str, Any] = {}

    def captured(way: str) -> None:
        with mesh.planned_for():
            graphs[way] = capture(on_mesh(workload, mesh) if mesh.tp > 1 else workload)

    def whole() -> None:
        with mock.patch.object(repeats, "groups_of", return_value=[]):
            captured("whole")

    ways: dict[str, Callable[[], None]] = {"whole": whole, "copied": lambda: captured("copied")}
    times = interleaved(ways, ROUNDS, time.process_time)
    return {
        "model": name,
        "kind": "train_step",
        "layers": zoo.MODELS[name].settings["layers"],
        "nodes": len(graphs["whole"].graph.nodes),
        "same": len({fingerprint(graph) for graph in graphs.values()}) == 1,
        "whole": statistics.median(times["whole"]),
        "copied": statistics.median(times["copied"]),
        "ratio": ratio(times, "copied", "whole"),
    }


def line_of(row: dict[str, Any]) -> str:
    """One row as text."""
    return (
        f"{row['model']:<10}{row['layers']:4} layers {row['nodes']:6} nodes  whole {row['whole']:6.2f} s  copied "
        f"{row['copied']:6.2f} s  ratio {row['ratio']:.2f}  {'same graph' if row['same'] else 'OTHER GRAPH'}"
    )


def main() -> int:
    """Measure; print a line for each model; write the results file; 1 if any graph is another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker)))
        return 0
    rows = []
    for name in options.models:
        rows.append(fresh(__file__, name, threads=1))
        print(line_of(rows[-1]), flush=True)
    print(save("repeats", rows, __doc__ or ""))
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
