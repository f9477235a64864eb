"""Turn the words of the command line into a plan and its explanation."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roamc import ticker
from roamc.budget import NO_TIME, parse_budget
from roamc.capture.moved import built_for, device_of
from roamc.cli import configs, dumps, zoo
from roamc.cli.asked import Request
from roamc.cli.models import AUTOCAST_NAMES, MODELS, is_function, is_path, settings_of
from roamc.cli.stages import StagePlan
from roamc.cli.words import NO_OPTIMIZER, check_optimizer, options_in, settings_in, settings_of_optimizer
from roamc.codegen.source import emit
from roamc.cost import DeviceProfile, load_profile, step_seconds
from roamc.errors import SMALLER, BudgetError, OptionError
from roamc.frontends import devices
from roamc.frontends.arguments import check_clip
from roamc.frontends.largest import Fit, Largest
from roamc.frontends.max_batch import check_options, check_sizes, limits_batch
from roamc.frontends.mesh import Mesh, check_tokens, noted, notes_on, on_mesh, parse_mesh, running_split
from roamc.frontends.stages import Stage, ends_note, stage_of, stage_settings
from roamc.frontends.workload import OPTIMIZERS, Workload, capture, from_file
from roamc.graph import TrainGraph, copied, main_device
from roamc.options import Options
from roamc.planning import kept_plans, search
from roamc.planning.plan import Plan
from roamc.planning.planned import LARGER, Planned
from roamc.report.curve import trace
from roamc.report.explain import Explanation, Lives, explain, find_peak, lives_of
from roamc.report.frontier import Point, frontier
from roamc.report.picture import Course, Picture, draw, follow
from roamc.settings import Setting
from roamc.solvers.warm_up import warm_up
from roamc.units import Seconds, format_bytes

Say = Callable[[str], None]
"""A function that is called with a few words on what is being done."""


def answer(
    request: Request, *, source: bool = False, curve: bool = False, say: Say = lambda stage: None
) -> Explanation:
    """Build, capture and plan the step of ``request``, and return the explanation of its plan.

    Args:
        request: the model and the options.
        source: whether to emit the program as well, for ``Explanation.source``.
        curve: whether to plan for other peaks as well, for ``Explanation.curve``; takes as long as half a dozen plans.
        say: called with a few words on what is being done.

    Raises:
        OptionError: an unknown model, setting, optimizer or option; names the nearest.
        CaptureError: the step cannot be captured.
        BudgetError: the plan does not fit the budget.
    """
    first = explained(request, source=source, curve=curve, say=say)
    return first.with_curve(say) if curve else first.report


@dataclass(frozen=True)
class Explained:
    """The explanation of a plan, and what may follow it.

    Attributes:
        report: the explanation, without the curve.
    """

    report: Explanation
    _mesh: Mesh
    _trials: search.PlanSearch | None
    _before: Course | None
    _lives: Lives
    _profile: DeviceProfile

    def with_curve(self, say: Say) -> Explanation:
        """Plan for other peaks as well, and return the explanation with the curve; takes as long as half a dozen plans.

        Only where the curve was asked for. ``say`` is called with a few words on what is being done.
        """
        assert self._trials is not None
        plan = self.report.plan
        say("getting the solvers ready")
        warm_up()
        with self._mesh.planned_for():
            curve = trace(self._trials, plan, lambda stage: say(f"planning {plan.name}, the curve: {stage}"))
        return dataclasses.replace(self.report, curve=curve)

    def drawn(self, report: Explanation) -> Picture:
        """Return the picture of the plan, with ``report`` as its explanation; only where it was asked for."""
        assert self._before is not None
        return draw(report, self._before, report.graph, self._lives, self._profile)


def explained(
    request: Request, *, source: bool = False, curve: bool = False, drawn: bool = False, say: Say = lambda stage: None
) -> Explained:
    """Build, capture and plan the step of ``request``, and return the explanation of its plan before any curve.

    Args:
        request: the model and the options.
        source: whether to emit the program as well, for ``Explanation.source``.
        curve: whether :meth:`Explained.with_curve` is going to be called.
        drawn: whether :meth:`Explained.drawn` is going to be called.
        say: called with a few words on what is being done.

    Raises:
        OptionError, CaptureError, BudgetError: as :func:`answer`.
    """
    options, mesh = options_of(request), mesh_of(request)
    with mesh.planned_for():
        graph, seconds = _captured(request, options, mesh, say)
        lives = lives_of(graph, eager=True)
        profile = load_profile(main_device(graph), options.profile)
        eager = find_peak(graph, lives)  # planning moves the nodes
        before = follow(graph, lives, profile) if drawn else None
        planned, trials = _planned(request, graph, options, seconds, say, many=curve)
    planned = dataclasses.replace(planned, plan=_of_mesh(planned.plan, request, mesh))
    lives = lives_of(planned.graph)
    report = explain(eager, planned, lives, emit(planned.graph).listing if source else "")
    if request.is_dump:
        report = dataclasses.replace(report, pieces=dumps.pieces_in(request))
    return Explained(report, mesh, trials, before, lives, profile)


def points(request: Request, budgets: Sequence[str], *, say: Say = lambda stage: None) -> tuple[Point, ...]:
    """Plan the step of ``request`` under each of several budgets; ``request.memory_budget`` should be None.

    Args:
        request: the model and the options.
        budgets: budgets as users write them, such as "6GiB", "80%" or "min".
        say: called with a few words on what is being done.

    Returns:
        One point for each budget, in their sequence; ``fits`` is False where no plan keeps the budget.

    Raises:
        OptionError: an unknown model, setting, optimizer or option, or one of ``budgets`` is no budget.
        CaptureError: the step cannot be captured.
    """
    options, mesh = options_of(request), mesh_of(request)
    parsed_budgets = [budget for budget in map(parse_budget, budgets) if budget is not None]
    with mesh.planned_for():
        graph, _ = _captured(request, options, mesh, say)
        say("getting the solvers ready")
        warm_up()
        say(f"planning {graph.name}, {len(parsed_budgets)} budgets")
        frontier_points = frontier(graph, options, parsed_budgets)
    check_tokens(frontier_points[0].plan)
    return frontier_points


def stages(request: Request, *, say: Say = lambda stage: None) -> tuple[StagePlan, ...]:
    """Plan every stage of the pipeline of ``request``, whose ``stage`` should be None.

    Args:
        request: the model and the options; its mesh has several stages. A budget is that of each stage.
        say: called with a few words on what is being done.

    Returns:
        The plans, from the first stage on; ``fits`` is False where no plan keeps the budget.

    Raises:
        OptionError: an unknown model, setting, optimizer or option; there is one stage alone; or the model has its ends
            in one piece with its layers.
        CaptureError: the step cannot be captured.
    """
    options, mesh = options_of(request), mesh_of(request)
    if mesh.pp == 1:
        raise OptionError("--stage all needs a mesh of several stages, such as --mesh pp=8")
    asked = [dataclasses.replace(request, stage=number) for number in range(mesh.pp)]
    captures: dict[tuple[Setting, ...], tuple[TrainGraph, Seconds]] = {}
    results = []
    with mesh.planned_for():
        for each in (asked[-1], *asked[:-1]):  # the last may be refused
            ends = tuple(_stage(each).ends.values())
            if ends not in captures:
                captures[ends] = _captured(each, options, mesh, say)
            graph, seconds = captures[ends]
            graph = copied(graph).replace(**_stage(each).of_graph)
            results.append(_stage_plan(each, graph, options, seconds, say))
    return (*results[1:], results[0])


def _stage_plan(request: Request, graph: TrainGraph, options: Options, seconds: Seconds, say: Say) -> StagePlan:
    stage = _stage(request)

    def say_stage(text: str) -> None:
        say(f"stage {stage.number}: {text}")

    try:
        planned, _ = _planned(request, graph, options, seconds, say_stage)
    except BudgetError as error:
        lowest: Any = error.plan
        return StagePlan(stage, lowest, lowest.step_seconds + lowest.added_seconds, fits=False)
    plan = _of_mesh(planned.plan, request, mesh_of(request))
    profile = load_profile(main_device(planned.graph), options.profile)
    return StagePlan(
        stage,
        plan,
        step_seconds(planned.graph, profile),
        fits=plan.fits is not False,
    )


def largest(request: Request, size: str, limits: tuple[int, int], *, recomputation: bool, say: Say) -> Fit:
    """Find the largest value of a size, such as the batch, for which the step of ``request`` fits its budget.

    Args:
        request: the model and the options; functions of files are called on the meta device.
        size: name of a setting of the model or argument of the function.
        limits: the smallest and the largest value.
        recomputation: whether operators may run again and values be encoded.
        say: called with a few words on what is being done.

    Raises:
        OptionError: an unknown model, setting, optimizer or option, the size among them; or a budget that limits none.
        CaptureError: the step cannot be captured, or does not grow with the size.
        BudgetError: not even the smallest fits.
    """
    options, mesh = options_of(request), mesh_of(request)
    check_options(options)
    smallest, most = check_sizes(*limits)

    def sized(number: int) -> Request:
        return dataclasses.replace(request, sets=(*request.sets, f"{size}={number}"), meta=True)

    def captured(number: int) -> TrainGraph:
        try:
            return _captured(sized(number), options, mesh, ticker.say)[0]
        except OptionError as error:
            hint = "; --size names the one to look for" if f" {size!r}" in str(error) else ""
            raise OptionError(f"{error}{hint}") from None

    trials = Largest(captured, options, smallest, most, recomputation)
    with mesh.planned_for(), ticker.listening(say):
        fit = trials.run()
    assert trials.answer is not None  # else there is an error
    return dataclasses.replace(fit, plan=_of_mesh(trials.answer.plan, sized(fit.size), mesh))


def picture(request: Request, *, source: bool = False, curve: bool = False, say: Say = lambda stage: None) -> Picture:
    """Build, capture and plan the step of ``request``, and return the picture of its plan.

    The picture has the explanation that :func:`answer` returns, the live bytes at every step, and the place of every
    storage.

    Args:
        request: the model and the options.
        source: whether to emit the program as well, for ``Explanation.source``.
        curve: whether to plan for other peaks as well, for ``Explanation.curve``; takes as long as half a dozen plans.
        say: called with a few words on what is being done.

    Raises:
        OptionError: an unknown model, setting, optimizer or option; names the nearest.
        CaptureError: the step cannot be captured.
        BudgetError: the plan does not fit the budget.
    """
    first = explained(request, source=source, curve=curve, drawn=True, say=say)
    return first.drawn(first.with_curve(say) if curve else first.report)


def _captured(request: Request, options: Options, mesh: Mesh, say: Say) -> tuple[TrainGraph, Seconds]:
    if request.is_dump:
        start = time.perf_counter()
        with ticker.listening(say):
            graph = _timed(dumps.graph_in(request), request, options)
        return graph, time.perf_counter() - start
    with redirect_stdout(sys.stderr), built_for(device_of(request.device)):  # what users' code prints is no answer
        workload = on_mesh(workload_of(request), mesh)
    say(f"capturing {workload.name}")
    start = time.perf_counter()
    with running_split(workload.model, mesh, workload.tp_plan), redirect_stdout(sys.stderr):
        graph = capture(
            workload,
            forward_backward=request.forward_backward,
            update=request.optimizer != NO_OPTIMIZER,
            clip_grad_norm=request.clip_grad_norm,
            device=_device(request),
        )
    notes = notes_on(workload.model, mesh, _tp_plan(request))
    notes += ends_note(settings_of(request.target), _stage(request))
    if request.target in MODELS and Path(request.target, "config.json").is_file():
        notes = (f"this is the built-in model; ./{request.target} plans the folder of that name", *notes)
    graph = graph.replace(**_stage(request).of_graph, notes=(*graph.notes, *notes))
    return _timed(graph, request, options), time.perf_counter() - start


def _timed(graph: TrainGraph, request: Request, options: Options) -> TrainGraph:
    """The graph, with a note on whose times its plan has if they are not those of this machine or a profile by name."""
    graph = devices.noted(graph, options, _device(request))
    if options.profile is not None or load_profile(main_device(graph)).name == "measured":
        return graph
    note = "times are those of a shipped profile; roamc calibrate measures this machine"
    return graph.replace(notes=(*graph.notes, note))


def _planned(
    request: Request, graph: TrainGraph, options: Options, seconds: Seconds, say: Say, *, many: bool = False
) -> tuple[Planned, search.PlanSearch | None]:
    """The plan, with the ``seconds`` of capture among its times, and its search, for ``many`` more plans.

    There is no search where one plan is asked for, and that of an earlier run fits.
    """
    smaller, trials = _smaller(request, options), None
    say(f"planning {graph.name}")
    with ticker.listening(lambda text: say(f"planning {graph.name}, {text}")):
        file = kept_plans.file_for(graph, options)
        planned = None if many else kept_plans.taken(file, graph, options)
        if planned is None or planned.plan.fits is False:
            trials = search.PlanSearch(graph, options, many=many or options.gpu is not None)
            try:
                planned = trials.run()
                kept_plans.keep(file, planned.plan)
                planned = _with_way_out(planned, trials, smaller)
            except BudgetError as error:
                error.args = (f"{error}{smaller}",)
                raise
    plan = dataclasses.replace(planned.plan, seconds={"capture": seconds, **planned.plan.seconds})
    return dataclasses.replace(planned, plan=plan), trials


def _smaller(request: Request, options: Options) -> str:
    """The command that looks for the largest batch with the same options, behind a colon; "" where none is known to."""
    sized = request.sizes.get("batch") is not None or any(text.startswith("batch=") for text in request.sets)
    limits, function = limits_batch(options), is_function(request.target)
    if request.is_file or not request.words or not (limits or options.gpu) or (function and not sized):
        return ""
    stage = () if request.stage is None else ("--stage", str(request.stage))
    budget = ("--memory-budget", request.memory_budget) if limits and request.memory_budget else ()
    return f": {shlex.join(('roamc', 'max-batch', *request.words, *stage, *budget))}"


def _with_way_out(planned: Planned, trials: search.PlanSearch, smaller: str) -> Planned:
    """The plan; where its GPU does not hold it under the budget asked for, with a note on what would.

    ``smaller`` is what :func:`_smaller` returned.
    """
    plan = planned.plan
    if plan.fits is not False:
        return planned
    other = trials.fit(trials.terms_of_total(plan.room_bytes)).plan
    more = f" with {other.added_share:.1%} more time than with memory_budget={NO_TIME}"
    note = f"it fits{more if other.added_share else ''}: leave the memory budget out{SMALLER}{smaller}"
    if other.fits is False:
        least = f"at least {format_bytes(other.total_bytes)}, with as much recomputation as helps"
        note = f"{least}. {LARGER}{SMALLER}{smaller}"
    return dataclasses.replace(planned, plan=dataclasses.replace(plan, notes=(note, *plan.notes)))


def _of_mesh(plan: Plan, request: Request, mesh: Mesh) -> Plan:
    """The plan, checked, with notes on the mesh if ``request`` names one."""
    if request.mesh is None:
        return plan
    layers = {**settings_of(request.target), **settings_in(request)}.get("layers")
    return noted(plan, mesh, _stage(request), layers)


def _stage(request: Request) -> Stage:
    return stage_of(mesh_of(request).pp, request.stage)


def mesh_of(request: Request) -> Mesh:
    """Return the mesh of ``request``: one rank if it names none.

    Raises:
        OptionError: an axis is unknown, its size is no number of ranks, or ``fsdp`` goes without an update.
    """
    if request.mesh is None and request.tp_plan:
        raise OptionError("--tp-plan says how a mesh splits layers: give --mesh tp=N as well")
    mesh = Mesh() if request.mesh is None else parse_mesh(request.mesh)
    if mesh.fsdp > 1 and (request.forward_backward or request.optimizer == NO_OPTIMIZER):
        raise OptionError(f"fsdp={mesh.fsdp} plans whole steps: leave --forward-backward and --optimizer none out")
    return mesh


def options_of(request: Request) -> Options:
    """Return roamc's options for ``request``, its memory budget and device profile among them.

    Raises:
        DumpError: the target is a file without a graph that can be read.
        OptionError: an option, the device or the limit of clipping is unknown or out of range, or the profile is not
            one of the device.
        ProfileError: there is no such profile.
    """
    check_clip(request.clip_grad_norm)
    none = f"--optimizer {NO_OPTIMIZER}" if request.optimizer == NO_OPTIMIZER else ""
    left_out = "--forward-backward" if request.forward_backward else none
    if left_out and request.clip_grad_norm is not None:
        raise OptionError(f"--clip-grad-norm is part of the update, which {left_out} leaves out")
    if request.forward_backward and request.optimizer is not None:
        raise OptionError("--optimizer names the update, which --forward-backward leaves out")
    return devices.options_for(options_in(request), _device(request))


def _device(request: Request) -> torch.device:
    return dumps.device_in(request) if request.is_file else device_of(request.device)


def workload_of(request: Request) -> Workload:
    """Return the model of ``request``, built in or from a file, with its batch, loss and optimizer.

    With ``pp`` in the mesh the model is one stage of the pipeline. Its matrices are whole whatever ``tp`` is;
    :func:`roamc.frontends.mesh.on_mesh` splits them.

    Raises:
        OptionError: an unknown model, setting or optimizer; names the nearest; or stages do not divide the layers, or
            there is no such stage; or the target brings an optimizer, and the request names one.
        CaptureError: the function of a file does not return what it should.
    """
    check_optimizer(request.optimizer)
    settings = stage_settings(settings_in(request), settings_of(request.target), _stage(request))
    if request.is_archive:
        workload = dumps.workload_in(request)
    elif is_function(request.target):
        workload = from_file(request.target, settings, meta=request.meta)
    elif request.target not in MODELS and is_path(request.target):
        own = {} if request.autocast is None else {"dtype": "float32"}
        workload = configs.make(request.target, {**own, **settings})
    else:
        workload = zoo.make(request.target, settings)
    if workload.optimizer is not None and request.optimizer is not None:
        raise OptionError(f"{request.target} returns an optimizer: leave --optimizer {request.optimizer} out")
    if request.optimizer in OPTIMIZERS:
        make = functools.partial(OPTIMIZERS[request.optimizer], **settings_of_optimizer(request))
        name = f"--optimizer {request.optimizer}"
        workload = dataclasses.replace(workload, optimizer=make, optimizer_name=name)
    if request.tp_plan:
        workload = dataclasses.replace(workload, tp_plan=_tp_plan(request))
    if request.gradient_checkpointing:
        workload = _checkpointed(workload)
    return workload if request.autocast is None else _under_autocast(workload, request.autocast)


def _checkpointed(workload: Workload) -> Workload:
    """The workload with a checkpoint around each layer of its model.

    Raises:
        OptionError: the model has no checkpoints of its own.
    """
    model = workload.model
    enable = getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))
    try:
        if enable is None:
            raise ValueError(f"{type(model).__name__} has no gradient checkpointing of its own")
        enable({"use_reentrant": False})
    except ValueError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise OptionError(f"{reason}: give a --memory-budget, and leave --gradient-checkpointing out") from None
    note = "each layer is a checkpoint (gradient checkpointing), and eager's peak is that with them"
    return dataclasses.replace(workload, notes=(*workload.notes, note))


def _under_autocast(workload: Workload, name: str) -> Workload:
    """The workload with its loss under ``torch.autocast``, of CUDA where it is planned for a GPU."""
    loss_fn, dtype = workload.loss_fn, AUTOCAST_NAMES[name]
    assert loss_fn is not None  # models of the command line have one

    @functools.wraps(loss_fn)
    def run(model: nn.Module, *batch: Any, **named: Any) -> torch.Tensor:
        with torch.autocast("cpu", getattr(torch, dtype)):
            return loss_fn(model, *batch, **named)

    note = f"forward and loss run under autocast to {dtype}"
    return dataclasses.replace(workload, loss_fn=run, notes=(*workload.notes, note))


def _tp_plan(request: Request) -> dict[str, str]:
    pairs = [text.rpartition("=") for text in request.tp_plan]
    if any(not pattern for pattern, _, _ in pairs):
        raise OptionError("--tp-plan takes PATTERN=WORD, such as 'layers.*.up=colwise'")
    return {pattern: word for pattern, _, word in pairs}
