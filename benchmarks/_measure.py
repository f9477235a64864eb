"""What all benchmarks share: fresh processes, the heap counter, the machine's description, results files."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import linecache
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
Row = dict[str, Any]


def counter_library() -> Path:
    """The heap counter, built with the machine's C compiler on first use."""
    target = Path(tempfile.gettempdir()) / f"roamc-heapcount-{os.getuid()}.so"
    source = HERE / "heapcount.c"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(target), str(source), "-ldl"], check=True)
    return target


def fresh(script: str, *arguments: str, count_heap: bool = False, threads: int = 2) -> Any:
    """Run ``script --worker arguments`` in a process of its own; its last line of output, read as JSON."""
    env = _environment(threads)
    if count_heap:
        env["LD_PRELOAD"] = str(counter_library())
    command = [sys.executable, script, "--worker", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def refused_plan(error: Exception) -> Any:
    """The plan of a budget that is refused, whether torch.compile wraps the error or not; others are raised again."""
    from roamc.errors import BudgetError

    cause = getattr(error, "inner_exception", error)
    if not isinstance(cause, BudgetError) or cause.plan is None:
        raise error
    return cause.plan


def interleaved(steps: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each step in each round, by its name. A round runs every step once, every second one backwards.

    Args:
        steps: each runs twice before the first round.
        rounds: their number.
        clock: gives the time in seconds.
    """
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in in_turn(steps, number):
            begun = clock()
            steps[name]()
            times[name].append(clock() - begun)
    return times


def in_turn(names: Iterable[str], number: int) -> list[str]:
    """``names`` in the sequence of round ``number``: every second round goes backwards."""
    return [*names] if number % 2 == 0 else [*names][::-1]


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """Median of the ratios of one step's seconds to another's, round by round."""
    return round(statistics.median(a / b for a, b in zip(times[one], times[other], strict=True)), 4)


def rows_by_route(
    script: str, models: Sequence[str], routes: Sequence[str], line: Callable[[Row], str], *common: str, **how: Any
) -> list[Row]:
    """The rows of a :func:`fresh` worker, called with MODEL, ``common`` and ROUTE, for all of both; each is printed."""
    rows: list[Row] = []
    for name in models:
        for route in routes:
            measured = fresh(script, name, *common, route, **how)
            rows += measured
            print("\n".join(map(line, measured)), flush=True)
    return rows


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONPATH=path, TOKENIZERS_PARALLELISM="false")
    env.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the processor from the one that works
    return env


@contextlib.contextmanager
def resident(script: str, *arguments: str, threads: int) -> Iterator[Callable[[str], Any]]:
    """Run ``script --worker arguments`` in a process that stays: its :func:`serve` answers lines, read as JSON."""
    command = [sys.executable, script, "--worker", *arguments]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, env=_environment(threads), stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        question, lines = process.stdin, process.stdout

        def answer() -> Any:
            for line in lines:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
            log.seek(0)
            raise RuntimeError(f"{' '.join(command[1:])} failed:\n{log.read()[-3000:]}")

        def ask(asked: str) -> Any:
            with contextlib.suppress(BrokenPipeError):  # of a process that has ended: its log says why
                print(asked, file=question, flush=True)
            return answer()

        answer()
        try:
            yield ask
        finally:
            process.kill()


ANSWER = "answer: "
"""Begins the lines of a resident worker that are for the one who asked."""


def serve(answer: Callable[[str], Any]) -> None:
    """The other end of :func:`resident`: say that it is ready, then ``answer`` line after line."""
    print(ANSWER + "null", flush=True)
    for question in sys.stdin:
        print(ANSWER + json.dumps(answer(question.strip())), flush=True)


class Heap:
    """Live and peak bytes of this process, counted by the preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("heap_live", "heap_peak"):
            getattr(self._library, name).restype = ctypes.c_long

    def live(self) -> int:
        """Bytes allocated now."""
        return int(self._library.heap_live())

    def peak(self) -> int:
        """Most bytes allocated since :meth:`reset`."""
        return int(self._library.heap_peak())

    def reset(self) -> None:
        """Start a new peak at what is live now."""
        self._library.heap_reset_peak()


@dataclass(frozen=True)
class Lines:
    """What the lines of emitted programs allocate in one step.

    Attributes:
        workspace: the most that one line allocates and frees again.
        peak: heap bytes at the worst moment inside a line.
        worst: that line's text.
    """

    workspace: int
    peak: int
    worst: str


def by_line(heap: Heap, step: Callable[[], Any]) -> Lines:
    """Run ``step`` and read the heap at every line of every program that roamc emitted."""
    lines = Lines(0, 0, "")
    live, text = 0, ""

    def note() -> None:
        nonlocal lines
        if text:
            so_far = heap.peak()
            workspace = max(lines.workspace, so_far - max(live, heap.live()))
            peak, worst = (so_far, text) if so_far > lines.peak else (lines.peak, lines.worst)
            lines = Lines(workspace, peak, worst)

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal live, text
        if not frame.f_code.co_filename.startswith("<roamc"):
            return None
        if event in ("line", "return"):
            note()
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            live, text = heap.live(), line if event == "line" else ""
            heap.reset()
        return trace

    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(None)
    return lines


def machine() -> dict[str, str]:
    """Where and with what a result was measured."""
    import torch

    import roamc

    return {
        "date": datetime.date.today().isoformat(),
        "cpu": processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "roamc": roamc.__version__,
    }


def processor() -> str:
    """The processor's name, and the family and model that tell its generation: virtual machines often hide the name."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE))
    name = fields.get("model name", platform.processor())
    generation = [f"{key.removeprefix('cpu ')} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return f"{name} ({', '.join(generation)})" if generation else name


def save(
    name: str, rows: list[dict[str, Any]], remarks: str, *, timeless: bool = False, across_processors: bool = False
) -> Path:
    """Write ``results/NAME.json``: machine, remarks, rows.

    Rows of other models stay if they were measured on this machine, with these versions, and on this day.

    Args:
        timeless: the rows hold no times and have a ``date`` of their own; those of other days and processors stay too.
        across_processors: rows of other processors stay too; each row tells its ``cpu`` and ``date``.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text()) if path.exists() else {"machine": None, "rows": []}
    where = machine()
    then = {**(before["machine"] or {}), **({key: where[key] for key in ("date", "cpu")} if timeless else {})}
    old = [row for row in before["rows"] if then == where or (across_processors and row["cpu"] != where["cpu"])]
    new = [{**row, "cpu": where["cpu"], "date": where["date"]} for row in rows] if across_processors else rows
    merged = {_key(row): row for row in (*old, *new)}
    path.write_text(json.dumps({"machine": where, "remarks": remarks, "rows": list(merged.values())}, indent=1) + "\n")
    return path


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(part) for part in ("model", "dtype", "threads", "batch", "kind", "cpu"))
