"""What each part of faster programs gives: groups of operators, and products by the library that is faster.

    python -m benchmarks.fuse [MODEL ...] [--rounds N]

Models of benchmarks/blocks.py, whole training steps with AdamW in float32 on one thread, one after the other in one
process: eager, torch.compile, and roamc.train_step exact, exact without pass fuse, fast, and with every product that
oneDNN can make made by it. Seconds are the thread's processor time; a ratio is taken within its round, and the median
over rounds is quoted.

Peaks are what the third step takes on the heap above what the process held before it, each in a process of its own:
torch.compile, and train_step with and without pass fuse, with "+0%", "light" and "min".
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks._measure import Heap, fresh, interleaved, ratio, save
from benchmarks.blocks import BLOCKED
from roamc.budget import NO_TIME

ROUNDS = 9
PAIRS = (
    *(("fast", "eager"), ("fast", "exact"), ("fast", "compile"), ("exact", "compile"), ("fast", "onednn")),
    ("exact", "unfused"),
)
BUDGETS = ("none", "light", "min")


def worker(name: str, rounds: int) -> dict[str, Any]:
    """Time all programs of one model."""
    import torch

    from benchmarks.blocks import make
    from roamc.passes import products

    torch.set_num_threads(1)
    work = make(name)
    eager = _loop(copy.deepcopy(work.model), work.batch)
    compiled = _loop(torch.compile(copy.deepcopy(work.model), dynamic=False), work.batch)
    steps = {"eager": eager, "compile": compiled}
    plans = {}
    ours = (("exact", "exact"), ("unfused", "exact"), ("fast", "fast"), ("onednn", "fast"))
    for kind, numerics in ours:
        settings = {"numerics": numerics, "memory_budget": NO_TIME, "disable": "fuse" * (kind == "unfused")}
        step = _planned(copy.deepcopy(work.model), **settings)
        every = mock.patch.object(products, "faster_by_onednn", frozenset)
        with every if kind == "onednn" else contextlib.nullcontext():
            plans[kind] = step.plan(*work.batch)
            step(*work.batch)
        steps[kind] = lambda step=step: step(*work.batch)
    times = interleaved(steps, rounds, time.thread_time)
    return {
        "model": name,
        "rounds": rounds,
        "seconds": {kind: statistics.median(durations) for kind, durations in times.items()},
        "products by onednn": {kind: len(plan.decisions["products"]["onednn"]) for kind, plan in plans.items()},
        "deciding on products": plans["fast"].seconds["products"],
        "groups": [len(group) for group in plans["exact"].decisions["fuse"]["groups"]],
        "deciding on groups": plans["exact"].seconds["fuse"],
        **{f"{one} / {other}": ratio(times, one, other) for one, other in PAIRS},
    }


def _loop(model: Any, batch: tuple[Any, ...]) -> Callable[[], Any]:
    """An ordinary training step."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peak(name: str, kind: str, budget: str) -> dict[str, Any]:
    """Measure the third step of one program on the heap; ``kind`` is "compile", "fused" or "unfused"."""
    import torch

    from benchmarks.blocks import make
    from roamc.runtime import blocks

    torch.set_num_threads(1)
    work = make(name)
    result: dict[str, Any] = {}
    if kind == "compile":
        step = _loop(torch.compile(work.model, dynamic=False), work.batch)
    else:
        planned = _planned(
            work.model, memory_budget=NO_TIME if budget == "none" else budget, disable="fuse" * (kind == "unfused")
        )
        result = {"needed_bytes": planned.plan(*work.batch).needed_bytes}

        def step() -> None:
            planned(*work.batch)

    step()
    step()
    heap = Heap()
    before = heap.live() - blocks.held()
    heap.reset()
    step()
    return {**result, "measured": heap.peak() - before}


def _planned(model: Any, **options: Any) -> Any:
    import torch

    import roamc

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return roamc.train_step(model, lambda net, *batch: net(*batch), optimizer, strict=True, **options)


def main() -> None:
    """Time every model; print a line for each; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(BLOCKED))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--worker", nargs="+")
    options = parser.parse_args()
    if options.worker:
        name, *rest = options.worker
        print(json.dumps(peak(name, *rest) if len(rest) == 2 else worker(name, int(rest[0]))))
        return
    rows = []
    for name in options.models:
        peaks = {"compile": fresh(__file__, name, "compile", "none", threads=1, count_heap=True)}
        for kind in ("fused", "unfused"):
            for budget in BUDGETS:
                measured = fresh(__file__, name, kind, budget, threads=1, count_heap=True)
                peaks[f"{kind} {budget}"] = measured
        rows.append({**fresh(__file__, name, str(options.rounds), threads=1), "peaks": peaks})
        print(json.dumps(rows[-1]), flush=True)
    print(save("fuse", rows, __doc__ or "", across_processors=True))


if __name__ == "__main__":
    main()
