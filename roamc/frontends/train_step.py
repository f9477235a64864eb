"""``roamc.train_step``: forward, loss, backward and the optimizer's update as one planned program."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from roamc import compat, exchange, notices, ticker
from roamc.capture import attributes, fully_sharded, python_keys, python_state, replicas
from roamc.capture.batch import Nest, check_batch, describe, geometry, put_together, take_apart
from roamc.capture.hooks import NodeHooks, check_iterators, hooks_key
from roamc.capture.moved import CPU, moved, traced_for
from roamc.capture.optimizers import rule_for
from roamc.capture.python_changes import changed
from roamc.capture.replicas import check_around, check_whole
from roamc.capture.shared import check_shared, check_state, shared_key
from roamc.capture.step import CapturedStep, Cohort, Source, capture_step, optimizer_key
from roamc.capture.step_trace import LossFunction, StepRequest
from roamc.compat_fsdp import take_apart as take_parameters_apart
from roamc.compat_modules import buffers_of, call_module, modules_of, parameters_of
from roamc.errors import CaptureError, RanksError, RoamcError, VerifyError
from roamc.frontends import optimizer_hooks
from roamc.frontends.arguments import (
    check_call,
    check_clip,
    check_loss_function,
    check_module,
    check_not_meta,
    check_optimizer,
)
from roamc.frontends.bound_step import BoundStep
from roamc.frontends.devices import noted
from roamc.frontends.returned_loss import with_advice
from roamc.frontends.stages import Stage
from roamc.graph.fingerprint import fingerprint
from roamc.graph.ranks import batch_of
from roamc.interruptions import TRACED, interruption, uninterrupted
from roamc.locks import CAPTURE, Lock
from roamc.options import Options
from roamc.planning import together
from roamc.planning.plan import Plan
from roamc.runtime.program import OnFailure, Whole
from roamc.units import Seconds

log = logging.getLogger(__name__)


class _Captures:
    """Says who captures a step: meanwhile the model holds other tensors, and functions of torch are exchanged.

    Attributes:
        thread: identity of the thread that captures; None if none does.
    """

    def __init__(self) -> None:
        self.thread: int | None = None


_captures = _Captures()
_locks: weakref.WeakKeyDictionary[nn.Module, Lock] = weakref.WeakKeyDictionary()
_locks_lock = Lock()


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    with CAPTURE.now:
        _captures.thread = threading.get_ident()
        try:
            yield
        finally:
            _captures.thread = None


def _lasts(fault: Callable[[], bool]) -> bool:
    """Whether a setting of the process is wrong while no other thread traces, which changes such settings meanwhile."""
    with CAPTURE.now:
        return fault()


def _lock_of(model: nn.Module) -> Lock:
    """One lock for all steps of a model: two at the same time would train, or capture, the same parameters."""
    with _locks_lock.now:
        return _locks.setdefault(model, Lock())


_Known = tuple[tuple[object, ...], python_keys.Seen]
"""What is known of a step without a trace: ``asked`` of :class:`_Key`, and what functions read, in all places."""


@dataclass(frozen=True, eq=False)
class _Key:
    """What a program was captured for: it serves steps for which all of this still holds.

    Attributes:
        asked: what is known before capture: of batch, functions, model, optimizer and torch's settings.
        places: what these functions read, see :class:`roamc.capture.python_keys.Seen`, but for ``left``.
        left: where the trace has left something, such as a longer list: nothing there counts.
        reads: what tracing has read of modules beside that.
        lasting: whether the trace has left all of this as it was. If not, as where the step turns a flag, the program
            serves this one step: it would not turn the flag in another.
    """

    asked: tuple[object, ...]
    places: dict[python_keys.Place, object]
    left: frozenset[python_keys.Place]
    reads: python_state.Reads
    lasting: bool

    @staticmethod
    def of(before: _Known, after: _Known, reads: python_state.Reads) -> _Key:
        """Return the key for what was known before a trace and behind it, and what it has read of modules."""
        left = changed(before[1].places, after[1].places, after[1].uses())
        places = _without(before[1].places, left)
        lasting = before[0] == after[0] and places == _without(after[1].places, left) and reads.hold()
        return _Key(before[0], places, left, reads, lasting)

    @property
    def batch(self) -> object:
        """The part of ``asked`` that describes the batch."""
        return self.asked[:2]

    def holds(self, asked: tuple[object, ...], places: dict[python_keys.Place, object]) -> bool:
        """Whether a step for which ``asked`` and ``places`` are known now is one that the program serves."""
        same = asked == self.asked and _without(places, self.left) == self.places
        return self.lasting and same and self.reads.hold()


def _without(
    places: dict[python_keys.Place, object], left: frozenset[python_keys.Place]
) -> dict[python_keys.Place, object]:
    return {place: value for place, value in places.items() if place not in left} if left else places


class TrainStep:
    """A function ``step(*batch) -> loss`` that updates parameters, buffers and optimizer state in place.

    :func:`roamc.train_step` makes it. A new batch shape, dtype, training mode or autocast state gets a plan
    of its own; the ``max_plans`` plans that were used last are kept. Copies and pickles carry model, loss
    function and optimizer, and plan anew.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        options: Options,
        clip_grad_norm: float | None = None,
    ) -> None:
        check_module(model, "train_step")
        check_loss_function(loss_fn)
        check_optimizer(optimizer)
        check_clip(clip_grad_norm)
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.options = options
        self.clip_grad_norm = clip_grad_norm
        check_whole(model)
        self._begin()

    def _begin(self) -> None:
        """Set what copies and pickles do not carry."""
        self._rule = rule_for(self.optimizer)
        self._steps: OrderedDict[_Key, BoundStep] = OrderedDict()
        self._shared: dict[object, None] = {}
        self._reduced: tuple[str, ...] | None = None
        self._sent: tuple[str, ...] = ()
        self._node_hooks = NodeHooks()
        optimizer_hooks.watch(self, self.optimizer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, /, *batch: Any, **named: Any) -> torch.Tensor:
        """Run one training step on ``loss_fn(model, *batch, **named)`` and return the loss, detached.

        Backward and the optimizer's update are done then: ``loss.backward()`` raises, and ``optimizer.step()`` warns.

        Raises:
            CaptureError: this batch or model cannot be captured; says what to do.
            BudgetError: the plan does not fit ``memory_budget``; nothing has run.
            RanksError: other ranks, which have to take this step too, take another, or have other values.
        """
        with self._others_told(before_plans=True):
            leaves, nest = take_apart((batch, named))
            check_batch(leaves)
            self._check_surroundings()
        with _lock_of(self.model).now, self._planned_alike():
            take_parameters_apart(self.model)
            bound, cohorts = self._bound(leaves, nest)
            before, after = optimizer_hooks.users_hooks(self.optimizer)
            if before:
                optimizer_hooks.run_before(before, self.optimizer, bound.held(), bound.updated())
                bound, cohorts = self._bound(leaves, nest)  # they may have changed the optimizer's groups
            run_after = functools.partial(optimizer_hooks.run_after, after, self.optimizer, bound.updated)
            return with_advice(bound.run(leaves, cohorts, run_after))

    def plan(self, /, *batch: Any, **named: Any) -> Plan:
        """Plan the step for a batch of this shape, without running it. Tensors may be on the meta device.

        Keyword arguments are the batch's, as they are for the step itself. On several ranks, each plans what the step
        takes if all ranks have the same, and waits for no other; a note of the plan says so.

        Raises:
            CaptureError: this batch or model cannot be captured; says what to do.
            BudgetError: the plan does not fit ``memory_budget``.
        """
        return self.plan_of_stage(Stage(), batch, named)

    def plan_of_stage(
        self, stage: Stage, batch: tuple[Any, ...], named: dict[str, Any], device: torch.device = CPU
    ) -> Plan:
        """Plan the step of one micro-batch of a pipeline's stage, as :meth:`plan`.

        Args:
            stage: what the model is of a pipeline.
            batch: positional arguments of the step.
            named: keyword arguments of the step.
            device: the device to plan for, as for :func:`roamc.frontends.workload.capture`.
        """
        leaves, nest = take_apart((batch, named))
        take_parameters_apart(self.model)
        self._key(leaves, nest)  # refuses what no plan is made for
        request = replace(self._request(leaves, nest), repeated=True, runs_on=device)
        with self._told():
            with traced_for(device):
                captured, _, seconds = _captured(request)
            graph = noted(moved(captured.graph, device), self.options, device).replace(**stage.of_graph)
            planned = together.alone(graph, self.options, self._meeting(captured))
        planned.plan.seconds["capture"] = seconds  # type: ignore[index]
        return planned.plan

    def _told(self) -> contextlib.AbstractContextManager[None]:
        """Return a context within which stderr tells of planning that takes long."""
        return ticker.planning(type(self.model).__name__, self.options.memory_budget)

    @property
    def plans(self) -> list[Plan]:
        """The plans in use, least recently used first."""
        return list({id(bound.whole): bound.plan for bound in self._steps.values()}.values())

    @property
    def latest(self) -> Whole:
        """The program of the last step.

        Raises:
            RoamcError: no step has run yet.
        """
        if not self._steps:
            raise RoamcError("no step has run yet; call the step once, or .plan(*batch) for the plan alone")
        return next(reversed(self._steps.values())).whole

    @property
    def source(self) -> str:
        """The emitted source of the program used last; empty before the first step."""
        return self.latest.executable.program.source if self._steps else ""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _check_surroundings(self) -> None:
        """Refuse contexts around this call that would have no effect on the step, or that no step can run in.

        Raises:
            CaptureError: names the context, such as ``torch.no_grad()``, anomaly detection, or another
                train_step's loss function; or the optimizer's ``step`` or ``nn.Module.__call__`` was replaced.
        """
        if _captures.thread == threading.get_ident():
            raise CaptureError(
                "a train_step is called inside loss_fn, or in a hook that runs there: a step cannot be part of "
                "another; call one after the other"
            )
        if torch.is_inference_mode_enabled():
            raise CaptureError("a train_step is called under torch.inference_mode(), where nothing can be trained")
        if not torch.is_grad_enabled():
            raise CaptureError(
                "a train_step is called under torch.no_grad(), where loss.backward() raises in eager: leave it out, or "
                "put torch.enable_grad() around the step"
            )
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "a train_step is called while a CUDA graph is captured: the graph would repeat the learning rate and "
                "the count of this one step; call the step itself, or use roamc.optimize"
            )
        if nn.Module.__call__ is not call_module and _lasts(lambda: nn.Module.__call__ is not call_module):
            raise CaptureError(
                f"nn.Module.__call__ was replaced, by {nn.Module.__call__.__qualname__}, which a planned step does not "
                "run: put it back, use hooks, or use roamc.optimize"
            )
        optimizer_hooks.check_step_method(self.optimizer)
        check_around(self.model)
        fully_sharded.check_settings(self.model)
        if torch.is_anomaly_enabled() and _lasts(torch.is_anomaly_enabled):
            raise CaptureError(
                "torch.autograd.detect_anomaly() is around a train_step, where it finds nothing: backward is a part of "
                "the planned program; leave it out, or look for the anomaly in eager or with roamc.optimize"
            )
        if compat.saved_tensor_hooks_active():
            raise CaptureError(
                "saved_tensors_hooks, such as save_on_cpu, are around a train_step, which plans by itself what it "
                "saves and how; leave them out, set memory_budget=, or use roamc.optimize"
            )

    def _request(self, leaves: Sequence[Any], nest: Nest) -> StepRequest:
        def rebuild(values: Sequence[Any]) -> tuple[Any, ...]:
            batch: tuple[Any, ...] = put_together(values, nest)
            return batch

        def spread(model: nn.Module, batch: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
            check_call(self.loss_fn, batch, named)
            check_iterators(self.loss_fn, "loss_fn")
            return self.loss_fn(model, *batch, **named)

        return StepRequest(
            self.model, spread, self.optimizer, tuple(leaves), rebuild, self.clip_grad_norm, reduced=self._reduced or ()
        )

    def _key(self, leaves: Sequence[Any], nest: Nest) -> _Known:
        """Return what is known of a step before capture: ``asked`` and ``places`` of its key, with nothing left out."""
        modules = modules_of(self.model)
        parameters, buffers = parameters_of(modules), buffers_of(modules)
        geometries = tuple(map(geometry, (*parameters, *buffers)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        seen = python_keys.Seen()
        asked = (
            nest.key(seen),
            tuple(describe(leaf, seen) for leaf in leaves),
            python_keys.of_called(self.loss_fn, seen),
            self.clip_grad_norm,
            python_state.of_modules(modules, seen),
            geometries,
            shared_key((*parameters, *buffers), tensors, self.optimizer),
            _ties(modules),
            python_state.of_torch(seen),
            torch.get_num_threads(),
            optimizer_key(self.optimizer, self._rule, parameters),
            hooks_key(modules, parameters, self._node_hooks, seen),
        )
        python_keys.complete(seen)
        return asked, seen

    def _bound(self, leaves: Sequence[Any], nest: Nest) -> tuple[BoundStep, dict[int, Cohort]]:
        """Return (program, cohorts) for a batch; the program is captured and planned now if none serves it.

        Args:
            leaves: tensors and other values of the batch.
            nest: how the batch was taken apart into them.

        Returns:
            The program, and what its :meth:`roamc.frontends.bound_step.BoundStep.cohorts_now` returns.
        """
        with self._others_told(before_plans=True):
            asked, seen = self._key(leaves, nest)
        alike = (entry for entry in reversed(self._steps) if entry.holds(asked, seen.places))
        key = next((entry for entry in alike if self._steps[entry].answers(leaves)), None)
        bound = self._steps[key] if key is not None else None
        cohorts = bound.cohorts_now() if bound is not None else None
        if key is None or bound is None or cohorts is None:
            exchange.begin()
            with self._others_told(), self._told():
                bound, reads = self._build(leaves, nest)
            fresh = _Key.of((asked, seen), self._key(leaves, nest), reads)
            if key is not None:
                del self._steps[key]
            key, self._steps[fresh] = fresh, bound
            cohorts = bound.cohorts_now() or {}
            if len(self._steps) > self.options.max_plans:
                self._warn_of_many(*list(self._steps)[-2:])
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return bound, cohorts

    @contextlib.contextmanager
    def _others_told(self, *, before_plans: bool = False) -> Iterator[None]:
        """Context manager: other ranks, which may run a program of this step, learn of an error inside.

        Args:
            before_plans: whether this rank has not begun to plan the step, as other ranks may have.
        """
        try:
            yield
        except Exception as error:
            if before_plans:
                exchange.begin()
            exchange.give_up(error, self._shared)
            self._forget_shared()
            raise

    @contextlib.contextmanager
    def _planned_alike(self) -> Iterator[None]:
        """Context manager: after an error inside all ranks plan anew, so that none runs what another has to plan."""
        try:
            yield
        except RanksError:
            self._forget_shared()
            raise

    def _forget_shared(self) -> None:
        """Forget all programs if ranks run them together."""
        if self._shared:
            self._steps.clear()

    def _build(self, leaves: Sequence[Any], nest: Nest) -> tuple[BoundStep, python_state.Reads]:
        """Capture and plan a step for a batch now; return (program, what tracing has read of modules).

        ``leaves`` and ``nest`` are what :func:`roamc.capture.batch.take_apart` returns for the batch. A program that
        serves the captured step already is used again, without planning.
        """
        self._warn_of_gradients()
        request = self._request(leaves, nest)
        captured, reads, seconds = _captured(request)
        check_not_meta(self.model)
        live_tensors = _given(captured.sources, self.model, leaves)
        check_state(captured.graph, live_tensors, self.optimizer)
        check_shared(captured.graph, captured.sources, live_tensors)
        meeting = self._meeting(captured)
        self._agree(captured, meeting)
        earlier = self._known(captured)
        if earlier is not None:  # forward has set an attribute to what it keeps, or a layer is another of the same kind
            return BoundStep(request, captured, self._rule, earlier.whole, earlier.plan), reads
        with _refused(captured.graph.name):
            groups = together.groups_of(captured.graph, self.options, meeting)
            planned = together.run(captured.graph, self.options, meeting)
            planned.plan.seconds["capture"] = seconds  # type: ignore[index]
            start = time.perf_counter()
            with together.on_all(groups, captured.graph.name):
                whole = Whole(
                    planned,
                    keep=self.options.keeps_arena,
                    tune=self.options.tune,
                    on_failure=self._on_failure(captured.graph.name),
                )
                whole.prepare()
        bound = BoundStep(request, captured, self._rule, whole, planned.plan)
        self._shared |= dict.fromkeys(agreement.group for agreement in planned.graph.agreements)
        planned.plan.seconds["emit"] = time.perf_counter() - start  # type: ignore[index]
        log.info("planned %s for %s", captured.graph.name, batch_of(planned.graph))
        return bound, reads

    def _meeting(self, captured: CapturedStep) -> tuple[str, ...]:
        """Return the groups whose ranks have to take this step at the same time, and so plan it together.

        They have parts of parameters (``fully_shard``) or copies of the model (DistributedDataParallel), and this is
        their first step. Later steps may be of another size on each rank.
        """
        if self._reduced is not None:
            return ()
        return tuple(dict.fromkeys((*replicas.groups_of(captured.replicas), *captured.groups)))

    def _agree(self, captured: CapturedStep, meeting: Sequence[str]) -> None:
        """Let ranks compare what they send at their first step, in the groups ``meeting``; later ones send the same."""
        fully_sharded.check_sequence(self._sent, captured.sent)
        if meeting:
            replicas.agreed(captured.replicas, captured.reduced, captured.graph.name)
            fully_sharded.agreed(captured.groups, captured.sent, captured.graph.name)
        if self._reduced is None:
            self._reduced, self._sent = captured.reduced, captured.sent

    def _warn_of_gradients(self) -> None:
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            notices.warn(
                self.model,
                "gradients",
                "parameters have a .grad from an earlier backward: train_step computes gradients of its own, and "
                "neither adds to .grad nor uses it. To accumulate over several batches, sum their losses in loss_fn",
            )

    def _warn_of_many(self, before: _Key, latest: _Key) -> None:
        batch = before.batch != latest.batch
        read = "the model, the optimizer, or what forward, hooks and loss read, such as a number that they count up. "
        notices.warn(
            self.model,
            "max_plans",
            f"{type(self.model).__name__!r} has been trained with more than max_plans={self.options.max_plans} "
            "combinations of sizes and settings; each new one is traced and planned for itself: what changed last is "
            + ("the batch's sizes or numbers. " if batch else read)
            + "Keep it fixed, hand it over as a tensor of the batch, or raise max_plans",
        )

    def _on_failure(self, name: str) -> OnFailure | None:
        """Return what a program that fails in the middle of a step calls with the error; None with option ``strict``.

        ``name`` is that of the graph. The function returned warns once for each reason.
        """
        if self.options.strict:
            return None
        return functools.partial(_failed, weakref.ref(self.model), name, self.options)

    def _known(self, captured: CapturedStep) -> BoundStep | None:
        """Return the first program in use that also runs ``captured``, a step captured anew; None if there is none."""
        if not self._steps:
            return None
        mark = fingerprint(captured.graph)
        return next((bound for bound in self._steps.values() if bound.serves(captured, mark)), None)


def _captured(request: StepRequest) -> tuple[CapturedStep, python_state.Reads, Seconds]:
    """Capture a step; return (step, what tracing has read of modules, seconds of wall time that this took).

    Raises:
        Exception: what capture raises, with a note that nothing was changed.
    """
    start = time.perf_counter()
    try:
        modules = tuple(request.model.modules())
        with uninterrupted(TRACED, traces=True), _capturing(), python_state.followed(modules) as reads:
            captured = capture_step(request)
        attributes.check_carried(request.model, captured.changes, reads)
    except Exception as error:
        error.add_note(
            "roamc.train_step has changed nothing. If the step runs without it, roamc.optimize(model) takes it"
        )
        raise
    return captured, reads, time.perf_counter() - start


@contextlib.contextmanager
def _refused(name: str) -> Iterator[None]:
    """Within this context, turn a fault of roamc's own in planning graph ``name`` into one line that says what to do.

    Raises:
        VerifyError: a VerifyError was raised within.
        RoamcError: any other error was raised within; other errors of roamc, of lacking memory and of signal handlers
            come out as they are.
    """
    try:
        yield
    except (RoamcError, MemoryError, torch.OutOfMemoryError) as error:
        if not isinstance(error, VerifyError):
            raise
        raise VerifyError(_advice(name, error)) from error
    except Exception as error:
        if interruption(error) is not None:
            raise
        raise RoamcError(_advice(name, error)) from error


def _failed(model: weakref.ref[nn.Module], name: str, options: Options, error: Exception) -> None:
    """Warn that the program of graph ``name`` has failed with ``error`` in the middle of a step."""
    notices.warn_of_failure(model(), name, options, error)


def _advice(name: str, error: Exception) -> str:
    return (
        f"roamc.train_step could not plan {name!r}; nothing was changed: {notices.reason_of(error)}. "
        "Try roamc.optimize(model), which falls back to torch's aot_eager with a warning"
    )


def _ties(modules: Sequence[nn.Module]) -> tuple[object, ...]:
    """Return (name, number) of every parameter and buffer that one of ``modules`` holds itself, in their order.

    Tied ones have the same number; the number is None for a name that holds None.
    """
    numbers: dict[int, int] = {}
    return tuple(
        (name, None if tensor is None else numbers.setdefault(id(tensor), len(numbers)))
        for module in modules
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    )


def _given(sources: Sequence[Source], model: nn.Module, leaves: Sequence[Any]) -> dict[Source, torch.Tensor]:
    """Return source to tensor, for those of ``sources`` that are parameters or buffers of ``model``, or batch leaves.

    Optimizer state and scalars are left out.
    """
    by_kind: dict[str, dict[str, torch.Tensor]] = {
        "parameter": dict(model.named_parameters()),
        "buffer": dict(model.named_buffers()),
    }
    tensors = {source: by_kind[source.kind][source.name] for source in sources if source.kind in by_kind}
    return tensors | {source: leaves[source.index] for source in sources if source.kind == "batch"}
