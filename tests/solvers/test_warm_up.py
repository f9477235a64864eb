"""After the warm-up nothing is left to compile."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import random, sys
from numba.core.registry import CPUDispatcher
from roamc.solvers import layout, order, retain
from roamc.solvers.warm_up import _operators, _transfer, warm_up
from tests.solvers.layout.cases import hard_problem
from tests.solvers.layout.cases import training_problem as storages
from tests.solvers.order.cases import random_layers, training_problem as operators
from tests.solvers.retain.cases import chain

def ready():
    modules = [module for name, module in sys.modules.items() if name.startswith("roamc.solvers")]
    ours = [f for module in modules for f in vars(module).values() if isinstance(f, CPUDispatcher)]
    return {f"{f.__module__}.{f.__name__} {signature}" for f in ours for signature in f.signatures}

warm_up()
before = ready()
for problem in (operators(30), operators(5, seed=1, reuse=True), random_layers(60, 30)):
    order.solve(problem, work_limit=100_000)
order.overlap(_transfer(_operators(random.Random(3))))
for problem in (storages(40, seed=1), hard_problem()):
    layout.solve(problem, node_limit=3000)
for problem in (chain(1), chain(6, reuse=True)):
    front = retain.Frontier(retain.Ground(problem))
    for budget in (300, 250, 1):
        front.solve(budget, work_limit=200_000)
print(len(before) > 10, sorted(ready() - before))
"""


def test_nothing_is_compiled_after_the_warm_up() -> None:
    """Nor read from numba's cache, whatever that has: functions have the signatures in memory that they need."""
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
