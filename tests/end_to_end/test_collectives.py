"""Two ranks whose graphs communicate, and the gradients of one rank; benchmarks/collectives.py has more of the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.end_to_end.helpers import TORCH, assert_same
from tests.end_to_end.ranks import run_ranks
from tests.parallel import BOUND, reference, worst_error

CASES = (
    ("parallelize_module", "roamc", None),
    ("parallelize_module", "optimize", "min"),
    ("plain collectives", "roamc", "min"),
    ("plain collectives", "optimize", None),
    ("fully_shard", "roamc", None),
    ("fully_shard", "optimize", "min"),
)
CHOICES = {"one of each": (CASES[1], CASES[2], CASES[4]), "all": CASES}
SCRIPT = """
from tests.end_to_end.test_collectives import CHOICES, compare_kernels, gradients
compare_kernels(rank)
for number, case in enumerate(CHOICES[CHOICE]):
    torch._dynamo.reset()
    found = gradients(*case)
    if rank == 0:
        torch.save(found, f"{folder}/{number}.pt")
"""


def compare_kernels(rank: int) -> None:
    """In each of the ranks: what kernels write into given memory is what torch's collectives give."""
    from roamc.operators.collectives import KERNELS

    arguments = {
        "all_reduce": lambda x: (x, "sum", "0"),
        "all_reduce_coalesced": lambda x: ([x, x * 2], "max", "0"),
        "all_gather_into_tensor": lambda x: (x, 2, "0"),
        "reduce_scatter_tensor": lambda x: (x, "sum", 2, "0"),
        "broadcast": lambda x: (x, 1, "0"),
    }
    torch.manual_seed(rank)
    for operator, kernel in KERNELS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x = (torch.randn(6, 8) * 5).to(dtype).t()
            args = arguments[kernel.__name__](x)
            wanted = operator(*args)
            many = isinstance(wanted, list)
            results = [torch.empty_like(item) for item in (wanted if many else [wanted])]
            kernel(*args, out=tuple(results) if many else results[0])
            assert_same(results, wanted if many else [wanted], f"{operator} of {dtype}")


def gradients(split: str, way: str, budget: str | None) -> list[dict[str, torch.Tensor]]:
    """Of two steps by ``way``, and of a step of eager; in each of the ranks."""
    import warnings

    import roamc
    from tests.parallel import SPLITS, build, run_backward, whole_gradients

    options = {"strict": True, **({"memory_budget": budget} if budget else {})}
    eager, model = SPLITS[split](build("gpt", layers=1)), SPLITS[split](build("gpt", layers=1))
    before = len(roamc.plans())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="memory_budget=.* holds for each piece")  # FSDP's hooks
        compiled = (
            roamc.optimize(model, **options)
            if way == "optimize"
            else torch.compile(model, backend="roamc", options=options, dynamic=False)
        )
        step_gradients = []
        for one in (compiled, compiled, eager):
            run_backward(one, split)
            step_gradients.append(whole_gradients(model if one is compiled else eager, split))
    assert len(roamc.plans()) > before, f"{split} by {way}: nothing was planned"
    return step_gradients


@pytest.mark.thorough
def test_a_collective_that_nobody_waits_for_fails_its_ranks(tmp_path: Path) -> None:
    start = "x = torch.ops._c10d_functional.all_reduce(torch.ones(3), 'sum', '0')\n"
    with pytest.raises(AssertionError, match="1 collectives that nobody waited for"):
        run_ranks(tmp_path, start)
    (tmp_path / "store").unlink()
    run_ranks(tmp_path, start + "torch.ops._c10d_functional.wait_tensor(x)\n")


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_are_those_of_one_rank(choice: str, tmp_path: Path) -> None:
    run_ranks(tmp_path, SCRIPT.replace("CHOICE]", f"{choice!r}]"))
    for number, (split, way, budget) in enumerate(CHOICES[choice]):
        wanted = reference("gpt", split, 2, layers=1)
        first, second, eager = torch.load(tmp_path / f"{number}.pt")
        said = f"{split} by {way}, budget {budget}"
        assert worst_error(eager, wanted) <= BOUND, f"{said}: eager itself"
        if split == "plain collectives" and TORCH < (2, 12):
            continue  # torch.compile gives wrong gradients there, by aot_eager too
        for step in (first, second):
            assert worst_error(step, wanted) <= BOUND, said
            assert_same(step, eager, said)
