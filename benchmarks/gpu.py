"""Whole steps on a GPU: time and measured peak of roamc beside eager PyTorch and torch.compile.

    python -m benchmarks.gpu [MODEL ...] [--rows eager,inductor,...] [--rounds N] [--patience SECONDS] [--quick]

Models of roamc's zoo with weights in bfloat16 and random tokens, AdamW fused. Each program is in a process of its own,
and all processes of one call are made ready at the same time, beside those of other calls; steps are timed while
nothing else runs: rounds of programs in turn, some steps in each. Peaks are those of torch's allocator over one whole
step, above parameters, optimizer state and batch. Programs are those of :mod:`benchmarks.programs`; roamc plans with
profile h100.

Without a GPU, ``--quick`` runs small models on the CPU, to try the script; nothing is saved.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._measure import Row, in_turn, ratio, resident, save, serve

ROWS = (
    *("eager", "inductor", "inductor+block", "max-autotune"),
    *("train_step", "train_step+fast", "train_step+fast@light", "train_step+fast@70%"),
)
"""Programs of each model; that of ``RIVAL`` is what times and peaks are divided by."""

RIVAL = "inductor"
PROFILE = "h100"
STEPS, ROUNDS, PATIENCE = 4, 7, 400


@dataclass(frozen=True)
class Case:
    """A model of the zoo: its name there, its settings, the list of its blocks, and what ``--quick`` sets instead."""

    model: str
    settings: dict[str, Any]
    blocks: str
    quick: dict[str, Any] = field(default_factory=dict)


SMALL = {"layers": 2, "heads": 4, "batch": 2, "seq": 32, "width": 64, "vocab": 128}
MODELS = {
    "GPT-2 124M": Case("gpt2", {"batch": 16}, "net.transformer.h", SMALL),
    "BERT-large": Case(
        "bert", {"layers": 24, "width": 1024, "heads": 16, "hidden": 4096, "batch": 16}, "net.bert.encoder.layer",
        {**SMALL, "hidden": 256},
    ),
    "LLaMA 1B": Case(
        "llama", {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "batch": 4},
        "net.model.layers", {**SMALL, "hidden": 256, "kv_heads": 2},
    ),
    "GPT-2 XL": Case("gpt2-xl", {"batch": 4}, "net.transformer.h", SMALL),
}  # fmt: skip


# -- in the process of one program ------------------------------------------------------------------------------------


def worker(name: str, row: str, quick: bool, patience: int) -> None:
    """Make one program ready, beside others; then answer: what it is, and seconds of steps."""
    signal.alarm(patience)  # ends the process
    with alone(False):
        step, about = _ready(name, row, quick)
    signal.alarm(0)

    def answer(question: str) -> Any:
        return about if question == "about" else seconds_of(step)

    serve(answer)


def _ready(name: str, row: str, quick: bool) -> tuple[Callable[[int], Any], Row]:
    import torch

    from benchmarks.programs import build

    begun = time.perf_counter()
    program = build(row, _work(name, quick), PROFILE)
    losses: list[float] = []

    def step(number: int) -> None:
        torch.manual_seed(number)
        losses.append(float(program.step(None)))

    step(0)
    taken = time.perf_counter() - begun
    for number in (1, 2):
        step(number)
    about: Row = {"losses": losses, "ready_seconds": taken, **peak_of(lambda: step(3))}
    for plan in program.plans():
        retained = plan.decisions.get("retain", {})
        about |= {key: getattr(plan, key) for key in ("peak_bytes", "needed_bytes", "arena_bytes", "baseline_bytes")}
        about |= {"status": plan.status, "reruns": len(retained.get("reruns", ())), "planning": plan.seconds}
    return step, about


def _work(name: str, quick: bool) -> Any:
    """The model, on the GPU where there is one, and a batch of random tokens."""
    import torch

    from benchmarks.blocks import Blocked, Training
    from roamc.cli import zoo
    from roamc.cli.models import settings_of

    case, device = MODELS[name], "cuda" if torch.cuda.is_available() else "cpu"
    settings = {**case.settings, **(case.quick if quick else {}), "dtype": "bfloat16"}
    torch.manual_seed(0)
    work = zoo.make(case.model, settings, device)
    vocab = int({**settings_of(case.model), **settings}["vocab"])
    batch = tuple(torch.randint(0, vocab, tokens.shape, device=device) for tokens in work.batch)
    return Blocked(Training(work.model, work.loss_fn), batch, (case.blocks,))


def peak_of(step: Callable[[], None]) -> Row:
    """Peak of a step in bytes: above what is there before it without idle arenas, and in all."""
    import torch

    from roamc.runtime import blocks

    if not torch.cuda.is_available():
        step()
        return {"measured": 1, "whole": 1}
    at_rest()
    before = torch.cuda.memory_allocated() - blocks.held()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    whole = torch.cuda.max_memory_allocated()
    return {"measured": whole - before, "whole": whole, "device": torch.cuda.get_device_name()}


def seconds_of(step: Callable[[int], Any]) -> float:
    """Seconds of one step, the mean of some."""
    import torch

    def wait() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    step(0)
    begun = wait()
    for number in range(STEPS):
        step(number)
    taken = (wait() - begun) / STEPS
    at_rest()
    return taken


def at_rest() -> None:
    """Leave memory that is idle to the processes beside this one."""
    import torch

    from roamc.runtime import blocks

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        blocks.empty_idle(torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.empty_cache()


@contextlib.contextmanager
def alone(whether: bool) -> Iterator[None]:
    """Hold the GPU among the processes of these benchmarks: alone as soon as nobody else holds it, or with others."""
    with (Path(tempfile.gettempdir()) / f"roamc-gpu-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if whether else fcntl.LOCK_SH)
        yield


# -- in the process that asks -----------------------------------------------------------------------------------------


def measure(name: str, programs: list[str], rounds: int, patience: int, quick: bool) -> list[Row]:
    """Rows of one model."""
    rest = ("--patience", str(patience), *(["--quick"] if quick else []))
    rows, times = ready_and_timed(__file__, {row: (name, row, *rest) for row in programs}, rounds)
    peaks = {kind: row["measured"] for kind, row in rows.items() if "measured" in row}
    for kind, row in rows.items():
        row |= {"model": name, "kind": kind}
        if kind in times:
            row |= {"seconds": statistics.median(times[kind]), "rounds": rounds}
        if kind in times and RIVAL in times:
            row |= {"of rival": ratio(times, kind, RIVAL), "peak of rival": peaks[kind] / peaks[RIVAL]}
    return list(rows.values())


def ready_and_timed(
    script: str, programs: dict[str, tuple[str, ...]], rounds: int
) -> tuple[dict[str, Row], dict[str, list[float]]]:
    """Start a process for each of ``programs``, name to arguments of its worker; time those that become ready in turn.

    Returns:
        What each is, or why it failed; and the seconds of each in each round.
    """
    rows: dict[str, Row] = {}
    asks: dict[str, Callable[[str], Any]] = {}
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(len(programs)) as pool:
        begun = {
            name: pool.submit(stack.enter_context, resident(script, *arguments, threads=1))
            for name, arguments in programs.items()
        }
        for name, future in begun.items():
            try:
                ask = future.result()
                rows[name] = ask("about")
                asks[name] = ask
            except RuntimeError as error:
                rows[name] = {"failed": str(error)[-2000:]}
        with alone(True):
            times, failed = _rounds(asks, rounds)
        return {**rows, **failed}, times


def _rounds(asks: dict[str, Callable[[str], Any]], rounds: int) -> tuple[dict[str, list[float]], dict[str, Row]]:
    """Seconds of each program in each round; and those that ended before the last round, and why."""
    times: dict[str, list[float]] = {row: [] for row in asks}
    failed: dict[str, Row] = {}
    for number in range(rounds):
        for row in in_turn([row for row in asks if row not in failed], number):
            try:
                times[row].append(asks[row]("seconds"))
            except RuntimeError as error:
                failed[row] = {"failed": str(error)[-2000:]}
    return {row: seconds for row, seconds in times.items() if row not in failed}, failed


def line(row: Row) -> str:
    """A row as one line of text."""
    name = f"{row['model']:<12}{row['kind']:<24}"
    if "failed" in row:
        return f"{name}failed: {row['failed'].strip().splitlines()[-1]}"
    time = f"{row['seconds'] * 1e3:8.1f} ms {row.get('of rival', 0):.3f}" if "seconds" in row else ""
    plan = f", planned {row['needed_bytes'] / 1e6:.0f}, {row['reruns']} reruns" if "reruns" in row else ""
    share = row.get("peak of rival", 0)
    return f"{name}{time}  {row['measured'] / 1e6:9.1f} MB {share:.3f}{plan}, ready {row['ready_seconds']:.0f} s"


def main() -> None:
    """Measure; print a line for each program; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--patience", type=int, default=PATIENCE, help="seconds until a program has to be ready")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", nargs=2)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker, options.quick, options.patience)
        return
    for name in options.models:
        rows = measure(name, options.rows.split(","), options.rounds, options.patience, options.quick)
        print("\n".join(map(line, rows)), flush=True)
        if not options.quick:
            with alone(True):
                save("gpu", rows, __doc__ or "")


if __name__ == "__main__":
    main()
