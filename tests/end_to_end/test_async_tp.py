"""Products that run with collectives on two ranks: the bits of both one after the other, and torch's own operators."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import roamc
from roamc.operators import products_sent as ours
from roamc.passes import async_tp
from tests.end_to_end.ranks import run_ranks
from tests.parallel import SPLITS, build, run_backward, whole_gradients

CASES = (("llama", None), ("llama", "min"), ("bert", None))
"""Model, and budget."""

OPERATORS = """
from tests.end_to_end.test_async_tp import check_operators
check_operators(rank, ranks)
print("the same")
"""
STEPS = """
from tests.end_to_end.test_async_tp import CASES, step
for kind, budget in CASES:
    torch.save([step(kind, budget, at_once) for at_once in ("off", "on")], f"{folder}/{kind}.{budget}.{rank}.pt")
"""


def check_operators(rank: int, ranks: int) -> None:
    """Compare ours with what torch's operators do on a CPU, and call torch's operators as on a GPU, with no numbers."""
    from torch.distributed import _symmetric_memory as symmetric

    generator = torch.Generator().manual_seed(rank)
    x, a, b, c = (torch.randn(size, generator=generator) for size in ((6, 8), (8, 4), (8, 10), (4,)))
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    gathered, products = symmetric._fused_all_gather_matmul_fallback(x, [a, b], 0, name)
    scattered = symmetric._fused_matmul_reduce_scatter_fallback(x, a, "sum", 0, name)
    results = [
        *ours.ALL_GATHER_MM(x, [a, b], ranks, name, True, []),
        ours.MM_REDUCE_SCATTER([x], [a], None, "sum", ranks, name),
    ]
    wanted = [*products, gathered, scattered]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(results, wanted, strict=True))
    check_parts(x, a, b, c, ranks, name)
    x, a, b = (tensor.to("meta") for tensor in (x, a, b))
    by_torch = ours.all_gather_mm_at_once(x, [a, b], ranks, name, True)
    by_torch.append(ours.mm_reduce_scatter_at_once([x], [a], None, "sum", ranks, name))
    assert [one.shape for one in by_torch] == [one.shape for one in wanted]
    assert len(ours.all_gather_mm_at_once(x, [a, b], ranks, name, False)) == 2


def check_parts(x: Tensor, a: Tensor, b: Tensor, c: Tensor, ranks: int, name: str) -> None:
    """Compare biases and sums, part by part as on a GPU, with the same one after the other.

    What torch sends between GPUs is sent by gloo here.
    """

    def read_as_gathered(part: Tensor, read: Any, whole: Tensor, group: str, needed: bool) -> None:
        dist.all_gather_into_tensor(whole, part)
        for number, rows in enumerate(whole.chunk(ranks)):
            read(rows, number)

    def sent_as_written(write: Any, received: Tensor, group: str) -> None:
        sent = [part.clone() for part in received.chunk(ranks)]
        for number, rows in enumerate(sent):
            write(number, rows)
        all_sent = [torch.empty_like(received) for _ in range(ranks)]
        dist.all_gather(all_sent, torch.cat(sent))
        received.copy_(torch.cat([rows.chunk(ranks)[dist.get_rank()] for rows in all_sent]))

    with mock.patch.multiple(ours, read_as_gathered=read_as_gathered, sent_as_written=sent_as_written):
        at_once = ours.all_gather_mm_at_once(x, [a, b], ranks, name, True, [c, None])
        for how in ("sum", "avg"):
            factors: Any = [x, x.square()], [a, b[:, :4]], c, how, ranks, name
            total = torch.addmm(c, x, a) + x.square() @ b[:, :4]
            dist.all_reduce(total, dist.ReduceOp.SUM)
            wanted = total.chunk(ranks)[dist.get_rank()] / (1 if how == "sum" else ranks)
            torch.testing.assert_close(ours.mm_reduce_scatter_at_once(*factors), wanted)
            if how == "sum":
                torch.testing.assert_close(ours.MM_REDUCE_SCATTER(*factors), wanted)
    apart = ours.ALL_GATHER_MM(x, [a, b], ranks, name, True, [c, None])
    torch.testing.assert_close(at_once, apart)
    assert torch.equal(apart[0], torch.addmm(c, apart[2], a))


def step(kind: str, budget: str | None, at_once: str) -> tuple[float, dict[str, Tensor], str]:
    """Loss, gradients and plan of the second of two steps, in each of the ranks."""
    torch._dynamo.reset()
    async_tp._faster = lambda graph, decision, sums, options: decision  # however small
    split = "parallelize_module"
    options: dict[str, Any] = {"strict": True, "shard": "sequence", "disable": "products", "numerics": "fast"}
    options |= {"async_tp": at_once, **({"memory_budget": budget} if budget else {})}
    compiled = roamc.optimize(SPLITS[split](build(kind, layers=1)), **options)
    for _ in range(2):
        loss = run_backward(compiled, split)  # type: ignore[arg-type]
    return loss, whole_gradients(compiled, split), roamc.plans()[-1].to_json()


def test_operators_do_what_those_of_torch_do(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, OPERATORS).count("the same") == 2


@pytest.mark.thorough
def test_steps_have_the_bits_of_collectives_and_products(tmp_path: Path) -> None:
    run_ranks(tmp_path, STEPS)
    for (kind, budget), rank in itertools.product(CASES, range(2)):
        (loss, gradients, _), (other_loss, others, plan) = torch.load(tmp_path / f"{kind}.{budget}.{rank}.pt")
        assert loss == other_loss
        torch.testing.assert_close(others, gradients, rtol=0, atol=0)
        decision = json.loads(plan)["decisions"]["async_tp"]
        assert len(decision["gathers"]) > 2
        assert max(len(products) for products in decision["scatters"].values()) == 3, "of q, k and v"
