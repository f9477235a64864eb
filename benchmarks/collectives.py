"""Gradients of graphs that communicate, on several ranks of one machine, against those of one rank.

    python -m benchmarks.collectives --busy           2 and 4 ranks, all models, splits, ways, budgets; 50 runs each
    python -m benchmarks.collectives --runs 5 --ranks 2 --models gpt --layers 1

Ways: R = torch.compile(backend="roamc"), O = roamc.optimize, S = roamc.train_step. Runs are forward and backward passes
of one process group, each compared. "worst" is the largest relative error of a gradient in any run, "eager" the same
for two runs of eager, "same" whether all runs gave the bits of eager, "as_first" whether they gave those of the same
way under the first budget that was not refused. Both compare first runs with first ones, and later ones with second
ones: behind its first backward DistributedDataParallel sorts gradients into other buckets, which on four ranks changes
the order of its sums. "unwaited" is how many ranks left a collective that nobody waited for, "refused" what a budget
was refused with, and "fault" what else happened: an error, or no end in time. The exit code is 1 if there is a fault,
an unwaited collective, other bits under another budget, or an error above 5e-7.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import roamc
from benchmarks._measure import save
from roamc.errors import BudgetError
from tests.parallel import (
    BOUND,
    BY_BATCH,
    KINDS,
    SPLITS,
    batch,
    build,
    reference,
    run_backward,
    whole,
    whole_gradients,
    worst_error,
)

ROOT = Path(__file__).parent.parent
WAYS = ("R", "O", "S")
BUDGETS = ("none", "70%", "40%", "min")
LENGTH = 48
"""Tokens in a row: activations outweigh the gradients then, which are handed out and which no budget makes smaller."""
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One model, split in one way: the rows that one group of processes measures.

    Attributes:
        kind: a name of ``tests.parallel.KINDS``.
        split: a name of ``tests.parallel.SPLITS``.
        ranks: how many processes.
        layers: of the model.
        runs: forward and backward passes of each way under each budget.
    """

    kind: str
    split: str
    ranks: int
    layers: int
    runs: int

    def row(self, way: str, budget: str) -> dict[str, Any]:
        """What names one row."""
        kind = f"{self.ranks} ranks, {self.split}, {way}, {budget}"
        names = {"split": self.split, "ranks": self.ranks, "way": way, "budget": budget}
        return {"model": self.kind, "kind": kind, **names, "layers": self.layers}


def gradients_of_step(model: nn.Module, split: str, options: dict[str, Any]) -> Callable[[], Gradients]:
    """What gives the gradients that train_step updates with: the momentum of a first step is the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    step = roamc.train_step(model, lambda model, x: model(x), optimizer, **options)
    rank = dist.get_rank() if split in BY_BATCH else 0
    mine = batch(length=LENGTH).chunk(dist.get_world_size())[rank] if split in BY_BATCH else batch(length=LENGTH)

    def run() -> Gradients:
        optimizer.state.clear()
        torch.manual_seed(rank)
        step(mine)
        states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        return {
            name.removeprefix("module."): whole(name, state["momentum_buffer"], split).clone()
            for name, state in states.items()
        }

    return run


def gradients_of(model: nn.Module, split: str, way: str, options: dict[str, Any]) -> Callable[[], Gradients]:
    """What runs one forward and backward by ``way`` and gives whole gradients."""
    if way == "S":
        return gradients_of_step(model, split, options)
    compiled: Any = model
    if way == "R":
        compiled = torch.compile(model, backend="roamc", options=options, dynamic=False)
    elif way == "O":
        roamc.optimize(model, **options)

    def run() -> Gradients:
        run_backward(compiled, split, LENGTH)
        return whole_gradients(model, split)

    return run


def measure(case: Case, way: str, budget: str, wanted: Gradients, first: list[Gradients]) -> dict[str, Any]:
    """What a row says of one way and budget, in every rank.

    ``first`` has the gradients of two runs of the same way under an earlier budget; it is filled if it is empty.
    """
    torch._dynamo.reset()
    split = case.split
    options: dict[str, Any] = {"strict": True, "memory_budget": "+0%" if budget == "none" else budget}
    run_eager = gradients_of(SPLITS[split](build(case.kind, case.layers)), split, "eager", {})
    eager = [copied(run_eager()), copied(run_eager())]
    try:
        run = gradients_of(SPLITS[split](build(case.kind, case.layers)), split, way, options)
        gradients = run()
    except Exception as error:
        cause = getattr(error, "inner_exception", error)  # torch.compile wraps what a backend raises
        if not isinstance(cause, BudgetError):
            raise
        return {"refused": str(cause)}
    worst, same, as_first, fill = 0.0, True, True, not first
    for number in range(case.runs):
        gradients = run() if number else gradients
        if fill and number < 2:
            first.append(copied(gradients))
        worst = max(worst, worst_error(gradients, wanted))
        same = same and equal(gradients, eager[min(number, 1)])
        as_first = as_first and equal(gradients, first[min(number, len(first) - 1)])
    eagers = max(worst_error(gradients, wanted) for gradients in eager)
    return {"runs": case.runs, "worst": worst, "eager": eagers, "same": same, "as_first": as_first}


def copied(gradients: Gradients) -> Gradients:
    """``gradients`` as they are now."""
    return {name: gradient.clone() for name, gradient in gradients.items()}


def equal(gradients: Gradients, others: Gradients) -> bool:
    """Whether all gradients have the bits of ``others``."""
    return all(torch.equal(gradients[name], others[name]) for name in others)


def rank_main(arguments: Sequence[str]) -> None:
    """A rank: all ways and budgets of one model and split; the first rank prints a line of JSON for each."""
    store, rank, ways, budgets, *rest = arguments
    case = Case(*rest[:2], *map(int, rest[2:]))
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=case.ranks, timeout=timeout
    )
    wanted = reference(case.kind, case.split, case.ranks, case.layers, LENGTH)
    warnings.filterwarnings("ignore")
    first: dict[str, list[Gradients]] = {way: [] for way in WAYS}
    for way, budget in itertools.product(ways.split(","), budgets.split(",")):
        row = measure(case, way, budget, wanted, first[way])
        if rank == "0":
            print(json.dumps({**case.row(way, budget), **row}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """Beside a process that does nothing but take a core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()


def run_group(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model and split; what went wrong stands in the rows that it left without a result."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(case.ranks)]
        arguments = [",".join(options.ways), ",".join(options.budgets), *map(str, dataclasses.astuple(case))]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.collectives", "--rank", f"{folder}/store", str(rank), *arguments],
                cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdout=out.open("w"), stderr=err.open("w"),
            )
            for rank, (out, err) in enumerate(outputs)
        ]  # fmt: skip
        fault = ended(processes, options.seconds)
        said = [(out.read_text(), err.read_text()) for out, err in outputs]
    by_kind = {row["kind"]: row for row in map(json.loads, (x for x in said[0][0].splitlines() if x.startswith("{")))}
    if not fault and any(process.returncode for process in processes):
        fault = next(err for (_, err), process in zip(said, processes, strict=True) if process.returncode)[-400:]
    rows = [case.row(*cell) for cell in itertools.product(options.ways, options.budgets)]
    unwaited = sum("unwaited collective" in err for _, err in said)
    beside = {"busy": options.busy, "date": datetime.date.today().isoformat()}
    return [
        {**by_kind.get(row["kind"], {**row, "fault": fault or "no result"}), **beside, "unwaited": unwaited}
        for row in rows
    ]


def ended(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> str:
    """Wait until all have ended, or one has failed; what went wrong, where they are still running after ``seconds``."""
    end = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                return ""
            if time.monotonic() > end:
                return f"no end after {seconds:.0f} s"
            time.sleep(0.2)
        return ""
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def sound(row: dict[str, Any]) -> bool:
    """Whether a row is as it should be."""
    if "fault" in row or row["unwaited"]:
        return False
    return "refused" in row or (row["worst"] <= BOUND and row["as_first"])


def line_of(row: dict[str, Any]) -> str:
    """One row as text."""
    where = f"{row['model']:<6}{row['kind']:<37}"
    said = str(row.get("fault", row.get("refused", ""))).replace("\n", " ")
    if said:
        return f"{where}{'FAULT' if 'fault' in row else 'refused'}: {said[-160:] if 'fault' in row else said[:160]}"
    return (
        f"{where}{'' if sound(row) else 'WRONG '}worst {row['worst']:.2e}  eager {row['eager']:.2e}  "
        f"{'same bits' if row['same'] else 'other bits'}  {'' if row['as_first'] else 'NOT '}as first  "
        f"unwaited {row['unwaited']}  runs {row['runs']}"
    )


def main() -> int:
    """Measure, print a line for each row as soon as its ranks have ended, write the results file."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=list(SPLITS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), help="as memory_budget, or none")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit for one model and split")
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps a core busy")
    options = parser.parse_args()
    rows = []
    with busy(options.busy):
        for ranks, kind, split in itertools.product(options.ranks, options.models, options.splits):
            rows += run_group(Case(kind, split, ranks, options.layers, options.runs), options)
            print("\n".join(map(line_of, rows[-len(options.ways) * len(options.budgets) :])), flush=True)
            path = save("collectives", rows, __doc__ or "", timeless=True)
    print(path)
    return 0 if all(map(sound, rows)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
