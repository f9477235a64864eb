"""Worker processes for cases that may crash or hang: such a case ends one worker; another goes on behind it."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

PATIENCE = 900.0
"""Seconds without a row after which a worker is ended."""

Job = Any
Row = dict[str, Any]
Work = Callable[[Job, int], Iterator[Row]]
"""``work(job, first)`` yields one row per case of a job, from case number ``first`` on."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    job: Job = None
    case: int = 0
    heard: float = field(default_factory=time.monotonic)


def run(work: Work, jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, int, Row]]:
    """Every job's rows with the number of their case, as they come.

    A worker that dies or falls silent gives the row ``{"outcome": "crash", ...}`` for the case it was at.
    """
    waiting = [(job, 0) for job in reversed(jobs)]
    busy = [_start(work, waiting) for _ in range(min(workers, len(jobs)))]
    while busy:
        ready = wait([worker.pipe for worker in busy], timeout=5.0)
        for worker in list(busy):
            if worker.pipe in ready:
                row = _received(worker)
            elif time.monotonic() - worker.heard > PATIENCE:
                row = {"outcome": "crash", "text": f"no answer for {PATIENCE:.0f} s"}
            else:
                continue
            if row is not None:
                yield worker.job, worker.case, row
                worker.case += 1
            if row is not None and row["outcome"] == "crash":
                worker.process.kill()
                waiting.append((worker.job, worker.case))
                busy.remove(worker)
                busy.append(_start(work, waiting))
            elif row is None and not _given(worker, waiting):
                busy.remove(worker)


def _received(worker: _Worker) -> Row | None:
    worker.heard = time.monotonic()
    try:
        row: Row | None = worker.pipe.recv()
        return row
    except EOFError:
        worker.process.join(10)
        return {"outcome": "crash", "text": f"the process ended with {worker.process.exitcode}"}


def _start(work: Work, waiting: list[tuple[Job, int]]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    worker = _Worker(process, ours)
    _given(worker, waiting)
    return worker


def _given(worker: _Worker, waiting: list[tuple[Job, int]]) -> bool:
    """Hand the worker the next job; False if there is none, and it ends."""
    if not waiting:
        worker.pipe.send(None)
        return False
    worker.job, worker.case = waiting.pop()
    worker.pipe.send((worker.job, worker.case))
    return True


def _serve(work: Work, pipe: Connection) -> None:
    """The loop of a worker: a job in, its rows out, then None."""
    with contextlib.suppress(EOFError, BrokenPipeError):  # whoever gave the jobs is gone
        while (order := pipe.recv()) is not None:
            for row in work(*order):
                pipe.send(row)
            pipe.send(None)
