"""Storage ids: who gets which, what copies and reruns do to them, and what the judge of graphs says of wrong ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from roamc.errors import VerifyError
from roamc.graph import Phase, TrainGraph, copied, operators, placeholders
from roamc.graph.memory import build_memory
from roamc.graph.storage_ids import STORAGES, StorageId, id_of, ids_of, lie_in, new_id, number, number_result, renewed
from roamc.graph.verify import check_graph
from roamc.passes.retain.compress import Code, compress
from roamc.rewriting.rerun import rerun
from roamc.rewriting.reruns import Rerun
from tests.graphs import traced

aten = torch.ops.aten
X = torch.randn(4, 4)


def by_name(graph: TrainGraph) -> dict[str, fx.Node]:
    return {node.name: node for node in graph.graph.nodes}


def of(graph: TrainGraph, name: str) -> StorageId:
    return id_of(by_name(graph)[name])


def part_and_rest(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.t().exp(), x.sin().view(16), torch.ops.aten.max.dim(x, 1)[0]


# -- who gets which --------------------------------------------------------------------------------


def test_views_and_picks_lie_in_the_storage_of_their_base() -> None:
    graph = traced(part_and_rest, X)
    nodes = by_name(graph)
    assert of(graph, "t") == of(graph, "x_1")
    assert of(graph, "view") == of(graph, "sin")
    assert ids_of(nodes["getitem"]) == ids_of(nodes["max_1"])[:1]


def test_results_have_storages_of_their_own_with_their_bytes() -> None:
    nodes = by_name(traced(part_and_rest, X))
    storages = [storage for name in ("x_1", "exp", "sin", "max_1") for storage in ids_of(nodes[name])]
    assert len(set(storages)) == 5
    assert [storage.nbytes for storage in storages] == [64, 64, 64, 16, 32]


def test_what_is_written_in_place_keeps_its_storage() -> None:
    graph = traced(lambda x: x.sin().mul_(2), X)
    assert of(graph, "mul_") == of(graph, "sin")


def test_inputs_share_a_storage_where_they_share_memory() -> None:
    graph = traced(lambda x, y, z: x + y + z, X, X.clone(), X.clone())
    first, second, third = placeholders(graph.graph)
    with first.meta["val"].fake_mode:
        second.meta["val"] = first.meta["val"].t()
    number(graph.graph)
    assert id_of(second) == id_of(first)
    assert id_of(third) != id_of(first)


def test_node_without_ids_is_refused() -> None:
    node = next(iter(traced(lambda x: x.sin(), X).graph.nodes))
    del node.meta[STORAGES]
    with pytest.raises(VerifyError, match="x_1 has no storage id"):
        ids_of(node)


@pytest.mark.parametrize(
    ("target", "args", "shares"),
    [
        (aten.t.default, (), True),
        (aten.neg_.default, (), True),
        (aten.neg.default, (), False),
        (aten.reshape.default, ([16],), True),
    ],
)
def test_new_node_has_ids_by_the_table(target: Callable[..., Tensor], args: tuple[object], shares: bool) -> None:
    graph = traced(lambda x: x.sin(), X).graph
    sin = next(node for node in graph.nodes if node.name == "sin")
    with graph.inserting_after(sin):
        new_node = graph.call_function(target, (sin, *args))
    with sin.meta["val"].fake_mode:
        new_node.meta["val"] = target(sin.meta["val"], *args)
    number_result(new_node)
    assert (id_of(new_node) == id_of(sin)) == shares
    assert id_of(new_node).nbytes == 64


def test_copies_of_a_graph_have_the_same_ids() -> None:
    graph = traced(part_and_rest, X)
    assert [ids_of(node) for node in copied(graph).graph.nodes] == [ids_of(node) for node in graph.graph.nodes]


def test_renewed_ids_are_new_and_shared_as_before() -> None:
    one, other = new_id(8), new_id(16)
    first, second, third = renewed((one, other, one))
    assert first == third
    assert len({one, other, first, second}) == 4
    assert (first.nbytes, second.nbytes) == (8, 16)


def test_lie_in_tells_views_from_copies() -> None:
    assert lie_in(X, [X.t(), X[1:]])
    assert not lie_in(X, [X.t(), X.clone()])


# -- what passes do to them ------------------------------------------------------------------------


def reader_in_backward(x: Tensor) -> Tensor:
    y = x.exp()
    return (y.sum() * y.t().sin()).sum()


AGAIN = Rerun("exp_1", "exp", "backward", (("exp", ("sin",)),))


def test_rerun_is_a_new_storage_and_its_views_lie_in_it() -> None:
    graph = rerun(traced(reader_in_backward, X, phases="FFFBBB"), [AGAIN])
    nodes = by_name(graph)
    again = nodes["sin"].all_input_nodes[0]
    assert again.target is aten.t.default
    assert again.args[0] is nodes["exp_1"]
    assert id_of(again) == of(graph, "exp_1") != of(graph, "exp")
    assert of(graph, "exp_1").nbytes == 64


def test_rerun_shares_the_fake_tensors_of_the_first_run() -> None:
    nodes = by_name(rerun(traced(reader_in_backward, X, phases="FFFBBB"), [AGAIN]))
    assert nodes["exp_1"].meta["val"] is nodes["exp"].meta["val"]


@pytest.mark.parametrize("view", [lambda mask: mask.t(), lambda mask: mask.split(2)[1]])
def test_decoded_value_is_a_new_storage_and_its_views_lie_in_it(view: Callable[[Tensor], Tensor]) -> None:
    def masked(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x > 0
        return torch.where(mask, x, 0.0), view(mask).logical_not()

    graph = traced(masked, X)
    late = operators(graph.graph)[-1].name
    graph = compress(graph.replace(phase={**graph.phase, late: Phase.BACKWARD}), [Code("gt", "bits")])
    check_graph(graph, "retain", deep=True)
    (read,) = by_name(graph)[late].all_input_nodes
    decoded = [node for node in graph.graph.nodes if node.name.startswith("gt_decode")]
    assert id_of(read) == id_of(decoded[-1])
    assert id_of(read) != of(graph, "gt")


# -- what the judge says of wrong ones -------------------------------------------------------------


def refused(graph: TrainGraph, says: str) -> None:
    with pytest.raises(VerifyError, match=f"after pass 'broken': {says}"):
        check_graph(graph, "broken")


def test_missing_id() -> None:
    graph = traced(part_and_rest, X)
    by_name(graph)["sin"].meta[STORAGES] = ()
    refused(graph, "sin has 0 storage ids for 1 tensors")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("view", lambda graph: new_id(64)),  # a view that claims to be apart
        ("exp", lambda graph: of(graph, "x_1")),  # a result that claims to lie in its argument
        ("sin", lambda graph: of(graph, "exp")),  # two results that claim to lie in one storage
        ("t", lambda graph: new_id(64)),
    ],
)
def test_id_of_another_storage(name: str, wrong: Callable[[TrainGraph], StorageId]) -> None:
    graph = traced(part_and_rest, X)
    check_graph(graph, "whole")
    by_name(graph)[name].meta[STORAGES] = (wrong(graph),)
    refused(graph, f"{name} lies in another storage than its storage id says")


def test_ids_of_two_results_exchanged() -> None:
    graph = traced(part_and_rest, X)
    node = by_name(graph)["max_1"]
    node.meta[STORAGES] = ids_of(node)[::-1]
    refused(graph, "max_1 lies in another storage")


def test_inputs_that_share_memory_and_no_id() -> None:
    graph = traced(lambda x, y: x + y, X, X.clone())
    first, second = placeholders(graph.graph)
    second.meta["val"] = first.meta["val"]
    refused(graph, "y_1 lies in another storage")


def test_rerun_with_the_ids_of_the_first_run() -> None:
    graph = rerun(traced(reader_in_backward, X, phases="FFFBBB"), [AGAIN])
    nodes = by_name(graph)
    for node in (nodes["exp_1"], nodes["sin"].all_input_nodes[0]):
        node.meta[STORAGES] = ids_of(nodes["exp"])
    refused(graph, "exp_1 lies in another storage")


def test_id_with_the_bytes_of_another() -> None:
    graph = traced(lambda x: x.sin(), X)
    by_name(graph)["sin"].meta[STORAGES] = (new_id(128),)
    refused(graph, "sin lies in another storage")


def test_ids_say_what_memory_says() -> None:
    graph = traced(part_and_rest, X)
    memory = build_memory(graph)
    indices: dict[StorageId, set[int]] = {}
    for node in graph.graph.nodes:
        for position, storage in enumerate(ids_of(node)):
            indices.setdefault(storage, set()).add(memory.owner[node.name, position])
    assert [memory.storages[index].nbytes for (index,) in indices.values()] == [key.nbytes for key in indices]
