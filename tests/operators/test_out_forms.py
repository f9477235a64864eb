"""Operators give the same bits when all that they read and write lies in one storage, as it does in an arena.

A kernel may ask whether two tensors share a storage, and any two tensors of an arena do; it may use the memory behind
a result as workspace, and there another result lies. So every call is made twice: as torch makes it, and in the form
that a program uses, over one block of memory.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from roamc import compat
from roamc.graph.storage_ids import addresses_of
from roamc.operators import ops
from roamc.operators.kernels import KERNELS
from roamc.operators.out_variants import ALLOCATE, FormKind, form_of
from tests.codec_cases import CASES
from tests.operator_calls import (
    NUMERIC,
    Call,
    Calls,
    Placer,
    apart,
    aten_overloads,
    broadcast,
    by_hand,
    geometry,
    is_plain,
    recorded,
    storage_key,
    tensors,
)  # fmt: skip

aten = torch.ops.aten
RUBBISH, APART = 0xA5, 64
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip

UNSET = frozenset({aten.empty_like.default, aten.empty.memory_format, aten.empty_permuted.default,
                   aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default,
                   aten._ctc_loss.default, aten._ctc_loss.Tensor})  # fmt: skip
"""Leave elements of their results as they find them."""

UNREACHED = frozenset(
    {
        # Made of other operators before a graph is captured.
        aten.conj_physical.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default,
        # On sparse tensors, which no arena holds, and with scales by blocks, which no CPU has.
        aten.sspaddmm.default, *([aten._scaled_mm_v2.default] if hasattr(aten, "_scaled_mm_v2") else []),
    }
)  # fmt: skip
"""Operators with an ``out=`` form that no call here reaches."""


class Block:
    """One storage, filled from its beginning, with rubbish between and behind what lies there."""

    def __init__(self) -> None:
        self.memory = torch.full((1 << 20,), RUBBISH, dtype=torch.uint8)
        self.ends = APART
        self.ranges: list[tuple[int, int]] = []

    def clear(self, nbytes: int) -> None:
        """Rubbish everywhere, and room for so much."""
        if self.memory.numel() < nbytes:
            self.memory = torch.full((nbytes,), RUBBISH, dtype=torch.uint8)
        self.memory[: self.ends + APART] = RUBBISH
        self.ends, self.ranges = APART, []

    def take(self, nbytes: int) -> tuple[torch.UntypedStorage, int]:
        """The storage, and the byte of it at which ``nbytes`` begin that are nobody else's."""
        start = self.ends
        self.ranges.append((start, start + nbytes))
        self.ends = start + (nbytes + APART - 1) // APART * APART + APART
        return self.memory.untyped_storage(), start

    def hold(self, content: Tensor) -> tuple[torch.UntypedStorage, int]:
        """Like :meth:`take`, for bytes that are there already."""
        storage, start = self.take(content.numel())
        self.memory[start : start + content.numel()] = content
        return storage, start

    def place(self, like: Tensor) -> Tensor:
        """A tensor with the geometry of ``like``, of rubbish."""
        storage, start = self.take(like.untyped_storage().nbytes())
        offset = start // like.itemsize + like.storage_offset()
        return torch.empty(0, dtype=like.dtype).set_(storage, offset, like.shape, like.stride())

    def is_clean(self) -> bool:
        """Whether nothing was written beside what was taken."""
        beside = torch.ones(self.ends + APART, dtype=torch.bool)
        for low, high in self.ranges:
            beside[low:high] = False
        return bool((self.memory[: self.ends + APART][beside] == RUBBISH).all())


BLOCK = Block()


def results_of(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and elements; any NaN is like any other."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (t.resolve_conj().resolve_neg() for t in (a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.itemsize == 1:  # floats of eight bits have no signbit
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    if a.is_floating_point() and not torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan()):
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


class Checked:
    """What has been checked, and the faults."""

    def __init__(self) -> None:
        self.forms: dict[FormKind, Counter[Any]] = {kind: Counter() for kind in FormKind}
        self.reuse: Counter[Any] = Counter()
        self.faults: dict[str, str] = {}

    def check(self, target: Any, call: Call) -> None:
        """Make one call both ways, and over every argument that it may write over."""
        torch.manual_seed(3)
        args, kwargs = apart().all_of(call)
        try:
            expected = results_of(target(*args, **kwargs))
        except NUMERIC:
            return
        if target is aten.native_dropout_backward.default and not args[0].is_floating_point():
            return  # gradients are no whole numbers
        if not all(is_plain(tensor) for tensor in tensors(expected)):
            return
        argument_keys = {storage_key(tensor) for tensor in tensors((args, kwargs))}
        births = {storage_key(tensor) for tensor in tensors(expected)} - argument_keys
        if not births and ops.is_view(target):
            return
        node = node_of(target, call, tuple(expected) if len(expected) != 1 else expected[0])
        form = form_of(node, len(births))
        positions = (
            ops.may_overwrite(node, addresses_of) if form.kind is not FormKind.ALLOCATE and len(births) == 1 else ()
        )
        over = [at for at in positions if is_reusable(call, at, expected[0])]
        for position in (None, *over):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                fault = in_block(target, form, call, expected, (args, kwargs), position)
                fault = fault or (grown(target, form, call, expected) if position is None else "")
            resized = [str(warning.message) for warning in said if "resized" in str(warning.message)]
            (self.forms[form.kind] if position is None else self.reuse)[target] += 1
            if fault or resized:
                where = f" over argument {position}" if position is not None else ""
                self.faults.setdefault(f"{target}{where}, {form.kind.value}", f"{fault or resized[0]} {shown(call)}")


def node_of(target: Any, call: Call, results: Any) -> fx.Node:
    """A node that makes ``call``, whose tensors are inputs of its graph."""
    graph = fx.Graph()

    def placeholder(tensor: Tensor) -> fx.Node:
        node = graph.placeholder("given")
        node.meta["val"] = tensor
        return node

    args, kwargs = torch.utils._pytree.tree_map_only(Tensor, placeholder, call)
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = results
    return node


def in_block(target: Any, form: Any, call: Call, expected: list[Any], after: Any, over: int | None) -> str:
    """Make the call in one block of memory; what is not as ``expected``, and as the arguments were ``after`` it."""
    BLOCK.clear(room_for([*tensors(call), *tensors(expected)]))
    args, kwargs = Placer(BLOCK.hold).all_of(call)
    torch.manual_seed(3)
    try:
        if form.kind in (FormKind.OUT, FormKind.KERNEL):
            outs = [same_place(args[over]) if over is not None else BLOCK.place(like) for like in expected]
            before = [(out.data_ptr(), geometry(out)) for out in outs]
            write(target, form, (args, kwargs), outs)
            if before != [(out.data_ptr(), geometry(out)) for out in outs]:
                return f"moved a result from {before} to {[geometry(out) for out in outs]}"
        else:
            outs = results_of(target(*args, **kwargs))
    except NUMERIC as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if target in UNSET or is_unrepeatable(target, call):
        return "" if BLOCK.is_clean() else "wrote beside its results"
    for number, (out, wanted) in enumerate(zip(outs, expected, strict=True)):
        if isinstance(wanted, Tensor) and (not same_bits(out, wanted) or out.stride() != wanted.stride()):
            return (
                f"result {number} is {geometry(out)} {out.flatten()[:4]}, not {geometry(wanted)} {wanted.flatten()[:4]}"
            )
        if not isinstance(wanted, Tensor) and out != wanted and out == out:
            return f"result {number} is {out}, not {wanted}"
    if over is None and not all(map(same_bits, tensors((args, kwargs)), tensors(after))):
        return "changed an argument"
    return "" if BLOCK.is_clean() else "wrote beside its results"


def write(target: Any, form: Any, call: Call, outs: list[Tensor]) -> None:
    """Make a call by its form."""
    args, kwargs = call
    if form.kind is FormKind.OUT:
        form.overload(*args, **kwargs, **dict(zip(form.arguments, outs, strict=True)))
    else:
        KERNELS[target].function(*args, **kwargs, out=outs[0] if len(outs) == 1 else tuple(outs))


def grown(target: Any, form: Any, call: Call, expected: list[Any]) -> str:
    """Which results, in storages with no byte to spare, take more than that for a while."""
    if form.kind not in (FormKind.OUT, FormKind.KERNEL):
        return ""
    outs = [torch.empty_strided(like.shape, like.stride(), dtype=like.dtype) for like in expected]
    before = [out.untyped_storage().nbytes() for out in outs]
    write(target, form, apart().all_of(call), outs)
    after = [out.untyped_storage().nbytes() for out in outs]
    return "" if before == after else f"storages of {before} bytes grew to {after}"


def is_unrepeatable(target: Any, call: Call) -> bool:
    """Least squares by ``gelsy`` start from a permutation that torch leaves unset: two runs of eager differ as well."""
    return target is aten.linalg_lstsq.default and call[1].get("driver") in (None, "gelsy")


def room_for(all_tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() + 3 * APART for tensor in all_tensors) + 3 * APART


def same_place(tensor: Tensor) -> Tensor:
    """Another tensor over the same elements."""
    plain = torch.empty(0, dtype=tensor.dtype)
    return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def is_reusable(call: Call, position: int, result: Tensor) -> bool:
    """Whether the result may lie in the argument's memory: it, and all else read of its storage, has that geometry."""
    args, kwargs = call
    argument = args[position] if position < len(args) else None
    if not isinstance(argument, Tensor) or not result.numel():
        return False
    if argument.untyped_storage().nbytes() != result.untyped_storage().nbytes():
        return False
    read = [tensor for tensor in tensors((args, kwargs)) if storage_key(tensor) == storage_key(argument)]
    return all((geometry(t), t.is_conj(), t.is_neg()) == (geometry(result), False, False) for t in read)


def shown(call: Call) -> str:
    return str(torch.utils._pytree.tree_map_only(Tensor, geometry, call))


def checked(*all_calls: Calls) -> Checked:
    outcome = Checked()
    with torch.no_grad():
        for calls in all_calls:
            for target, some in calls.items():
                for call in some:
                    outcome.check(target, call)
    return outcome


def of_kernels(dtypes: Iterable[torch.dtype]) -> Calls:
    """The calls that our own kernels are tested with."""
    torch.manual_seed(0)
    wanted = [(target, case) for target, case in CASES.items() if isinstance(target, compat.OpOverload)]
    return {t: [call for dtype in dtypes if dtype in served for call in make(dtype)] for t, (served, make) in wanted}


def with_forms() -> set[Any]:
    """All ATen overloads that write into given memory on a CPU."""
    wanted = set()
    for target in aten_overloads():
        count = len(target._schema.returns)
        results = torch.empty(2) if count == 1 else tuple(torch.empty(2) for _ in range(count))
        node = node_of(target, ((torch.empty(2, 2),), {}), results)
        if form_of(node, count).kind in (FormKind.OUT, FormKind.KERNEL):
            wanted.add(target)
    return wanted


QUICK = ("linalg.qr", "linalg.svd", "linalg.lstsq", "nn.functional.huber_loss", "nn.functional.binary_cross_entropy",
         "nn.functional.mse_loss", "addcmul", "tanh", "div", "add", "sort", "topk", "max_reduction_with_dim", "cumsum",
         "as_strided_copy", "native_batch_norm", "native_layer_norm", "nn.functional.max_pool2d", "gather",
         "scatter_add", "index_put", "nn.functional.gelu", "softmax", "var_mean", "addmm",
         "nn.functional.conv2d")  # fmt: skip


def test_operators_give_the_same_bits_in_one_storage() -> None:
    outcome = checked(recorded((torch.float32, torch.complex64), 4, QUICK.__contains__))
    assert outcome.faults == {}
    assert len(outcome.forms[FormKind.OUT]) > 30
    assert len(outcome.reuse) > 20


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_every_form_of_every_operator_gives_the_same_bits_in_one_storage() -> None:
    outcome = checked(recorded(DTYPES, 30), of_kernels(DTYPES), by_hand(), broadcast(DTYPES))
    reached = {*outcome.forms[FormKind.OUT], *outcome.forms[FormKind.KERNEL]}
    print({kind.value: (len(counts), counts.total()) for kind, counts in outcome.forms.items()}, outcome.reuse.total())
    assert outcome.faults == {}
    assert sorted(map(str, with_forms() - reached - UNREACHED)) == []


def test_qr_is_allocated_since_it_asks_whether_its_results_share_a_storage() -> None:
    node = fx.Graph().call_function(aten.linalg_qr.default, ())
    node.meta["val"] = torch.empty(2, 2), torch.empty(2, 2)
    assert form_of(node, 2) == ALLOCATE


LOSSES = (aten.binary_cross_entropy, aten.huber_loss, aten.mse_loss, aten.smooth_l1_loss, aten.soft_margin_loss)


@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("loss", [packet.default for packet in LOSSES], ids=str)
def test_a_reduced_loss_writes_its_one_number_only(loss: Any, reduction: int) -> None:
    inputs = torch.rand(5), torch.rand(5)
    outcome = Checked()
    outcome.check(
        loss, ((*inputs, None, reduction) if loss is aten.binary_cross_entropy.default else (*inputs, reduction), {})
    )
    assert outcome.faults == {}


def test_complex_numbers_are_not_written_over() -> None:
    node = fx.Graph().call_function(aten.div.Tensor, ())
    node.meta["val"] = torch.empty(2)
    assert ops.may_overwrite(node, addresses_of) == (0, 1)
    node.meta["val"] = torch.empty(2, dtype=torch.complex64)
    assert ops.may_overwrite(node, addresses_of) == ()


def test_what_is_read_through_another_argument_is_not_written_over() -> None:
    def node(target: Any, *tensors: torch.Tensor) -> fx.Node:
        graph = fx.Graph()
        arguments = []
        for number, tensor in enumerate(tensors):
            arguments.append(graph.placeholder(f"x{number}"))
            arguments[-1].meta["val"] = tensor
        call = graph.call_function(target, tuple(arguments))
        call.meta["val"] = torch.empty(4, 4)
        return call

    x, y, z = torch.empty(4, 4), torch.empty(4, 4), torch.empty(4, 4)
    assert ops.may_overwrite(node(aten.addmm.default, x, y, z), addresses_of) == (0,)
    assert ops.may_overwrite(node(aten.addmm.default, x, x, z), addresses_of) == ()
    assert ops.may_overwrite(node(aten.addmm.default, x, y, x[:]), addresses_of) == ()
    assert ops.may_overwrite(node(aten.mul.Tensor, x, x), addresses_of) == (0, 1)
