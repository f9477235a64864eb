"""Codec tempo: the input of an activation from its output; what it fits, what it saves, how far gradients are off."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from roamc.frontends.workload import Workload, capture
from roamc.graph import TrainGraph, value_flow, verify
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.graph.reader_kinds import ReaderKinds
from roamc.graph.value_numbers import Numbers
from roamc.operators.activations import ACTIVATIONS
from roamc.operators.fused import Fused
from roamc.options import Options, parse_options
from roamc.passes import fuse
from roamc.passes.fuse import Effort, choose, estimates
from roamc.passes.retain import Code, compress
from roamc.passes.retain.codecs.tempo import Tempo
from roamc.passes.retain.fits import codings, values
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import captured_step, clones, run_real
from tests.passes.retain.test_compress import cleaned, squares

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_by_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.005}


class Mlp(nn.Module):
    """The MLP of a transformer's block on top of a residual stream."""

    def __init__(self, width: int, function: str, *, keep: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.function, self.keep, self.dropout = FUNCTIONS[function], keep, dropout

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        inner = self.up(self.norm(x))
        if self.keep:
            with roamc.keep():
                inner = self.function(inner)
        else:
            inner = self.function(inner)
        return x + F.dropout(self.down(inner), self.dropout)


def mlps(function: str = "gelu", *, layers: int = 3, keep: bool = True, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp(64, function, keep=keep, dropout=dropout) for _ in range(layers)))


def tokens(batch: int = 4) -> Tensor:
    return torch.randn(batch, 128, 64, generator=torch.Generator().manual_seed(1))


def fitting(graph: TrainGraph) -> list[str]:
    """The storages that are made again as inputs of an activation."""
    memory, kinds = build_memory(graph), ReaderKinds(graph)
    tempo_codings = ((value, dict(codings(value, ["tempo"], kinds)).get("tempo")) for value in values(memory))
    return [value.storage.name for value, coding in tempo_codings if isinstance(coding, Tempo)]


def offered(function: Callable[[nn.Module, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> int:
    """How many storages the codec fits where a weighted input goes through ``function``."""
    graph, _ = cleaned(nn.Linear(8, 8, dtype=dtype), (torch.randn(6, 8, dtype=dtype),), function, "step")
    return len(fitting(graph))


def compare(got: Sequence[Any], expected: Sequence[Any], bound: float) -> None:
    """All tensors together: how far they are apart, as a part of their norm."""
    pairs = [(a, b) for a, b in zip(got, expected, strict=True) if isinstance(b, Tensor) and b.is_floating_point()]
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    assert apart <= bound**2 * sum(float(b.double().square().sum()) for _, b in pairs)


@pytest.mark.parametrize(("dtype", "route"), [*((dtype, "joint") for dtype in CLOSE), (torch.float32, "step")], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_inputs_are_made_from_outputs(name: str, dtype: torch.dtype, route: str) -> None:
    """Forward has the same bits, gradients are near, every byte is foreseen, and the judge agrees if asked to."""
    graph, inputs = cleaned(mlps(name).to(dtype), (tokens().to(dtype),), squares, route)
    before, again = clones(inputs), clones(inputs)
    expected, _ = run_real(graph, before)
    kept, flow = verify.constraints(graph), value_flow.read(graph, Numbers())
    storages = fitting(graph)
    assert len(storages) == 3
    after = compress(graph, [Code(storage, "tempo") for storage in storages])
    verify.check_graph(after, "retain", kept, deep=True)
    value_flow.check(after, flow, "retain", ["tempo"])
    got, measured = run_real(after, again)
    assert torch.equal(got[0], expected[0])
    compare([*got, *again], [*expected, *before], CLOSE[dtype])
    assert measured == live_bytes(build_memory(after)).tolist()


def summed(*parts: Tensor) -> Tensor:
    return sum((part.square().sum() for part in parts), torch.zeros(()))


FITS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "as it is": lambda m, x: summed(F.gelu(m(x))),
    "a view": lambda m, x: summed(F.gelu(m(x).view(3, 2, 8))),
    "transposed": lambda m, x: summed(F.silu(m(x).t())),
    "twice": lambda m, x: (lambda h: summed(F.gelu(h), F.gelu(h.view(-1))))(m(x)),
    "rows turned around": lambda m, x: summed(F.gelu(m(x).flip(0)).relu(), m(x)),  # flip makes a value of its own
    "also read in forward": lambda m, x: (lambda h: summed(F.gelu(h)) + h.sum())(m(x)),
}
DOES_NOT: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "another slope": lambda m, x: (lambda h: summed(F.gelu(h), F.silu(h)))(m(x)),
    "tanh and not": lambda m, x: (lambda h: summed(F.gelu(h), F.gelu(h, approximate="tanh")))(m(x)),
    "a product": lambda m, x: (lambda h: summed(F.gelu(h), h * h))(m(x)),
    "half of it": lambda m, x: summed(F.gelu(m(x)[:, :4])),
    "its own gradient": lambda m, x: summed(torch.ops.aten.gelu_backward(m(x), m(x).detach())),
    "no activation": lambda m, x: summed(m(x).tanh()),
}


@pytest.mark.parametrize("case", FITS)
def test_fits_an_input_of_which_backward_takes_the_slope(case: str) -> None:
    assert offered(FITS[case]) == 1


@pytest.mark.parametrize("case", DOES_NOT)
def test_fits_nothing_else(case: str) -> None:
    assert offered(DOES_NOT[case]) == 0


def test_fits_no_double_precision() -> None:
    assert offered(FITS["as it is"], torch.float64) == 0


def test_a_slope_may_be_taken_inside_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "EFFORT", Effort(least_bytes=1, least_share=0.0))
    monkeypatch.setattr(estimates, "group_workspace", lambda group, threads: 0)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 256)

        def forward(self, x: Tensor) -> Tensor:
            inner = self.up(x)
            with roamc.keep():
                y = F.gelu(inner)
            return y.sin() * 3

    torch.manual_seed(0)
    graph, inputs = cleaned(Scaled(), (torch.randn(32, 64),), squares, "step")
    before, again = clones(inputs), clones(inputs)
    expected, _ = run_real(graph, before)
    flow = value_flow.read(graph, Numbers())
    grouped = fuse.apply(graph, fuse.decide(graph, Options()))
    members = [m.operator for n in grouped.graph.nodes if isinstance(n.target, Fused) for m in n.target.members]
    assert "aten.gelu_backward.default" in members
    (storage,) = fitting(grouped)
    after = compress(grouped, [Code(storage, "tempo")])
    value_flow.check(after, flow, "retain", ["tempo"])
    got, _ = run_real(after, again)
    compare([*got, *again], [*expected, *before], 1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slopes_are_taken_inside_kernels_of_a_gpu(name: str) -> None:
    """Planned without one."""
    workload = Workload("gpu", mlps(name).to(torch.bfloat16), (tokens().to(torch.bfloat16),), squares)
    graph = capture(workload, forward_backward=False, device=torch.device("cuda", 0))
    flow = value_flow.read(graph, Numbers())
    grouped = fuse.apply(graph, fuse.decide(graph, parse_options({"numerics": "fast", "profile": "h100"})))
    members = [m.operator for n in grouped.graph.nodes if isinstance(n.target, Fused) for m in n.target.members]
    assert any("backward" in member for member in members)
    storages = fitting(grouped)
    assert len(storages) == 3
    after = compress(grouped, [Code(storage, "tempo") for storage in storages])
    value_flow.check(after, flow, "retain", ["tempo"], fast=True)


Way = tuple[nn.Module, Plan]


def by_compile(model: nn.Module, x: Tensor, **options: Any) -> Way:
    torch._dynamo.reset()
    squares(torch.compile(model, backend="roamc", options=options), x).backward()  # type: ignore[arg-type]
    return model, roamc.plans()[-1]


def by_optimize(model: nn.Module, x: Tensor, **options: Any) -> Way:
    optimized = roamc.optimize(model, **options)
    squares(optimized, x).backward()
    return model, roamc.plans(optimized)[-1]


def by_step(model: nn.Module, x: Tensor, **options: Any) -> Way:
    """The gradients are what an update at rate 1 takes away from zeros, in which they keep their digits."""
    before = copy.deepcopy(model)
    step = roamc.train_step(model, squares, torch.optim.SGD(model.parameters(), lr=1.0), **options)
    step(x)
    for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
        parameter.grad = (old - parameter).detach()
    return model, roamc.plans(step)[-1]


@pytest.mark.parametrize("way", [by_compile, by_optimize, by_step])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_three_ways_in_save_bytes_and_have_the_gradients_of_eager(name: str, way: Callable[..., Way]) -> None:
    eager, x = mlps(name, dropout=0.1), tokens()
    torch.manual_seed(2)
    squares(eager, x).backward()
    plans = {}
    for codecs in ((), ("tempo",)):
        model = mlps(name, dropout=0.1)
        torch.manual_seed(2)
        model, plans[codecs] = way(model, x, memory_budget="light", codecs=codecs, strict=True)
        compare([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()], 1e-5)
    exact, lossy = plans[()], plans["tempo",]
    assert "tempo" not in [code[1] for code in exact.decisions["retain"]["codes"]]
    assert [code[1] for code in lossy.decisions["retain"]["codes"]].count("tempo") >= 2
    wide = 4 * tokens().numel() * 4
    assert lossy.peak_bytes <= exact.peak_bytes - wide


def step_graph(model: nn.Module, x: Tensor) -> TrainGraph:
    return captured_step(model, (x,), squares).graph


def seconds_of(plan: Plan) -> float:
    return float(plan.decisions["retain"]["added_seconds"]) if "retain" in plan.decisions else 0.0


def test_where_a_rerun_is_cheaper_it_is_not_taken() -> None:
    assert len(fitting(step_graph(mlps(keep=False), tokens()))) == 3
    options = {"memory_budget": "light"}
    exact = search.run(step_graph(mlps(keep=False), tokens()), parse_options(options)).plan
    allowed = search.run(step_graph(mlps(keep=False), tokens()), parse_options(options | {"codecs": "tempo"})).plan
    assert allowed.decisions["retain"] == exact.decisions["retain"]


def plans_of(model: nn.Module, x: Tensor, budget: str) -> tuple[Plan, Plan]:
    """Without the codec and with it."""
    exact, allowed = (
        search.run(step_graph(model, x), parse_options({"memory_budget": budget, "codecs": codecs})).plan
        for codecs in ((), ("tempo",))
    )
    return exact, allowed


@pytest.mark.parametrize("budget", ["95%", "90%", "80%", "70%", "light", "min"])
@pytest.mark.parametrize("keep", [False, True])
def test_whoever_allows_it_pays_no_more(keep: bool, budget: str) -> None:
    """Of time, or where the lowest peak is asked for, of bytes."""
    exact, allowed = plans_of(mlps("silu", keep=keep), tokens(), budget)
    if budget.endswith("%"):
        assert seconds_of(allowed) <= seconds_of(exact) * (1 + 1e-9)
    else:
        assert allowed.peak_bytes <= exact.peak_bytes


class RandomMlps(nn.Module):
    """MLPs with random activations, of which some are kept, some read elsewhere, and random residuals and norms."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        self.width, self.recipe, self.parts = (
            draw.choice([256, 384]),
            list[tuple[str, str, bool, bool]](),
            nn.ModuleList(),
        )
        self.first = nn.Linear(self.width, self.width)
        for _ in range(draw.randint(3, 7)):
            around, hidden = draw.choice(["plain", "plain", "norm", "dropout", "residual"]), draw.choice([1, 2, 4])
            function = draw.choice(["gelu", "gelu_by_tanh", "silu", "tanh", "gelu"])
            self.recipe.append((around, function, draw.random() < 0.6, draw.random() < 0.2))
            up, down = nn.Linear(self.width, hidden * self.width), nn.Linear(hidden * self.width, self.width)
            self.parts.append(nn.ModuleList([up, down, nn.LayerNorm(self.width)]))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = self.first(x)
        for (around, function, keep, elsewhere), (up, down, norm) in zip(self.recipe, self.parts, strict=True):
            inner = up(norm(x) if around == "norm" else x)
            with roamc.keep() if keep else contextlib.nullcontext():
                y = FUNCTIONS.get(function, torch.tanh)(inner)
            if elsewhere:
                y = y * inner.sigmoid()
            y = F.dropout(down(y), 0.1) if around == "dropout" else down(y)
            x = x + y if around in ("norm", "residual") else y
        return x


@pytest.mark.parametrize(("seed", "budget"), [(21, "80%"), (39, "80%"), (25, "60%"), (36, "70%"), (3, "light")])
def test_random_nets_pay_no_more(seed: int, budget: str) -> None:
    """With the first two, sets of all offers hide the answer that exact codecs alone give."""
    model = RandomMlps(seed)
    exact, allowed = plans_of(model, torch.randn(8, 64, model.width), budget)
    if budget.endswith("%"):
        assert seconds_of(allowed) <= seconds_of(exact) * (1 + 1e-9)
    else:
        assert allowed.peak_bytes <= exact.peak_bytes


def test_a_plan_from_a_file_needs_the_name() -> None:
    options = parse_options({"memory_budget": "light", "codecs": "tempo"})
    plan = Plan.from_json(search.run(step_graph(mlps(), tokens()), options).plan.to_json())
    assert search.run(step_graph(mlps(), tokens()), options, plan).plan.decisions == plan.decisions
    with pytest.raises(roamc.RoamcError, match=r"is kept by codec 'tempo', which has an error of 4e-06: allow it with"):
        search.run(step_graph(mlps(), tokens()), Options(memory_budget="light"), plan)


def test_training_goes_as_it_does_exactly() -> None:
    losses, used = {}, set[str]()
    for codecs in ((), ("tempo",)):
        model = mlps()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        draw = torch.Generator().manual_seed(3)
        step = roamc.train_step(model, to_target, optimizer, memory_budget="light", codecs=codecs, strict=True)
        losses[codecs] = [float(step(torch.randn(4, 128, 64, generator=draw))) for _ in range(300)]
        used |= {code[1] for code in roamc.plans(step)[-1].decisions["retain"]["codes"]}
    assert used == {"tempo"}
    exact, lossy = (torch.tensor(losses[codecs]) for codecs in ((), ("tempo",)))
    assert exact[-20:].mean() < 0.8 * exact[:20].mean()
    assert (exact - lossy).abs().max() <= 0.005


def to_target(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x.roll(1, -1).abs())


def test_every_function_is_covered_here() -> None:
    assert FUNCTIONS.keys() == ACTIVATIONS.keys()
