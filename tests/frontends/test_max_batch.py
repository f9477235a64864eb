"""max_batch: the largest size fits, the next one does not, and nothing was allocated to find out."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.errors import BudgetError, CaptureError, OptionError
from roamc.frontends import largest
from roamc.options import Options

WIDTH = 64


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def make(size: int) -> tuple[nn.Module, tuple[Tensor], object]:
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return model, (torch.empty(size, WIDTH),), loss


def fits(size: int, budget: int) -> bool:
    with torch.device("meta"):
        model, batch, _ = make(size)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        return roamc.plan(model, *batch, loss_fn=loss, optimizer=optimizer, memory_budget=budget).needed_bytes <= budget
    except BudgetError:
        return False


def test_largest_size_fits_and_the_next_does_not() -> None:
    budget = 600_000
    fit = roamc.max_batch(make, budget)
    assert fit.plan.needed_bytes <= budget
    assert fit.too_large == fit.size + 1
    assert fits(fit.size, budget)
    assert not fits(fit.size + 1, budget)
    assert fit.plan.added_seconds > 0, "recomputation makes room for a larger batch"


def total(size: int, **options: Any) -> int:
    """Bytes of the whole process for a size; 0 if it does not fit."""
    with torch.device("meta"):
        model, batch, _ = make(size)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        plan = roamc.plan(model, *batch, loss_fn=loss, optimizer=optimizer, **options)
    except BudgetError:
        return 0
    assert plan.fits
    return plan.total_bytes


PLAIN: dict[bool, dict[str, Any]] = {True: {}, False: {"disable": "retain"}}
"""Options of a plan, by the ``recomputation`` of :func:`roamc.max_batch`."""


@pytest.mark.parametrize("recomputation", [True, False])
@pytest.mark.parametrize("options", [{"memory_budget": "total:1MB"}, {"gpu": "620MB"}, {"gpu": "l4", "largest": 9}])
def test_the_whole_process_of_the_largest_size_fits(options: dict[str, Any], recomputation: bool) -> None:
    fit = roamc.max_batch(make, recomputation=recomputation, **options)
    named = {name: value for name, value in options.items() if name != "largest"}
    assert 0 < total(fit.size, **named, **PLAIN[recomputation]) <= fit.plan.room_bytes
    assert fit.plan.device == ("cuda" if "gpu" in options else "cpu")
    if "largest" in options:
        assert (fit.size, fit.too_large) == (9, None)
    else:
        assert fit.too_large == fit.size + 1
        assert not total(fit.size + 1, **named, **PLAIN[recomputation])


def test_a_gpu_in_part_of_its_memory() -> None:
    part, whole = (roamc.max_batch(make, budget, gpu="620MB") for budget in ("total:615MB", None))
    assert part.size < whole.size
    assert part.plan.total_bytes <= 615_000_000


@pytest.mark.parametrize("budget", ["6GB", "total:90GB", "min", "device"])
def test_a_gpu_and_a_budget_that_limits_something_else(budget: str) -> None:
    with pytest.raises(OptionError, match="gpu='h100': leave memory_budget="):
        roamc.max_batch(make, budget, gpu="h100")


def test_no_size_fits_a_total_that_the_parameters_exceed() -> None:
    with pytest.raises(BudgetError, match=r"not even size 1, .* does not fit 300 kB"):
        roamc.max_batch(make, "total:300kB")


def test_no_size_above_the_largest_is_tried() -> None:
    fit = roamc.max_batch(make, "1GB", largest=5)
    assert (fit.size, fit.too_large) == (5, None)


def test_a_function_that_ignores_its_size_is_refused() -> None:
    with pytest.raises(CaptureError, match="does not grow with its size: sizes 1 and 8 give the same one; let the"):
        roamc.max_batch(lambda size: make(4), "1GB", largest=8)


def test_sizes_that_are_rounded_up_may_repeat_a_step() -> None:
    assert roamc.max_batch(lambda size: make(max(size, 4)), "1GB", largest=8).size == 8


def test_budget_below_any_size_is_an_error() -> None:
    with pytest.raises(BudgetError, match=r"not even size 1, .* Sequential needs .* above memory_budget=1 kB") as error:
        roamc.max_batch(make, "1kB")
    assert "smaller batch" not in str(error.value)
    assert error.value.plan is not None
    with pytest.raises(BudgetError, match="not even size 4096"):
        roamc.max_batch(make, 300_000, smallest=4096)


def with_batch_norm(size: int) -> tuple[nn.Module, tuple[Tensor], object]:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), (torch.empty(size, WIDTH),), loss


@pytest.mark.parametrize("forward_backward", [False, True])
def test_model_that_needs_more_than_one_row(forward_backward: bool) -> None:
    fit = roamc.max_batch(with_batch_norm, "1MB", smallest=2, largest=7, forward_backward=forward_backward)
    assert (fit.size, fit.too_large) == (7, None)


@pytest.mark.parametrize(
    "sizes",
    [{"largest": 10.5}, {"largest": "8"}, {"largest": 0}, {"largest": True}, {"smallest": 0}, {"smallest": 1.5},
     {"smallest": 5, "largest": 4}],
)  # fmt: skip
def test_sizes_are_whole_numbers(sizes: Any) -> None:
    with pytest.raises(OptionError, match=r"(smallest|largest) must be a whole number, at least [15], not"):
        roamc.max_batch(make, "1GB", **sizes)


def test_model_built_outside_of_the_function() -> None:
    model, _, _ = make(1)
    with pytest.raises(CaptureError, match="build the model inside the function"):
        roamc.max_batch(lambda size: (model, torch.empty(size, WIDTH), loss), "1MB")


@pytest.mark.parametrize("budget", ["80%", "min", None])
def test_budget_must_not_grow_with_the_size(budget: Any) -> None:
    with pytest.raises(OptionError, match="needs a memory_budget in bytes"):
        roamc.max_batch(make, budget)


def of_two(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss(model, x + y)


@pytest.mark.parametrize("forward_backward", [False, True])
@pytest.mark.parametrize(
    ("inputs", "loss_fn", "said"),
    [
        (lambda size: torch.empty(size, 8), of_two, r"called as of_two\(model, ...\), which does not fit"),
        (lambda size: [torch.empty(size, 8)] * 3, None, r"called as Bilinear\(..., ..., ...\), which does not fit"),
        (lambda size: {"input1": torch.empty(size, 8)}, None, r"called as Bilinear\(input1=...\), which does not fit"),
    ],
)
def test_inputs_that_do_not_fit(inputs: Any, loss_fn: Any, said: str, forward_backward: bool) -> None:
    with pytest.raises(CaptureError, match=said):
        roamc.max_batch(
            lambda size: (nn.Bilinear(8, 8, 8), inputs(size), loss_fn), "1MB", forward_backward=forward_backward
        )


def test_what_makes_the_model_is_a_function() -> None:
    with pytest.raises(CaptureError, match=r"takes a function of a size .* not tuple"):
        roamc.max_batch(make(1), "1MB")  # type: ignore[arg-type]


def test_a_model_is_no_function_of_a_size() -> None:
    with pytest.raises(CaptureError, match=r"takes a function of a size .* not Linear"):
        roamc.max_batch(nn.Linear(2, 2), 1000)


def made_of(widths: list[int]) -> Any:
    """A function that makes a model of layers of these widths for a size."""

    def make(size: int) -> tuple[nn.Module, tuple[Tensor], object]:
        parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*parts), (torch.empty(size, widths[0]),), loss

    return make


def plan_for(make: Any, size: int, budget: int | str | None, **options: Any) -> roamc.Plan:
    with torch.device("meta"):
        model, batch, _ = make(size)
    optimizer = torch.optim.AdamW(model.parameters())
    return roamc.plan(model, *batch, loss_fn=loss, optimizer=optimizer, memory_budget=budget, **options)


@pytest.mark.parametrize("recomputation", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_same_answer_as_every_size_tried(seed: int, recomputation: bool) -> None:
    dice = random.Random(seed)
    build = made_of([dice.randrange(1, 48) for _ in range(dice.randrange(2, 5))])
    first = dice.randrange(20, 200)
    last = first + 9
    needs = plan_for(build, first + dice.randrange(8), None).needed_bytes
    budget = needs if recomputation is False else needs * dice.randrange(95, 100) // 100

    def fits(size: int) -> bool:
        try:
            return plan_for(build, size, budget, **PLAIN[recomputation]).needed_bytes <= budget
        except BudgetError:
            return False

    sizes = [size for size in range(first, last + 1) if fits(size)]
    if not sizes:
        with pytest.raises(BudgetError, match=f"not even size {first}"):
            roamc.max_batch(build, budget, smallest=first, largest=last, recomputation=recomputation)
        return
    fit = roamc.max_batch(build, budget, smallest=first, largest=last, recomputation=recomputation)
    assert fit.size in sizes
    assert sizes == list(range(first, fit.size + 1)), "smaller sizes than one that fits do not fit: another seed"
    assert fit.too_large == (fit.size + 1 if fit.size < last else None)


class Attention(nn.Module):
    """One layer over sequences of 12 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 48, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(-1, 12, 16))  # type: ignore[no-any-return]


SMALL_MODELS: dict[str, Any] = {
    "wide": made_of([64, 1024, 10]),
    "deep": made_of([24] * 6),
    "convolutions": lambda size: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        (torch.empty(size, 3, 12, 12),), loss,
    ),
    "attention": lambda size: (Attention(), (torch.empty(size, 192),), loss),
}  # fmt: skip


@pytest.mark.parametrize("recomputation", [True, False])
@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_plan_of_the_largest_size_fits_and_of_the_next_does_not(name: str, total: bool, recomputation: bool) -> None:
    build, dice = SMALL_MODELS[name], random.Random(f"{name} {total} {recomputation}")
    for size in (dice.randrange(20, 60), dice.randrange(300, 900)):
        free = plan_for(build, size, None)  # a budget about where its layout decides
        nbytes = (free.total_bytes if total else free.needed_bytes) - dice.randrange(free.needed_bytes // size)
        budget = f"total:{nbytes}" if total else nbytes
        fit = roamc.max_batch(build, budget, recomputation=recomputation)
        assert plan_for(build, fit.size, budget, **PLAIN[recomputation]).needed_bytes == fit.plan.needed_bytes
        with pytest.raises(BudgetError):
            plan_for(build, fit.size + 1, budget, **PLAIN[recomputation])


def test_a_layout_for_the_budget_decides_without_recomputation() -> None:
    """Of 2223 rows a plan of no added time takes 20.005 MB, and one for 20 MB fits."""

    def make(size: int) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
        return model, (torch.empty(size, 64), torch.empty(size, dtype=torch.long)), of_classes

    fit = roamc.max_batch(make, "total:20MB", recomputation=False)
    with torch.device("meta"):
        model, batch, _ = make(2223)
    adamw = torch.optim.AdamW(model.parameters())
    plan = roamc.plan(model, *batch, loss_fn=of_classes, optimizer=adamw, memory_budget="total:20MB")
    assert plan.added_seconds == 0
    assert fit.size >= 2223


def of_classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def test_few_sizes_are_planned() -> None:
    fit = roamc.max_batch(make, 20_000_000)
    assert len(fit.planned) <= 4
    assert len(fit.tried) <= 8
    assert fit.size > 1_000
    assert fit.too_large == fit.size + 1


def test_without_recomputation_nothing_runs_again() -> None:
    budget = 600_000
    fit, free = roamc.max_batch(make, budget), roamc.max_batch(make, budget, recomputation=False)
    assert free.size < fit.size
    assert fit.added_share > 0
    assert free.added_share == 0
    assert free.plan.added_seconds == 0
    with pytest.raises(BudgetError, match=r"not even size 1, .* Sequential needs .*=1 kB, without recomputation;"):
        roamc.max_batch(make, "1kB", recomputation=False)


def test_plan_files_are_refused() -> None:
    with pytest.raises(OptionError, match=r"plans several sizes, and .*one\.json is for one"):
        roamc.max_batch(make, 20_000_000, plan="one.json")


class Misleading:
    """A search for plans of a step that needs ``size`` bytes; a quick one finds none in less than a third more."""

    def __init__(self, size: int, has_lowest: bool = False) -> None:
        self.size, self.fingerprint, self.terms, self.has_lowest = size, str(size), self, has_lowest
        self.limit = LIMIT

    def least_bytes(self, limit: int) -> int:
        return self.size * 3 // 4

    def taken(self, plan: object) -> int:
        return int(getattr(plan, "needed_bytes", plan))

    def run(self, *, quick: bool = False) -> SimpleNamespace:
        needed = self.size * 4 // 3 if quick else self.size
        if needed > LIMIT:
            raise BudgetError("too large", needed)
        return SimpleNamespace(plan=SimpleNamespace(fingerprint="", needed_bytes=needed))


LIMIT = 74_867


def test_quick_searches_that_refuse_what_fits_do_not_lead_to_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "_lowest", lambda error: error.plan)
    monkeypatch.setattr(largest.Largest, "_search", lambda self, size: Misleading(size))
    search = largest.Largest(lambda size: pytest.fail("captured"), Options(), 1, 1 << 24)
    fit = search.run()
    assert (fit.size, fit.too_large) == (LIMIT, LIMIT + 1)
    assert len(fit.planned) <= largest.PATIENCE + 2 * 17


def test_a_size_that_the_lowest_plan_does_not_fit_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick search has made the plan of ``"min"`` where that needs little more than the budget: that plan counts."""
    monkeypatch.setattr(largest, "_lowest", lambda error: error.plan)
    monkeypatch.setattr(largest.Largest, "_search", lambda self, size: Misleading(size, has_lowest=True))
    planned: list[int] = []
    plan = largest.Largest._plan
    monkeypatch.setattr(largest.Largest, "_plan", lambda self, size: (planned.append(size), plan(self, size)))
    fit = largest.Largest(lambda size: pytest.fail("captured"), Options(), 1, 1 << 24).run()
    assert fit.too_large == fit.size + 1
    assert len(planned) == len(set(planned))


class FarAbove(Misleading):
    """A search for plans of a step whose plans lie half above its bounds, and grow with them by a line."""

    def least_bytes(self, limit: int) -> int:
        return (self.size + 20_000) * 2 // 3

    def run(self, *, quick: bool = False) -> SimpleNamespace:
        if self.size + 20_000 > LIMIT:
            raise BudgetError("too large", self.size + 20_000)
        return SimpleNamespace(plan=SimpleNamespace(fingerprint="", needed_bytes=self.size + 20_000))


def test_the_first_plan_says_how_far_plans_lie_above_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes as long as a plan, so none is spent on where the bounds cross the budget."""
    monkeypatch.setattr(largest, "_lowest", lambda error: error.plan)
    monkeypatch.setattr(largest.Largest, "_search", lambda self, size: FarAbove(size))
    fit = largest.Largest(lambda size: pytest.fail("captured"), Options(), 1, 1 << 24).run()
    assert fit.size == LIMIT - 20_000
    assert len(fit.planned) == 3
    assert len(fit.tried) <= 8
