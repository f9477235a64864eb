"""Plans of joint graphs that strangers have published: 100 of the 751 of github.com/thuml/learn_torch.compile.

    python -m tests.sweeps.run_dumps [--repository FOLDER] [--budget B] [--workers N] [--log FILE]

Writes one JSON line per graph, with seconds of the processor, and prints those that have no plan. Exits with 1 if there
are any. The files are of torch 2.0 and 2.1, of models of timm, transformers and torchbench; they have no licence, so
that none is here: without ``--repository``, a clone, one is made in a temporary folder.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roamc.capture.dump import files, graphs
from roamc.errors import RoamcError
from roamc.options import parse_options
from roamc.planning import search
from tests.sweeps import command, pool

SOURCE, COMMIT = "https://github.com/thuml/learn_torch.compile", "b1a5e6dfa7a14996962dc22bff78b41cffac430d"
SEED, COUNT = 47, 100


def work(job: tuple[str, str, str], first: int) -> Iterator[pool.Row]:
    """The verdict of one graph: a path in a repository, planned for a budget."""
    repository, path, budget = job
    del first
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "graph.txt")
        file.write_bytes(_git(repository, "show", f"{COMMIT}:{path}"))
        try:
            yield {"outcome": "planned", "text": "", **_planned(file, budget)}
        except RoamcError as error:
            yield {"outcome": "refused", "text": str(error)[:400]}
        except Exception as error:  # of any kind: what the sweep looks for
            yield {"outcome": "fault", "text": f"{type(error).__name__}: {error}"[:400]}


def _planned(file: Path, budget: str) -> pool.Row:
    times = [time.process_time()]
    (dump,) = files.read(str(file))
    times.append(time.process_time())
    graph = graphs.train_graph(dump, "graph", {})
    times.append(time.process_time())
    plan = search.run(graph, parse_options({"memory_budget": budget, "profile": "cpu"})).plan
    times.append(time.process_time())
    read, derive, planning = (round(end - begin, 2) for begin, end in itertools.pairwise(times))
    assert dump.joint is not None
    return {
        "statements": len(dump.joint.statements), "read": read, "derive": derive, "plan": planning,
        "peak_bytes": plan.peak_bytes, "baseline_bytes": plan.baseline_bytes, "bound_bytes": plan.bound_bytes,
    }  # fmt: skip


def _git(repository: str, *args: str) -> bytes:
    return subprocess.run(["git", "-C", repository, *args], check=True, capture_output=True).stdout


def _paths(repository: str) -> list[str]:
    every = _git(repository, "ls-tree", "-r", "-z", "--name-only", COMMIT).decode().split("\0")
    return random.Random(SEED).sample(sorted(path for path in every if "Joint graph" in path), COUNT)


def main() -> int:
    """Run the sweep; 1 if a graph has no plan."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        if not options.repository:
            subprocess.run(["git", "clone", "--quiet", "--no-checkout", SOURCE, folder], check=True)
        repository = options.repository or folder
        jobs = [(repository, path, options.budget) for path in _paths(repository)]
        rows = ((path, {"path": path}, row) for (_, path, _), _, row in pool.run(work, jobs, options.workers))
        return command.judged(rows, options.log, ("planned",))


def _options() -> Any:
    parser = command.parser("plans of strangers' joint graphs", "build/dumps.jsonl")
    parser.add_argument("--repository", default="", help="a clone of it (default: one is made)")
    parser.add_argument("--budget", default="+0%", help="of the plans (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
