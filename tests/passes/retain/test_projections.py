"""What backward only projects is projected in forward, and waits in its place as the product: the same values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from roamc import cost
from roamc.errors import PlanError
from roamc.frontends.workload import Workload, capture
from roamc.graph import Role, TrainGraph, copied, placeholders
from roamc.graph.memory import build_memory
from roamc.operators.projection import projection
from roamc.optim import CompAct
from roamc.options import Options, parse_options
from roamc.passes import checkpoint, normalize, project
from roamc.passes.retain import Choice, Code, compress, search
from roamc.passes.retain.codecs import projections
from roamc.passes.retain.fits import products_of, values
from roamc.planning import search as planning
from roamc.planning.plan import Plan
from roamc.report.projected import projected
from roamc.report.rerun import smaller
from tests.graphs import aten, graph_and_inputs
from tests.passes.retain.test_compress import check, squares
from tests.passes.retain.test_offers import difference, some_sets, without_clashes
from tests.passes.retain.test_search import PROFILE

WIDTH, ROWS = 32, 256
ADD = "aten.add.Tensor"


class Layer(nn.Module):
    """Two weights that read one input, one of them by halves: two products with two projections, through views."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.halves = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) + self.halves(x.unflatten(-1, (2, -1))).flatten(-2)


class Checkpointed(nn.Module):
    """Layers that keep nothing but their input."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)


def chain(layers: int = 4) -> tuple[nn.Sequential, Tensor]:
    """Layers without an activation: nothing but gradients of weights reads their inputs behind forward."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers))), torch.randn(4, ROWS // 4, WIDTH)


def compact(parameters: Any, lr: float = 0.01, rank: float = 1 / 4) -> CompAct:
    return CompAct(parameters, lr=lr, rank=rank, dense=())


def step_graph(optimizer: Callable[..., torch.optim.Optimizer] = compact) -> tuple[TrainGraph, list[Any]]:
    """The graph in front of pass retain, and inputs."""
    model, x = chain()
    graph, inputs = graph_and_inputs(model, (x,), squares, "step", optimizer)
    return ready(graph), inputs


def ready(graph: TrainGraph) -> TrainGraph:
    """The graph behind the passes in front of retain that matter here."""
    for each in (normalize, project):
        graph = each.apply(graph, each.decide(graph, Options()))
    return graph


def choice_of(graph: TrainGraph, allowed: str = "all", **options: Any) -> Choice:
    order = [op.node.name for op in build_memory(graph).operators]
    settings = Options(memory_budget="min", **options)
    return Choice(graph, settings, order, PROFILE, cost.prices(graph, PROFILE), allowed)


def moved(choice: Choice) -> list[Code]:
    return [code for code in choice.codes if code.codec == projections.NAME]


@pytest.mark.parametrize("disable", [(), ("reuse",)])
@pytest.mark.parametrize("allowed", ["all", "light"])
def test_offers_are_what_is_written(allowed: str, disable: tuple[str, ...]) -> None:
    choice = choice_of(step_graph()[0], allowed, disable=disable)
    assert len(moved(choice)) == 3, "of the first layer the input is the batch"
    offers = choice.search.problem.offers
    for places in some_sets(len(offers), random.Random(0)):
        taken = without_clashes(offers, places)
        assert difference(choice.search.encoded(taken).problem, choice.written(taken).problem) == [], taken


def test_offers_cost_the_projections_that_are_made_once_more() -> None:
    choice = choice_of(step_graph()[0])
    all_projections = [node for node in choice.graph.graph.nodes if node.target is projection]
    seconds = {node.meta["val"].shape[0]: choice.prices[node.name] for node in all_projections}
    assert seconds.keys() == {WIDTH, WIDTH // 2}
    for offer in choice.search.problem.offers:
        assert offer.seconds == pytest.approx(sum(seconds.values())), "products run once, with or without the offer"
        assert offer.nbytes == 4 * (ROWS * WIDTH // 4 + 2 * ROWS * WIDTH // 8)


def test_products_move_and_every_bit_stays() -> None:
    graph, inputs = step_graph()
    codes = moved(choice_of(graph))
    before = build_memory(graph)
    after = build_memory(check(graph, inputs, lambda graph: compress(graph, codes)))
    left = {storage.name for storage in after.saved}
    assert not left.intersection(code.storage for code in codes)
    saved = [sum(storage.nbytes for storage in memory.saved) for memory in (before, after)]
    assert saved[0] - saved[1] == 3 * 4 * ROWS * (WIDTH - 2 * WIDTH // 4)
    assert sum(op.node.target is projection for op in after.operators) == 8 + 6
    assert sum(op.node.target is aten.mm.default for op in after.operators) == sum(
        op.node.target is aten.mm.default for op in before.operators
    )


def run(offers: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[Tensor], Plan]:
    """Losses of three steps, and all parameters and states behind them; with the plan."""
    model, x = chain()
    optimizer = compact(model.named_parameters())
    with monkeypatch.context() as patched:
        if not offers:
            patched.setattr(search, "offered", lambda *_: [])
        step = roamc.train_step(model, squares, optimizer, strict=True, profile="cpu", **options)
        values = [step(x * number).detach().clone() for number in range(1, 4)]
    states = [value for p in model.parameters() for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return [*values, *model.parameters(), *states], step.plans[0]


def codes_of(plan: Plan) -> Sequence[Any]:
    codes: Sequence[Any] = plan.decisions["retain"]["codes"]
    return codes


def seconds_of(plan: Plan) -> float:
    return float(plan.decisions["retain"]["added_seconds"])


@pytest.mark.parametrize("budget", ["light", "+1%", "80%", "60%", "50%", "min"])
def test_no_plan_is_worse_and_training_has_the_same_bits(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (without, plain), (values, plan) = (run(offers, monkeypatch, memory_budget=budget) for offers in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(values, without, strict=True))
    assert plan.needed_bytes <= plain.needed_bytes or seconds_of(plan) <= seconds_of(plain) * (1 + 1e-9)
    if budget == "light":
        assert len(codes_of(plan)) == 3
        assert plan.needed_bytes < plain.needed_bytes, "the inputs are products' sums, and no product may run again"


def test_a_plan_from_a_file_holds_it() -> None:
    options = parse_options({"memory_budget": "light"})
    model, x = chain()
    graphs = [graph_and_inputs(model, (x,), squares, "step", optimizer)[0] for optimizer in (compact, compact)]
    first = planning.run(graphs[0], options)
    plan = Plan.from_json(first.plan.to_json())
    assert {each.waits for each in projected(first.graph, plan)} == {"projection", "input"}
    (row,) = smaller(first.graph, plan)
    assert (row.codec, row.operator, row.count, row.before - row.after) == (projections.NAME, ADD, 3, 3 * 16384)
    assert planning.run(graphs[1], options, plan).plan.decisions == plan.decisions


def test_what_a_checkpoint_runs_again_is_not_offered() -> None:
    """Of two layers, the first runs again and reads its input; what it makes for the second is not there before."""
    model, x = chain()
    again = nn.Sequential(Checkpointed(model[:2]), Checkpointed(model[2:]))
    graph, _ = graph_and_inputs(again, (x,), squares, "step", compact)
    graph = checkpoint.apply(graph, checkpoint.decide(graph, Options()))
    assert not moved(choice_of(ready(graph)))


def test_what_is_not_only_projected_is_refused_by_name() -> None:
    graph, _ = step_graph(torch.optim.AdamW)
    assert not moved(choice_of(graph))
    name = next(value.storage.name for value in values(build_memory(graph)) if value.saved.late)
    with pytest.raises(PlanError, match=f"what reads {name} behind forward does more than to project it"):
        compress(graph, [Code(name, projections.NAME)])


class Latents(nn.Module):
    """Weights whose inputs are parameters, which the step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.ParameterList(nn.Parameter(torch.randn(8, WIDTH)) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for latent, layer in zip(self.latents, self.layers, strict=True):
            x = torch.tanh(x) + layer(latent)
        return x


@pytest.mark.parametrize("budget", [None, "light", "50%", "min"])
def test_parameters_are_projected_before_they_are_updated(budget: str | None) -> None:
    losses = []
    for options in ({"disable": "project"}, {"memory_budget": budget}):
        torch.manual_seed(0)
        model = Latents()
        optimizer = CompAct(model.named_parameters(), lr=0.01, dense="latents")
        step = roamc.train_step(model, squares, optimizer, strict=True, profile="cpu", **options)
        losses.append(torch.stack([step(torch.ones(8, WIDTH)).detach() for _ in range(3)]))
        assert sum(layer["exp_avg"].shape[-1] == WIDTH // 4 for layer in optimizer.state.values()) == 4
    assert torch.allclose(*losses, rtol=1e-5)


class Dropped(nn.Module):
    """Masks, which only a code makes smaller, beside inputs that are made again for little."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + F.dropout(down(F.dropout(F.gelu(up(norm(x))))))
        return x


def test_projections_keep_no_other_codes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under "light", what waits and is made again without projections is the least that may be needed with them."""
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(ROWS, WIDTH)
    options: dict[str, Any] = {"loss_fn": squares, "profile": "cpu", "memory_budget": "light"}
    plan = roamc.plan(model, x, optimizer=compact(model.named_parameters()), **options)
    every = search.offered
    monkeypatch.setattr(
        search, "offered", lambda *asked: [row for row in every(*asked) if row[0].codec != projections.NAME]
    )
    plain = roamc.plan(model, x, optimizer=compact(model.named_parameters()), **options)
    assert codes_of(plain)
    assert plan.needed_bytes <= plain.needed_bytes


class Llama(nn.Module):
    """Logits of a LLaMA whose head is its embedding, or not."""

    def __init__(self, **settings: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(use_cache=False, **settings))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def llama(batch: int, length: int, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, Tensor]:
    """On the meta device."""
    with torch.device("meta"):
        return Llama(**settings).to(dtype), torch.empty(batch, length, dtype=torch.int64)


@pytest.mark.parametrize("share", [2, 4, 8])
def test_bytes_of_a_llama_of_350_million_weights(share: int) -> None:
    """Two of its 24 equal layers, 128 sequences of 256 tokens, 16 bits: the table of CompAct's paper, exactly.

    One product for all that read one input: 24 layers need 3.504, 1.752 and 0.876 of the 7.008 GiB of inputs, and their
    gradients, with the embedding's, 0.393, 0.255 and 0.185 of 0.670 GB.
    """
    n, m, layers, vocab = 1024, 2736, 2, 32_000
    sizes = {"hidden_size": n, "intermediate_size": m, "num_hidden_layers": layers, "num_attention_heads": 16}
    model, batch = llama(128, 256, torch.bfloat16, vocab_size=vocab, tie_word_embeddings=True, **sizes)
    captured = capture(Workload("llama", model, (batch,), next_token, partial(CompAct, rank=1 / share)))
    graph = ready(captured)
    codes = [Code(value.storage.name, projections.NAME) for value in values(build_memory(graph)) if products_of(value)]
    assert len(codes) == 3 * layers
    before, after = build_memory(graph), build_memory(compress(copied(graph), codes))
    inputs = 2 * 128 * 256 * (2 * n + m) * layers
    assert 12 * inputs / 2**30 == pytest.approx(7.008, abs=1e-3)
    saved = [sum(storage.nbytes for storage in memory.saved) for memory in (before, after)]
    assert saved[0] - saved[1] == inputs - inputs // share
    dense = n * n + 2 * n
    gradients = 2 * (layers * (dense + (3 * n * n + 2 * m * n + n * m) // share) + n + vocab * n)
    assert sum(storage.nbytes for storage in after.storages if storage.gradient) == gradients
    states = [
        node
        for node, port in zip(placeholders(graph.graph), graph.inputs, strict=True)
        if port.role is Role.OPTIMIZER_STATE
    ]
    moments = sum(node.meta["val"].numel() * node.meta["val"].itemsize for node in states if node.meta["val"].dim())
    assert moments == 2 * gradients


BYTES = {1 / 2: (117.3e6, 82e6), 1 / 4: (102.3e6, 76e6), 1 / 8: (94.8e6, 73e6)}
"""Rank to the most that peak and fixed bytes may take together, with "+0%" and under "light"."""


def small_plan(rank: float | None, **options: Any) -> Plan:
    """The plan of a LLaMA of 4 layers of width 256, for 8 sequences of 128 tokens; all linear layers are projected."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    model, batch = llama(8, 128, vocab_size=256, **sizes)
    dense = torch.optim.AdamW(model.parameters())
    optimizer = dense if rank is None else CompAct(model.named_parameters(), rank=rank, dense=("embed", "head"))
    return roamc.plan(model, batch, loss_fn=next_token, optimizer=optimizer, profile="cpu", **options)


@pytest.mark.parametrize("rank", BYTES)
def test_peak_and_states_of_a_small_llama(rank: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where inputs run again for less than products wait, an offer of these changes no plan."""
    for limit, options in zip(BYTES[rank], ({"memory_budget": "+0%"}, {"memory_budget": "light"}), strict=True):
        plan = small_plan(rank, **options)
        assert plan.peak_bytes + sum(plan.fixed_bytes.values()) <= limit, options
        assert plan.peak_bytes <= small_plan(None, **options).peak_bytes, options
    monkeypatch.setattr(search, "offered", lambda *_: [])
    without = small_plan(rank, memory_budget="light")
    assert plan.peak_bytes <= without.peak_bytes
    assert seconds_of(plan) <= seconds_of(without) * (1 + 1e-9)
