"""Both sides of the demo in lockstep: whatever slows the machine down, it slows both down."""

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

from roamc.demo.worker import Task
from roamc.errors import RoamcError
from roamc.units import Bytes, Seconds

KINDS = ("eager", "roamc")
WARM = 2
"""Steps at the start that are not timed: planning, profiling, first use of memory."""

ENVIRONMENT = {
    "KINETO_LOG_LEVEL": "5",  # the profiler talks on stderr otherwise
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "OMP_WAIT_POLICY": "passive",  # threads that spin take the cores from the side whose turn it is
}
"""Of both workers, unless the user has set them."""


@dataclass(frozen=True)
class Result:
    """What the demo found. Lists have one element per step.

    Attributes:
        task: sizes, shared by both sides.
        parameters: of the model.
        threads: of each side.
        losses: per side.
        seconds: per side; the first step includes planning and the profiler.
        peak_bytes: per side; measured, above parameters, optimizer state and batch.
        plan: as :meth:`roamc.Plan.to_dict`, with times and fragmentation.
        total_seconds: of the whole demo.
    """

    task: Task
    parameters: int
    threads: int
    losses: Mapping[str, list[float]]
    seconds: Mapping[str, list[Seconds]]
    peak_bytes: Mapping[str, Bytes]
    plan: Mapping[str, Any]
    total_seconds: Seconds

    @property
    def equal_steps(self) -> int:
        """Steps whose losses are the same number, bit for bit."""
        pairs = zip(*(self.losses[kind] for kind in KINDS), strict=True)
        return sum(eager.hex() == ours.hex() for eager, ours in pairs)

    @property
    def time_ratio(self) -> float | None:
        """Median over steps of roamc's time over eager's; None where too few steps were run."""
        pairs = list(zip(*(self.seconds[kind][WARM:] for kind in KINDS), strict=True))
        return statistics.median(ours / eager for eager, ours in pairs) if pairs else None

    @property
    def memory_ratio(self) -> float:
        """roamc's measured peak over eager's."""
        return self.peak_bytes["roamc"] / self.peak_bytes["eager"]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        task = asdict(self.task)
        del task["kind"]
        return {
            "task": task,
            "parameters": self.parameters,
            "threads": self.threads,
            "losses": dict(self.losses),
            "equal_steps": self.equal_steps,
            "bit_equal": self.equal_steps == len(self.losses["eager"]),
            "measured_peak_bytes": dict(self.peak_bytes),
            "memory_ratio": self.memory_ratio,
            "step_seconds": dict(self.seconds),
            "time_ratio": self.time_ratio,
            "plan": dict(self.plan),
            "total_seconds": self.total_seconds,
        }


def race(task: Task, report: Callable[[int], None] = lambda done: None) -> Result:
    """Run ``task.steps`` steps on both sides, one at a time, taking turns at who goes first.

    Args:
        task: its ``kind`` is ignored.
        report: called with the number of steps done.

    Raises:
        RoamcError: a side failed; says why.
    """
    start = time.perf_counter()
    with _Worker(replace(task, kind="eager")) as eager, _Worker(replace(task, kind="roamc")) as ours:
        sides = {"eager": eager, "roamc": ours}
        hello = {kind: side.hear() for kind, side in sides.items()}["roamc"]
        steps: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for index in range(task.steps):
            for kind in KINDS if index % 2 else reversed(KINDS):
                steps[kind].append(sides[kind].ask({"step": index}))
            report(index + 1)
        plan = ours.ask({"plan": True})["plan"]
    return Result(
        task=task,
        parameters=hello["parameters"],
        threads=hello["threads"],
        losses={kind: [step["loss"] for step in found] for kind, found in steps.items()},
        seconds={kind: [step["seconds"] for step in found] for kind, found in steps.items()},
        peak_bytes={kind: found[0]["peak_bytes"] for kind, found in steps.items()},
        plan=plan,
        total_seconds=time.perf_counter() - start,
    )


class _Worker:
    """A fresh process running :mod:`roamc.demo.worker`; killed at the end of the ``with`` block."""

    def __init__(self, task: Task) -> None:
        self.kind = task.kind
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "roamc.demo.worker", task.to_json()],
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
        """Send one request and wait for the answer."""
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
            raise RoamcError(f"the {self.kind} side of the demo failed: {answer['error']}")
        return answer

    def _died(self) -> RoamcError:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()
        return RoamcError(f"the {self.kind} side of the demo ended with code {code}: {last[-1] if last else 'no word'}")

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream
