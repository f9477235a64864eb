"""Operators with padded rows: where rows lie, and that kernels load many elements of them at once."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from roamc.operators.gpu import ahead
from roamc.operators.gpu.frame import frame_of
from roamc.operators.gpu.kernel import LONGEST_ROW, PIECE, kernel_text
from roamc.operators.padded import WITH_PADDED_ROWS, padded_like, pitch_of, rows_padded

aten = torch.ops.aten
HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("columns", "itemsize", "pitch"), [(50257, 2, 50304), (50304, 2, 50304), (1, 2, 64), (33, 4, 64), (7, 1, 128)]
)
def test_rows_begin_at_multiples_of_128_bytes(columns: int, itemsize: int, pitch: int) -> None:
    assert pitch_of(columns, itemsize) == pitch


def test_a_result_has_all_its_rows_in_one_storage() -> None:
    product = WITH_PADDED_ROWS[aten.mm.default](torch.ones(3, 5, dtype=HALF), torch.ones(5, 33, dtype=HALF))
    copy = rows_padded(torch.arange(66).view(2, 1, 33))
    assert product.stride() == (64, 1)
    assert product.untyped_storage().nbytes() == 3 * 64 * 2
    assert copy.stride() == (48, 48, 1)
    assert torch.equal(copy, torch.arange(66).view(2, 1, 33))


def softmax(x: Tensor) -> Tensor:
    y: Tensor = rows_padded(x.softmax(-1))
    return y


@pytest.mark.parametrize("columns", [LONGEST_ROW + PIECE, LONGEST_ROW + PIECE + 1], ids=["whole pieces", "a rest"])
def test_kernels_load_many_elements_of_long_rows_at_once(columns: int) -> None:
    """Pieces of padded rows are loaded and stored 16 bytes at a time, whatever the number of columns."""
    x = padded_like(torch.empty(0, dtype=HALF), (4, columns))
    body = make_fx(softmax, tracing_mode="fake")(x).graph
    body.eliminate_dead_code()
    last = body.output_node().args[0]
    body.output_node().args = ((last,),)
    frame = frame_of(last)  # type: ignore[arg-type]
    assert frame is not None
    text = kernel_text("kernel", body, frame)
    (source,) = ahead.sources_of(body, text)
    ptx = ahead.compile_for("sm_90", source).asm["ptx"]
    wide = Counter(re.findall(r"(ld|st)\.global\.v4\.b32", ptx))
    at_once = text.constants["COLUMNS"] // (32 * text.warps) // 8
    assert wide["ld"] >= text.reads * at_once, "a compiler may load what comes next ahead"
    assert wide["st"] == at_once
