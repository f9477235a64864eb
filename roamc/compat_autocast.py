"""torch's private interfaces: CUDA's autocast, for a step that is traced on a CPU and planned for a GPU.

CUDA's kernels of autocast cast tensors of CUDA alone, and torch turns autocast for CUDA off where there is no GPU. In
a trace these functions cast in their place, by the lists of torch's ``autocast_mode.h``. The dispatch key of CUDA's
autocast is part of every call there, and ``torch.autocast`` turns it on and off as on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload

from roamc.compat_operators import tensors_in
from roamc.locks import CAPTURE

KEY = torch._C.DispatchKey.AutocastCUDA

NARROW = frozenset((
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
))  # fmt: skip
"""Operators that run in the dtype of autocast."""

FLOAT32 = frozenset((
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm",
    "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
    "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
))  # fmt: skip
"""Operators that run in float32."""

FLOAT32_RESULT = frozenset((
    "prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum",
))  # fmt: skip
"""Operators whose result is float32 unless their argument ``dtype`` says otherwise."""

NORM = "norm"
"""The operator whose result is float32 by an overload with an argument ``dtype``."""

WIDEST = frozenset((
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
))  # fmt: skip
"""Operators that run in the widest dtype of their operands."""

_TRACING = threading.local()
"""``casts`` of a thread that traces for CUDA: id of each weight to (it, its cast), as autocast's cache has them."""


Casting = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
"""Calls an operator with its arguments as autocast changes them."""


@contextlib.contextmanager
def enabled_for_cuda() -> Iterator[None]:
    """Within this context, ``torch.autocast("cuda")`` that this thread makes is enabled, whatever GPU is here.

    Functions of torch are exchanged for it: one thread after the other, or they would not be put back.
    """
    with CAPTURE.now, mock.patch.object(torch.autocast, "__init__", _enabled_for_cuda()):
        yield


def _enabled_for_cuda() -> Callable[..., None]:
    """``torch.autocast.__init__`` as it is where there is a GPU, in this thread."""
    make, thread = torch.autocast.__init__, threading.get_ident()

    def init(self: torch.autocast, *args: Any, **named: Any) -> None:
        with contextlib.ExitStack() as patches:
            if threading.get_ident() == thread:
                common: Any = torch.cuda.amp.common
                patches.enter_context(mock.patch.object(common, "amp_definitely_not_available", return_value=False))
                patches.enter_context(mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True))
            make(self, *args, **named)

    return init


@contextlib.contextmanager
def on_cuda() -> Iterator[None]:
    """Within this context, operators that this thread traces on a CPU are cast by autocast as CUDA's are.

    The autocast of both devices is that of CUDA: a traced tensor says that it lies on a CPU, and a program may ask for
    the autocast of its tensors' device. One of the CPU that is on before is that of CUDA within.
    """
    _replace_kernels()
    before = _casts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(enabled_for_cuda())
        around = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        if around is not None:
            stack.enter_context(torch.autocast("cpu", enabled=False))
        for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
            stack.enter_context(_redirected(name))
        stack.enter_context(_clearing())
        stack.enter_context(torch._C._IncludeDispatchKeyGuard(KEY))
        stack.callback(setattr, _TRACING, "casts", before)
        _TRACING.casts = {}
        if around is not None:
            stack.enter_context(torch.autocast("cuda", around))
        yield


def _casts() -> dict[int, tuple[torch.Tensor, torch.Tensor]] | None:
    casts: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = getattr(_TRACING, "casts", None)
    return casts


def _redirected(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context within which ``torch.NAME`` says or sets of the CPU, in this thread, what it does of CUDA."""
    ask, thread = getattr(torch, name), threading.get_ident()

    def run(*args: Any) -> Any:
        here = threading.get_ident() == thread and args and args[0] == "cpu"
        return ask("cuda", *args[1:]) if here else ask(*args)

    return mock.patch.object(torch, name, run)


def _clearing() -> contextlib.AbstractContextManager[Any]:
    """A context within which ``torch.clear_autocast_cache`` forgets our casts of this thread as well."""
    clear = torch.clear_autocast_cache

    def run() -> None:
        if _casts() is not None:
            _TRACING.casts.clear()
        clear()

    return mock.patch.object(torch, "clear_autocast_cache", run)


@functools.cache
def _replace_kernels() -> None:
    """From now on, operators of the lists are cast by these functions in threads that trace for CUDA."""
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(KEY.name):
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        casting = casting_of(base) if namespace == "aten" else None
        if casting is not None:  # else torch's own, which refuses what it bans
            target: OpOverload = getattr(getattr(torch.ops.aten, base), overload or "default")
            target.py_kernels[KEY] = functools.partial(_run, target, casting)
            target._dispatch_cache.clear()


def casting_of(name: str) -> Casting | None:
    """Return how CUDA's autocast calls the operator of this name, such as ``"mm"``; None if it is on no list."""
    lists = ((NARROW, _narrow), (FLOAT32, _float32), (FLOAT32_RESULT, _float32_result), (WIDEST, _widest))
    return _norm if name == NORM else next((casting for names, casting in lists if name in names), None)


def _run(target: OpOverload, casting: Casting, *args: Any, **kwargs: Any) -> Any:
    if _casts() is None:
        return target._op_dk(KEY, *args, **kwargs)
    with torch._C._DisableAutocast():
        return casting(target, args, kwargs)


def _narrow(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _called_in(torch.get_autocast_dtype("cuda"), target, args, kwargs)


def _float32(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _called_in(torch.float32, target, args, kwargs)


def _widest(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wide = any(tensor.dtype is torch.float32 for tensor in tensors_in((args, kwargs)))
    return _called_in(torch.float32 if wide else torch.get_autocast_dtype("cuda"), target, args, kwargs)


def _float32_result(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _named(target, args, kwargs)
    if _is_cast(args[0]) and named["dtype"] is None:
        named["dtype"] = torch.float32
    return target(**named)


def _norm(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    typed = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}[target._overloadname]
    dtype = torch.float32 if _is_cast(args[0]) else args[0].dtype
    return getattr(torch.ops.aten.norm, typed)(**_named(target, args, kwargs), dtype=dtype)


def _named(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by their names, with defaults."""
    arguments = target._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return defaults | {each.name: value for each, value in zip(arguments, args, strict=False)} | kwargs


def _called_in(dtype: torch.dtype, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return target(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with all tensors in nested lists and tuples in ``dtype``; weights are cast once."""
    if isinstance(value, list | tuple):
        return type(value)(_cast(each, dtype) for each in value)
    if not isinstance(value, torch.Tensor) or not _is_cast(value) or value.dtype is dtype:
        return value
    weight = value.requires_grad and value.is_leaf and not value._is_view() and torch.is_grad_enabled()
    if not weight or dtype is torch.float32 or not torch.is_autocast_cache_enabled():
        return value.to(dtype)
    if id(value) not in _TRACING.casts:
        _TRACING.casts[id(value)] = value, value.to(dtype)
    return _TRACING.casts[id(value)][1]


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64
