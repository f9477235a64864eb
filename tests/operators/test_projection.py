"""Random projections: nothing but their numbers counts, they keep what they project in the mean, some exactly."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from roamc.cost import load_profile, seconds, workspace_bytes
from roamc.operators import ops
from roamc.operators.counter import philox
from roamc.operators.kernels import KERNELS
from roamc.operators.projection import BASES, GRID, PIECE, projection, quantiles
from tests.cost.test_cost import node_of

CPU = torch.device("cpu")


def made(counter: float, n: int, r: int, basis: str, *, seed: int = 0, stream: int = 0) -> Tensor:
    result: Tensor = projection(counter, seed, stream, n, r, basis, dtype=torch.float32, device=CPU)
    return result


def gram(p: Tensor) -> Tensor:
    return p.double().t() @ p.double()


def test_elements_are_the_means_of_equally_probable_parts() -> None:
    """From the words of Philox, key and counter as they are said to be."""
    key, counter = torch.tensor(5 | 3 << 32), (2 << 32) + torch.arange(16 * 8 // 8)
    words = torch.stack(philox(key, counter), -1).view(-1)
    number = torch.stack((words % 2**16, words // 2**16), -1).view(16, 8)
    bounds = torch.distributions.Normal(0.0, 1.0).icdf(torch.stack((number, number + 1)).double() / 2**16)
    density = torch.exp(-bounds.square() / 2) / math.sqrt(2 * math.pi)
    expected = (density[0] - density[1]) * 2**16 / math.sqrt(8)
    assert torch.allclose(made(2.0, 16, 8, "gaussian", seed=5, stream=3).double(), expected, atol=2e-6, rtol=1e-4)


def test_the_parts_have_mean_0_and_variance_1_and_no_rounding_decides_one() -> None:
    table = quantiles(CPU).double()
    assert torch.equal(table, -table.flip(0))
    assert float(table.square().mean()) == pytest.approx(1, abs=1e-8)
    assert torch.equal(table * GRID, (table * GRID).round())
    bounds = torch.special.ndtri(torch.arange(2**16 + 1, dtype=torch.float64) / 2**16)
    means = -torch.exp(bounds.square() / -2).diff()
    exact = means / means.square().mean().sqrt() * GRID
    assert float((exact - table * GRID).abs().max()) < 0.5 - 1e-6, "float64 is off by 1e-9 of a part of the grid"


def test_gaussian_elements_are_normal() -> None:
    elements = made(1.0, 1000, 300, "gaussian").double().view(-1) * math.sqrt(300)
    share = 0.5 * (1 + torch.erf(elements.sort().values / math.sqrt(2)))
    distance = float((share - torch.linspace(0, 1, elements.numel())).abs().max())
    assert distance < 1.63 / math.sqrt(elements.numel()), "Kolmogorov and Smirnov, at 1 %"
    assert abs(float((elements[1:] * elements[:-1]).mean())) < 4 / math.sqrt(elements.numel())


@pytest.mark.parametrize(("n", "r"), [(64, 16), (100, 37), (37, 5), (129, 128), (1, 1), (768, 96)])
def test_columns_are_orthogonal_and_of_one_length(n: int, r: int) -> None:
    p = made(3.0, n, r, "orthonormal", stream=2)
    assert torch.allclose(gram(p), torch.eye(r, dtype=torch.float64) * (n / r), atol=1e-6 * n / r)


@pytest.mark.parametrize("n", [1, 6, 64, 300])
def test_all_columns_give_back_what_they_are_given(n: int) -> None:
    x = torch.randn(5, n)
    assert torch.equal(x @ made(4.0, n, n, "orthonormal"), x)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize(("n", "r"), [(32, 8), (24, 8)])
def test_projections_are_the_identity_in_the_mean(n: int, r: int, basis: str) -> None:
    """The error of one, and of the mean of 2,000, are those that the formulas say."""
    squares = [(p @ p.t()).double() for p in (made(float(k), n, r, basis) for k in range(2000))]
    identity = torch.eye(n, dtype=torch.float64)
    one = math.sqrt((n + 1) / r) if basis == "gaussian" else math.sqrt(n / r - 1)
    g = torch.randn(1, n, dtype=torch.float64)
    errors = torch.stack([(g @ square - g).norm() / g.norm() for square in squares])
    assert float(errors.square().mean().sqrt()) == pytest.approx(one, rel=0.1)
    mean = torch.stack(squares).mean(0)
    assert float((mean - identity).norm() / identity.norm()) < 1.2 * math.sqrt((n + 1) / (2000 * r))


@pytest.mark.parametrize("basis", BASES)
def test_nothing_but_its_numbers_counts(basis: str) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = made(1.0, 24, 10, basis, seed=1, stream=1)
    torch.manual_seed(1)
    assert torch.equal(first, made(1.9, 24, 10, basis, seed=1, stream=1)), "a counter stands for its integer"
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)
    others = (made(2.0, 24, 10, basis, seed=1, stream=1), made(1.0, 24, 10, basis, seed=2, stream=1))
    others += (made(1.0, 24, 10, basis, seed=1, stream=2),)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations((first, *others), 2))
    wide: Tensor = projection(1.0, 1, 1, 24, 10, basis, dtype=torch.float64, device=CPU)
    assert torch.equal(wide.float(), first), "made in float32, whatever its dtype"


@pytest.mark.parametrize("basis", BASES)
def test_threads_do_not_count(basis: str) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = made(1.0, 701, 300, basis)
        torch.set_num_threads(3)
        assert torch.equal(made(1.0, 701, 300, basis), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("basis", BASES)
def test_strides_do_not_count(basis: str) -> None:
    out = torch.empty(10, 24).t()
    KERNELS[projection].function(1.0, 0, 0, 24, 10, basis, out=out)
    assert torch.equal(out, made(1.0, 24, 10, basis))


def test_it_may_run_again() -> None:
    rule = ops.rule(projection)
    assert (rule.recomputable, rule.random, rule.may_draw, rule.mutates) == (True, False, False, ())


def test_gaussian_numbers_take_longer_than_others() -> None:
    """Measured on one thread of an EPYC: 9 and 4.7 ns an element; a draw takes 5 ns in the profile of a CPU."""
    profile = load_profile(profile="cpu")
    calls = [partial(projection, 1.0, 0, 1, 1024, 256, basis, dtype=torch.float32, device=CPU) for basis in BASES]
    prices = [seconds(node_of(call), profile) / (1024 * 256) for call in calls]
    assert prices == pytest.approx([10e-9, 5e-9], rel=0.02)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize(("n", "r"), [(7, 2), (1024, 256), (5000, 3), (2 * PIECE, 1), (300, 300)])
def test_workspace_is_what_torch_allocates(n: int, r: int, basis: str) -> None:
    out = torch.empty(n, r)
    node = node_of(lambda: projection(1.0, 0, 1, n, r, basis, dtype=torch.float32, device=CPU))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        KERNELS[projection].function(1.0, 0, 1, n, r, basis, out=out)
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    steps = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    most = max(itertools.accumulate(nbytes for _, nbytes in steps))
    assert most <= workspace_bytes(node, 1) <= most + 24
