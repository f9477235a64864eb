"""Beside Checkmate's integer program (arXiv 1910.02653, eq. 1-9) for the same fixed order, solved by CP-SAT.

One buffer per operator, no in-place reuse. Stage t ends with operator t; R[t][i]: i runs in stage t, S[t][i]: the
result of i is there when stage t begins. What is freed when follows from R and S.
"""

import pytest
from ortools.sat.python import cp_model

from roamc.solvers.order import peak_bytes
from roamc.solvers.retain import RetainProblem, solve, validate
from roamc.solvers.status import Status
from tests.solvers.retain.cases import chain, layered

MILLI = 1000


def checkmate(problem: RetainProblem, budget: int) -> float | None:
    """Fewest seconds, None if the budget cannot be met."""
    order, n = problem.order, problem.num_ops
    assert problem.sequence.tolist() == order.producer.tolist() == list(range(n))
    start, consumer = order.consumer_start.tolist(), order.consumer.tolist()
    readers = [consumer[start[k] : start[k + 1]] for k in range(n)]
    size = order.size.tolist()
    model = cp_model.CpModel()
    run = [[model.new_bool_var("") for _ in range(n)] for _ in range(n)]
    save = [[model.new_bool_var("") for _ in range(n)] for _ in range(n + 1)]
    for t in range(n):
        model.add(run[t][t] == 1)
        for i in range(n):
            if i > t or (i < t and not (problem.repeatable[i] and problem.droppable[i])):
                model.add(run[t][i] == 0)
            if i >= t:
                model.add(save[t][i] == 0)
            else:
                model.add(save[t][i] <= run[t - 1][i] + save[t - 1][i])
            for k in readers[i]:
                model.add(run[t][k] <= run[t][i] + save[t][i])
        for i in range(t + 1):
            live = []
            for j in range(t + 1):
                if j == i or not size[j]:
                    continue
                alive = model.new_bool_var("")
                live.append(size[j] * alive)
                later = [run[t][k] for k in readers[j] if i <= k <= t] + [save[t + 1][j]]
                for needed in later:
                    model.add(alive >= save[t][j] + needed - 1)
                    if j < i:
                        model.add(alive >= run[t][j] + needed - 1)
            model.add(sum(live) + size[i] <= budget).only_enforce_if(run[t][i])
    cost = [round(MILLI * float(second)) for second in problem.seconds]
    model.minimize(sum(cost[i] * run[t][i] for t in range(n) for i in range(t)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C ends the process from then on
    solver.parameters.max_deterministic_time = 20
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    assert status == cp_model.OPTIMAL
    return solver.objective_value / MILLI


def compare(problem: RetainProblem, percent: int) -> tuple[float, float]:
    """Seconds of Checkmate and of the solver, -1 where there is no answer."""
    budget = peak_bytes(problem.order, problem.sequence) * percent // 100
    best, solution = checkmate(problem, budget), solve(problem, budget, work_limit=2_000_000)
    assert validate(problem, budget, solution).good
    if best is None:
        assert solution.status is Status.INFEASIBLE
        return -1, -1
    assert solution.bound_seconds <= best + 1e-6
    return best, -1 if solution.status is Status.INFEASIBLE else solution.seconds


@pytest.mark.parametrize("percent", [80, 65, 55])
@pytest.mark.parametrize("seed", range(4))
def test_as_few_seconds_as_the_integer_program(seed: int, percent: int) -> None:
    best, ours = compare(layered(2, seed, reuse=False), percent)
    assert ours == pytest.approx(best)


@pytest.mark.parametrize("percent", [80, 60])
def test_as_few_seconds_for_a_chain_of_blocks(percent: int) -> None:
    best, ours = compare(chain(3, inner=2), percent)
    assert ours == pytest.approx(best)
