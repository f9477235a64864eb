"""Codecs in the graph: every legal choice of them leaves every bit as it is, and the bytes are as foreseen."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, value_flow, verify
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.graph.reader_kinds import ReaderKinds
from roamc.graph.value_numbers import Numbers
from roamc.options import Options
from roamc.passes import normalize
from roamc.passes.retain import Code, compress
from roamc.passes.retain.codecs import shapes
from roamc.passes.retain.compress import MARK
from roamc.passes.retain.fits import codings, made_of, values
from roamc.passes.retain.problem import droppable
from roamc.rewriting.rerun import rerun
from tests.graphs import assert_same, aten, clones, graph_and_inputs, model_graph, run_real
from tests.models import NanoGPT, next_token, tokens
from tests.rewriting.cases import At, named, some_reruns

ROUTES = ("step", "joint")


class Pictures(nn.Module):
    """Convolutions, relu in front of pooling and behind it, dropout behind a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
        self.hidden, self.head, self.drop = nn.Linear(12 * 8 * 8, 32), nn.Linear(32, 10), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.relu(F.max_pool2d(self.second(x), 2))
        return self.head(self.drop(F.relu(self.hidden(x.flatten(1)))))


class Attention(nn.Module):
    """Attention that is written out, with dropout of its probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(24, 72), nn.Linear(24, 24), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (4, 6)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(2, 3)).masked_fill(hidden, -math.inf).softmax(3)
        return self.drop(self.out((self.drop(weights) @ v).transpose(1, 2).flatten(2)))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def pictures(*, last: bool = False) -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    """A small network for pictures, with channels last in memory if asked for."""
    torch.manual_seed(0)
    x, model = torch.randn(4, 3, 32, 32), Pictures()
    way = torch.channels_last if last else torch.contiguous_format
    return model.to(memory_format=way), (x.to(memory_format=way),), squares


def attention() -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Attention(), (torch.randn(2, 15, 24),), squares


def gpt() -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return NanoGPT(dropout=0.1), (tokens(),), next_token


MODELS: dict[str, Callable[[], Any]] = {
    "pictures": pictures,
    "channels last": lambda: pictures(last=True),
    "attention": attention,
    "gpt": gpt,
}


def cleaned(model: nn.Module, batch: Any, loss: Any, route: str) -> tuple[TrainGraph, list[Any]]:
    graph, inputs = graph_and_inputs(model, batch, loss, route)
    return normalize.apply(graph, normalize.decide(graph, Options())), inputs


def all_codes(graph: TrainGraph, *, with_results: bool = False) -> list[Code]:
    """For each value that a codec makes smaller, the codec with the fewest bytes; if asked, what can be made of it."""
    codes, kinds = [], ReaderKinds(graph)
    saved = {value.storage.index: value for value in values(build_memory(graph))}
    for value in saved.values():
        fitting = sorted(codings(value, (), kinds), key=lambda pair: pair[1].nbytes if pair[1] else 0)
        for name, _ in fitting[:1]:
            again = made_of(value, name, saved) if with_results else ()
            codes.append(Code(value.storage.name, name, tuple(each.storage.name for each in again)))
    return codes


def check(graph: TrainGraph, inputs: Sequence[Any], change: Callable[[TrainGraph], TrainGraph]) -> TrainGraph:
    """Run before and after: results, written inputs and the generator are the same, and all bytes are foreseen."""
    used, again = clones(inputs), clones(inputs)
    torch.manual_seed(5)
    expected, _ = run_real(graph, used)
    state = torch.get_rng_state()
    kept, flow = verify.constraints(graph), value_flow.read(graph, Numbers())
    after = change(graph)
    verify.check_graph(after, "retain", kept, deep=True)
    value_flow.check(after, flow, "retain")
    torch.manual_seed(5)
    got, measured = run_real(after, again)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same([*expected, *used], [*got, *again], "")
    assert measured == live_bytes(build_memory(after)).tolist()
    return after


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["pictures", "attention", "gpt"])
def test_all_codecs_at_once_leave_every_bit(name: str, route: str) -> None:
    graph, inputs = cleaned(*MODELS[name](), route)
    codes = all_codes(graph)
    wanted = {"pictures": {"bits", "signs", "integers", "shapes"}, "attention": {"bits"}, "gpt": {"bits", "integers"}}
    assert {code.codec for code in codes} == wanted[name]
    saved = {storage.name: storage.nbytes for storage in build_memory(graph).saved}
    after = check(graph, inputs, lambda graph: compress(graph, codes))
    left = {storage.name for storage in build_memory(after).saved}
    assert not left.intersection(code.storage for code in codes)
    assert sum(storage.nbytes for storage in build_memory(after).saved) < sum(saved.values())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["pictures", "attention"])
def test_random_codecs_with_random_reruns_on_top_leave_every_bit(name: str, seed: int, route: str) -> None:
    """What is decoded, and what decodes it, may be dropped and made again like anything else."""
    graph, inputs = cleaned(*MODELS[name](), route)
    every = all_codes(graph, with_results=seed % 2 == 0)
    assert any(code.again for code in every) is (seed % 2 == 0)
    codes = [code for code in every if random.Random(f"{seed} {code[:2]}").random() < 0.6]

    def change(graph: TrainGraph) -> TrainGraph:
        coded = compress(graph, codes)
        return rerun(coded, named(coded, some_reruns(coded, seed, 0.3)))

    check(graph, inputs, change)


@pytest.mark.parametrize("route", ROUTES)
def test_the_value_of_a_second_run_is_encoded_where_nobody_reads_the_first(route: str) -> None:
    graph, inputs = cleaned(*MODELS["pictures"](), route)
    codes = all_codes(graph)

    def change(graph: TrainGraph) -> TrainGraph:
        memory = build_memory(coded := compress(graph, codes))
        by_name = {storage.name: storage for storage in memory.counted}
        makers = [(memory.operators[by_name[c.storage].producer].node.name, by_name[c.storage]) for c in codes]
        may_drop = dict(zip(memory.counted, droppable(memory, memory.counted), strict=True))
        first = [(memory.operators[memory.uses[s.index][0]].node.name, name, s) for name, s in makers if may_drop[s]]
        return rerun(coded, named(coded, [At(before, name, (storage.name,)) for before, name, storage in first]))

    after = check(graph, inputs, change)
    there = {node.name for node in after.graph.nodes}
    gone = [code.storage for code in codes if code.storage.partition("#")[0] not in there]
    assert gone
    assert all(encoding.storage.partition("#")[0] in there for encoding in after.encodings)


def names_of(graph: TrainGraph, target: Any) -> list[str]:
    return [value.storage.name for value in values(build_memory(graph)) if value.saved.node.target is target]


def test_pooling_alone_keeps_nothing_of_its_input() -> None:
    """Pooling of a convolution: its backward looks at the shape; relu behind it reads another value."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(self.conv(x), 2)

    graph, inputs = cleaned(Pooled(), (torch.randn(2, 3, 12, 12),), squares, "step")
    (name,) = names_of(graph, aten.convolution.default)
    assert Code(name, shapes.NAME) in all_codes(graph)
    after = check(graph, inputs, lambda graph: compress(graph, [Code(name, shapes.NAME)]))
    assert name not in {storage.name for storage in build_memory(after).saved}


def test_value_of_a_relu_that_a_product_reads_is_no_sign() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    graph, _ = cleaned(model, (torch.randn(4, 8),), squares, "step")
    assert not any(code.codec == "signs" for code in all_codes(graph))
    (name,) = names_of(graph, aten.relu.default)
    with pytest.raises(PlanError, match="codec 'signs' does not fit relu"):
        compress(graph, [Code(name, "signs")])
    with pytest.raises(PlanError, match="reads elements of relu"):
        compress(graph, [Code(name, shapes.NAME)])


def test_plan_of_another_graph_says_what_is_missing() -> None:
    graph, _ = cleaned(*attention(), "step")
    with pytest.raises(PlanError, match="no storage 'there_is_none' that could be kept smaller"):
        compress(graph, [Code("there_is_none", "bits")])
    with pytest.raises(PlanError, match="there is no codec 'zip'"):
        compress(graph, [Code(all_codes(graph)[0].storage, "zip")])
    with pytest.raises(PlanError, match="in two codes"):
        compress(graph, [all_codes(graph)[0]] * 2)


def test_what_the_user_pinned_is_left_alone() -> None:
    class Pinned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with roamc.keep():
                x = F.dropout(x * 2, 0.5)
            return F.dropout(x * 3, 0.5)

    x = torch.randn(64, 8, requires_grad=True)
    graph, _ = graph_and_inputs(Pinned(), (x,), squares, "joint")
    masks = [op.node.name for op in build_memory(graph).operators if op.node.target is aten.native_dropout.default]
    assert len(masks) == 2
    assert [code.storage for code in all_codes(graph)] == [f"{masks[1]}#1"]


def test_code_and_not_the_value_passes_from_forward_to_backward() -> None:
    graph, _ = cleaned(*attention(), "joint")
    codes = all_codes(graph)
    after = compress(graph, codes)
    crossing = {node.name: node for node in after.graph.nodes if node.name in after.saved}
    encoded = [node for node in crossing.values() if MARK in node.meta]
    assert {node.meta[MARK].storage for node in encoded} == {code.storage for code in codes}
    assert all(after.phase[node.name] is Phase.FORWARD and node.meta["val"].dtype == torch.uint8 for node in encoded)
    assert not any(node.meta["val"].dtype == torch.bool for node in crossing.values())


def test_model_of_the_library_keeps_its_bits() -> None:
    graph, inputs = model_graph("vit", "joint")
    codes = all_codes(graph)
    assert codes
    check(graph, inputs, lambda graph: compress(graph, codes))
