"""The same problem gives the same answer in every process, whatever the hash seed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
from roamc.solvers import layout, order, retain
from tests.solvers.layout.cases import hard_problem as searched
from tests.solvers.layout.cases import training_problem as storages
from tests.solvers.order.cases import random_layers, training_problem as operators
from tests.solvers.retain.cases import chain, layered
for problem in (operators(30), operators(5, seed=1, reuse=True), random_layers(60, 30), random_layers(150, 60)):
    first = order.solve(problem, work_limit=100_000)
    print(first.order.tolist(), first.candidates, first.bound_bytes, first.status, first.work, first.reuses)
for problem, capacity in ((storages(40, seed=1), None), (storages(20, seed=4), 1), (searched(), None)):
    second = layout.solve(problem, node_limit=3000, capacity=capacity)
    print(second.offset.tolist(), second.candidates, second.bound_bytes, second.status, second.work)
for problem in (layered(6, 1), chain(9)):
    budgets = [order.peak_bytes(problem.order, problem.sequence) * part // 10 for part in (8, 5, 4, 1)]
    front = retain.Frontier(retain.Ground(problem))
    print([front.solve(budget, work_limit=100_000) for budget in budgets])
"""


def run_with(hash_seed: str) -> str:
    """What the script prints in a process of its own."""
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_three_processes_agree() -> None:
    first = run_with("1")
    assert first.count("\n") == 9
    assert "tree_search" in first
    assert [run_with(seed) for seed in ("2", "3")] == [first, first]
