"""Checks of the arguments of roamc's functions, before anything is made of them; each error is one line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from roamc import compat_hooks
from roamc.compat_dynamo import original
from roamc.errors import CaptureError, OptionError


def check_module(model: object, way: str) -> None:
    """Refuse a model that is no ``nn.Module``.

    Args:
        model: what the user gave as the model.
        way: name of the function that was called, such as "optimize", for the message.

    Raises:
        CaptureError: ``model`` is no module, or its class; says what to pass.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise CaptureError(f"roamc.{way} takes a module, not its class; write {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        kind = "a function" if callable(model) else f"{type(model).__name__}"
        advice = "; for a function use torch.compile(function, backend='roamc')" if callable(model) else ""
        raise CaptureError(f"roamc.{way} takes a torch.nn.Module as its model, not {kind}{advice}")


def check_not_compiled(model: nn.Module) -> None:
    """Refuse a model that torch.compile has wrapped: another backend has it already.

    Args:
        model: the user's model.

    Raises:
        CaptureError: says what to call instead.
    """
    if original(model) is not model:
        raise CaptureError(
            "this model was made by torch.compile, which has given it to a backend already; call roamc.optimize on the "
            "model before torch.compile, or write torch.compile(model, backend='roamc')"
        )


def check_not_meta(model: nn.Module) -> None:
    """Refuse a model of which a parameter or a buffer is on the meta device: it cannot run.

    Raises:
        CaptureError: names the first, and says what can be done with such a model.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise CaptureError(
                f"{name} of the model is on the meta device, where nothing is computed: roamc.plan and the step's "
                ".plan() plan it; to run it, use model.to_empty(device=...)"
            )


def check_loss_function(loss_fn: object) -> None:
    """Refuse a loss function that cannot be called, or an optimizer in its place.

    Raises:
        CaptureError: says what a loss function is called with.
    """
    if isinstance(loss_fn, torch.optim.Optimizer) or not callable(loss_fn):
        raise CaptureError(
            f"loss_fn must be a function of (model, *batch) that returns the loss, not {type(loss_fn).__name__}"
        )


def check_optimizer(optimizer: object) -> None:
    """Refuse an optimizer that is no ``torch.optim.Optimizer``.

    Raises:
        CaptureError: says what to pass; of an optimizer's class, how to make one.
    """
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        raise CaptureError(
            f"give train_step an optimizer, not its class: torch.optim.{optimizer.__name__}(model.parameters(), lr=...)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CaptureError(
            f"train_step takes an optimizer, such as torch.optim.AdamW(model.parameters()), not {_shown(optimizer)}"
        )


def check_clip(limit: object) -> None:
    """Refuse a limit of the gradients' norm that is neither a positive number nor None (no clipping).

    Raises:
        OptionError: ``limit`` is NaN, a bool, not above 0, or no number; shows it.
    """
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int | float) or math.isnan(limit) or limit <= 0:
        raise OptionError(f"clip_grad_norm must be a positive number, not {limit!r}")


def check_call(
    loss_fn: Callable[..., object],
    batch: tuple[object, ...],
    named: Mapping[str, object],
    origin: str = "what the step is called with",
) -> None:
    """Refuse a batch that does not fit the signature of a loss function; without a signature nothing is refused.

    Args:
        loss_fn: called as ``loss_fn(model, *batch, **named)``.
        batch: positional arguments behind the model.
        named: keyword arguments.
        origin: where the batch comes from, in words.

    Raises:
        CaptureError: says how ``loss_fn`` is called, and for a module such as ``nn.MSELoss()`` how to wrap it.
    """
    criterion = isinstance(loss_fn, nn.Module)
    misfit = _misfit(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn, (None, *batch), named)
    if misfit is not None:
        name = type(loss_fn).__name__ if criterion else getattr(loss_fn, "__name__", "loss_fn")
        advice = f"its arguments are the model and {origin}"
        if criterion:
            advice = f"write lambda model, x, y: {name}()(model(x), y)"
        elif isinstance(getattr(loss_fn, "__self__", None), nn.Module):
            advice = f"of a method of the model, write lambda model, *batch: model.{name}(*batch)"
        call = _call(name, ("model", *("..." for _ in batch)), named)
        raise CaptureError(f"the loss function is called as {call}, which does not fit: {misfit}; {advice}")


def check_forward(model: nn.Module, batch: Sequence[object], named: Mapping[str, object], origin: str) -> None:
    """Refuse inputs that ``model.forward`` cannot be called with.

    A model passes whose hooks or whose ``__call__`` may give forward other arguments, or whose signature nobody knows.

    Args:
        model: called with the inputs.
        batch: positional arguments.
        named: keyword arguments.
        origin: where the inputs come from, in words.

    Raises:
        CaptureError: says how it is called, and why that does not fit.
    """
    hooked = model._forward_pre_hooks or compat_hooks.global_module_hooks()[0]
    if hooked or type(model).__call__ is not nn.Module.__call__:
        return
    misfit = _misfit(model.forward, batch, named)
    if misfit is None:
        return
    call = _call(type(model).__name__, tuple("..." for _ in batch), named)
    one = len(batch) == 1 and isinstance(batch[0], list | tuple)
    advice = "; a tuple or a list is one argument, *inputs are as many as it holds" if one else ""
    raise CaptureError(
        f"the model is called as {call}, which does not fit: {misfit}; its arguments are {origin}{advice}"
    )


def _misfit(function: Callable[..., object], args: Sequence[object], named: Mapping[str, object]) -> str | None:
    """Return why a function cannot be called with such arguments; None where it can, or nobody can tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        return str(error)
    return None


def _call(name: str, args: tuple[str, ...], named: Mapping[str, object]) -> str:
    return f"{name}({', '.join([*args, *(f'{key}=...' for key in named)])})"


def _shown(value: object) -> str:
    return repr(value) if value is None or isinstance(value, str) else type(value).__name__
