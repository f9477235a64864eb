"""Run the sides of the demo in lockstep: whatever slows the machine down slows all of them down."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import IO, Any

from roamc.cli.demo.worker import EAGER, SIDES, Task
from roamc.errors import BudgetError, RoamcError
from roamc.units import Bytes, Seconds

WARM = 2
"""Steps at the start that ratios of time leave out: planning, profiling, first use of memory."""

ENVIRONMENT = {
    "KINETO_LOG_LEVEL": "5",  # the profiler talks on stderr otherwise
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "OMP_WAIT_POLICY": "passive",  # threads that spin take the cores from the side whose turn it is
}
"""Environment variables of all workers, unless the user has set them."""


@dataclass(frozen=True)
class Result:
    """What the demo measured. Keys of mappings are the sides, lists have one element per step.

    The sides are "eager", "roamc" (its default) and "roamc, budget"; the first is missing in ``plans``.

    Attributes:
        task: sizes and budget, shared by all sides.
        parameters: number of parameters of the model.
        threads: number of torch's threads on each side.
        losses: the loss of every step.
        seconds: the time of every step; the first includes planning and the profiler.
        peak_bytes: measured peak of the first step, above parameters, optimizer state and batch.
        plans: plans of roamc's sides, as :meth:`roamc.Plan.to_dict` gives them, with times and fragmentation.
        total_seconds: time of the whole demo.
    """

    task: Task
    parameters: int
    threads: int
    losses: Mapping[str, list[float]]
    seconds: Mapping[str, list[Seconds]]
    peak_bytes: Mapping[str, Bytes]
    plans: Mapping[str, Mapping[str, Any]]
    total_seconds: Seconds

    @property
    def equal_steps(self) -> int:
        """Number of steps whose losses are the same on all sides, bit for bit."""
        rows = zip(*(self.losses[side] for side in SIDES), strict=True)
        return sum(len({loss.hex() for loss in row}) == 1 for row in rows)

    def time_ratio(self, side: str) -> float | None:
        """Return the median over the steps, without the first WARM, of the time of ``side`` divided by eager's.

        ``side`` is "eager", "roamc" or "roamc, budget". None if no more than WARM steps were run.
        """
        pairs = list(zip(self.seconds[EAGER][WARM:], self.seconds[side][WARM:], strict=True))
        return statistics.median(ours / eager for eager, ours in pairs) if pairs else None

    def memory_ratio(self, side: str) -> float:
        """Return the measured peak of ``side`` ("eager", "roamc" or "roamc, budget"), divided by eager's."""
        return self.peak_bytes[side] / self.peak_bytes[EAGER]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``roamc demo --json`` prints: the fields, and ratios and equal steps, as plain data."""
        task = asdict(self.task)
        del task["side"]
        return {
            "task": task,
            "parameters": self.parameters,
            "threads": self.threads,
            "losses": dict(self.losses),
            "equal_steps": self.equal_steps,
            "bit_equal": self.equal_steps == len(self.losses[EAGER]),
            "measured_peak_bytes": dict(self.peak_bytes),
            "memory_ratio": {side: self.memory_ratio(side) for side in SIDES},
            "step_seconds": dict(self.seconds),
            "time_ratio": {side: self.time_ratio(side) for side in SIDES},
            "plans": {side: dict(plan) for side, plan in self.plans.items()},
            "total_seconds": self.total_seconds,
        }


def race(task: Task, report: Callable[[int], None] = lambda done: None) -> Result:
    """Run ``task.steps`` steps on all sides, each in a process of its own, and return what was measured.

    One step of one side runs at a time; at each step another side goes first.

    Args:
        task: what all sides do; its ``side`` is ignored.
        report: called after each step of all sides with the number of steps done.

    Raises:
        BudgetError: no plan keeps the budget.
        RoamcError: a side failed; says why.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        workers = {side: stack.enter_context(_Worker(replace(task, side=side))) for side in SIDES}
        hello, *_ = [worker.hear() for worker in workers.values()]
        steps: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for index in range(task.steps):
            first = index % len(SIDES)
            for side in SIDES[first:] + SIDES[:first]:
                steps[side].append(workers[side].ask({"step": index}))
            report(index + 1)
        plans = {side: workers[side].ask({"plan": True})["plan"] for side in SIDES if side != EAGER}
    return Result(
        task=task,
        parameters=hello["parameters"],
        threads=hello["threads"],
        losses={side: [step["loss"] for step in rows] for side, rows in steps.items()},
        seconds={side: [step["seconds"] for step in rows] for side, rows in steps.items()},
        peak_bytes={side: rows[0]["peak_bytes"] for side, rows in steps.items()},
        plans=plans,
        total_seconds=time.perf_counter() - start,
    )


class _Worker:
    """A fresh process running :mod:`roamc.cli.demo.worker`; killed at the end of the ``with`` block."""

    def __init__(self, task: Task) -> None:
        self.side = task.side
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "roamc.cli.demo.worker", task.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**ENVIRONMENT, **os.environ},
            text=True,
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request to the process and wait for its answer.

        Args:
            request: ``{"step": index}`` to run the step of this index, counted from 0, or ``{"plan": True}``.

        Returns:
            What :meth:`roamc.cli.demo.worker.Side.step` returns; or ``{"plan": data}``, with what
            :meth:`~roamc.cli.demo.worker.Side.plan` returns.

        Raises:
            RoamcError: the request failed, or the process has ended; names the side and says why. A BudgetError if
                no plan keeps the budget.
        """
        try:
            print(json.dumps(request), file=self._pipe(self._process.stdin), flush=True)
        except BrokenPipeError:
            raise self._died() from None
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = RoamcError if answer["fits"] else BudgetError
            raise kind(f"the {self.side!r} side of the demo failed: {answer['error']}")
        return answer

    def _died(self) -> RoamcError:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()
        return RoamcError(
            f"the {self.side!r} side of the demo ended with code {code}: {last[-1] if last else 'no word'}"
        )

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream
