"""Pass masks behind pass shard: a rank computes its rows of a mask, and none is drawn for all tokens."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from roamc.errors import VerifyError
from roamc.graph import TrainGraph, copied, mask_judge, operators
from roamc.graph.storage_ids import STORAGES
from roamc.graph.verify import check_graph
from roamc.operators.counter import counter_mask, draw_seeds, own_seeds
from roamc.operators.shards import own_part
from roamc.options import Options
from roamc.passes import fuse, masks, shard
from roamc.passes.fuse import inline
from roamc.passes.shard import choose
from tests.graphs import joint_graph, traced
from tests.kernel_groups import use_kernels
from tests.parallel import batch, build
from tests.passes.test_masks import stored_masks
from tests.shards import COLLECTIVES, GROUP, inputs_of, run_ranks, split

aten = torch.ops.aten
OPTIONS = Options(shard="sequence", numerics="fast")
X, W = torch.zeros(4, 6, 8), torch.zeros(8, 8)


@pytest.fixture(autouse=True)
def two_ranks_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes, and the groups of a GPU, for two ranks that are not there."""
    use_kernels(monkeypatch)
    monkeypatch.setattr(masks, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(choose, "ranks_in", lambda group: 2)
    monkeypatch.setattr(inline, "EFFORT", inline.Effort(least_bytes=1))
    monkeypatch.setattr(inline._Inliner, "_spare", lambda inliner: 1.0)


def step(x: Tensor, w: Tensor) -> Tensor:
    """A dropout that all ranks run whole, and two of a sum over the ranks."""
    y = aten.native_dropout(x, 0.5, True)[0]
    y = COLLECTIVES.all_reduce((y.view(-1, x.shape[-1]) @ w).view(x.shape), "sum", GROUP)
    z = y + aten.native_dropout(y, 0.25, True)[0]
    z = aten.native_dropout(z.relu(), 0.5, True)[0] * z
    return z.view(-1, x.shape[-1]) @ w


def on_shards(graph: TrainGraph) -> TrainGraph:
    return shard.apply(graph, shard.decide(graph, OPTIONS))


def by_counter(graph: TrainGraph) -> TrainGraph:
    """The graph behind pass masks, checked by its judge."""
    after = masks.apply(graph, masks.decide(graph, OPTIONS))
    check_graph(after, "masks", deep=True)
    mask_judge.check(graph, after, "masks")
    return after


def called(graph: TrainGraph, target: object) -> list[fx.Node]:
    return [node for node in operators(graph.graph) if node.target is target]


def test_a_rank_computes_its_rows_alone() -> None:
    after = by_counter(on_shards(traced(step, X, W)))
    assert [node.args[1] for node in called(after, counter_mask)] == [[4, 6, 8], [12, 8], [12, 8]]
    assert not any(called(after, target) for target in (aten.native_dropout.default, aten.full.default, own_part))
    ((_, runs, group),) = (node.args for node in called(after, own_seeds))
    assert (runs, group) == (24, GROUP)


def test_all_ranks_have_the_bits_of_the_whole_mask() -> None:
    graph = traced(step, X, W)
    inputs = [[torch.randn(4, 6, 8), torch.randn(8, 8)] for _ in range(2)]
    results = []
    for each in (graph, on_shards(graph)):
        torch.manual_seed(1)
        results.append(run_ranks(by_counter(each), inputs))
    for (wanted,), (result,) in zip(*results, strict=True):
        assert torch.equal(wanted, result)


def test_a_layer_drops_what_it_drops_whole_and_stores_no_mask() -> None:
    graph = joint_graph(split(build("bert", 1), 0, 2), (batch(),))
    inputs = inputs_of("bert", 2)
    results = []
    for each in (graph, on_shards(graph)):
        after = by_counter(each)
        torch.manual_seed(0)
        results.append(run_ranks(after, inputs)[1])
    for wanted, result in zip(*results, strict=True):
        assert result is wanted or torch.allclose(result, wanted, rtol=1e-5, atol=1e-7)
    assert len(called(after, counter_mask)) == 3
    assert not any(node.meta["val"].dtype is torch.bool for node in called(after, own_part))
    fused = fuse.apply(copied(after), fuse.decide(after, OPTIONS))
    assert stored_masks(fused) == []


def test_rows_that_begin_within_a_run_of_the_counter_are_taken_of_a_mask_for_all_tokens() -> None:
    graph = on_shards(traced(step, torch.zeros(2, 3, 6), torch.zeros(6, 6)))
    after = by_counter(graph)
    assert len(called(after, aten.native_dropout.default)) == len(called(after, own_part)) == 2
    assert not called(after, own_seeds)


# -- the judge --------------------------------------------------------------------------------------------------------


def fault(change: Callable[[dict[str, fx.Node], fx.Graph], object]) -> str:
    """What the judge says of the graph on shards with a change behind the pass."""
    graph = on_shards(traced(step, X, W))
    after = masks.apply(graph, masks.decide(graph, OPTIONS))
    masks_made, (seeds,), (drawn,) = (called(after, target) for target in (counter_mask, own_seeds, draw_seeds))
    nodes = dict(zip(("whole", "first", "second"), masks_made, strict=True))
    change({**nodes, "seeds": seeds, "drawn": drawn}, after.graph)
    try:
        mask_judge.check(graph, after, "masks")
    except VerifyError as error:
        return str(error)
    return ""


def of_the_whole(nodes: dict[str, fx.Node], graph: fx.Graph) -> None:
    """All ranks drop the same rows."""
    moved = nodes["first"].args[0]
    assert isinstance(moved, fx.Node)
    moved.update_arg(0, nodes["drawn"])
    moved.meta[STORAGES] = nodes["drawn"].meta[STORAGES]


def twice(nodes: dict[str, fx.Node], graph: fx.Graph) -> None:
    """Seeds of the part are moved once more."""
    with graph.inserting_after(nodes["seeds"]):
        again = graph.node_copy(nodes["seeds"])
    nodes["seeds"].replace_all_uses_with(again)
    again.update_arg(0, nodes["seeds"])


FAULTS: dict[str, tuple[Callable[[dict[str, fx.Node], fx.Graph], object], str]] = {
    "another distance": (lambda nodes, graph: nodes["seeds"].update_arg(1, 12), "rows that do not follow"),
    "another group": (
        lambda nodes, graph: nodes["seeds"].update_arg(2, "others"),
        "shard_own_part would run with other arguments",
    ),
    "another layer": (
        lambda nodes, graph: nodes["second"].update_arg(0, nodes["first"].args[0]),
        "shard_own_part_1 would read|shard_own_part_1 would run",
    ),
    "the seed of the whole": (of_the_whole, "shard_own_part would"),
    "moved twice": (twice, "not those that were drawn"),
    "another probability": (lambda nodes, graph: nodes["first"].update_arg(3, 0.5), "shard_own_part would"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_judge_of_the_pass_names_a_planted_fault(name: str) -> None:
    change, said = FAULTS[name]
    assert re.search(said, fault(change)), fault(change)


def test_what_the_pass_writes_is_accepted() -> None:
    assert fault(lambda nodes, graph: None) == ""
