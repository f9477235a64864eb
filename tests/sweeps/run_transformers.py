"""``make sweep``: one step of every model type of transformers by ``roamc.train_step`` against eager, bit for bit.

    python -m tests.sweeps.run_transformers [--only REGEX] [--workers N] [--log FILE] [--resume]

Writes one JSON line per case and prints those that are not the bits of eager. Exits with 1 if any differs, or fails
other than by roamc's own refusal. ``--resume`` keeps what the log has and goes on behind it.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.sweeps import command, pool
from tests.sweeps.transformers_models import Entry, entries, judge


def work(entry: Entry, first: int) -> Iterator[pool.Row]:
    """The verdict of an entry, which is one case."""
    if first:
        return
    torch.set_num_threads(1)
    start = time.process_time()
    verdict = judge(entry)
    yield {"outcome": verdict.outcome, "text": verdict.text, "seconds": round(time.process_time() - start, 2)}


def main() -> int:
    """Run the sweep; 1 if a case fails, here or in the run that is resumed."""
    options = _options()
    before = command.rows_in(options.log) if options.resume else []
    done = {row["entry"] for row in before}
    chosen = [entry for entry in entries() if re.search(options.only, str(entry)) and str(entry) not in done]
    rows = ((str(entry), {"entry": str(entry)}, row) for entry, _, row in pool.run(work, chosen, options.workers))
    counts = command.record(rows, options.log, before)
    judged = sum(counts.values()) - counts["left out"]
    print(
        f"{counts['same']} of {judged} have the bits of eager, {counts['refused']} are refused; {counts['left out']} "
        f"cannot be built small, or do not train in eager (see {options.log})"
    )
    return int(counts["same"] + counts["refused"] != judged)


def _options() -> Any:
    parser = command.parser("one step of every model type of transformers", "build/sweep_transformers.jsonl")
    parser.add_argument("--only", default="", help="regular expression on e.g. 'llama use_cache=False'")
    parser.add_argument("--resume", action="store_true", help="judge what the log does not have, and add it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
