"""Whoever allows codec tempo pays no more time for the same bytes, and no budget that was kept is refused."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from benchmarks.blocks import make
from roamc.errors import BudgetError
from roamc.graph import TrainGraph, copied
from roamc.options import parse_options
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import captured_step, model_graph

BUDGETS = ("+1%", "+5%", "+20%", "95%", "85%", "75%", "65%", "55%", "light", "min")
BY_BYTES = tuple(budget for budget in BUDGETS if budget[:-1].isdigit())
PIECES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_by_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "dropout": lambda x: F.dropout(x, 0.1),
    "sine": torch.sin,
}


class RandomLayers(nn.Module):
    """Linear layers, norms, activations and residual sums in a random sequence; some results are kept by hand."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.width = draw.choice((32, 48, 64))
        names = ("linear", "linear", "norm", "norm", "gelu", "gelu", *PIECES, "add")
        pieces = range(draw.randrange(12, 28))
        self.recipe = [(draw.choice(names), draw.random() < 0.4, draw.randrange(99)) for _ in pieces]
        linears, norms = ([name for name, *_ in self.recipe].count(kind) for kind in ("linear", "norm"))
        self.linears = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(linears + 1))
        self.norms = nn.ModuleList(draw.choice((nn.LayerNorm, nn.RMSNorm))(self.width) for _ in range(norms))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same."""
        linears, norms = iter(self.linears), iter(self.norms)
        values = [next(linears)(x)]
        for name, kept, past in self.recipe:
            with roamc.keep() if kept else contextlib.nullcontext():
                x = values[-1]
                if name in ("linear", "norm"):
                    x = next(linears if name == "linear" else norms)(x)
                else:
                    x = PIECES[name](x) if name in PIECES else x + values[past % len(values)]
            values.append(x)
        return values[-1]


@functools.cache
def random_graph(seed: int) -> TrainGraph:
    torch.manual_seed(seed)
    model = RandomLayers(seed)
    x = torch.randn(256, model.width)
    return captured_step(model, (x,), lambda m, batch: m(batch).square().mean(), torch.optim.SGD).graph


@functools.cache
def graph_of(name: str) -> TrainGraph:
    if name == "vit":
        return model_graph(name, "step")[0]
    work = make(name, quick=True)
    return captured_step(work.model, work.batch, lambda net, *batch: net(*batch)).graph


def planned(graph: TrainGraph, budget: str, codecs: str) -> Plan | None:
    """The plan; None if there is none that keeps the budget."""
    try:
        return search.run(copied(graph), parse_options({"memory_budget": budget, "codecs": codecs})).plan
    except BudgetError:
        return None


def pays_no_more(graph: TrainGraph, budget: str) -> tuple[int, bool]:
    """Plan with and without tempo, and compare; return how often it is taken, and whether it made the plan better."""
    exact, allowed = (planned(graph, budget, codecs) for codecs in ("", "tempo"))
    if exact is None:
        return 0, False
    assert allowed is not None, "a budget that was kept is refused"
    taken = sum(code[1] == "tempo" for code in allowed.decisions["retain"]["codes"])
    if budget in BY_BYTES:
        assert allowed.added_seconds <= exact.added_seconds * (1 + 1e-9)
        return taken, allowed.added_seconds < exact.added_seconds * (1 - 1e-9)
    assert allowed.needed_bytes <= exact.needed_bytes
    if allowed.needed_bytes == exact.needed_bytes:
        assert allowed.added_seconds <= exact.added_seconds * (1 + 1e-9)
    return taken, allowed.needed_bytes < exact.needed_bytes


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ["gpt", "bert", "llama", "vit"])
def test_known_models_pay_no_more(name: str, budget: str) -> None:
    pays_no_more(graph_of(name), budget)


@pytest.mark.parametrize("seed", range(200))
def test_random_layers_with_kept_results_pay_no_more(seed: int) -> None:
    pays_no_more(random_graph(seed), BUDGETS[seed % len(BUDGETS)])


@pytest.mark.parametrize(("seed", "budget"), [(26, "65%"), (9, "min")])
def test_it_is_taken_where_it_makes_the_plan_better(seed: int, budget: str) -> None:
    taken, better = pays_no_more(random_graph(seed), budget)
    assert taken
    assert better
