"""Change one field at a time of valid plans: each must be refused by an error of ours, or give the same bits.

Then change fields of plan files: each must be refused by name, and forged numbers counted again.

python -m tests.sweeps.run_plans --count 5000 --fields 5000
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from tests.sweeps import plan_fields
from tests.sweeps.plan_mutants import COUNT, mutate, outcome, valid_plan


def main() -> int:
    """Try ``--count`` changed plans and ``--fields`` changed files, and print every fault; 1 if there was one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=5000, help="how many changed plans")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--fields", type=int, default=5000, help="how many changed files, spread over all kinds")
    arguments = parser.parse_args()
    outcomes = _plans(range(arguments.first, arguments.first + arguments.count))
    files = _files(arguments.fields)
    return 1 if outcomes["FAULT"] or files["FAULT"] else 0


def _plans(seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        valid = valid_plan(seed % COUNT)
        data, what = mutate(valid.data, Random(seed))
        try:
            said = outcome(valid, data, believed=seed // COUNT % 2 == 1)
        except Exception as error:
            said = "FAULT"
            print(f"FAULT seed {seed}, {what}: {type(error).__name__}: {error}", flush=True)
            print("".join(traceback.format_exception(error)[-3:]), flush=True)
        outcomes[said] += 1
        if (seed + 1) % 250 == 0:
            print(f"{sum(outcomes.values())} plans: {dict(outcomes)}", flush=True)
    print(f"{sum(outcomes.values())} plans: {dict(outcomes)}")
    return outcomes


def _files(count: int) -> Counter[str]:
    files, forged = Counter[str](), Counter[str]()
    for kind in plan_fields.KINDS:
        with tempfile.TemporaryDirectory() as folder:
            one = plan_fields.saved(kind, Path(folder))
            for spot, other in plan_fields.sample(one, count // len(plan_fields.KINDS)):
                data = plan_fields.changed(one.data, spot, other)
                said = plan_fields.of_file(data, Path(folder) / "changed.json")
                files[said.partition(":")[0]] += 1
                if said != "refused":
                    print(f"FAULT {kind}, {spot} -> {other!r}: {said}", flush=True)
            for spot, other in plan_fields.sample(one, count // len(plan_fields.KINDS), plan_fields.is_counted):
                said = plan_fields.forged(one, plan_fields.changed(one.data, spot, other))
                forged[said.partition(":")[0]] += 1
                if said.startswith("believed"):
                    forged["FAULT"] += 1
                    print(f"FAULT {kind}, {spot} -> {other!r}: {said}", flush=True)
        print(f"{kind}: {sum(files.values())} changed files: {dict(files)}; forged: {dict(forged)}", flush=True)
    return files + forged


if __name__ == "__main__":
    raise SystemExit(main())
