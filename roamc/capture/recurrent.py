"""Recurrent layers as ATen operators: the steps of torch's own C++ kernels, one after the other.

torch's decompositions of ``gru``, ``lstm`` and ``rnn`` leave out the dropout between layers, and make of an LSTM whose
input needs no gradient an operator of oneDNN that is for inference only. Those here stand in while roamc traces:

    cell          one step of one direction; the input's share of the gates is computed for all steps at once
    _direction    all steps of one direction of one layer
    _stack        all layers, dropout between them

Bits: GRU, RNN and LSTM with a projection are those of eager on a CPU. A plain LSTM in float32 or bfloat16 is eager's
with oneDNN switched off (``torch.backends.mkldnn.flags(enabled=False)``); oneDNN's own adds up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from roamc import compat
from roamc.compat_operators import decompositions

aten = torch.ops.aten
State = tuple[Tensor, ...]
Weights = Sequence[Tensor]
Cell = Callable[[Tensor, State, "Parameters"], State]


class Parameters:
    """Weights and biases of one direction of one layer.

    Args:
        flat: as torch passes them: weight of the input, weight of the hidden state, then their biases and the
            projection, if there are any.
        has_biases: whether ``flat`` has the two biases.
        has_projection: whether ``flat`` ends with the projection of an LSTM.
    """

    def __init__(self, flat: Weights, has_biases: bool, has_projection: bool) -> None:
        self.input_weight, self.hidden_weight = flat[0], flat[1]
        self.input_bias = flat[2] if has_biases else None
        self.hidden_bias = flat[3] if has_biases else None
        self.projection = flat[-1] if has_projection else None

    def of_input(self, x: Tensor) -> Tensor:
        """Return the input's share of all gates for all steps, in the shape (steps, batch, width of all gates).

        ``x`` has the shape (steps, batch, features).
        """
        return F.linear(x, self.input_weight, self.input_bias)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        """Return the hidden state's share of all gates for one step, in the shape (batch, width of all gates).

        ``hidden`` has the shape (batch, hidden size).
        """
        return F.linear(hidden, self.hidden_weight, self.hidden_bias)


def _simple(nonlinearity: Callable[[Tensor], Tensor]) -> Cell:
    def cell(of_input: Tensor, state: State, weights: Parameters) -> State:
        return (nonlinearity(weights.of_hidden(state[0]) + of_input),)

    return cell


def _gru(of_input: Tensor, state: State, weights: Parameters) -> State:
    (hidden,) = state
    width = hidden.size(1)
    gates_of_input, fresh_of_input = of_input.split([2 * width, width], 1)
    gates_of_hidden, fresh_of_hidden = weights.of_hidden(hidden).split([2 * width, width], 1)
    reset, update = (gate.sigmoid() for gate in (gates_of_hidden + gates_of_input).chunk(2, 1))
    fresh = (fresh_of_input + fresh_of_hidden * reset).tanh()
    return ((hidden - fresh) * update + fresh,)


def _lstm(of_input: Tensor, state: State, weights: Parameters) -> State:
    hidden, cell = state
    gates = (weights.of_hidden(hidden) + of_input).chunk(4, 1)
    enter, forget, fresh, leave = gates[0].sigmoid(), gates[1].sigmoid(), gates[2].tanh(), gates[3].sigmoid()
    cell = forget * cell + enter * fresh
    hidden = leave * cell.tanh()
    return hidden if weights.projection is None else F.linear(hidden, weights.projection), cell


def _direction(x: Tensor, state: State, weights: Parameters, cell: Cell, reverse: bool) -> tuple[Tensor, State]:
    """All steps of one direction of one layer: the outputs, in the order of the steps, and the final state."""
    outputs = []
    steps = weights.of_input(x).unbind(0)
    for step in reversed(steps) if reverse else steps:
        state = cell(step, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _stack(
    cell: Cell, x: Tensor, states: Sequence[State], weights: Sequence[Parameters], drop: float, bidirectional: bool
) -> tuple[Tensor, list[State]]:
    """All layers, with dropout of probability ``drop`` between them."""
    directions = 2 if bidirectional else 1
    final: list[State] = []
    for first in range(0, len(weights), directions):
        outputs = []
        for at in range(first, first + directions):
            output, state = _direction(x, states[at], weights[at], cell, reverse=at > first)
            outputs.append(output)
            final.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if drop and first + directions < len(weights):
            x = torch.dropout(x, drop, train=True)
    return x, final


def _layers(cell: Cell) -> Callable[..., Any]:
    """A decomposition of ``gru.input``, ``lstm.input``, ``rnn_tanh.input`` or ``rnn_relu.input`` with this cell."""

    def run(
        x: Tensor,
        hidden: Tensor | Sequence[Tensor],
        flat: Weights,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        initial = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
        drop = dropout if train and num_layers > 1 else 0.0
        if cell is _lstm and not drop and x.numel() and not _wants_gradient(x, *initial, *flat):
            return NotImplemented  # torch's own has the oneDNN layer that eager runs; it divides by the row count
        states = list(zip(*(part.unbind(0) for part in initial), strict=True))
        projected = len(initial) == 2 and initial[0].size(2) != initial[1].size(2)
        each = len(flat) // len(states)
        cast = [_cast_once(weight) for weight in flat]
        weights = [Parameters(cast[at : at + each], has_biases, projected) for at in range(0, len(flat), each)]
        outputs, final = _stack(cell, x.transpose(0, 1) if batch_first else x, states, weights, drop, bidirectional)
        last = tuple(torch.stack(part) for part in zip(*final, strict=True))
        return outputs.transpose(0, 1) if batch_first else outputs, *last

    return run


def _cast_once(weight: Tensor) -> Tensor:
    """The weight in autocast's dtype, cast once for all steps of a layer.

    Eager does the same by autocast's cache, for leaves that need a gradient. AOTAutograd turns the cache off and hands
    over weights that are no leaves: they are cast here, also under ``cache_enabled=False``, of which nothing is known
    here. A leaf is left to the cache, which a traced ``train_step`` keeps on, and is cast where it is read.
    """
    device = weight.device.type
    if weight.is_leaf or weight.dtype is not torch.float32 or not torch.is_autocast_enabled(device):
        return weight
    return weight.to(torch.get_autocast_dtype(device))


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


DECOMPOSITIONS: dict[compat.OpOverload, Callable[..., Any]] = {
    aten.gru.input: _layers(_gru),
    aten.lstm.input: _layers(_lstm),
    aten.rnn_tanh.input: _layers(_simple(torch.tanh)),
    aten.rnn_relu.input: _layers(_simple(torch.relu)),
}


def decomposed() -> AbstractContextManager[None]:
    """Return a context manager inside which recurrent layers that this thread traces become ATen operators.

    Dropout between layers is kept. An LSTM without dropout whose tensors require no gradient is left to torch.
    """
    return decompositions(DECOMPOSITIONS)
