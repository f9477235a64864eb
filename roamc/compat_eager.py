"""torch's private interfaces: answers to a program that asks whether it is being traced, as eager gives them.

A step that is traced must not take another branch than in eager. ``torch.compiler.is_compiling()``, ``is_exporting()``
and ``torch.jit.is_tracing()`` say no by themselves. What says yes under ``make_fx`` and fake tensors is answered here,
to all callers but torch and roamc, by stand-ins:

    is_fx_tracing(), is_fx_symbolic_tracing()             functions, and the flag that they read
    nn.MultiheadAttention's own question                 a function of its module
    has_torch_function(x), under the modes of capture     a function of torch.overrides
    isinstance(x, FakeTensor), is_fake(x), detect_fake_mode(x)
        by any road: ``from torch._subclasses import FakeTensor`` at the head of a file or in a function,
        ``torch._subclasses.fake_tensor.FakeTensor`` where it is asked

An address, as of ``x.data_ptr()``, has no answer before the step runs: it is refused. ``type(x)`` is answered as
torch does. torch itself sees the flag as it is: while it says that FX traces, dynamo runs plain what ``torch.compile``
has made.

Settings that decide which kernels run are compared as well: a program runs all its operators with those around it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import _guards, _subclasses, overrides
from torch._subclasses import fake_tensor
from torch.fx import _symbolic_trace
from torch.nn.modules import activation

from roamc.errors import CaptureError

_TRACING = ("torch", "roamc")
"""Packages that trace, and so need torch's own answers."""


class _WithoutInstances(type):
    """Class of a class that has no instances."""

    def __instancecheck__(cls, value: object) -> bool:
        return False


class _Fake(metaclass=_WithoutInstances):
    """Stands for ``FakeTensor``: in eager, no tensor is one."""


def _has_torch_function(arguments: Iterable[object]) -> bool:
    """Whether arguments or modes override functions of torch, those of capture left out where a model asks."""
    caller = sys._getframe(1).f_globals
    if is_of_tracer(caller) and not caller["__name__"].startswith("torch.nn.modules."):
        return bool(_REAL_FUNCTION(arguments))
    modes = [type(mode).__module__ for mode in overrides._get_current_function_mode_stack()]
    others = [value for value in arguments if type(value) is not torch.Tensor]
    return not all(mode.startswith(_OF_CAPTURE) for mode in modes) or bool(overrides._get_overloaded_args(others))


_OF_CAPTURE = ("roamc.", "torch.fx.")
"""Where the function modes are from that are there because the step is traced."""

_REAL_FUNCTION = overrides.has_torch_function
_REAL_ADDRESS = torch.UntypedStorage.data_ptr

_STAND_INS: dict[str, tuple[object, object]] = {
    "_is_fx_tracing_flag": (True, False),
    "is_fx_tracing": (_symbolic_trace.is_fx_tracing, lambda: False),
    "is_fx_symbolic_tracing": (_symbolic_trace.is_fx_symbolic_tracing, lambda: False),
    "has_torch_function": (overrides.has_torch_function, _has_torch_function),
    "FakeTensor": (fake_tensor.FakeTensor, _Fake),
    "is_fake": (fake_tensor.is_fake, lambda value: False),
    "detect_fake_mode": (_guards.detect_fake_mode, lambda inputs=None: None),
}
"""Name to what torch has there, and to what stands for it while a step is traced."""


class _StandingIn(types.ModuleType):
    """A module of torch that hands out the stand-ins of :data:`_STAND_INS`, to callers outside of torch and roamc."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in _STAND_INS and value is _STAND_INS[name][0] and not is_of_tracer(sys._getframe(1).f_globals):
            return _STAND_INS[name][1]
        return value


def is_of_tracer(variables: dict[str, Any]) -> bool:
    """Return whether a caller with these global variables is a function of torch or roamc."""
    return str(variables.get("__name__", "")).partition(".")[0] in _TRACING


def _address(tensor: torch.Tensor) -> int:
    """In the place of ``FakeTensor.data_ptr``."""
    return _address_of_storage(tensor.untyped_storage()) if is_of_tracer(sys._getframe(1).f_globals) else _refuse()


def _address_of_storage(storage: torch.UntypedStorage) -> int:
    """In the place of ``UntypedStorage.data_ptr``."""
    if storage.device.type == "meta" and not is_of_tracer(sys._getframe(1).f_globals):
        _refuse()
    return _REAL_ADDRESS(storage)


def _refuse() -> NoReturn:
    raise CaptureError(
        "the step asks for the address of a tensor (data_ptr()), which it has when it runs and not while it is traced; "
        "compare tensors by `is`, or use torch.compile or roamc.optimize"
    )


@contextlib.contextmanager
def as_in_eager() -> Iterator[None]:
    """Within this context, inside of a trace, functions that ask whether they are traced are told that they are not."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(activation, "_is_make_fx_tracing", return_value=False))
        patches.enter_context(mock.patch.object(overrides, "has_torch_function", _has_torch_function))
        patches.enter_context(mock.patch.object(fake_tensor.FakeTensor, "data_ptr", _address))
        patches.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", _address_of_storage))
        for module in list(sys.modules.values()):
            variables = getattr(module, "__dict__", {})
            if not is_of_tracer(variables):
                for name in [name for name, (real, _) in _STAND_INS.items() if variables.get(name) is real]:
                    patches.enter_context(mock.patch.object(module, name, _STAND_INS[name][1]))
        for module in (_subclasses, fake_tensor, _guards, _symbolic_trace):
            patches.callback(setattr, module, "__class__", module.__class__)
            module.__class__ = _StandingIn
        yield


def kernel_settings() -> dict[str, object]:
    """Return these settings as they are now, each by a name for messages.

    Those of attention are not among them: they decide which operators a trace meets.
    """
    return {
        "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled(),
        "torch.backends.cudnn.enabled": torch._C._get_cudnn_enabled(),
        "torch.backends.cudnn.deterministic": torch._C._get_cudnn_deterministic(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "the precision of products on a CPU": torch._C._get_fp32_precision_getter("mkldnn", "matmul"),
        "the precision of products on a GPU": torch._C._get_fp32_precision_getter("cuda", "matmul"),
        "the precision of convolutions on a GPU": torch._C._get_fp32_precision_getter("cuda", "conv"),
    }


def changed_setting(before: Mapping[str, object]) -> str:
    """Return a setting that is another now than in ``before``, a result of :func:`kernel_settings`, in words; or ""."""
    changed = ((name, value) for name, value in kernel_settings().items() if value != before[name])
    return next((f"{name} from {before[name]!r} to {value!r}" for name, value in changed), "")
