"""``make sweep``: every entry and sample of torch's databases by roamc, without a budget and with the smallest.

    python -m tests.sweeps.run_databases [--samples N] [--workers N] [--only REGEX] [--log FILE]

Writes one JSON line per case and prints those that fail; the last line says how many of how many are bit for bit what
aot_eager gives. Exits with 1 if any is not.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.sweeps import command, pool
from tests.sweeps.compare import judge
from tests.sweeps.databases import Entry, cases, entries, spread


def work(job: tuple[Entry, int | None], first: int) -> Iterator[pool.Row]:
    """The verdicts of an entry's samples, from the ``first`` on."""
    entry, samples = job
    try:
        made = cases(entry)
    except Exception as error:  # the database refuses the dtype
        yield {"outcome": "left out", "sample": 0, "text": f"no samples: {type(error).__name__}: {error}"[:200]}
        return
    for sample in spread(len(made), samples)[first:]:
        start = time.perf_counter()
        verdict = judge(made[sample])
        seconds = round(time.perf_counter() - start, 2)
        yield {"outcome": verdict.outcome, "sample": sample, "text": verdict.text, "seconds": seconds}


def main() -> int:
    """Run the sweep; 1 if a case fails."""
    options = _options()
    jobs = [(entry, options.samples) for entry in entries() if re.search(options.only, str(entry))]
    rows = (
        (f"{entry} [{row.get('sample', '?')}]", {"entry": str(entry), "case": number}, row)
        for (entry, _), number, row in pool.run(work, jobs, options.workers)
    )
    counts = command.record(rows, options.log)
    judged = sum(counts.values()) - counts["left out"]
    print(f"{counts['same']} of {judged} bit for bit as aot_eager; {counts['left out']} left out (see {options.log})")
    return int(counts["same"] != judged)


def _options() -> Any:
    parser = command.parser("torch's databases of modules and operators by roamc", "build/sweep.jsonl")
    parser.add_argument("--samples", type=int, help="of each entry, evenly spread (default: all)")
    parser.add_argument("--only", default="", help="regular expression on e.g. 'op add float32' or 'module nn.GRU'")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
