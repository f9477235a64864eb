"""Every pass on a graph of a few lines, as text: the graph before it, what it decides, and the graph after it.

The texts lie in ``tests/passes/golden``. Where a change to a pass is meant, write them anew and read their diff:

    WRITE_GOLDEN=1 pytest tests/passes/test_golden.py
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from roamc import decode
from roamc.compat import FakeTensorMode
from roamc.graph import TrainGraph, copied, operators
from roamc.graph.printed import printed
from roamc.graph.verify import check_graph
from roamc.operators.projection import projection
from roamc.options import Options, parse_options
from roamc.passes.fuse import Effort, inline
from roamc.planning import search
from roamc.planning.pipeline import PIPELINE
from tests.graphs import traced
from tests.shards import GROUP

GOLDEN = Path(__file__).parent / "golden"
X = torch.zeros(64)  # 256 bytes
aten = torch.ops.aten

CPU = parse_options({"profile": "cpu"})  # and not what was measured on this machine

Example = tuple[TrainGraph, Options]


@pytest.fixture(autouse=True)
def onednn_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every product, on any machine."""
    monkeypatch.setattr("roamc.passes.products.product_into", lambda: print)
    monkeypatch.setattr("roamc.passes.products.faster_by_onednn", frozenset)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any group, without a process for each."""
    monkeypatch.setattr("roamc.passes.shard.choose.ranks_in", lambda group: 2)


@pytest.fixture(autouse=True)
def any_group_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups and copies of the smallest tensors as well."""
    monkeypatch.setattr("roamc.passes.fuse.choose.EFFORT", Effort(least_bytes=1, least_share=0.0))
    monkeypatch.setattr("roamc.passes.fuse.inline.EFFORT", inline.Effort(least_bytes=1))
    monkeypatch.setattr(inline._Inliner, "_spare", lambda inliner: 1.0)
    monkeypatch.setattr("roamc.passes.fuse.estimates.group_workspace", lambda group, threads: 0)


@pytest.fixture(autouse=True)
def any_collective_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the products that can run with it, whatever the links."""
    monkeypatch.setattr("roamc.passes.async_tp._faster", lambda graph, decision, sums, options: decision)


def of_normalize() -> Example:
    """A name for another value, a value that nobody reads, and a dropout, which has a mask and a product."""

    def step(x: Tensor) -> Tensor:
        alias = aten.alias.default(x.sin())
        alias.cos()
        return F.dropout(alias, 0.5).sum()

    return traced(step, X), CPU


def of_checkpoint() -> Example:
    """A region of two operators whose results a policy wants made again."""

    def step(x: Tensor) -> Tensor:
        inner = x.sin()
        outer = inner.exp()
        loss = outer.sum()
        return loss * outer * inner

    graph = traced(step, X, phases="FFFBB")
    for node in operators(graph.graph)[:2]:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return graph, CPU


def of_async_tp() -> Example:
    """Two products of what is gathered, one with a bias and by views that stand behind the first, and a sum of two that
    is scattered.

    What is gathered is read by something else as well, and so is another product.
    """

    def step(x: Tensor, part: Tensor) -> Tensor:
        rows = x.view(8, 8)
        gathered = torch.ops.roamc_collective.all_gather_into_tensor(rows, 2, GROUP)
        first = gathered @ part
        inner = first.relu() * torch.addmm(part[0], gathered, part.t())
        late = torch.ops.roamc_collective.reduce_scatter_tensor(inner @ part + first @ rows, "sum", 2, GROUP)
        other = inner @ rows
        kept = torch.ops.roamc_collective.reduce_scatter_tensor(other, "sum", 2, GROUP)
        return late.sum() + kept.sum() + other.sum() + gathered.sum()

    return traced(step, X, X.view(8, 8)), parse_options({"numerics": "fast", "async_tp": "on", "profile": "cpu"})


def of_fuse() -> Example:
    """Backward of a gate, and of cross-entropy; the product between them, and a result that is read twice, stay.

    The gate's function, which forward computes, is computed once more where backward reads it.
    """

    def step(x: Tensor) -> Tensor:
        x = x.view(8, 8)
        open_ = x.sigmoid()
        passed = open_ @ x
        kept = x * x
        gradient = aten.silu_backward(kept * 0.5, x) @ x
        target = torch.zeros(8, dtype=torch.int64)
        one_hot = aten.nll_loss_backward(x[0, 0], kept, target, None, 1, -100, x[0, 1])
        return passed, aten._log_softmax_backward_data(one_hot, kept, 1, torch.float32) + gradient, open_ * gradient

    return traced(step, X, phases="FFF" + "B" * 13), CPU


def of_shard() -> Example:
    """A norm and a product of what two ranks have summed, and a sum over the tokens."""

    def step(x: Tensor, part: Tensor) -> Tensor:
        whole = torch.ops.roamc_collective.all_reduce((x.view(8, 8) @ part).view(2, 4, 8), "sum", GROUP)
        norm = F.layer_norm(whole, (8,))
        late = norm.view(8, 8) @ part
        return late.sum() + norm.sum((0, 1)).sum()

    graph = traced(step, X, X.view(8, 8), phases="FFFFFFFFFBBBBB")
    return graph, parse_options({"shard": "sequence", "profile": "cpu"})


def of_masks() -> Example:
    """On a GPU, two dropouts, and what backward makes of the mask of the first."""
    with FakeTensorMode():
        wide = torch.empty(8, 8, device="cuda")

    def step(x: Tensor) -> Tensor:
        first, mask = aten.native_dropout(x, 0.25, True)
        second, _ = aten.native_dropout(first, 0.5, True)
        return aten.native_dropout_backward(second.sum() * first, mask, 1 / 0.75).sum()

    return traced(step, wide, phases="F" * 6 + "BBBB"), parse_options({"numerics": "fast", "profile": "h100"})


def of_scores() -> Example:
    """On a GPU, the loss of rows of classes and its gradient; one with weights of classes, which stays."""
    with FakeTensorMode():
        rows = torch.empty(8, 50, device="cuda")
        labels, weights = torch.empty(8, dtype=torch.int64, device="cuda"), torch.empty(50, device="cuda")

    def step(x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        scores = x.log_softmax(-1)
        loss, count = aten.nll_loss_forward(scores, labels, None, 1, -100)
        weighted, _ = aten.nll_loss_forward(scores, labels, weights, 1, -100)
        return aten.nll_loss_backward(loss + weighted, scores, labels, None, 1, -100, count)

    return traced(step, rows, labels, weights), parse_options({"numerics": "fast", "profile": "h100"})


def of_project() -> Example:
    """Two projected gradients of one input, one of which is turned on the way; one whose whole gradient is read."""

    def step(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        p = projection(0.0, 1, 2, 8, 2, "gaussian", dtype=torch.float32, device=x.device)
        whole = first.t() @ x
        small, other = whole @ p, (second.t() @ x).t().t() @ p
        read = second.t() @ x
        return small, other, read @ p, read

    graph = traced(step, *(X.view(8, 8).clone() for _ in range(3)), phases="B" * 12)
    return graph, CPU


def of_padding() -> Example:
    """On a GPU, logits of 50,257 words and their gradient, and a small matrix, which stays."""
    with FakeTensorMode():
        rows = torch.empty(4096, 64, dtype=torch.bfloat16, device="cuda")
        table = torch.empty(50257, 64, dtype=torch.bfloat16, device="cuda")
        small = torch.empty(8, 7, dtype=torch.bfloat16, device="cuda")

    def step(x: Tensor, table: Tensor, small: Tensor) -> Tensor:
        logits = (x @ table.t()).view(4, 1024, -1)
        return (logits * 2).view(4096, -1) @ table + (small @ small.t()).sum()

    return traced(step, rows, table, small), parse_options({"numerics": "fast", "profile": "h100"})


def of_products() -> Example:
    """A product of float32 matrices, one with a bias, and one of float64, which stays."""

    def step(x: Tensor) -> Tensor:
        first = x.view(8, 8) @ x.view(8, 8)
        second = torch.addmm(x[:8], first, first)
        return second.sum() + (second.double() @ second.double()).sum()

    return traced(step, X), parse_options({"numerics": "fast", "profile": "cpu"})


def of_count() -> Example:
    """A product whose input may be projected."""

    def step(x: Tensor) -> Tensor:
        return x.mT @ (x @ x)

    return traced(step, torch.zeros(8, 8), phases="FFB"), parse_options({"codecs": "compact", "profile": "cpu"})


def of_retain() -> Example:
    """Of two values that backward reads, one can be made again from the other."""

    def step(x: Tensor) -> Tensor:
        first = x.sin()
        second = first.exp()
        third = (second * second).cos()
        late = third.sum() * third
        return (late * second).sum() + (late * first).sum()

    return traced(step, X, phases="FFFFFBBBBBB"), parse_options({"memory_budget": "min", "profile": "cpu"})


def of_reorder() -> Example:
    """Two branches that are open at a time."""

    def step(x: Tensor) -> Tensor:
        left, right = x.sin(), x.cos()
        return left.sum() + right.sum()

    return traced(step, X), CPU


def of_overlap() -> Example:
    """A sum over ranks, and operators that do not need it; the peak lies elsewhere."""

    def step(x: Tensor) -> Tensor:
        wide = torch.cat([x, x, x, x]).sum()
        x = x.view(8, 8)
        summed = torch.ops.roamc_collective.all_reduce(x @ x, "sum", GROUP)
        return x.exp().sum() * summed.sum() * wide

    return traced(step, X), CPU


def of_reuse() -> Example:
    """A chain of pointwise operators, of which one is read again."""

    def step(x: Tensor) -> Tensor:
        kept = x.sin().cos()
        return kept.exp().sum() + kept.sum()

    return traced(step, X), CPU


def of_layout() -> Example:
    """Values of several sizes that do not all live at a time."""

    def step(x: Tensor) -> Tensor:
        wide = torch.cat([x, x])
        short = wide.sum()
        middle = torch.cat([x, x[:32]])
        return middle.sum() + short

    return traced(step, X), CPU


EXAMPLES: dict[str, Callable[[], Example]] = {
    "normalize": of_normalize,
    "checkpoint": of_checkpoint,
    "shard": of_shard,
    "masks": of_masks,
    "scores": of_scores,
    "project": of_project,
    "async_tp": of_async_tp,
    "padding": of_padding,
    "products": of_products,
    "count": of_count,
    "fuse": of_fuse,
    "retain": of_retain,
    "reorder": of_reorder,
    "overlap": of_overlap,
    "reuse": of_reuse,
    "layout": of_layout,
}


ONLY_NOTES: tuple[str, ...] = ()
"""Names of the passes that leave the graph as it is."""


def text_of(name: str) -> str:
    """The three texts of one pass on its example."""
    graph, options = EXAMPLES[name]()
    for node in graph.graph.nodes:
        node.meta.pop("stack_trace", None)  # lines of this file
    plan = search.run(copied(graph), options).plan
    for row in PIPELINE:
        decision: Any = decode.read(row.decision, plan.decisions[row.name], row.name)
        before = printed(graph)
        row.decide(graph, options)
        assert printed(graph) == before, "to decide changes nothing"
        graph = row.apply(graph, decision)
        check_graph(graph, row.name, deep=True)
        if row.name == name:
            decided = "\n".join(f"{key}: {json.dumps(value)}" for key, value in plan.decisions[name].items())
            about = " ".join((EXAMPLES[name].__doc__ or "").split())
            return f"{about}\n\n== before\n{before}\n== decision\n{decided}\n\n== after\n{printed(graph)}"
    raise AssertionError(f"no pass is called {name}")


def test_every_pass_has_an_example() -> None:
    assert list(EXAMPLES) == [row.name for row in PIPELINE], "a pass needs a function and a row in EXAMPLES, in order"
    texts = {path.stem for path in GOLDEN.glob("*.txt")}
    if not os.environ.get("WRITE_GOLDEN"):  # else the next test writes it
        assert texts >= set(EXAMPLES), "write a missing text by WRITE_GOLDEN=1, and run again"
    assert texts <= set(EXAMPLES), "a text of no pass"


@pytest.mark.usefixtures("arenas_of_any_size")
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pass_does_what_its_text_says(name: str) -> None:
    path, text = GOLDEN / f"{name}.txt", text_of(name)
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    wanted = path.read_text(encoding="utf-8")
    changes = difflib.unified_diff(wanted.splitlines(), text.splitlines(), str(path.name), "now", lineterm="")
    assert text == wanted, "\n".join(["see this file's docstring", *changes])


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pass_says_what_it_rewrites_and_checks(name: str) -> None:
    about = importlib.import_module(f"roamc.passes.{name}").__doc__ or ""
    first, _, rest = about.partition("\n\n")
    assert first.startswith(f"{name}: ")
    assert first.endswith(".")
    assert rest.startswith("    rewrite:  ")
    assert "\n    checks:   " in rest


@pytest.mark.usefixtures("arenas_of_any_size")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ONLY_NOTES])
def test_a_pass_changes_its_example(name: str) -> None:
    before, after = (part.partition("\n")[2] for part in text_of(name).split("== ")[1::2])
    assert before.strip() != after.strip()
