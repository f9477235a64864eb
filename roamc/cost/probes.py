"""The micro-benchmarks of ``roamc calibrate``: one probe per kind of operator.

A probe takes the sizes of its tensors and a dtype. It makes the tensors, and returns a callable that runs the
operator on them once, and the work of one such run: FLOPs for the probes in ``PRODUCTS``, elements for those in
``ELEMENTS``. Work over seconds is the rate of the kind in a device profile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from roamc.compat_onednn import Product, product_into
from roamc.operators.kernels import KERNELS
from roamc.operators.random import dropout_mask

aten = torch.ops.aten
Work = tuple[Callable[[], Any], int]
"""(run, count): a callable without arguments that runs the benchmark once, and the FLOPs or elements of one run."""


@dataclass(frozen=True)
class Scale:
    """Device and sizes of the tensors that probes make.

    Attributes:
        device: the device that the tensors are on.
        rows: number of rows of a matrix of activations, see :meth:`matrix`.
        width: number of columns of that matrix; a multiple of 64, the elements of a head of attention.
        images: number of images in a batch, see :meth:`pixels`.
    """

    device: torch.device
    rows: int
    width: int
    images: int

    def floats(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return a tensor of this shape and dtype with normal random numbers."""
        return torch.randn(shape, device=self.device).to(dtype)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return activations of random numbers, of shape (rows, width)."""
        return self.floats(dtype, self.rows, self.width)

    def pixels(self, dtype: torch.dtype) -> Tensor:
        """Return a batch of images of random numbers, of shape (images, 128, 28, 28)."""
        return self.floats(dtype, self.images, 128, 28, 28)

    def scores(self, dtype: torch.dtype) -> Tensor:
        """Return attention scores of random numbers, of shape (rows * width // 256, 256)."""
        return self.floats(dtype, self.rows * self.width // 256, 256)

    def indices(self, below: int, *shape: int) -> Tensor:
        """Return an int64 tensor of this shape with random indices in ``[0, below)``."""
        return torch.randint(0, below, shape, device=self.device)


Probe = Callable[[Scale, torch.dtype], Work]
PRODUCTS: dict[str, Probe] = {}
"""Kind of operator to its probe, for kinds whose rate is in FLOP/s."""
ELEMENTS: dict[str, Probe] = {}
"""Kind of operator to its probe, for kinds whose rate is in elements a second."""


def _of(table: dict[str, Probe], kind: str) -> Callable[[Probe], Probe]:
    """Register the decorated probe in ``table`` as that of ``kind``."""

    def register(probe: Probe) -> Probe:
        table[kind] = probe
        return probe

    return register


# -- products: FLOP/s -----------------------------------------------------------------------------


@_of(PRODUCTS, "matmul")
def matmul(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the product of a linear layer, (rows, width) by (width, width); return (run, its FLOPs)."""
    x, weight = scale.matrix(dtype), scale.floats(dtype, scale.width, scale.width)
    out = torch.empty_like(x)
    return lambda: torch.mm(x, weight.t(), out=out), 2 * x.numel() * scale.width


@_of(PRODUCTS, "batched_matmul")
def batched_matmul(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the two batched products of attention, with 64 elements a head; return (run, FLOPs of both)."""
    heads, length = scale.width // 64, min(scale.rows, 256)
    q, k, weights = (scale.floats(dtype, heads, length, size) for size in (64, 64, length))
    scores, out = torch.empty_like(weights), torch.empty_like(q)

    def run() -> None:
        torch.bmm(q, k.transpose(1, 2), out=scores)
        torch.bmm(weights, k, out=out)

    return run, 2 * 2 * heads * length * length * 64


@_of(PRODUCTS, "onednn_matmul")
def onednn_matmul(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the product of :func:`matmul` by oneDNN, in float32 on a CPU; return (run, FLOPs).

    Raises:
        RuntimeError: there is no such product for this device and dtype.
    """
    product = _product_by_onednn(scale, dtype)
    x, weight = scale.matrix(dtype), scale.floats(dtype, scale.width, scale.width)
    out = torch.empty_like(x)
    return lambda: product(x, weight.t(), out, 0.0), 2 * x.numel() * scale.width


@_of(PRODUCTS, "onednn_batched_matmul")
def onednn_batched_matmul(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the products of :func:`batched_matmul` by oneDNN, in float32 on a CPU; return (run, FLOPs).

    Raises:
        RuntimeError: there is no such product for this device and dtype.
    """
    product = _product_by_onednn(scale, dtype)
    heads, length = scale.width // 64, min(scale.rows, 256)
    q, k, weights = (scale.floats(dtype, heads, length, size) for size in (64, 64, length))
    scores, out = torch.empty_like(weights), torch.empty_like(q)

    def run() -> None:
        product(q, k.transpose(1, 2), scores, 0.0)
        product(weights, k, out, 0.0)

    return run, 2 * 2 * heads * length * length * 64


def _product_by_onednn(scale: Scale, dtype: torch.dtype) -> Product:
    """Return oneDNN's product.

    Raises:
        RuntimeError: there is none for this device and dtype, so that the kind has no rate.
    """
    product = product_into()
    if product is None or scale.device.type != "cpu" or dtype is not torch.float32:
        raise RuntimeError(f"no product by oneDNN on {scale.device} in {dtype}")
    return product


def _heads(scale: Scale, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return query, key and value, each of shape (1, heads, length, 64) with at most 256 positions."""
    heads, length = scale.width // 64, min(scale.rows, 256)
    return tuple(scale.floats(dtype, 1, heads, length, 64) for _ in range(3))


@_of(PRODUCTS, "attention")
def attention(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare fused scaled dot-product attention without a mask; return (run, FLOPs of its two products)."""
    q, k, v = _heads(scale, dtype)
    return lambda: F.scaled_dot_product_attention(q, k, v), 2 * 2 * q.numel() * q.shape[2]


@_of(PRODUCTS, "attention_backward")
def attention_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the backward of fused attention without a mask; return (run, FLOPs of its five products).

    The forward runs once, while the probe is set up.
    """
    q, k, v = (tensor.requires_grad_() for tensor in _heads(scale, dtype))
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(q, k, v)
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), 5 * 2 * q.numel() * q.shape[2]


def _convolution(scale: Scale, dtype: torch.dtype, window: int, groups: int = 1) -> Work:
    """Prepare a convolution from 128 to 128 channels with a square window; return (run, its FLOPs)."""
    x = scale.pixels(dtype)
    weight = scale.floats(dtype, 128, 128 // groups, window, window)
    return lambda: F.conv2d(x, weight, padding=window // 2, groups=groups), 2 * x.numel() * weight[0].numel()


def _convolution_backward(scale: Scale, dtype: torch.dtype, window: int, groups: int = 1) -> Work:
    """Prepare the gradients of a convolution's input and weight, not of a bias; return (run, FLOPs of both)."""
    x, weight = scale.pixels(dtype), scale.floats(dtype, 128, 128 // groups, window, window)
    grad, padding = torch.randn_like(x), [window // 2] * 2
    arguments = ([1, 1], padding, [1, 1], False, [0, 0], groups, [True, True, False])
    return (
        lambda: aten.convolution_backward(grad, x, weight, None, *arguments),
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
    """Return a probe of ``function(x, out=out)``, with non-negative activations for ``x``."""

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
    """Prepare the backward of gelu on activations; return (run, number of their elements)."""
    x = scale.matrix(dtype)
    out = torch.empty_like(x)
    return lambda: aten.gelu_backward.grad_input(x, x, grad_input=out), x.numel()


@_of(ELEMENTS, "strided")
def strided(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare a copy of a transposed tensor into contiguous memory, as where attention brings heads together.

    Returns (run, elements copied).
    """
    x = scale.floats(dtype, scale.rows // 16, 16, scale.width // 64, 64)
    out = torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format)
    return lambda: out.copy_(x.transpose(1, 2)), x.numel()


@_of(ELEMENTS, "concatenation")
def concatenation(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the concatenation of four matrices along their columns; return (run, elements of the result)."""
    parts = [scale.floats(dtype, scale.rows, scale.width // 4) for _ in range(4)]
    out = torch.cat(parts, 1)
    return lambda: torch.cat(parts, 1, out=out), out.numel()


@_of(ELEMENTS, "mixed")
def mixed(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the product of activations and a boolean mask; return (run, elements of the result)."""
    x = scale.matrix(dtype)
    mask, out = x > 0, torch.empty_like(x)
    return lambda: torch.mul(x, mask, out=out), x.numel()


@_of(ELEMENTS, "random")
def random(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare dropout on activations; return (run, number of their elements).

    On devices for which roamc has a kernel that draws the mask alone, only the drawing of a mask is measured.
    """
    x = scale.matrix(dtype)
    if scale.device.type not in KERNELS[dropout_mask].devices:
        return lambda: aten.native_dropout(x, 0.1, True), x.numel()
    mask = torch.empty_like(x, dtype=torch.bool)
    return lambda: mask.bernoulli_(0.9), x.numel()


@_of(ELEMENTS, "random_backward")
def random_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the backward of dropout on a gradient; return (run, elements of all its calls).

    On devices for which roamc has a kernel of it, the kernel is called twice: once into another tensor, once over the
    gradient. Elsewhere torch's operator is called once.
    """
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
    """Return a probe of ``function(x, -1)``, with attention scores for ``x``."""

    def probe(scale: Scale, dtype: torch.dtype) -> Work:
        x = scale.scores(dtype)
        return lambda: function(x, -1), x.numel()

    return probe


ELEMENTS["softmax"] = _softmax(lambda x, dim: aten._softmax(x, dim, False))
ELEMENTS["safe_softmax"] = _softmax(aten._safe_softmax)


@_of(ELEMENTS, "softmax_backward")
def softmax_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the backward of softmax over rows of 256 attention scores; return (run, elements)."""
    x = scale.scores(dtype)
    return lambda: aten._softmax_backward_data(x, x, -1, dtype), x.numel()


@_of(ELEMENTS, "norm")
def norm(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare layer normalisation of each row of activations; return (run, number of their elements)."""
    x, weight = scale.matrix(dtype), scale.floats(dtype, scale.width)
    return lambda: aten.native_layer_norm(x, [scale.width], weight, weight, 1e-5), x.numel()


@_of(ELEMENTS, "norm_backward")
def norm_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the three gradients of layer normalisation: input, weight, bias; return (run, elements of the input)."""
    x, weight = scale.matrix(dtype), scale.floats(dtype, scale.width)
    _, mean, scaled = aten.native_layer_norm(x, [scale.width], weight, weight, 1e-5)
    arguments = (x, [scale.width], mean, scaled, weight, weight, [True, True, True])
    return lambda: aten.native_layer_norm_backward(x, *arguments), x.numel()


@_of(ELEMENTS, "batch_norm")
def batch_norm(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare batch normalisation of images in training mode; return (run, number of their elements)."""
    x, weight = scale.pixels(dtype), scale.floats(torch.float32, 128).to(dtype)
    running = torch.ones(128, device=scale.device).to(dtype)
    return lambda: aten.native_batch_norm(x, weight, weight, running, running.clone(), True, 0.1, 1e-5), x.numel()


@_of(ELEMENTS, "batch_norm_backward")
def batch_norm_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the three gradients of batch normalisation: input, weight, bias; return (run, elements of the input)."""
    x, weight = scale.pixels(dtype), scale.floats(torch.float32, 128).to(dtype)
    _, mean, scaled = aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
    arguments = (x, weight, None, None, mean, scaled, True, 1e-5, [True, True, True])
    return lambda: aten.native_batch_norm_backward(x, *arguments), x.numel()


@_of(ELEMENTS, "reduction")
def reduction(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the sum of activations over their rows, as for the gradient of a bias; return (run, elements summed)."""
    x = scale.matrix(dtype)
    return lambda: torch.sum(x, 0), x.numel()


@_of(ELEMENTS, "gather")
def gather(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the look-up of random rows in an embedding of 4096; return (run, elements of the result)."""
    table, index = scale.floats(dtype, 4096, scale.width), scale.indices(4096, scale.rows)
    return lambda: aten.embedding(table, index), scale.rows * scale.width


@_of(ELEMENTS, "scatter")
def scatter(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the gradient of an embedding with as many rows as are looked up; return (run, elements added into it)."""
    grad, index = scale.matrix(dtype), scale.indices(scale.rows, scale.rows)
    return lambda: aten.embedding_dense_backward(grad, index, scale.rows, -1, False), grad.numel()


@_of(ELEMENTS, "pool")
def pool(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare max pooling of images with a window of 3 by 3 and stride 2; return (run, elements of the input)."""
    x = scale.pixels(dtype)
    return lambda: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]), x.numel()


@_of(ELEMENTS, "pool_backward")
def pool_backward(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare the backward of the max pooling of :func:`pool`; return (run, elements of the pooling's input)."""
    x = scale.pixels(dtype)
    pooled, where = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    arguments = (x, [3, 3], [2, 2], [1, 1], [1, 1], False, where)
    return lambda: aten.max_pool2d_with_indices_backward(pooled, *arguments), x.numel()


@_of(ELEMENTS, "scan")
def scan(scale: Scale, dtype: torch.dtype) -> Work:
    """Prepare running sums along the rows of activations; return (run, number of their elements)."""
    x = scale.matrix(dtype)
    return lambda: torch.cumsum(x, 1), x.numel()
