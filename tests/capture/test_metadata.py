"""What a plan is made from is what the CPU's kernels give: shape, strides, dtype and place of every result.

Fake kernels are compared with real ones after the corrections of :mod:`roamc.operators.corrections`, above all where
autocast mixes dtypes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from roamc import compat
from roamc.compat import OpOverload
from roamc.errors import CaptureError
from tests.operator_calls import NUMERIC, Call, Recorder, apart, is_plain, node_of_call, recorded, tensors

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

HARMLESS = frozenset({aten.copy.default, aten.native_dropout_backward.default})
"""Kernels of ours always take their place and write where it was noted: an empty copy may lie elsewhere in a storage,
and a gradient in another order than the mask."""


def noted(target: Any, call: Call) -> Any:
    """The fake results of one call, corrected as those of a captured graph are."""
    return node_of_call(target, call).meta["val"]


def mismatch(target: Any, call: Call) -> str:
    """How the noted results of one call differ from the real ones; empty where they do not, or torch refuses it."""
    args, kwargs = apart().all_of(call)
    try:
        real = as_list(target(*args, **kwargs))
    except NUMERIC:
        return ""
    if not all(is_plain(tensor) for tensor in tensors(real)):
        return ""
    try:
        fake = as_list(noted(target, call))
    except (CaptureError, compat.DynamicShapeError, compat.DataDependentError):
        return ""  # such an operator ends a graph
    pairs = itertools.zip_longest(map(geometry, fake), map(geometry, real))
    return "; ".join(
        f"result {i} is noted as {told}, really {is_}" for i, (told, is_) in enumerate(pairs) if told != is_
    )


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def geometry(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    steps = [step if size > 1 and value.numel() else 0 for size, step in zip(value.shape, value.stride(), strict=True)]
    return f"{value.dtype}{list(value.shape)} {steps} at {value.storage_offset()}"


def norms(low: torch.dtype, weight: torch.dtype | None, kept: torch.dtype) -> Iterator[tuple[Any, Call]]:
    """Norms forward, on images of two orders of dimensions, with and without weights and running statistics."""
    torch.manual_seed(0)
    for image in (torch.randn(4, 8), torch.randn(2, 8, 4, 3), torch.randn(2, 8, 4, 3).to(memory_format=CHANNELS_LAST)):
        x = image.to(low)
        w = None if weight is None else torch.randn(8).to(weight)
        line = None if weight is None else torch.randn(x.shape[-1]).to(weight)
        mean, variance = torch.randn(8).to(kept), torch.rand(8).to(kept)
        size = x[0, 0].numel()
        for train in (True, False):
            for name in ("_native_batch_norm_legit_functional", "native_batch_norm", "_native_batch_norm_legit"):
                yield getattr(aten, name).default, ((x, w, w, mean, variance, train, 0.1, 1e-5), {})
        yield aten._native_batch_norm_legit_no_training.default, ((x, w, w, mean, variance, 0.1, 1e-5), {})
        yield aten._native_batch_norm_legit.no_stats, ((x, w, w, True, 0.1, 1e-5), {})
        yield aten.native_group_norm.default, ((x, w, w, len(x), 8, size, 2, 1e-5), {})
        yield aten.native_layer_norm.default, ((x, [x.shape[-1]], line, line, 1e-5), {})


CHANNELS_LAST = torch.channels_last


def backward_of(target: Any, call: Call) -> Iterator[tuple[Any, Call]]:
    """The backward of a norm, for gradients of two orders of dimensions."""
    x, *rest = call[0]
    try:
        normed = target(*apart().all_of(call)[0])
    except NUMERIC:
        return
    for order in (torch.contiguous_format, CHANNELS_LAST) if x.dim() == 4 else (torch.contiguous_format,):
        gradient = torch.randn(x.shape).to(x.dtype).to(memory_format=order)
        if target is aten.native_batch_norm.default:
            w, _, mean, variance, train, _, eps = rest
            mask = [True, w is not None, w is not None]
            args = (gradient, x, w, mean, variance, normed[1], normed[2], train, eps, mask)
            yield aten.native_batch_norm_backward.default, (args, {})
        if target is aten.native_group_norm.default:
            w, _, *sizes, _ = rest
            mask = [True, w is not None, w is not None]
            yield aten.native_group_norm_backward.default, ((gradient, x, normed[1], normed[2], w, *sizes, mask), {})
        if target is aten.native_layer_norm.default:
            shape, w, b, _ = rest
            mask = [True, w is not None, w is not None]
            yield aten.native_layer_norm_backward.default, ((gradient, x, shape, normed[1], normed[2], w, b, mask), {})


@pytest.mark.parametrize("low", FLOATS, ids=str)
def test_norms_are_noted_as_they_are_whatever_the_dtypes(low: torch.dtype) -> None:
    faults, backwards = {}, 0
    for weight, kept in itertools.product((*FLOATS, None), FLOATS):
        for target, call in norms(low, weight, kept):
            later = list(backward_of(target, call))
            backwards += len(later)
            for each, arguments in ((target, call), *later):
                fault = mismatch(each, arguments)
                if fault:
                    faults[f"{each}, {low}, weights {weight}, statistics {kept}"] = fault
    assert faults == {}
    assert backwards > 50


def test_results_in_another_order_than_their_arguments_are_noted_so() -> None:
    x, image = torch.rand(2, 3, 4).mT, torch.rand(2, 3, 5, 4).to(memory_format=CHANNELS_LAST)
    line, padded = torch.rand(3), torch.rand(2, 3, 7, 6)
    _, mean, deviation = aten.native_layer_norm(x, [3], line, line, 1e-5)
    layer = (torch.rand(2, 4, 3), x, [3], mean, deviation, line, line)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.log_sigmoid_forward.default, (x,)),
        (aten.pow.Scalar, (2.0, x)),
        (aten.pow.Scalar, (1.0, x)),
        (aten.normal.Tensor_Tensor, (x, x)),
        (aten.normal.Tensor_Tensor, (x, torch.rand(2, 4, 3))),
        (aten.normal.Tensor_Tensor, (torch.rand(2, 4, 3), x)),
        (aten._log_softmax_backward_data.default, (x, x, 1, x.dtype)),
        (aten.reflection_pad2d_backward.default, (padded, image, [1, 1, 1, 1])),
        *((aten.native_layer_norm_backward.default, (*layer, [True, how, True])) for how in (True, False)),
    ]
    assert [mismatch(target, (args, {})) for target, args in calls] == [""] * len(calls)


LOSSES = {"mse_loss": (), "smooth_l1_loss": (1.0,), "huber_loss": (1.0,), "soft_margin_loss": ()}


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_of_tensors_in_several_orders_are_noted_as_they_are(reduction: int) -> None:
    orders = [torch.rand(2, 4, 3), torch.rand(2, 3, 4).mT, torch.rand(3, 4, 2).permute(2, 1, 0)]
    faults = {}
    for number, (x, y, gradient) in enumerate(itertools.product(orders, repeat=3)):
        incoming = gradient if reduction == 0 else torch.ones(()).expand(x.shape) if number % 2 else torch.ones(())
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("binary_cross_entropy", (x, y, None, reduction)),
            ("binary_cross_entropy_backward", (incoming, x, y, None, reduction)),
        ]
        for name, rest in LOSSES.items():
            calls += [(name, (x, y, reduction, *rest)), (f"{name}_backward", (incoming, x, y, reduction, *rest))]
        for name, args in calls:
            if fault := mismatch(getattr(aten, name).default, (args, {})):
                faults[name, number] = fault
    assert faults == {}


BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("target", BAGS, ids=str)
def test_bags_of_embeddings_are_noted_as_they_are(target: Any, dtype: torch.dtype) -> None:
    rows, indices, offsets = torch.randn(10, 6).to(dtype), torch.randint(0, 10, (25,)), torch.tensor([0, 2, 5, 25])
    scales, faults = torch.randn(50).to(dtype), {}
    for mode, padding, closed, weight in itertools.product((0, 1, 2), (-1, 1), (False, True), (rows, rows[:, ::2])):
        for scale in (None, scales[:25], scales[::2]) if mode == 0 else (None,):
            call = (weight, indices, offsets, False, mode, False, scale, closed, padding), {}
            if fault := mismatch(target, call):
                faults[mode, padding, closed, weight.stride(), scale is None or scale.stride()] = fault
        if fault := mismatch(target, ((weight, indices, offsets, False, mode), {})):
            faults[mode, weight.stride()] = fault
    assert faults == {}


@pytest.mark.parametrize("order", [torch.contiguous_format, CHANNELS_LAST], ids=str)
def test_max_unpooling_lies_like_the_image(order: torch.memory_format) -> None:
    image = torch.randn(2, 3, 4, 6).to(memory_format=order)
    pooled, at = aten.max_pool2d_with_indices(image, [2, 2])
    assert mismatch(aten.max_unpool2d.default, ((pooled, at, [4, 6]), {})) == ""
    assert mismatch(aten.max_unpool2d.default, ((pooled[0], at[0], [4, 6]), {})) == ""


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(FLOATS, 2)], ids=str)
@pytest.mark.parametrize("loss", [aten.huber_loss.default, aten.soft_margin_loss.default], ids=str)
def test_a_loss_of_two_dtypes(loss: OpOverload, first: torch.dtype, second: torch.dtype, reduction: int) -> None:
    call = (torch.rand(5).to(first), torch.rand(5).to(second), reduction), {}
    assert mismatch(loss, call) == ""


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_every_operator_is_noted_as_it_is() -> None:
    calls = recorded(FLOATS, 20)
    wanted = {target: some for target, some in calls.items() if target not in HARMLESS}
    faults = {
        str(target): fault for target, some in wanted.items() for call in some if (fault := mismatch(target, call))
    }
    print(len(wanted), sum(map(len, wanted.values())))
    assert faults == {}


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_every_operator_case_is_noted_as_it_is_in_every_mix_of_dtypes() -> None:
    from benchmarks.operator_cases import CASES

    faults, compared = {}, 0
    for layout, cases in CASES.items():
        for name, (function, makers) in cases.items():
            for dtypes in mixes(len(makers)):
                torch.manual_seed(0)
                operands = [make(dtype) for make, dtype in zip(makers, dtypes, strict=True)]
                # torch takes no such mix perhaps; what it called until then is compared
                with Recorder(4) as recorder, contextlib.suppress(NUMERIC):
                    function(*operands)
                for target, some in recorder.calls.items():
                    compared += len(some)
                    for call in some if target not in HARMLESS else ():
                        if fault := mismatch(target, call):
                            faults[f"{name}, {layout}, {dtypes}: {target}"] = fault
    print(compared)
    assert faults == {}


def mixes(count: int) -> Iterator[tuple[torch.dtype, ...]]:
    """All alike; the first argument narrow and the others not; the other way round; the last one wide."""
    for dtype in FLOATS:
        yield (dtype,) * count
    for narrow in FLOATS[1:] if count > 1 else ():
        yield (narrow, *(torch.float32,) * (count - 1))
        yield (torch.float32, *(narrow,) * (count - 1))
        yield (*(narrow,) * (count - 1), torch.float32)


REORDERED = HARMLESS | {aten.resize_as.default, aten.batch_norm_backward.default}
"""And what capture refuses, or no forward of a CPU asks for."""


def turned(tensor: Tensor) -> Tensor:
    """The same elements, the last two dimensions in the other order in memory."""
    return tensor.mT.contiguous().mT


def reordered(call: Call) -> Iterator[Call]:
    """The call with one of its tensors turned, and with all of them."""
    wide = [tensor for tensor in tensors(call) if tensor.dim() > 1 and tensor.numel() > 1 and tensor.is_contiguous()]
    for chosen in [*([tensor] for tensor in wide), wide] if len(wide) > 1 else [wide]:
        ids = {id(tensor) for tensor in chosen}
        yield pytree.tree_map_only(Tensor, lambda t, ids=ids: turned(t) if id(t) in ids else t, call)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_every_operator_is_noted_as_it_is_for_transposed_arguments() -> None:
    calls = recorded((torch.float32,), 3)
    faults, count = {}, 0
    for target, some in calls.items():
        if target in REORDERED or target._schema.is_mutable:
            continue
        for call in itertools.chain.from_iterable(map(reordered, some)):
            count += 1
            if fault := mismatch(target, call):
                faults[str(target)] = fault
    print(len(calls), count)
    assert faults == {}
