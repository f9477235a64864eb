"""Gradients of graphs that communicate, on several ranks of one machine, against those of one rank: a table.

    python -m benchmarks.collectives                 2 and 4 ranks, all models, splits, ways, budgets; 50 runs each
    python -m benchmarks.collectives --runs 5 --ranks 2 --kinds gpt --busy

Ways: R = torch.compile(backend="roamc"), O = roamc.optimize, S = roamc.train_step (DDP; the others are to be refused).
``worst`` is the largest relative error of a gradient in any run, ``eager`` the same for eager, ``unwaited`` how many
collectives were never waited for, and ``same`` whether all runs gave the bits of eager.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import roamc
from roamc.errors import BudgetError, CaptureError
from tests.parallel import BOUND, KINDS, SPLITS, batch, build, reference, run_backward, whole_gradients, worst_error

ROOT = Path(__file__).parent.parent
WAYS = ("R", "O", "S")
BUDGETS = ("none", "50%", "min")
Gradients = dict[str, Tensor]


def gradients_of_step(model: nn.Module, options: dict[str, Any]) -> Callable[[], Gradients]:
    """What gives the gradients that train_step updates with: the momentum of a first step is the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    step = roamc.train_step(model, lambda model, x: model(x), optimizer, **options)
    rank = dist.get_rank()
    mine = batch().chunk(dist.get_world_size())[rank]

    def run() -> Gradients:
        optimizer.state.clear()
        torch.manual_seed(rank)
        step(mine)
        states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        return {name.removeprefix("module."): state["momentum_buffer"].clone() for name, state in states.items()}

    return run


def gradients_of(model: nn.Module, split: str, way: str, options: dict[str, Any]) -> Callable[[], Gradients]:
    """What runs one forward and backward by ``way`` and gives whole gradients."""
    if way == "S":
        return gradients_of_step(model, options)
    compiled: Any = model
    if way == "R":
        compiled = torch.compile(model, backend="roamc", options=options, dynamic=False)
    elif way == "O":
        roamc.optimize(model, **options)

    def run() -> Gradients:
        run_backward(compiled, split)
        return whole_gradients(model, split)

    return run


def measure(kind: str, split: str, way: str, budget: str, runs: int, wanted: Gradients) -> dict[str, Any]:
    """One row of the table, in every rank."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"strict": True, **({} if budget == "none" else {"memory_budget": budget})}
    eager = gradients_of(SPLITS[split](build(kind)), split, "eager", {})()
    row = {"kind": kind, "split": split, "way": way, "budget": budget, "runs": 0, "eager": worst_error(eager, wanted)}
    try:
        run = gradients_of(SPLITS[split](build(kind)), split, way, options)
        found = run()
    except (BudgetError, CaptureError) as error:
        return {**row, "said": str(error)}
    except torch._dynamo.exc.BackendCompilerFailed as error:
        return {**row, "said": str(error.inner_exception)}
    worst, same = 0.0, True
    for number in range(runs):
        found = run() if number else found
        worst = max(worst, worst_error(found, wanted))
        same = same and all(torch.equal(found[name], eager[name]) for name in eager)
    return {**row, "runs": runs, "worst": worst, "same": same}


def rank_main(arguments: Sequence[str]) -> None:
    """A rank: all ways and budgets of one model and split; the first rank prints a line of JSON for each."""
    kind, split, store, rank, ranks, runs, ways, budgets = arguments
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout
    )
    wanted = reference(kind, split, int(ranks))
    warnings.filterwarnings("ignore")
    for way in ways.split(","):
        for budget in budgets.split(",") if way != "S" or split == "DDP" else ["none"]:
            row = measure(kind, split, way, budget, int(runs), wanted)
            if rank == "0":
                print(json.dumps({"ranks": int(ranks), **row}), flush=True)
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


def run_group(kind: str, split: str, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model and split; what went wrong is a row as well."""
    rest = [str(options.runs), ",".join(options.ways), ",".join(options.budgets)]
    where = {"kind": kind, "split": split, "ranks": ranks}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.collectives", "--rank", kind, split, f"{folder}/store", str(rank),
                 str(ranks), *rest],
                cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdout=out.open("w"), stderr=err.open("w"),
            )
            for rank, (out, err) in enumerate(outputs)
        ]  # fmt: skip
        end, late = time.monotonic() + options.seconds, False
        try:
            for process in processes:
                process.wait(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = [(out.read_text(), err.read_text()) for out, err in outputs]
    rows = [json.loads(line) for line in said[0][0].splitlines() if line.startswith("{")]
    unwaited = sum("unwaited collective" in text for _, text in said)
    rows = [{**row, "unwaited": unwaited} for row in rows]
    if late:
        rows.append({**where, "said": f"no end after {options.seconds:.0f} s"})
    elif any(process.returncode for process in processes):
        rows.append({**where, "said": said[0][1][-400:].replace("\n", " ")})
    return rows


def line_of(row: dict[str, Any]) -> str:
    """One row as text."""
    where = f"{row['ranks']} | {row['kind']} | {row['split']} | {row.get('way', '')} | {row.get('budget', '')}"
    if "said" in row:
        return f"| {where} | {row['said'][:160]} | | | | |"
    held = "yes" if row["worst"] <= BOUND else "NO"
    same = "yes" if row["same"] else "no"
    return (
        f"| {where} | {held} | {row['worst']:.2e} | {row['eager']:.2e} | {same} | {row['unwaited']} (runs: "
        f"{row['runs']}) |"
    )


def main() -> None:
    """Print the table, a row as soon as its group of ranks has ended."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=list(SPLITS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), help="as memory_budget, or none")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit for one model and split")
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps a core busy")
    options = parser.parse_args()
    print(f"| ranks | model | split | way | budget | <= {BOUND:.0e} | worst | eager | same | unwaited |", flush=True)
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with busy(options.busy):
        for ranks in options.ranks:
            for kind in options.kinds:
                for split in options.splits:
                    for row in run_group(kind, split, ranks, options):
                        print(line_of(row), flush=True)


if __name__ == "__main__":
    main()
