"""The micro-benchmarks of ``roamc calibrate``: one small function per kind of operator, and what it works through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from roamc.operators.kernels import KERNELS
from roamc.operators.random import dropout_mask

aten = torch.ops.aten
Work = tuple[Callable[[], Any], int]
"""What runs, and the FLOPs or elements of one run."""


@dataclass(frozen=True)
class Scale:
    """How large the tensors are.

    Attributes:
        device: where they are.
        rows: of a matrix of activations.
        width: of the same; a multiple of 64.
        images: in a batch of 28 by 28 pixels.
    """

    device: torch.device
    rows: int
    width: int
    images: int

    def floats(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Normal random numbers."""
        return torch.randn(shape, device=self.device).to(dtype)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Activations: rows of ``width`` numbers."""
        return self.floats(dtype, self.rows, self.width)

    def pixels(self, dtype: torch.dtype) -> Tensor:
        """Images of 128 channels."""
        return self.floats(dtype, self.images, 128, 28, 28)

    def scores(self, dtype: torch.dtype) -> Tensor:
        """Attention scores of as many elements as :meth:`matrix`."""
        return self.floats(dtype, self.rows * self.width // 256, 256)

    def indices(self, below: int, *shape: int) -> Tensor:
        """Random indices."""
        return torch.randint(0, below, shape, device=self.device)


Probe = Callable[[Scale, torch.dtype], Work]
PRODUCTS: dict[str, Probe] = {}
ELEMENTS: dict[str, Probe] = {}


def _of(table: dict[str, Probe], kind: str) -> Callable[[Probe], Probe]:
    def register(probe: Probe) -> Probe:
        table[kind] = probe
        return probe

    return register


# -- products: FLOP/s -----------------------------------------------------------------------------


@_of(PRODUCTS, "matmul")
def matmul(scale: Scale, dtype: torch.dtype) -> Work:
    """A linear layer that keeps its width."""
    x, weight = scale.matrix(dtype), scale.floats(dtype, scale.width, scale.width)
    out = torch.empty_like(x)
    return lambda: torch.mm(x, weight.t(), out=out), 2 * x.numel() * scale.width


@_of(PRODUCTS, "batched_matmul")
def batched_matmul(scale: Scale, dtype: torch.dtype) -> Work:
    """The two products of attention with 64 elements a head."""
    heads, length = scale.width // 64, min(scale.rows, 256)
    q, k, weights = (scale.floats(dtype, heads, length, size) for size in (64, 64, length))
    scores, out = torch.empty_like(weights), torch.empty_like(q)

    def run() -> None:
        torch.bmm(q, k.transpose(1, 2), out=scores)
        torch.bmm(weights, k, out=out)

    return run, 2 * 2 * heads * length * length * 64


def _heads(scale: Scale, dtype: torch.dtype) -> tuple[Tensor, ...]:
    heads, length = scale.width // 64, min(scale.rows, 256)
    return tuple(scale.floats(dtype, 1, heads, length, 64) for _ in range(3))


@_of(PRODUCTS, "attention")
def attention(scale: Scale, dtype: torch.dtype) -> Work:
    """Fused, without a mask."""
    q, k, v = _heads(scale, dtype)
    return lambda: F.scaled_dot_product_attention(q, k, v), 2 * 2 * q.numel() * q.shape[2]


@_of(PRODUCTS, "attention_backward")
def attention_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Of the same; its forward is not timed."""
    q, k, v = (tensor.requires_grad_() for tensor in _heads(scale, dtype))
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(q, k, v)
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), 5 * 2 * q.numel() * q.shape[2]


def _convolution(scale: Scale, dtype: torch.dtype, window: int, groups: int = 1) -> Work:
    x = scale.pixels(dtype)
    weight = scale.floats(dtype, 128, 128 // groups, window, window)
    return lambda: F.conv2d(x, weight, padding=window // 2, groups=groups), 2 * x.numel() * weight[0].numel()


def _convolution_backward(scale: Scale, dtype: torch.dtype, window: int, groups: int = 1) -> Work:
    x, weight = scale.pixels(dtype), scale.floats(dtype, 128, 128 // groups, window, window)
    grad, padding = torch.randn_like(x), [window // 2] * 2
    rest = ([1, 1], padding, [1, 1], False, [0, 0], groups, [True, True, False])
    return (
        lambda: aten.convolution_backward(grad, x, weight, None, *rest),
        4 * x.numel() * weight[0].numel(),
    )


PRODUCTS["convolution"] = lambda scale, dtype: _convolution(scale, dtype, 3)
PRODUCTS["convolution_1x1"] = lambda scale, dtype: _convolution(scale, dtype, 1)
PRODUCTS["convolution_grouped"] = lambda scale, dtype: _convolution(scale, dtype, 3, 128)
PRODUCTS["convolution_backward"] = lambda scale, dtype: _convolution_backward(scale, dtype, 3)
PRODUCTS["convolution_1x1_backward"] = lambda scale, dtype: _convolution_backward(scale, dtype, 1)
PRODUCTS["convolution_grouped_backward"] = lambda scale, dtype: _convolution_backward(scale, dtype, 3, 128)


# -- elements a second ----------------------------------------------------------------------------


def _pointwise(function: Callable[..., Any]) -> Probe:
    """``function(x, out=out)`` on activations."""

    def probe(scale: Scale, dtype: torch.dtype) -> Work:
        x = scale.matrix(dtype).abs()  # roots of negative numbers take a slow path
        out = torch.empty_like(x)
        return lambda: function(x, out=out), x.numel()

    return probe


ELEMENTS["root"] = _pointwise(torch.sqrt)
ELEMENTS["exponential"] = _pointwise(lambda x, out: aten.gelu.out(x, out=out))
ELEMENTS["tanh"] = _pointwise(torch.tanh)


@_of(ELEMENTS, "exponential_backward")
def exponential_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Of gelu."""
    x = scale.matrix(dtype)
    out = torch.empty_like(x)
    return lambda: aten.gelu_backward.grad_input(x, x, grad_input=out), x.numel()


@_of(ELEMENTS, "strided")
def strided(scale: Scale, dtype: torch.dtype) -> Work:
    """Heads of attention brought together."""
    x = scale.floats(dtype, scale.rows // 16, 16, scale.width // 64, 64)
    out = torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format)
    return lambda: out.copy_(x.transpose(1, 2)), x.numel()


@_of(ELEMENTS, "concatenation")
def concatenation(scale: Scale, dtype: torch.dtype) -> Work:
    """Gradients of query, key and value."""
    parts = [scale.floats(dtype, scale.rows, scale.width // 4) for _ in range(4)]
    out = torch.cat(parts, 1)
    return lambda: torch.cat(parts, 1, out=out), out.numel()


@_of(ELEMENTS, "mixed")
def mixed(scale: Scale, dtype: torch.dtype) -> Work:
    """Numbers by truth values."""
    x = scale.matrix(dtype)
    mask, out = x > 0, torch.empty_like(x)
    return lambda: torch.mul(x, mask, out=out), x.numel()


@_of(ELEMENTS, "random")
def random(scale: Scale, dtype: torch.dtype) -> Work:
    """Dropout; where roamc draws the mask by itself, that."""
    x = scale.matrix(dtype)
    if scale.device.type not in KERNELS[dropout_mask].devices:
        return lambda: aten.native_dropout(x, 0.1, True), x.numel()
    mask = torch.empty_like(x, dtype=torch.bool)
    return lambda: mask.bernoulli_(0.9), x.numel()


@_of(ELEMENTS, "random_backward")
def random_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Dropout's backward as roamc runs it, over its gradient and beside it: one as often as the other."""
    grad = scale.matrix(dtype)
    mask, out = grad > 0, torch.empty_like(grad)
    if scale.device.type not in KERNELS[aten.native_dropout_backward.default].devices:
        return lambda: aten.native_dropout_backward(grad, mask, 1.0), grad.numel()
    kernel = KERNELS[aten.native_dropout_backward.default].function

    def run() -> None:
        kernel(grad, mask, 1.0, out=out)
        kernel(grad, mask, 1.0, out=grad)

    return run, 2 * grad.numel()


def _softmax(function: Callable[..., Any]) -> Probe:
    def probe(scale: Scale, dtype: torch.dtype) -> Work:
        x = scale.scores(dtype)
        return lambda: function(x, -1), x.numel()

    return probe


ELEMENTS["softmax"] = _softmax(lambda x, dim: aten._softmax(x, dim, False))
ELEMENTS["safe_softmax"] = _softmax(aten._safe_softmax)


@_of(ELEMENTS, "softmax_backward")
def softmax_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Of rows of 256."""
    x = scale.scores(dtype)
    return lambda: aten._softmax_backward_data(x, x, -1, dtype), x.numel()


@_of(ELEMENTS, "norm")
def norm(scale: Scale, dtype: torch.dtype) -> Work:
    """Layer normalisation."""
    x, weight = scale.matrix(dtype), scale.floats(dtype, scale.width)
    return lambda: aten.native_layer_norm(x, [scale.width], weight, weight, 1e-5), x.numel()


@_of(ELEMENTS, "norm_backward")
def norm_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """All three gradients."""
    x, weight = scale.matrix(dtype), scale.floats(dtype, scale.width)
    _, mean, scaled = aten.native_layer_norm(x, [scale.width], weight, weight, 1e-5)
    rest = (x, [scale.width], mean, scaled, weight, weight, [True, True, True])
    return lambda: aten.native_layer_norm_backward(x, *rest), x.numel()


@_of(ELEMENTS, "batch_norm")
def batch_norm(scale: Scale, dtype: torch.dtype) -> Work:
    """In training mode."""
    x, weight = scale.pixels(dtype), scale.floats(torch.float32, 128).to(dtype)
    running = torch.ones(128, device=scale.device).to(dtype)
    return lambda: aten.native_batch_norm(x, weight, weight, running, running.clone(), True, 0.1, 1e-5), x.numel()


@_of(ELEMENTS, "batch_norm_backward")
def batch_norm_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """All three gradients."""
    x, weight = scale.pixels(dtype), scale.floats(torch.float32, 128).to(dtype)
    _, mean, scaled = aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
    rest = (x, weight, None, None, mean, scaled, True, 1e-5, [True, True, True])
    return lambda: aten.native_batch_norm_backward(x, *rest), x.numel()


@_of(ELEMENTS, "reduction")
def reduction(scale: Scale, dtype: torch.dtype) -> Work:
    """The gradient of a bias."""
    x = scale.matrix(dtype)
    return lambda: torch.sum(x, 0), x.numel()


@_of(ELEMENTS, "gather")
def gather(scale: Scale, dtype: torch.dtype) -> Work:
    """Rows of an embedding."""
    table, index = scale.floats(dtype, 4096, scale.width), scale.indices(4096, scale.rows)
    return lambda: aten.embedding(table, index), scale.rows * scale.width


@_of(ELEMENTS, "scatter")
def scatter(scale: Scale, dtype: torch.dtype) -> Work:
    """An embedding's gradient, with as many rows in it as in the table."""
    grad, index = scale.matrix(dtype), scale.indices(scale.rows, scale.rows)
    return lambda: aten.embedding_dense_backward(grad, index, scale.rows, -1, False), grad.numel()


@_of(ELEMENTS, "pool")
def pool(scale: Scale, dtype: torch.dtype) -> Work:
    """The largest of nine pixels."""
    x = scale.pixels(dtype)
    return lambda: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]), x.numel()


@_of(ELEMENTS, "pool_backward")
def pool_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Of that."""
    x = scale.pixels(dtype)
    made, where = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    rest = (x, [3, 3], [2, 2], [1, 1], [1, 1], False, where)
    return lambda: aten.max_pool2d_with_indices_backward(made, *rest), x.numel()


@_of(ELEMENTS, "scan")
def scan(scale: Scale, dtype: torch.dtype) -> Work:
    """A running sum."""
    x = scale.matrix(dtype)
    return lambda: torch.cumsum(x, 1), x.numel()
