"""``make sweep``: random training programs by every way in, under every budget, on one and two threads.

    python -m tests.sweeps.run_programs [--first N] [--count N] [--ways N] [--workers N] [--show N]

Writes one JSON line per program and way and prints those that have not the bits of torch (of a fifth, whose numerics
are "fast": are not near them), take more memory than plan or budget says, or raise, but for what torch.compile refuses
in the same words. The heap is counted if there is a C compiler. ``--ways 2`` takes two of each program's ways, evenly
spread over all programs; ``--first 17 --count 1`` is program 17 again, and ``--show 17`` prints it. Exits with 1 if
there are any.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks._measure import counter_library
from tests.sweeps import command, pool
from tests.sweeps.programs import program

Way = tuple[int, str | None, str]
GOOD = ("same", "refused", "limit", "left out")
BUDGETS = (None, "+1%", "70%", "50%", "min")
ROUTES = ("train_step", "optimize", "compile")
WAYS: list[Way] = list(itertools.product((1, 2), BUDGETS, ROUTES))


def ways_of(seed: int, count: int) -> list[Way]:
    """So many ways of a program, all of them equally often among the programs."""
    return [WAYS[(7 * seed + number * len(WAYS) // count) % len(WAYS)] for number in range(count)]


def work(count: int, seed: int, first: int) -> Iterator[pool.Row]:
    """The verdicts on one program, from way number ``first`` on."""
    from tests.sweeps.strangers_compare import judge

    for threads, budget, route in ways_of(seed, count)[first:]:
        begun = time.process_time()
        verdict = judge(f"program {seed}", route, budget, threads=threads)
        seconds = round(time.process_time() - begun, 1)
        row = {"route": route, "budget": budget, "threads": threads, "seconds": seconds}
        yield {"outcome": verdict.outcome, **row, "text": verdict.text}


def main() -> int:
    """Run the sweep; 1 if a program fails."""
    options = _options()
    if options.show is not None:
        print(program(options.show).text)
        return 0
    os.environ |= {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    if shutil.which(os.environ.get("CC", "cc")):
        os.environ["LD_PRELOAD"] = str(counter_library())  # of the workers
    seeds = list(range(options.first, options.first + options.count))
    rows = (
        (_name(seed, row), {"seed": seed}, row)
        for seed, _, row in pool.run(functools.partial(work, options.ways), seeds, options.workers)
    )
    return command.judged(rows, options.log, GOOD)


def _name(seed: int, row: pool.Row) -> str:
    return " ".join(str(word) for word in ("program", seed, *(row.get(key) for key in ("route", "budget", "threads"))))


def _options() -> Any:
    parser = command.parser("random training programs by roamc", "build/programs.jsonl")
    parser.add_argument("--show", type=int, metavar="N", help="print program N and end")
    parser.add_argument("--first", type=int, default=0, help="number of the first program (default: %(default)s)")
    parser.add_argument("--count", type=int, default=500, help="programs (default: %(default)s)")
    parser.add_argument("--ways", type=int, default=len(WAYS), help="of each program (default: all, %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
