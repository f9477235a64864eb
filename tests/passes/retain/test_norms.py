"""Codec ``tempo`` on norms: inputs are made again from outputs that are kept anyway, on all ways in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.frontends.workload import Workload, capture
from roamc.graph import value_flow
from roamc.graph.memory import build_memory
from roamc.graph.reader_kinds import ReaderKinds
from roamc.graph.value_numbers import Numbers
from roamc.options import parse_options
from roamc.passes import fuse
from roamc.passes.retain import Code, compress
from roamc.passes.retain.codecs.norms import Norm
from roamc.passes.retain.fits import codings, values
from roamc.planning.plan import Plan
from tests.passes.retain.blocks import BertBlock, GPTBlock


class Norms(nn.Module):
    """Linear layers and norms in turn; the norms' outputs are kept by hand, so that only their inputs can be saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(8)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(8)])
        with torch.no_grad():
            for norm in self.norms:
                norm.weight.normal_(1, 0.3)  # type: ignore[operator, union-attr]
                norm.bias.normal_(0, 0.2)  # type: ignore[operator, union-attr]
                norm.weight[3] = 0.0  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = layer(x)
            with roamc.keep():
                x = norm(h)
        return x


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def made(dtype: torch.dtype) -> tuple[Norms, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Norms(64).to(dtype), torch.randn(512, 64, dtype=dtype)


def step(model: nn.Module, x: Tensor, route: str, **options: Any) -> tuple[Tensor, list[Tensor], Plan]:
    """Loss and gradients of a step, and its plan under "light"."""
    options = {"memory_budget": "light", "strict": True, **options}
    if route == "train_step":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
        planned = roamc.train_step(model, loss, optimizer, **options)
        value = planned(x)
        gradients = [optimizer.state[parameter]["exp_avg"] * 10 for parameter in model.parameters()]
        return value, gradients, planned.plans[0]
    called: Any = model
    if route == "optimize":
        roamc.optimize(model, **options)
    else:
        called = torch.compile(model, backend="roamc", options=options, dynamic=False)
    value = loss(called, x)
    value.backward()
    return value.detach(), [parameter.grad for parameter in model.parameters()], roamc.plans()[-1]  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("route", ["compile", "optimize", "train_step"])
def test_inputs_of_norms_do_not_wait_where_outputs_are_kept(route: str, dtype: torch.dtype) -> None:
    model, x = made(dtype)
    exact, exact_gradients, dense = step(copy.deepcopy(model), x, route)
    value, gradients, plan = step(model, x, route, codecs="tempo")
    codes = plan.decisions["retain"]["codes"]
    assert len(codes) >= 7
    assert all(code[1] == "tempo" and code[3] * 32 == code[2] for code in codes)
    assert plan.needed_bytes < 0.7 * dense.needed_bytes
    assert torch.equal(value, exact)
    bound = 1e-6 if dtype is torch.float32 else 0.02
    for one, other in zip(gradients, exact_gradients, strict=True):
        assert (one - other).norm() <= bound * other.norm()


def test_weights_that_lose_too_many_columns_are_refused_in_forward() -> None:
    model, x = made(torch.float32)
    with torch.no_grad():
        model.norms[4].weight[:3] = 0.0  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planned = roamc.train_step(model, loss, optimizer, memory_budget="light", codecs="tempo")
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"codecs='tempo'.*norm over 64 columns.*leave 'tempo' out"):
        planned(x)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(("block", "count"), [(GPTBlock, 3), (BertBlock, 4)])
def test_norms_inside_kernels_of_a_gpu_have_their_inputs_from_their_outputs(block: type[GPTBlock], count: int) -> None:
    """Planned without one: the group that sums up a residual stream makes the norm of the sum as well."""
    model = nn.Sequential(*(block(64, 4, fused=True) for _ in range(2))).to(torch.bfloat16)
    workload = Workload("gpu", model, (torch.randn(4, 128, 64, dtype=torch.bfloat16),), loss)
    graph = capture(workload, forward_backward=False, device=torch.device("cuda", 0))
    flow = value_flow.read(graph, Numbers())
    grouped = fuse.apply(graph, fuse.decide(graph, parse_options({"numerics": "fast", "profile": "h100"})))
    kinds = ReaderKinds(grouped)
    fitting = {
        value.storage.name: coding
        for value in values(build_memory(grouped))
        for name, coding in codings(value, ["tempo"], kinds)
        if name == "tempo" and isinstance(coding, Norm)
    }
    assert len(fitting) == count  # the first norm of GPT reads the batch
    after = compress(grouped, [Code(name, "tempo") for name in fitting])
    value_flow.check(after, flow, "retain", ["tempo"], fast=True)
