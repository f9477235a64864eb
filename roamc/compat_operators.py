"""torch's private interfaces: operators, their kernels and decompositions. See roamc/compat.py."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices, _group_tensors_by_device_and_dtype


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return what ATen's ``suggest_memory_format`` says of a tensor: channels last, or contiguous."""
    memory_format: torch.memory_format = suggest_memory_format(tensor)
    return memory_format


def ordered_strides(operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the strides that ATen's ``TensorIterator`` gives the result of ``operands``, which must have one shape."""
    strides: tuple[int, ...] = compute_elementwise_output_strides(*operands)
    return strides


def schema_names() -> Iterator[tuple[str, str, str]]:
    """Yield namespace, name and overload of every operator with a schema; "default" for an overload without a name.

    Inductor's own are among them, which torch registers when they are imported.
    """
    importlib.import_module("torch._inductor.inductor_prims")
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        yield namespace, name, schema.overload_name or "default"


@functools.cache
def replays() -> dict[str, HigherOrderOperator]:
    """Return torch's operators that keep a generator's state, or run a random operator with one, by name."""
    rng_prims = importlib.import_module("torch._prims.rng_prims")
    return {each.name(): each for each in (rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state)}


_TABLES = threading.local()


@contextlib.contextmanager
def decompositions(table: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Within this context, trace the operators of ``table`` by its functions, not by torch's decompositions.

    A function gets the operator's arguments and returns its results, or NotImplemented to have torch's own run. Other
    threads do not notice.
    """
    for target in table:
        _consult_tables(target)
    before: Mapping[OpOverload, Callable[..., Any]] = getattr(_TABLES, "now", {})
    _TABLES.now = {**before, **table}
    try:
        yield
    finally:
        _TABLES.now = before


def on_cpu(target: OpOverload) -> Callable[..., Any]:
    """Return what computes on a CPU what ``target`` does: itself, or torch's decomposition where it has no kernel."""
    name = target.name()
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    if any(has_kernel(name, key) for key in keys):
        return target
    implementation: Callable[..., Any] = decomposition_table.get(target, target)
    return implementation


def whole(target: OpOverload) -> Callable[..., Any]:
    """Return a function for :func:`decompositions` that calls ``target`` as eager does: a trace has one operator."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisablePythonDispatcher():
            return target(*args, **kwargs)

    return run


def in_parts(target: OpOverload) -> Callable[..., Any]:
    """Return a function for :func:`decompositions` that takes ``target`` apart as eager does, in C++."""
    return functools.partial(target._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


@functools.cache
def _consult_tables(target: OpOverload) -> None:
    """From now on, torch's decompositions of ``target`` run unless a table of the calling thread has another."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if composite not in target.py_kernels and has_kernel(target.name(), composite.name):  # comes apart in C++
        target.py_kernels[composite] = in_parts(target)
    autograd = torch._C.DispatchKey.Autograd
    if composite not in target.py_kernels and autograd not in target.py_kernels:  # torch has no decomposition
        target.py_kernels[autograd] = whole(target)
    for key in (composite, autograd):
        if key in target.py_kernels:
            target.py_kernels[key] = functools.partial(_choose, target, target.py_kernels[key])
    target._dispatch_cache.clear()


def _choose(target: OpOverload, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    ours = getattr(_TABLES, "now", {}).get(target)
    result = NotImplemented if ours is None else ours(*args, **kwargs)
    return own(*args, **kwargs) if result is NotImplemented else result


def direct(target: Any) -> Any:
    """Return the callable behind an operator overload, which saves a Python frame per call; others as they are."""
    return target._op if isinstance(target, OpOverload) else target


def foreach_order(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of ``tensors`` as ``torch._foreach_*`` of optimizers takes them: by device and dtype.

    Those of one device and dtype keep their order; the order of the dtypes is that of torch's hash table.
    """
    groups = _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)
    return [place for _, places in groups.values() for place in places]


def prefers_foreach(parameters: Iterable[torch.Tensor], device: torch.device) -> bool:
    """Whether an optimizer that is not told runs ``torch._foreach_*`` for ``parameters`` where they are on ``device``.

    As ``_default_to_fused_or_foreach`` of torch has it, which asks the parameters for their device.
    """
    supported = device.type in _get_foreach_kernels_supported_devices()
    return supported and all(type(parameter) in _foreach_supported_types for parameter in parameters)


_UNTAGGED = frozenset(
    f"aten::{name}"
    for name in ("_conj_physical", "celu_", "elu_", "hardsigmoid_", "hardtanh_", "leaky_relu", "leaky_relu_", "selu_")
)
"""Pointwise operators that torch 2.11 does not tag as such, and torch 2.13 does."""


def is_pointwise(target: object) -> bool:
    """Whether ``target`` is an operator of which torch says that it treats each element by itself."""
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.name() in _UNTAGGED


def has_kernel(qualified_name: str, dispatch_key: str) -> bool:
    """Whether an operator, such as ``"aten::mm.out"``, has a kernel of its own for a key: ``"CPU"`` or ``"CUDA"``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name, dispatch_key))


@functools.cache
def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN has convolutions for bfloat16 or float16 on this machine's processor, as torch decides it."""
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", None)
    return torch.backends.mkldnn.is_available() and is_supported is not None and bool(is_supported())


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield ``value`` if it is a tensor, or all tensors in nested lists, tuples and dicts, in order; skip all else.

    torch's pytree takes ten times as long to find those of an operator's arguments.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def written_by(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the dense tensors among the arguments of an operator that it writes to; sparse ones have no storage."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (tensor for tensor in tensors_in(value) if tensor.layout is torch.strided)
