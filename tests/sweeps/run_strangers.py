"""``make sweep``: strangers' models by every way in, by default and with three.

    python -m tests.sweeps.run_strangers [--only NAME ...] [--route NAME ...] [--budget BUDGET ...] [--workers N]

Writes one JSON line per row, way in and budget, and prints those that have not the bits of torch, take more memory than
their plan or budget says, or raise what the row does not name. Exits with 1 if there are any.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.sweeps import command, pool
from tests.sweeps.strangers_compare import BUDGETS, GOOD, ROUTES, STRANGERS, judge

Way = tuple[str, str | None]


def work(ways: list[Way], name: str, first: int) -> Iterator[pool.Row]:
    """The verdicts of one row, from way number ``first`` on."""
    for route, budget in ways[first:]:
        begun = time.process_time()
        verdict = judge(name, route, budget)
        seconds = round(time.process_time() - begun, 1)
        yield {
            "outcome": verdict.outcome, "route": route, "budget": budget, "text": verdict.text, "seconds": seconds,
        }  # fmt: skip


def main() -> int:
    """Run the sweep; 1 if a row fails."""
    options = _options()
    budgets = [None if budget == "none" else budget for budget in options.budget]
    ways = [(route, budget) for route in options.route for budget in budgets]
    rows = (
        (f"{name} {row.get('route', '')} {row.get('budget') or ''}".strip(), {"name": name}, row)
        for name, _, row in pool.run(functools.partial(work, ways), options.only, options.workers)
    )
    return command.judged(rows, options.log, GOOD)


def _options() -> Any:
    parser = command.parser("strangers' models by roamc", "build/strangers.jsonl")
    every = ["none" if budget is None else budget for budget in BUDGETS]
    parser.add_argument("--only", nargs="+", choices=list(STRANGERS), default=list(STRANGERS), metavar="NAME")
    parser.add_argument("--route", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--budget", nargs="+", choices=every, default=every)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
