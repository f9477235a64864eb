"""Bytes that operators take for themselves: factors, lookups, transforms, convolutions of few channels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.cost import workspace_bytes
from roamc.operators.costs.others import GELU, GELU_BACKWARD, GRADIENT_MOVED
from roamc.operators.fakes import kept_whole
from roamc.operators.onednn import ONEDNN
from roamc.operators.prod_backward import prod_backward
from roamc.operators.random import replay
from roamc.operators.scores import nll_of_scores
from tests.cost.test_cost import floats, node_of

aten = torch.ops.aten
MB = 2**20
THREADS = 2
FEW = (1 + THREADS) * (32 << 10)
"""What a convolution takes in any case."""
OWN = 4 << 10
"""And one by torch's own kernels."""


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def complexes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.complex64)


def _gradients(channels: int, dims: int, *, transposed: bool = False) -> Callable[..., Any]:
    ones, none = [1] * dims, [0] * dims
    steps = [2] * dims if transposed else ones

    def run(gradient: Tensor, image: Tensor, weight: Tensor) -> Any:
        window = none if transposed else ones
        back = aten.convolution_backward
        return back(gradient, image, weight, [channels], steps, window, ones, transposed, none, 1, [True] * 3)

    return run


def _of_groups(groups: int, reach: int) -> Callable[..., Any]:
    def run(gradient: Tensor, image: Tensor, weight: Tensor) -> Any:
        back, ones, window = aten.convolution_backward, [1, 1], [reach, reach]
        return back(gradient, image, weight, None, ones, window, ones, False, [0, 0], groups, [True, True, False])

    return run


def in_channels_last(*shape: int) -> Tensor:
    return floats(*shape).to(memory_format=torch.channels_last)


WORKSPACES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "gelu by oneDNN": (lambda x: aten.gelu(x), (floats(8, 16),), GELU),
    "gelu of a transpose, by torch": (lambda x: aten.gelu(x.t()), (floats(8, 16),), 0),
    "the way back of gelu by oneDNN": (aten.gelu_backward, (floats(8, 16), floats(8, 16)), GELU_BACKWARD),
    "the way back of gelu by oneDNN, from a transpose": (
        lambda g, x: aten.gelu_backward(g.t(), x),
        (floats(512, 512), floats(512, 512)),
        MB + GELU_BACKWARD + GRADIENT_MOVED,
    ),
    "many exponentials, at most": (aten.linalg_matrix_exp, (floats(1024, 16, 16),), 14 * MB + 64 * 1024),
    "one exponential, at most": (aten.linalg_matrix_exp, (floats(512, 512),), 12 * MB + 64),
    "inverses have factors and pivots": (
        lambda x: aten.linalg_inv_ex(x),
        (floats(1024, 16, 16),),
        MB + 1024 * (16 * 4 + 32),
    ),
    "singular values of a copy": (
        lambda x: aten._linalg_svd(x, False, False),
        (floats(1024, 16, 16),),
        MB + 48 * 16 * 4,
    ),
    "singular vectors, three squares": (
        lambda x: aten._linalg_svd(x),
        (floats(512, 512),),
        4 * MB + 48 * 512 * 4,
    ),
    "means of bags note the bag of every index": (
        lambda w, i, o: aten._embedding_bag(w, i, o, False, 1),
        (floats(10, 8), indices(MB // 8), indices(4)),
        MB,
    ),
    "sums of bags the bags": (
        lambda w, i, o: aten._embedding_bag(w, i, o, False, 0),
        (floats(10, 8), indices(MB // 8), indices(4)),
        32,
    ),
    "largest of bags, backward": (
        lambda g, i, o: aten._embedding_bag_dense_backward(g, i, o, o, i.view(512, 256), 10, False, 2, None),
        (floats(512, 256), indices(512 * 256), indices(512)),
        512 * 256 * (8 + 4) + 8 * 512,
    ),
    "a median over columns sorts a copy, and an index for each": (
        lambda x: aten.median.dim(x, 0),
        (floats(512, 512),),
        MB + THREADS * 8 * 512,
    ),
    "a median over rows none": (lambda x: aten.median.dim(x, 1), (floats(512, 512),), THREADS * 8 * 512),
    "a group norm sums by image and channel on the way back": (
        lambda g, x, s, w: aten.native_group_norm_backward(g, x, s, s, w, 512, 256, 4, 8, [True] * 3),
        (floats(512, 256, 4), floats(512, 256, 4), floats(512, 8), floats(256)),
        MB,
    ),
    "a group norm of large images channels last sums for each thread": (
        lambda x, w: aten.native_group_norm(x, w, w, 2, 64, 1024, 8, 1e-5),
        (in_channels_last(2, 64, 32, 32), floats(64)),
        2 * 4 * 2 * 8 + THREADS * 2 * 4 * 2 * 64,
    ),
    "a batch norm has a factor and an addend by channel": (
        lambda x, w: aten.native_batch_norm(x, w, w, w, w, True, 0.1, 1e-5),
        (floats(2, 4096, 8), floats(4096)),
        2 * 4 * 4096,
    ),
    "a small enlarged image is computed channels last": (
        lambda x: aten.upsample_bilinear2d(x, [64, 64], False),
        (floats(8, 4, 32, 32),),
        8 * 4 * 4 * (32 * 32 + 64 * 64),
    ),
    "a large one by the places of what is read": (
        lambda x: aten.upsample_bilinear2d(x, [128, 128], False),
        (floats(8, 3, 64, 64),),
        2 * 128 * 2 * (8 + 4),
    ),
    "a smooth one between width and height": (
        lambda x: aten._upsample_bilinear2d_aa(x, [32, 32], False),
        (floats(8, 4, 64, 64),),
        8 * 4 * 64 * 32 * 4 + 2 * 32 * (5 * 4 + 4 * 8),
    ),
    "bilinear products by one column of the result": (
        lambda x, w, y: aten._trilinear(x, w, y, [1, 3], [0], [1, 2], [2, 3]),
        (floats(4096, 16), floats(8, 16, 16), floats(4096, 16)),
        4096 * 16 * 4 + 4096 * 4,
    ),
    "the way back of windows knows their places": (
        lambda g: aten.unfold_backward(g, [4, 1024], 1, 4, 2),
        (floats(4, 511, 4),),
        8 * 1024,
    ),
    "the way back of a product multiplies all elements before each, and all after it": (
        lambda g, x, y: prod_backward(g, x, y, 1, False),
        (floats(512), floats(512, 512), floats(512)),
        2 * MB + 512 * 4,
    ),
    "that of all elements copies what lies otherwise": (
        lambda g, x, y: prod_backward(g, x, y, None, False),
        (floats(1)[0], floats(512, 512).t(), floats(1)[0]),
        3 * MB + 4,
    ),
    "one small image is convolved by a matrix of its windows": (
        lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        (floats(1, 16, 32, 32), floats(8, 16, 3, 3)),
        16 * 9 * 32 * 32 * 4 + OWN,
    ),
    "and so are its gradients": (
        _gradients(8, 2),
        (floats(1, 8, 32, 32), floats(1, 16, 32, 32), floats(8, 16, 3, 3)),
        16 * 9 * 32 * 32 * 4 + OWN,
    ),
    "each of many tensors in a list is noted": (lambda *xs: aten.cat(xs), (floats(2),) * 1000, 48000),
    "and seen with a last dimension of one element": (lambda *xs: aten.stack(xs, -1), (floats(2),) * 1000, 272000),
    "but not with another": (lambda *xs: aten.stack(xs), (floats(2),) * 1000, 48000),
    "numbers around means are drawn first": (lambda m: aten.normal.Tensor_float(m, 2.0), (floats(512, 512),), MB),
    "means by index in 16 bits are divided in float32": (
        lambda x, i, y: aten.index_reduce(x, 1, i, y, "mean"),
        (floats(512, 512, dtype=torch.bfloat16), indices(512), floats(512, 512, dtype=torch.bfloat16)),
        2 * MB,
    ),
    "triangles of a batch with gaps are copied": (aten.triu, (floats(64, 96, 64)[:, :64],), MB),
    "a triangle with gaps is not": (aten.triu, (floats(64, 96)[:, :64],), 0),
    "powers of two": (aten.ldexp, (floats(512, 512), floats(512, 512)), MB),
    "many elements in many": (
        aten.isin,
        (floats(1024), floats(512)),
        1024 * (4 + 8) + 512 * 4 + 1536 * (2 * 4 + 2 * 8),
    ),
    "many elements in few": (aten.isin, (floats(1024), floats(8)), 0),
    "gathered halves are floats": (
        lambda x, i: aten.gather(x, 0, i),
        (floats(512, 512, dtype=torch.bfloat16), indices(512, 512)),
        MB,
    ),
    "gathered integers of as many bits are not": (
        lambda x, i: aten.gather(x, 0, i),
        (floats(512, 512).short(), indices(512, 512)),
        0,
    ),
    "means of scattered elements count": (
        lambda x, i: aten.scatter_reduce.two(x, 0, i, x, "mean"),
        (floats(512, 512), indices(512, 512)),
        2 * MB + MB // 4,
    ),
    "means of scattered rows sort": (
        lambda x, i: aten.scatter_reduce.two(x, 0, i[:, None].expand(512, 512), x, "mean"),
        (floats(512, 512), indices(512)),
        32 * 512,
    ),
    "the largest of scattered halves, in floats": (
        lambda x, i: aten.scatter_reduce.two(x, 0, i, x, "amax"),
        (floats(512, 512, dtype=torch.bfloat16), indices(512, 512)),
        MB,
    ),
    "means by row count": (
        lambda x, i: aten.index_reduce(x, 0, i, x, "mean"),
        (floats(512, 512), indices(512)),
        2 * MB + 32 * 512,
    ),
    "the way back of a masked scatter sums the mask": (
        lambda g, m: aten.masked_scatter_backward(g, m, [256, 256]),
        (floats(256, 256), floats(256, 256).bool()),
        MB,
    ),
    "running sums of flags convert them": (lambda m: m.cumsum(1), (floats(256, 512).bool(),), MB),
    "running sums of floats take nothing": (lambda x: x.cumsum(1), (floats(256, 512),), 0),
    "a norm in double precision": (
        lambda x: aten.linalg_vector_norm(x, 2, [1], True, dtype=torch.float64),
        (floats(256, 512),),
        MB,
    ),
    "a norm of complex numbers": (lambda x: aten.linalg_vector_norm(x, 2, [1]), (complexes(256, 512),), 0),
    "distances widen both sets": (
        aten._euclidean_dist,
        (floats(512, 256), floats(1024, 256)),
        MB // 2 + MB + 2 * (512 + 1024) * 4,
    ),
    "a set of points for all": (
        lambda x, y: aten._cdist_forward(x, y, 1.0, None),
        (floats(8, 32, 64), floats(1, 512, 64)),
        MB,
    ),
    "a transform of rows": (lambda x: aten._fft_r2c(x, [1], 0, True), (floats(64, 100),), 104 * 100),
    "a transform of scattered dimensions": (
        lambda x: aten._fft_c2c(x, [1, 3], 0, True),
        (complexes(8, 32, 16, 32),),
        MB + 104 * 32,
    ),
    "several dimensions to real numbers": (
        lambda x: aten._fft_c2r(x, [1, 2], 2, 126),
        (complexes(32, 64, 64),),
        2 * MB + 104 * 64,
    ),
    "columns to an image, copied into order": (
        lambda x: aten.col2im(x, [32, 32], [3, 3], [1, 1], [1, 1], [1, 1]),
        (floats(4, 1024, 72).mT,),
        4 * 1024 * 72 * 4,
    ),
    "a mean of squares has them all": (aten.mse_loss, (floats(256, 512).double(), floats(256, 512).double()), MB),
    "squares without a mean take nothing": (lambda x, y: aten.mse_loss(x, y, 0), (floats(256, 512).half(),) * 2, 0),
    "a mean of margins has them all": (aten.soft_margin_loss, (floats(512, 512), floats(512, 512)), MB),
    "an image to columns": (
        lambda x: aten.im2col(x, [3, 3], [1, 1], [1, 1], [1, 1]),
        (floats(4, 8, 32, 32),),
        0,
    ),
    "few channels in a block, forward": (
        lambda x, w: aten.convolution(x, w, None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1),
        (floats(4, 4, 16, 32, 32), floats(4, 4, 3, 3, 3)),
        4 * MB + 16 * 16 * 27 * 4 + FEW,
    ),
    "few channels in blocks of 16, backward": (  # 16 of the image, 16 of the gradient, 4 of the result
        _gradients(4, 3),
        (floats(4, 4, 16, 32, 32), floats(4, 4, 16, 32, 32), floats(4, 4, 3, 3, 3)),
        (16 + 16 - 4) * MB // 4 + 16 * 16 * 27 * 4 + FEW,
    ),
    "windows of 7 x 7 on single channels, channels last, in blocks of 16 x 16": (
        _of_groups(64, 3),
        (in_channels_last(8, 64, 8, 16), in_channels_last(8, 64, 8, 16), floats(64, 1, 7, 7)),
        64 * 49 * 16 * 16 * 4 + 64 * 49 * 4 + 2 * 2 * MB // 32 + FEW,
    ),
    "windows of 3 x 3 on single channels, channels last, have a kernel of their own": (
        _of_groups(64, 1),
        (in_channels_last(8, 64, 8, 16), in_channels_last(8, 64, 8, 16), floats(64, 1, 3, 3)),
        3 * 64 * 9 * 4 + 2 * 2 * MB // 32 + FEW,
    ),
    "few channels in blocks of 8, transposed": (
        _gradients(4, 3, transposed=True),
        (floats(4, 4, 16, 32, 32), floats(4, 4, 8, 16, 16), floats(4, 4, 2, 2, 2)),
        8 * (MB // 4 + MB // 32) + 16 * 16 * 8 * 4 + FEW,
    ),
    "bfloat16 across few rows: floats of 1024 neighbours": (
        lambda x: aten._log_softmax(x, 1, False),
        (floats(4, 64, 32, 32, dtype=torch.bfloat16),),
        THREADS * 4 * 1024 * (64 + 2),
    ),
    "bfloat16 across long rows: floats of 32 at least": (
        lambda x: aten._log_softmax(x, 1, False),
        (floats(2, 50000, 64, dtype=torch.bfloat16),),
        THREADS * 4 * 32 * (50000 + 2),
    ),
    "bfloat16 across: the softmax itself, always 64": (
        lambda x: aten._softmax(x, 1, False),
        (floats(2, 4096, 256, dtype=torch.bfloat16),),
        THREADS * 4 * 64 * 4096,
    ),
    "bfloat16 across, backward: two buffers": (
        lambda g, x: aten._softmax_backward_data(g, x, 1, torch.bfloat16),
        (floats(4, 128, 32, 32, dtype=torch.bfloat16), floats(4, 128, 32, 32, dtype=torch.bfloat16)),
        THREADS * 4 * 512 * (2 * 128 + 1),
    ),
    "bfloat16 across, backward of the logarithm: one": (
        lambda g, x: aten._log_softmax_backward_data(g, x, -2, torch.bfloat16),
        (floats(4, 128, 100, dtype=torch.bfloat16), floats(4, 128, 100, dtype=torch.bfloat16)),
        THREADS * 4 * 100 * (128 + 1),
    ),
    "floats across: two numbers for each of 512 rows": (
        lambda x: aten._log_softmax(x, 1, False),
        (floats(4, 64, 32, 32),),
        THREADS * 2 * 4 * 512,
    ),
    "floats in rows: two numbers for each of 128": (
        lambda x: aten._log_softmax(x, 1, False),
        (floats(4096, 64),),
        THREADS * 2 * 4 * 128,
    ),
    "bfloat16 images in channels last, from gradients of larger ones": (
        lambda g: aten.upsample_nearest2d_backward(g, [64, 64], [8, 32, 32, 32], None, None),
        (in_channels_last(8, 32, 64, 64).to(torch.bfloat16),),
        THREADS * 4 * 32 * 32 * 32,
    ),
    "bfloat16 in rows: the softmax of one": (
        lambda x: aten._softmax(x, -1, False),
        (floats(8, 5000, dtype=torch.bfloat16),),
        THREADS * 4 * 5000,
    ),
    "the largest of rows, with their places": (lambda x: torch.topk(x, 5, 1), (floats(8, 4000),), THREADS * 16 * 4000),
    "the largest of columns": (lambda x: torch.topk(x, 5, 0), (floats(4000, 8),), THREADS * 16 * 4000),
    "rows in order": (lambda x: torch.sort(x, stable=True, dim=1), (floats(8, 4000),), THREADS * 8 * 4000),
    "rows added by index": (
        lambda x, at, rows: torch.index_add(x, 0, at, rows),
        (floats(100, 8), indices(50), floats(50, 8)),
        5 * 8 * 50,
    ),
    "columns of bfloat16 added by index": (
        lambda x, at, columns: torch.index_add(x, 1, at, columns),
        (floats(100, 8, dtype=torch.bfloat16), indices(3), floats(100, 3, dtype=torch.bfloat16)),
        4 * 100 * 8,
    ),
    "sums of a norm's weight and bias": (
        lambda g, x, s, w: aten.native_layer_norm_backward(g, x, [5000], s, s, w, w, [True, True, False]),
        (floats(64, 5000), floats(64, 5000), floats(64, 1), floats(5000)),
        THREADS * 2 * 4 * 5000,
    ),
    "a product by oneDNN, in order": (ONEDNN[aten.mm.default], (floats(512, 300), floats(300, 100)), 28 << 10),
    "a product by oneDNN, transposed: blocks of both": (
        lambda a, b: ONEDNN[aten.mm.default](a.t(), b.t()),
        (floats(2000, 500), floats(100, 2000)),
        (28 << 10) + THREADS * 4 * (320 * (1024 + 16) + 64 * 1024),
    ),
    "a product by oneDNN, with an addend": (
        ONEDNN[aten.addmm.default],
        (floats(100), floats(50, 300), floats(300, 100)),
        (28 << 10) + THREADS * 4 * 50 * 100,
    ),
    "products by oneDNN of batches copy what is transposed": (
        lambda a, b: ONEDNN[aten.bmm.default](a, b.mT),
        (floats(8, 64, 32), floats(8, 64, 32)),
        (28 << 10) + 4 * 8 * 64 * 32 + THREADS * 4 * 64 * 32,
    ),
    "windows wider than 14, the gradient of the weight": (
        lambda g, x, w: aten.convolution_backward(g, x, w, None, [1], [15], [1], False, [0], 1, [False, True, False]),
        (floats(4, 128, 800), floats(4, 128, 800), floats(128, 128, 31)),
        2 * 4 * 4 * 128 * 800  # image and gradient, copied in blocks
        + 4 * 128 * 128 * 31
        + FEW
        + THREADS * (2 * 4 * 128 * 800 + 4 * 128 * 31 * 800 + 4 * 4 * 128 * 128 * 31),
    ),
    "float64, transposed: windows of the batch": (
        lambda x, w: aten.convolution(x, w, None, [2, 2], [3, 3], [1, 1], True, [0, 0], 1),
        (floats(8, 3, 16, 16).double(), floats(3, 4, 7, 7).double()),
        8 * 4 * 49 * 16 * 16 * 8 + OWN,
    ),
    "float64, transposed, backward: windows of one image": (
        lambda g, x, w: aten.convolution_backward(
            g, x, w, None, [2, 2], [3, 3], [1, 1], True, [0, 0], 1, [True, True, False]
        ),
        (floats(8, 4, 31, 31).double(), floats(8, 3, 16, 16).double(), floats(3, 4, 7, 7).double()),
        4 * 49 * 16 * 16 * 8 + 2 * 3 * 4 * 49 * 8 + OWN,
    ),
    "reflectors of a small matrix": (lambda x: aten.linalg_qr(x), (floats(64, 64),), 4 * 64 + 4 * 64 * 64),
    "reflectors of a large matrix": (lambda x: aten.linalg_qr(x), (floats(1024, 1024),), 4 * 1024 + 4 * 192 * 1024),
}


def test_one_thread_enlarges_an_image_channels_last() -> None:
    with kept_whole():
        node = node_of(lambda x: aten.upsample_bilinear2d(x, [128, 128], False), floats(8, 3, 64, 64))
    assert workspace_bytes(node, 1) == 8 * 3 * 4 * (64 * 64 + 128 * 128)


@pytest.mark.parametrize("case", WORKSPACES)
def test_workspace_of_an_operator(case: str) -> None:
    function, inputs, expected = WORKSPACES[case]
    with kept_whole():
        node = node_of(function, *inputs)
    assert workspace_bytes(node, 2) == expected


def test_a_dropout_that_runs_again_is_torchs_own() -> None:
    first = node_of(lambda x: aten.native_dropout(x, 0.3, True), floats(512, 512))
    again = first.graph.call_function(replay, (first, first.target, *first.args))
    again.meta["val"] = first.meta["val"]
    assert workspace_bytes(first, 2) == 0
    assert workspace_bytes(again, 2) == workspace_bytes(first, 2, eager=True) == MB


def test_eager_windows_take_an_image_first() -> None:
    node = node_of(lambda x: aten.im2col(x, [3, 3], [1, 1], [1, 1], [1, 1]), floats(4, 8, 64, 128))
    assert workspace_bytes(node, 2, eager=True) == MB


def test_eager_margins_lie_behind_their_mean() -> None:
    assert workspace_bytes(node_of(aten.soft_margin_loss, floats(512, 512), floats(512, 512)), 2, eager=True) == 0


Q, K, V = floats(2, 2, 800, 64), floats(2, 2, 600, 64), floats(2, 2, 600, 64)
Q16, K16, V16 = (part.bfloat16() for part in (Q, K, V))
STATE, STATE16 = aten._scaled_dot_product_flash_attention_for_cpu(Q, K, V), floats(2, 2, 800)
FOR_EACH_THREAD: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a loss by the scores of labels": (lambda s, y: nll_of_scores(s, y, 7, 1, -100), (floats(9000), indices(9000))),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu, (Q, K, V)),
    "attention in half precision": (aten._scaled_dot_product_flash_attention_for_cpu, (Q16, K16, V16)),
    "attention backward": (
        lambda g, q, k, v, o, s: aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, o, s, 0.0, False
        ),
        (STATE[0], Q, K, V, *STATE),
    ),
}


@pytest.fixture
def threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("case", FOR_EACH_THREAD)
def test_each_thread_takes_buffers(case: str, threads: int, threads_of_torch: None) -> None:
    function, inputs = FOR_EACH_THREAD[case]
    said = workspace_bytes(node_of(function, *inputs), threads)
    torch.set_num_threads(threads)
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True, acc_events=True) as profile:
        results = function(*inputs)
    live = list(
        itertools.accumulate(
            event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
        )
    )
    assert results is not None
    taken = max(live) - live[-1]
    assert 0.97 * said <= taken <= said + 1024


def test_halves_that_onednn_does_not_convolve_sum_the_gradient_of_a_bias_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("roamc.operators.costs.convolutions.onednn_takes", lambda dtype: False)
    gradient, image, weight = (floats(*shape).bfloat16() for shape in ((1, 64, 64, 64), (1, 1, 32, 32), (1, 64, 2, 2)))
    turned = node_of(_gradients(64, 2, transposed=True), gradient, image, weight)
    assert workspace_bytes(turned, 1) == 64 * 64 * 64 * 4 + OWN


def test_halves_that_onednn_does_not_convolve_have_windows_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roamc.operators.costs.convolutions.onednn_takes", lambda dtype: False)
    image, weight = floats(8, 3, 64, 64, dtype=torch.float16), floats(64, 3, 7, 7, dtype=torch.float16)
    plain = node_of(lambda x, w: aten.convolution(x, w, None, [2, 2], [3, 3], [1, 1], False, [0, 0], 1), image, weight)
    assert [workspace_bytes(plain, threads) for threads in (1, 4)] == [8 * 3 * 49 * 32 * 32 * 2 + OWN] * 2
    turned = node_of(
        lambda x, w: aten.convolution(x, w, None, [2, 2], [3, 3], [1, 1], True, [0, 0], 1),
        *(image, floats(3, 64, 7, 7, dtype=torch.float16)),
    )
    one = 64 * 49 * 64 * 64 * 2
    assert [workspace_bytes(turned, n) for n in (1, 4)] == [8 * one + 2 * n * one + OWN for n in (1, 4)]
