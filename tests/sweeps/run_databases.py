"""``make sweep``: every entry and sample of torch's databases by roamc, by default and with the smallest.

    python -m tests.sweeps.run_databases [--samples N] [--workers N] [--only REGEX] [--log FILE] [--resume]

Writes one JSON line per case and prints those that fail; the last line says how many of how many are bit for bit what
aot_eager gives. Exits with 1 if any is not. ``--resume`` keeps what the log has and goes on behind it, so that a run
may be ended at any time, and ``--samples 1`` may come first.
"""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Iterator
from typing import Any

from tests.sweeps import command, pool
from tests.sweeps.compare import judge
from tests.sweeps.databases import Entry, entries, verdicts

Job = tuple[Entry, int | None, frozenset[int]]
"""An entry, how many of its samples, and those that are judged already."""


def work(job: Job, first: int) -> Iterator[pool.Row]:
    """The verdicts of an entry's samples, from the ``first`` on."""
    entry, samples, judged = job
    yield from verdicts(entry, samples, judge, first, judged)


def jobs_behind(rows: list[pool.Row], chosen: list[Entry], samples: int | None) -> list[Job]:
    """All of the chosen entries, each with the samples that ``rows`` have of it."""
    judged = collections.defaultdict(set)
    for row in rows:
        judged[row["entry"]] |= {row["sample"]} if "sample" in row else set()
    return [(entry, samples, frozenset(judged[str(entry)])) for entry in chosen]


def main() -> int:
    """Run the sweep; 1 if a case fails, here or in the run that is resumed."""
    options = _options()
    before = command.rows_in(options.log) if options.resume else []
    chosen = [entry for entry in entries() if re.search(options.only, str(entry))]
    jobs = jobs_behind(before, chosen, options.samples)
    counts = command.record(command.by_entry(work, jobs, options.workers), options.log, before)
    judged = sum(counts.values()) - counts["left out"]
    print(f"{counts['same']} of {judged} bit for bit as aot_eager; {counts['left out']} left out (see {options.log})")
    return int(counts["same"] != judged)


def _options() -> Any:
    parser = command.parser("torch's databases of modules and operators by roamc", "build/sweep.jsonl")
    parser.add_argument("--samples", type=int, help="of each entry, evenly spread (default: all)")
    parser.add_argument("--only", default="", help="regular expression on e.g. 'op add float32' or 'module nn.GRU'")
    parser.add_argument("--resume", action="store_true", help="judge what the log does not have, and add it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
