"""Operators on arguments of several layouts, a MiB or some of each: for ``benchmarks.workspace --operators``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roamc.operators.onednn import ONEDNN

aten = torch.ops.aten

Maker = Callable[[torch.dtype], Tensor]
Case = tuple[Callable[..., Any], tuple[Maker, ...]]

ROWS, IMAGES, MATRIX, QUERIES = (8, 256, 512), (8, 32, 64, 64), (2048, 1024), (2, 8, 512, 64)


def in_order(*shape: int) -> Maker:
    """Numbers between 0 and 1, contiguous."""
    return lambda dtype: torch.rand(*shape).to(dtype)


def transposed(*shape: int) -> Maker:
    """The last two dimensions swapped in memory."""
    return lambda dtype: torch.rand(*shape[:-2], shape[-1], shape[-2]).to(dtype).mT


def permuted(*shape: int) -> Maker:
    """The first two dimensions swapped in memory."""
    return lambda dtype: torch.rand(shape[1], shape[0], *shape[2:]).to(dtype).transpose(0, 1)


def every_other(*shape: int) -> Maker:
    """Every other column of something twice as wide."""
    return lambda dtype: torch.rand(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2]


def channels_last(*shape: int) -> Maker:
    """Images, channels side by side."""
    return lambda dtype: torch.rand(*shape).to(dtype).to(memory_format=torch.channels_last)


def indices(least_above: int, *shape: int) -> Maker:
    """Whole numbers below ``least_above``."""
    return lambda _: torch.randint(0, least_above, shape)


def flags(*shape: int) -> Maker:
    """True and false."""
    return lambda _: torch.rand(*shape) > 0.5


def _rows(layout: Callable[..., Maker]) -> dict[str, Case]:
    x, y, line, stat = layout(*ROWS), in_order(*ROWS), in_order(512), in_order(8, 256, 1)
    at, few = indices(256, 8, 128, 512), in_order(8, 128, 512)
    ones = [True] * 3
    return {
        "_softmax": (lambda x: aten._softmax(x, -1, False), (x,)),
        "_log_softmax": (lambda x: aten._log_softmax(x, -1, False), (x,)),
        "_safe_softmax": (lambda x: aten._safe_softmax(x, -1), (x,)),
        "_softmax_backward_data": (lambda g, o: aten._softmax_backward_data(g, o, -1, o.dtype), (x, y)),
        "_softmax_backward_data, result": (lambda g, o: aten._softmax_backward_data(g, o, -1, o.dtype), (y, x)),
        "_log_softmax_backward_data": (lambda g, o: aten._log_softmax_backward_data(g, o, -1, o.dtype), (x, x)),
        "native_layer_norm": (lambda x, w, b: aten.native_layer_norm(x, [512], w, b, 1e-5), (x, line, line)),
        "native_layer_norm_backward": (
            lambda g, x, m, w: aten.native_layer_norm_backward(g, x, [512], m, m, w, w, ones),
            (x, x, stat, line),
        ),
        "_fused_rms_norm": (lambda x, w: aten._fused_rms_norm(x, [512], w, 1e-5), (x, line)),
        "log_sigmoid_forward": (aten.log_sigmoid_forward, (x,)),
        "gelu_backward": (aten.gelu_backward, (y, x)),
        "silu_backward": (aten.silu_backward, (y, x)),
        "add": (aten.add, (x, y)),
        "mul, a mask": (aten.mul, (x, flags(*ROWS))),
        "where": (lambda m, x, y: aten.where(m, x, y), (flags(*ROWS), x, y)),
        "cat": (lambda x, y: aten.cat([x, y], 1), (x, y)),
        "clone": (lambda x: aten.clone(x, memory_format=torch.contiguous_format), (x,)),
        "tril": (aten.tril, (x,)),
        "flip": (lambda x: aten.flip(x, [1]), (x,)),
        "roll, one dimension": (lambda x: aten.roll(x, [3], [1]), (x,)),
        "roll, two": (lambda x: aten.roll(x, [3, 3], [1, 2]), (x,)),
        "roll, flat": (lambda x: aten.roll(x, [3]), (x,)),
        "cumsum": (lambda x: aten.cumsum(x, 1), (x,)),
        "logsumexp": (lambda x: aten.logsumexp(x, [-1]), (x,)),
        "var_mean": (lambda x: aten.var_mean.correction(x, [-1], correction=0), (x,)),
        "linalg_vector_norm": (lambda x: aten.linalg_vector_norm(x, 2, [-1]), (x,)),
        "sum, rows": (lambda x: aten.sum.dim_IntList(x, [-1]), (x,)),
        "sum, all but the last": (lambda x: aten.sum.dim_IntList(x, [0, 1]), (x,)),
        "sum, scattered": (lambda x: aten.sum.dim_IntList(x, [0, 2]), (x,)),
        "mean": (lambda x: aten.mean.dim(x, [-1]), (x,)),
        "amax": (lambda x: aten.amax(x, [-1]), (x,)),
        "sort": (lambda x: aten.sort.stable(x, stable=False, dim=-1, descending=False), (x,)),
        "topk": (lambda x: aten.topk(x, 8, -1), (x,)),
        "kthvalue": (lambda x: aten.kthvalue(x, 3, -1), (x,)),
        "index_select": (lambda x, i: aten.index_select(x, 1, i), (x, indices(256, 300))),
        "index": (lambda x, i: aten.index.Tensor(x, [None, i]), (x, indices(256, 300))),
        "index_put": (lambda x, i, v: aten.index_put(x, [i], v, True), (x, indices(8, 30), in_order(30, 256, 512))),
        "gather": (lambda x, i: aten.gather(x, 1, i), (x, at)),
        "scatter": (lambda x, i, y: aten.scatter.src(x, 1, i, y), (x, at, few)),
        "scatter_add": (lambda x, i, y: aten.scatter_add(x, 1, i, y), (x, at, few)),
        "constant_pad_nd": (lambda x: aten.constant_pad_nd(x, [1, 1, 2, 2], 0.0), (x,)),
        "native_dropout": (lambda x: aten.native_dropout(x, 0.1, True), (x,)),
        "native_dropout_backward": (lambda x, m: aten.native_dropout_backward(x, m, 1.1), (x, flags(*ROWS))),
        "mse_loss": (aten.mse_loss, (x, y)),
        "smooth_l1_loss": (aten.smooth_l1_loss, (x, y)),
        "huber_loss": (aten.huber_loss, (x, y)),
        "soft_margin_loss": (aten.soft_margin_loss, (x, y)),
        "binary_cross_entropy": (aten.binary_cross_entropy, (x, y)),
        "binary_cross_entropy_with_logits": (aten.binary_cross_entropy_with_logits, (x, y)),
        "embedding_dense_backward": (
            lambda g, i: aten.embedding_dense_backward(g, i, 4096, -1, False),
            (x, indices(4096, 8, 256)),
        ),
        "nll_loss_forward": (
            lambda x, i: aten.nll_loss_forward(x, i, None, 1, -100),
            (layout(*MATRIX), indices(1024, 2048)),
        ),
        "mm": (aten.mm, (layout(*MATRIX), in_order(1024, 64))),
        "addmm": (aten.addmm, (in_order(64), layout(*MATRIX), in_order(1024, 64))),
        "bmm": (aten.bmm, (x, in_order(8, 512, 64))),
        "onednn_mm": (ONEDNN[aten.mm.default], (layout(*MATRIX), layout(1024, 64))),
        "onednn_addmm": (ONEDNN[aten.addmm.default], (in_order(64), layout(*MATRIX), layout(1024, 64))),
        "onednn_bmm": (ONEDNN[aten.bmm.default], (x, layout(8, 512, 64))),
    }


def _images(layout: Callable[..., Maker]) -> dict[str, Case]:
    x, y, channel = layout(*IMAGES), in_order(*IMAGES), in_order(32)
    small, weight, up = in_order(8, 32, 32, 32), in_order(32, 32, 3, 3), in_order(32, 16, 2, 2)
    flat, whole = ([1, 1], [1, 1], [1, 1]), [True] * 3
    return {
        "convolution": (lambda x, w: aten.convolution(x, w, None, *flat, False, [0, 0], 1), (x, weight)),
        "convolution_backward": (
            lambda g, x, w: aten.convolution_backward(g, x, w, [32], *flat, False, [0, 0], 1, whole),
            (x, x, weight),
        ),
        "convolution, transposed": (
            lambda x, w: aten.convolution(x, w, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
            (x, up),
        ),
        "convolution_backward, transposed": (
            lambda g, x, w: aten.convolution_backward(
                g, x, w, [16], [2, 2], [0, 0], [1, 1], True, [0, 0], 1, [True, True, False]
            ),
            (layout(8, 16, 128, 128), x, up),
        ),
        "native_batch_norm_backward": (
            lambda g, x, w: aten.native_batch_norm_backward(g, x, w, w, w, w, w, True, 1e-5, whole),
            (x, x, channel),
        ),
        "max_pool2d_with_indices": (lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1]), (x,)),
        "avg_pool2d": (lambda x: aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1]), (x,)),
        "avg_pool2d_backward": (
            lambda g, x: aten.avg_pool2d_backward(g, x, [3, 3], [2, 2], [1, 1], False, True, None),
            (small, x),
        ),
        "_adaptive_avg_pool2d": (lambda x: aten._adaptive_avg_pool2d(x, [7, 7]), (x,)),
        "_adaptive_avg_pool2d_backward": (aten._adaptive_avg_pool2d_backward, (in_order(8, 32, 7, 7), x)),
        "upsample_nearest2d": (lambda x: aten.upsample_nearest2d(x, [128, 128]), (x,)),
        "upsample_nearest2d_backward": (
            lambda g: aten.upsample_nearest2d_backward(g, [64, 64], [8, 32, 32, 32]),
            (x,),
        ),
        "upsample_bilinear2d_backward": (
            lambda g: aten.upsample_bilinear2d_backward(g, [64, 64], [8, 32, 32, 32], False),
            (x,),
        ),
        "reflection_pad2d": (lambda x: aten.reflection_pad2d(x, [1, 1, 1, 1]), (x,)),
        "reflection_pad2d_backward": (
            lambda g, x: aten.reflection_pad2d_backward(g, x, [1, 1, 1, 1]),
            (in_order(8, 32, 66, 66), x),
        ),
        "im2col": (lambda x: aten.im2col(x, [3, 3], [1, 1], [1, 1], [1, 1]), (x,)),
        "pixel_shuffle": (lambda x: aten.pixel_shuffle(x, 2), (x,)),
        "nll_loss2d_forward": (
            lambda x, i: aten.nll_loss2d_forward(x, i, None, 1, -100),
            (x, indices(32, 8, 64, 64)),
        ),
        "_log_softmax, channels": (lambda x: aten._log_softmax(x, 1, False), (x,)),
        "_log_softmax_backward_data, channels": (
            lambda g, x: aten._log_softmax_backward_data(g, x, 1, x.dtype),
            (x, y),
        ),
        "sum, channels": (lambda x: aten.sum.dim_IntList(x, [0, 2, 3]), (x,)),
    }


def _heads(layout: Callable[..., Maker]) -> dict[str, Case]:
    x = layout(*QUERIES)

    def back(g: Tensor, q: Tensor, s: Tensor) -> Any:
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return back(g, q, q, q, g, s, 0.0, True)

    return {
        "attention": (lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True), (x,)),
        "attention, backward": (back, (x, x, lambda _: torch.rand(2, 8, 512))),
    }


def symmetric(*shape: int) -> Maker:
    """Matrices that have an inverse, and are their own transposes; in float32, which is all that LAPACK takes here."""
    return lambda _: torch.eye(shape[-1]) * shape[-1] + (half := torch.rand(*shape)) + half.mT


def complex_in_order(*shape: int) -> Maker:
    """Complex numbers, whatever dtype is asked for."""
    return lambda _: torch.rand(*shape, dtype=torch.complex64)


def wide_in_order(*shape: int) -> Maker:
    """Numbers in float32, whatever dtype is asked for."""
    return lambda _: torch.rand(*shape)


def _matrices() -> dict[str, Case]:
    many, one = symmetric(2048, 16, 16), symmetric(512, 512)
    return {
        "linalg_matrix_exp": (lambda x: aten.linalg_matrix_exp(x * 100), (many,)),
        "linalg_matrix_exp, one": (lambda x: aten.linalg_matrix_exp(x * 100), (one,)),
        "linalg_inv_ex": (lambda x: aten.linalg_inv_ex(x), (many,)),
        "linalg_inv_ex, one": (lambda x: aten.linalg_inv_ex(x), (one,)),
        "_linalg_svd": (lambda x: aten._linalg_svd(x), (many,)),
        "_linalg_svd, one": (lambda x: aten._linalg_svd(x), (one,)),
        "_linalg_svd, values of one": (lambda x: aten._linalg_svd(x, False, False), (one,)),
        "linalg_pinv": (aten.linalg_pinv.atol_rtol_tensor, (many,)),
        "_linalg_eigh, one": (lambda x: aten._linalg_eigh(x), (one,)),
        "linalg_qr, one": (lambda x: aten.linalg_qr(x), (one,)),
        "_linalg_det": (lambda x: aten._linalg_det(x), (many,)),
        "cholesky_solve": (lambda x: aten.cholesky_solve(x, x), (many,)),
        "_euclidean_dist": (aten._euclidean_dist, (wide_in_order(2048, 256), wide_in_order(256, 256))),
        "_cdist_forward, repeated": (
            lambda x, y: aten._cdist_forward(x, y, 1.0, None),
            (wide_in_order(8, 512, 64), wide_in_order(1, 600, 64)),
        ),
    }


def _fourier() -> dict[str, Case]:
    rows, boxes = wide_in_order(2048, 256), complex_in_order(16, 32, 32, 32)
    return {
        "_fft_r2c": (lambda x: aten._fft_r2c(x, [1], 0, True), (rows,)),
        "_fft_r2c, columns": (lambda x: aten._fft_r2c(x, [0], 0, True), (rows,)),
        "_fft_c2c": (lambda x: aten._fft_c2c(x, [2, 3], 0, True), (boxes,)),
        "_fft_c2c, scattered": (lambda x: aten._fft_c2c(x, [1, 3], 0, True), (boxes,)),
        "_fft_c2r": (lambda x: aten._fft_c2r(x, [3], 2, 62), (boxes,)),
        "_fft_c2r, three": (lambda x: aten._fft_c2r(x, [1, 2, 3], 2, 62), (boxes,)),
    }


def _lookups() -> dict[str, Case]:
    x, table, bags = in_order(*MATRIX), in_order(1000, 256), lambda _: torch.arange(1024) * 256
    at, mask = indices(100, *MATRIX), flags(*MATRIX)

    def pooled(table: Tensor, at: Tensor, bags: Tensor) -> Any:
        return aten._embedding_bag(table, at, bags, False, 1)

    def pooled_backward(gradient: Tensor, at: Tensor, bags: Tensor, of: Tensor) -> Any:
        back = aten._embedding_bag_backward
        return back(gradient, at, bags, of, bags, bags, 1000, False, 0, False, None)

    return {
        "_embedding_bag": (pooled, (table, indices(1000, 1024 * 256), bags)),
        "_embedding_bag_backward": (
            pooled_backward,
            (in_order(1024, 256), indices(1000, 1024 * 256), bags, lambda _: torch.empty(0, dtype=torch.int64)),
        ),
        "scatter_reduce": (lambda x, i: aten.scatter_reduce.two(x, 0, i, x, "mean"), (x, at)),
        "scatter_reduce, amax": (lambda x, i: aten.scatter_reduce.two(x, 0, i, x, "amax"), (x, at)),
        "scatter_reduce, rows": (
            lambda x, i: aten.scatter_reduce.two(x, 0, i[:, None].expand(x.shape), x, "mean"),
            (x, indices(100, 2048)),
        ),
        "index_reduce": (lambda x, i: aten.index_reduce(x, 0, i, x, "mean"), (x, indices(100, 2048))),
        "masked_scatter_backward": (lambda g, m: aten.masked_scatter_backward(g, m, list(g.shape)), (x, mask)),
        "median, columns": (lambda x: aten.median.dim(x, 0), (x,)),
        "median": (aten.median, (x,)),
        "cumsum, flags": (lambda m: aten.cumsum(m, 1), (mask,)),
        "cumprod, flags": (lambda m: aten.cumprod(m, 0), (mask,)),
        "linalg_vector_norm, in double precision": (
            lambda x: aten.linalg_vector_norm(x, 2, [1], True, dtype=torch.float64),
            (x,),
        ),
    }


def _volumes() -> dict[str, Case]:
    x, up, weight, small = (
        in_order(8, 4, 8, 32, 64),
        in_order(8, 4, 16, 64, 128),
        in_order(4, 4, 3, 3, 3),
        in_order(4, 4, 2, 2, 2),
    )
    three, whole = ([1] * 3, [1] * 3, [1] * 3), [True] * 3

    def back(g: Tensor, x: Tensor, w: Tensor) -> Any:
        return aten.convolution_backward(g, x, w, [4], *three, False, [0] * 3, 1, whole)

    def back_transposed(g: Tensor, x: Tensor, w: Tensor) -> Any:
        return aten.convolution_backward(g, x, w, [4], [2] * 3, [0] * 3, [1] * 3, True, [0] * 3, 1, whole)

    few = in_order(17, 17, 3, 3)
    return {
        "convolution, few channels": (
            lambda x, w: aten.convolution(x, w, None, *three, False, [0] * 3, 1),
            (x, weight),
        ),
        "convolution_backward, few channels": (back, (x, x, weight)),
        "convolution_backward, few channels, transposed": (back_transposed, (up, x, small)),
        "convolution_backward, a slice": (
            lambda g, x, w: aten.convolution_backward(
                g, x[:, :17], w, [17], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, whole
            ),
            (in_order(8, 17, 64, 64), in_order(*IMAGES), few),
        ),
        "col2im": (
            lambda x: aten.col2im(x, [32, 64], [3, 3], [1, 1], [1, 1], [1, 1]),
            (transposed(8, 288, 2048),),
        ),
    }


def _heads_inside(*shape: int) -> Maker:
    batch, heads, length, width = shape
    return lambda dtype: torch.rand(batch, length, heads, width).to(dtype).transpose(1, 2)


CASES: dict[str, dict[str, Case]] = {
    "in order": _rows(in_order) | _images(in_order) | _heads(in_order),
    "last two swapped": _rows(transposed),
    "first two swapped": _rows(permuted) | _images(permuted),
    "every other column": _rows(every_other),
    "channels last": _images(channels_last),
    "heads inside": _heads(_heads_inside),
    "matrices": _matrices(),
    "to be transformed": _fourier(),
    "by index": _lookups(),
    "volumes": _volumes(),
}
"""By layout of the first argument, and of others that come in its place."""
