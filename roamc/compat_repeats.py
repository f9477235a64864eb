"""torch's private interfaces for nodes that are copied into a graph while it is traced: proxies of fake tensors."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)

from roamc import compat
from roamc.compat import CaptureMode, FakeTensor, OpOverload, identity


def is_plain_call() -> bool:
    """Return whether a call of a module is followed by autograd's backward alone, and by no hooks on every module."""
    with_backward = torch.is_grad_enabled() and torch.autograd.forward_ad._current_level < 0
    hooked = compat.saved_tensor_hooks_active() or nn.modules.module._has_any_global_hook()
    return with_backward and not hooked


def nested_trace(function: Callable[..., Any], args: Sequence[torch.Tensor], mode: CaptureMode) -> fx.Graph:
    """Trace ``function(*args)`` while another graph is traced, which gets nothing of it.

    Args:
        function: returns a list of tensors.
        args: fake tensors of ``mode`` that are not traced.
        mode: the fake mode of both traces.
    """
    names_of_constants = mock.patch.dict(fx.Tracer._qualname_counter)  # all tracers count in one
    with compat.without_modes(), names_of_constants:
        try:
            return compat.trace(function, args, mode).graph
        finally:
            mode.over = False  # it is the other trace that ends it


@contextlib.contextmanager
def without_callers() -> Iterator[None]:
    """Within this context, operators that are traced have no line of what called :func:`nested_trace`."""
    kept = PythonKeyTracer._filter_traceback_frames

    def inside(tracer: PythonKeyTracer, frames: traceback.StackSummary) -> traceback.StackSummary:
        own = [
            at for at, frame in enumerate(frames) if (frame.filename, frame.name) == (__file__, nested_trace.__name__)
        ]
        return kept(tracer, traceback.StackSummary.from_list(frames[own[-1] :]))

    with mock.patch.object(PythonKeyTracer, "_filter_traceback_frames", inside):
        yield


def untraced_like(tensors: Iterable[torch.Tensor], mode: CaptureMode) -> list[torch.Tensor]:
    """Return fake tensors of the geometries of ``tensors`` that the graph being traced does not have."""
    with disable_proxy_modes_tracing(), mode:
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors]


def placeholder_like(tensor: torch.Tensor, mode: CaptureMode) -> torch.Tensor:
    """Return a tensor of the geometry of ``tensor`` that the graph being traced gets as one more input."""
    (like,) = untraced_like([tensor], mode)
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    proxy = tracer.create_proxy("placeholder", "tangent", (), {})
    track_tensor_tree(like, proxy, constant=None, tracer=tracer)
    return like


def surroundings() -> tuple[Any, ...]:
    """Return what operators go by besides their arguments: modes, and settings of torch."""
    from torch.overrides import _get_current_function_mode_stack

    autocast = [torch.get_autocast_dtype(x) if torch.is_autocast_enabled(x) else None for x in ("cpu", "cuda")]
    cuda: Any = torch.backends.cuda
    attention = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled)
    return (
        *autocast, torch.is_autocast_cache_enabled(), *(enabled() for enabled in attention), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), tuple(map(id, _get_current_function_mode_stack())),
    )  # fmt: skip


class Copies:
    """Nodes of another graph, copied to the end of the graph that is being traced; it is made inside of the trace.

    Args:
        mode: the fake mode of both graphs.
        theirs: inputs of the copied part.
        ours: the node that stands for each of them in the graph that is being traced.

    Attributes:
        node_of: every node that was copied, and every input, to the node here.
        own: the nodes that :meth:`append` has made.
    """

    def __init__(self, mode: CaptureMode, theirs: Sequence[fx.Node], ours: Sequence[fx.Node | None]) -> None:
        self.mode = mode
        self.node_of: dict[fx.Node, fx.Node] = {}
        self.own: set[fx.Node] = set()
        self._storages: dict[int, torch.UntypedStorage] = {}
        for node, stands_for_it in zip(theirs, ours, strict=True):
            assert stands_for_it is not None  # all are traced
            self.bind(node, stands_for_it)

    def bind(self, theirs: fx.Node, ours: fx.Node) -> None:
        """Let ``ours`` stand for ``theirs``, an input of the copied part."""
        self.node_of[theirs] = ours
        self._storages[identity(theirs.meta["val"])] = ours.meta["val"].untyped_storage()

    def append(self, nodes: Iterable[fx.Node]) -> None:
        """Copy ``nodes``, of which each reads only inputs and what was copied before, with values of their own."""
        graph = compat.graph_so_far()
        with compat.without_modes(), torch._C.DisableTorchFunction():
            for node in nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), self.node_of.__getitem__)
                packet = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else None
                name = packet and graph._target_to_str(packet)
                copy = graph.create_node(node.op, node.target, args, kwargs, name=name)
                copy.meta = {**node.meta, **copy.meta, "val": self._value(node.meta.get("val"))}
                self.node_of[node] = copy
                self.own.add(copy)

    def tensor(self, node: fx.Node) -> torch.Tensor:
        """Return a traced tensor for the copy of ``node``, which has a single result."""
        copy = self.node_of[node]
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        with compat.without_modes():
            value = copy.meta["val"]
            tensor = self._at(value.untyped_storage(), value)
            track_tensor_tree(tensor, fx.Proxy(copy, tracer), constant=None, tracer=tracer)
        return tensor

    def _value(self, value: Any) -> Any:
        """``value``, with every tensor in the storage here that stands for its own."""
        if isinstance(value, list | tuple):
            return type(value)(map(self._value, value))
        if not isinstance(value, torch.Tensor):
            return value
        storage = self._storages.get(identity(value))
        if storage is None:
            size = value.untyped_storage().nbytes()
            storage = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
            self._storages[identity(value)] = storage
        return self._at(storage, value)

    def _at(self, storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the geometry of ``like`` in ``storage``, made without the fake mode: that takes longer."""
        part = torch.empty(0, dtype=like.dtype, device="meta")
        part.set_(storage, like.storage_offset(), like.shape, like.stride())
        return compat.with_bits(FakeTensor(self.mode, part, like.device), conj=like.is_conj(), neg=like.is_neg())
