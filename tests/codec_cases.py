"""Cases of the kernels of codecs and projections, beside those of :mod:`tests.kernel_cases`: ``CASES`` has both."""

from __future__ import annotations

import torch

from roamc.operators.activations import ACTIVATIONS, activation_input
from roamc.operators.norm_inputs import lost_columns, norm_input
from roamc.operators.projection import BASES, count, counted, projection
from tests.kernel_cases import CASES, FLOATS, Call, call, cases, odd, tensor

__all__ = ["CASES", "Call"]


@cases((torch.float32, torch.bfloat16, torch.float16), activation_input)
def inputs_of_activations(dtype: torch.dtype) -> list[Call]:
    outputs = (*odd(dtype), tensor(dtype, 3, 100, 1001))  # more than a piece
    sides = [(y, torch.randint(0, 256, (-(-y.numel() // 8),)).byte()) for y in outputs]
    return [call(y, right, name) for y, right in sides for name in ACTIVATIONS]


@cases(FLOATS, projection)
def projections(dtype: torch.dtype) -> list[Call]:
    on = {"dtype": dtype, "device": torch.device("cpu")}
    shapes = ((1, 1), (5, 3), (12, 12), (300, 299), (700, 131))  # the last two are more than a piece
    counters = ((0.0, 0, 0), (7.9, 2**32 - 1, 3))
    return [call(*counter, n, r, basis, **on) for counter in counters for n, r in shapes for basis in BASES]


@cases((torch.int64,), count)
def counts(dtype: torch.dtype) -> list[Call]:
    return [call()]


@cases(FLOATS, counted)
def counted_projections(dtype: torch.dtype) -> list[Call]:
    on = {"dtype": dtype, "device": torch.device("cpu")}
    return [call(torch.tensor(7), 1, 2, n, r, basis, **on) for n, r in ((5, 3), (300, 299)) for basis in BASES]


@cases(FLOATS, lost_columns)
def columns_of_norms(dtype: torch.dtype) -> list[Call]:
    weights = tensor(dtype, 70), tensor(dtype, 5, 2)[:, 1]
    return [call(w, bias, 2, 1e-7) for w in weights for bias in (None, tensor(dtype, len(w)))]


@cases(FLOATS, norm_input)
def inputs_of_norms(dtype: torch.dtype) -> list[Call]:
    calls = []
    for rows, n in ((3, 7), (700, 130), (1, 1)):
        y, weight, lost = tensor(dtype, rows, n), tensor(dtype, n), torch.zeros(1, dtype=torch.int64)
        kept, mean, rstd = tensor(dtype, rows, 1), tensor(dtype, rows, 1), tensor(torch.float32, rows, 1)
        calls += [
            call(kept, y, mean, rstd, weight, tensor(dtype, n), lost),
            call(kept, y, None, rstd, weight, None, lost),
        ]
    return calls
