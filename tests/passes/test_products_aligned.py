"""Pass products for a GPU: which products go by aligned copies, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roamc.errors import PlanError, VerifyError
from roamc.frontends.workload import capture
from roamc.graph import TrainGraph, copied
from roamc.operators.aligned import BY_COPIES
from roamc.options import Options
from roamc.passes import products
from roamc.passes.products import Decision
from roamc.planning import search
from tests.codegen.test_kernel_judge import on_gpu
from tests.graphs import traced

FAST = Options(numerics="fast")
HALF = torch.bfloat16


def product(rows: int, depth: int, columns: int, dtype: torch.dtype = HALF) -> TrainGraph:
    """The logits of a model: rows of tokens with a weight [columns, depth]."""
    weight = on_gpu((columns, depth), dtype)
    return traced(lambda x, w: x @ w.t(), on_gpu((rows, depth), dtype), weight)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [((8192, 768, 50257), True), ((8192, 768, 50258), True), ((8192, 767, 50264), True), ((8192, 768, 50264), False)],
    ids=str,
)
def test_rows_decide(sizes: tuple[int, int, int], wanted: bool) -> None:
    assert bool(products.decide(product(*sizes), FAST).aligned) is wanted


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (product(8192, 768, 50257), Options()),
        (product(8, 768, 50257), FAST),
        (product(8192, 768, 50257, torch.float32), FAST),
    ],
    ids=["exact", "few operations", "float32"],
)
def test_others_stay(graph: TrainGraph, options: Options) -> None:
    assert products.decide(graph, options) == Decision()


def test_decision_of_what_is_no_such_product_is_refused() -> None:
    graph = product(8192, 768, 50264)
    with pytest.raises(PlanError, match="'mm' is no product in 16 bits on a GPU with rows that are not aligned"):
        products.apply(graph, Decision(aligned=("mm",)))


@pytest.fixture(scope="module")
def language_model() -> Any:
    from roamc.cli import zoo

    sizes = {"layers": 1, "width": 64, "heads": 2, "vocab": 2057, "seq": 128, "batch": 256, "dtype": "bfloat16"}
    return capture(zoo.make("gpt", sizes), device=torch.device("cuda"))


def test_a_plan_with_aligned_products_is_refused_under_exact(language_model: TrainGraph) -> None:
    without = Options(numerics="fast", disable=("padding", "masks"))
    planned = search.run(copied(language_model), without)
    targets = [node.target for node in planned.graph.graph.nodes]
    assert sum(target in BY_COPIES.values() for target in targets) == 3, "logits, and both gradients behind them"
    assert planned.plan.needed_bytes > planned.plan.peak_bytes
    assert search.run(copied(language_model), without, planned.plan).plan.peak_bytes == planned.plan.peak_bytes
    with pytest.raises(VerifyError, match=r"aligned_mm.default, which sums in another order .*'numerics': 'fast'"):
        search.run(copied(language_model), Options(), planned.plan)
