"""The one door to torch's private interfaces; everything here was checked on torch 2.11 to 2.13.

Nothing else in roamc imports a name from a torch module that starts with an underscore or from
``torch.fx.experimental``. When a new torch moves something, this file is the only place to mend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = [
    "DataDependentError",
    "DynamicShapeError",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "aot_backend",
    "clear_autocast_cache",
    "default_partition",
    "empty_fake",
    "fake_mode_of",
    "has_kernel",
    "keeps_graph",
    "reparametrized",
    "saved_tensor_hooks_active",
    "trace",
]

DataDependentError = DataDependentOutputException
DynamicShapeError = DynamicOutputShapeException


def trace(function: Callable[..., Any], args: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """Trace ``function(*args)`` to ATen operators under ``mode``; nothing is computed or allocated.

    The Python dispatcher is on, so that operators decompose as they do inside AOTAutograd
    (dropout, for example, becomes ``native_dropout`` with a mask of one byte an element).
    """
    with mode, enable_python_dispatcher():
        return make_fx(function, tracing_mode="real", record_stack_traces=True)(*args)


def empty_fake(mode: FakeTensorMode, like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A fake tensor with the geometry of ``like``; meta tensors take ``device`` instead of their own."""
    fake = mode.from_tensor(like, static_shapes=True) if not isinstance(like, FakeTensor) else None
    if like.device.type != "meta" or device is None:
        if fake is None:
            raise TypeError("expected a real or a meta tensor, got a fake one")
        return fake
    with mode:
        moved = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=like.requires_grad)
    return moved.requires_grad_(like.requires_grad)


def fake_mode_of(value: object) -> FakeTensorMode | None:
    """The mode a fake tensor belongs to, or None for anything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


@contextlib.contextmanager
def reparametrized(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While inside, ``module`` holds ``tensors`` in place of its parameters and buffers (ties kept)."""
    from torch.nn.utils.stateless import _reparametrize_module

    with _reparametrize_module(module, dict(tensors), tie_weights=True):
        yield


def clear_autocast_cache() -> None:
    """Forget casts that autocast has cached: they may be fake tensors of a trace."""
    torch.clear_autocast_cache()


def default_partition(joint: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's own split of a joint graph at full save: what eager saves, nothing recomputed."""
    from torch._functorch.partitioners import default_partition as split

    forward, backward = split(joint, inputs, **how)
    return forward, backward


def aot_backend(
    *,
    forward: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    backward: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    inference: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """A dynamo backend from AOTAutograd with our compilers and our partition."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def has_kernel(qualified_name: str, dispatch_key: str) -> bool:
    """Whether operator ``aten::mm.out``, say, has a kernel of its own for ``"CPU"`` or ``"CUDA"``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name, dispatch_key))


def keeps_graph() -> bool:
    """Inside a backward call: was it asked to keep the graph (``retain_graph=True``)?"""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def saved_tensor_hooks_active() -> bool:
    """Are ``torch.autograd.graph.saved_tensors_hooks`` of the user around this call?"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def static_inputs() -> tuple[int, ...]:
    """While AOTAutograd compiles: positions of the inputs that are parameters or buffers."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    return tuple(getattr(metadata, "static_input_indices", None) or ())


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves of nested lists, tuples and dicts, and a hashable description of the nest."""
    from torch.utils import _pytree as pytree

    return pytree.tree_flatten(tree)


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """The nest that :func:`flatten` took apart."""
    from torch.utils import _pytree as pytree

    return pytree.tree_unflatten(list(leaves), spec)


def forward_backward(
    model: torch.nn.Module, batch: Sequence[Any]
) -> tuple[tuple[fx.GraphModule, ...], int, tuple[int, ...]]:
    """AOTAutograd's graphs of ``model(*batch)`` under fake tensors: (forward, backward) or (forward,).

    Returns:
        The graphs, the number of forward outputs that are not saved tensors, and the positions of parameters
        and buffers among the forward inputs.
    """
    from torch._functorch.aot_autograd import aot_function

    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    leaves, spec = flatten(tuple(batch))
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    found: dict[str, Any] = {"outputs": 0, "static": tuple(range(len(names)))}

    def call(*flat: torch.Tensor) -> list[torch.Tensor]:
        values = list(leaves)
        for index, tensor in zip(where, flat[len(names) :], strict=True):
            values[index] = tensor
        with reparametrized(model, dict(zip(names, flat, strict=False))):
            results, _ = flatten(model(*unflatten(values, spec)))
        return [result for result in results if isinstance(result, torch.Tensor)]

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        found["outputs"] = how["num_fwd_outputs"]
        forward, backward = found["halves"] = default_partition(joint, inputs, **how)
        return forward, backward

    def keep(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found.setdefault("halves", (gm,))
        return gm

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = [*model.parameters(), *model.buffers(), *(leaves[index] for index in where)]
    fakes = [empty_fake(mode, tensor, torch.device("cpu")) for tensor in tensors]
    with mode:
        aot_function(
            call, keep, keep, partition, num_params_buffers=len(names), keep_inference_input_mutations=True,
            inference_compiler=keep,
        )(*fakes)  # fmt: skip
    return found["halves"], found["outputs"], found["static"]
