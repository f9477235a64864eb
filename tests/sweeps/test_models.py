"""A few random models, each by one route and budget; `make sweep` runs 500 of each family by all of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roamc
from tests.end_to_end.helpers import TORCH
from tests.sweeps import in_place_models, models_compare
from tests.sweeps.compare import different
from tests.sweeps.models_compare import BUDGETS, ROUTES, judge
from tests.sweeps.random_models import Attention, Averaged, Cast, Checkpointed, Recurrent, Scaled, example
from tests.sweeps.run_models import GOOD

WAYS = list(itertools.product(ROUTES, BUDGETS))
CASES = list(zip(range(12), itertools.cycle(WAYS), strict=False))

IN_PLACE = list(zip(range(100, 112), itertools.cycle(WAYS), strict=False))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled here is left behind."""
    yield
    torch._dynamo.reset()
    models_compare.reference.cache_clear()


@pytest.mark.parametrize(("seed", "way"), CASES, ids=str)
def test_bits_of_torch_or_one_clear_refusal(seed: int, way: tuple[str, str | None]) -> None:
    verdict = judge(seed, *way)
    assert verdict.outcome in GOOD, verdict


@pytest.mark.parametrize(("seed", "way"), IN_PLACE, ids=str)
def test_bits_of_torch_where_modules_write_in_place(seed: int, way: tuple[str, str | None]) -> None:
    verdict = judge(seed, *way, family="in-place")
    assert verdict.outcome in GOOD, verdict


def test_numbers_give_all_kinds_of_models() -> None:
    kinds: set[type] = set()
    dtypes, batches, frozen, shared = set(), set(), 0, 0
    for seed in range(80):
        case = example(seed)
        model = case.make()
        modules = [module for _, module in model.named_modules(remove_duplicate=False)]
        kinds |= {type(module) for module in modules}
        shared += len(modules) > len(set(modules))
        frozen += not all(parameter.requires_grad for parameter in model.parameters())
        dtypes |= {parameter.dtype for parameter in model.parameters()}
        batches |= {(len(batch), type(batch[0])) for batch in case.batches}
    norms = {nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.GroupNorm, nn.InstanceNorm1d}
    assert norms | {nn.Conv1d, nn.Conv2d, nn.Dropout} <= kinds
    assert {Attention, Averaged, Cast, Checkpointed, Recurrent, Scaled} <= kinds
    assert dtypes == {torch.float32, torch.bfloat16, torch.float64}
    assert len(batches) == 3
    assert min(frozen, shared) > 5


def test_number_gives_the_same_model_twice() -> None:
    torch.manual_seed(5)
    first, second = example(3).make(), example(3).make()
    assert str(first) == str(second)
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_modules_that_write_in_place_can_be_trained_in_eager() -> None:
    for seed in range(20):
        results = models_compare.reference(seed, "eager", family="in-place")
        assert all(tensor is None or tensor.isfinite().all() for tensor in results.values()), seed
        assert any(tensor is not None for name, tensor in results.items() if name.startswith("gradient")), seed


def test_numbers_give_all_kinds_of_writes() -> None:
    texts = [in_place_models.source(seed).text for seed in range(50)]
    kinds = (r"no_grad", r"\.detach\(\)", r" [-+*]= ", r"\] = ", r"\.chunk\(", r"\bb0\.", r"\bx\.", r"inplace=True")
    returns = (r"return h\d,", r"mean\(\) \+", r"return .*, (b\d|x)$")
    after_forward = (r"self\.e\(", r"self\.[uw]\.detach\(\)")
    for kind in (*kinds, *returns, *after_forward, r"index_put_", r"copy_", r"addcmul_", r"\.diagonal\(\)"):
        assert any(re.search(kind, text, re.MULTILINE) for text in texts), kind


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (("v1, v2 = self.l0(x).chunk(2)", "v1.zero_()"), RuntimeError),  # a write to one of several views
        (("h0 = self.l0(x)", "h1 = h0.sigmoid()", "h1.zero_()"), RuntimeError),  # backward needs what it was
        (("v1 = self.b0[1:]", "v1.add_(self.w)"), ValueError),  # the buffer would keep a gradient
        (("v1 = x[1:-1][:, :0]",), ValueError),
    ],
)
def test_lines_that_eager_cannot_train_are_refused(lines: tuple[str, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        in_place_models.values_after(list(lines), 8, 8)


def test_a_module_that_writes_in_place_is_printed_as_code() -> None:
    text = in_place_models.source(3).text
    said = str(in_place_models.example(3).make())
    assert all(line in said for line in text.splitlines())
    assert said == str(in_place_models.example(3).make())


def test_a_write_to_an_input_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    results, plans = models_compare.by_roamc(in_place_models.example(3), "compile", None)
    changed = {**results, "input 0 after 1": torch.zeros(1)}
    monkeypatch.setattr(models_compare, "by_roamc", lambda *way: (changed, plans))
    assert judge(3, "compile", None, family="in-place").outcome == "differs"


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a mistake")


@pytest.mark.parametrize("broken", ["roamc.frontends.backend.together.run", "roamc.runtime.arena.ArenaPool.acquire"])
def test_fallbacks_are_seen(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(broken, fail)
    verdict = judge(3, "optimize", None)
    assert verdict.outcome == "falls back"
    assert "a mistake" in verdict.text


def test_a_recurrent_layer_gives_the_bits_of_eager_where_aot_eager_does_not() -> None:
    if TORCH >= (2, 12):  # before, aot_eager has eager's bits here
        assert different(models_compare.reference(14, "aot_eager"), models_compare.reference(14, "eager")) != ""
    assert judge(14, "optimize", None).outcome == "same"


def test_wrong_bits_of_a_module_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = models_compare.loss_of
    by_roamc = models_compare.by_roamc

    def doubled(*way: Any) -> Any:
        monkeypatch.setattr(models_compare, "loss_of", lambda *batch: once(*batch) * 2)
        results = by_roamc(*way)
        monkeypatch.setattr(models_compare, "loss_of", once)
        return results

    monkeypatch.setattr(models_compare, "by_roamc", doubled)
    assert judge(3, "optimize", None).outcome == "differs"


def test_wrong_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = roamc.TrainStep.__call__
    monkeypatch.setattr(roamc.TrainStep, "__call__", lambda step, *batch: once(step, *batch) * 2)
    assert judge(3, "step", None).outcome == "differs"


def test_torch_compile_may_have_the_bits_of_eager_where_aot_eager_is_wrong() -> None:
    """A checkpointed part of model 135 updates a buffer and reads it: aot_eager reads another value in backward."""
    assert different(models_compare.reference(135, "aot_eager"), models_compare.reference(135, "eager")) != ""
    assert judge(135, "compile", None).outcome == "same"


def test_the_second_run_of_a_checkpointed_part_updates_no_buffer_under_torch_compile() -> None:
    """Every tensor of model 174 is eager's, had backward left the buffer as forward wrote it; neither twin's is."""
    once = models_compare.reference(174, "eager forward's buffers")
    for kind in ("aot_eager", "eager"):
        assert different(once, models_compare.reference(174, kind)) != ""
    assert judge(174, "compile", None).outcome == "same"


def test_a_mixture_of_two_references_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    results, plans = models_compare.by_roamc(example(174), "compile", None)
    twice = "blocks.0.inner.1.0.0.mean after 0"
    mixed = {**results, twice: models_compare.reference(174, "eager")[twice]}
    monkeypatch.setattr(models_compare, "by_roamc", lambda *way: (mixed, plans))
    assert judge(174, "compile", None).outcome == "differs"


def test_a_model_that_dynamo_runs_in_eager_has_no_graph() -> None:
    assert models_compare.graphs_of(example(60)) == 0
    assert judge(60, "compile", None).outcome == "no graph"


def test_a_graph_that_is_not_planned_without_a_word_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    by_roamc = models_compare.by_roamc
    monkeypatch.setattr(models_compare, "by_roamc", lambda *way: (by_roamc(*way)[0], []))
    assert judge(3, "compile", None).outcome == "silent"


def test_an_lstm_by_optimize_has_the_bits_of_atens_steps() -> None:
    """Model 78 begins with a plain LSTM."""
    try:
        by_onednn = models_compare.reference(78, "eager")
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip("oneDNN has no such LSTM on this processor, where eager PyTorch cannot run the model either")
    by_aten = models_compare.reference(78, "eager", True)
    assert different(by_onednn, by_aten) != ""
    assert judge(78, "optimize", None).outcome == "same"
