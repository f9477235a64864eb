"""Matrix products by oneDNN: against float64, in any geometry, with the same bits every time, and without oneDNN."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roamc import compat_onednn
from roamc.compat import FakeTensorMode
from roamc.compat_onednn import product_into
from roamc.operators.kernels import KERNELS
from roamc.operators.onednn import ONEDNN

aten = torch.ops.aten
needs_onednn = pytest.mark.skipif(product_into() is None, reason="this torch has no such product by oneDNN")
SIZES = (1, 2, 3, 5, 16, 17, 63, 64, 100, 257)


def placed(values: Tensor, dice: random.Random) -> Tensor:
    """The same numbers somewhere in a larger block, in rows or in columns, or as every other row or column."""
    shape = values.shape
    kind = dice.choice(("rows", "columns", "apart"))
    start, more = dice.choice((0, 1, 7, 16)), 2 if kind == "apart" else 1
    block = torch.full((start + more * values.numel(),), torch.nan)[start:]
    if kind == "columns":
        view = block.view(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    else:
        view = block.view(*shape[:-1], more * shape[-1])[..., ::more]
    return view.copy_(values)


def factors(seed: int, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows, depth, columns = (dice.choice(SIZES) for _ in range(3))
    first = torch.randn(*batch, rows, depth, generator=generator)
    second = torch.randn(*batch, depth, columns, generator=generator)
    return placed(first, dice), placed(second, dice)


def assert_near(sums: Tensor, wanted: Tensor, terms: Tensor) -> None:
    """Each sum errs by at most a few roundings for every doubling of the number of its terms."""
    limit = 8 * torch.finfo(torch.float32).eps * terms
    assert ((sums.double() - wanted).abs() <= limit).all()


@needs_onednn
@pytest.mark.parametrize("seed", range(60))
def test_products_of_any_geometry(seed: int) -> None:
    first, second = factors(seed)
    product = ONEDNN[aten.mm.default](first, second)
    assert_near(product, first.double() @ second.double(), first.abs().double() @ second.abs().double())
    assert product.stride() == torch.mm(first, second).stride()


@needs_onednn
@pytest.mark.parametrize("seed", range(20))
def test_products_of_batches(seed: int) -> None:
    first, second = factors(seed, (random.Random(seed).choice((1, 2, 5)),))
    product = ONEDNN[aten.bmm.default](first, second)
    assert_near(product, first.double() @ second.double(), first.abs().double() @ second.abs().double())
    assert product.stride() == torch.bmm(first, second).stride()


@needs_onednn
@pytest.mark.parametrize("addend", ["bias", "matrix", "column", "number"])
@pytest.mark.parametrize("seed", range(10))
def test_products_with_an_addend(seed: int, addend: str) -> None:
    first, second = factors(seed)
    rows, columns = first.shape[0], second.shape[1]
    shape = {"bias": (columns,), "matrix": (rows, columns), "column": (rows, 1), "number": ()}[addend]
    added = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    sums = ONEDNN[aten.addmm.default](added, first, second)
    wanted = added.double() + first.double() @ second.double()
    assert_near(sums, wanted, added.abs().double() + first.abs().double() @ second.abs().double())


@needs_onednn
@pytest.mark.parametrize("original", list(ONEDNN), ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_the_bits_do_not_depend_on_where_results_and_arguments_lie(original: torch._ops.OpOverload, seed: int) -> None:
    first, second = factors(seed, (3,) if original is aten.bmm.default else ())
    arguments = (first, second)
    if original is aten.addmm.default:
        arguments = (torch.randn(second.shape[-1]), *arguments)
    operator = ONEDNN[original]
    wanted = operator(*arguments)
    for start in (0, 1, 16):
        moved = []
        for tensor in arguments:
            block = torch.empty(start + tensor.untyped_storage().nbytes() // 4)[start:]
            moved.append(block.as_strided(tensor.shape, tensor.stride()).copy_(tensor))
        block = torch.full((start + wanted.numel(),), torch.nan)
        out = block[start:].view(wanted.shape)
        KERNELS[operator].function(*moved, out=out)
        assert torch.equal(out, wanted)


@needs_onednn
def test_an_addend_may_lie_where_the_result_goes() -> None:
    first, second, added = torch.randn(40, 30), torch.randn(30, 20), torch.randn(40, 20)
    operator = ONEDNN[aten.addmm.default]
    wanted = operator(added, first, second)
    KERNELS[operator].function(added, first, second, out=added)
    assert torch.equal(added, wanted)


def test_without_onednn_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roamc.operators.onednn.product_into", lambda: None)
    first, second, added = torch.randn(40, 30), torch.randn(30, 20), torch.randn(20)
    batches = first.expand(2, 40, 30), second.expand(2, 30, 20)
    assert torch.equal(ONEDNN[aten.mm.default](first, second), torch.mm(first, second))
    assert torch.equal(ONEDNN[aten.addmm.default](added, first, second), torch.addmm(added, first, second))
    assert torch.equal(ONEDNN[aten.bmm.default](*batches), torch.bmm(*batches))


def test_a_torch_without_the_function_has_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat_onednn, "MATMUL", "no_such_function")
    assert product_into.__wrapped__() is None


def test_a_processor_that_the_function_refuses_has_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat_onednn, "_takes_this_processor", lambda: False)
    assert product_into.__wrapped__() is None


def test_a_function_that_multiplies_wrongly_is_not_taken() -> None:
    def forgets_beta(first: Tensor, second: Tensor, out: Tensor, beta: float) -> None:
        out.copy_(first @ second)

    def right(first: Tensor, second: Tensor, out: Tensor, beta: float) -> None:
        out.copy_(first @ second + (out if beta else 0))

    assert not compat_onednn._is_right(forgets_beta)
    assert compat_onednn._is_right(right)


@needs_onednn
@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((2, 3), (4, 5), (2, 5)), "is no product"),
        (((2, 3), (3, 5), (5, 2)), "is no product"),
        (((2, 3), (3,), (2,)), "is no product"),
        (((2, 0), (0, 5), (2, 5)), "is no product"),
        (((4, 2, 3), (3, 5), (4, 2, 5)), "is no product"),
        (((4, 2, 3), (5, 3, 5), (4, 2, 5)), "is no product"),
        (((1, 1, 2, 3), (1, 1, 3, 5), (1, 1, 2, 5)), "is no product"),
    ],
)
def test_what_would_end_the_process_is_refused(shapes: tuple[tuple[int, ...], ...], says: str) -> None:
    product = product_into()
    assert product is not None
    with pytest.raises(ValueError, match=says):
        product(*(torch.ones(shape) for shape in shapes), 0.0)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": torch.Tensor.double,
    "bfloat16": torch.Tensor.bfloat16,
    "meta": lambda tensor: tensor.to("meta"),
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "sparse": torch.Tensor.to_sparse,
}


@needs_onednn
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", OTHERS)
def test_other_tensors_are_refused(number: int, kind: str) -> None:
    product = product_into()
    assert product is not None
    tensors = [torch.ones(3, 3) for _ in range(3)]
    tensors[number] = OTHERS[kind](tensors[number])
    with pytest.raises(TypeError, match="takes float32 tensors on a CPU"):
        product(*tensors, 0.0)


def test_the_trial_runs_under_any_mode() -> None:
    with FakeTensorMode(), torch.device("meta"):
        assert (product_into.__wrapped__() is None) == (product_into() is None)


PLANS_FIRST = """
import torch, roamc

model = torch.nn.Linear(256, 256)
run = torch.compile(model, backend="roamc", options={"numerics": "fast", "strict": True})
run(torch.randn(256, 256)).sum().backward()
(plan,) = roamc.plans()
print("planned", "products" in plan.decisions)
"""


def test_a_process_may_begin_with_a_plan(tmp_path: Path) -> None:
    """The product is looked up while torch.compile traces with fake tensors, and forms are measured then."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PLANS_FIRST], env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout == "planned True\n", done.stderr[-2000:]
    assert list(tmp_path.rglob("products-*.json")) or product_into() is None
