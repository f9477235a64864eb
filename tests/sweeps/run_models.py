"""``make sweep``: random models by every route, by default and with 60 % of what eager holds.

    python -m tests.sweeps.run_models [--family NAME] [--first N] [--count N] [--workers N] [--log FILE] [--show N]

Writes one JSON line per model, route and budget and prints those that are not bit for bit what torch gives.
``--family in-place`` takes modules that write to views in place instead of nested blocks. ``--first 17 --count 1`` is
model 17 again, and ``--show 17`` prints it. Exits with 1 where the bits differ, an error is not one clear line, a
fallback has no warning, or a plan by default is above eager's peak.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.sweeps import command, pool
from tests.sweeps.models_compare import BUDGETS, FAMILIES, ROUTES, judge

GOOD = ("same", "refused", "falls back", "left out", "no graph")


def work(family: str, seed: int, first: int) -> Iterator[pool.Row]:
    """The verdicts of one model, from way number ``first`` on."""
    ways = [(route, budget) for route in ROUTES for budget in BUDGETS]
    for route, budget in ways[first:]:
        verdict = judge(seed, route, budget, family=family)
        yield {"outcome": verdict.outcome, "route": route, "budget": budget, "text": verdict.text}


def main() -> int:
    """Run the sweep; 1 if a model fails."""
    options = _options()
    if options.show is not None:
        print(FAMILIES[options.family](options.show).make())
        return 0
    seeds = list(range(options.first, options.first + options.count))
    rows = (
        (_name(seed, row), {"family": options.family, "seed": seed}, row)
        for seed, _, row in pool.run(functools.partial(work, options.family), seeds, options.workers)
    )
    return command.judged(rows, Path(str(options.log).format(family=options.family)), GOOD)


def _name(seed: int, row: pool.Row) -> str:
    return f"model {seed} {row.get('route', '')} {row.get('budget') or ''}".strip()


def _options() -> Any:
    parser = command.parser("random models by roamc", "build/models-{family}.jsonl")
    parser.add_argument("--family", choices=list(FAMILIES), default="blocks", help="(default: %(default)s)")
    parser.add_argument("--show", type=int, metavar="N", help="print model N and end")
    parser.add_argument("--first", type=int, default=0, help="number of the first model (default: %(default)s)")
    parser.add_argument("--count", type=int, default=500, help="models (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
