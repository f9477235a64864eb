"""What Tempo (Andoorveedu et al., NeurIPS 2022) saves of a transformer's layer, and what the search saves beyond.

A layer with attention written out saves s·b·h·(34 + 5·a·s/h) bytes in 16 bits, and 66 + 9·a·s/h in 32. Tempo drops the
inputs of both norms and of the GELU, for which it keeps a mask of bytes, and the dropped scores of attention. That
leaves 26 + 3·a·s/h and 46 + 5·a·s/h; with one bit for each byte of a mask 20.75 + 2.125·a·s/h in 16 bits.

Codec ``tempo`` always keeps bits for the GELU, and of norms one column of 32. Decisions are written here by hand;
nothing runs, tensors are on the meta device. Layers have the sizes of BERT-large, at a·s/h = 4, 6 and 16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from roamc.cost import flops
from roamc.graph import TrainGraph, copied, operators
from roamc.graph.fingerprint import fingerprint
from roamc.graph.memory import build_memory
from roamc.graph.reader_kinds import ReaderKinds
from roamc.options import Options
from roamc.passes.retain import NOTHING, Decision
from roamc.passes.retain.codecs.norms import Norm
from roamc.passes.retain.codecs.tempo import Tempo
from roamc.passes.retain.fits import Value, codings, made_of, values
from roamc.planning import search
from roamc.planning.plan_maker import prepared
from roamc.planning.planned import Planned
from roamc.rewriting.expiry import guarded
from tests.graphs import joint_graph, saved_bytes
from tests.passes.retain.blocks import BertBlock, GPTBlock

BATCH, WIDTH, HEADS = 16, 1024, 16  # a batch large enough that the peak is not that of weights' gradients
RATIOS = (4, 6, 16)
"""Heads · length / width."""
BLOCKS = {"gpt": GPTBlock, "bert": BertBlock}
OPTIONS = Options(profile="cpu", codecs=("tempo",))

PAPER = {torch.float32: (46.0, 5.0), torch.bfloat16: (26.0, 3.0)}
"""What Tempo leaves of a layer: bytes per s·b·h, and bytes more per a·s/h."""
EAGER = {torch.float32: (66.0, 9.0), torch.bfloat16: (34.0, 5.0)}
OF_MASKS = -2 * 7 / 8, -7 / 8
"""What one bit for each byte of the masks of dropout takes off these."""
OF_GELU = -4 * 7 / 8
"""What it takes off for the mask of the GELU."""


@dataclass(frozen=True)
class Row:
    """What a written decision saves of one layer.

    Attributes:
        saved: bytes per s·b·h.
        published: the same, if masks of GELUs were bytes and nothing waited of the inputs of norms.
    """

    saved: float
    published: float


@functools.cache
def captured(block: str, layers: int, dtype: torch.dtype, ratio: int) -> TrainGraph:
    with torch.device("meta"):
        model = nn.Sequential(*(BLOCKS[block](WIDTH, HEADS, fused=False) for _ in range(layers)))
        x = torch.empty(BATCH, ratio * WIDTH // HEADS, WIDTH, dtype=dtype)
    return joint_graph(model.to(dtype), (x,))


def unit(ratio: int) -> int:
    """Elements of a residual stream."""
    return BATCH * (ratio * WIDTH // HEADS) * WIDTH


@functools.cache
def row(block: str, dtype: torch.dtype, ratio: int, masks: str | None) -> Row:
    """What Tempo's rewrites save with ``masks`` of dropout in "bytes" or "bits"; with None, what eager saves."""
    pairs = [_planned(captured(block, layers, dtype, ratio), masks) for layers in (1, 2)]
    saved = [saved_bytes(planned.graph) for planned, _ in pairs]
    layer, apart = (after - before for before, after in (saved, [apart for _, apart in pairs]))
    return Row(layer / unit(ratio), (layer + apart) / unit(ratio))


def _planned(graph: TrainGraph, masks: str | None) -> tuple[Planned, int]:
    """The plan, and the bytes that the paper keeps above those of codec tempo."""
    maker, start = prepared(copied(graph), OPTIONS, None, fingerprint(graph))
    decision, apart = (NOTHING, 0) if masks is None else _tempos(start.graph, masks == "bits")
    return maker.make(start, decision, 0.0), apart


def _tempos(graph: TrainGraph, in_bits: bool) -> tuple[Decision, int]:
    """Tempo's rewrites and no other: every GELU's and norm's input by its codec, and dropped scores made again."""
    graph = guarded(graph, inputs=False)  # the last norm's result is the caller's
    memory, kinds = build_memory(graph), ReaderKinds(graph)
    saved = {value.storage.index: value for value in values(memory)}
    codes, reruns, apart = [], [], 0
    for value in saved.values():
        fitting = dict(codings(value, OPTIONS.codecs, kinds))
        again = made_of(value, "bits", saved) if "bits" in fitting else ()
        codec = "tempo" if "tempo" in fitting else "bits" if in_bits and "bits" in fitting else None
        if codec is not None:
            coding = fitting[codec]
            assert coding is not None
            named = tuple(each.storage.name for each in again)
            codes.append((value.storage.name, codec, value.storage.nbytes, coding.nbytes, 0.0, named))
            apart += {Tempo: 7, Norm: -1}.get(type(coding), 0) * coding.nbytes
        else:
            reruns += [_rerun(each) for each in again]
    return Decision(tuple(reruns), 0, 0.0, 0.0, "optimal", "all", tuple(codes)), apart


def _rerun(value: Value) -> tuple[str, str, str, tuple[tuple[str, tuple[str, ...]], ...], float]:
    readers = tuple(read.reader.name for read in value.saved.late)
    name = value.saved.node.name
    return f"{name}_1", name, "backward", ((value.storage.name, readers),), 0.0


def at(formula: tuple[float, float], ratio: int) -> float:
    return formula[0] + formula[1] * ratio


@pytest.mark.parametrize(("block", "ratio"), [*(("gpt", ratio) for ratio in RATIOS), ("bert", 6)])
@pytest.mark.parametrize("dtype", PAPER, ids=str)
def test_rewrites_alone_leave_what_the_paper_says(block: str, dtype: torch.dtype, ratio: int) -> None:
    eager, tempo = (row(block, dtype, ratio, masks) for masks in (None, "bytes"))
    assert eager.saved == pytest.approx(at(EAGER[dtype], ratio), rel=0.001)
    assert tempo.published == pytest.approx(at(PAPER[dtype], ratio), rel=0.001)
    columns = 2 * dtype.itemsize / 32
    assert tempo.saved == pytest.approx(at(PAPER[dtype], ratio) + OF_GELU + columns, rel=0.001)
    assert tempo.saved < at(PAPER[dtype], ratio)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", PAPER, ids=str)
def test_masks_of_bits_take_off_what_the_paper_says(dtype: torch.dtype, ratio: int) -> None:
    paper = at(PAPER[dtype], ratio) + OF_GELU + at(OF_MASKS, ratio)
    if dtype is torch.bfloat16:
        assert paper == 20.75 + 2.125 * ratio
    tempo = row("gpt", dtype, ratio, "bits")
    assert tempo.saved == pytest.approx(paper, rel=0.01)
    assert tempo.saved <= row("gpt", dtype, ratio, "bytes").saved + at(OF_MASKS, ratio) + 1e-9


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 1.58), (torch.bfloat16, 1.45)], ids=str)
def test_bert_large_takes_the_batch_of_the_paper(dtype: torch.dtype, times: float) -> None:
    """Of 384 tokens: activations alone, which grow with the batch."""
    eager, tempo = (row("bert", dtype, 6, masks) for masks in (None, "bytes"))
    assert eager.saved / tempo.published == pytest.approx(times, rel=0.05)
    assert eager.saved / tempo.saved >= times
    assert eager.saved / row("bert", dtype, 6, "bits").saved >= 1.1 * times


def _searched(graph: TrainGraph, budget: str) -> TrainGraph:
    return search.run(copied(graph), Options(memory_budget=budget, profile="cpu")).graph


@pytest.mark.parametrize("ratio", RATIOS)
def test_exact_reruns_go_beyond_and_run_no_product_again(ratio: int) -> None:
    saved = {}
    for budget in ("+0%", "light"):
        graphs = [
            _searched(captured("gpt", layers, torch.bfloat16, ratio), budget)
            for layers in (2, 3)  # one alone is at its peak elsewhere
        ]
        products = [sum(flops(node) for node in operators(graph.graph)) for graph in graphs]
        layer = (saved_bytes(graphs[1]) - saved_bytes(graphs[0])) / unit(ratio)
        saved[budget] = layer, products
    assert saved["light"][0] <= 20.4 + 2.13 * ratio
    assert saved["light"][1] == saved["+0%"][1]
    assert saved["+0%"][0] == pytest.approx(at(EAGER[torch.bfloat16], ratio), rel=0.001)
