"""Recurrent layers by each way in have the bits of eager, the dropout between their layers included."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.errors import CaptureError
from tests.end_to_end.helpers import (
    Loss,
    aot_eager,
    assert_same,
    fresh,
    noise,
    onednn,
    run_backward,
    seeded,
    sgd,
    tensors_of,
)

X = noise(3, 2, 8)
STATES = (noise(2, 2, 6), noise(2, 2, 6, seed=4))
Layer = tuple[type[nn.RNNBase], dict[str, Any]]
DROPPED: dict[str, Layer] = {
    "gru": (nn.GRU, {"num_layers": 2, "dropout": 0.9}),
    "rnn": (nn.RNN, {"num_layers": 2, "dropout": 0.9, "nonlinearity": "relu"}),
    "lstm with projection": (nn.LSTM, {"num_layers": 2, "dropout": 0.9, "proj_size": 5}),
}
ON_FEATURES: dict[str, Layer] = {
    "both directions": (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    "no bias": (nn.LSTM, {"num_layers": 2, "bias": False}),
}
WAYS = ("compile", "optimize", "train_step")


class Sequence(nn.Module):
    """A recurrent layer behind a Linear, or on what needs no gradient; all of its results go into the loss."""

    def __init__(self, layer: Layer, features: bool = False, **changed: Any) -> None:
        super().__init__()
        kind, arguments = layer
        torch.manual_seed(1)
        self.first = nn.Identity() if features else nn.Linear(8, 8)
        self.layer = kind(8, 6, **{**arguments, **changed})

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        initial = (states if isinstance(self.layer, nn.LSTM) else states[0],) if states else ()
        outputs, final = self.layer(self.first(x), *initial)
        final = final if isinstance(final, tuple) else (final,)
        return (outputs * outputs).mean() + sum(state.sin().mean() for state in final)


def loss_fn(model: nn.Module, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


@pytest.fixture(autouse=True)
def native_lstm() -> Iterator[None]:
    """ATen's own steps also for a plain LSTM, for which eager takes oneDNN otherwise."""
    torch._dynamo.reset()
    with onednn(False), torch._dynamo.config.patch(allow_rnn=True):
        yield


def eager_step(model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
    """One step of plain eager: torch's decompositions, which leave out the dropout, are not asked."""
    result = loss(model, *batch)
    result.backward()
    optimizer.step()
    model.zero_grad()
    return result.detach()


def assert_eager(model: nn.Module, way: str, *batch: Tensor, **options: Any) -> None:
    """Two steps, or two backwards that add up, as eager's bit for bit."""
    twin = copy.deepcopy(model)
    if way == "train_step":
        reference = sgd(twin)
        step = roamc.train_step(model, loss_fn, sgd(model), strict=True, **options)
        for seed in range(2):
            loss = seeded(step, *fresh(batch), seed=seed)
            wanted = seeded(eager_step, twin, loss_fn, reference, *fresh(batch), seed=seed)
            assert_same([loss, tensors_of(model)], [wanted, tensors_of(twin)], f"step {seed}")
        return
    if way == "optimize":
        roamc.optimize(model, strict=True, **options)
    else:
        model.compile(backend="roamc", options={"strict": True, **options}, dynamic=False)
    for seed in range(2):
        assert_same(run_backward(model, loss_fn, batch, seed), run_backward(twin, loss_fn, batch, seed), str(seed))
    assert way == "compile" or roamc.plans(model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DROPPED)
def test_dropout_between_layers_is_eagers(name: str, way: str) -> None:
    assert_eager(Sequence(DROPPED[name]), way, X)
    with_dropout, without = (seeded(Sequence(DROPPED[name], dropout=drop), X).item() for drop in (0.9, 0.0))
    assert with_dropout != without


@pytest.mark.parametrize("way", ["optimize", "train_step"])
@pytest.mark.parametrize("name", ON_FEATURES)
def test_an_lstm_on_an_input_without_gradient_equals_eager(name: str, way: str) -> None:
    assert_eager(Sequence(ON_FEATURES[name], features=True), way, X)


def test_given_states_equal_eager() -> None:
    assert_eager(Sequence(ON_FEATURES["no bias"], features=True), "train_step", X, *STATES)


def test_the_smallest_budget_equals_eager() -> None:
    assert_eager(Sequence(DROPPED["gru"]), "train_step", X[:2], memory_budget="min")


def test_an_lstm_that_needs_no_gradient_runs_in_onednn_as_in_eager() -> None:
    model = Sequence(ON_FEATURES["no bias"], features=True)
    plain = copy.deepcopy(model)
    roamc.optimize(model, strict=True)
    with onednn(True), torch.no_grad():
        assert_same(model(X), plain(X))
    assert len(roamc.plans(model)) == 1


class Cast(Sequence):
    """The same under autocast, which casts a weight once for all steps of a layer."""

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, *states).float()


@pytest.mark.parametrize("way", ["optimize", "train_step"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_layers_under_autocast_equal_eager(kind: type[nn.RNNBase], way: str) -> None:
    model = Cast((kind, {"num_layers": 2}))
    assert_eager(model, way, X)


class Cells(nn.Module):
    """Two steps of a cell, and pieces of a tensor that torch declares to be no views, one of them written to."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell = kind(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x, self.cell(x.flip(0)))
        hidden = torch.cat(state) if isinstance(state, tuple) else state
        first, second = hidden.unsafe_chunk(2, 1)
        third, _ = (hidden * 2).unsafe_split_with_sizes([4, 4], 1)
        return (first * second.add_(1) * third).sum()


@pytest.mark.parametrize("way", ["compile", "train_step"])
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_cells_equal_eager(kind: type[nn.RNNCellBase], way: str) -> None:
    if way == "train_step":
        assert_eager(Cells(kind), way, X[0])
        return
    # Eager adds up a cell's gradients as torch.compile's operators do on some processors, and not on others.
    model, twin = Cells(kind), aot_eager(Cells(kind))
    model.compile(backend="roamc", options={"strict": True}, dynamic=False)
    for seed in range(2):
        assert_same(run_backward(model, loss_fn, (X[0],), seed), run_backward(twin, loss_fn, (X[0],), seed), str(seed))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), nn.GRU(8, 6, 2, dropout=0.5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x), lengths)
        return self.layer(packed)[0].data.sum()


def test_packed_sequences_run_by_optimize_and_are_refused_by_train_step() -> None:
    torch.manual_seed(1)
    model, lengths = Packed(), torch.tensor([3, 1])
    with pytest.raises(CaptureError, match=r"the shape of a result depends on data \(aten._pack_padded_sequence"):
        roamc.train_step(model, loss_fn, sgd(model))(X, lengths)
    assert_eager(model, "optimize", X, lengths)
