"""Workloads of the command line and of ``max_batch``: a model with its batch, loss and optimizer."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from roamc.capture import joint
from roamc.capture.batch import put_together, take_apart
from roamc.capture.moved import CPU, moved, traced_for
from roamc.capture.step import capture_step
from roamc.capture.step_trace import LossFunction, StepRequest
from roamc.errors import CaptureError, OptionError, nearest, with_article
from roamc.frontends import own_loss
from roamc.frontends.arguments import check_call, check_forward
from roamc.graph import TrainGraph
from roamc.optim import CompAct
from roamc.settings import OPTIMIZERS as NAMES
from roamc.settings import Setting

Optimizer = torch.optim.Optimizer
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]

_FACTORIES: tuple[OptimizerFactory, ...] = (
    lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    CompAct,
)

OPTIMIZERS: dict[str, OptimizerFactory] = dict(zip(NAMES, _FACTORIES, strict=True))
"""Each optimizer of the command line by its name."""


@dataclass(frozen=True)
class Workload:
    """A model to plan, with all that a step of it takes.

    Attributes:
        name: the name in reports.
        model: the model; its parameters may be on the meta device.
        batch: arguments of ``loss_fn`` behind the model, or of the model where there is no ``loss_fn``.
        loss_fn: ``loss_fn(model, *batch, **named)`` returns the loss. None takes the loss that the model's output has,
            and where it has none plans forward and backward of ``model(*batch, **named)``.
        optimizer: makes the optimizer of the model's parameters, or of their names and them where it is CompAct or a
            partial call of it; None takes AdamW, and asks for none where there is no loss.
        named: keyword arguments beside ``batch``.
        optimizer_name: how the user has asked for the optimizer, for messages.
        notes: sentences for the notes of the plan.
        tp_plan: pattern of layers' names to how a mesh splits them; empty to take the model's own ``tp_plan``.
    """

    name: str
    model: nn.Module
    batch: tuple[Any, ...]
    loss_fn: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, Any] = field(default_factory=dict)
    optimizer_name: str = "the optimizer"
    notes: tuple[str, ...] = ()


def capture(
    workload: Workload,
    *,
    forward_backward: bool = False,
    update: bool = True,
    clip_grad_norm: float | None = None,
    device: torch.device = CPU,
) -> TrainGraph:
    """Capture the graph that :func:`roamc.plan` would plan: the whole step, or forward and backward alone.

    Args:
        workload: what to capture. Where neither it nor the model's output has a loss, only forward and backward.
        forward_backward: leave the update out, as ``torch.compile`` does; the gradients are handed to the caller.
            Without a loss function those of all outputs are handed in, whether or not one of them is a loss.
        update: whether the optimizer's update of a step with a loss is part of it.
        clip_grad_norm: limit of the gradients' norm, as for :func:`roamc.train_step`; for whole steps only.
        device: where the step is to run: a CPU, or a GPU that need not be there.

    Raises:
        CaptureError: the step cannot be captured, there is no loss for the optimizer or the limit that were asked for,
            or an operator of the step does not run on ``device``; says what to do.
    """
    _check_inputs(workload)
    workload_or_graph = workload if forward_backward else with_loss(workload, clip_grad_norm, update, device)
    if isinstance(workload_or_graph, TrainGraph):
        return workload_or_graph
    workload = workload_or_graph
    with traced_for(device):
        module = forward_backward or not update
        graph = _capture_module(workload) if module else _capture_update(workload, clip_grad_norm, device)
    return moved(graph.replace(notes=(*graph.notes, *workload.notes)), device)


def with_loss(
    workload: Workload, clip_grad_norm: float | None = None, update: bool = True, device: torch.device = CPU
) -> Workload | TrainGraph:
    """Return ``workload`` with its own loss, or that of the model's output; without either, forward and backward.

    Args:
        workload: with a loss function, it is returned as it is.
        clip_grad_norm: as for :func:`capture`.
        update: as for :func:`capture`.
        device: as for :func:`capture`.

    Raises:
        CaptureError: there is no loss, and an optimizer or a limit was asked for.
    """
    if workload.loss_fn is not None:
        return workload
    with traced_for(device):
        graph = own_loss.capture_without(workload.model, workload.batch, workload.named, workload.name)
    told = update and workload.optimizer is not None
    if graph is None:
        note = own_loss.note("AdamW" if update and not told else "")
        return replace(workload, loss_fn=own_loss.returned_loss, notes=(*workload.notes, note))
    asked = workload.optimizer_name if told else "" if clip_grad_norm is None else "clip_grad_norm"
    own_loss.check_no_update(graph, asked)
    return moved(graph.replace(notes=(*graph.notes, *workload.notes)), device)


def _capture_update(workload: Workload, clip_grad_norm: float | None, device: torch.device) -> TrainGraph:
    leaves, nest = take_apart((workload.batch, dict(workload.named)))
    loss_fn = workload.loss_fn
    assert loss_fn is not None  # without one there is no step to capture

    def spread(model: nn.Module, batch: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
        return loss_fn(model, *batch, **named)

    def rebuild(values: Any) -> tuple[Any, ...]:
        return tuple(put_together(values, nest))

    optimizer = optimizer_of(workload)
    request = StepRequest(
        workload.model, spread, optimizer, tuple(leaves), rebuild, clip_grad_norm, runs_on=device, repeated=True
    )
    return capture_step(request).graph.replace(name=workload.name)


def optimizer_of(workload: Workload) -> Optimizer:
    """Make the optimizer of ``workload``.

    Raises:
        CaptureError: the model has no parameters.
    """
    if next(workload.model.parameters(), None) is None:
        raise CaptureError(f"{workload.name}: the model has no parameters, and a step would change nothing")
    make = workload.optimizer or OPTIMIZERS["adamw"]
    by_name = getattr(make, "func", make) is CompAct
    return make(workload.model.named_parameters() if by_name else workload.model.parameters())


def from_file(target: str, settings: Mapping[str, Setting], *, meta: bool = False) -> Workload:
    """Run a user's Python file, call one function of it, and return the workload that it makes.

    Args:
        target: ``FILE.py:function``, path and name of the function.
        settings: keyword arguments of the function.
        meta: call the function with the meta device as torch's default, so that weights take no memory.

    Raises:
        OptionError: there is no such file or function, or the function does not take such settings.
        CaptureError: the function returns something else than ``(model, inputs[, loss_fn[, optimizer]])``, or ends
            Python.
    """
    path, _, name = target.rpartition(":")
    if Path(target.rstrip(":")).is_file():
        raise OptionError(f"{target} names no function; write for example {target.rstrip(':')}:make")
    if not Path(path).is_file():
        raise OptionError(f"{path or target}: no such file")
    with _going_on(target):
        function = _function(_module(Path(path)), name, path)
        _check_function(target, function, settings)
        with torch.device("meta") if meta else contextlib.nullcontext():
            returned = function(**settings)
    return made(name, returned, target)


def _check_function(target: str, function: Callable[..., Any], settings: Mapping[str, Setting]) -> None:
    """Refuse a module in the place of a function that makes it, and settings that are no arguments of the function."""
    if isinstance(function, nn.Module):
        kind = type(function).__name__
        raise OptionError(f"{target} is a {kind}, not a function; write a function that returns (model, inputs)")
    signature = inspect.signature(function)
    names = [
        name
        for name, each in signature.parameters.items()
        if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    unknown = next((name for name in settings if name not in names and not takes_all), None)
    if unknown is not None:
        arguments = f" Arguments: {', '.join(names)}" if names else " It has none"
        raise OptionError(f"{target} has no argument {unknown!r}{nearest(unknown, names)}{arguments}")
    try:
        signature.bind(**settings)
    except TypeError as error:
        advice = "; --set NAME=VALUE gives an argument" if "missing" in str(error) else ""
        raise OptionError(f"{target} cannot be called with {_listed(settings)}: {error}{advice}") from None
    for name, value in settings.items():
        _check_kind(target, value, signature.parameters.get(name))


_NUMBERS = (int, float, "int", "float")
"""Annotations of arguments that are numbers."""


def _check_kind(target: str, value: Setting, argument: inspect.Parameter | None) -> None:
    """Refuse a text as an argument that is a number by its default or annotation; None is an argument by any name.

    Raises:
        OptionError: names the setting.
    """
    if argument is None or not isinstance(value, str):
        return
    default = "" if argument.default is argument.empty else argument.default
    if argument.annotation in _NUMBERS or type(default) in (int, float):
        raise OptionError(f"{target}: {argument.name} is a number, and {argument.name}={value} gives a text")


@contextlib.contextmanager
def _going_on(target: str) -> Iterator[None]:
    """Within this context, let a file that ends Python, by ``sys.exit`` or ``argparse``, be an error of ``target``."""
    try:
        yield
    except SystemExit as end:
        raise CaptureError(
            f"{target} ends Python, with exit code {end.code!r}, in the place of returning a model; let what the file "
            'does as a script stand under if __name__ == "__main__":'
        ) from None


class _Loss(nn.Module):
    """A module whose ``forward(*batch, **named)`` returns ``loss_fn(model, *batch, **named)``."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *batch: Any, **named: Any) -> torch.Tensor:
        return self.loss_fn(self.model, *batch, **named)


def _of_mapping(workload: Workload, inputs: Mapping[str, Any]) -> Workload:
    """Return ``workload`` changed to pass the dictionary ``inputs`` as its loss function, or else its model, takes it.

    The items are keyword arguments, or the dictionary is the only one. A model that takes both gets keywords; a loss
    function does if a parameter of it has the name of an input.
    """
    loss_fn, model = workload.loss_fn, workload.model
    by_keywords = replace(workload, batch=(), named=dict(inputs))
    if loss_fn is None:
        return by_keywords if _takes(model.forward, **inputs) or not _takes(model.forward, inputs) else workload
    one, by_name = _takes(loss_fn, model, inputs), _takes(loss_fn, model, **inputs)
    if not by_name or (one and inspect.signature(loss_fn).parameters.keys().isdisjoint(inputs)):
        return workload
    return by_keywords


def _takes(function: Callable[..., Any], /, *args: Any, **named: Any) -> bool:
    """Whether a function's signature takes such arguments; False if it has none."""
    try:
        inspect.signature(function).bind(*args, **named)
    except (TypeError, ValueError):
        return False
    return True


def _check_inputs(workload: Workload) -> None:
    """Refuse inputs that the loss function, or without one the model, cannot be called with."""
    origin = "the inputs that come with the model"
    if workload.loss_fn is not None:
        check_call(workload.loss_fn, workload.batch, workload.named, origin)
    else:
        check_forward(workload.model, workload.batch, workload.named, origin)


def _capture_module(workload: Workload) -> TrainGraph:
    model = workload.model if workload.loss_fn is None else _Loss(workload.model, workload.loss_fn)
    return joint.capture(model, workload.batch, workload.named, workload.name, root=workload.model)


def _module(path: Path) -> ModuleType:
    """Run a user's file as a module named after it; its folder becomes the first on the import path, and stays there.

    What the file defines may import from there when it is called.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.path[:] = [folder, *(other for other in sys.path if other != folder)]
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        if before is not None:
            sys.modules[path.stem] = before
    return module


def _function(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    member = getattr(module, name, None)
    if callable(member):
        function: Callable[..., Any] = member
        return function
    if hasattr(module, name):
        raise OptionError(f"{path}: {name!r} is {with_article(type(member).__name__)}, not a function")
    names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    own = [key for key in names if getattr(vars(module)[key], "__module__", None) == module.__name__]
    functions = f" Its functions: {', '.join(own)}" if own else " It defines none"
    raise OptionError(f"{path} has no function {name!r}{nearest(name, names)}{functions}")


def made(name: str, returned: Any, target: str = "the function") -> Workload:
    """Make a workload of what a user's function has returned.

    Args:
        name: name of the workload in reports.
        returned: ``(model, inputs)``, ``(model, inputs, loss_fn)`` or ``(model, inputs, loss_fn, optimizer)``. A list
            or tuple of inputs has the positional arguments; another value is the only one. A dictionary has keyword
            arguments, or is the only argument: whichever the loss function takes, or the model if there is none. A
            model that takes both gets keywords; a loss function does if a parameter of it has the name of an input.
            Without a loss function, or with None, the ``.loss`` of the model's output is the loss, if it has one.
            The optimizer is one of torch's, or a function that makes one of an iterable of parameters.
        target: name of the function in error messages.

    Raises:
        CaptureError: ``returned`` has another form.
    """
    if not isinstance(returned, tuple) or not 2 <= len(returned) <= 4 or not isinstance(returned[0], nn.Module):
        raise CaptureError(
            f"{target} must return (model, inputs), (model, inputs, loss_fn) or (model, inputs, loss_fn, optimizer), "
            f"not {_kinds(returned)}"
        )
    model, inputs, *rest = returned
    loss_fn = rest[0] if rest else None
    if loss_fn is not None and not callable(loss_fn):
        raise CaptureError(f"{target}: loss_fn is a {type(loss_fn).__name__}, not a function of (model, *inputs)")
    batch = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    workload = Workload(name, model, batch, loss_fn)
    if isinstance(inputs, Mapping):
        workload = _of_mapping(workload, inputs)
    optimizer = rest[1] if len(rest) == 2 else None
    return workload if optimizer is None else replace(workload, optimizer=_factory(target, optimizer))


def _factory(target: str, returned: Any) -> OptimizerFactory:
    if isinstance(returned, Optimizer):
        optimizer: Optimizer = returned
        return lambda parameters: optimizer
    if not callable(returned):
        raise CaptureError(
            f"{target}: the optimizer is a {type(returned).__name__}, not an optimizer or a way to make one"
        )
    factory: OptimizerFactory = returned
    return factory


def _kinds(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


def _listed(settings: Mapping[str, Setting]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "no settings"
