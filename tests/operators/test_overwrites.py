"""Operators that write their result over an argument give the bits that they give beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.compat_operators import has_kernel
from roamc.operators import ops
from roamc.operators.collectives import NAMESPACE
from roamc.operators.kernels import KERNELS
from roamc.operators.out_variants import out_overload
from tests.codec_cases import CASES
from tests.kernel_cases import call, odd

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
NUMBERS = {"number": 2, "Scalar": 2, "float": 0.5, "int": 1, "bool": False, "SymInt": 1}


def all_overwriting() -> list[Any]:
    """Every operator that the table lets write over an argument, and that writes into given memory on a CPU."""
    targets = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None) if namespace in ("aten", NAMESPACE) else None
        target = getattr(packet, schema.overload_name or "default", None)
        if target is not None and ops.rule(target).overwrites and not ops.rule(target).mutates and writes_to(target):
            targets.append(target)
    return sorted(set(targets), key=str)


def writes_to(target: Any, device: str = "cpu") -> bool:
    if len(target._schema.returns) != 1:
        return False
    if target in KERNELS:
        return device in KERNELS[target].devices
    out = out_overload(target)
    return out is not None and has_kernel(out[0].name(), device.upper())


TARGETS = all_overwriting()

# Operators that are not pointwise and no kernels of ours: arguments for them.
SPECIAL: dict[Any, Any] = {
    aten._softmax.default: lambda x: [call(x, dim, False) for dim in range(x.dim())],
    aten._log_softmax.default: lambda x: [call(x, dim, False) for dim in range(x.dim())],
    aten._softmax_backward_data.default: lambda x: [
        call(torch.randn_like(x), x.softmax(dim), dim, x.dtype) for dim in range(x.dim())
    ],
    aten._log_softmax_backward_data.default: lambda x: [
        call(torch.randn_like(x), x.log_softmax(dim), dim, x.dtype) for dim in range(x.dim())
    ],
    aten.addmm.default: lambda x: [call(x, torch.randn(x.size(0), 7).to(x), torch.randn(7, x.size(1)).to(x))],
    aten.baddbmm.default: lambda x: [
        call(x[None], torch.randn(1, x.size(0), 7).to(x), torch.randn(1, 7, x.size(1)).to(x))
    ],
    aten.scatter.src: lambda x: [call(x, 0, torch.randint(0, x.size(0), x.shape), torch.randn_like(x))],
    aten.scatter.value: lambda x: [call(x, 0, torch.randint(0, x.size(0), x.shape), 2.0)],
    aten.scatter.reduce: lambda x: [
        call(x, 0, torch.zeros_like(x, dtype=torch.int64), torch.ones_like(x), reduce="add")
    ],
    aten.scatter.value_reduce: lambda x: [call(x, 0, torch.zeros_like(x, dtype=torch.int64), 2.0, reduce="add")],
    aten.scatter_add.default: lambda x: [call(x, 0, torch.randint(0, x.size(0), x.shape), torch.randn_like(x))],
    aten.index_add.default: lambda x: [call(x, 0, torch.tensor([0, 0, 1]), torch.randn(3, x.size(1)).to(x))],
    aten.bernoulli.default: lambda x: [call(x.sigmoid())],
    # Pointwise, with settings that a schema does not suggest.
    aten.clamp.default: lambda x: [call(x, -0.3, 0.6), call(x, 0.1)],
    aten.gelu.default: lambda x: [call(x), call(x, approximate="tanh")],
    aten.gelu_backward.default: lambda x: [
        call(torch.randn_like(x), x), call(torch.randn_like(x), x, approximate="tanh"),
    ],
    aten.div.Tensor_mode: lambda x: [
        call(x, torch.rand_like(x) + 1, rounding_mode=mode) for mode in ("floor", "trunc", None)
    ],
    aten.round.decimals: lambda x: [call(x, decimals=1)],
}  # fmt: skip


def calls_of(target: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for dtype in DTYPES:
        torch.manual_seed(0)
        if target in SPECIAL:
            if dtype.is_floating_point:
                matrices = [*(x for x in odd(dtype) if x.dim() == 2 and x.numel()), torch.randn(3, 130).to(dtype)]
                yield from (special_call for x in matrices for special_call in SPECIAL[target](x))
        elif target in CASES and dtype in CASES[target][0]:
            yield from CASES[target][1](dtype)
        else:
            dense = (x for x in odd(dtype) if 0 not in x.stride())
            yield from (call(*arguments) for x in dense if (arguments := pointwise_arguments(target, x)) is not None)


def pointwise_arguments(target: Any, like: Tensor) -> list[Any] | None:
    """Tensors with the geometry of ``like``; a number wherever the schema wants one."""
    values: list[Any] = []
    for argument in target._schema.arguments:
        if argument.kwarg_only:
            continue
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            values.append(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(values_like(like)))
        elif argument.has_default_value():
            values.append(argument.default_value)
        elif kind in NUMBERS:
            values.append(NUMBERS[kind])
        else:
            return None
    return values


def values_like(like: Tensor) -> Tensor:
    if like.dtype.is_floating_point:
        return torch.rand(like.shape).mul(0.9).add(0.05).to(like.dtype)
    return torch.randint(0, 2 if like.dtype is torch.bool else 9, like.shape).to(like.dtype)


def at(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Another tensor with the geometry of ``tensor``."""
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def duplicate(value: Any, device: str = "cpu") -> Any:
    """The same values in the same geometry, in a storage of its own."""
    if isinstance(value, Tensor):
        storage = torch.UntypedStorage(value.untyped_storage().nbytes(), device=device)
        return at(value, storage.copy_(value.untyped_storage()))
    return [duplicate(item, device) for item in value] if isinstance(value, list | tuple) else value


def overwritten(target: Any, args: Sequence[Any], kwargs: dict[str, Any], position: int) -> Tensor:
    """The result, written over one argument as the program does: through another tensor on the same memory."""
    mine = [duplicate(value, args[position].device.type) for value in args]
    reused = mine[position]
    place = at(reused, reused.untyped_storage())
    torch.manual_seed(7)
    if target in KERNELS:
        KERNELS[target].function(*mine, **kwargs, out=place)
    else:
        overload, (key,) = out_overload(target)  # type: ignore[misc]
        overload(*mine, **kwargs, **{key: place})
    return place


def beside(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The operator's own result; None if it does not take these arguments."""
    torch.manual_seed(7)
    try:
        return target(*args, **kwargs)  # type: ignore[no-any-return]
    except (RuntimeError, IndexError, NotImplementedError):
        return None


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def is_like(result: Tensor, argument: Any) -> bool:
    if not isinstance(argument, Tensor) or not result.numel():
        return False
    mine = (result.shape, result.stride(), result.dtype, 0, result.untyped_storage().nbytes())
    return mine == (
        argument.shape,
        argument.stride(),
        argument.dtype,
        argument.storage_offset(),
        argument.untyped_storage().nbytes(),
    )


def test_the_usual_operators_are_among_them() -> None:
    usual = {aten.add.Tensor, aten.mul.Tensor, aten.gelu_backward.default, aten._log_softmax_backward_data.default}
    assert usual <= set(TARGETS)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_result_over_an_argument_has_the_same_bits(target: Any) -> None:
    assert check_calls(target, "cpu") or target in NEVER_ALIKE, "no arguments were found for this operator"


@pytest.mark.gpu
@pytest.mark.parametrize("target", [target for target in TARGETS if writes_to(target, "cuda")], ids=str)
def test_result_over_an_argument_has_the_same_bits_on_cuda(target: Any) -> None:
    check_calls(target, "cuda")


def check_calls(target: Any, device: str) -> int:
    """Check every call that there is for an operator; how many results were written over an argument."""
    checked = 0
    for originals, kwargs in calls_of(target):
        args = duplicate(originals, device)
        expected = beside(target, args, kwargs)
        for position in ops.rule(target).overwrites:
            if expected is None or position >= len(args) or not is_like(expected, args[position]):
                continue
            checked += 1
            result = overwritten(target, args, kwargs, position)
            same = torch.equal(bits(result), bits(expected))
            assert same or target in LEAVES_AS_IT_IS, f"{target} over argument {position} of {args[position].shape}"
    return checked


LEAVES_AS_IT_IS = {aten.empty_like.default, aten.new_empty.default}
# Ask for other shapes in every case that there is; here their own one would do.
NEVER_ALIKE = {aten.new_empty.default, aten.new_full.default, aten.new_zeros.default}
