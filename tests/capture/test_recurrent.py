"""The operators that recurrent layers become have the bits of torch's own kernels, forward and backward."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher

from roamc.capture.recurrent import DECOMPOSITIONS, decomposed
from roamc.compat_operators import decompositions
from tests.end_to_end.helpers import assert_same, noise, onednn, seeded

aten = torch.ops.aten
KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {}),
    "rnn with relu": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTM, {}),
    "lstm with projection": (nn.LSTM, {"proj_size": 5}),
}
SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "dropout": {"num_layers": 3, "dropout": 0.9},
    "both directions, no bias": {"num_layers": 2, "dropout": 0.5, "bidirectional": True, "bias": False},
    "batch first": {"num_layers": 2, "batch_first": True},
}


def results(layer: nn.RNNBase, x: Tensor, states: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs, final states and gradients."""
    x, states = x.clone().requires_grad_(), tuple(state.clone().requires_grad_() for state in states)
    initial = (states if len(states) == 2 else states[0],) if states else ()
    outputs, final = layer(x, *initial)
    returned = [outputs, *(final if isinstance(final, tuple) else (final,))]
    loss = sum((part.sin() * (at + 1)).sum() for at, part in enumerate(returned))
    return [*returned, *torch.autograd.grad(loss, [x, *states, *layer.parameters()])]


def by_decomposition(layer: nn.RNNBase, x: Tensor, states: tuple[Tensor, ...]) -> list[Tensor]:
    with enable_python_dispatcher(), decomposed():
        return results(layer, x, states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_equal_eager(kind: str, shape: str, dtype: torch.dtype) -> None:
    make, arguments = KINDS[kind]
    layer = seeded(lambda: make(8, 11, **arguments, **SHAPES[shape])).to(dtype)
    x = noise(3, 4, 8).to(dtype)
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    batch = 3 if layer.batch_first else 4
    widths = (layer.proj_size or 11, 11) if kind.startswith("lstm") else (11,)
    states = tuple(noise(rows, batch, width).to(dtype) for width in widths)
    with onednn(False):
        assert_same(seeded(by_decomposition, layer, x, states), seeded(results, layer, x, states))
        assert_same(seeded(by_decomposition, layer, x[:, :1], ()), seeded(results, layer, x[:, :1], ()))


def test_no_dropout_in_eval_mode() -> None:
    layer, x = nn.GRU(8, 11, 2, dropout=0.9).eval(), noise(3, 4, 8)
    assert_same(by_decomposition(layer, x, ()), results(layer, x, ()))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_differs_from_onednn_in_the_last_bits_only(bidirectional: bool) -> None:
    layer, x = seeded(lambda: nn.LSTM(8, 11, 2, bidirectional=bidirectional)), noise(3, 4, 8)
    with onednn(True):
        torch.testing.assert_close(by_decomposition(layer, x, ()), results(layer, x, ()), rtol=1e-5, atol=1e-6)


def test_an_lstm_that_needs_no_gradient_is_left_to_onednn() -> None:
    layer, x = nn.LSTM(8, 11, 2).requires_grad_(False), noise(3, 4, 8)
    with onednn(True), enable_python_dispatcher(), decomposed():
        outputs = layer(x)
    assert_same(outputs, layer(x))


def test_an_lstm_of_no_rows_is_not_left_to_onednn() -> None:
    """oneDNN's layer divides by the rows, and the process would end; eager does not call it either."""
    layer, x = nn.LSTM(8, 11, 2).requires_grad_(False), noise(3, 0, 8)
    with onednn(True), enable_python_dispatcher(), decomposed():
        outputs = layer(x)
    assert_same(outputs, layer(x))


def test_only_the_thread_that_traces_has_these_decompositions() -> None:
    calls: list[str] = []

    def noted(*_: Any) -> Any:
        calls.append(threading.current_thread().name)
        return NotImplemented

    def run() -> None:
        with enable_python_dispatcher():
            nn.GRU(8, 11)(noise(3, 4, 8))

    with decompositions({aten.gru.input: noted}):
        other = threading.Thread(target=run)
        other.start()
        other.join()
        run()
    run()
    assert calls == [threading.current_thread().name]
    assert aten.gru.input in DECOMPOSITIONS
