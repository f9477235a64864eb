"""``make sweep-workspace``: bytes that operators of torch's database take, on the heap, beside those counted for them.

    python -m tests.sweeps.run_workspaces [--samples N] [--workers N] [--only REGEX] [--log FILE]

Samples are enlarged in three forms, see :mod:`tests.sweeps.enlarged`; needs a C compiler for the heap counter. Writes
one JSON line per sample and form and prints calls that take more than is counted, or for which far too much is counted.
The last lines are a table by operator. Exits with 1 if a call takes more and no limit names its operator.
"""

from __future__ import annotations

import collections
import json
import os
import re
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks._measure import counter_library
from tests.sweeps import command, pool
from tests.sweeps.databases import Entry, cases, entries, spread

Job = tuple[Entry, int | None]
"""An entry, and how many of its samples."""

MEMORY = 6 << 30
"""Bytes of data that a worker may have; an operator that needs more raises."""

SLOW = (
    *("nn_functional_bilinear", "nn_functional_multilabel_margin_loss", "nn_functional_linear_cross_entropy_chunked"),
    *("corrcoef", "cov", "nn_functional_pdist", "cdist", "nn_functional_ctc_loss", "linalg_eig", "linalg_eigvals"),
    *("combinations", "pca_lowrank", "svd_lowrank", "linalg_cond", "linalg_multi_dot"),
)
"""Entries that are enlarged little: their time grows with the square of the elements, or faster."""

BROKEN = {"_batch_norm_with_update": "writes past running means of another size, and so ends the process"}
"""Entries that are not enlarged, and why."""

BAD = ("above", "over")
"""Verdicts of calls that are printed; the first makes the sweep fail."""

SEEN: dict[str, str] = {}
"""Calls that this process has measured."""


def work(job: Job, first: int) -> Iterator[pool.Row]:
    """What the samples of an entry take in each form, from case number ``first`` on."""
    from tests.sweeps.enlarged import ELEMENTS, FORMS, can_be_enlarged
    from tests.sweeps.workspaces import measured

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    entry, wanted = job
    try:
        samples = [case for case in cases(entry) if can_be_enlarged((case.args, case.kwargs))]
    except Exception as error:  # the database refuses the dtype
        yield {"outcome": "left out", "text": f"no samples: {type(error).__name__}: {error}"[:200], "calls": []}
        return
    chosen = [(sample, form) for sample in spread(len(samples), wanted) for form in FORMS]
    for sample, form in chosen[first:]:
        calls = measured(samples[sample], form, SEEN, ELEMENTS[entry.name in SLOW :])
        bad = [call for call in calls or () if call.verdict in BAD]
        outcome = "left out" if calls is None else next((w for w in BAD if w in {c.verdict for c in bad}), "within")
        rows = [asdict(call) | {"verdict": call.verdict} for call in calls or ()]
        yield {"outcome": outcome, "text": _worst(bad), "sample": sample, "form": form, "calls": rows}


def _worst(bad: list[Any]) -> str:
    if not bad:
        return ""
    call = max(bad, key=lambda call: (call.verdict == "above", abs(call.taken - call.counted)))
    return (
        f"{call.operator}, {call.way}, {call.threads} threads: {call.taken} bytes taken, {call.counted} counted; "
        f"{call.arguments[:160]}"
    )


def table(rows: Iterable[pool.Row]) -> list[str]:
    """Lines: operator, calls, those above, those over; operators with any of these, and all together."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        for call in row["calls"]:
            counts[call["operator"]][call["verdict"]] += 1
    total = sum(counts.values(), collections.Counter())
    lines = [
        f"{name:60s} {sum(count.values()):5d} calls {count['above']:5d} above {count['over']:5d} over"
        for name, count in sorted(counts.items())
        if count["above"] or count["over"]
    ]
    verdicts = ", ".join(f"{total[verdict]} {verdict}" for verdict in (*BAD, "named"))
    said = f"{len(counts)} operators, {sum(total.values())} calls: {verdicts}"
    return [*lines, said]


def main() -> int:
    """Run the sweep; 1 if an operator takes more than is counted."""
    options = _options()
    os.environ["LD_PRELOAD"] = str(counter_library())  # of the workers
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["OMP_NUM_THREADS"] = "2"
    chosen = [
        entry
        for entry in entries()
        if entry.database == "op" and entry.name not in BROKEN and re.search(options.only, str(entry))
    ]
    rows = (
        (f"{entry} [{row.get('sample', '?')}, {row.get('form', '?')}]", {"entry": str(entry)}, {"calls": [], **row})
        for (entry, _), _, row in pool.run(work, [(entry, options.samples) for entry in chosen], options.workers)
    )
    command.record(rows, options.log, good=("within", "left out"))
    written = [json.loads(line) for line in options.log.read_text(encoding="utf-8").splitlines()]
    print("\n".join(table(written)))
    return int(any(row["outcome"] in ("above", "crash") for row in written))


def _options() -> Any:
    parser = command.parser("workspaces of torch's operators", "build/workspaces.jsonl")
    parser.add_argument("--samples", type=int, help="of each entry, evenly spread (default: all)")
    parser.add_argument("--only", default="", help="regular expression on e.g. 'op add float32'")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
