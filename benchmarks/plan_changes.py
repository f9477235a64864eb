"""Whether a change to roamc changes plans: record those of twelve models in one tree, again in another, and compare.

    python -m benchmarks.plan_changes record FILE [MODEL ...]
    python -m benchmarks.plan_changes compare BEFORE AFTER

Recorded are the plans of every model by three routes under five budgets, on the shipped profile, so that they do not
depend on the machine. Times of planning are left out. ``compare`` says of every case whether the decisions are equal;
where they are not, whether the peak or the predicted time is higher, and then it exits with 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks._measure import refused_plan, rows_by_route
from benchmarks.kept import with_loss
from benchmarks.models import WORKLOADS, make

ROUTES = ("compile", "optimize", "train_step")
BUDGETS: tuple[str | None, ...] = (None, "+0%", "70%", "40%", "min", "light")
FIELDS = ("needed_bytes", "peak_bytes", "step_seconds", "added_seconds")
"""Numbers of a plan that must not rise, the bytes first."""

Row = dict[str, Any]
Key = tuple[str, str, str]


def worker(name: str, route: str) -> list[Row]:
    """The plans of one model by one route under every budget."""
    rows = []
    for budget in BUDGETS:
        row: Row = {"model": name, "route": route, "budget": budget or "default"}
        try:
            row["plans"] = _plans(name, route, budget)
        except Exception as error:
            row["refused"] = refused_plan(error).needed_bytes
        rows.append(row)
    return rows


def _plans(name: str, route: str, budget: str | None) -> list[Row]:
    """The plans of one case, in the order in which they are made, as plain data."""
    import roamc.frontends.backend

    torch._dynamo.reset()
    roamc.frontends.backend.LATEST.clear()
    work = make(name, "float32")
    options: dict[str, Any] = {"memory_budget": budget, "strict": True, "profile": "cpu"}
    if route == "train_step":
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4)
        return [roamc.train_step(work.model, work.loss, optimizer, **options).plan(*work.batch).to_dict()]
    compiled = with_loss(work, [])
    if route == "optimize":
        roamc.optimize(compiled.model, **options)
        compiled.loss(compiled.model, *work.batch)
    else:
        compiled.loss(torch.compile(compiled.model, backend="roamc", dynamic=False, options=options), *work.batch)
    return [plan.to_dict() for plan in roamc.frontends.backend.LATEST]


def record(path: Path, models: list[str]) -> None:
    """Write one JSON line per case, and a line about it to the screen."""
    rows = rows_by_route(__file__, models, ROUTES, _line)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _line(row: Row) -> str:
    needed = [plan["needed_bytes"] for plan in row["plans"]] if "plans" in row else ["refused:", row["refused"]]
    return " ".join(map(str, (*_key(row), "needs", *needed)))


def verdict(before: Row, after: Row) -> str:
    """ "equal", "other, no higher", or what rises: cases of one model, route and budget from two trees."""
    if "refused" in before or "refused" in after:
        if "plans" in before:
            return f"higher: refused, at least {after['refused']} bytes"
        rises = "refused" in after and after["refused"] > before["refused"]
        return "higher: the smallest budget" if rises else "equal" if before == after else "other, no higher"
    old, new = (row["plans"] for row in (before, after))
    if [plan["decisions"] for plan in old] == [plan["decisions"] for plan in new]:
        return "equal"
    totals = {field: [sum(plan[field] for plan in plans) for plans in (old, new)] for field in FIELDS}
    rises = [f"{field} {first} to {second}" for field, (first, second) in totals.items() if second > first]
    return f"higher: {', '.join(rises)}" if rises else "other, no higher"


def compare(before: Path, after: Path) -> int:
    """Print the verdict of every case that is not equal; 1 if one is higher or missing."""
    old, new = (_rows(path) for path in (before, after))
    verdicts = {key: verdict(row, new[key]) if key in new else "higher: missing" for key, row in old.items()}
    for key, said in verdicts.items():
        if said != "equal":
            print(*key, said)
    counts = collections.Counter(said.partition(":")[0] for said in verdicts.values())
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return int(counts["higher"] > 0)


def _rows(path: Path) -> dict[Key, Row]:
    return {_key(row): row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def _key(row: Row) -> Key:
    return row["model"], row["route"], row["budget"]


def main() -> int:
    """Record or compare."""
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(worker(*sys.argv[2:4])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="write the plans of this tree")
    recording.add_argument("file", type=Path)
    recording.add_argument("models", nargs="*", default=list(WORKLOADS))
    comparing = actions.add_parser("compare", help="exit with 1 where a peak or a time is higher")
    comparing.add_argument("files", nargs=2, type=Path)
    options = parser.parse_args()
    if options.action == "compare":
        return compare(*options.files)
    record(options.file, options.models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
