"""tempo: the input of a GELU or SiLU is made again from its output, which is there anyway, and one bit an element.

    x  -->  y = gelu(x)                              the bit: on which side of the function's minimum x lies
            dx = gelu_backward(dy, x)                x = activation_input(y, the bits, "gelu")

Named after Andoorveedu et al., "Tempo: Accelerating Transformer-Based Model Training through Memory Footprint
Reduction", NeurIPS 2022, section 3.1; inputs are found otherwise, see :mod:`roamc.operators.activations`. The slopes at
them are off by its ``ERRORS``, so the only readers that get such an input are backwards of the same function. Inputs of
norms, the paper's section 3.2, are in :mod:`roamc.passes.retain.codecs.norms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from roamc.graph.memory import fills_storage
from roamc.operators.activations import ACTIVATIONS, ERRORS, TAKEN, activation_input
from roamc.operators.schemas import argument_of
from roamc.operators.table import Kind
from roamc.passes.retain.codecs.bits import Bits, bits_of
from roamc.passes.retain.codecs.codec import Coding, Saved
from roamc.passes.retain.codecs.readings import Reading, readings
from roamc.units import Bytes

aten = torch.ops.aten

FORWARD: dict[object, tuple[str, int]] = {aten.gelu.default: ("gelu", 0), aten.silu.default: ("silu", 0)}
BACKWARD: dict[object, tuple[str, int]] = {
    aten.gelu_backward.default: ("gelu", 1),
    aten.silu_backward.default: ("silu", 1),
}
"""Operator to its activation, as named in :data:`ACTIVATIONS`, and the position of the activation's input."""


@dataclass(frozen=True)
class Tempo(Coding):
    """A coding of the inputs of one activation: on which side of its minimum they lie.

    Attributes:
        mask: the coding of the bool tensor that is True right of the minimum.
        function: a name in :data:`roamc.operators.activations.ACTIVATIONS`.
        dtype: of the inputs.
    """

    serves = frozenset({Kind.SLOPE})

    mask: Bits
    function: str
    dtype: torch.dtype

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the code: one bit for each element, rounded up to whole bytes."""
        return self.mask.nbytes

    @property
    def error(self) -> float:
        """Of slopes, as a part of their norm, for inputs of N(0, 1)."""
        return ERRORS[self.dtype]

    def beside(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the output of the activation that reads ``node``."""
        outputs = (_output(read) for read in readings(node) if _function(read, FORWARD) == self.function)
        return tuple(y for y in outputs if y is not None)[:1]

    def encode(self, value: Tensor, /, *_: Tensor) -> Tensor:
        """Return the code, uint8[ceil(n / 8)], of a tensor whose n elements lie side by side in memory."""
        return self.mask.encode(aten.ge.Scalar(value, ACTIVATIONS[self.function].least))

    def decode(self, code: Tensor, /, *beside: Tensor) -> Tensor:
        """Return inputs, with shape and strides of the value, of which ``beside`` are the outputs."""
        y = aten.as_strided.default(beside[0], self.mask.shape, self.mask.stride)
        x: Tensor = activation_input(y, code, self.function)
        return x


def fit(saved: Saved) -> Tempo | None:
    """Return the coding of a value that an activation reads and of which backward only takes its slope; else None.

    The value fills its storage, and the activation's output has the same elements in the same order of memory.
    """
    if saved.tensor.dtype not in TAKEN or not fills_storage(saved.tensor):
        return None
    late = {read.reader for read in saved.late}
    slopes = {_function(read, BACKWARD) for read in readings(saved.node) if read.node in late}
    function = slopes.pop() if len(slopes) == 1 else ""
    coding = Tempo(bits_of(saved.tensor), function, saved.tensor.dtype)
    return coding if function and coding.beside(saved.node) else None


def _function(read: Reading, stems: Mapping[object, tuple[str, int]]) -> str:
    """The activation that an operator of ``stems`` is or derives, if what it reads is the activation's input; or ""."""
    call = read.call
    stem, position = stems.get(call.target, ("", 0))
    if [at for at, argument in enumerate(call.args) if argument is read.argument] != [position]:
        return ""
    by_tanh = stem == "gelu" and argument_of(call.target, call.args, call.kwargs, "approximate") == "tanh"
    return f"{stem}_by_tanh" if by_tanh else stem


def _output(read: Reading) -> fx.Node | None:
    """The output of an activation as a node of the graph; None unless it is there and lies like its input."""
    x, y = read.argument.meta["val"], read.call.meta["val"]
    pairs = zip(y.shape, x.stride(), y.stride(), strict=True)
    if x.storage_offset() or not fills_storage(y) or any(a != b for size, a, b in pairs if size != 1):
        return None
    return read.outside(read.call)
