"""Selective recomputation (Korthikanti et al., arXiv 2205.05198) comes out of the general search.

Their layer with attention written out saves s·b·h·(34 + 5·a·s/h) bytes in 16 bits; running the core of attention again
leaves 34·s·b·h. As the output of attention is one of the 34, of its two products only the scores run again: 2·b·s²·h
FLOPs a layer. Nothing runs here; times are those of an A100's data sheet.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn

from roamc.budget import NO_TIME, Budget
from roamc.cost import flops
from roamc.graph import operators
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.planning import search
from roamc.planning.planned import Planned
from roamc.units import Bytes
from tests.graphs import joint_graph
from tests.passes.retain.blocks import GPTBlock

BATCH, LENGTH, WIDTH, HEADS = 1, 1024, 1024, 16
UNIT = BATCH * LENGTH * WIDTH
CORE = 5 * HEADS * LENGTH // WIDTH * UNIT
"""Bytes that the core of one layer's attention saves: softmax's result, dropout's mask and its result."""
SCORES = 2 * BATCH * LENGTH**2 * WIDTH
"""FLOPs of one layer's scores."""


@functools.cache
def planned(layers: int, budget: Budget, *, pinned: bool) -> Planned:
    with torch.device("meta"):
        model = nn.Sequential(*(GPTBlock(WIDTH, HEADS, fused=False, pinned=pinned) for _ in range(layers)))
        x = torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16)
    graph = joint_graph(model.to(torch.bfloat16), (x,))
    return search.run(graph, Options(memory_budget=budget, profile="a100"))


def matching_budget(layers: int) -> Bytes:
    """Every layer but the last keeps 34·s·b·h, and a hundredth of that more for the states of the generator.

    The peak is where backward is in the last layer, whose core is there whether it ran again or not.
    """
    return planned(layers, NO_TIME, pinned=True).plan.needed_bytes - (layers - 1) * (CORE - 34 * UNIT // 100)


def saved(planned_graph: Planned) -> Bytes:
    return sum(storage.nbytes for storage in build_memory(planned_graph.graph).saved)


def test_layer_saves_what_the_paper_says() -> None:
    eager = [saved(planned(layers, NO_TIME, pinned=True)) for layers in (3, 4)]
    assert eager[1] - eager[0] == pytest.approx(34 * UNIT + CORE, rel=0.001)


def test_core_of_attention_runs_again_where_the_rest_is_kept() -> None:
    by_layers = {layers: planned(layers, matching_budget(layers), pinned=True) for layers in (3, 4)}
    for layers, each in by_layers.items():
        assert each.plan.needed_bytes <= matching_budget(layers)
        again = [node for node in operators(each.graph.graph) if "again" in node.meta]
        assert sum(flops(node) for node in again) == (layers - 1) * SCORES
        core = ("bmm", "mul", "_softmax", "native_dropout_backward", "dropout_mask")
        kinds = Counter(node.meta["again_target"].split(".")[1] for node in again)
        assert kinds == dict.fromkeys(core, layers - 1)
    assert saved(by_layers[4]) - saved(by_layers[3]) == pytest.approx(34 * UNIT, rel=0.02)


@pytest.mark.parametrize("layers", [3, 4])
def test_free_choice_keeps_the_same_budget_in_less_time(layers: int) -> None:
    """Cheap results of large tensors run again instead of some of the cores."""
    budget = matching_budget(layers)
    theirs, ours = planned(layers, budget, pinned=True).plan, planned(layers, budget, pinned=False).plan
    assert ours.needed_bytes <= budget
    assert ours.added_seconds < 0.95 * theirs.added_seconds
