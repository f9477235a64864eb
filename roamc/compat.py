"""torch's private interfaces: tracing and fake tensors. Checked on torch 2.11 to 2.14.

Only this file and the files ``roamc/compat_*.py`` import names from ``torch.fx.experimental``, or that start with an
underscore. When a new torch moves one, these files are the only places to mend.
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
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes

from roamc.compat_dtensor import is_dtensor, part_of
from roamc.compat_eager import as_in_eager, changed_setting, kernel_settings
from roamc.compat_lines import lines_of_callers, no_line_left_over
from roamc.compat_operators import tensors_in, written_by
from roamc.errors import CaptureError

__all__ = ["FakeTensor", "FakeTensorMode", "HigherOrderOperator", "OpOverload"]  # torch's, for others to import here

without_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _disable_current_modes
"""A context manager to use while a graph is traced: operators inside run on real tensors and do not enter the graph."""

without_autocast: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C._DisableAutocast
"""A context manager: operators inside take and give the dtypes of their arguments, whatever autocast surrounds them."""

DataDependentError = DataDependentOutputException
DynamicShapeError = DynamicOutputShapeException


class CaptureMode(FakeTensorMode):
    """A fake mode for tracing that never writes real tensors.

    torch's own runs an in-place operator between a real tensor and a number for real: a buffer in the closure
    of a loss function would change while it is traced.

    Args:
        held: parameters that the step updates, by name. The trace has fakes for them: an operator that is handed their
            own memory is refused with a CaptureError.
        kernel_of: returns, for an operator, a function that makes its results in the place of torch's fake kernel; None
            leaves them to torch, as does a function that returns NotImplemented.
        watched: buffers, by name. An operator that writes to their own memory is refused as well.

    Attributes:
        read_past: names of the ``watched`` buffers whose own memory was read, as keys in the sequence of first reads.
        over: whether the trace has ended. A fake of it that the user still has refuses to be read.
        answer: returns the value that an operator reads from fakes, of which the graph being traced has been given a
            node; of this mode and that node. None where such an operator raises ``DataDependentError``.
        tracer: what traces now; None outside of a trace.
        strayed: whether another thread than the one that traces has computed with fakes, past the graph.
        switched: which setting for kernels an operator met with another value than at first, in words; empty if none.
    """

    def __init__(
        self,
        held: Mapping[str, torch.Tensor] | None = None,
        kernel_of: Callable[[object], Callable[..., Any] | None] | None = None,
        watched: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._held = _by_storage(held or {})
        self._watched = _by_storage(watched or {})
        self.read_past: dict[str, None] = {}
        self.over = False
        self.answer: Callable[[CaptureMode, fx.Node], Any] | None = None
        self.tracer: fx.Tracer | None = None
        self.strayed, self.switched = False, ""
        self._thread, self._settings = threading.get_ident(), kernel_settings()
        self._faked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._written: set[int] = set()
        self._kernel_of = kernel_of or (lambda operator: None)

    def __deepcopy__(self, memo: dict[int, Any]) -> CaptureMode:
        """Return the mode itself: a fake that a loss function copies is of the same trace."""
        return self

    def dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return the results of operator ``func`` for fakes; arguments are those of ``FakeTensorMode.dispatch``.

        All operators get fakes in the place of real tensors, the same one at each use: torch would compute ``c * 2`` of
        a real ``c`` for real, and take the result for a constant. The tangent of a view has a storage as large as the
        view's base. torch's cache of fakes would give it one of the view's own size, which forward differentiation
        refuses, so it bypasses the cache.

        Raises:
            CaptureError: it is handed the memory of a tensor in ``held``, or writes to that of one in ``watched``, or
                reads a value when the trace is over.
        """
        if self.over and func is torch.ops.aten._local_scalar_dense.default:
            raise CaptureError(
                "this tensor was left behind where roamc.train_step traced the step, in a dict for example, and has no "
                "value; inside the step, write the value into a tensor made before, such as total.copy_(value.detach())"
            )
        if not self.over:
            self.strayed |= threading.get_ident() != self._thread
            self.switched = self.switched or changed_setting(self._settings)
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        if any(map(is_dtensor, tensors)):
            return NotImplemented  # DTensor calls the operators on its parts
        if real := list(filter(is_real, tensors)):
            self._check_read(real, isinstance(func, OpOverload) and func._schema.is_mutable)
        kernel = self._kernel_of(func)
        if kernel is not None:
            with self:
                result = kernel(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if isinstance(func, OpOverload) and func not in self.lift_fns:
            if real:
                leaves, spec = flatten((tuple(args), kwargs or {}))
                args, kwargs = unflatten([self._fake_of(x) if is_real(x) else x for x in leaves], spec)
            if func._schema.is_mutable:
                self._written.update(map(identity, written_by(func, args, kwargs or {})))
        if func is torch.ops.aten._new_zeros_with_same_feature_meta.default:
            with mock.patch.object(self, "cache_enabled", False):
                return super().dispatch(func, types, args, kwargs)
        try:
            return super().dispatch(func, types, args, kwargs)
        except DataDependentError:
            if self.answer is None or self.tracer is None:
                raise
            node: fx.Node = next(iter(reversed(self.tracer.graph.nodes)))
            if node.target is not func:
                raise
            value = self.answer(self, node)
            self.tracer.graph.erase_node(node)  # the graph goes by the answer
            return value

    def begin(self) -> None:
        """Begin a trace in this thread, which has written to nothing."""
        self._written.clear()
        self._thread, self._settings = threading.get_ident(), kernel_settings()

    def has_written(self, tensor: torch.Tensor) -> bool:
        """Whether the trace so far writes to the memory of a real tensor that it has met."""
        return id(tensor) in self._faked and identity(self._faked[id(tensor)][1]) in self._written

    def writes_to(self, fake: torch.Tensor) -> bool:
        """Whether the trace so far writes to the memory of one of its fakes."""
        return identity(fake) in self._written

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake of a real tensor, which stays alive, so that all uses have one storage."""
        if id(tensor) not in self._faked:
            self._faked[id(tensor)] = tensor, self.from_tensor(tensor, static_shapes=True)
        return self._faked[id(tensor)][1]

    def _check_read(self, tensors: Sequence[torch.Tensor], writes: bool) -> None:
        for key in map(_storage, tensors):
            name = self._held.get(key) or (self._watched.get(key) if writes else None)
            if name is not None:
                raise CaptureError(read_past(name))
            if key in self._watched:
                self.read_past[self._watched[key]] = None


def read_past(name: str) -> str:
    """Return the error message for a step that reaches the memory of parameter or buffer ``name`` past its fake."""
    return (
        f"the step reads or writes the memory of {name!r} through a tensor that was made before it began, such as "
        ".data, .detach() or a view; make it inside the step, or clone it"
    )


def _by_storage(tensors: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Maps identities of storages to the names of their tensors."""
    parts = {name: part_of(tensor) for name, tensor in tensors.items()}
    return {_storage(part): name for name, part in parts.items() if _storage(part)}


def identity(tensor: torch.Tensor) -> int:
    """Return a number that two tensors have in common exactly if they share a storage, while both are alive."""
    return int(tensor.untyped_storage()._cdata)


def _storage(tensor: torch.Tensor) -> int:
    """Return a number that tensors of one storage share; 0 for sparse or fake tensors and empty storages."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return 0
    return identity(tensor) if tensor.untyped_storage().nbytes() else 0


def lazy_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Return a module of ``graph`` with the attributes of ``root``; its code is written when it is first called.

    To write and compile it takes as long as to copy the graph.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def trace(function: Callable[..., Any], args: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """Trace ``function(*args)``, with fake tensors of ``mode``, to ATen operators; nothing is computed or allocated.

    The Python dispatcher is on: operators decompose as inside AOTAutograd. Autocast caches casts where it does for the
    caller; torch's tracer turns that off. The caller's thread traces backward, not the one that autograd has for a GPU.
    The module's code is written when it is first called, as in :func:`lazy_module`.
    """
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    function = _followed(_with_autocast_cache(function, torch.is_autocast_cache_enabled()), mode)
    if isinstance(mode, CaptureMode):
        mode.begin()
    lines = fx.traceback.preserve_node_meta(), lines_of_callers(trace), no_line_left_over()
    here = torch.autograd.set_multithreading_enabled(False)
    try:
        with (
            mode, enable_python_dispatcher(), lines[0], lines[1], lines[2], checkpoints_followed(), quiet_meta(), here,
            _use_lazy_graph_module(True), _without_failed_calls(),
        ):  # fmt: skip
            return make_fx(function, _readers(mode), tracing_mode="real", record_stack_traces=True)(*args)
    finally:
        if isinstance(mode, CaptureMode):
            mode.over = True


@contextlib.contextmanager
def _without_failed_calls() -> Iterator[None]:
    """Within this context, keep operators that raise an error out of the graph: the function may catch it and go on.

    torch adds the node first, and one that writes in place would stay, and raise in every step.
    """
    plain = ProxyTorchDispatchMode.__torch_dispatch__

    def erase(graph: fx.Graph, last: fx.Node | None, func: Any) -> None:
        node = next(iter(reversed(graph.nodes)), None)
        if node is not None and node is not last and node.target is func and not node.users:
            graph.erase_node(node)

    def dispatch(self: Any, func: Any, *args: Any) -> Any:
        graph: fx.Graph = self.tracer.graph
        with contextlib.ExitStack() as on_error:
            on_error.callback(erase, graph, next(iter(reversed(graph.nodes)), None), func)
            result = plain(self, func, *args)
            on_error.pop_all()
        return result

    with mock.patch.object(ProxyTorchDispatchMode, "__torch_dispatch__", dispatch):
        yield


def _readers(mode: FakeTensorMode) -> dict[OpOverload, Callable[..., Any]]:
    """Decompositions of the operators that return values: they read real tensors, too, through nodes of the graph.

    torch would take the value that such a tensor has while it is traced for that of every step.
    """
    aten = torch.ops.aten
    readers = aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default
    return {target: functools.partial(_read, mode, target) for target in readers}


def _read(mode: FakeTensorMode, target: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What ``target`` returns for real tensors among ``args``; NotImplemented where torch is to say it."""
    if getattr(mode, "answer", None) is None or not any(map(is_real, args)):
        return NotImplemented
    alias = torch.ops.aten.alias.default
    answer = target(*(alias(value) if is_real(value) else value for value in args), **kwargs)
    graph = graph_so_far()  # goes by the answer
    for node in list(itertools.islice(reversed(graph.nodes), 2 * len(args))):
        if node.target is alias and not node.users:
            graph.erase_node(node)
    return answer


def _with_autocast_cache(function: Callable[..., Any], enabled: bool) -> Callable[..., Any]:
    """``function``, with autocast's cache of casts on or off while it runs; its arguments keep their names."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(enabled)
        try:
            return function(*args)
        finally:
            torch.set_autocast_cache_enabled(before)

    return run


def _followed(function: Callable[..., Any], mode: FakeTensorMode) -> Callable[..., Any]:
    """``function``, of whose tracer ``mode`` knows while it runs, and which is not told that fx traces it."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        with as_in_eager(), mock.patch.object(mode, "tracer", tracer, create=True):
            return function(*args)

    return run


@contextlib.contextmanager
def for_real() -> Iterator[None]:
    """Within this context, inside of a trace, operators of ATen run on real tensors and do not enter the graph."""
    with (
        without_modes(), no_python_dispatcher(), torch.no_grad(), without_autocast(),
        torch._C.DisableTorchFunction(),
    ):  # fmt: skip
        yield


def graph_so_far() -> fx.Graph:
    """Return the graph of the function that is being traced, as far as it has been traced; call it inside of it.

    Raises:
        RuntimeError: nothing is being traced.
    """
    mode = get_proxy_mode()
    if mode is None:
        raise RuntimeError("nothing is being traced")
    graph: fx.Graph = mode.tracer.graph
    return graph


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """Return the node that stands for ``tensor`` in the graph that is being traced; None if there is none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    mode = get_proxy_mode()
    proxy_tensor = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    node: fx.Node | None = proxy_tensor.proxy.node if proxy_tensor is not None else None
    return node


RECOMPUTATION_MARKS = ("recompute", "ac_graph_id")
"""Entries of ``node.meta`` by which a region of checkpointing says what is to run again."""


@contextlib.contextmanager
def checkpoints_followed() -> Iterator[None]:
    """Within this context, number the selective checkpoints that are traced, and refuse reentrant checkpoints.

    torch numbers them under dynamo alone, and its partition compares the numbers. Each gets the next ``ac_graph_id``,
    from 0 on in each context, and its nodes have it on torch 2.11 as well. torch also leaves the last mark of a
    checkpoint's region on all nodes behind it; here marks end with their region.

    Raises:
        CaptureError: later, when backward reaches a reentrant checkpoint inside this context; names the checkpointed
            function and its line.
    """
    from torch.utils.checkpoint import CheckpointFunction
    from torch.utils.checkpoint import _CachingTorchDispatchMode as Region

    numbers = itertools.count()
    plain: Any = Region.__torch_dispatch__

    def dispatch(self: Any, *args: Any, **named: Any) -> Any:
        fx.traceback.current_meta["ac_graph_id"] = self.ac_graph_id
        return plain(self, *args, **named)

    def enter(self: Any) -> Any:
        self.ac_graph_id = next(numbers)
        return super(Region, self).__enter__()

    def leave(self: Any, *error: Any) -> Any:
        for mark in RECOMPUTATION_MARKS:
            fx.traceback.current_meta.pop(mark, None)
        return super(Region, self).__exit__(*error)

    with (
        mock.patch.object(Region, "__enter__", enter),
        mock.patch.object(Region, "__exit__", leave),
        mock.patch.object(Region, "__torch_dispatch__", dispatch),
        mock.patch.object(CheckpointFunction, "backward", _refuse_reentrant),
    ):
        yield


def _refuse_reentrant(region: Any, *_: Any) -> None:
    """Refuse a reentrant checkpoint, in the place of its backward: no trace can hold the calls of autograd in that.

    The message names the function and its line.
    """
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
    """Within this context, keep torch from logging the traceback of an operator whose shapes do not fit.

    torch raises the error, too, so nothing is lost.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def number_backward(loss: torch.Tensor) -> None:
    """Register hooks by which operators of backward get the ``meta["seq_nr"]`` of their forward call.

    Call it inside the trace, before the backward of ``loss``.
    """
    from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks

    if loss.grad_fn is not None:
        setup_stacktrace_preservation_hooks([loss.grad_fn])


def backward_of() -> int | None:
    """Return the ``meta["seq_nr"]`` of the forward call whose backward was being traced when an error was raised.

    None if no backward was being traced.
    """
    numbers = fx.traceback.current_meta.get("grad_fn_seq_nr")
    return int(numbers[-1]) if numbers else None


def fake_parameter(mode: FakeTensorMode, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake of a parameter or buffer; shared storage stays shared.

    A meta tensor becomes one on ``device``, with a storage of its own.
    """
    return fake_input(mode, like, device) if like.device.type == "meta" else mode.from_tensor(like, static_shapes=True)


def fake_input(mode: FakeTensorMode, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake with the geometry of ``like`` and a storage of its own; a meta tensor becomes one on ``device``."""
    if like.layout is not torch.strided or type(like) not in (torch.Tensor, torch.nn.Parameter):
        return mode.from_tensor(like, static_shapes=True)
    target = device if like.device.type == "meta" else like.device
    with mode:
        fresh = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=target)
    return with_bits(fresh, conj=like.is_conj(), neg=like.is_neg()).requires_grad_(like.requires_grad)


def fake_mode_of(value: object) -> FakeTensorMode | None:
    """Return the mode that a fake tensor belongs to; None for anything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


@contextlib.contextmanager
def reparametrized(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within this context, put ``tensors`` in the place of parameters and buffers of ``module``, by name.

    Every place that holds one gets its tensor, tied ones too; a parameter's is an ``nn.Parameter`` to ``isinstance``.
    In the end all is put back, with what recurrent layers keep of their weights besides.
    """
    from torch.nn.utils.stateless import _reparametrize_module

    named = dict((*module.named_parameters(), *module.named_buffers()))
    replacement: dict[int, Any] = {id(named[name]): tensor for name, tensor in tensors.items()}
    slots: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        for key, value in (*part._parameters.items(), *part._buffers.items()):
            if value is not None and id(value) in replacement:
                replacement[id(value)]._is_param = isinstance(value, torch.nn.Parameter)
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
    """Return ``tensor`` as a view that is lazily conjugated, negated or both; itself where neither is asked for.

    A bit that ``tensor`` has already is turned off where it is asked for, and stays where it is not. A real tensor has
    no conjugate: ``conj`` does nothing to it.
    """
    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor


def move_to(
    tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int]
) -> None:
    """Make ``tensor``, in place, a view of ``storage`` at ``offset`` (in elements); its lazy bits stay as they are."""
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
    """Note that ``optimizer`` has stepped: learning-rate schedulers warn if they step before it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def keeps_graph() -> bool:
    """Whether the backward call that runs now was asked to keep the graph (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def saved_tensor_hooks_active() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` of the user are around this call."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested lists, tuples and dicts, a torch.Size being a leaf, and a hashable description."""
    from torch.utils import _pytree as pytree

    return pytree.tree_flatten(tree, is_leaf=lambda value: isinstance(value, torch.Size))


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of :func:`flatten`, each behind what takes it out of ``tree``, as ``"['logits']"``."""
    from torch.utils import _pytree as pytree

    leaves, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda value: isinstance(value, torch.Size))
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """Put leaves into the nest that :func:`flatten` has described by ``spec``."""
    from torch.utils import _pytree as pytree

    return pytree.tree_unflatten(list(leaves), spec)


def parts_of(spec: Any) -> tuple[type | None, Any, list[Any]]:
    """Return (class, what it has beside its items, descriptions of these) of a description that :func:`flatten` made.

    The class is None for a leaf. Beside its items a dict has its keys, a named tuple its own class.
    """
    return spec.type, spec.context, spec.children() if hasattr(spec, "children") else spec.children_specs


def is_real(value: object) -> bool:
    """Return whether ``value`` is a tensor that is no fake."""
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def is_traced(value: object) -> bool:
    """Whether ``value`` is a fake or functional tensor, as in a trace, without elements of its own."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(value, FakeTensor | FunctionalTensor)


def has_open_size(fake: torch.Tensor) -> bool:
    """Whether any size of a fake tensor is symbolic."""
    sizes: Sequence[object] = fake.shape
    return any(isinstance(size, torch.SymInt) for size in sizes)
