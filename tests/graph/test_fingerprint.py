"""A fingerprint tells graphs apart by what plans depend on, and is the same in every process."""

from __future__ import annotations

import functools
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from roamc.graph import TrainGraph, operators
from roamc.graph.fingerprint import fingerprint
from roamc.operators.random import replay
from roamc.operators.schemas import name_of
from roamc.options import Options
from roamc.planning import search
from tests.graphs import WithLoss, aten, captured_step, joint_graph, traced
from tests.models import LSTM, next_token, tokens
from tests.passes.test_shard_loss import LOSSES, Model, part, tokens_and_labels
from tests.shards import normal_form

ROOT = Path(__file__).parents[2]
X = torch.randn(4, 8)
ROUTES = ("step", "joint")


def marks(*functions: Any) -> set[str]:
    return {fingerprint(traced(function, X)) for function in functions}


def test_fingerprint_tells_graphs_apart() -> None:
    assert (
        len(marks(lambda x: x.sin(), lambda x: x.cos(), lambda x: x.sin().t(), lambda x: x + 1, lambda x: x + 2)) == 5
    )
    shapes = {fingerprint(traced(lambda x: x.sin(), t)) for t in (X, X[:2], X.t()[:3], X.double())}
    assert len(shapes) == 4
    split = traced(lambda x: x.sin(), X)
    assert fingerprint(split.replace(boundary=True)) != fingerprint(split)


def test_strides_along_one_element_count_where_a_caller_sees_them() -> None:
    """A log's text has other strides along an axis of one element than capture had: no plan depends on them."""

    def mark(by: int, end: Callable[[Tensor], Tensor]) -> str:
        graph = traced(lambda x: end(x.as_strided((4, 1, 8), (8, by, 1))), torch.randn(4, 1, 8))
        (view,) = graph.graph.find_nodes(op="call_function", target=aten.as_strided.default)
        view.args = (view.args[0], (4, 1, 8))  # without the strides, as if an operator had derived them
        return fingerprint(graph)

    assert mark(8, torch.sin) == mark(1, torch.sin)
    assert mark(8, lambda x: x) != mark(1, lambda x: x)


def test_ranks_that_take_parts_of_their_own_have_one_mark_and_graphs_of_their_own() -> None:
    """A head that is split by class takes its part of the gradient of all scores."""
    models = [part(Model(LOSSES["mean"]), rank, 2, by_class=True) for rank in range(2)]
    first, second = (normal_form(model, tokens_and_labels("none")) for model in models)
    assert [node.name for node in first.graph.nodes] == [node.name for node in second.graph.nodes]
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first, of_any_rank=True) == fingerprint(second, of_any_rank=True)
    second.graph.find_nodes(op="call_function", target=aten.gelu.default)[0].kwargs = {"approximate": "tanh"}
    assert fingerprint(first, of_any_rank=True) != fingerprint(second, of_any_rank=True)


def test_fingerprint_tells_apart_what_the_memory_model_reads() -> None:
    """Phases, gradients and waits change orders and baselines: a plan for one is not a plan for another."""
    graph = traced(lambda x: ((y := x.sin()), y.cos())[1], X, phases="FB")
    other = [
        graph.replace(phase={"sin": graph.phase["cos"], "cos": graph.phase["cos"]}),
        graph.replace(gradients=("sin",)),
        graph.replace(waits={"cos": "sin"}),
    ]
    assert len({fingerprint(one) for one in (graph, *other)}) == 4


class Apply(nn.Module):
    """Linear, then a function of (module, tensor)."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.linear, self.last = function, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.linear(x)))


def saves_products(context: object, target: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if target is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def dropped(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda h: F.dropout(m.last(h).tanh(), 0.5), x, use_reentrant=False)


def selective(m: Any, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, saves_products)
    return checkpoint(lambda h: m.last(h).tanh().sin(), x, use_reentrant=False, context_fn=contexts)


def cast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.last(x.tanh()).float()


KINDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout in checkpoint": dropped,
    "selective checkpoint": selective,
    "effect of linalg": lambda m, x: torch.linalg.inv(x[:, :4] + 9 * torch.ones(4, 4).triu()) @ x,
    "constant": lambda m, x: x * torch.tensor([1.0, 2.0, float("inf"), 4.0, 5.0, 6.0, 7.0, 8.0]).clamp(max=9),
    "autocast": cast,
    "sort": lambda m, x: x.sort(dim=1).values * x.topk(2, dim=0).values.sum(),
    "dropout": lambda m, x: F.dropout(x, 0.1) + torch.rand_like(x),
}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def graphs() -> dict[str, TrainGraph]:
    """A graph for every kind of node, by both routes."""
    torch.manual_seed(0)
    cases = {name: (Apply(function), X, squares) for name, function in KINDS.items()}
    cases["lstm"] = LSTM(), tokens(length=3), next_token
    graphs_by_name = {}
    for name, (model, x, loss) in cases.items():
        graphs_by_name[f"{name}, step"] = captured_step(model, (x,), loss, torch.optim.SGD).graph
        graphs_by_name[f"{name}, joint"] = joint_graph(WithLoss(model, loss), (x,))
    return graphs_by_name


def fingerprints_and_plan() -> str:
    """All fingerprints, and the plan of a graph that has functions of ours."""
    graphs_by_name = graphs()
    lines = [f"{name}: {fingerprint(graph)}" for name, graph in graphs_by_name.items()]
    return "\n".join([*lines, search.run(graphs_by_name["dropout in checkpoint, step"], Options()).plan.to_json()])


def started(seed: str) -> subprocess.Popen[str]:
    code = "from tests.graph.test_fingerprint import fingerprints_and_plan\nprint(fingerprints_and_plan(), end='')"
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def test_three_processes_with_three_hash_seeds_agree() -> None:
    running = [started(seed) for seed in ("0", "1", "4242")]
    said = [process.communicate(timeout=300)[0].splitlines() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sum(", step: " in line or ", joint: " in line for line in said[0]) == 2 * len(KINDS) + 2
    assert said[1] == said[0]
    assert said[2] == said[0]


def test_the_kinds_of_nodes_are_there() -> None:
    """What the test above is about: functions of ours, constants, casts."""
    graphs_by_name = graphs()
    names = {name: {name_of(node.target) for node in operators(graph.graph)} for name, graph in graphs_by_name.items()}
    for route in ROUTES:
        assert "roamc.operators.random.replay" in names[f"dropout in checkpoint, {route}"]
        assert any(node.op == "get_attr" for node in graphs_by_name[f"constant, {route}"].graph.nodes)
        assert "aten._to_copy.default" in names[f"autocast, {route}"]
        assert "aten.sort.default" in names[f"sort, {route}"]
    assert "roamc.operators.effects.with_effect" in names["effect of linalg, joint"]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (aten.mul.Tensor, "aten.mul.Tensor"),
        (operator.getitem, "_operator.getitem"),
        (replay, "roamc.operators.random.replay"),
        (torch.ops.higher_order.cond, "higher_order.cond"),
        (functools.partial(replay, 1, device="cpu"), "partial(roamc.operators.random.replay, 1, ['device'])"),
        (torch.Generator(), "torch.Generator"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_names_hold_no_address(target: object, name: str) -> None:
    assert name_of(target).replace("torch._C.", "torch.") == name


def test_literals_are_told_apart() -> None:
    """A number's type, a dtype, a slice's bounds and the type of a constant are part of the fingerprint."""
    graphs_of = {
        "float": lambda x: x.add(1.0),
        "double": lambda x: x.to(torch.float64).add(1.0),
        "int": lambda x: x.add(1),
        "nan": lambda x: x.add(float("nan")),
        "part": lambda x: x[1:],
        "other part": lambda x: x[:3],
        "constant": lambda x: x * torch.ones(8),
    }
    assert len(marks(*graphs_of.values())) == len(graphs_of)
