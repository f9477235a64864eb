"""Inputs that AOTAutograd overwrites when forward has run are not read again for what they were, whatever the budget.

Writes that autograd has to see stay out of the graph: it returns the new value, which torch copies into the input.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import roamc
from roamc.errors import VerifyError
from roamc.options import Options
from roamc.planning import search
from tests.end_to_end.helpers import assert_backward_equal, noise, optimized, square
from tests.graphs import joint_graph

ROWS = torch.randint(0, 200, (16, 32), generator=torch.Generator().manual_seed(3))


class Lookups(nn.Module):
    """An embedding with ``max_norm`` that is looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(200, 64, max_norm=1.0), nn.Linear(64, 200)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.table(rows).tanh() + self.table(rows.flip(1)))


class Shifted(nn.Module):
    """Reads its weight, then writes to it by another name; backward needs what was made of the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(64, 64), nn.Parameter(noise(64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer((x + self.weight).sin()).cos()
        self.weight.detach().mul_(0.9)
        return y + self.weight


class Input(nn.Module):
    """Writes to an input that has a gradient and is no leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer((x + 1).sin()).cos()
        x.mul_(0.5)
        return y + x


class Redrawn(Input):
    """The same; what is returned is drawn again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(F.dropout, super().forward(x).sin(), 0.2, use_reentrant=False)


class RedrawnLookups(Lookups):
    """An embedding with ``max_norm`` before a dropout that runs again in backward."""

    def forward(self, rows: Tensor) -> Tensor:
        return checkpoint(F.dropout, super().forward(rows).sin(), 0.2, use_reentrant=False)


def of_a_product(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x * 1.5)


CASES: dict[str, tuple[type[nn.Module], Tensor, Callable[..., Tensor]]] = {
    "lookups": (Lookups, ROWS, square),
    "weight": (Shifted, noise(256, 64), square),
    "input": (Input, noise(256, 64).requires_grad_(), of_a_product),
    "input, and a checkpoint draws": (Redrawn, noise(256, 64).requires_grad_(), of_a_product),
    "lookups, and a checkpoint draws": (RedrawnLookups, ROWS, square),
}


def smallest(model: nn.Module) -> nn.Module:
    return optimized(model, memory_budget="min")


@pytest.mark.parametrize("name", CASES)
def test_the_lowest_peak_has_the_bits_of_eager(name: str) -> None:
    kind, x, loss_fn = CASES[name]
    torch.manual_seed(0)
    batches = [(x,), (x.detach().flip(0).requires_grad_(x.requires_grad),)]
    assert_backward_equal(kind(), loss_fn, batches, way=smallest, reference=copy.deepcopy)


def test_a_plan_that_reads_what_is_overwritten_is_refused() -> None:
    """The plan is one for a caller who writes nothing."""
    told = joint_graph(Shifted(), (CASES["weight"][1],))
    untold = joint_graph(Shifted(), (CASES["weight"][1],))
    untold = untold.replace(inputs=tuple(dataclasses.replace(port, overwritten=False) for port in untold.inputs))
    plan = search.run(untold, Options(memory_budget="min")).plan
    with pytest.raises(VerifyError, match="what the caller has written since"):
        search.run(told, Options(), plan)


@pytest.mark.parametrize("name", ["lookups", "weight", "lookups, and a checkpoint draws"])
def test_the_graph_knows_what_is_overwritten(name: str) -> None:
    kind, x, _ = CASES[name]
    graph = joint_graph(kind(), (x,))
    assert [port.overwritten for port in graph.inputs].count(True) == 1


class Averaging(nn.Module):
    """Is split into two pieces; the first reads an average that the second keeps."""

    def __init__(self, update: Callable[[nn.Module, Tensor], None], read: Callable[[], AbstractContextManager[None]]):
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(128, 4)
        self.register_buffer("average", torch.ones(128))
        self.update, self.read = update, read

    def forward(self, x: Tensor) -> Tensor:
        with self.read():
            scale = 1 + self.average.mean()
        h = torch.sin(torch.sin(self.up(x)) * scale)
        torch._dynamo.graph_break()
        self.update(self, h.detach().mean(0))
        return self.down(h)


def written(model: nn.Module, mean: Tensor) -> None:
    model.average.lerp_(mean, 0.1)


def assigned(model: nn.Module, mean: Tensor) -> None:
    model.average = torch.lerp(model.average, mean, 0.1)


@pytest.mark.filterwarnings("ignore:memory_budget='min' holds for each piece")
@pytest.mark.parametrize(("update", "read"), [(written, roamc.keep), (assigned, contextlib.nullcontext)])
def test_a_buffer_that_a_later_piece_changes_is_read_as_the_guide_says(
    update: Callable[[nn.Module, Tensor], None], read: Callable[[], AbstractContextManager[None]]
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    batches = [(noise(256, 16, seed=seed),) for seed in range(2)]
    assert_backward_equal(Averaging(update, read), square, batches, way=smallest)
