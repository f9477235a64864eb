"""The ways in for Python: ``optimize``, ``train_step``, ``plan`` and ``plans``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from roamc import compat, pipeline
from roamc.backend import LATEST, Record, compile_graph
from roamc.capture import joint, recurrent
from roamc.capture.step import LossFunction
from roamc.errors import RoamcError
from roamc.options import parse_options
from roamc.plan import Plan
from roamc.train_step import TrainStep

_RECORDS: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()


def optimize(model: nn.Module, **options: Any) -> nn.Module:
    """Compile ``model`` in place with roamc and return it; names in its ``state_dict`` stay as they are.

    Gradients arrive in ``.grad`` as ever; any optimizer, loss and loop works. A deep copy or a pickle of the
    model is a plain module: call ``optimize`` on it again.

    Raises:
        OptionError: an option is unknown or out of range.
    """
    parsed = parse_options(options)
    record = Record(type(model).__name__)

    def roamc(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return compile_graph(gm, example_inputs, parsed, record)

    compat.compile_in_place(model, roamc)
    _RECORDS[model] = record
    return model


def train_step(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    *,
    clip_grad_norm: float | None = None,
    **options: Any,
) -> TrainStep:
    """A whole training step as one planned program: forward, loss, backward and update.

    Args:
        model: called by ``loss_fn``. Parameters may be on the meta device, for planning only.
        loss_fn: ``loss_fn(model, *batch)`` returns a scalar tensor.
        optimizer: torch.optim.SGD, Adam or AdamW over the model's parameters. Learning-rate schedulers work.
        clip_grad_norm: clip the global 2-norm of all gradients to this, as ``torch.nn.utils.clip_grad_norm_``.
        options: see :class:`roamc.options.Options`.

    Returns:
        ``step(*batch) -> loss``, detached. Parameters, buffers and optimizer state change in place, so that
        ``state_dict()`` of both saves and loads as usual. ``.grad`` stays None: gradients die at their update.

    What Python reads during the first call with a batch of some shape is fixed for that shape: global variables,
    tensors that the loss function closes over (by reference). Numbers and flags of modules are watched.

    Raises:
        CaptureError: the optimizer is not supported.
        OptionError: an option is unknown or out of range.
    """
    return TrainStep(model, loss_fn, optimizer, parse_options(options), clip_grad_norm)


def plan(
    model: nn.Module,
    *batch: Any,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    clip_grad_norm: float | None = None,
    **options: Any,
) -> Plan:
    """The plan without running anything: no weight is read or allocated.

    With ``loss_fn`` and ``optimizer`` the whole step is planned, as :func:`train_step` would run it; without,
    forward and backward of ``model(*batch)``, as ``torch.compile`` would run them. Model and batch may be on the
    meta device and far larger than memory.

    Raises:
        RoamcError: only one of ``loss_fn`` and ``optimizer`` was given.
        BudgetError: the plan does not fit ``memory_budget``.
    """
    if (loss_fn is None) != (optimizer is None):
        raise RoamcError("plan takes loss_fn and optimizer together, or neither")
    if loss_fn is not None and optimizer is not None:
        return train_step(model, loss_fn, optimizer, clip_grad_norm=clip_grad_norm, **options).plan(*batch)
    parsed = parse_options(options)
    with recurrent.decomposed():
        halves, outputs, static = compat.forward_backward(model, batch)
    if len(halves) == 1:
        graph = joint.inference(halves[0], static, type(model).__name__)
    else:
        graph = joint.stitch(halves[0], halves[1], outputs, static, type(model).__name__)
    return pipeline.run(graph, parsed).plan


def plans(compiled: nn.Module | TrainStep | None = None) -> list[Plan]:
    """The plans behind an optimized module or a train step, oldest first.

    With no argument: the latest plans of this process, which is the way to see those of
    ``torch.compile(model, backend="roamc")``.

    Raises:
        RoamcError: the object was not made by :func:`optimize` or :func:`train_step`.
    """
    if compiled is None:
        return list(LATEST)
    if isinstance(compiled, TrainStep):
        return compiled.plans
    if compiled in _RECORDS:
        return _RECORDS[compiled].plans
    raise RoamcError(
        f"this {type(compiled).__name__} was not made by roamc.optimize or roamc.train_step; "
        "for torch.compile(..., backend='roamc') call roamc.plans() with no argument"
    )
