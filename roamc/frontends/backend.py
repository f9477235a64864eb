"""The torch.compile backend: ``torch.compile(model, backend="roamc", options={...})``.

Found through the entry point group ``torch_dynamo_backends``: no import is needed. If roamc cannot plan
a graph, training goes on with torch's own aot_eager at full save, after one warning; if a program fails while it runs,
the rest of the step and all later steps run operator by operator, with the same numbers.
"""

from __future__ import annotations

import functools
import logging
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import fx

from roamc import compat_aot, compat_dynamo, exchange, notices, ticker
from roamc.budget import asks_for_fewer_bytes, is_absolute, is_share
from roamc.capture import joint, recurrent, torch_faults
from roamc.capture.shared import shared_by
from roamc.capture.torch_faults import Fault
from roamc.codegen.partition import partitioned
from roamc.errors import BudgetError, CaptureError, OptionError, OtherStepError, RoamcError
from roamc.frontends.dynamic_shapes import BySize, has_open_sizes
from roamc.frontends.planned_again import PlannedAgain
from roamc.frontends.record import REMEMBERED, Record
from roamc.graph import TrainGraph
from roamc.graph.memory import WROTE_OVER
from roamc.interruptions import TRACED, HeldSignals, interruption, uninterrupted
from roamc.notices import lost_budget, reason_of, warn_of_failure
from roamc.options import Options
from roamc.planning import together
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned
from roamc.planning.search import options_of
from roamc.runtime.fallback import Boxed, interpreter
from roamc.runtime.open_calls import Held, OpenCalls
from roamc.runtime.program import OnFailure, Pair, Whole
from roamc.units import Bytes, format_bytes

log = logging.getLogger(__name__)


def roamc(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one dynamo graph; dynamo calls this as its backend.

    Args:
        gm: the graph as dynamo captured it.
        example_inputs: its inputs, fake.
        options: see :class:`roamc.options.Options`.
        mode: must be None; torch refuses ``mode`` together with ``options``.

    Returns:
        A function that takes the graph's inputs and returns its outputs.

    Raises:
        OptionError: an option is unknown or out of range, or a mode was given.
        BudgetError: no plan fits ``memory_budget``.
    """
    if mode is not None:
        raise OptionError(f"roamc has no modes; got mode={mode!r}. Use options={{...}}")
    return compile_graph(gm, example_inputs, options_of(options), Record())


roamc.roamc_options = lambda keywords: options_of(keywords.get("options"))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Small:
    """Which pieces of a model that torch.compile splits need not keep a share of eager's memory as their budget.

    Attributes:
        nbytes: a piece for which eager takes at most these bytes.
        share: a piece for which eager takes at most this share of the largest piece of the model before it.
    """

    nbytes: Bytes = 1 << 20
    share: float = 0.01


SMALL = Small()

_HELD: weakref.WeakKeyDictionary[object, Held] = weakref.WeakKeyDictionary()
"""What open calls hold, by the model or function whose pieces they run."""

_LARGEST: weakref.WeakKeyDictionary[object, Bytes] = weakref.WeakKeyDictionary()
"""Bytes that eager takes for the largest piece so far, by the model or function whose pieces they are."""

LATEST: deque[Plan] = deque(maxlen=REMEMBERED)
"""Plans of the most recent torch.compile graphs of this process. Plans only: programs would keep their arenas."""


def compile_graph(
    gm: fx.GraphModule, example_inputs: list[Any], options: Options, record: Record
) -> Callable[..., Any]:
    """Compile one dynamo graph by AOTAutograd, with roamc's partition and compilers.

    If a size of the inputs is symbolic, each combination of sizes gets a program when it first comes.

    Args:
        gm: the graph as dynamo captured it.
        example_inputs: its inputs, fake.
        options: what the user set.
        record: gets the programs and the reasons of failures; its name, if any, becomes that of the plans.

    Returns:
        A function that takes the graph's inputs and returns its outputs. If roamc cannot plan the graph, torch's
        ``aot_eager`` or eager PyTorch runs it, after a warning.

    Raises:
        Exception: roamc cannot plan the graph, and the option ``strict`` is set.
        OptionError: planning refuses the value of an option.
        BudgetError: no plan fits ``memory_budget``.
    """
    about = record if record.name else compat_dynamo.compiled_module() or compat_dynamo.compiled_code() or record
    split, caller = compat_dynamo.graph_break(gm), compat_dynamo.eager_caller()
    piece = split is not None or compat_dynamo.beside_a_break() or caller is not None
    held = record.held if record.name else _HELD.setdefault(caller or about, record.held)
    record.pieces |= piece
    job = _Job(_name(gm, record), options, record, about, split, piece, held)
    job.check_split()
    if caller is not None:
        job.check_caller(caller)
    if any(isinstance(value, torch.Tensor) and value.is_nested for value in _values(gm, example_inputs)):
        advice = "pad it, by torch.nested.to_padded_tensor, and pass a mask"
        job.fall_back(CaptureError(f"the graph has a nested (jagged) tensor; {advice}"), "eager PyTorch")
        return gm.forward
    fault = torch_faults.fault_of(gm, example_inputs, compat_dynamo.traced_code())
    if fault is not None:
        job.leave_to_eager(fault, caller)
    if not has_open_sizes(example_inputs):
        return job.compile_fixed(gm, example_inputs)[0]
    if notices.is_new(about, "sizes"):
        log.info("roamc plans each input size of %s separately, when it first comes", job.name)
    return BySize(gm, example_inputs, job, options.max_plans)


def _values(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[Any]:
    """What goes into a graph of dynamo, and what its nodes make as far as dynamo has noted it."""
    yield from inputs
    yield from (node.meta.get("example_value") for node in gm.graph.nodes)


def _name(gm: fx.GraphModule, record: Record) -> str:
    """The model's class where it is known, numbered from its second graph on; else that of a part, or the function."""
    if record.name:
        return record.name if not record.programs else f"{record.name} (graph {len(record.programs) + 1})"
    module = compat_dynamo.compiled_module()
    if module is not None:
        return type(module).__name__
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            kind = next(iter(stack.values()))[1]
            return kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__
    return compat_dynamo.compiled_function() or "graph"


ONE_BY_ONE = "Run the backward of a call before the next call, use roamc.train_step for the whole step"
"""Advice about open calls."""


DATA_DEPENDENT = "Dynamic shape operator"
"""What torch says of a split at an operator whose results have a shape that depends on data."""

APART = "Change the line that splits the model, use roamc.train_step for the whole step"
"""Advice about several programs of one model."""


@dataclass(frozen=True)
class _Job:
    """What is known of one dynamo graph, whatever its sizes.

    Attributes:
        name: for logs and reports.
        options: what the user set.
        record: gets the programs.
        about: the model or function that warnings are about; each is given once.
        split: where dynamo ended the graph before the model's end; None if it did not.
        piece: whether dynamo has split the model, before this graph or behind it, or runs what is around it in eager.
        held: what open calls of the model hold, all its pieces together.
    """

    name: str
    options: Options
    record: Record
    about: object
    split: str | None
    piece: bool
    held: Held

    def compile_fixed(self, gm: fx.GraphModule, inputs: list[Any]) -> tuple[Callable[..., Any], Callable[[], None]]:
        """Compile the graph, with known sizes; return the compiled function, and one that forgets its plans."""
        calls = OpenCalls(self.held)
        if not asks_for_fewer_bytes(self.options.memory_budget):
            return self.compile_for(gm, inputs, calls, 1)
        compiled = PlannedAgain(gm, inputs, self, calls)
        return compiled, compiled.forget

    def compile_for(
        self, gm: fx.GraphModule, inputs: Sequence[Any], calls: OpenCalls, number: int, *, lowest: bool = False
    ) -> tuple[Callable[..., Any], Callable[[], None]]:
        """Compile the graph as :meth:`compile_fixed` does, for ``number`` calls that are open at one time.

        Args:
            gm: the graph.
            inputs: its inputs, fake.
            calls: counts the open calls.
            number: how many of them the budget is to hold for, together.
            lowest: plan for the lowest peak, in place of the budget.
        """
        job = replace(self, options=replace(self.options, memory_budget="min")) if lowest else self
        unit = _Unit(job, calls, number)
        return unit.compile(gm, list(inputs)), unit.forget

    def refuse_calls(self, number: int, error: BudgetError) -> None:
        """Warn that no plan keeps the budget for all open calls together.

        Raises:
            BudgetError: that, if the option ``strict`` is set.
        """
        message = (
            f"{number} calls of {self.name!r} wait for backward at one time, and with what they hold "
            f"{error.reason}. {ONE_BY_ONE}, or raise the budget"
        )
        instead = "; the plan has the lowest peak"
        notices.warn_or_raise(self.about, "open calls", BudgetError(message, error.plan), self.options, instead)

    def refuse_more_calls(self, number: int, planned: int) -> None:
        """Warn that more calls are open than the plan counts, and that it is not planned again.

        Raises:
            BudgetError: that, if the option ``strict`` is set.
        """
        message = (
            f"the number of calls of {self.name!r} that wait for backward at one time keeps growing: {number} now, and "
            f"the plan is for {planned}; memory_budget={self.options.memory_budget!r} IS NOT KEPT for more. "
            f"{ONE_BY_ONE}"
        )
        notices.warn_or_raise(self.about, "more calls", BudgetError(message), self.options)

    def check_together(self, plan: Plan, calls: OpenCalls) -> None:
        """Warn if a plan, and what calls of other programs of the model hold meanwhile, need more than the budget.

        Args:
            plan: of the program that is about to run.
            calls: counts the open calls of that program.

        Raises:
            BudgetError: that, if the option ``strict`` is set.
        """
        budget = self.options.memory_budget
        beside = max(calls.beside, self.held.nbytes - calls.nbytes)
        together_bytes = beside + plan.needed_bytes
        if not is_absolute(budget):
            return
        if not beside or together_bytes <= (plan.budget_bytes or 0):
            return
        message = (
            f"memory_budget={budget!r} holds for each program of the model by itself: {self.name!r} needs "
            f"{format_bytes(plan.needed_bytes)} while others, which wait for their backward, hold "
            f"{format_bytes(beside)}: together {format_bytes(together_bytes)}, and what runs in eager between them "
            f"comes on top. {APART if self.piece else ONE_BY_ONE}, or halve the budget"
        )
        notices.warn_or_raise(self.about, "together", BudgetError(message, plan), self.options)

    def check_split(self) -> None:
        """Warn that a budget holds for a part of the model alone."""
        if self.split and asks_for_fewer_bytes(self.options.memory_budget):
            whole = "" if DATA_DEPENDENT in self.split else ", or use roamc.train_step"  # which has no such shapes
            notices.warn(
                self.about,
                f"split at {self.split}",
                f"memory_budget={self.options.memory_budget!r} holds for each piece of {self.name!r} by itself, and "
                f"they may take more together: torch.compile splits the model at {self.split}. Change that "
                f"line{whole}",
            )

    def check_caller(self, caller: CodeType) -> None:
        """Warn that a budget holds for the parts of a function alone, which itself runs in eager."""
        if asks_for_fewer_bytes(self.options.memory_budget):
            notices.warn(
                self.record if self.record.name else caller,
                "in eager",
                f"memory_budget={self.options.memory_budget!r} holds for each part of {caller.co_qualname} by itself "
                "that torch.compile compiles, and they may take more together: it runs the function in eager, for "
                "which TORCH_LOGS=graph_breaks has the reason. roamc.train_step may take the model as it is",
            )

    def leave_to_eager(self, fault: Fault, caller: CodeType | None) -> NoReturn:
        """Warn that torch.compile computes the graph wrongly, and have its function run in eager; raise it if strict.

        Dynamo then compiles what the function calls. Where that has the fault, one warning has been enough.

        Args:
            fault: of the graph.
            caller: the function that calls it, if that runs in eager.
        """
        has_warned = caller is not None and not notices.is_new(caller, fault.name)
        notices.is_new(compat_dynamo.compiled_code(), fault.name)
        if not has_warned:
            self.fall_back(CaptureError(fault.said), "eager PyTorch")
        self.record.in_eager = True
        raise compat_dynamo.left_to_eager(fault.said)

    def excused(self, plan: Plan) -> bool:
        """Whether a piece is too small for its share of eager's memory to matter, see :class:`Small`.

        Args:
            plan: that of the piece at its lowest peak.
        """
        if not self.piece or not is_share(self.options.memory_budget):
            return False
        largest = _LARGEST.get(self.about, 0)
        return max(plan.baseline_bytes, plan.needed_bytes) <= max(SMALL.nbytes, int(largest * SMALL.share))

    def note_size(self, plan: Plan) -> None:
        """Remember the largest piece of the model so far."""
        _LARGEST[self.about] = max(plan.baseline_bytes, _LARGEST.get(self.about, 0))

    def say_excused(self, plan: Plan) -> str:
        """Warn that a small piece takes more than its share; return the same as a note for its plan."""
        budget = self.options.memory_budget
        note = (
            f"memory_budget={budget!r} is not kept by this small piece of a split model, which needs "
            f"{format_bytes(plan.needed_bytes)}: it has its lowest peak"
        )
        notices.warn(
            self.about,
            "small piece",
            f"{note}. Pieces of {self.name!r} for which eager takes at most {format_bytes(SMALL.nbytes)}, or "
            f"{SMALL.share:.0%} of the largest before, may do so",
        )
        return note

    def say_dropped(self) -> None:
        """Warn that more combinations of sizes were used than keep a plan, so that one was dropped."""
        limit = self.options.max_plans
        notices.warn(
            self.about,
            "max_plans",
            f"{self.name!r} has been called with more than max_plans={limit} combinations of input sizes; each new "
            "one is planned when it comes, and the plan used longest ago is dropped. Pad batches to fewer sizes, or "
            "raise max_plans",
        )

    @property
    def on_failure(self) -> OnFailure | None:
        """What a program that fails while it runs calls; None if the failure is to be raised."""
        if self.options.strict:
            return None
        return functools.partial(_failed, weakref.ref(self.record), weakref.ref(self.about), self.name, self.options)

    def explained(self, error: Exception) -> Exception:
        """``error``; under a share as budget, a budget error of a piece of a split model gets advice to use bytes."""
        if not isinstance(error, BudgetError) or not self.piece or not is_share(self.options.memory_budget):
            return error
        return BudgetError(
            f"{error.reason}. A share holds for each piece that torch.compile splits the model into, and this one "
            "cannot keep it: give memory_budget in bytes, which small pieces keep",
            error.plan,
        )

    def fall_back(self, error: Exception, who: str) -> None:
        """Warn that ``error`` ended planning and ``who`` runs the graph now.

        It is raised if the option ``strict`` is set, if it is about options, other ranks' steps, or an interruption.
        """
        exchange.give_up(error, self.record.shared_groups)
        stopped = interruption(error)
        if stopped is not None or self.options.strict or isinstance(error, OptionError | BudgetError | OtherStepError):
            raise stopped or error
        reason = reason_of(error)
        self.record.fallbacks.append(reason)
        notices.warn(
            self.about,
            re.sub(r"\d+", "#", reason),
            f"roamc could not plan {self.name!r} and falls back to {who}{lost_budget(self.options)}: {reason} "
            "(options={'strict': True} raises)",
        )
        log.debug("planning %s failed", self.name, exc_info=error)


def _failed(
    record: weakref.ref[Record], about: weakref.ref[Any], name: str, options: Options, error: Exception
) -> None:
    """Note and warn that a program has failed while it ran; weak references, as the record holds the programs."""
    live_record = record()
    if live_record is not None:
        live_record.fallbacks.append(reason_of(error))
    warn_of_failure(about(), name, options, error)


class _Unit:
    """Compiles one graph: AOTAutograd calls ``partition``, ``forward`` and, at the first backward, ``backward``.

    For a graph without backward it calls ``inference`` alone.

    Args:
        job: what is known of the graph.
        calls: counts the calls of the program that wait for their backward.
        number: how many of them the plan is for.
    """

    def __init__(self, job: _Job, calls: OpenCalls, number: int) -> None:
        self.job = job
        self.calls = calls
        self.number = number
        self.name = job.name
        self.options = job.options
        self.pair: Pair | None = None
        self.program: Pair | Whole | None = None
        self._groups: list[object] = []
        self._signals = HeldSignals(traces=True, numbers=())
        self.notes = (f"torch.compile splits the model at {job.split}; each piece has a plan",) if job.split else ()

    def forget(self) -> None:
        """Drop the plan from the record, and its free arenas; arenas in use go when their backward has run."""
        if self.program is not None:
            self.job.record.remove(self.program)
            self.program.executable.pool.clear()

    def compile(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Return the compiled function of a graph whose sizes are known; the graph's own if AOTAutograd refuses it."""
        exchange.begin()
        backend = compat_aot.aot_backend(
            forward=self.forward, backward=self.backward, inference=self.inference, partition=self.partition
        )
        try:
            with (
                ticker.planning(self.name, self.options.memory_budget),
                uninterrupted(TRACED, traces=True) as self._signals,
                recurrent.decomposed(),
                compat_aot.writes_marked(WROTE_OVER),
            ):
                compiled: Callable[..., Any] = backend(gm, inputs)
        except (RoamcError, compat_dynamo.DynamoError) as error:
            exchange.give_up(error, self.job.record.shared_groups)
            raise
        except Exception as error:  # AOTAutograd takes less than eager does
            self.job.fall_back(shared_by(error) or error, "eager PyTorch")
            return gm.forward
        return compiled

    def partition(
        self, graph: fx.GraphModule, inputs: Sequence[Any], **how: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph as torch does at full save, plan both halves as one graph, and split the planned graph.

        Args:
            graph: AOTAutograd's graph of forward and backward.
            inputs: its inputs.
            how: what AOTAutograd passes besides; ``num_fwd_outputs`` must be there.

        Returns:
            (forward, backward) of the planned graph, which may save other tensors than torch's halves; torch's halves
            if planning fails and the options allow a fallback.
        """
        halves = compat_aot.default_partition(graph, inputs, **how)
        static = how.get("static_lifetime_input_indices") or ()
        outputs = how["num_fwd_outputs"]
        planned = self._guarded(lambda: self._plan_pair(*halves, outputs, static))
        if planned is None:
            return halves
        self.pair, parts = planned
        forward, backward = parts
        return forward, backward

    def forward(self, gm: fx.GraphModule, _: list[Any]) -> Boxed:
        """Return the program's forward half; an interpreter of ``gm`` if there is no program."""
        compat_aot.donate_nothing()
        return torch_faults.unwatched(gm, boxed(self.pair.forward) if self.pair is not None else interpreter(gm))

    def backward(self, gm: fx.GraphModule, _: list[Any]) -> Boxed:
        """Return the program's backward half; an interpreter of ``gm`` if there is no program."""
        return boxed(self.pair.backward) if self.pair is not None else interpreter(gm)

    def inference(self, gm: fx.GraphModule, _: list[Any]) -> Boxed:
        """Plan a graph without backward; return its program, or an interpreter of ``gm`` if that fails."""
        static = compat_aot.static_inputs()
        whole = self._guarded(lambda: self._plan_whole(lambda: joint.inference(gm, static, self.name)))
        return torch_faults.unwatched(gm, boxed(whole) if whole is not None else interpreter(gm))

    def _plan_pair(
        self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, static: Sequence[int]
    ) -> tuple[Pair, tuple[fx.GraphModule, fx.GraphModule]]:
        many = {"in_flight": self.number, "calls": self.number > 1}
        planned = self._searched(lambda: joint.stitch(forward, backward, outputs, static, self.name).replace(**many))
        with together.on_all(self._groups, self.name):
            pair = Pair(
                planned,
                keep=self.options.keeps_arena,
                tune=self.options.tune,
                on_failure=self.job.on_failure,
                calls=self.calls,
            )
            parts = partitioned(planned.graph)
        self._remember(pair)
        self.job.check_together(planned.plan, self.calls)
        return pair, parts

    def _plan_whole(self, make: Callable[[], TrainGraph]) -> Whole:
        planned = self._searched(make)
        with together.on_all(self._groups, self.name):
            whole = Whole(
                planned, keep=self.options.keeps_arena, tune=self.options.tune, on_failure=self.job.on_failure
            )
        self._remember(whole)
        self.job.check_together(planned.plan, self.calls)
        return whole

    def _searched(self, make: Callable[[], TrainGraph]) -> Planned:
        """Plan the graph that ``make`` makes at each call; a small piece above its share gets the lowest peak.

        Ranks that plan together excuse a piece together, or none does.
        """
        graph = make().replace(notes=self.notes)
        groups = self._groups = together.groups_of(graph, self.options)
        try:
            planned = together.run(graph, self.options)
        except (BudgetError, OptionError) as error:  # of a few bytes, a share may be less than one
            if not self.job.piece or not is_share(self.options.memory_budget):
                raise
            least = error.plan if isinstance(error, BudgetError) else None
            refused = isinstance(least, Plan) and not self.job.excused(least)
            if together.any_of(groups, refused, self.name):
                raise
            planned = together.run(make().replace(notes=self.notes), replace(self.options, memory_budget="min"))
            if together.any_of(groups, not self.job.excused(planned.plan), self.name):
                raise
            note = self.job.say_excused(planned.plan)
            planned = replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, note)))
        self.job.note_size(planned.plan)
        return planned

    def _remember(self, program: Pair | Whole) -> None:
        self.program = program
        self.job.record.add(program)
        LATEST.append(program.executable.planned.plan)

    def _guarded(self, plan: Callable[[], Any]) -> Any:
        """Run ``plan``; if it fails, warn once and give None, unless the options or the user's budget are at fault.

        Planning may take minutes. Handlers of signals run at once meanwhile, and outside of the modes of the trace.
        """
        try:
            with compat_aot.outside(), self._signals.let_through():
                return plan()
        except Exception as error:  # law 8: whatever fails in here, training goes on
            self.job.fall_back(self.job.explained(error), "torch's aot_eager")
            return None


def boxed(function: Callable[[list[Any]], Sequence[Any]]) -> Boxed:
    """Return ``function`` in AOTAutograd's boxed calling convention: it gets a list of arguments and may empty it."""

    def run(args: list[Any]) -> Sequence[Any]:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
