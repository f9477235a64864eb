"""``make sweep``: measured peaks of small models by every route by default, beside eager's.

    python -m tests.sweeps.run_peaks [--first N] [--count N] [--batch N] [--workers N] [--log FILE]

Every ``--batch`` models are measured in processes of their own. Writes one JSON line per model and route and prints
those that take more than eager. ``--first 17 --count 1`` is model 17 again. Exits with 1 if there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tests.sweeps import command, pool
from tests.sweeps.measured_peaks import ROUTES, judge

GOOD = ("same", "left out")


def work(seed: int, first: int) -> Iterator[pool.Row]:
    """The verdicts of one model, from route number ``first`` on."""
    for route in ROUTES[first:]:
        try:
            verdict = judge(seed, route)
        except Exception as error:  # whatever fails is a line of the log
            yield {"outcome": "raises", "route": route, "text": f"{type(error).__name__}: {error}"[:400]}
            continue
        yield {"outcome": verdict.outcome, "route": route, "text": verdict.text}


def main() -> int:
    """Run the sweep; 1 if a step takes more than eager's."""
    options = _options()
    seeds = range(options.first, options.first + options.count)
    batches = [seeds[start : start + options.batch] for start in range(0, len(seeds), options.batch)]
    rows = (row for batch in batches for row in _rows(batch, options.workers))
    return command.judged(rows, options.log, GOOD)


def _rows(seeds: Sequence[int], workers: int) -> Iterator[tuple[str, dict[str, Any], pool.Row]]:
    for seed, _, row in pool.run(work, seeds, workers):
        yield f"model {seed} {row.get('route', '')}".strip(), {"seed": seed}, row


def _options() -> Any:
    parser = command.parser("measured peaks of small models", "build/peaks.jsonl")
    parser.add_argument("--first", type=int, default=0, help="number of the first model (default: %(default)s)")
    parser.add_argument("--count", type=int, default=160, help="models (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=10, help="models in one process (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
