"""Small problems: the answer is that of a brute force written without any of the solver's code."""

import itertools
import math
import random

from roamc.solvers.order import make_problem, peak_bytes
from roamc.solvers.order.problem import OrderProblem
from roamc.solvers.retain import RetainProblem, solve, validate
from roamc.solvers.retain.exact import exact
from roamc.solvers.retain.search import Search
from roamc.solvers.status import Status
from tests.solvers.order.cases import possible_reuses
from tests.solvers.retain.cases import random_retain

MOST_COMBINATIONS = 300
KEEP, DROP_ONCE, DROP_ALWAYS, BRING = range(4)
"""What a gap may do; BRING + t drops, and brings back in front of step t."""


class Impossible(Exception):
    """A rerun is asked for that is not allowed."""


def reads_of(problem: RetainProblem, op: int) -> list[int]:
    order = problem.order
    spans = itertools.pairwise(order.consumer_start.tolist())
    return [k for k, (lo, hi) in enumerate(spans) if op in order.consumer[lo:hi].tolist()]


def choices(problem: RetainProblem) -> dict[tuple[int, int], list[int]]:
    """(buffer, number of reads before the gap) of every gap with a choice: what it may do."""
    order, by_gap = problem.order, {}
    reading = [t for t, op in enumerate(problem.sequence.tolist()) if reads_of(problem, op)]
    step = {op: t for t, op in enumerate(problem.sequence.tolist())}
    for k, (lo, hi) in enumerate(itertools.pairwise(order.consumer_start.tolist())):
        times = [step[int(order.producer[k])], *sorted(step[op] for op in order.consumer[lo:hi].tolist()), len(step)]
        for number, (begin, end) in enumerate(itertools.pairwise(times)):
            if problem.droppable[k] and order.size[k] > 0 and end > begin + 1:
                brings = [BRING + t for t in reading if begin < t < end]
                by_gap[k, number] = [KEEP, DROP_ONCE, DROP_ALWAYS, *brings]
    return by_gap


def simulate(problem: RetainProblem, policy: dict[tuple[int, int], int]) -> tuple[float, int]:
    """Seconds and peak when the gaps do this, and all others are kept."""
    order, n = problem.order, problem.num_ops
    reads = [reads_of(problem, op) for op in range(n)]
    makes = [[k for k in range(order.num_buffers) if order.producer[k] == op] for op in range(n)]
    sequence = problem.sequence.tolist()
    uses: dict[int, int] = {}
    there: dict[int, bool] = {}
    runs: list[tuple[int, list[int]]] = []
    seconds = 0.0

    def does(k: int) -> int:
        return policy.get((k, uses[k]), KEEP)

    def need(buffers: list[int], step: int, wanted: set[int], batch: set[int]) -> None:
        for k in buffers:
            if there[k] or k in wanted:
                continue
            maker = int(order.producer[k])
            if not (problem.droppable[k] and problem.repeatable[maker] and step < problem.expires[maker]):
                raise Impossible
            wanted.add(k)
            if maker not in batch:
                batch.add(maker)
                need(reads[maker], step, wanted, batch)

    for step, op in enumerate(sequence):
        wanted: set[int] = set()
        batch: set[int] = set()
        need([k for k in uses if does(k) == BRING + step], step, wanted, batch)
        need(reads[op], step, wanted, batch)
        for again in sorted(batch, key=sequence.index):
            renewed = []
            for k in makes[again]:
                holds = bool(problem.droppable[k]) and does(k) != DROP_ALWAYS and does(k) <= BRING + step
                if not there[k] and (k in wanted or holds):
                    renewed.append(k)
                    there[k] = holds
            runs.append((again, renewed))
            seconds += float(problem.seconds[again])
        for k in reads[op]:
            uses[k] += 1
            there[k] = does(k) == KEEP
        for k in makes[op]:
            uses[k] = 0
            there[k] = does(k) == KEEP
        runs.append((op, [-1]))
    return seconds, count_peak(problem, runs, reads, makes)


def count_peak(
    problem: RetainProblem, runs: list[tuple[int, list[int]]], reads: list[list[int]], makes: list[list[int]]
) -> int:
    order = problem.order
    newest: dict[int, int] = {}
    versions: list[list[int]] = []  # buffer, born, last
    fresh: list[list[int]] = []
    for at, (op, renewed) in enumerate(runs):
        for k in reads[op]:
            versions[newest[k]][2] = at
        fresh.append([])
        for k in makes[op]:
            versions.append([k, at, at])
            fresh[-1].append(len(versions) - 1)
            if renewed == [-1] or k in renewed:
                newest[k] = len(versions) - 1
    for k, version in newest.items():
        if order.kept[k]:
            versions[version][2] = len(runs)
    gone: set[int] = set()
    for at, (_, renewed) in enumerate(runs):
        for v in fresh[at]:
            result = versions[v][0]
            if renewed != [-1] and versions[v][2] == at:
                continue
            for reused in order.reusable[order.reusable_start[result] : order.reusable_start[result + 1]].tolist():
                dying = [w for w, row in enumerate(versions) if row[0] == reused and row[2] == at and row[1] < at]
                if dying and dying[0] not in gone:
                    gone.add(dying[0])
                    break
    live = [int(order.workspace[op]) for op, _ in runs]
    for v, (k, born, last) in enumerate(versions):
        for at in range(born, min(last, len(runs) - 1) + 1 - (v in gone)):
            live[at] += int(order.size[k])
    return max(live, default=0)


def best(problem: RetainProblem, budget: int) -> tuple[float, int]:
    """Fewest seconds and the lowest peak with them within the budget; (inf, lowest peak) if there is none."""
    gaps = choices(problem)
    answers = []
    for row in itertools.product(*gaps.values()):
        try:
            answers.append(simulate(problem, dict(zip(gaps, row, strict=True))))
        except Impossible:
            continue
    return min(((s, p) for s, p in answers if p <= budget), default=(float("inf"), min(p for _, p in answers)))


def mirrored_graph(dice: random.Random) -> OrderProblem:
    """Forward, an operator that needs workspace in the middle, and a backward that reads two large buffers."""
    half = dice.randint(3, 4)
    n = 2 * half
    large = dice.sample(range(half), 2)
    buffers = []
    for op in range(n):
        readers = [op + 1] if op < n - 1 else []
        if op in large:
            readers.append(n - 1 - op)
        buffers.append((dice.choice([4, 8]) if op in large else 0, op, readers, False))
    workspace = [dice.choice([0, 1, 8]) if abs(op - half) < 2 else 0 for op in range(n)]
    return make_problem([0] * n, [], buffers, workspace, possible_reuses(buffers) if dice.random() < 0.5 else None)


def small_graph(dice: random.Random) -> OrderProblem:
    n = dice.randint(4, 8)
    buffers = []
    for producer in range(n):
        for _ in range(dice.choice([1, 1, 1, 2])):
            readers = [reader for reader in range(producer + 1, n) if dice.random() < 0.3]
            buffers.append((dice.choice([0, 1, 2, 4, 8]), producer, readers, dice.random() < 0.05))
    reusable = possible_reuses(buffers) if dice.random() < 0.5 else None
    return make_problem([0] * n, [], buffers, [dice.choice([0, 0, 1]) for _ in range(n)], reusable)


def test_small_graphs_are_solved_as_brute_force_does() -> None:
    dice = random.Random(5)
    seen = dropped = brought = 0
    while seen < 600:
        problem = random_retain(dice.choice([small_graph, mirrored_graph])(dice), dice)
        if not 1 < math.prod(map(len, choices(problem).values())) <= MOST_COMBINATIONS:
            continue
        seen += 1
        full = peak_bytes(problem.order, problem.sequence)
        budget = max(full - dice.randint(1, 8), full // 2)
        seconds, peak = best(problem, budget)
        score = exact(Search(problem), budget, brings=True).score
        assert score.peak == peak
        assert (score.seconds if score.peak <= budget else float("inf")) == seconds
        solution = solve(problem, budget)
        assert validate(problem, budget, solution).good
        if seconds < float("inf"):
            assert solution.seconds <= seconds
            assert solution.status is Status.OPTIMAL
            dropped += 1
            brought += score.seconds < exact(Search(problem), budget, brings=False).score.seconds
    assert dropped > 100
    assert brought > 0
