"""torch's private interfaces: tracing and fake tensors. Checked on torch 2.11 to 2.14.

Only this file, :mod:`roamc.compat_aot`, :mod:`roamc.compat_dynamo` and :mod:`roamc.compat_hooks` import names from
``torch.fx.experimental``, or that start with an underscore. When a new torch moves one, these files are the only places
to mend.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes

from roamc.errors import CaptureError

__all__ = [
    "CaptureMode",
    "DataDependentError",
    "DynamicShapeError",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "clear_autocast_cache",
    "fake_input",
    "fake_mode_of",
    "fake_parameter",
    "has_kernel",
    "has_open_size",
    "is_traced",
    "keeps_graph",
    "node_of",
    "reparametrized",
    "saved_tensor_hooks_active",
    "trace",
    "without_modes",
]

without_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _disable_current_modes
"""While a graph is traced: a block whose operators run on real tensors and leave nothing in the graph."""

DataDependentError = DataDependentOutputException
DynamicShapeError = DynamicOutputShapeException


class CaptureMode(FakeTensorMode):
    """A fake mode for tracing that never writes real tensors.

    torch's own runs an in-place operator between a real tensor and a number for real: a buffer in the closure
    of a loss function would change while it is traced.

    Args:
        held: parameters that the step updates, by name. The trace has fakes for them: an operator that is handed their
            own memory is refused.
        watched: buffers, by name. An operator that writes to their own memory is refused; ``read_past`` gets the names
            of those whose own memory is read.
        kernels: functions that make an operator's results in the place of torch's fake kernel; one that returns
            NotImplemented leaves them to torch.
    """

    def __init__(
        self,
        held: Mapping[str, torch.Tensor] | None = None,
        kernels: Mapping[OpOverload, Callable[..., Any]] | None = None,
        watched: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._held = _by_storage(held or {})
        self._watched = _by_storage(watched or {})
        self.read_past: dict[str, None] = {}
        self._kernels = kernels or {}

    def dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Hand writing operators fakes in the place of real tensors; refuse to read held ones past their fakes."""
        leaves, spec = flatten((tuple(args), kwargs or {}))
        real = [isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) for leaf in leaves]
        if any(real):
            writes = isinstance(func, OpOverload) and func._schema.is_mutable
            self._check_read([leaf for leaf, is_real in zip(leaves, real, strict=True) if is_real], writes)
        if func in self._kernels:
            with self:
                result = self._kernels[func](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if isinstance(func, OpOverload) and func._schema.is_mutable and any(real):
            faked = [self.from_tensor(x, static_shapes=True) if r else x for x, r in zip(leaves, real, strict=True)]
            args, kwargs = unflatten(faked, spec)
        return super().dispatch(func, types, args, kwargs)

    def _check_read(self, tensors: Sequence[torch.Tensor], writes: bool) -> None:
        for key in map(_storage, tensors):
            name = self._held.get(key) or (self._watched.get(key) if writes else None)
            if name is not None:
                raise CaptureError(read_past(name))
            if key in self._watched:
                self.read_past[self._watched[key]] = None


def read_past(name: str) -> str:
    """The error of a step that writes to the parameter or buffer ``name`` and is handed its memory beside its fake."""
    return (
        f"the step reads or writes the memory of {name!r} through a tensor that was made before it began, such as "
        ".data, .detach() or a view; make it inside the step, or clone it"
    )


def _by_storage(tensors: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Identities of storages to the names of their tensors."""
    return {_storage(tensor): name for name, tensor in tensors.items() if _storage(tensor)}


def identity(tensor: torch.Tensor) -> int:
    """The same number for two tensors exactly if they share a storage (while both are alive)."""
    return int(tensor.untyped_storage()._cdata)


def _storage(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; 0 where there is none, or it holds nothing."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return 0
    return identity(tensor) if tensor.untyped_storage().nbytes() else 0


def trace(function: Callable[..., Any], args: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """Trace ``function(*args)`` to ATen operators under ``mode``; nothing is computed or allocated.

    The Python dispatcher is on, so that operators decompose as they do inside AOTAutograd
    (dropout, for example, becomes ``native_dropout`` with a mask of one byte an element). Where the caller's autocast
    caches casts of weights, so does the trace, with one cast of each as in eager; torch's tracer turns the cache off.
    """
    function = _with_autocast_cache(function, torch.is_autocast_cache_enabled())
    with mode, enable_python_dispatcher(), fx.traceback.preserve_node_meta(), checkpoints_followed(), quiet_meta():
        return make_fx(function, tracing_mode="real", record_stack_traces=True)(*args)


def _with_autocast_cache(function: Callable[..., Any], enabled: bool) -> Callable[..., Any]:
    """``function``, with autocast's cache of casts as told while it runs; its arguments keep their names."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(enabled)
        try:
            return function(*args)
        finally:
            torch.set_autocast_cache_enabled(before)

    return run


def graph_so_far() -> fx.Graph:
    """Inside a function that is being traced: its graph until here.

    Raises:
        RuntimeError: nothing is being traced.
    """
    mode = get_proxy_mode()
    if mode is None:
        raise RuntimeError("nothing is being traced")
    graph: fx.Graph = mode.tracer.graph
    return graph


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """Inside a function that is being traced: the node that stands for ``tensor``; None if there is none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    mode = get_proxy_mode()
    held = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    node: fx.Node | None = held.proxy.node if held is not None else None
    return node


@contextlib.contextmanager
def checkpoints_followed() -> Iterator[None]:
    """While tracing, every selective checkpoint has a number, its marks end with it, and reentrant ones are refused.

    torch numbers them under dynamo alone, and its partition compares the numbers; it leaves the last mark of a region
    on all nodes behind it.
    """
    from torch.utils.checkpoint import CheckpointFunction
    from torch.utils.checkpoint import _CachingTorchDispatchMode as Region

    numbers = itertools.count()

    def enter(self: Any) -> Any:
        self.ac_graph_id = next(numbers)
        return super(Region, self).__enter__()

    def leave(self: Any, *error: Any) -> Any:
        for mark in ("recompute", "ac_graph_id"):
            fx.traceback.current_meta.pop(mark, None)
        return super(Region, self).__exit__(*error)

    with (
        mock.patch.object(Region, "__enter__", enter),
        mock.patch.object(Region, "__exit__", leave),
        mock.patch.object(CheckpointFunction, "backward", _refuse_reentrant),
    ):
        yield


def _refuse_reentrant(region: Any, *_: Any) -> None:
    """In the place of a reentrant checkpoint's backward, which calls the autograd engine: no trace can hold that."""
    function = region.run_function
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    line = f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else ""
    raise CaptureError(
        f"torch.utils.checkpoint around {name}{line} has use_reentrant=True, which cannot be traced; "
        "pass use_reentrant=False, or use roamc.optimize or torch.compile"
    )


@contextlib.contextmanager
def quiet_meta() -> Iterator[None]:
    """While inside, torch does not log the traceback of an operator whose shapes do not fit: it raises it, too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def original(model: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile`` has wrapped; any other as it is."""
    from torch._dynamo import OptimizedModule

    return model._orig_mod if isinstance(model, OptimizedModule) else model


@contextlib.contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """While inside, ``model`` and its parts run as plain modules although ``compile`` was called on them.

    So does, while FX traces, everything that ``torch.compile`` has made, functions included.
    """
    from torch._dynamo import config

    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    held = [module._compiled_call_impl for module in compiled]
    for module in compiled:
        module._compiled_call_impl = None
    try:
        with config.patch(error_on_nested_fx_trace=False):
            yield
    finally:
        for module, implementation in zip(compiled, held, strict=True):
            module._compiled_call_impl = implementation


def number_backward(loss: torch.Tensor) -> None:
    """While tracing: operators of backward get the ``meta["seq_nr"]`` of the forward call that they belong to."""
    from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks

    if loss.grad_fn is not None:
        setup_stacktrace_preservation_hooks([loss.grad_fn])


def backward_of() -> int | None:
    """Behind an error in a backward that is being traced: the ``meta["seq_nr"]`` of the forward call it belongs to."""
    found = fx.traceback.current_meta.get("grad_fn_seq_nr")
    return int(found[-1]) if found else None


def fake_parameter(mode: FakeTensorMode, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake of a parameter or buffer; shared storage stays shared. Meta tensors move to ``device``."""
    return fake_input(mode, like, device) if like.device.type == "meta" else mode.from_tensor(like, static_shapes=True)


def fake_input(mode: FakeTensorMode, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake with the geometry of ``like`` and a storage of its own; meta tensors move to ``device``."""
    if like.layout is not torch.strided or type(like) not in (torch.Tensor, torch.nn.Parameter):
        return mode.from_tensor(like, static_shapes=True)
    target = device if like.device.type == "meta" else like.device
    with mode:
        fresh = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=target)
    return with_bits(fresh, conj=like.is_conj(), neg=like.is_neg()).requires_grad_(like.requires_grad)


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """What ATen's ``suggest_memory_format`` says of a tensor: channels last, or rows."""
    found: torch.memory_format = suggest_memory_format(tensor)
    return found


def ordered_strides(operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The strides that ATen's ``TensorIterator`` gives the result of ``operands``, which have one shape."""
    found: tuple[int, ...] = compute_elementwise_output_strides(*operands)
    return found


def fake_mode_of(value: object) -> FakeTensorMode | None:
    """The mode a fake tensor belongs to, or None for anything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


@contextlib.contextmanager
def reparametrized(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While inside, ``module`` holds ``tensors`` in place of its parameters and buffers.

    Every place that holds one of these parameters or buffers gets its tensor: tied weights, shared modules. What
    recurrent layers keep of their weights besides is put back, too.
    """
    from torch.nn.utils.stateless import _reparametrize_module

    named = dict((*module.named_parameters(), *module.named_buffers()))
    replacement = {id(named[name]): tensor for name, tensor in tensors.items()}
    slots: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        for key, value in (*part._parameters.items(), *part._buffers.items()):
            if value is not None and id(value) in replacement:
                slots[f"{prefix}.{key}" if prefix else key] = replacement[id(value)]
    kept = [(vars(part), name, vars(part)[name]) for part in module.modules() for name in _KEPT if name in vars(part)]
    try:
        with _reparametrize_module(module, slots):
            yield
    finally:
        for attributes, name, value in kept:
            attributes[name] = value


_KEPT = ("_flat_weight_refs",)
"""What layers of ``nn.RNNBase`` note anew when they are called with other weights."""


def with_bits(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """The lazily conjugated or negated view of ``tensor``, as asked for."""
    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor


def move_to(
    tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int]
) -> None:
    """Put ``tensor`` itself at ``offset`` elements of ``storage``; its lazy bits stay as they are."""
    conj, neg = tensor.is_conj(), tensor.is_neg()
    torch._C._set_conj(tensor, False)
    torch._C._set_neg(tensor, False)
    tensor.set_(storage, offset, size, stride)
    torch._C._set_conj(tensor, conj)
    torch._C._set_neg(tensor, neg)


def add_to_all(tensors: Sequence[torch.Tensor], number: float) -> None:
    """Add ``number`` to every tensor in place, in one call."""
    torch._foreach_add_(list(tensors), number)


def note_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped: they warn where it did not before them."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def clear_autocast_cache() -> None:
    """Forget casts that autocast has cached: they may be fake tensors of a trace."""
    torch.clear_autocast_cache()


_TABLES = threading.local()


@contextlib.contextmanager
def decompositions(table: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """While inside, this thread traces the operators of ``table`` as it says, in the place of torch's decompositions.

    A function of the table may return NotImplemented: torch's own runs then. Other threads do not notice.
    """
    for target in table:
        _consult_tables(target)
    before: Mapping[OpOverload, Callable[..., Any]] = getattr(_TABLES, "now", {})
    _TABLES.now = {**before, **table}
    try:
        yield
    finally:
        _TABLES.now = before


@functools.cache
def _consult_tables(target: OpOverload) -> None:
    """From now on, torch's decompositions of ``target`` run unless a table of the calling thread has another."""
    for key in (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd):
        if key in target.py_kernels:
            target.py_kernels[key] = functools.partial(_choose, target, target.py_kernels[key])
    target._dispatch_cache.clear()


def _choose(target: OpOverload, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    ours = getattr(_TABLES, "now", {}).get(target)
    result = NotImplemented if ours is None else ours(*args, **kwargs)
    return own(*args, **kwargs) if result is NotImplemented else result


def direct(target: Any) -> Any:
    """The callable behind an operator overload: one Python frame less per call."""
    return target._op if isinstance(target, OpOverload) else target


def has_kernel(qualified_name: str, dispatch_key: str) -> bool:
    """Whether operator ``aten::mm.out``, say, has a kernel of its own for ``"CPU"`` or ``"CUDA"``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name, dispatch_key))


def keeps_graph() -> bool:
    """Inside a backward call: was it asked to keep the graph (``retain_graph=True``)?"""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def saved_tensor_hooks_active() -> bool:
    """Are ``torch.autograd.graph.saved_tensors_hooks`` of the user around this call?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves of nested lists, tuples and dicts, and a hashable description of the nest."""
    from torch.utils import _pytree as pytree

    return pytree.tree_flatten(tree)


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """The nest that :func:`flatten` took apart."""
    from torch.utils import _pytree as pytree

    return pytree.tree_unflatten(list(leaves), spec)


def compile_in_place(model: torch.nn.Module, backend: Callable[..., Any]) -> None:
    """``model.compile`` for fixed shapes; recurrent layers, which dynamo leaves out by default, included."""
    from torch._dynamo import config, external_utils, trace_rules

    model.compile(backend=backend, dynamic=False)
    if trace_rules.check(model.forward):
        # Dynamo skips the frames of torch's own modules unless they are called from a frame that it traces.
        wrapped = external_utils.wrap_inline(model._call_impl)
        model._compiled_call_impl = torch.compile(wrapped, backend=backend, dynamic=False)
    if not any(isinstance(module, torch.nn.RNNBase) for module in model.modules()) or not hasattr(config, "allow_rnn"):
        return
    compiled: Any = model._compiled_call_impl

    def with_recurrent_layers(*args: Any, **kwargs: Any) -> Any:
        with config.patch(allow_rnn=True):
            return compiled(*args, **kwargs)

    model._compiled_call_impl = with_recurrent_layers


def is_traced(value: object) -> bool:
    """Whether ``value`` is a tensor of a trace, without elements of its own."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(value, FakeTensor | FunctionalTensor)


def has_open_size(fake: torch.Tensor) -> bool:
    """Whether a size of a fake tensor is a symbol, not a number."""
    sizes: Sequence[object] = fake.shape
    return any(isinstance(size, torch.SymInt) for size in sizes)
