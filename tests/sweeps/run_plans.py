"""Change one field at a time of valid plans: each must be refused by an error of ours, or give the same bits.

python -m tests.sweeps.run_plans --count 5000
"""

from __future__ import annotations

import argparse
import traceback
from collections import Counter
from random import Random

from tests.sweeps.plan_mutants import COUNT, mutate, outcome, valid_plan


def main() -> int:
    """Try ``--count`` changed plans and print every fault; 1 if there was one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=5000, help="how many changed plans")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.count):
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
    return 1 if outcomes["FAULT"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
