"""Tensors of a step that share memory: eager's bits, or one clear line."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import roamc
from roamc.capture.addresses import sharing
from roamc.capture.shared import may_overlap
from tests.end_to_end.helpers import assert_same, eager_step, noise, sgd, state_of, tensors_of


class Two(nn.Module):
    """Two layers of one size, and a buffer that the step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8, 8))
        self.register_buffer("table", torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1)
        return self.second(torch.tanh(self.first(x)) @ self.table)


def loss(model: nn.Module, x: Tensor, other: Tensor | None = None) -> Tensor:
    return (model(x) if other is None else model(x) * other).square().mean()


def writing(model: nn.Module, x: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        other.mul_(0.5)
    return (model(x.detach().clone()) + x).square().mean()


def built() -> nn.Module:
    torch.manual_seed(0)
    return Two()


def tie(model: Any) -> None:
    model.second.weight.data = model.first.weight.data


def overlap(model: Any) -> None:
    memory = noise(72)
    model.first.weight.data, model.second.weight.data = memory[:64].view(8, 8), memory[8:].view(8, 8)


def of_one_array(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Give ``tensors`` memory of one array of numpy, and return another such tensor: each has a storage of its own."""
    array = noise(8, 8).numpy()
    for tensor in tensors:
        tensor.data = torch.from_numpy(array)
    return (torch.from_numpy(array),)


REFUSED: dict[str, tuple[Callable[..., Tensor], Callable[[Any], tuple[Tensor, ...]], str]] = {
    "a parameter": (loss, lambda m: (m.second.weight,), "parameter 'second.weight'"),
    "what a parameter holds": (loss, lambda m: (m.second.weight.detach(),), "parameter 'second.weight'"),
    "a view of a buffer that is written": (loss, lambda m: (m.count[:4],), "buffer 'count'"),
    "two views, one written": (writing, lambda m: (lambda x: (x[:8], x[4:]))(noise(12, 8)), "batch tensor of shape"),
}


@pytest.mark.parametrize("names", [("second.weight",), ("first.weight", "second.weight"), ("count", "table")])
def test_two_storages_of_one_memory_are_refused(names: tuple[str, ...]) -> None:
    model = built()
    (held,) = of_one_array(*map(model.state_dict(keep_vars=True).__getitem__, names))

    def reading(model: nn.Module, x: Tensor) -> Tensor:
        return loss(model, held)

    before = tensors_of(model)
    for loss_fn, batch in ((reading, noise(8, 8)), (loss, held)):
        with pytest.raises(roamc.CaptureError, match=f"shares memory with .*'{names[0]}'.*clone"):
            roamc.train_step(model, loss_fn, sgd(model), strict=True)(batch)
    assert_same(tensors_of(model), before)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("later", [False, True])
def test_a_batch_that_the_step_would_write_is_refused(name: str, later: bool) -> None:
    loss_fn, batch, other = REFUSED[name]
    model = built()
    step = roamc.train_step(model, loss_fn, sgd(model), strict=True)
    if later:
        step(*(tensor.detach().clone() for tensor in batch(model)))
    before = tensors_of(model)
    with pytest.raises(roamc.CaptureError, match=f"shares memory with .*{other}.*clone"):
        step(*batch(model))
    assert_same(tensors_of(model), before)


def one_of_another(model: Any, state: Any) -> None:
    state[model.second.weight]["exp_avg"] = state[model.first.weight]["exp_avg"]


def two_of_one(model: Any, state: Any) -> None:
    state[model.first.weight]["exp_avg"] = state[model.first.weight]["exp_avg_sq"]


def a_parameter(model: Any, state: Any) -> None:
    state[model.second.weight]["exp_avg_sq"] = model.second.weight.data


def in_part(model: Any, state: Any) -> None:
    memory = noise(72)
    state[model.first.weight]["exp_avg"] = memory[:64].view(8, 8)
    state[model.second.weight]["exp_avg"] = memory[8:].view(8, 8)


def one_memory(model: Any, state: Any) -> None:
    memory = noise(128)
    state[model.first.weight]["exp_avg"] = memory[:64].view(8, 8)
    state[model.second.weight]["exp_avg"] = memory[64:].view(8, 8)


def a_buffer(model: Any, state: Any) -> None:
    state[model.first.weight]["exp_avg"] = model.table


def of_the_batch(model: Any, state: Any) -> None:
    state[model.first.weight]["exp_avg"] = BATCH


def of_the_loss(model: Any, state: Any) -> None:
    state[model.first.weight]["exp_avg"] = KEPT


def of_one_memory(model: Any, state: Any) -> None:
    (state[model.first.weight]["exp_avg"],) = of_one_array(model.second.weight)


def one_count(model: Any, state: Any) -> None:
    state[model.first.weight]["step"] = state[model.second.weight]["step"]


BATCH, KEPT = noise(8, 8), noise(8, 8, seed=5)


def by_kept(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * KEPT).square().mean()


def with_state(share: Callable[[Any, Any], None]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    eager_step(model, loss, optimizer, noise(4, 8))
    share(model, optimizer.state)
    return model, optimizer


SHARES = (one_of_another, two_of_one, a_parameter, in_part, a_buffer, of_the_batch, of_one_memory, one_count)


@pytest.mark.parametrize(("share", "later"), [(of_the_loss, False), *itertools.product(SHARES, (False, True))])
def test_state_that_shares_memory_is_refused(share: Callable[[Any, Any], None], later: bool) -> None:
    model, optimizer = with_state((lambda *_: None) if later else share)
    step = roamc.train_step(model, by_kept, optimizer, strict=True)
    if later:
        step(BATCH)
        share(model, optimizer.state)
    before = copy.deepcopy([tensors_of(model), state_of(optimizer)])
    with pytest.raises(roamc.CaptureError, match=r"optimizer's state shares memory with .*clone"):
        step(BATCH)
    assert_same([tensors_of(model), state_of(optimizer)], before)


def test_state_that_is_exchanged_or_loaded_needs_no_other_capture() -> None:
    model, optimizer = with_state(one_memory)
    step = roamc.train_step(model, loss, optimizer, strict=True)
    step(BATCH)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(BATCH)
    for state in optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items()})
    step(BATCH)
    assert len(step._steps) == 1


def test_state_in_one_storage_side_by_side() -> None:
    model, optimizer = with_state(one_memory)
    twin, reference = with_state(one_memory)
    step = roamc.train_step(model, loss, optimizer, strict=True)
    for _ in range(2):
        assert_same(step(noise(4, 8)), eager_step(twin, loss, reference, noise(4, 8)))
        assert_same([tensors_of(model), state_of(optimizer)], [tensors_of(twin), state_of(reference)])


def test_a_batch_that_shares_memory_that_nobody_writes() -> None:
    model = built()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss, sgd(model), strict=True), sgd(twin)
    for _ in range(2):
        assert_same(step(model.table, model.table[:1]), eager_step(twin, loss, reference, twin.table, twin.table[:1]))
        assert_same(tensors_of(model), tensors_of(twin))


@pytest.mark.parametrize("share", [tie, overlap])
@pytest.mark.parametrize("later", [False, True])
def test_parameters_that_share_memory(share: Callable[[Any], None], later: bool) -> None:
    model = built()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, loss, sgd(model), strict=True), sgd(twin)
    for number in range(4):
        if number == (2 if later else 0):
            share(model)
            share(twin)
        assert_same(step(noise(4, 8)), eager_step(twin, loss, reference, noise(4, 8)))
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")


def test_a_module_and_its_parameters_exchanged_in_model_and_optimizer() -> None:
    model = built()
    twin = copy.deepcopy(model)
    optimizer, reference = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    step = roamc.train_step(model, loss, optimizer, strict=True)
    for number in range(4):
        if number == 2:
            for changed, its in ((model, optimizer), (twin, reference)):
                torch.manual_seed(1)
                changed.first = nn.Linear(8, 8)
                its.param_groups[0]["params"] = list(changed.parameters())
        assert_same(step(noise(4, 8)), eager_step(twin, loss, reference, noise(4, 8)))
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")
    assert_same(state_of(optimizer), state_of(reference))


def of_a_parameter(model: Any, held: Tensor) -> None:
    held.data = model.second.weight.data


def of_a_buffer(model: Any, held: Tensor) -> None:
    held.data = model.count


def of_the_same_array(model: Any, held: Tensor) -> None:
    of_one_array(model.second.weight, held)


def as_another(model: Any, held: Tensor) -> None:
    held.set_(model.second.weight.detach().t())


@pytest.mark.parametrize("share", [of_a_parameter, of_a_buffer, of_the_same_array, as_another])
def test_a_tensor_of_the_loss_that_comes_to_share_what_the_step_writes(share: Callable[[Any, Tensor], None]) -> None:
    model, held = built(), noise(8, 8)
    step = roamc.train_step(model, lambda m, x: m(x @ held).square().mean(), sgd(model), strict=True)
    step(noise(4, 8))
    share(model, held)
    before = copy.deepcopy(tensors_of(model))
    with pytest.raises(roamc.CaptureError, match=r"memory.*clone"):
        step(noise(4, 8))
    assert_same(tensors_of(model), before)


def test_a_tensor_of_the_loss_that_comes_to_share_with_optimizer_state() -> None:
    model, optimizer = with_state(lambda *_: None)
    held = noise(8, 8)
    step = roamc.train_step(model, lambda m, x: m(x @ held).square().mean(), optimizer, strict=True)
    step(noise(4, 8))
    held.data = optimizer.state[model.second.weight]["exp_avg"]
    with pytest.raises(roamc.CaptureError, match=r"optimizer's state shares memory with .*clone"):
        step(noise(4, 8))


def test_a_tensor_of_the_loss_that_gets_other_strides() -> None:
    model, held = built(), noise(8, 8)
    twin, other = copy.deepcopy(model), noise(8, 8)
    step = roamc.train_step(model, lambda m, x: (m(x) * held.reshape(-1)[3:11]).mean(), sgd(model), strict=True)
    reference = sgd(twin)
    for number in range(3):
        if number == 1:
            held.data, other.data = noise(8, 8, seed=1).t(), noise(8, 8, seed=1).t()
        theirs = eager_step(twin, lambda m, x: (m(x) * other.reshape(-1)[3:11]).mean(), reference, noise(4, 8))
        assert_same(step(noise(4, 8)), theirs)
        assert_same(tensors_of(model), tensors_of(twin), f"after step {number}")


def test_a_tensor_of_the_loss_that_stays_or_gets_memory_of_its_own_needs_one_plan() -> None:
    model, held = built(), noise(8, 8)
    step = roamc.train_step(model, lambda m, x: m(x @ held).square().mean(), sgd(model), strict=True)
    for seed in range(3):
        held.data = noise(8, 8, seed=seed)
        step(noise(4, 8))
    assert len(step._steps) == 1


APART: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "every other row": (lambda x: x[::2, :8], lambda x: x[1::2, :8]),
    "halves": (lambda x: x[:8, :8], lambda x: x[8:, :8]),
    "columns": (lambda x: x[:8, :8], lambda x: x[:8, 8:]),
    "columns and rows": (lambda x: x.t()[::2, :8], lambda x: x.t()[1::2, :8]),
}


@pytest.mark.parametrize("name", APART)
def test_parts_of_a_batch_without_a_common_element(name: str) -> None:
    model = built()
    twin = copy.deepcopy(model)
    step, reference = roamc.train_step(model, writing, sgd(model), strict=True), sgd(twin)
    for seed in range(2):
        ours, theirs = noise(16, 16, seed=seed), noise(16, 16, seed=seed)
        assert_same(
            step(*(part(ours) for part in APART[name])),
            eager_step(twin, writing, reference, *(part(theirs) for part in APART[name])),
        )
        assert_same([tensors_of(model), ours], [tensors_of(twin), theirs])


def test_parts_that_meet_later_are_refused() -> None:
    model, x = built(), noise(24, 8)
    step = roamc.train_step(model, writing, sgd(model), strict=True)
    step(x[:8], x[16:])
    with pytest.raises(roamc.CaptureError, match="shares memory"):
        step(x[:8], x[4:12])


@given(st.data())
def test_tensors_that_may_not_overlap_have_no_element_in_common(data: st.DataObject) -> None:
    elements = st.integers(0, 4)
    memory = torch.arange(400)
    parts = []
    for _ in range(2):
        dims = data.draw(st.integers(0, 3))
        shape = data.draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims))
        strides = data.draw(st.lists(elements | st.sampled_from((8, 16)), min_size=dims, max_size=dims))
        parts.append(memory.as_strided(shape, strides, data.draw(st.integers(0, 40))))
    common = set(parts[0].flatten().tolist()) & set(parts[1].flatten().tolist())
    assert not common or may_overlap(*parts)


def test_groups_of_tensors_that_share_memory() -> None:
    x, y = noise(4), noise(4)
    assert sharing([x, y, x[2:], torch.empty(0), torch.empty(0), y.view(2, 2)]) == ((0, 2), (1, 5))
