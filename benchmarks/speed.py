"""Time of a training step: eager, aot_eager, roamc.optimize and roamc.train_step, step by step in turn in one process.

    python -m benchmarks.speed [MODEL ...] [--steps N]

Every round runs one step of each in turn, so that a slow moment of the machine hits all; a ratio is taken
within its round, and the median over rounds is quoted. roamc plans for "+0%". Planning time is shown by stage.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks._measure import fresh, interleaved, ratio, save
from benchmarks.models import make

MODELS = ("nanogpt-dropout", "gpt2-124m", "resnet50")
ROUNDS = {"gpt2-124m": 31}


def _loop(work: Any, model: Any) -> Callable[[], None]:
    """An ordinary training step of ``model``."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        work.loss(model, *work.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def worker(name: str, rounds: int) -> dict[str, Any]:
    """Time all routes of one model."""
    import torch

    import roamc

    work = make(name)
    models = {route: copy.deepcopy(work.model) for route in ("eager", "aot_eager", "optimize", "train_step")}
    models["aot_eager"].compile(backend="aot_eager", dynamic=False)
    options: dict[str, Any] = {"memory_budget": "+0%", "strict": True, "cache": False}
    roamc.optimize(models["optimize"], **options)
    optimizer = torch.optim.AdamW(models["train_step"].parameters(), lr=1e-4)
    planned = roamc.train_step(models["train_step"], work.loss, optimizer, **options)
    steps = {route: _loop(work, model) for route, model in models.items() if route != "train_step"}
    steps["train_step"] = lambda: planned(*work.batch)
    times = interleaved(steps, rounds, time.perf_counter)
    return {
        "model": name,
        "rounds": rounds,
        "seconds": {route: statistics.median(durations) for route, durations in times.items()},
        "train_step / eager": ratio(times, "train_step", "eager"),
        "train_step / aot_eager": ratio(times, "train_step", "aot_eager"),
        "optimize / eager": ratio(times, "optimize", "eager"),
        "optimize / aot_eager": ratio(times, "optimize", "aot_eager"),
        "planning": {stage: round(spent, 3) for stage, spent in planned.plans[0].seconds.items()},
    }


def main() -> None:
    """Time every model; print a table; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, help="rounds per model (21; more where single steps differ much)")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "ROUNDS"))
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker[0], int(options.worker[1]))))
        return
    rows = []
    for name in options.models:
        rows.append(fresh(__file__, name, str(options.steps or ROUNDS.get(name, 21))))
        print({key: value for key, value in rows[-1].items() if key != "seconds"}, flush=True)
    print(save("speed", rows, __doc__ or ""))


if __name__ == "__main__":
    main()
