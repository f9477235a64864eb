"""Arguments for every kernel of ``roamc.operators.kernels``: odd shapes, strides, dtypes and settings.

``CASES`` maps an overload to (dtypes, function); the function gives the calls to
try for one dtype, each as ``call(...)``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roamc.operators.aligned import BY_COPIES
from roamc.operators.counter import counter_mask, draw_seeds, own_seeds
from roamc.operators.onednn import ONEDNN
from roamc.operators.padded import WITH_PADDED_ROWS, rows_padded
from roamc.operators.random import dropout_mask
from roamc.operators.scores import label_scores, nll_of_scores
from roamc.operators.shards import own_classes, own_indices, own_part

aten = torch.ops.aten
collective = torch.ops.roamc_collective
Dtypes = tuple[torch.dtype, ...]
Call = tuple[tuple[Any, ...], dict[str, Any]]
Calls = Callable[[torch.dtype], list[Call]]

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int64)
ALL = (*NUMBERS, torch.bool)
CASES: dict[Any, tuple[Dtypes, Calls]] = {}


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def cases(dtypes: Dtypes, *overloads: Any) -> Callable[[Calls], Calls]:
    def add(function: Calls) -> Calls:
        CASES.update((overload, (dtypes, function)) for overload in overloads)
        return function

    return add


def tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 9, shape, dtype=dtype)


def odd(dtype: torch.dtype) -> Iterator[Tensor]:
    """Tensors of every kind of geometry: 0-dim, empty, plain, transposed, with gaps, expanded, channels last."""
    yield tensor(dtype)
    yield tensor(dtype, 0)
    yield tensor(dtype, 3, 0, 2)
    yield tensor(dtype, 3, 5)
    yield tensor(dtype, 3, 5).t()
    yield tensor(dtype, 4, 6)[1:, ::2]
    yield tensor(dtype, 3, 1).expand(3, 4)
    yield tensor(dtype, 2, 3, 4, 2).to(memory_format=torch.channels_last)
    yield tensor(dtype, 40, 7)  # past a vector's width


def matrices(dtype: torch.dtype) -> Iterator[Tensor]:
    """The geometries that have rows and columns to take."""
    return (x for x in odd(dtype) if x.dim() >= 2 and x.numel())


@cases(ALL, aten.clone.default)
def clone(dtype: torch.dtype) -> list[Call]:
    plain = [call(x) for x in odd(dtype)]
    dense = [call(x, memory_format=torch.contiguous_format) for x in odd(dtype)]
    return [*plain, *dense, call(tensor(dtype, 2, 3, 4, 2), memory_format=torch.channels_last)]


@cases(ALL, aten._to_copy.default)
def to_copy(dtype: torch.dtype) -> list[Call]:
    kept = [call(x, dtype=to) for to in ALL for x in odd(dtype)]
    return [*kept, *(call(x, dtype=torch.float32, memory_format=torch.contiguous_format) for x in odd(dtype))]


@cases(ALL, aten.lift_fresh_copy.default)
def lift_fresh_copy(dtype: torch.dtype) -> list[Call]:
    return [call(x) for x in odd(dtype)]


@cases(ALL, aten.copy.default)
def functional_copy(dtype: torch.dtype) -> list[Call]:
    same = [call(x, tensor(to, *x.shape)) for to in (dtype, torch.float32) for x in odd(dtype)]
    return [*same, call(tensor(dtype, 3, 5), tensor(dtype, 5)), call(tensor(dtype, 3, 5), tensor(dtype))]


@cases(ALL, aten.zeros.default, aten.ones.default)
def of_shape(dtype: torch.dtype) -> list[Call]:
    return [call(shape, dtype=dtype, pin_memory=False) for shape in ([], [0], [2, 3], [2, 0, 3])]


@cases(ALL, aten.zeros_like.default, aten.ones_like.default)
def like(dtype: torch.dtype) -> list[Call]:
    other = [call(x, dtype=torch.int64, memory_format=torch.contiguous_format) for x in odd(dtype)]
    return [*(call(x) for x in odd(dtype)), *other]


@cases(ALL, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default)
def new(dtype: torch.dtype) -> list[Call]:
    return [call(tensor(dtype, 2), shape, **k) for shape in ([], [0], [2, 3]) for k in ({}, {"dtype": torch.float64})]


@cases(ALL, aten.full.default)
def full(dtype: torch.dtype) -> list[Call]:
    values = [1, True, *((0.1, math.inf, math.nan) if dtype.is_floating_point else ())]
    return [call(shape, v, **k) for shape in ([], [0], [2, 3]) for v in values for k in ({"dtype": dtype}, {})]


@cases(ALL, aten.full_like.default)
def full_like(dtype: torch.dtype) -> list[Call]:
    wide = call(tensor(dtype, 3), 2, dtype=torch.float32)
    return [*(call(x, value) for x in odd(dtype) for value in (1, 0.1, True)), wide]


@cases(ALL, aten.new_full.default)
def new_full(dtype: torch.dtype) -> list[Call]:
    return [call(tensor(dtype, 2), shape, value) for shape in ([], [0], [2, 3]) for value in (1, 0.1)]


@cases(ALL, aten.scalar_tensor.default)
def scalar_tensor(dtype: torch.dtype) -> list[Call]:
    return [call(value, dtype=dtype) for value in (0, 1, True, 0.1)] + [call(2), call(0.1)]


@cases(ALL, aten.empty.memory_format)
def empty(dtype: torch.dtype) -> list[Call]:
    return [call([2, 3], dtype=dtype), call([], dtype=dtype), call([0], dtype=dtype)]


@cases(ALL, aten.empty_like.default)
def empty_like(dtype: torch.dtype) -> list[Call]:
    return [call(x) for x in odd(dtype)]


@cases(ALL, aten.empty_strided.default)
def empty_strided(dtype: torch.dtype) -> list[Call]:
    return [call([2, 3], [1, 2], dtype=dtype), call([2, 3], [4, 1], dtype=dtype)]


@cases(ALL, aten.new_empty_strided.default)
def new_empty_strided(dtype: torch.dtype) -> list[Call]:
    return [call(tensor(dtype, 2), [2, 3], [1, 2]), call(tensor(dtype, 2), [2, 3], [4, 1])]


@cases(NUMBERS, aten.add.Scalar, aten.sub.Scalar)
def with_alpha(dtype: torch.dtype) -> list[Call]:
    return [call(x, other, *alpha) for x in odd(dtype) for other in (2, 0.3) for alpha in ((), (3,))]


@cases(ALL, aten.mul.Scalar)
def by_scalar(dtype: torch.dtype) -> list[Call]:
    return [call(x, other) for x in odd(dtype) for other in (2, 0.3, True)]


@cases(ALL, aten.div.Scalar)
def div_scalar(dtype: torch.dtype) -> list[Call]:
    return [call(x, other) for x in odd(dtype) for other in (3, 0.3)]


@cases(NUMBERS, aten.relu.default)
def relu(dtype: torch.dtype) -> list[Call]:
    special = torch.tensor([-0.0, 0.0, math.inf, -math.inf, math.nan] if dtype.is_floating_point else [-3, 0, 3])
    return [*(call(x) for x in odd(dtype)), call(special.to(dtype)), call(-tensor(dtype, 40, 7))]


@cases(NUMBERS, aten.arange.default)
def arange(dtype: torch.dtype) -> list[Call]:
    return [call(end, dtype=dtype, pin_memory=False) for end in (0, 7, 6.5, 100)] + [call(5), call(2.5)]


@cases(NUMBERS, aten.arange.start)
def arange_start(dtype: torch.dtype) -> list[Call]:
    return [call(*ends, dtype=dtype) for ends in ((0, 7), (3, 3), (-5, 60), (1.5, 6))] + [call(2, 5), call(2, 5.5)]


@cases(NUMBERS, aten.arange.start_step)
def arange_step(dtype: torch.dtype) -> list[Call]:
    return [call(*ends, dtype=dtype) for ends in ((0, 7, 2), (9, -60, -3), (0, 1))] + [call(0, 2, 0.1), call(5, 0, -2)]


@cases(FLOATS, aten._safe_softmax.default)
def safe_softmax(dtype: torch.dtype) -> list[Call]:
    masked = tensor(dtype, 5, 7).masked_fill(tensor(torch.bool, 5, 7), -math.inf)
    masked[2] = -math.inf
    whole = [call(masked, dim) for dim in (0, 1, -1)] + [call(torch.full_like(masked, -math.inf), 1)]
    return [*whole, *(call(x, 0) for x in odd(dtype) if x.dim()), call(masked.t(), 0), call(masked, 1, torch.float64)]


@cases(ALL, aten.sum.default)
def sum_all(dtype: torch.dtype) -> list[Call]:
    return [call(x, **k) for x in [*odd(dtype), tensor(dtype, 50, 70)] for k in ({}, {"dtype": torch.float64})]


@cases(FLOATS, aten.mean.default)
def mean_all(dtype: torch.dtype) -> list[Call]:
    return [call(x, **k) for x in [*odd(dtype), tensor(dtype, 50, 70)] for k in ({}, {"dtype": torch.float64})]


@cases(ALL, aten.stack.default)
def stack(dtype: torch.dtype) -> list[Call]:
    same = [call([x, x.flip(0) if x.dim() else x, x], dim) for x in odd(dtype) for dim in (0, -1)]
    mixed = [
        call([tensor(torch.float32, 3), tensor(dtype, 3)], 1),
        call([tensor(dtype, 2, 3), tensor(dtype, 3, 2).t()], 1),
    ]
    return [*same, *mixed, call([tensor(dtype, 2)])]


@cases(ALL, aten.masked_fill.Scalar)
def masked_fill(dtype: torch.dtype) -> list[Call]:
    return [call(x, tensor(torch.bool, *x.shape), 1) for x in odd(dtype)] + [
        call(tensor(dtype, 3, 5), tensor(torch.bool, 5), 0),
        call(tensor(dtype, 5), tensor(torch.bool, 3, 5), 1),
        call(tensor(dtype, 3, 5), torch.tensor(True), 1),
    ]


@cases(ALL, aten.masked_fill.Tensor)
def masked_fill_tensor(dtype: torch.dtype) -> list[Call]:
    return [call(x, mask, torch.tensor(value, dtype=dtype)) for (x, mask, value), _ in masked_fill(dtype)]


@cases(ALL, aten.index_put.default)
def index_put(dtype: torch.dtype) -> list[Call]:
    at, many = torch.tensor([2, 0]), torch.tensor([1, 1, 0, 1])
    return [
        call(tensor(dtype, 3, 5), [at], tensor(dtype, 2, 5)),
        call(tensor(dtype, 5, 3).t(), [None, at], tensor(dtype, 3, 2)),
        call(tensor(dtype, 3, 5), [many], tensor(dtype, 4, 5), True),
        call(tensor(dtype, 3, 5), [many, many], tensor(dtype), True),
        call(tensor(dtype, 3, 5), [tensor(torch.bool, 3, 5)], tensor(dtype)),
        call(tensor(dtype, 3, 5), [torch.tensor([], dtype=torch.int64)], tensor(dtype, 0, 5)),
    ]


@cases(ALL, aten.slice_scatter.default)
def slice_scatter(dtype: torch.dtype) -> list[Call]:
    where = [(), (0,), (1, 1), (1, -2), (1, 0, 99), (-1, 0, 9223372036854775807, 2), (0, None, -1), (0, 2, 1)]
    return [call(x, tensor(dtype, *aten.slice.Tensor(x, *w).shape), *w) for x in matrices(dtype) for w in where]


@cases(ALL, aten.select_scatter.default)
def select_scatter(dtype: torch.dtype) -> list[Call]:
    return [
        call(x, tensor(dtype, *x.select(dim, at).shape), dim, at)
        for x in matrices(dtype)
        for dim, at in ((0, 0), (1, -1), (-1, 0))
    ]


@cases(ALL, aten.diagonal_scatter.default)
def diagonal_scatter(dtype: torch.dtype) -> list[Call]:
    where = [(), (1,), (-1, 1, 0), (99,)]
    return [call(x, tensor(dtype, *x.diagonal(*w).shape), *w) for x in matrices(dtype) for w in where]


@cases(ALL, aten.as_strided_scatter.default)
def as_strided_scatter(dtype: torch.dtype) -> list[Call]:
    where = [([2, 2], [5, 2]), ([2, 2], [5, 2], 3), ([3], [5], 0), ([], [], 14), ([0, 2], [1, 1])]
    return [call(x, tensor(dtype, *w[0]), *w) for w in where for x in (tensor(dtype, 3, 5), tensor(dtype, 5, 3).t())]


@cases(ALL, aten.as_strided_copy.default)
def as_strided_copy(dtype: torch.dtype) -> list[Call]:
    where = [([2, 2], [5, 2]), ([2, 2], [5, 2], 3), ([3], [5], 0), ([], [], 14), ([0, 2], [1, 1]), ([4], [0], 7)]
    return [call(x, *w) for w in where for x in (tensor(dtype, 3, 5), tensor(dtype, 5, 3).t(), tensor(dtype, 3, 5)[:1])]


@cases(FLOATS, aten.binary_cross_entropy.default)
def binary_cross_entropy(dtype: torch.dtype) -> list[Call]:
    pairs = [(x.sigmoid(), torch.rand(x.shape).to(dtype)) for x in odd(dtype)]
    weighted = [call(x, y, torch.rand(x.shape).to(dtype), how) for x, y in pairs for how in (0, 1, 2)]
    return [*(call(x, y) for x, y in pairs), *weighted]


@cases(FLOATS, aten.huber_loss.default)
def huber_loss(dtype: torch.dtype) -> list[Call]:
    pairs = [(x, torch.randn(x.shape).to(dtype)) for x in odd(dtype)]
    return [*(call(x, y) for x, y in pairs), *(call(x, y, how, 0.3) for x, y in pairs for how in (0, 1, 2))]


@cases(FLOATS, aten.mse_loss.default, aten.soft_margin_loss.default)
def loss_of_pairs(dtype: torch.dtype) -> list[Call]:
    pairs = [(x, torch.randn(x.shape).to(dtype)) for x in odd(dtype)]
    return [*(call(x, y) for x, y in pairs), *(call(x, y, how) for x, y in pairs for how in (0, 1, 2))]


@cases(FLOATS, aten.smooth_l1_loss.default)
def smooth_l1_loss(dtype: torch.dtype) -> list[Call]:
    return [*loss_of_pairs(dtype), *(call(*args, 0.3) for args, _ in loss_of_pairs(dtype) if len(args) == 3)]


@cases(FLOATS, aten.slice_backward.default)
def slice_backward(dtype: torch.dtype) -> list[Call]:
    where = [(0, 0, 2, 1), (1, 1, 5, 2), (1, -2, 9223372036854775807, 1), (-1, 0, 99, 3), (0, 2, 1, 1)]
    return [
        call(grad, [3, 5], *w)
        for w in where
        for grad in _both(tensor(dtype, *aten.slice.Tensor(torch.empty(3, 5), *w).shape))
    ]


@cases(FLOATS, aten.select_backward.default)
def select_backward(dtype: torch.dtype) -> list[Call]:
    return [
        call(tensor(dtype, 5), [3, 5], 0, 1),
        call(tensor(dtype, 6)[::2], [3, 5], -1, -1),
        call(tensor(dtype), [4], 0, 2),
        call(tensor(dtype, 0), [3, 0], 0, 2),
    ]


@cases(ALL, aten.constant_pad_nd.default)
def constant_pad_nd(dtype: torch.dtype) -> list[Call]:
    pads = ([1, 2], [-1, 0], [0, -1, 2, 0], [2, -3, -1, 1], [0, 0], [-1, -2, 0, 0])
    wide = [call(tensor(dtype, 2, 3, 4, 2).to(memory_format=torch.channels_last), [1, 1, -1, 0, 0, 2])]
    return [call(x, pad, *v) for x in matrices(dtype) for pad in pads if _fits(x, pad) for v in ((), (1,))] + [
        *wide,
        call(tensor(dtype, 0), [2, 1]),
        call(tensor(dtype, 3), [1, 1], True),
    ]


def _fits(x: Tensor, pad: list[int]) -> bool:
    """Whether there is as much as ``pad`` takes away; torch traces nothing else."""
    sides = zip(reversed(x.shape), zip(pad[::2], pad[1::2], strict=True), strict=False)
    return all(size + min(low, 0) + min(high, 0) >= 0 for size, (low, high) in sides)


def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same values, in rows and in columns."""
    return x, x.t().contiguous().t()


@cases(ALL, aten.bernoulli.p)
def bernoulli(dtype: torch.dtype) -> list[Call]:
    return [call(x, p) for x in odd(dtype) for p in (0.0, 0.3, 1.0)]


@cases(FLOATS, aten.rand_like.default, aten.randn_like.default)
def random_like(dtype: torch.dtype) -> list[Call]:
    return [*(call(x) for x in odd(dtype)), *(call(x, dtype=torch.float64) for x in odd(dtype))]


@cases((torch.bool,), dropout_mask)
def mask_of_dropout(dtype: torch.dtype) -> list[Call]:
    likes = [torch.empty_like(x) for x in odd(dtype)]
    return [call(x.shape, x.stride(), keep) for x in likes for keep in (0.0, 0.7, 1.0)]


@cases((torch.int64,), draw_seeds)
def seeds_of_dropouts(dtype: torch.dtype) -> list[Call]:
    return [call(count) for count in (0, 1, 3)]


@cases((torch.bool,), counter_mask)
def counter_masks(dtype: torch.dtype) -> list[Call]:
    seeds, likes = torch.tensor([[1, 2], [-(2**62), 2**32 - 1]]), [torch.empty_like(x) for x in odd(dtype)]
    return [call(seed, x.shape, x.stride(), keep) for seed in seeds for x in likes for keep in (0.0, 0.7, 1.0)]


def some_labels() -> list[torch.Tensor]:
    """Labels of four rows of seven classes: all there, some left out, some no class, all left out."""
    return [torch.tensor(each) for each in ([0, 6, 3, 3], [0, -100, 6, 1], [7, -1, 2, -100], [2, 2, 2, 2])]


@cases(FLOATS, label_scores)
def scores_of_labels(dtype: torch.dtype) -> list[Call]:
    scores = (*_both(tensor(dtype, 4, 7)), tensor(dtype, 8, 14)[::2, ::2])
    return [call(x, labels, [1], keep, 2) for x in scores for labels in some_labels() for keep in (False, True)]


@cases(FLOATS, nll_of_scores)
def losses_of_scores(dtype: torch.dtype) -> list[Call]:
    whole, some, _, alike = some_labels()
    labels = ((whole, -100), (whole, 3), (some, -100), (alike, 2), (alike, 0))
    return [call(tensor(dtype, 4), each, 7, how, ignored) for each, ignored in labels for how in range(3)]


@cases((torch.int64,), own_seeds)
def seeds_of_a_rank(dtype: torch.dtype) -> list[Call]:
    seeds = torch.tensor([[1, 2], [-(2**62), 2**32 - 1], [0, 0]])
    return [call(each, 12, alone()) for each in (seeds, seeds[:0], seeds[::2])]


@cases(FLOATS, aten.native_dropout.default)
def native_dropout(dtype: torch.dtype) -> list[Call]:
    settings = ((0.3, True), (0.0, True), (1.0, True), (0.3, None), (0.3, False))
    return [call(x, p, train) for x in odd(dtype) for p, train in settings]


@cases(FLOATS, aten.native_dropout_backward.default)
def native_dropout_backward(dtype: torch.dtype) -> list[Call]:
    large = tensor(dtype, 3, 100, 1001)  # more than a piece
    some = (call(x, tensor(torch.bool, *x.shape), scale) for x in odd(dtype) for scale in (1.0, 1 / 0.7, 0.0))
    return [*some, call(large, tensor(torch.bool, *large.shape), 1 / 0.7)]


@cases(FLOATS, aten.embedding.default)
def embedding(dtype: torch.dtype) -> list[Call]:
    weights = (*_both(tensor(dtype, 7, 5)), tensor(dtype, 14, 10)[::2, ::2])
    indices = (
        torch.randint(0, 7, (2, 3)),
        torch.tensor(4),
        torch.tensor([], dtype=torch.int64),
        torch.arange(6).view(3, 2).t(),
    )
    return [call(w, i, *more) for w in weights for i in indices for more in ((), (2,), (0, True))] + [
        call(weights[0], torch.randint(0, 7, (2, 3), dtype=torch.int32))
    ]


@cases(FLOATS, aten.embedding_dense_backward.default)
def embedding_dense_backward(dtype: torch.dtype) -> list[Call]:
    shapes = ((2, 3), (), (0,), (40,))
    settings = ((7, -1, False), (7, 2, False), (7, 2, True), (9, -1, True))
    plain = [call(tensor(dtype, *s, 5), torch.randint(0, 7, s), *more) for s in shapes for more in settings]
    columns = tensor(dtype, 5, 6).t()
    return [*plain, call(columns, torch.tensor([1, 1, 6, 1, 0, 6]), 7, 6, False)]


@cases(FLOATS, aten._native_batch_norm_legit_functional.default)
def batch_norm(dtype: torch.dtype) -> list[Call]:
    calls = []
    for x in (
        tensor(dtype, 4, 3),
        tensor(dtype, 2, 3, 4, 4),
        tensor(dtype, 2, 3, 4, 4).to(memory_format=torch.channels_last),
    ):
        for kept in {dtype, torch.float32} if dtype is torch.bfloat16 else {dtype}:
            weight, bias, mean = (tensor(kept, 3) for _ in range(3))
            variance = tensor(kept, 3).abs() + 0.5
            for training in (True, False):
                calls += [call(x, weight, bias, mean, variance, training, 0.1, 1e-5)]
                calls += [call(x, None, None, mean, variance, training, 0.3, 1e-3)]
    return calls


@cases(FLOATS, aten.im2col.default)
def im2col(dtype: torch.dtype) -> list[Call]:
    return [
        call(tensor(dtype, 2, 3, 5, 7), [3, 2], [1, 1], [1, 0], [2, 1]),
        call(tensor(dtype, 2, 5, 7, 3).permute(0, 3, 1, 2), [2, 2], [1, 1], [0, 0], [1, 1]),
    ]


@cases(FLOATS, aten.col2im.default)
def col2im(dtype: torch.dtype) -> list[Call]:
    return [
        call(tensor(dtype, 2, 12, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1]),
        call(tensor(dtype, 2, 12, 12).mT, [4, 5], [2, 2], [1, 1], [0, 0], [1, 1]),
    ]


def alone() -> str:
    """The name of a process group that has this process only; tests with several ranks have processes of their own."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return str(dist.group.WORLD.group_name)


@cases((*NUMBERS, torch.complex64), collective.all_reduce.default, collective.start_all_reduce.default)
def all_reduce(dtype: torch.dtype) -> list[Call]:
    return [call(x, "sum", alone()) for x in dense(dtype)]


@cases(NUMBERS, collective.all_reduce_coalesced.default)
def all_reduce_coalesced(dtype: torch.dtype) -> list[Call]:
    return [call([x], "sum", alone()) for x in dense(dtype)] + [call([*dense(dtype)], "max", alone())]


@cases(
    (*NUMBERS, torch.complex64),
    collective.all_gather_into_tensor.default,
    collective.start_all_gather_into_tensor.default,
)
def all_gather_into_tensor(dtype: torch.dtype) -> list[Call]:
    return [call(x, 1, alone()) for x in dense(dtype)]


@cases(
    (*NUMBERS, torch.complex64),
    collective.reduce_scatter_tensor.default,
    collective.start_reduce_scatter_tensor.default,
)
def reduce_scatter_tensor(dtype: torch.dtype) -> list[Call]:
    return [call(x, "sum", 1, alone()) for x in dense(dtype)]


@cases((*NUMBERS, torch.complex64), collective.broadcast.default, collective.start_broadcast.default)
def broadcast(dtype: torch.dtype) -> list[Call]:
    return [call(x, 0, alone()) for x in dense(dtype)]


@cases((*NUMBERS, torch.complex64), collective.start_all_to_all_single.default)
def all_to_all_single(dtype: torch.dtype) -> list[Call]:
    return [call(x, [len(x)], [len(x)], alone()) for x in dense(dtype)]


@cases((*NUMBERS, torch.complex64), own_part)
def rows_of_a_rank(dtype: torch.dtype) -> list[Call]:
    return [call(x, 1, alone()) for x in dense(dtype)]


@cases((torch.int64,), own_classes)
def classes_of_a_rank(dtype: torch.dtype) -> list[Call]:
    targets = torch.tensor([[0, 3, -100, 2], [7, 5, 3, 9]])
    return [call(targets, 10, -100, 1, alone()), call(targets.clamp(0).t(), 10, 3, 1, alone())]


@cases((torch.int64, torch.int32), own_indices)
def indices_of_a_rank(dtype: torch.dtype) -> list[Call]:
    indices = torch.tensor([[0, 3, -100, 2], [7, 5, 3, 9]], dtype=dtype)
    return [call(indices, 10, -100, 1, alone()), call(indices.clamp(0).t(), 10, None, 1, alone())]


def dense(dtype: torch.dtype) -> Iterator[Tensor]:
    """Tensors as collectives take them: plain, transposed, with gaps, expanded, larger than a page."""
    if dtype.is_complex:
        yield from (torch.complex(x, -x) for x in dense(torch.float32))
        return
    yield tensor(dtype, 3, 5)
    yield tensor(dtype, 3, 5).t()
    yield tensor(dtype, 4, 6)[1:, ::2]
    yield tensor(dtype, 3, 1).expand(3, 4)
    yield tensor(dtype, 40, 70)


@cases((torch.float32,), ONEDNN[aten.mm.default])
def product_by_onednn(dtype: torch.dtype) -> list[Call]:
    return [call(x, tensor(dtype, 9, x.shape[1]).t()) for x in dense(dtype)]


@cases((torch.float32,), ONEDNN[aten.addmm.default])
def product_and_sum_by_onednn(dtype: torch.dtype) -> list[Call]:
    return [
        call(added, x, tensor(dtype, x.shape[1], 9))
        for x in dense(dtype)
        for added in (tensor(dtype, 9), tensor(dtype, x.shape[0], 9), tensor(dtype, x.shape[0], 1), tensor(dtype))
    ]


@cases((torch.float32, torch.bfloat16), BY_COPIES[aten.mm.default])
def product_by_aligned_copies(dtype: torch.dtype) -> list[Call]:
    return [
        call(x, other)
        for x in dense(dtype)
        for other in (tensor(dtype, 9, x.shape[1]).t(), tensor(dtype, x.shape[1], 9))
    ]


@cases((torch.float32, torch.bfloat16), WITH_PADDED_ROWS[aten.mm.default])
def product_with_padded_rows(dtype: torch.dtype) -> list[Call]:
    return [call(x, y) for x in dense(dtype) for y in _both(tensor(dtype, x.shape[1], 9))]


@cases((torch.float32, torch.bfloat16), WITH_PADDED_ROWS[aten.addmm.default])
def product_and_sum_with_padded_rows(dtype: torch.dtype) -> list[Call]:
    return [call(tensor(dtype, 9), x, tensor(dtype, x.shape[1], 9)) for x in dense(dtype)]


@cases((torch.float32, torch.bfloat16, torch.bool, torch.int64), rows_padded)
def padded_rows(dtype: torch.dtype) -> list[Call]:
    return [call(x) for x in odd(dtype) if x.dim()]


@cases((torch.float32, torch.bfloat16), BY_COPIES[aten.addmm.default])
def product_and_sum_by_aligned_copies(dtype: torch.dtype) -> list[Call]:
    return [
        call(added, x, tensor(dtype, x.shape[1], 9))
        for x in dense(dtype)
        for added in (tensor(dtype, 9), tensor(dtype, x.shape[0], 9), tensor(dtype, x.shape[0], 1))
    ]


@cases((torch.float32,), ONEDNN[aten.bmm.default])
def products_by_onednn(dtype: torch.dtype) -> list[Call]:
    return [call(x.expand(3, *x.shape), tensor(dtype, 3, x.shape[1], 9)) for x in dense(dtype)]
