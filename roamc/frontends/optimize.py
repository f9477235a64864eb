"""roamc's functions for Python programs: ``optimize``, ``train_step``, ``plan`` and ``plans``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from roamc import ticker
from roamc.capture.batch import take_apart
from roamc.capture.step_trace import LossFunction
from roamc.compat_dynamo import compile_in_place, has_recurrent_layers
from roamc.errors import OptionError, RoamcError
from roamc.frontends import devices
from roamc.frontends.arguments import check_forward, check_module, check_not_compiled
from roamc.frontends.backend import LATEST, compile_graph
from roamc.frontends.compiled_again import Carried
from roamc.frontends.eager_calls import checked
from roamc.frontends.mesh import Mesh, noted, notes_on, parse_mesh, part_of, running_split
from roamc.frontends.record import Record
from roamc.frontends.stages import Stage, stage_of
from roamc.frontends.train_step import TrainStep
from roamc.frontends.workload import Workload, capture, optimizer_of, with_loss
from roamc.graph import TrainGraph
from roamc.options import Options
from roamc.planning import together
from roamc.planning.plan import Plan
from roamc.planning.search import options_of

_RECORDS: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()


def optimize(model: nn.Module, **options: Any) -> nn.Module:
    """Compile ``model`` in place with roamc and return it. Names in its ``state_dict`` do not change.

    Planning happens at the first call. Gradients arrive in ``.grad`` as usual, so any optimizer, loss and training loop
    works. If torch.compile runs a whole call in eager, a warning says so, or an error with option ``strict``. A deep
    copy or pickle of the model is optimized like it, with the same options and plans of its own.

    Another ``torch.compile`` of the model, or of what is around it, leaves it apart with its plan and warns, or raises
    with ``strict``; if its backend is roamc, one plan covers all. ``model.compile(...)`` takes the place of
    ``optimize``.

    Args:
        model: the module.
        options: see :class:`roamc.options.Options`.

    Raises:
        CaptureError: ``model`` is not a module, or is compiled with another backend already.
        OptionError: an option is unknown or out of range.
    """
    check_module(model, "optimize")
    check_not_compiled(model)
    model.__dict__["__call__"] = _optimized(model, options, has_recurrent_layers(model))
    return model


def _optimized(model: nn.Module, settings: Mapping[str, Any], recurrent: bool) -> Carried:
    """Compile a module, which may have no attributes yet, and return what it is to carry.

    Args:
        model: the module.
        settings: options as the user set them.
        recurrent: whether the module has recurrent layers.
    """
    parsed = options_of(settings)
    record = Record(type(model).__name__)

    def roamc(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return record.calls.counted(compile_graph(gm, example_inputs, parsed, record))

    roamc.roamc_options = lambda _: parsed  # type: ignore[attr-defined]
    around = functools.partial(checked, weakref.ref(model), record, parsed)
    compile_in_place(model, roamc, around, recurrent=recurrent)
    _RECORDS[model] = record
    call = model._compiled_call_impl
    assert call is not None
    optimize_copy = functools.partial(_optimized, settings=settings, recurrent=recurrent)
    carried = model._compiled_call_impl = Carried(optimize_copy, model, call)
    return carried


def train_step(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    *,
    clip_grad_norm: float | None = None,
    **options: Any,
) -> TrainStep:
    """Compile a whole training step into one planned program: forward, loss, backward and optimizer update.

    Args:
        model: called by ``loss_fn``. Parameters may be on the meta device, for planning only.
        loss_fn: ``loss_fn(model, *batch, **named)`` returns a scalar tensor.
        optimizer: torch.optim.SGD, Adam or AdamW over the model's parameters. Learning-rate schedulers work.
        clip_grad_norm: clip the global 2-norm of all gradients to this, like ``torch.nn.utils.clip_grad_norm_`` of the
            model's parameters, as far as ``optimizer`` holds them; its order does not matter.
        options: see :class:`roamc.options.Options`.

    Returns:
        ``step(*batch, **named) -> loss``, detached. Parameters, buffers and optimizer state are updated in place, so
        ``state_dict()`` saves and loads as usual. ``.grad`` stays None: each gradient is freed after its update. Batch
        tensors that require a gradient get it accumulated into their ``.grad``, as by ``backward()``.

    The batch may be any nest of lists, tuples, dicts, dataclasses and the like, with tensors, numbers and strings.
    Numbers are constants of the program: another number makes another plan. Pass a tensor to avoid that.

    What Python reads during tracing is fixed for that batch shape. Modules, optimizer groups, and what the loss
    function reads of the objects that it names are watched: a change makes a new plan. Side effects of Python (lists,
    counters, prints) happen during tracing only.

    Handlers of signals, Ctrl-C's among them, wait until a step is whole, and until tracing has ended; a second signal
    does not wait for tracing.

    Hooks of modules, of tensors inside the model, and ``Tensor.register_hook`` of parameters become part of the
    program. Optimizer step hooks run at every step; pre-hooks run before forward, so they may set what the update
    reads, such as a learning rate, but must not draw random numbers. Hooks that read ``.grad`` or only look at a
    gradient, and pre-hooks that write to parameters, are refused by name at the first call.

    ``torch.amp.GradScaler`` is not supported, as it scales between backward and update: use bfloat16.

    Raises:
        CaptureError: the optimizer is not supported, or an argument is not what it should be.
        OptionError: an option is unknown or out of range.
    """
    return TrainStep(model, loss_fn, optimizer, options_of(options), clip_grad_norm)


def plan(
    model: nn.Module,
    *batch: Any,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    clip_grad_norm: float | None = None,
    mesh: str | Mapping[str, int] | None = None,
    tp_plan: Mapping[str, str] | None = None,
    stage: int | None = None,
    device: str | None = None,
    forward_backward: bool = False,
    **keywords: Any,
) -> Plan:
    """Plan a step without running it. No weight is read or allocated.

    With ``loss_fn`` and ``optimizer`` the whole step is planned, as :func:`train_step` would run it. Without
    ``loss_fn`` the loss is the ``.loss`` of the model's output, as transformers models have it where the batch has
    labels; AdamW is then the default optimizer. Where the output has none, forward and backward of ``model(*batch)``
    are planned, as with ``torch.compile``. Model and batch may be on the meta device and larger than memory.

    Keywords that name options are options, see :class:`roamc.options.Options`. Other keywords belong to the batch if
    they hold tensors or name a parameter of ``loss_fn`` (without it, of ``model.forward``). If a batch keyword has the
    name of an option, use ``train_step(...).plan(...)``, whose keywords all belong to the batch.

    Args:
        model: the module; one stage of a pipeline if ``mesh`` has ``pp``.
        batch: arguments of ``loss_fn`` after the model, or of the model.
        loss_fn: as for :func:`train_step`.
        optimizer: as for :func:`train_step`.
        clip_grad_norm: as for :func:`train_step`.
        mesh: plan one rank of this mesh, such as ``{"tp": 8}``; the other ranks need not exist. ``dp`` does not change
            a rank's plan.
        tp_plan: patterns of layer names to "colwise" (splits the outputs of an ``nn.Linear``) or "rowwise" (splits its
            inputs), such as ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``. Default: the model's attribute
            ``tp_plan``, which transformers models have.
        stage: number of the pipeline stage, from 0. It has ``pp - stage`` micro-batches in flight, all of which a
            budget covers.
        device: "cuda" plans for a GPU that need not be there, with the option ``profile`` of one ("h100" by default);
            the option ``gpu`` does so, too. "cpu" or None plans for the device of the model.
        forward_backward: plan without the update, as with ``torch.compile``: with ``loss_fn`` of the loss, else with
            gradients of all outputs handed in.
        keywords: options, and keyword arguments of the batch.

    Inside a process group this does not communicate. The plan assumes that all ranks have the same graph and options; a
    note says so.

    Raises:
        CaptureError: the model or ``loss_fn`` cannot be called with the batch, or what it does cannot be captured.
        OptionError: ``loss_fn`` is given without ``optimizer``, or an argument of the update with ``forward_backward``;
            a keyword is neither an option nor part of the batch, an option is out of range, or the mesh does
            not fit the model.
        BudgetError: no plan fits ``memory_budget``.
    """
    check_module(model, "plan")
    _check_update(loss_fn, optimizer, clip_grad_norm, forward_backward)
    if tp_plan is not None and mesh is None:
        raise OptionError("tp_plan says how a mesh splits layers: give mesh={'tp': N} as well")
    named, settings = _parted(model.forward if loss_fn is None else loss_fn, keywords)
    planned_for = devices.asked_for(device, settings.get("gpu"), model)
    step = _Step(loss_fn, clip_grad_norm, forward_backward, planned_for, named, settings)
    if mesh is None and stage is None:
        return step.plan(model, batch, optimizer, Stage())
    return _plan_on(parse_mesh(mesh or {}), stage, model, batch, optimizer, tp_plan, step.plan)


def _check_update(
    loss_fn: LossFunction | None,
    optimizer: torch.optim.Optimizer | None,
    clip_grad_norm: float | None,
    forward_backward: bool,
) -> None:
    """Refuse arguments of :func:`plan` of which one leaves out what another asks for."""
    if forward_backward:
        for name, value in (("optimizer", optimizer), ("clip_grad_norm", clip_grad_norm)):
            if value is not None:
                raise OptionError(f"{name} is part of the update, which forward_backward=True leaves out")
    elif loss_fn is not None and optimizer is None:
        raise OptionError(
            "plan takes loss_fn and optimizer together, for a whole step: give an optimizer, such as "
            "optimizer=torch.optim.AdamW(model.parameters()); forward_backward=True plans without the update"
        )


@dataclasses.dataclass(frozen=True)
class _Step:
    """What :func:`plan` is to plan, but for the model, its batch and its optimizer, of which a rank may have a part."""

    loss_fn: LossFunction | None
    clip_grad_norm: float | None
    forward_backward: bool
    device: torch.device
    named: dict[str, Any]
    settings: dict[str, Any]

    def plan(
        self, model: nn.Module, batch: tuple[Any, ...], optimizer: torch.optim.Optimizer | None, stage: Stage
    ) -> Plan:
        """Return the plan of a model that is a pipeline's stage, or all of it."""
        options, limit = devices.options_for(self.settings, self.device), self.clip_grad_norm
        make = None if optimizer is None else lambda parameters: optimizer
        workload = Workload(type(model).__name__, model, batch, self.loss_fn, make, named=self.named)
        if self.loss_fn is None:
            check_forward(model, batch, self.named, "those of roamc.plan behind the model")
        with ticker.planning(workload.name, options.memory_budget):
            if self.forward_backward:
                step_or_graph: Workload | TrainGraph = capture(workload, forward_backward=True, device=self.device)
            else:
                step_or_graph = with_loss(workload, limit, device=self.device)
            if isinstance(step_or_graph, TrainGraph):
                graph = devices.noted(step_or_graph, options, self.device).replace(**stage.of_graph)
                return together.alone(graph, options).plan
        assert step_or_graph.loss_fn is not None
        step = TrainStep(model, step_or_graph.loss_fn, optimizer or optimizer_of(step_or_graph), options, limit)
        step_plan = step.plan_of_stage(stage, batch, self.named, self.device)
        return dataclasses.replace(step_plan, notes=(*step_plan.notes, *step_or_graph.notes))


def _plan_on(
    mesh: Mesh,
    number: int | None,
    model: nn.Module,
    batch: tuple[Any, ...],
    optimizer: torch.optim.Optimizer | None,
    tp_plan: Mapping[str, str] | None,
    planned: Callable[..., Plan],
) -> Plan:
    """The plan of one rank of ``mesh``, in stage ``number``, by ``planned(model, batch, optimizer, stage)``."""
    if mesh.pp > 1 and number is None:
        raise OptionError(
            f"pp={mesh.pp}: roamc.plan plans the module that it gets; give it the layers of one stage, and the number "
            f"of the stage, stage=0 to {mesh.pp - 1}"
        )
    stage = stage_of(mesh.pp, number)
    with mesh.planned_for():
        part, its_optimizer = part_of(model, optimizer, mesh, tp_plan)
        with running_split(part, mesh, tp_plan):
            rank_plan = planned(part, batch, its_optimizer, stage)
    rank_plan = dataclasses.replace(rank_plan, notes=(*rank_plan.notes, *notes_on(part, mesh, tp_plan)))
    return noted(rank_plan, mesh, stage)


def _parted(function: Callable[..., Any], keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the keywords of :func:`plan` into those of the batch and options, as its docstring says."""
    options = {field.name for field in dataclasses.fields(Options)}
    called = _keywords_of(function)
    named = {
        name: value
        for name, value in keywords.items()
        if name not in options
        and (name in called or any(isinstance(leaf, torch.Tensor) for leaf in take_apart(value)[0]))
    }
    return named, {name: value for name, value in keywords.items() if name not in named}


def _keywords_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters; none if it has no signature."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def plans(compiled: nn.Module | TrainStep | None = None) -> list[Plan]:
    """Return the plans of an optimized module, oldest first, or of a train step, least recently used first.

    Without an argument: the latest plans of ``optimize`` and ``torch.compile(model, backend="roamc")`` in this process,
    oldest first.

    Raises:
        RoamcError: the object does not come from :func:`optimize` or :func:`train_step`.
    """
    if compiled is None:
        return list(LATEST)
    if isinstance(compiled, TrainStep):
        return compiled.plans
    if compiled in _RECORDS:
        if compiled._compiled_call_impl not in (None, compiled.__dict__["__call__"]):
            raise RoamcError(
                f"this {type(compiled).__name__} was compiled again by its method compile, which takes the place of "
                "roamc.optimize: it has no plans"
            )
        return _RECORDS[compiled].plans
    if isinstance(getattr(compiled, "__dict__", {}).get("__call__"), Carried):
        raise RoamcError(
            f"this {type(compiled).__name__} was not made by roamc.optimize: it is a shallow copy of one that was, and "
            "runs in eager; call roamc.optimize on the copy, or make it by copy.deepcopy"
        )
    raise RoamcError(
        f"this {type(compiled).__name__} was not made by roamc.optimize or roamc.train_step; "
        "for torch.compile(..., backend='roamc') call roamc.plans() with no argument"
    )
