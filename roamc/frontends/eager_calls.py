"""Calls of an optimized module that torch.compile runs in eager: roamc hears nothing of them, and keeps no budget.

torch.compile does so for a module whose forward it cannot split at a graph break, such as one within a loop, or passes
over, and for calls beyond its limit of recompilations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roamc import compat_dynamo, notices
from roamc.capture.batch import take_apart
from roamc.errors import CaptureError
from roamc.frontends import compiled_again
from roamc.frontends.record import Record
from roamc.options import Options


def checked(
    model: weakref.ref[nn.Module], record: Record, options: Options, compiled: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls ``compiled``, and warns once for the module if a whole call has run in eager.

    While another compilation traces it, it does what :class:`roamc.frontends.compiled_again.Around` decides.

    Args:
        model: the module.
        record: the module's record; a call in which ``record.calls`` does not rise has run in eager. If roamc has asked
            for that, by ``record.in_eager``, it has warned already.
        options: what the user set.
        compiled: the module's call as torch.compile has made it; gets the same arguments.

    Raises:
        CaptureError: raised by the returned function in the place of the warning, if option ``strict`` is set.
    """

    around = compiled_again.Around(record, options)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def tracer() -> str:
        return around.tracer()

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            traced_by = tracer()
            if traced_by == compiled_again.OTHER and not torch.compiler.is_exporting():
                return compiled_again.apart(around, compiled, args, kwargs)
            if traced_by or torch.compiler.is_exporting():
                return compiled(*args, **kwargs)
        before = record.calls.count
        result = compiled(*args, **kwargs)
        if record.calls.count == before and not record.in_eager:
            _check(model(), record, options, (args, kwargs), result)
        return result

    return call


def _check(model: nn.Module | None, record: Record, options: Options, call: Any, result: Any) -> None:
    """Warn that a call of ``model`` ran wholly in eager, unless it made no tensor or the user asked for eager.

    Args:
        model: the module; None, after which nothing is done, if it is gone.
        record: that of the module; its warning is given once.
        options: what the user set.
        call: (args, kwargs) of the call.
        result: what the call has returned.

    Raises:
        CaptureError: in place of the warning, with option ``strict``.
    """
    if model is None or compat_dynamo.eager_is_asked_for() or torch.jit.is_tracing() or not _made(model, call, result):
        return
    planned = record.calls.count > 0
    extent = "a call of the compiled model" if planned else "all of"
    message = (
        f"torch.compile runs {extent} {record.name!r} in eager, and roamc has no part in it"
        f"{notices.lost_budget(options, 'there')}. TORCH_LOGS=graph_breaks,recompiles says why: "
        + ("" if planned else "often a graph break within a loop; or ")
        + "torch._dynamo.config.recompile_limit may be reached; roamc.train_step may take the model as it is"
    )
    notices.warn_or_raise(record, f"eager {planned}", CaptureError(message), options)


def _made(model: nn.Module, call: Any, result: Any) -> bool:
    """Whether ``result`` has a tensor that is neither in ``call``, the arguments, nor one of the module's."""
    existing = {id(leaf) for leaf in (*take_apart(call)[0], *model.parameters(), *model.buffers())}
    return any(isinstance(leaf, torch.Tensor) and id(leaf) not in existing for leaf in take_apart(result)[0])
