"""Every rival gives legal answers on random problems; the integer programs are exact on small ones."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks.rivals import Missing, inductor, lescea, model_ilp, supermalloc, xla
from benchmarks.rivals.precedence import is_legal
from roamc.solvers import layout as layouts
from roamc.solvers.layout.problem import LayoutProblem, arena_bytes, lower_bound
from roamc.solvers.order import OrderProblem, make_problem
from roamc.solvers.order.evaluate import peak_bytes
from roamc.solvers.status import Status

ORDERS = {
    "lescea": lescea.order,
    **{name: lambda problem, name=name: inductor.order(problem, name) for name in inductor.METHODS},
}


def random_problem(seed: int, num_ops: int, *, staged: bool = False) -> OrderProblem:
    """Operators that read one or two earlier ones, a few edges, some kept buffers, maybe three stages."""
    rng = np.random.default_rng(seed)
    stage = [3 * op // num_ops if staged else 0 for op in range(num_ops)]
    readers: list[list[int]] = [[] for _ in range(num_ops)]
    for op in range(1, num_ops):
        for maker in rng.choice(op, size=min(op, int(rng.integers(0, 3))), replace=False):
            readers[maker].append(op)
    edges = [tuple(sorted(rng.choice(num_ops, 2, replace=False).tolist())) for _ in range(num_ops // 4)]
    buffers = [(int(rng.integers(0, 9)) * 64, op, ops, bool(rng.random() < 0.1)) for op, ops in enumerate(readers)]
    return make_problem(stage, edges, buffers)


def least_peak(problem: OrderProblem) -> int:
    orders = (np.array(order) for order in itertools.permutations(range(problem.num_ops)))
    return min(peak_bytes(problem, order) for order in orders if is_legal(problem, order))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_legal(name: str, staged: bool) -> None:
    for seed in range(30):
        problem = random_problem(seed, 5 + seed, staged=staged)
        assert is_legal(problem, ORDERS[name](problem)), seed


def test_lescea_runs_what_leaves_least_behind() -> None:
    # 0 makes 10 bytes for 2, 1 makes 4 bytes for 3: 1 first, then 3, which frees them.
    problem = make_problem([0] * 4, [], [(10, 0, [2], False), (4, 1, [3], False)])
    assert lescea.order(problem).tolist() == [1, 3, 0, 2]


def test_a_torch_without_its_orders_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import memory

    monkeypatch.delattr(memory, "topological_sort_dfs")
    with pytest.raises(Missing, match="topological_sort_dfs"):
        inductor.order(random_problem(0, 5), "dfs")


@pytest.mark.parametrize("seed", range(6))
def test_ordering_program_equals_brute_force_given_a_step_per_operator(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(seed, 6, staged=seed % 2 == 1)
    longest_path = model_ilp.instance(problem).windows[2] - 1
    monkeypatch.setattr(model_ilp, "SLACK", problem.num_ops / longest_path)
    monkeypatch.setattr(model_ilp, "ORDER_GAP", 0.0)
    order, status = model_ilp.order(problem, 20.0)
    assert status == "OPTIMAL"
    assert order is not None
    assert is_legal(problem, order)
    assert peak_bytes(problem, order) == least_peak(problem)


def test_ordering_program_says_when_time_is_up() -> None:
    order, status = model_ilp.order(random_problem(1, 60), 1e-9)
    assert (order, status) == (None, "UNKNOWN")


def random_layout(seed: int, count: int) -> LayoutProblem:
    rng = np.random.default_rng(seed)
    born = rng.integers(0, 8, count)
    return layouts.make_problem(rng.integers(0, 500, count), born, born + rng.integers(1, 5, count))


def check_layout(problem: LayoutProblem, offset: np.ndarray) -> int:
    """The arena, after the judge has looked at it."""
    solved = layouts.solve(problem)
    arena = arena_bytes(problem, offset)
    status = Status.OPTIMAL if arena == lower_bound(problem) else Status.GAP
    answer = dataclasses.replace(solved, offset=offset, arena_bytes=arena, status=status, candidates=())
    report = layouts.validate(problem, answer)
    assert report.good, report.detail
    return arena


@pytest.mark.parametrize("seed", range(20))
def test_llfb_is_legal(seed: int) -> None:
    problem = random_layout(seed, 25)
    assert check_layout(problem, lescea.layout(problem)) >= lower_bound(problem)


def test_llfb_takes_the_tightest_gap() -> None:
    start, end = np.array([0, 300, 500]), np.array([100, 400, 600])
    assert lescea._tightest(start, end, 100) == 400
    assert lescea._tightest(start, end, 150) == 100
    assert lescea._tightest(start, end, 250) == 600


@pytest.mark.parametrize("seed", range(6))
def test_layout_program_is_legal_and_optimal_but_for_its_pyramid(seed: int) -> None:
    problem = random_layout(seed, 8)
    offset, status = model_ilp.layout(problem, 20.0)
    assert status == "OPTIMAL"
    assert offset is not None
    best = layouts.solve(problem, node_limit=100_000)
    assert check_layout(problem, offset) >= best.arena_bytes
    assert best.status is Status.OPTIMAL


def test_pyramid_is_nested_lives_from_the_bottom() -> None:
    problem = layouts.make_problem([64, 128, 64, 64], [0, 2, 1, 3], [10, 9, 4, 5])
    assert model_ilp.pyramid(problem) == {0: 0, 1: 64, 3: 192}


def test_supermalloc_is_legal_where_it_is_installed() -> None:
    pytest.importorskip("omnimalloc")
    problem = random_layout(3, 30)
    assert check_layout(problem, supermalloc.layout(problem)) >= lower_bound(problem)


def test_xla_counts_the_temporaries_of_a_small_net_where_jax_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    layers = (("conv", (8, 3, 3, 2, 1)), ("pool", (3,)), ("drop", ()), ("dense", (8 * 55 * 55, 10)))
    monkeypatch.setitem(xla.NETS, "small", layers)
    activations = 4 * 8 * 112 * 112
    assert activations <= xla.temporary_bytes("small", 1, "sgd") <= 20 * activations


def test_judge_of_orders_sees_every_fault() -> None:
    problem = make_problem([0, 0, 0, 1], [(0, 1)], [(64, 1, [2], False)])
    assert is_legal(problem, np.array([0, 1, 2, 3]))
    for wrong in ([0, 1, 2], [0, 1, 2, 2], [1, 0, 2, 3], [0, 2, 1, 3], [0, 1, 3, 2]):
        assert not is_legal(problem, np.array(wrong))
