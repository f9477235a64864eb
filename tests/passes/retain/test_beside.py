"""Codecs that read other values beside their code: what they write, what they offer, and when they are taken."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc import cost
from roamc.errors import PlanError
from roamc.graph import Role, TrainGraph, placeholders, value_flow, verify
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.graph.reader_kinds import ReaderKinds
from roamc.graph.value_numbers import Numbers
from roamc.options import Options, parse_options
from roamc.passes import normalize
from roamc.passes.retain import Choice, Code, codecs, compress
from roamc.passes.retain.fits import codings, values
from roamc.planning import search
from roamc.rewriting.rerun import rerun
from tests.graphs import aten, clones, graph_and_inputs, node_calling, run_real, traced
from tests.passes.retain.beside import ERROR, SIGNED, UNNORM, UNSOFT, inverse, normal, soft
from tests.passes.retain.test_codecs import late_graph
from tests.passes.retain.test_compress import ROUTES, cleaned, squares
from tests.passes.retain.test_offers import difference, some_sets
from tests.passes.retain.test_search import PROFILE
from tests.rewriting.cases import At, named

NAMES = ("unsoft", "signed")


def fit_halves(saved: codecs.Saved) -> Halves | None:
    return Halves() if saved.node.target is aten.softplus.default else None


@dataclass(frozen=True)
class Halves(codecs.Coding):
    error, serves, nbytes = 2.0**-8, frozenset(codecs.Kind), 512 * 64 * 2

    def encode(self, value: Tensor, /, *_: Tensor) -> Tensor:
        code: Tensor = aten._to_copy.default(value, dtype=torch.bfloat16)
        return code

    def decode(self, code: Tensor, /, *_: Tensor) -> Tensor:
        value: Tensor = aten._to_copy.default(code, dtype=torch.float32)
        return value


HALVES = codecs.Codec("halves", fit_halves, lossy=True)


@pytest.fixture(autouse=True)
def _in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "CODECS", (*codecs.CODECS, UNSOFT, SIGNED, UNNORM))


def captured(route: str, *, keep: bool = True) -> tuple[TrainGraph, list[Any]]:
    model, x = soft(keep=keep)
    return cleaned(model, (x,), squares, route)


def inputs_of(graph: TrainGraph) -> list[str]:
    """The storages of forward that the codecs of this file can make from others."""
    return fitted(graph, "unsoft")


def fitted(graph: TrainGraph, *names: str) -> list[str]:
    """The storages that one of the lossy codecs called ``names`` fits."""
    memory, kinds = build_memory(graph), ReaderKinds(graph)
    return [v.storage.name for v in values(memory) if dict(codings(v, names, kinds)).keys() & {*names}]


def check(
    graph: TrainGraph, inputs: list[Any], change: Callable[[TrainGraph], TrainGraph], lossy: Sequence[str] = NAMES
) -> TrainGraph:
    """Run before and after: forward is the same, gradients are nearly so, all bytes are foreseen, the judge agrees."""
    used, again = clones(inputs), clones(inputs)
    expected, _ = run_real(graph, used)
    kept, flow = verify.constraints(graph), value_flow.read(graph, Numbers())
    after = change(graph)
    verify.check_graph(after, "retain", kept, deep=True)
    value_flow.check(after, flow, "retain", lossy)
    got, measured = run_real(after, again)
    for one, other in zip([*expected, *used], [*got, *again], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)
    assert torch.equal(got[0], expected[0])
    assert measured == live_bytes(build_memory(after)).tolist()
    return after


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_made_from_what_is_beside_them(name: str, route: str) -> None:
    graph, inputs = captured(route)
    storages = inputs_of(graph)
    assert len(storages) == 4
    after = check(graph, inputs, lambda graph: compress(graph, [Code(storage, name) for storage in storages]))
    saved = {storage.name: storage.nbytes for storage in build_memory(after).saved}
    assert saved.keys().isdisjoint(storages)
    assert {encoding.beside for encoding in after.encodings} <= {(name,) for name in saved}
    codes = 4 * (4 if name == "unsoft" else 512 * 64 // 8)
    assert (
        sum(saved.values()) == sum(s.nbytes for s in build_memory(captured(route)[0]).saved) - 4 * 512 * 64 * 4 + codes
    )


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NAMES)
def test_a_rerun_of_what_is_beside_is_the_same_value(name: str, route: str) -> None:
    """Also where nobody reads the first run behind forward, and where the first run is gone."""
    graph, inputs = captured(route, keep=False)
    storages = inputs_of(graph)

    def change(graph: TrainGraph) -> TrainGraph:
        coded = compress(graph, [Code(storage, name) for storage in storages])
        beside = {encoding.storage: encoding.beside[0] for encoding in coded.encodings}
        decoders = {}
        for node in coded.graph.nodes:
            if "code" in node.meta and node.meta["code"].role == "decode":
                decoders.setdefault(beside[node.meta["code"].storage], node.name)
        return rerun(coded, named(coded, [At(reader, y, (y,)) for y, reader in decoders.items()]))

    after = check(graph, inputs, change)
    assert sum("again" in node.meta for node in after.graph.nodes) == 4


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_beside_may_have_a_code_of_its_own(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read itself all the same, and waits whole."""
    monkeypatch.setattr(codecs, "CODECS", (*codecs.CODECS, HALVES))
    graph, inputs = captured(route, keep=False)
    storages, flow = inputs_of(graph), value_flow.read(graph, Numbers())
    outputs = fitted(graph, "halves")
    after = compress(graph, [*(Code(x, "signed") for x in storages), *(Code(y, "halves") for y in outputs)])
    value_flow.check(after, flow, "retain", [*NAMES, "halves"])
    beside = {name for encoding in after.encodings for name in encoding.beside}
    assert beside & set(outputs)
    assert beside <= {storage.name for storage in build_memory(after).saved}
    _, measured = run_real(after, inputs)
    assert measured == live_bytes(build_memory(after)).tolist()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_offers_are_what_codecs_write(route: str, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what is beside a value has a code of its own."""
    monkeypatch.setattr(codecs, "CODECS", (*codecs.CODECS, HALVES))
    graph, _ = captured(route, keep=keep)
    order = [op.node.name for op in build_memory(graph).operators]
    options = Options(memory_budget="min", codecs=(*NAMES, "halves"))
    choice = Choice(graph, options, order, PROFILE, cost.prices(graph, PROFILE))
    assert {code.codec for code in choice.codes} >= {*NAMES} | ({"halves"} if not keep else set())
    places = {
        code.storage: [at for at, one in enumerate(choice.codes) if one.storage == code.storage]
        for code in choice.codes
    }
    dice = random.Random(0)
    for some in some_sets(len(places), dice):
        taken = tuple(sorted(dice.choice(list(places.values())[at]) for at in some))
        assert difference(choice.search.encoded(taken).problem, choice.written(taken).problem) == [], taken


@pytest.mark.parametrize("keep", [True, False])
def test_taken_where_the_output_is_kept_and_not_where_it_is_made_again(keep: bool) -> None:
    """Softplus runs again for less than its input is decoded for from a code, and its output need not wait."""
    graph, _ = captured("step", keep=keep)
    exact = search.run(graph, parse_options({"memory_budget": "light"})).plan
    plan = search.run(
        captured("step", keep=keep)[0], parse_options({"memory_budget": "light", "codecs": "signed"})
    ).plan
    used = [code for code in plan.decisions["retain"]["codes"] if code[1] in NAMES]
    assert bool(used) is keep
    if keep:
        assert plan.needed_bytes < 0.8 * exact.needed_bytes
    else:
        assert plan.needed_bytes == exact.needed_bytes


@pytest.mark.parametrize("route", ROUTES)
def test_parameters_may_be_beside_a_value(route: str) -> None:
    """Updates write them behind the readers of the value, which read them as well."""
    model, x = normal()
    graph, inputs = graph_and_inputs(model, (x,), squares, route, torch.optim.SGD)
    graph = normalize.apply(graph, normalize.decide(graph, Options()))
    storages = fitted(graph, "unnorm")
    assert len(storages) == 4
    after = check(graph, inputs, lambda graph: compress(graph, [Code(name, "unnorm") for name in storages]), ["unnorm"])
    ports = dict(zip((node.name for node in placeholders(after.graph)), after.inputs, strict=True))
    for encoding in after.encodings:
        norm = encoding.beside[0].partition("#")[0]
        assert encoding.beside[:3] == tuple(f"{norm}#{at}" for at in range(3))
        assert {ports[name].role for name in encoding.beside[3:]} == {Role.PARAMETER}


@pytest.mark.parametrize("route", ROUTES)
def test_offers_with_parameters_are_what_codecs_write(route: str) -> None:
    """But for the update behind the readers, which the decode has to run in front of as well as they."""
    model, x = normal()
    graph = cleaned(model, (x,), squares, route)[0]
    order = [op.node.name for op in build_memory(graph).operators]
    options = Options(memory_budget="min", codecs=("unnorm",))
    choice = Choice(graph, options, order, PROFILE, cost.prices(graph, PROFILE))
    assert len(choice.codes) == 4
    implied = {"expires", "dependencies"} if route == "step" else set()
    for taken in some_sets(4, random.Random(0)):
        assert set(difference(choice.search.encoded(taken).problem, choice.written(taken).problem)) == implied


MODELS = {"signed": soft, "unsoft": soft, "unnorm": normal}


@pytest.mark.parametrize("way", ["compile", "optimize", "train_step"])
@pytest.mark.parametrize("name", MODELS)
def test_every_way_in_gives_the_gradients(name: str, way: str) -> None:
    eager, x = MODELS[name]()
    model = copy.deepcopy(eager)
    options = {"memory_budget": "light", "codecs": name, "strict": True}
    before = {key: value.clone() for key, value in eager.named_parameters()}
    if way == "train_step":
        one, two = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (eager, model))
        loss, expected = roamc.train_step(model, squares, two, **options)(x), squares(eager, x)
        expected.backward()
        one.step()
    else:
        run = (
            torch.compile(model, backend="roamc", options=options)
            if way == "compile"
            else roamc.optimize(model, **options)
        )
        loss, expected = squares(run, x), squares(eager, x)
        loss.backward()
        expected.backward()
    got, wanted = (
        {key: before[key] - value if way == "train_step" else value.grad for key, value in each.named_parameters()}
        for each in (model, eager)
    )
    assert torch.equal(loss, expected)
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient, rtol=10 * ERROR, atol=10 * ERROR)
    assert any(not torch.equal(got[key], wanted[key]) for key in wanted), "no codec was used"


def written_later(x: Tensor, g: Tensor) -> Tensor:
    h = x * 2
    y = aten.softplus.default(h)
    y.mul_(3)
    return aten.softplus_backward.default(g, h, 1, 20)


def part_of_it(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    y = torch.cat([aten.softplus.default(h), h])
    return aten.softplus_backward.default(g, h, 1, 20), y


def test_what_is_written_later_is_refused_by_name() -> None:
    X = torch.randn(64, 8)
    graph = late_graph(traced(written_later, X, X), {"softplus_backward"})
    (value,) = values(build_memory(graph))
    assert not list(codings(value, NAMES, ReaderKinds(graph)))
    says = "codec 'signed' does not fit mul: softplus, beside it, is written later, by mul_"
    with pytest.raises(PlanError, match=says):
        compress(graph, [Code(value.storage.name, "signed")])


def test_what_is_made_behind_forward_is_refused_by_name() -> None:
    X = torch.randn(64, 8)
    graph = traced(lambda x, g: (aten.softplus_backward.default(g, h := x * 2, 1, 20), aten.softplus.default(h)), X, X)
    late = {node_calling(graph, target).name for target in (aten.softplus_backward.default, aten.softplus.default)}
    graph = late_graph(graph, late)
    (value,) = values(build_memory(graph))
    assert not list(codings(value, NAMES, ReaderKinds(graph)))


def test_inverse_is_one() -> None:
    x = torch.linspace(-6, 15, 1000, dtype=torch.float64)
    torch.testing.assert_close(inverse(nn.functional.softplus(x)), x)
