"""One rank's part of a model, by the words of a tensor-parallel plan: all ranks together give what one rank gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from roamc.capture.tensor_parallel import split
from roamc.compat_groups import planned_for
from roamc.errors import OptionError
from roamc.graph import copied
from roamc.graph.shard_judge import check
from roamc.options import Options
from roamc.passes import shard
from tests.shards import normal_form, run_ranks

RANKS, WIDTH, HEAD = 2, 8, 4
PLAN = {
    "up": "colwise_gather_output",
    "out": "rowwise_split_input",
    "query": "colwise",
    "norm": "replicated_with_grad_allreduce",
    "down": "rowwise",
    "gate": "packed_colwise",
}


class Layers(nn.Module):
    """Layers in pairs, one for each word; ``model(x)`` is a loss for x (batch, seq, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.out = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.query, self.down, self.norm = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.LayerNorm(HEAD)
        self.gate = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        x = x + self.out(F.normalize(self.up(x), dim=-1))  # needs all columns
        x = x + self.down(self.norm(self.query(x).unflatten(-1, (-1, HEAD))).flatten(-2))
        halves = self.gate(x).chunk(2, -1)
        return x.square().mean() + (halves[0] * halves[1]).detach().sum() * 0


def pieces(whole: Tensor, part: Tensor, packed: bool) -> list[Tensor]:
    """What each rank has of a parameter, where ``part`` has the shape of one of them."""
    dims = [at for at, size in enumerate(whole.shape) if part.shape[at] != size]
    if not dims:
        return [whole] * RANKS
    if packed:
        return [torch.cat([half.chunk(RANKS)[rank] for half in whole.chunk(2)]) for rank in range(RANKS)]
    return list(whole.chunk(RANKS, dims[0]))


@pytest.mark.parametrize("on_shards", [False, True])
def test_the_ranks_give_loss_and_gradients_of_the_whole(on_shards: bool) -> None:
    model, x = Layers(), torch.randn(2, 6, WIDTH)
    part, _ = split(model, None, PLAN, RANKS, "tp")
    graph = normal_form(part, (x,))
    if on_shards:
        with planned_for({"tp": range(RANKS)}):
            before, decision = copied(graph), shard.decide(graph, Options(shard="sequence"))
            graph = shard.apply(graph, decision)
            check(before, graph, "shard")
        assert decision.regions
    model(x).backward()
    shapes = dict(part.named_parameters())
    cut = {
        name: pieces(tensor.detach(), shapes[name], name.startswith("gate"))
        for name, tensor in model.named_parameters()
    }
    inputs = [[*(each[rank] for each in cut.values()), x, torch.ones(())] for rank in range(RANKS)]
    results = run_ranks(graph, inputs)
    for at, (name, tensor) in enumerate(model.named_parameters()):
        if tensor.grad is not None:
            wanted = pieces(tensor.grad, shapes[name], name.startswith("gate"))
            for rank in range(1 if name.startswith("up") else RANKS):  # the graph takes the first rank's gradient of up
                torch.testing.assert_close(results[rank][1 + at], wanted[rank], msg=f"{name} on rank {rank}")


class Pair(nn.Module):
    """Two products; ``raw`` reads the second weight itself."""

    def __init__(self, raw: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.raw = nn.Linear(8, 16), nn.Linear(16, 8), raw

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).relu()
        result: Tensor = F.linear(x, self.down.weight) if self.raw else self.down(x)
        return result


def planned(model: nn.Module, **plan: str) -> Callable[[], Any]:
    return lambda: roamc.plan(model, torch.zeros(4, 8), mesh="tp=2", tp_plan=plan)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (planned(Pair(), up="colwise"), r"Pair does not run with its layers split among 2 ranks .* must be rowwise"),
        (planned(Pair(), down="rowwise"), r"Pair does not run with its layers split among 2 ranks"),
        (planned(Pair(), up="colwise", dwn="rowwise"), "does not run .*; no layer of Pair .* 'dwn', .* mean 'down'"),
        (planned(Pair(raw=True), up="colwise", down="rowwise"), "down is split, but the model does not call it"),
    ],
)
def test_a_plan_that_the_model_does_not_follow_is_refused_in_one_line(run: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as refused:
        run()
    assert "\n" not in str(refused.value)


def test_what_torch_compile_has_wrapped_is_split() -> None:
    model = torch.compile(Pair(), backend="eager")
    plan = roamc.plan(model, torch.zeros(4, 8), mesh="tp=2", tp_plan={"up": "colwise", "down": "rowwise"})
    assert any("each rank sends" in note for note in plan.notes)
