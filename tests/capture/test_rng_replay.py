"""A checkpoint region draws the same numbers twice in a train step too, and the generator ends where eager's does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor, default_generator, get_rng_state, initial_seed, nn, set_rng_state
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import roamc
from roamc.errors import CaptureError
from roamc.graph import Phase, operators
from roamc.operators.random import replay, save_rng_state
from tests.end_to_end.helpers import noise, square
from tests.graphs import captured_step

WIDTH = 16
Region = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def once(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    kept: Tensor = checkpoint(function, x, use_reentrant=False)
    return kept


def nested(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return once(lambda x: F.dropout(once(function, F.dropout(x, 0.1)), 0.2), x)


def anew(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The user wants other numbers the second time."""
    kept: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return kept


class Drawing(nn.Module):
    """Layers with three draws each in a region, and one outside."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(self.region(partial(self.inner, layer), x), 0.1)
        return x

    @staticmethod
    def inner(layer: nn.Module, x: Tensor) -> Tensor:
        x = F.gelu(F.dropout(layer(x), 0.2)) * torch.rand_like(x)
        return torch.sin(x + torch.bernoulli(torch.full_like(x, 0.5)))


def trained(model: nn.Module, step: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Losses, parameters and the state of the generator after three steps that draw one after the other."""
    torch.manual_seed(11)
    losses = [step(noise(8, WIDTH, seed=number)).detach().clone() for number in range(3)]
    return [*losses, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def eager(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trained(model, step)


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("region", [once, nested, anew])
def test_train_step_draws_what_eager_draws(region: Region, budget: str | None) -> None:
    torch.manual_seed(0)
    model = Drawing(region)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = roamc.train_step(model, square, optimizer, strict=True, memory_budget=budget)
    for ours, theirs in zip(trained(model, step), eager(twin), strict=True):
        assert torch.equal(ours, theirs)


def test_second_run_is_a_replay_of_the_first() -> None:
    nodes = operators(captured_step(Drawing(once), (noise(8, WIDTH),), square).graph.graph)
    again = [node for node in nodes if node.target is replay]
    assert [str(node.args[1]) for node in again[:3]] == [
        "roamc.dropout_mask.default", "aten.rand_like.default", "aten.bernoulli.default",
    ]  # fmt: skip
    assert len(again) == len([node for node in nodes if node.target is save_rng_state]) == 9
    graph = captured_step(Drawing(anew), (noise(8, WIDTH),), square).graph
    assert not [node for node in operators(graph.graph) if node.target is replay]
    assert sum(phase is Phase.BACKWARD for phase in graph.phase.values())


def test_draw_in_place_in_a_region_is_refused() -> None:
    model = Drawing(lambda function, x: once(lambda x: function(x) * torch.empty_like(x).uniform_(), x))
    with pytest.raises(CaptureError, match="draws in place inside a"):
        captured_step(model, (noise(8, WIDTH),), square)


def test_other_draws_at_a_place_that_was_drawn_at_are_refused() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        y = model(x) * torch.rand_like(x)
        torch.set_rng_state(state)
        return (y * torch.randn_like(x)).sum()

    with pytest.raises(CaptureError, match="leave set_rng_state out of the step"):
        captured_step(nn.Linear(WIDTH, WIDTH), (noise(8, WIDTH),), loss)


Save = Callable[[], Callable[[], object]]
"""Saves the generator's state, and returns what sets it back."""


def pair(get: Callable[[], Tensor], put: Callable[[Tensor], object]) -> Save:
    def save() -> Callable[[], object]:
        return partial(put, get())

    return save


def by_a_clone() -> Callable[[], object]:
    kept = torch.default_generator.clone_state()
    return lambda: torch.default_generator.set_state(kept.get_state())


def by_a_fork() -> Callable[[], object]:
    fork = torch.random.fork_rng(devices=[])
    fork.__enter__()
    return lambda: fork.__exit__(None, None, None)


NAMES: dict[str, Save] = {
    "torch": pair(lambda: torch.get_rng_state(), lambda state: torch.set_rng_state(state)),
    "torch.random": pair(lambda: torch.random.get_rng_state(), lambda state: torch.random.set_rng_state(state)),
    "names bound before": pair(get_rng_state, set_rng_state),
    "generator": pair(
        lambda: torch.default_generator.get_state(), lambda state: torch.default_generator.set_state(state)
    ),
    "generator bound before": pair(
        lambda: default_generator.get_state(), lambda state: default_generator.set_state(state)
    ),
    "methods bound before": pair(default_generator.get_state, default_generator.set_state),
    "one way in, another out": pair(lambda: torch.get_rng_state(), lambda state: torch.random.set_rng_state(state)),
    "clone_state": by_a_clone,
    "fork_rng": by_a_fork,
}


def drawn_again(save: Save, model: nn.Module, x: Tensor) -> Tensor:
    """Two draws, then the first again, then a third."""
    back = save()
    y = F.dropout(model(x))
    end = torch.get_rng_state()
    y = y * F.dropout(model(x), 0.3)
    there = torch.get_rng_state()
    back()
    y = y + F.dropout(model(x))
    assert torch.equal(torch.get_rng_state(), end)
    torch.set_rng_state(there)
    return (y * F.dropout(model(x), 0.1)).square().mean()


def losses(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Of two steps that draw one after the other, and the generator's state behind them."""
    torch.manual_seed(5)
    return [*(run(noise(8, WIDTH)).detach().clone() for _ in range(2)), torch.get_rng_state()]


def plain(loss: Callable[..., Tensor]) -> tuple[nn.Module, roamc.TrainStep]:
    """A model, and a step that leaves its parameters as they are."""
    model = nn.Linear(WIDTH, WIDTH)
    return model, roamc.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.0), strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_followed_by_all_names(name: str) -> None:
    loss = partial(drawn_again, NAMES[name])
    model, step = plain(loss)
    for ours, theirs in zip(losses(step), losses(lambda x: loss(model, x)), strict=True):
        assert torch.equal(ours, theirs)


def seeded_apart(model: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        default_generator.manual_seed(3)
        y = F.dropout(model(x))
    return (y * F.dropout(model(x))).sum()


def set_to_a_copy(model: nn.Module, x: Tensor) -> Tensor:
    state = torch.random.get_rng_state()
    y = F.dropout(model(x))
    torch.random.set_rng_state(state.clone())
    return (y * F.dropout(model(x))).sum()


def left_set_back(model: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return F.dropout(model(x)).sum()


def computed_with(model: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(model(x)).sum() * torch.get_rng_state()[:4].sum()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (seeded_apart, r"seeds torch's generator \(torch.manual_seed\).*seed outside"),
        (set_to_a_copy, "computes the state to which it sets torch's generator; set it to what get_rng_state returned"),
        (left_set_back, r"ends with torch's generator set back .*fork_rng.*pass them in the batch"),
        (computed_with, r"computes with the state of torch's generator .*read it outside of the step"),
    ],
)
def test_what_no_program_draws_is_refused(loss: Callable[..., Tensor], said: str) -> None:
    _, step = plain(loss)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match=said):
        step(noise(8, WIDTH))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_the_step_before_is_refused() -> None:
    kept: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if kept:
            torch.set_rng_state(kept[0])
        kept.append(torch.get_rng_state())
        return F.dropout(model(x)).sum()

    _, step = plain(loss)
    step(noise(8, WIDTH))
    with pytest.raises(CaptureError, match="seeds torch's generator"):
        step(noise(4, WIDTH))


SEEDS_READ: dict[str, Callable[[], int]] = {
    "torch": lambda: torch.initial_seed(),
    "torch.random": lambda: torch.random.initial_seed(),
    "name bound before": initial_seed,
    "generator": lambda: torch.default_generator.initial_seed(),
    "a device's": lambda: torch.cuda.initial_seed(),
}


@pytest.mark.parametrize("name", SEEDS_READ)
def test_reading_the_seed_is_refused(name: str) -> None:
    """A seed that is read while a step is traced is a constant of its program; eager's is another after manual_seed."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() * (SEEDS_READ[name]() % 7)

    _, step = plain(loss)
    with pytest.raises(CaptureError, match=r"reads the seed of torch's generator .*read it outside of the step"):
        step(noise(8, WIDTH))


def test_a_generator_bound_before_gives_the_real_seed_of_the_first_call() -> None:
    """Such a call cannot be seen: docs/limits.md lists it among what a step reads while it is traced, and keeps."""
    read: list[int] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        read.append(default_generator.initial_seed())
        return F.dropout(model(x)).sum()

    _, step = plain(loss)
    torch.manual_seed(5)
    step(noise(8, WIDTH))
    assert set(read) == {5}


def draw() -> int:
    return torch.rand(()).ndim


@pytest.mark.parametrize("beside", [draw, partial(torch.manual_seed, 7), partial(torch.random.manual_seed, 7)])
def test_draws_and_seeds_of_another_thread_are_told_from_those_of_the_step(beside: Callable[[], object]) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            results.append(pool.submit(beside).result())  # raises nothing there
        return square(model, x)

    results: list[object] = []
    model = nn.Linear(WIDTH, WIDTH)
    step = roamc.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match=r"another thread has drawn from .*give that thread a generator of its own"):
        step(noise(4, WIDTH))
    assert len(results) == 1


def test_another_thread_may_read_the_seed_while_a_step_is_traced() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            seeds.extend(pool.map(lambda read: read(), (torch.initial_seed, torch.random.initial_seed)))
        return square(model, x)

    seeds: list[int] = []
    model = nn.Linear(WIDTH, WIDTH)
    roamc.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), strict=True)(noise(4, WIDTH))
    assert seeds == [torch.initial_seed()] * 2
