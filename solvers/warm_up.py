"""Compile all loops of the solvers ahead of time, so that a first plan takes no longer than the next.

What is compiled stays on disk; nothing is where the machine code of the installation fits, see `machine_code`.
"""

import random

import numpy as np

from roamc.solvers import layout, order, retain
from roamc.solvers.arrays import read_only
from roamc.solvers.compiled import always_compile
from roamc.solvers.order.improve import improve
from roamc.solvers.order.portfolio import Pieces
from roamc.solvers.order.problem import BufferSpec
from roamc.solvers.order.program_order import program_order
from roamc.solvers.order.stages import one_stage

_OPERATORS, _STORAGES, _NODES = 40, 40, 2_000
_FEW, _LAYERS, _WORK = 2, 12, 100_000


def warm_up() -> None:
    """Compile every loop of the solvers, or read it from numba's cache on disk, by running all of them.

    They run on small problems that no algorithm solves alone, so that all have work. Afterwards this process compiles
    every loop that it needs, however small the problem (`always_compile`).
    """
    always_compile()
    problem = _operators(random.Random(0))
    for algorithm in order.ALGORITHMS.values():
        algorithm(one_stage(problem).problem, 0)
    order.solve(problem, ("program",), Pieces())
    improve(one_stage(problem).problem, program_order(problem))
    order.overlap(_transfer(problem))
    layout.solve(_storages(random.Random(2)), node_limit=_NODES)
    for layers in (_FEW, _LAYERS):
        step = _training(layers)
        retain.solve(step, order.peak_bytes(step.order, step.sequence) * 3 // 5, work_limit=_WORK)


def _transfer(problem: order.OrderProblem) -> order.OverlapProblem:
    """Return `problem` with a transfer, which operator 0 starts and operator 1 waits for."""
    first, peak = np.arange(_OPERATORS) == 0, order.peak_bytes(problem, program_order(problem))
    wait, channel = (read_only(np.where(first, to, -1).astype(np.int32)) for to in (1, 0))
    seconds, sent = read_only(np.ones(_OPERATORS)), read_only(first * 2.0)
    return order.OverlapProblem(problem, seconds, wait, channel, sent, peak, peak)


def _operators(dice: random.Random) -> order.OrderProblem:
    """Return a random problem: each operator reads two earlier results, and may write over one of its own size."""
    readers: list[list[int]] = [[] for _ in range(_OPERATORS)]
    for reader in range(2, _OPERATORS):
        for producer in dice.sample(range(reader), 2):
            readers[producer].append(reader)
    size = [dice.choice((1, 2, 8, 64)) for _ in readers]
    buffers: list[BufferSpec] = [(size[op], op, readers[op], op == _OPERATORS - 1) for op in range(_OPERATORS)]
    reusable = [
        [reused for reused in range(result) if result in readers[reused] and size[reused] == size[result]]
        for result in range(_OPERATORS)
    ]
    return order.make_problem([0] * _OPERATORS, [], buffers, None, reusable)


def _training(layers: int) -> retain.RetainProblem:
    """Return a small training step: a forward chain, and a backward chain that reads what forward made."""
    buffers: list[BufferSpec] = []
    for layer in range(layers):
        buffers.append((8, layer, [layer + 1, 2 * layers - layer], False))
    for step in range(layers, 2 * layers + 1):
        buffers.append((8, step, [step + 1] if step < 2 * layers else [], False))
    reusable: list[list[int]] = [[step - 1] if step > layers else [] for step in range(2 * layers + 1)]
    problem = order.make_problem([0] * len(buffers), [], buffers, None, reusable)
    again = [True] * len(buffers)
    return retain.make_problem(problem, range(len(buffers)), [1.0] * len(buffers), again, again)


def _storages(dice: random.Random) -> layout.LayoutProblem:
    born = [dice.randrange(12) for _ in range(_STORAGES)]
    dead = [start + dice.randrange(1, 8) for start in born]
    return layout.make_problem([dice.randrange(1, 1000) for _ in born], born, dead, alignment=1)
