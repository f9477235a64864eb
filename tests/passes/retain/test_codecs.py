"""Codecs: what comes back is what went in, whatever the shape, the strides and the dtype; ranges hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph
from roamc.graph.memory import build_memory, fills_storage, is_dense
from roamc.operators import ops
from roamc.operators.table import ROWS
from roamc.passes.retain.codecs import CODECS, codec_of, shapes
from roamc.passes.retain.codecs.bits import bits_of
from roamc.passes.retain.codecs.codec import Saved
from roamc.passes.retain.codecs.integers import NARROW, Integers, Range, range_of
from roamc.passes.retain.codecs.signs import Signs
from roamc.passes.retain.fits import values
from tests.graphs import aten, node_calling, traced

PROPERTY = settings(max_examples=150, deadline=None)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@st.composite
def dense(draw: st.DrawFn) -> Callable[[Tensor], Tensor]:
    """Brings a row of 5,000 elements or more into some shape whose dimensions lie in memory in some sequence."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    stored = [shape[dim] for dim in order]
    back = [order.index(dim) for dim in range(len(shape))]
    return lambda row: row[: math.prod(shape)].clone().view(stored).permute(back)


def row(seed: int, count: int = 9**4) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def bits(tensor: Tensor) -> Tensor:
    """The same bits as integers, in the sequence of the dimensions."""
    return tensor.contiguous().view(AS_INTEGERS[tensor.itemsize])


@PROPERTY
@given(dense(), st.integers(0, 1000), st.sampled_from((0.0, 0.1, 0.5, 1.0)))
def test_bits_give_back_every_mask(shaped: Callable[[Tensor], Tensor], seed: int, share: float) -> None:
    mask = shaped(row(seed) < share)
    coding = bits_of(mask)
    code = coding.encode(mask)
    decoded = coding.decode(code)
    assert torch.equal(decoded, mask)
    assert decoded.stride() == mask.stride()
    assert code.dtype == torch.uint8
    assert coding.nbytes == -(-mask.numel() // 8)
    assert code.untyped_storage().nbytes() == coding.nbytes
    assert set(decoded.view(torch.uint8).unique().tolist()) <= {0, 1}, "a bool of torch is a byte of 0 or 1"


@PROPERTY
@given(dense(), st.sampled_from(NARROW), st.sampled_from((torch.int16, torch.int32, torch.int64)), st.data())
def test_integers_come_back_up_to_the_limits(
    shaped: Callable[[Tensor], Tensor], narrow: torch.dtype, wide: torch.dtype, data: st.DataObject
) -> None:
    limits = torch.iinfo(min(narrow, wide, key=lambda dtype: torch.iinfo(dtype).max))
    chosen = data.draw(st.lists(st.integers(limits.min, limits.max), min_size=1, max_size=4))
    given_values = torch.tensor([limits.min, limits.max, *chosen], dtype=wide)
    value = shaped(given_values.repeat(9**4 // len(given_values) + 1))
    coding = Integers(value.numel(), wide, narrow)
    code = coding.encode(value)
    decoded = coding.decode(code)
    assert code.dtype == narrow
    assert decoded.dtype == wide
    assert torch.equal(decoded, value)
    assert decoded.stride() == value.stride()
    assert code.untyped_storage().nbytes() == coding.nbytes


@PROPERTY
@given(dense(), st.integers(0, 1000), st.sampled_from(FLOATS))
def test_signs_give_the_gradient_of_relu_bit_for_bit(
    shaped: Callable[[Tensor], Tensor], seed: int, dtype: torch.dtype
) -> None:
    """NaN lets the gradient through, -0.0 does not; gradients of NaN, -0.0 and infinity keep their bits."""
    tiny = torch.finfo(dtype).smallest_normal / 4
    odd = torch.tensor([math.nan, -math.nan, -0.0, 0.0, math.inf, -math.inf, tiny, -tiny, 1.0, -1.0], dtype=dtype)
    chosen = (row(seed) * len(odd)).long().clamp(max=len(odd) - 1), (row(seed + 1) * len(odd)).long()
    result, gradient = shaped(odd[chosen[0]]).relu(), shaped(odd[chosen[1].clamp(max=len(odd) - 1)])
    coding = Signs(bits_of(result), dtype)
    code = coding.encode(result)
    decoded = coding.decode(code)
    assert code.untyped_storage().nbytes() == coding.nbytes
    assert (decoded.dtype, decoded.stride()) == (dtype, result.stride())
    wanted, from_code = (aten.threshold_backward(gradient, values, 0) for values in (result, decoded))
    assert torch.equal(bits(from_code), bits(wanted))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_pools_look_at_no_element_of_what_they_get_a_stand_in_for(memory_format: torch.memory_format) -> None:
    x = torch.randn(2, 3, 8, 8)
    y = x.unsqueeze(2).repeat(1, 1, 8, 1, 1)
    pooled, where = aten.max_pool2d_with_indices(x, [2, 2])
    pooled3, where3 = aten.max_pool3d_with_indices(y, [2, 2, 2])
    adapted, adapted_where = aten.adaptive_max_pool2d(x, [3, 3])
    adapted3, adapted3_where = aten.adaptive_max_pool3d(y, [3, 3, 3])
    gradient = torch.randn_like(pooled).contiguous(memory_format=memory_format)
    calls: dict[Any, tuple[Any, ...]] = {
        aten.max_pool2d_with_indices_backward.default: (gradient, x, [2, 2], [2, 2], [0, 0], [1, 1], False, where),
        aten.max_pool3d_with_indices_backward.default: (
            *(torch.randn_like(pooled3), y, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, where3),
        ),
        aten.adaptive_max_pool2d_backward.default: (torch.randn_like(adapted), x, adapted_where),
        aten.adaptive_max_pool3d_backward.default: (torch.randn_like(adapted3), y, adapted3_where),
        aten.avg_pool2d_backward.default: (gradient, x, [2, 2], [2, 2], [0, 0], False, True, None),
        aten.avg_pool3d_backward.default: (torch.randn_like(pooled3), y, [2] * 3, [2] * 3, [0] * 3, False, True, None),
        aten._adaptive_avg_pool2d_backward.default: (torch.randn(2, 3, 3, 3), x),
    }
    assert {operator._schema.name for operator in calls} == {name for name, row in ROWS.items() if row.shape_of}
    for operator, arguments in calls.items():
        (at,) = ops.rule(operator).shape_of
        nothing = shapes.stand_in(tuple(arguments[at].shape), torch.float32, x.device).fill_(math.nan)
        result = operator(*arguments[:at], nothing, *arguments[at + 1 :])
        wanted = operator(*arguments)
        assert torch.equal(result, wanted), operator
        assert result.stride() == wanted.stride(), operator


def test_only_storages_that_are_filled_are_taken_apart() -> None:
    x = torch.zeros(4, 6)
    assert all(
        fills_storage(t)
        for t in (x, x.t(), x[None], x.view(2, 2, 6).permute(2, 0, 1), torch.zeros(()), torch.zeros(0, 3))
    )
    assert not any(is_dense(t) for t in (x[:, ::2], x[:, None].expand(4, 2, 6), x.as_strided((5,), (0,))))
    assert not any(fills_storage(t) for t in (x[1:], x[:2], x[:, 1:]))


def test_names_of_codecs_are_their_own_and_found() -> None:
    assert len({codec.name for codec in CODECS}) == len(CODECS)
    assert all(codec_of(codec.name) is codec for codec in CODECS if codec.set_to is None)
    assert {codec.name for codec in CODECS if codec.lossy} == {"tempo", "compact"}
    with pytest.raises(PlanError, match="no codec 'zip'; there are bits, signs, integers, tempo, compact"):
        codec_of("zip")


def saved_indices(function: Callable[..., Any], *inputs: Tensor) -> dict[str, Saved]:
    """The integers that a function passes to its last operator, which counts as backward."""
    graph = traced(function, *inputs)
    graph = late_graph(graph, {build_memory(graph).operators[-1].node.name})
    saved_by_name = {value.storage.name: value.saved for value in values(build_memory(graph))}
    return {name: saved for name, saved in saved_by_name.items() if not saved.tensor.is_floating_point()}


def late_graph(graph: TrainGraph, late: set[str]) -> TrainGraph:
    """The same with the named operators in backward."""
    phase = {name: Phase.BACKWARD if name in late else own_phase for name, own_phase in graph.phase.items()}
    return graph.replace(phase=phase)


def test_an_argument_that_is_in_a_list_as_well_has_no_position() -> None:
    """As for the judge of values, which would refuse a codec that serves the argument on its own."""
    graph = traced(lambda i: (h := i * 2, aten.index.Tensor(h, [h]))[1], torch.arange(8))
    (value,) = values(build_memory(late_graph(graph, {node_calling(graph, aten.index.Tensor).name})))
    assert [read.position for read in value.saved.late] == [-1]


X = torch.randn(3, 5, 16, 24)
M = torch.randn(7, 40)
I64 = torch.randint(0, 30, (2, 6))

RANGES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], Range | None]] = {
    "max pool": (lambda x: aten.max_pool2d_with_indices(x, [2, 2])[1] * 1, (X,), Range(0, 16 * 24 - 1)),
    "adaptive": (lambda x: aten.adaptive_max_pool2d(x, [3, 3])[1] * 1, (X,), Range(0, 16 * 24 - 1)),
    "argmax": (lambda m: m.argmax(1) * 1, (M,), Range(0, 39)),
    "argmax of all": (lambda m: m.argmax() * 1, (M,), Range(0, 279)),
    "topk": (lambda m: m.topk(3, 0)[1] * 1, (M,), Range(0, 6)),
    "sort": (lambda m: m.sort(-1)[1] * 1, (M,), Range(0, 39)),
    "largest": (lambda m: m.max(1)[1] * 1, (M,), Range(0, 39)),
    "rows": (lambda m, i: (F.embedding(j := i + 0, m.t()), j * 1)[1], (M, I64), Range(0, 39)),
    "rows of a view": (lambda m, i: (F.embedding((j := i + 0).t(), m.t()), j * 1)[1], (M, I64), Range(0, 39)),
    "rows of a part": (lambda m, i: (F.embedding((j := i + 0)[1:], m.t()), j * 1)[1], (M, I64), None),
    "gather": (lambda m, i: (m[:2].gather(1, j := i + 0), j * 1)[1], (M, I64), Range(0, 39)),
    "nobody": (lambda i: (i + 0) * 1, (I64,), None),
    "arange": (lambda i: (i.cumsum(0)) * 1, (I64,), None),
}


@pytest.mark.parametrize("case", RANGES)
def test_range_of_indices_follows_from_who_makes_or_checks_them(case: str) -> None:
    function, inputs, wanted = RANGES[case]
    (saved,) = saved_indices(lambda *arguments: function(*arguments), *inputs).values()
    assert range_of(saved) == wanted


def test_targets_may_also_be_the_number_that_is_ignored() -> None:
    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        chosen = targets + 0
        loss, _ = aten.nll_loss_forward(logits, chosen, None, 1, -100)
        return loss, chosen * 1

    (saved,) = saved_indices(loss, torch.randn(4, 1000), torch.randint(0, 1000, (4,))).values()
    assert range_of(saved) == Range(-100, 999)
    coding = codec_of("integers").fit(saved)
    assert isinstance(coding, Integers)
    assert coding.narrow == torch.int16


def test_readers_that_check_a_range_do_raise() -> None:
    """The proof of a range is that forward has failed otherwise."""
    for index in (-1, 40):
        with pytest.raises((IndexError, RuntimeError)):
            F.embedding(torch.tensor([index]), M.t().contiguous())
        with pytest.raises((IndexError, RuntimeError)):
            M.gather(1, torch.tensor([[index]]))
        with pytest.raises((IndexError, RuntimeError)):
            M.index_select(1, torch.tensor([index]))
        with pytest.raises((IndexError, RuntimeError)):
            aten.nll_loss_forward(M[:1], torch.tensor([index]), None, 1, -100)
        with pytest.raises((IndexError, RuntimeError)):
            aten.nll_loss2d_forward(M[:1, :, None, None], torch.tensor([[[index]]]), None, 1, -100)


def test_signs_are_for_those_who_read_nothing_else() -> None:
    def late_relu(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        y = x.relu()
        return aten.threshold_backward(g, y, 0), y.sum()

    x = torch.randn(64, 8)
    both = late_graph(traced(late_relu, x, x), {"threshold_backward", "sum_1"})
    one = late_graph(traced(late_relu, x, x), {"threshold_backward"})
    for graph, fits in ((both, False), (one, True)):
        (value,) = values(build_memory(graph))
        assert (codec_of("signs").fit(value.saved) is not None) == fits
    other = late_graph(traced(lambda x, g: aten.threshold_backward(g, x.relu(), 0.5), x, x), {"threshold_backward"})
    (value,) = values(build_memory(other))
    assert codec_of("signs").fit(value.saved) is None, "another threshold"
