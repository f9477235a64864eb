"""Pass shard: which values are split, what a graph on shards gives, and what it communicates and saves."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roamc.errors import PlanError, VerifyError
from roamc.graph import TrainGraph, operators
from roamc.graph.fingerprint import fingerprint
from roamc.graph.shard_judge import check
from roamc.graph.verify import check_graph
from roamc.options import Options, parse_options
from roamc.passes import shard
from roamc.passes.shard import Decision, choose
from tests.graphs import joint_graph, saved_bytes, traced
from tests.parallel import BOUND, COLUMNS, KINDS, ROWS, batch, build, worst_error
from tests.shards import COLLECTIVES, GROUP, captured, counted, inputs_of, normal_form, one_rank, run_ranks, split

aten = torch.ops.aten
SEQUENCE = Options(shard="sequence")


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes a group has as many ranks as the test says."""
    of_ranks(monkeypatch, 2)


def of_ranks(patch: pytest.MonkeyPatch, ranks: int) -> None:
    patch.setattr(choose, "ranks_in", lambda group: ranks)


def on_shards(graph: TrainGraph) -> TrainGraph:
    """The graph behind the pass, checked by all judges."""
    sharded = shard.apply(graph, shard.decide(graph, SEQUENCE))
    check_graph(sharded, "shard", deep=True)
    check(graph, sharded, "shard")
    return sharded


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_one_rank(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of_ranks(monkeypatch, ranks)
    graph = on_shards(captured(kind, ranks))
    assert counted(graph)["FORWARD", "reduce_scatter_tensor"] == 2
    inputs = inputs_of(kind, ranks)
    torch.manual_seed(0)
    results = run_ranks(graph, inputs)
    model, loss = one_rank(kind)
    losses = [result[0] for result in results]
    assert max(abs(float(each - loss)) for each in losses) <= BOUND * float(loss)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = zip(*(result[1:] for result in results), strict=True)
    names = [name for name, _ in model.named_parameters()]
    whole = {name: _whole(parts, wanted[name].shape) for name, parts in zip(names, gradients, strict=False)}
    assert worst_error(whole, wanted) <= BOUND


def test_dropout_in_one_operator_as_on_a_gpu_is_that_of_one_rank() -> None:
    torch.manual_seed(0)
    graph = joint_graph(split(build("bert", 1), 0, 2), (batch(),))
    sharded = on_shards(graph)
    assert counted(sharded)["FORWARD", "all_gather_into_tensor"] == 2, "two of the layer, none of the head"
    inputs = inputs_of("bert", 2)
    results = []
    for each in (graph, sharded):
        torch.manual_seed(0)
        results.append(run_ranks(each, inputs)[1])
    for wanted, output in zip(*results, strict=True):
        assert output is wanted or torch.allclose(output, wanted, rtol=1e-5, atol=1e-7)


def _whole(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """The parts of a gradient that ranks have, put together; all ranks have the same of what is not split."""
    dims = [dim for dim, size in enumerate(shape) if parts[0].shape[dim] != size]
    if dims:
        return torch.cat(list(parts), dims[0])
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_gathers_and_scatters_as_often_as_megatrons(kind: str) -> None:
    fewer, more = (counted(on_shards(captured(kind, layers=layers))) for layers in (1, 2))
    layer = {key: more[key] - fewer.get(key, 0) for key in more}
    assert {key: count for key, count in layer.items() if count} == {
        ("FORWARD", "all_gather_into_tensor"): 2,
        ("FORWARD", "reduce_scatter_tensor"): 2,
        ("BACKWARD", "all_gather_into_tensor"): 4,
        ("BACKWARD", "reduce_scatter_tensor"): 2,
    }
    assert more["BACKWARD", "all_reduce_coalesced"] == 1, "one bucket for all gradients of norms and biases"
    assert more["BACKWARD", "all_reduce"] == 1, "the gradient of the head"
    assert more["FORWARD", "all_reduce_coalesced"] == 1, "the loss and the number of its tokens"
    assert ("FORWARD", "all_reduce") not in more


class Layer(nn.Module):
    """A layer as Korthikanti et al. count it: attention of plain operators, three dropouts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.size = nn.LayerNorm(width), nn.LayerNorm(width), width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        b, s, _ = x.shape
        q, k, v = (part(y).view(b, s, -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = F.dropout(torch.softmax(q @ k.transpose(2, 3) * self.size**-0.5, -1), 0.1)
        x = x + F.dropout(self.o((weights @ v).transpose(1, 2).reshape(b, s, -1)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


def layers_of(count: int, ranks: int) -> TrainGraph:
    s, b, h, a = SIZES
    model = nn.Sequential(*(Layer(h, a) for _ in range(count))).bfloat16()
    return normal_form(split(model, 0, ranks), (torch.zeros(b, s, h, dtype=torch.bfloat16, requires_grad=True),))


SIZES = (64, 2, 128, 8)
"""Length of a sequence, sequences, width, heads."""


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_layer_saves_the_bytes_of_the_paper(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of_ranks(monkeypatch, ranks)
    s, b, h, a = SIZES
    whole = [layers_of(count, ranks) for count in (2, 3)]
    split_up = [on_shards(graph) for graph in whole]
    for graphs, formula in (
        (whole, 10 + 24 / ranks + 5 * a * s / (h * ranks)),
        (split_up, (34 + 5 * a * s / h) / ranks),
    ):
        fewer, more = map(saved_bytes, graphs)
        assert (more - fewer) / (s * b * h) == pytest.approx(formula, rel=0.01)


def test_nothing_is_split_unless_asked_for() -> None:
    graph = captured("gpt")
    assert shard.decide(graph, Options()) == Decision()
    assert shard.apply(graph, Decision()) is graph


def test_tokens_that_the_ranks_do_not_divide_stay_whole_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    of_ranks(monkeypatch, 5)
    graph = captured("gpt")
    decision = shard.decide(graph, SEQUENCE)
    assert decision == Decision(uneven=(("all_reduce", 5, 48),))
    (note,) = shard.apply(graph, decision).notes
    assert note.endswith("the next number of tokens that fits is 50")
    assert "48 tokens are left whole on each of 5 ranks" in note


@pytest.mark.parametrize("said", [("all_reduce", 0, 48), ("all_reduce", 2, 48), ("all_reduce", 5, -1), ("no", 5, 48)])
def test_what_does_not_stay_whole_is_refused(said: tuple[str, int, int]) -> None:
    with pytest.raises(PlanError, match="are not left whole"):
        shard.apply(captured("gpt"), Decision(uneven=(said,)))


def test_groups_of_other_names_have_the_same_plan() -> None:
    first, second = captured("gpt"), captured("gpt")
    for node in operators(second.graph):
        if getattr(node.target, "namespace", "") == "roamc_collective":
            node.args = (*node.args[:-1], "17")
    assert fingerprint(first) == fingerprint(second)
    assert shard.decide(first, SEQUENCE) == shard.decide(second, SEQUENCE)
    assert fingerprint(on_shards(first)) == fingerprint(on_shards(second))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compare_what_is_no_part_and_the_random_numbers(kind: str) -> None:
    graph = captured(kind)
    (agreement,) = on_shards(graph).agreements
    names = [name for name, _ in build(kind, 1).named_parameters()]
    whole = [f"primals_{at}" for at, name in enumerate(names, 1) if not _is_part(name)]
    head = [f"primals_{names.index('head.weight') + 1}"]
    assert set(agreement.inputs) <= {*whole, f"primals_{len(names) + 1}", "tangents_1"}
    assert set(agreement.inputs) >= {*whole, f"primals_{len(names) + 1}", "tangents_1"} - {*head, *_biases(names)}
    assert [(phase.name, device.type) for phase, device in agreement.draws] == (
        [("FORWARD", "cpu")] if kind == "bert" else []
    )


def _is_part(name: str) -> bool:
    layer, _, kind = name.rpartition(".")
    layer = layer.rpartition(".")[2]
    return layer in COLUMNS or (layer in ROWS and kind == "weight")


def _biases(names: Sequence[str]) -> set[str]:
    """Inputs on which the values on shards need not depend, such as a bias that is added behind them."""
    return {f"primals_{at}" for at, name in enumerate(names, 1) if name.endswith("bias")}


def test_ranks_do_not_compare_parts_without_a_gradient() -> None:
    """Nothing in a graph without backward says that the first product, its bias and the last are parts."""

    def step(x: Tensor, up: Tensor, bias: Tensor, part: Tensor, gain: Tensor, last: Tensor) -> Tensor:
        return (reduced((x @ up + bias).relu(), part) * gain).view(24, 8) @ last

    graph = traced(step, X, W, torch.zeros(8), W, torch.zeros(8), W)
    (agreement,) = on_shards(graph).agreements
    gain = [node.name for node in graph.graph.nodes if node.op == "placeholder"][4]
    assert agreement.inputs == (gain,)
    assert agreement.draws == ()


def test_what_ranks_compare_has_no_names_of_groups_and_gpus_and_has_numbers() -> None:
    def hashed(group: str, number: float) -> str:
        def step(x: Tensor, w: Tensor) -> Tensor:
            y = COLLECTIVES.all_reduce(x @ w, "sum", group) * number
            return y.relu() @ w

        graph = traced(step, W, W)
        (agreement,) = on_shards(graph).agreements
        assert agreement.group == group
        return agreement.digest

    assert hashed(GROUP, 2.0) == hashed("other ranks", 2.0) != hashed(GROUP, 3.0)


def test_the_captured_graph_stays_as_it_is() -> None:
    graph = captured("bert")
    before = fingerprint(graph)
    on_shards(graph)
    assert fingerprint(graph) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: (r[0], 4, *r[2:]), "another number of ranks|the group has 2"),
        (lambda r: (r[0], 2, 47, *r[3:]), "2 ranks do not divide 47 tokens"),
        (lambda r: ("view", *r[1:]), "'view' is no collective"),
        (lambda r: (*r[:3], (*r[3], "nothing"), r[4]), "shards 'nothing', which this graph does not have"),
        (lambda r: (*r[:3], (*r[3], "mm"), r[4]), "mm cannot be computed from the rows"),
        (lambda r: (*r[:4], (*r[4], "all_reduce")), "cannot be computed|read as a whole|as planned"),
    ],
)  # fmt: skip
def test_a_decision_that_does_not_fit_is_refused(change: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roamc.passes.shard.write.ranks_in", lambda group: 2)
    graph = captured("gpt")
    decision = shard.decide(graph, SEQUENCE)
    changed = dataclasses.replace(decision, regions=(change(decision.regions[0]),))
    with pytest.raises(PlanError, match=message):
        shard.apply(graph, changed)


def test_another_choice_of_values_is_carried_out_as_well() -> None:
    graph = captured("gpt")
    first = shard.decide(graph, SEQUENCE).regions[0]
    fewer = dataclasses.replace(Decision(), regions=((*first[:3], tuple(n for n in first[3] if n != "add"), first[4]),))
    sharded = shard.apply(graph, fewer)
    check(graph, sharded, "shard")
    assert counted(sharded)["FORWARD", "all_gather_into_tensor"] == 3, "one more, for the sum that is whole"


def one_value_changed(graph: TrainGraph, region: shard.Region, choice: random.Random) -> Iterator[shard.Region]:
    """The region with each value left out, moved to the other form, and with some of the other values added."""
    for at, name in enumerate(region.shards):
        yield region._replace(shards=(*region.shards[:at], *region.shards[at + 1 :]))
        yield region._replace(shards=(*region.shards[:at], *region.shards[at + 1 :]), sums=(*region.sums, name))
    for at, name in enumerate(region.sums):
        yield region._replace(sums=(*region.sums[:at], *region.sums[at + 1 :]))
        yield region._replace(sums=(*region.sums[:at], *region.sums[at + 1 :]), shards=(*region.shards, name))
    others = [n.name for n in operators(graph.graph) if n.name not in {*region.shards, *region.sums}]
    for name in choice.sample(others, min(12, len(others))):
        yield region._replace(shards=(*region.shards, name))
        yield region._replace(sums=(*region.sums, name))


@pytest.mark.parametrize("kind", ["gpt", pytest.param("bert", marks=pytest.mark.thorough)])
def test_a_decision_with_one_value_changed_is_refused_or_gives_the_same(kind: str) -> None:
    graph, choice = captured(kind), random.Random(0)
    decision, inputs = shard.decide(graph, SEQUENCE), inputs_of(kind, 2)
    wanted = results_of(graph, inputs)
    refused = accepted = 0
    for region in one_value_changed(graph, shard.Region(*decision.regions[0]), choice):
        try:
            changed = shard.apply(graph, dataclasses.replace(decision, regions=(region,)))
            check(graph, changed, "shard")
        except (PlanError, VerifyError):
            refused += 1
            continue
        accepted += 1
        for before, after in zip(wanted, results_of(changed, inputs), strict=True):
            assert torch.allclose(after, before, rtol=1e-4, atol=1e-6), region
    assert min(refused, accepted) > 5


def results_of(graph: TrainGraph, inputs: Sequence[Sequence[Any]]) -> list[Tensor]:
    """All tensors that the ranks return, from the same random numbers."""
    torch.manual_seed(0)
    return [value for results in run_ranks(graph, inputs) for value in results if value is not None]


def test_option_takes_three_words() -> None:
    assert parse_options({"shard": "sequence"}).shard == "sequence"
    with pytest.raises(
        Exception, match="shard must be one of off, whole, sequence, not 'sequences'; did you mean 'sequence'"
    ):
        parse_options({"shard": "sequences"})


X = torch.zeros(4, 6, 8)
W = torch.zeros(8, 8)


def reduced(x: Tensor, w: Tensor) -> Tensor:
    """A sum over the ranks of a product with a part of a matrix."""
    return COLLECTIVES.all_reduce((x.view(24, 8) @ w).view(4, 6, 8), "sum", GROUP)  # type: ignore[no-any-return]


def forms(function: Any, *inputs: Tensor) -> tuple[str, ...]:
    graph = traced(function, *inputs)
    decision = shard.decide(graph, SEQUENCE)
    on_shards(graph)
    return decision.regions[0][3] if decision.regions else ()


def test_rows_are_told_by_where_they_come_from_and_not_by_sizes() -> None:
    square = torch.zeros(8)

    def step(x: Tensor, w: Tensor, gain: Tensor) -> Tensor:
        y = COLLECTIVES.all_reduce(x @ w, "sum", GROUP) * gain  # 8 tokens of width 8
        return y @ y

    split_values = forms(step, W, W, square)
    assert split_values == ("all_reduce", "mul")


def test_what_differs_from_rank_to_rank_is_never_cut() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        y = reduced(x, w).relu()
        return COLLECTIVES.all_reduce(y / 2 + (y.view(24, 8) @ w).view(4, 6, 8), "sum", GROUP) * 2

    graph = traced(step, X, W)
    sharded = on_shards(graph)
    inputs = [[torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)), torch.randn(8, 8)] for _ in range(2)]
    (one,), (two,) = run_ranks(sharded, inputs)
    (wanted,), _ = run_ranks(graph, inputs)
    assert torch.allclose(one, wanted, atol=1e-5)
    assert torch.equal(one, two)


def test_an_all_reduce_of_gradients_alone_stays() -> None:
    assert forms(lambda x, w: reduced(x, w), X, W) == ()


def test_tables_that_are_repeated_for_every_sequence_are_cut_behind_that() -> None:
    table = torch.randn(6, 8)

    def step(x: Tensor, w: Tensor, positions: Tensor) -> Tensor:
        return (reduced(x, w) + positions).relu().transpose(0, 1) @ w

    graph = traced(step, X, W, table)
    sharded = on_shards(graph)
    inputs = [[torch.ones(4, 6, 8), torch.randn(8, 8), table] for _ in range(2)]
    (wanted,), (other,) = run_ranks(graph, inputs)
    (one,), (two,) = run_ranks(sharded, inputs)
    assert torch.equal(one, wanted)
    assert torch.equal(two, other)
    assert "own_part" in str(sharded.graph)


def test_values_that_are_written_in_place_stay_whole() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        y = reduced(x, w)
        z = y.relu()
        z.view(24, 8).add_(1)
        return z.exp().view(24, 8) @ w

    assert "relu" not in forms(step, X, W)


SPLIT = {
    "numbers of sequences": lambda v, table: v * torch.arange(4.0).view(4, 1, 1),
    "numbers of places": lambda v, table: v * table.sum(-1, keepdim=True),
    "means of sequences": lambda v, table: v * v.mean((1, 2), keepdim=True),
    "differences": lambda v, table: F.mse_loss(v, table.expand(4, 6, 8), reduction="none"),
    "differences of the mean": lambda v, table: v * F.mse_loss(v, v.sin()),
    "sums that are read before a view of them": lambda v, table: v * (s := v.sum()).cos() + s.view(1),
    "rectified gradients": lambda v, table: aten.leaky_relu_backward(v, v, 0.1, self_is_result=False),
    "rows of a table by a value's sign": lambda v, table: v * F.embedding((v.sum(-1) > 0).long(), table).cos(),
    "gates' gradients": lambda v, table: aten.hardswish_backward(v, v),
}


@pytest.mark.parametrize("name", SPLIT)
def test_operators_on_shards_give_what_they_gave(name: str) -> None:
    def step(x: Tensor, part: Tensor, table: Tensor) -> Tensor:
        return SPLIT[name](reduced(x, part).relu(), table).tanh()

    assert_same_on_shards(step, X, W, torch.zeros(6, 8))


WHOLE: dict[str, Any] = {
    "places side by side": lambda v, table, own: v.view(4, 6, 2, 4).clone(memory_format=torch.channels_last),
    "sums over sequences": lambda v, table, own: v + v.sum(0, keepdim=True),
    "softmax over places": lambda v, table, own: v.softmax(1),
    "a norm whose weight each rank has for itself": lambda v, table, own: F.layer_norm(v, (8,), own[0]),
    "dropout of everything": lambda v, table, own: torch.native_dropout(v, 1.0, True)[0] + v,
    "rows of a table that each rank has for itself": lambda v, table, own: F.embedding(v.argmax(-1), own),
    "a product with a part that is doubled": lambda v, table, own: torch.addmm(
        table[0], v.view(24, 8), torch.outer(table[0], table[1]), beta=2
    ),
    "a product with a row for each token": lambda v, table, own: torch.addmm(
        table.repeat(4, 1), v.view(24, 8), torch.outer(table[0], table[1])
    ),
    "a product with a bias that each rank has for itself": lambda v, table, own: torch.addmm(
        own[0], v.view(24, 8), torch.outer(table[0], table[1])
    ),
    "class weights that each rank has for itself": lambda v, table, own: F.nll_loss(
        v.view(24, 8), table.argmax(-1).repeat(4), own[0].abs() + 1
    ),
    "classes of fewer tokens": lambda v, table, own: F.nll_loss(v.permute(0, 2, 1), table.argmax(-1).repeat(4, 1)),
    "remainders of integers": lambda v, table, own: v * torch.remainder(7, (v > 0).long() + 1),
    "rows of other lengths": lambda v, table, own: v.view(3, 64),
    "repeated in front": lambda v, table, own: v[None].expand(3, 4, 6, 8),
    "every other place": lambda v, table, own: v[:, ::2],
    "sums by another name": lambda v, table, own: v * aten.alias(v.sum((0, 1))),
    "norms of sums": lambda v, table, own: v + F.layer_norm(v.view(24, 8).t() @ v.view(24, 8), (8,)).sum(0),
    "a larger type of a sum": lambda v, table, own: v + (v.sum((0, 1)) + table[0].double()).float(),
}
"""What needs more than the rows of a rank, or other rows on each."""


@pytest.mark.parametrize("name", WHOLE)
def test_operators_that_need_more_than_their_rows_give_what_they_gave(name: str) -> None:
    def step(x: Tensor, part: Tensor, table: Tensor) -> Tensor:
        return WHOLE[name](reduced(x, part).relu(), table, part).tanh()

    assert_same_on_shards(step, X, W, torch.zeros(6, 8))


def test_integers_are_divided_on_all_ranks_alike() -> None:
    """A divisor of 0 raises, and must do so on all of them."""

    def step(x: Tensor, part: Tensor) -> Tensor:
        return reduced(x, part).relu() * torch.remainder(7, (x > 0).long() + 1)

    assert not {"remainder"}.intersection(forms(step, X, W))


def test_a_sum_over_the_ranks_that_is_made_twice_keeps_its_order() -> None:
    """Such as that of a layer that runs twice on one value."""

    def step(x: Tensor, part: Tensor) -> Tensor:
        first = reduced(x, part).relu()
        second = reduced(first, part).relu()
        return reduced(x, part).cos() + second

    assert_same_on_shards(step, X, W)


def assert_same_on_shards(step: Any, x: Tensor, part: Tensor, *shared: Tensor) -> None:
    """Run ``step`` on two ranks that have parts of their own, as captured and on shards, and compare."""
    graph = traced(step, x, part, *shared)
    sharded = on_shards(graph)
    assert "reduce_scatter" in str(sharded.graph)
    torch.manual_seed(0)
    same = [torch.randn_like(tensor) for tensor in (x, *shared)]
    inputs = [[same[0], torch.randn_like(part), *same[1:]] for _ in range(2)]
    for (wanted,), (output,) in zip(run_ranks(graph, inputs), run_ranks(sharded, inputs), strict=True):
        assert torch.allclose(output, wanted, rtol=1e-4, atol=1e-5)


def random_step(choice: random.Random) -> Any:
    """Operators of all families on sums over the ranks, whole tensors and tables, and readers of the whole."""

    def step(x: Tensor, part: Tensor, gain: Tensor, table: Tensor) -> Tensor:
        values = [x, reduced(x, part)]
        for _ in range(choice.randrange(3, 9)):
            value, other = choice.choice(values[1:]), choice.choice(values)
            operations = [
                lambda v=value: v.relu(),
                lambda v=value, o=other: v + o,
                lambda v=value: v * gain,
                lambda v=value: v + table,
                lambda v=value: F.layer_norm(v, (8,), gain),
                lambda v=value: v.view(24, 8).view(4, 6, 2, 4).softmax(-1).view(4, 6, 8),
                lambda v=value: v - v.mean(-1, keepdim=True),
                lambda v=value: v * v.transpose(0, 1).reshape(4, 6, 8),
                lambda v=value: v + v.sum((0, 1)),
                lambda v=value: v + v.sum(),
                lambda v=value: v * v.amax(1, keepdim=True),
                lambda v=value: reduced(v, part),
                lambda v=value: reduced(v, part) + reduced(v.sin(), part),
                lambda v=value: v[:, :, :4].repeat(1, 1, 2),
                lambda v=value: v @ torch.outer(gain, gain),
                lambda v=value: torch.addmm(gain, v.view(24, 8), torch.outer(gain, gain)).view(4, 6, 8),
                lambda v=value, o=other: v * (o.view(24, 8).t() @ v.view(24, 8)).sum(0),
                lambda v=value: (v @ gain.view(8, 1)) * v.logsumexp(-1, keepdim=True) + v,
                lambda v=value: v.to(torch.float64).cos().to(torch.float32),
            ]
            values.append(choice.choice(operations)().tanh())
        return torch.stack(values[1:]).sum(0)

    return step


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_on_shards_give_what_they_gave(seed: int) -> None:
    choice = random.Random(seed)
    tensors = (X, W, torch.zeros(8), torch.zeros(6, 8))
    graph = traced(random_step(choice), *tensors)
    sharded = on_shards(graph)
    torch.manual_seed(seed)
    shared = [torch.randn_like(tensor) for tensor in tensors]
    inputs = [[shared[0], torch.randn(8, 8) / 3, *shared[2:]] for _ in range(2)]
    for (wanted,), (output,) in zip(run_ranks(graph, inputs), run_ranks(sharded, inputs), strict=True):
        assert torch.allclose(output, wanted, rtol=1e-4, atol=1e-4), seed


def test_what_a_loss_adds_up_for_each_token_is_no_activation() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        rows = COLLECTIVES.all_reduce(x[0] @ w, "sum", GROUP)
        whole = COLLECTIVES.all_reduce(x @ w, "sum", GROUP)
        return rows, whole, COLLECTIVES.all_reduce(x.exp().sum(-1), "sum", GROUP)

    graph = traced(step, torch.zeros(4, 6, 8), torch.zeros(8, 8))
    sums = [node for node in operators(graph.graph) if node.target is COLLECTIVES.all_reduce.default]
    assert [choose.is_source(node) for node in sums] == [True, True, False]
