"""The judges refuse, by name, whatever is wrong with a value that is decoded from others beside its code."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from roamc.errors import PlanError, VerifyError
from roamc.graph import Phase, Port, Role, TrainGraph, copied, output_node, value_flow, verify
from roamc.graph.rewrite import value_of
from roamc.graph.storage_ids import number_result
from roamc.graph.value_numbers import Flow, Numbers
from roamc.passes.retain import Code, codecs, compress
from roamc.passes.retain.codecs import Codec, Kind
from roamc.passes.retain.compress import MARK
from tests.graphs import aten, node_calling, traced
from tests.passes.retain.beside import SIGNED, UNSOFT, Soft
from tests.passes.retain.test_compress import ROUTES, cleaned, squares

NAMES = ("signed", "unsoft")
CHAIN = ("addmm", "addmm_1", "addmm_2")
"""The storages that are decoded: inputs of softplus, whose outputs are ``softplus``, ``softplus_1`` and so on."""


@pytest.fixture(autouse=True)
def _in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "CODECS", (*codecs.CODECS, UNSOFT, SIGNED))


@functools.cache
def captured(route: str, keep: bool) -> TrainGraph:
    torch.manual_seed(0)
    return cleaned(Soft(width=8, layers=3, keep=keep), (torch.randn(8, 8),), squares, route)[0]


@dataclass
class Written:
    """A graph with codecs, and the nodes that a fault changes.

    Attributes:
        graph: the graph.
        nodes: name of a node to the node.
        decoded: what is decoded of each of ``CHAIN``.
        readers: the operator of backward that reads each.
    """

    graph: TrainGraph

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.graph.graph.nodes}
        self.readers = [node_calling(self.graph, aten.softplus_backward.default, 2 - at) for at in range(3)]
        self.decoded: list[fx.Node] = [reader.args[1] for reader in self.readers]  # type: ignore[misc]

    def steps(self, role: str, storage: str) -> list[fx.Node]:
        """The nodes that encode or decode a storage."""
        marked = (node for node in self.nodes.values() if MARK in node.meta)
        return [node for node in marked if node.meta[MARK].role == role and node.meta[MARK].storage == storage]

    def decode(self, at: int, reads: str) -> fx.Node:
        """The node that decodes storage ``at`` of the chain and reads the node called ``reads``."""
        return next(n for n in self.steps("decode", CHAIN[at]) if self.nodes[reads] in n.all_input_nodes)

    def call(self, before: fx.Node, target: Any, *args: Any, phase: Phase = Phase.BACKWARD, **named: Any) -> fx.Node:
        """Insert a call in front of ``before``."""
        with self.graph.graph.inserting_before(before):
            node = self.graph.graph.call_function(target, args, named)
        tensors, keywords = fx.map_arg((args, named), value_of)
        with tensors[0].fake_mode:
            node.meta["val"] = target(*tensors, **keywords)
        if node.meta["val"] is not tensors[0]:
            number_result(node)
        else:
            node.meta |= {key: args[0].meta[key] for key in args[0].meta if key != "val"}
        self.graph = self.graph.replace(phase={**self.graph.phase, node.name: phase})
        return node

    def encoding(self, at: int, **changes: Any) -> TrainGraph:
        """The graph with another encoding of storage ``at`` of the chain."""
        rows = (replace(e, **changes) if e.storage == CHAIN[at] else e for e in self.graph.encodings)
        return self.graph.replace(encodings=tuple(rows))


def written(route: str, codec: str = "signed", keep: bool = True) -> tuple[Written, Flow]:
    graph = copied(captured(route, keep))
    flow = value_flow.read(graph, Numbers())
    return Written(compress(graph, [Code(name, codec) for name in CHAIN])), flow


Fault = Callable[[Written], TrainGraph | None]
FAULTS: dict[str, tuple[Fault, str]] = {}


def fault(says: str) -> Callable[[Fault], Fault]:
    """Note a fault, and what the judge says of it."""

    def noted(function: Fault) -> Fault:
        FAULTS[function.__name__] = function, says
        return function

    return noted


@fault("softplus_backward.*would read")
def output_of_another_layer_is_read(w: Written) -> None:
    w.decode(0, "softplus").replace_input_with(w.nodes["softplus"], w.nodes["softplus_1"])


@fault("codec 'signed' makes addmm from softplus_1, which is not made from it")
def output_of_another_layer_is_named_and_read(w: Written) -> TrainGraph:
    w.decode(0, "softplus").replace_input_with(w.nodes["softplus"], w.nodes["softplus_1"])
    return w.encoding(0, beside=("softplus_1",))


@fault("codec 'signed' makes addmm_1 from softplus, which is not made from it")
def output_of_an_earlier_layer_is_named_and_read(w: Written) -> TrainGraph:
    w.decode(1, "softplus_1").replace_input_with(w.nodes["softplus_1"], w.nodes["softplus"])
    return w.encoding(1, beside=("softplus",))


@fault("softplus_backward.*would read")
def nothing_is_named_beside(w: Written) -> TrainGraph:
    return w.encoding(0, beside=())


@fault("softplus_backward.*would read")
def a_storage_that_is_not_there_is_named(w: Written) -> TrainGraph:
    return w.encoding(0, beside=("nowhere",))


@fault("codec 'signed' makes addmm from softplus, which mul_.* writes")
def output_is_overwritten_in_front_of_the_decode(w: Written) -> None:
    w.call(w.steps("decode", "addmm")[0], aten.mul_.Tensor, w.nodes["softplus"], 3)


@fault("codec 'signed' makes addmm from softplus, which mul_.* writes")
def output_is_overwritten_in_forward(w: Written) -> None:
    w.call(w.nodes["softplus"].next, aten.mul_.Tensor, w.nodes["softplus"], 3, phase=Phase.FORWARD)


@fault("addmm_decode.* is a view of addmm_1_encode.*, and lies in another storage")
def code_of_another_storage_is_read(w: Written) -> None:
    codes = [w.steps("encode", storage)[-1] for storage in CHAIN]
    for node in w.steps("decode", "addmm"):
        node.replace_input_with(codes[0], codes[1])


@fault("softplus_backward.*would read")
def another_storage_is_encoded(w: Written) -> None:
    w.steps("encode", "addmm_1")[0].replace_input_with(w.nodes["addmm_1"], w.nodes["addmm"])


@fault("addmm|softplus_backward")
def another_storage_is_named(w: Written) -> TrainGraph:
    return w.encoding(0, storage="addmm_1")


@fault("softplus_backward.*would read")
def encoding_is_not_named(w: Written) -> TrainGraph:
    return w.graph.replace(encodings=w.graph.encodings[1:])


@fault("softplus_backward.*would read")
def decoded_value_of_another_layer_is_read(w: Written) -> None:
    w.readers[0].replace_input_with(w.decoded[0], w.decoded[1])


@fault("softplus_backward.*would read")
def output_is_read_in_place_of_the_decoded_value(w: Written) -> None:
    w.readers[1].replace_input_with(w.decoded[1], w.nodes["softplus_1"])


@fault("softplus_backward.*would read")
def half_of_the_decode_is_left_out(w: Written) -> None:
    w.readers[1].replace_input_with(w.decoded[1], w.decoded[1].args[2])  # type: ignore[arg-type]


@fault("softplus_backward.*would read")
def decode_has_another_operator(w: Written) -> None:
    w.decode(1, "softplus_1").target = aten.exp.default


@fault("softplus_backward.*would read")
def encode_has_another_number(w: Written) -> None:
    first = w.steps("encode", "addmm")[0]
    first.args = (first.args[0], 1)


@fault("softplus_backward.*would read")
def encoding_says_another_decode(w: Written) -> TrainGraph:
    (other,) = (e.decode for e in written("step", "unsoft")[0].graph.encodings[:1])
    return w.encoding(0, decode=other)


@fault("codec 'signed' makes addmm from softplus, which mul_.* writes")
def output_is_overwritten_behind_the_decode(w: Written) -> None:
    w.call(w.readers[0], aten.mul_.Tensor, w.nodes["softplus"], 3)


@fault("softplus_backward.*would read")
def output_gives_its_memory_away(w: Written) -> TrainGraph:
    """To a result of backward that is written over it in front of the decode."""
    over = w.call(w.decode(0, "softplus"), aten.neg.default, w.nodes["softplus"])
    return w.graph.replace(reuse={**w.graph.reuse, over.name: 0})


@fault("softplus_backward.*would read")
def rounded_copy_of_the_output_is_read(w: Written) -> None:
    decode = w.decode(0, "softplus")
    half = w.call(decode, aten._to_copy.default, w.nodes["softplus"], dtype=torch.bfloat16)
    whole = w.call(decode, aten._to_copy.default, half, dtype=torch.float32)
    decode.replace_input_with(w.nodes["softplus"], whole)


@fault("softplus_backward.*would read")
def output_with_another_slope_is_read(w: Written) -> None:
    decode = w.decode(0, "softplus")
    other = w.call(decode, aten.softplus.default, w.nodes["addmm"], 2)
    decode.replace_input_with(w.nodes["softplus"], other)


@fault("softplus_backward.*would read")
def output_is_read_in_another_order(w: Written) -> None:
    decode = w.decode(0, "softplus")
    decode.replace_input_with(w.nodes["softplus"], w.call(decode, aten.t.default, w.nodes["softplus"]))


@fault(
    "softplus_backward.* reads addmm_2 as 'slope', decoded by codec 'signed', which errs and serves 'weight', 'norm'"
)
def reader_is_of_a_kind_that_is_not_served(w: Written) -> TrainGraph:
    return w.encoding(2, serves=frozenset({Kind.WEIGHT, Kind.NORM}))


@fault("softplus_backward.* reads addmm as 'slope', decoded by codec 'signed', which errs and serves none")
def no_kind_is_served(w: Written) -> TrainGraph:
    return w.encoding(0, serves=frozenset())


@fault("abs.* reads addmm as 'any', decoded by codec 'signed', which errs and serves 'slope'")
def operator_of_no_kind_reads_it_too(w: Written) -> None:
    w.call(w.readers[0].next, aten.abs.default, w.decoded[0])


@fault("softplus_.* reads addmm as 'any', decoded by codec 'signed', which errs and serves 'slope'")
def rerun_of_the_output_reads_it(w: Written) -> None:
    """What is made of it is no longer known to err: the weight gradient behind it has the number that it had."""
    (late,) = (
        n for n in w.nodes["softplus"].users if w.graph.phase[n.name] is Phase.BACKWARD and "decode" not in n.name
    )
    for step in w.steps("decode", "addmm"):
        late.prepend(step)
    again = w.call(late, aten.softplus.default, w.decoded[0])
    late.replace_input_with(w.nodes["softplus"], again)


@fault("output reads addmm as 'any', decoded by codec 'signed'")
def it_is_returned(w: Written) -> TrainGraph:
    end = output_node(w.graph.graph)
    end.args = ((*end.args[0], w.decoded[0]),)  # type: ignore[misc]
    return w.graph.replace(outputs=(*w.graph.outputs, Port("more", Role.OUTPUT, Phase.BACKWARD)))


@fault("reads addmm as 'any', decoded by codec 'signed', which errs and serves 'slope'")
def copy_of_it_is_read_as_another_kind(w: Written) -> None:
    copy = w.call(w.readers[0], aten.clone.default, w.decoded[0])
    w.readers[0].replace_input_with(w.decoded[0], copy)
    w.call(w.readers[0].next, aten.abs.default, copy)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_refused_by_name(name: str, route: str) -> None:
    plant, says = FAULTS[name]
    w, flow = written(route)
    value_flow.check(w.graph, flow, "retain", NAMES)
    graph = plant(w) or w.graph
    with pytest.raises(VerifyError) as caught:
        value_flow.check(graph, flow, "broken", NAMES)
    text = str(caught.value)
    assert "after pass 'broken'" in text
    assert re.search(says, text), text


# -- faults of graphs that are made for them ----------------------------------------------------------


def test_decode_in_front_of_what_is_beside() -> None:
    w, _ = written("joint")
    kept = verify.constraints(w.graph)
    verify.check_graph(w.graph, "retain", kept)
    for step in w.steps("decode", "addmm"):
        w.nodes["softplus"].prepend(step)
    with pytest.raises(VerifyError, match=r"Argument 'softplus' of Node 'addmm_decode' was used before"):
        verify.check_graph(w.graph, "broken", kept)


def test_codec_that_nobody_allows() -> None:
    w, flow = written("step")
    with pytest.raises(VerifyError, match="addmm is kept by codec 'signed', which has an error of 1e-05: allow it"):
        value_flow.check(w.graph, flow, "broken", ["unsoft"])


def returned(*, more: bool) -> TrainGraph:
    """A weight gradient that updates a weight, and is returned as well if asked for."""

    def step(w: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(x)
        y = h @ w
        gradient = h.t() @ g
        w.sub_(gradient)
        return (y, gradient * 1) if more else (y,)

    w, x, g = torch.randn(8, 8), torch.randn(64, 8), torch.randn(64, 8)
    graph = traced(step, w, x, g, phases="FFBBU" + "B" * more)
    ports = (Port("w", Role.PARAMETER), *graph.inputs[1:])
    return graph.replace(inputs=ports)


def in_bf16(saved: codecs.Saved) -> InBf16 | None:
    return InBf16() if saved.node.target is aten.tanh.default else None


@dataclass(frozen=True)
class InBf16(codecs.Coding):
    """Keeps 64 rows of 8 floats in 16 bits each."""

    error, nbytes = 2.0**-8, 64 * 8 * 2
    serves: frozenset[Kind] = frozenset({Kind.WEIGHT})

    def encode(self, value: Tensor) -> Tensor:
        code: Tensor = aten._to_copy.default(value, dtype=torch.bfloat16)
        return code

    def decode(self, code: Tensor, /, *_: Tensor) -> Tensor:
        value: Tensor = aten._to_copy.default(code, dtype=torch.float32)
        return value


HALVED = Codec("halved", in_bf16, lossy=True)


def claimed(graph: TrainGraph) -> tuple[TrainGraph, Flow]:
    """With a codec that takes any reader, and then says that it serves weights alone."""
    flow = value_flow.read(graph, Numbers())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(codecs, "CODECS", [replace(HALVED, fit=lambda _: InBf16(frozenset(Kind)))])
        coded = compress(copied(graph), [Code("tanh", "halved")])
    return coded.replace(encodings=tuple(replace(each, serves=InBf16().serves) for each in coded.encodings)), flow


def test_weight_gradient_that_only_updates_read_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "CODECS", (HALVED,))
    graph = returned(more=False)
    flow = value_flow.read(graph, Numbers())
    value_flow.check(compress(graph, [Code("tanh", "halved")]), flow, "retain", ["halved"])


@pytest.mark.parametrize(("more", "role"), [(True, Role.PARAMETER), (False, Role.BUFFER), (False, Role.INPUT)])
def test_weight_gradient_that_is_also_returned_or_updates_something_else(
    more: bool, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "CODECS", (HALVED,))
    graph = returned(more=more)
    graph = graph.replace(inputs=(Port("w", role), *graph.inputs[1:]))
    with pytest.raises(PlanError, match="'halved' does not fit tanh: mm_1 reads it as 'any', which this codec"):
        compress(copied(graph), [Code("tanh", "halved")])
    coded, flow = claimed(graph)
    says = r"mm_1 reads tanh as 'any', decoded by codec 'halved', which errs and serves 'weight'"
    with pytest.raises(VerifyError, match=says):
        value_flow.check(coded, flow, "broken", ["halved"])
