"""``train_step`` with CompAct: the values of its eager step, from gradients that never are whole."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roamc
from roamc.capture.step import capture_step
from roamc.capture.step_trace import StepRequest
from roamc.graph import operators
from roamc.operators.projection import projection
from roamc.optim import CompAct
from tests.end_to_end.helpers import assert_same
from tests.end_to_end.ranks import run_ranks

aten = torch.ops.aten
SETTINGS: dict[str, Any] = {"rank": 1 / 2, "every": 7, "weight_decay": 0.01, "lr": 2e-3}


class Block(nn.Module):
    """One layer of a LLaMA, but for rotations."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (f(h).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(attended)
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Net(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.Sequential(*(Block(width, hidden) for _ in range(layers)))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.embed(tokens))).flatten(0, 1), tokens.flatten())


def loss_of(model: nn.Module, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


def built(seed: int = 0, **sizes: int) -> Net:
    torch.manual_seed(seed)
    return Net(**sizes)


def compact(model: nn.Module, **settings: Any) -> CompAct:
    return CompAct(model.named_parameters(), **{**SETTINGS, **settings})


def tokens(seed: int, batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def planned(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> roamc.TrainStep:
    return roamc.train_step(model, loss_of, optimizer, strict=True, profile="cpu", **options)


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def streams(optimizer: CompAct) -> list[list[int]]:
    return [group["streams"] for group in optimizer.param_groups]


def shared(optimizer: CompAct, like: CompAct) -> CompAct:
    """The optimizer with the streams that a planned step has given to ``like``."""
    for group, other in zip(optimizer.param_groups, like.param_groups, strict=True):
        group["streams"], group["shared"] = [*other["streams"]], other["shared"]
    return optimizer


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_gradients_are_projected_and_all_else_has_the_bits_of_dense_training() -> None:
    model, dense = built(), built()
    optimizer, reference = compact(model), torch.optim.AdamW(dense.parameters(), foreach=False)
    step = planned(model, optimizer)
    loss = step(tokens(0))
    assert torch.equal(loss, eager_step(dense, reference, tokens(0)))
    stream = {id(p): s for g in optimizer.param_groups for p, s in zip(g["params"], g["streams"], strict=False)}
    seen = 0
    for (name, weight), twin in zip(model.named_parameters(), dense.parameters(), strict=True):
        moment = optimizer.state[weight]["exp_avg"]
        if id(weight) not in stream:
            assert torch.equal(moment, reference.state[twin]["exp_avg"]), name
            continue
        n, r = weight.shape[1], moment.shape[1]
        p = projection(0, 0, stream[id(weight)], n, r, "gaussian", dtype=torch.float32, device=torch.device("cpu"))
        assert relative(moment / (1 - 0.9), twin.grad @ p) < 1e-6, name
        seen += 1
    assert seen == 2 * 6
    assert len(step.plans[0].decisions["project"]["gradients"]) == seen


def test_weights_with_one_input_share_a_stream_and_a_product() -> None:
    model = built()
    optimizer = compact(model)
    assert streams(optimizer)[0] == [*range(12)]
    plan = planned(model, optimizer).plan(tokens(0))
    assert streams(optimizer)[0] == [*range(12)], "a plan changes nothing"
    planned(model, optimizer)(tokens(0))
    assert streams(optimizer)[0] == [0, 0, 0, 3, 3, 5, 6, 6, 6, 9, 9, 11]
    assert len(plan.decisions["project"]["gradients"]) == 12


@pytest.mark.parametrize("options", [{}, {"memory_budget": "light"}, {"disable": "project"}], ids=str)
@pytest.mark.parametrize("settings", [{}, {"basis": "orthonormal", "rank": 1 / 4}], ids=str)
def test_fifty_steps_are_those_of_eager(settings: dict[str, Any], options: dict[str, Any]) -> None:
    model, twin = built(), built()
    optimizer = compact(model, **settings)
    step = planned(model, optimizer, **options)
    losses = [step(tokens(number)) for number in range(50)]
    assert len(step.plans) == 1, "a new projection needs no new plan"
    reference = shared(compact(twin, **settings), optimizer)
    wanted = [eager_step(twin, reference, tokens(number)) for number in range(50)]
    assert relative(torch.stack(losses), torch.stack(wanted)) < 1e-5
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert relative(a.detach(), b.detach()) < 1e-5, name


def test_a_step_by_all_columns_of_an_orthonormal_basis_is_adamws() -> None:
    model, dense = built(), built()
    same = {"rank": 1, "basis": "orthonormal", "lr": 4e-3, "dense_lr": 1e-3, "weight_decay": 0.0}
    step = planned(model, compact(model, **same))
    reference = torch.optim.AdamW(dense.parameters(), lr=1e-3, weight_decay=0.0)
    step(tokens(0))
    eager_step(dense, reference, tokens(0))
    for (name, a), b in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert relative(a.detach(), b.detach()) < 1e-5, name


def test_saved_and_loaded_it_goes_on_with_the_same_bits() -> None:
    model = built()
    optimizer = compact(model)
    step = planned(model, optimizer)
    for number in range(5):
        step(tokens(number))
    twin = copy.deepcopy(model)
    again = compact(twin, seed=9, every=3)
    again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert streams(again) == streams(optimizer)
    other = planned(twin, again)
    losses = [(step(tokens(number)), other(tokens(number))) for number in range(5, 10)]
    assert_same([first for first, _ in losses], [second for _, second in losses])
    assert_same([*model.parameters()], [*twin.parameters()])
    assert len(step.plans) == 1


def test_streams_of_a_loaded_state_are_kept_and_planned_for() -> None:
    """In eager each weight has a stream of its own: a state that is loaded into a planned step brings other ones."""
    model, twin = built(), built()
    optimizer, reference = compact(model), compact(twin)
    step = planned(model, optimizer)
    step(tokens(0))
    eager_step(twin, reference, tokens(0))
    model.load_state_dict(twin.state_dict())
    for group in (state := copy.deepcopy(reference.state_dict()))["param_groups"]:
        group["shared"] = True
    optimizer.load_state_dict(state)
    for number in range(1, 3):
        step(tokens(number))
        eager_step(twin, reference, tokens(number))
    assert streams(optimizer) == streams(reference)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative(a.detach(), b.detach()) < 1e-5


def test_clipping_takes_the_norm_of_projected_gradients_and_says_so() -> None:
    model = built()
    optimizer = compact(model, weight_decay=0)
    step = planned(model, optimizer, clip_grad_norm=1e-3)
    step(tokens(0))
    assert "of projected gradients it takes the norm as they are" in str(step.plans[0])
    squares = sum(float(state["exp_avg"].double().square().sum()) for state in optimizer.state.values())
    assert squares**0.5 / (1 - 0.9) == pytest.approx(1e-3, rel=1e-2)


def test_hooks_on_projected_weights_are_refused_and_others_run() -> None:
    model = built()
    hook = model.layers[0].up.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(roamc.CaptureError, match=r"layers\.0\.up\.weight.*gradient never exists.*dense="):
        planned(model, compact(model))(tokens(0))
    planned(model, compact(model, dense=("up", "embed", "head", "o_proj")))(tokens(0))
    hook.remove()
    planned(model, compact(model))(tokens(0))


class Tied(nn.Module):
    """A weight that is used twice, one that is frozen, and one that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.frozen, self.once = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.turned = nn.Parameter(torch.randn(16, 8))
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.once(self.frozen(self.twice(torch.tanh(self.twice(x))))) @ self.turned).square().mean()


def test_weights_that_are_used_twice_have_whole_gradients_and_a_note() -> None:
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    optimizer = CompAct(model.named_parameters(), rank=1 / 4)
    step = planned(model, optimizer)
    for number in range(3):
        step(torch.ones(4, 16) * number)
    assert "the gradients of twice.weight are made whole" in str(step.plans[0])
    assert len(step.plans[0].decisions["project"]["gradients"]) == 2
    reference = shared(CompAct(twin.named_parameters(), rank=1 / 4), optimizer)
    for number in range(3):
        eager_step(twin, reference, torch.ones(4, 16) * number)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative(a.detach(), b.detach()) < 1e-5


def test_under_autocast_gradients_are_projected_as_products_make_them() -> None:
    model, twin = built(), built()
    optimizer = compact(model)

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(net, batch)

    step = roamc.train_step(model, loss, optimizer, strict=True, profile="cpu")
    step(tokens(0))
    assert len(step.plans[0].decisions["project"]["gradients"]) == 12
    assert "whole" not in str(step.plans[0].notes)
    assert streams(optimizer)[0] == [0, 0, 0, 3, 3, 5, 6, 6, 6, 9, 9, 11], "casts of one input are that input"
    reference = shared(compact(twin), optimizer)
    loss(twin, tokens(0)).backward()
    reference.step()
    for (name, weight), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        moments = [each.state[of]["exp_avg"] for each, of in ((optimizer, weight), (reference, other))]
        assert moments[0].dtype is torch.float32
        assert relative(*moments) < 2e-2, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_around_the_step_is_that_in_the_loss(dtype: torch.dtype) -> None:
    weights = []
    for inside in (True, False):
        model = built()
        optimizer = compact(model)

        def loss(net: nn.Module, batch: Tensor, inside: bool = inside) -> Tensor:
            with torch.autocast("cpu", dtype, enabled=inside or torch.is_autocast_enabled("cpu")):
                return loss_of(net, batch)

        step = roamc.train_step(model, loss, optimizer, strict=True, profile="cpu")
        with torch.autocast("cpu", dtype, enabled=not inside):
            step(tokens(0))
        weights.append([weight.detach() for weight in model.parameters()])
        assert all(state["exp_avg"].dtype is torch.float32 for state in optimizer.state.values())
    assert all(relative(a, b) < 1e-2 for a, b in zip(*weights, strict=True))


def test_planned_bytes_fall_with_the_rank() -> None:
    """On the meta device: 4 layers of width 256, all projected but embedding and head."""
    with torch.device("meta"):
        model = built(width=256, hidden=688, layers=4)
        batch = torch.empty(8, 128, dtype=torch.int64)
    linear = 4 * (4 * 256 * 256 + 3 * 256 * 688) * 4

    def plan(rank: float | None, **options: Any) -> roamc.Plan:
        dense = torch.optim.AdamW(model.parameters())
        optimizer = dense if rank is None else compact(model, rank=rank, dense=("embed", "head"))
        return planned(model, optimizer, **options).plan(batch)

    whole, quarter, eighth = (plan(rank, memory_budget="+0%") for rank in (None, 1 / 4, 1 / 8))
    for share, small in ((3 / 4, quarter), (7 / 8, eighth)):
        saved = whole.fixed_bytes["optimizer state"] - small.fixed_bytes["optimizer state"]
        assert saved == 2 * linear * share
    assert quarter.peak_bytes < whole.peak_bytes
    assert quarter.peak_bytes - eighth.peak_bytes >= linear / 8, "gradients fall as well"
    light, small_light = plan(None, memory_budget="light"), plan(1 / 4, memory_budget="light")
    assert small_light.peak_bytes <= light.peak_bytes, "what is projected waits only where nothing else would"


def test_gradients_of_the_graph_have_the_columns_of_projections() -> None:
    model = built()
    leaves = (tokens(0),)
    captured = capture_step(StepRequest(model, loss_of, compact(model), leaves, lambda values: tuple(values)))
    assert sum(node.target is projection for node in operators(captured.graph.graph)) == 6
    assert sorted(captured.streams.values()) == sorted([0, 0, 0, 3, 3, 5, 6, 6, 6, 9, 9, 11])


RANKS = """
import os
from torch.nn.parallel import DistributedDataParallel as DDP
from tests.end_to_end import test_compact as tests
model = DDP(tests.built())
optimizer = tests.compact(model, every=2)
step = tests.planned(model, optimizer)
for number in range(5):
    step(tests.tokens(2 * number + rank))
torch.save((tests.streams(optimizer), model.module.state_dict(), optimizer.state_dict()), f"{folder}/{rank}.pt")
"""


def test_ranks_have_the_same_projections_and_parameters(tmp_path: Path) -> None:
    run_ranks(tmp_path, RANKS)
    (first_streams, first, state), (second_streams, second, other) = (torch.load(tmp_path / f"{r}.pt") for r in (0, 1))
    assert first_streams == second_streams
    assert_same(first, second)
    assert_same(state, other)
    twin = built()
    reference = compact(twin, every=2)
    for group, own in zip(reference.param_groups, first_streams, strict=True):
        group["streams"] = own
    for number in range(5):
        eager_step(twin, reference, torch.cat([tokens(2 * number), tokens(2 * number + 1)]))
    for name, tensor in twin.state_dict().items():
        assert relative(first[name], tensor) < 1e-5, name
