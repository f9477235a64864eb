"""A captured and planned step bound to a live model and its optimizer: what every call of ``train_step`` runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from roamc import compat, optim
from roamc.capture.batch import geometry
from roamc.capture.optimizers import Rule, check_state, init_state
from roamc.capture.shared import shared_key
from roamc.capture.step import CapturedStep, Cohort, check_devices, cohort_of
from roamc.capture.step_trace import StepRequest
from roamc.compat_dtensor import is_dtensor, part_of
from roamc.graph import Port, TrainGraph, attribute
from roamc.graph.storage_ids import StorageId
from roamc.interruptions import uninterrupted
from roamc.planning.plan import Plan
from roamc.runtime.program import Whole
from roamc.units import Bytes

STEP_DONE = (
    "roamc.train_step held this signal back until its step was whole: parameters and optimizer state are those after it"
)
"""Note to what a handler of a signal raises that came in the middle of a step."""


class BoundStep:
    """One captured step bound to the live model and optimizer: it runs the step, and says whether it still may.

    Args:
        request: what was captured; has the model and the optimizer.
        captured: the captured step.
        rule: how the optimizer updates a parameter.
        whole: the program that runs the step.
        plan: the plan of the program.

    Attributes:
        rule, whole, plan, model, optimizer: as given.
        constants: (tensor, whether tracing has made it anew) of each constant of the graph, in the graph's order.
        outside: constants that the user has as well, who may give them other memory, as ``.data =`` does.
        places: how they lay in memory, and what shared it, when the step was captured, see :meth:`_places`.
        sources: where each argument of the program comes from, as in :class:`CapturedStep`.
        shared: which of these shared the caller's memory when the step was captured, see :func:`_shared`.
        cohort: name of a parameter to the number of the parameters that are updated with the same numbers.
        group: name of a parameter to its parameter group in the optimizer.
        parameters, buffers: name to the dict of a module, and the key in it, where the live tensor stands.
        handed: positions in the batch of tensors that get a gradient, in the order in which the program returns these.
        questions: what tracing has asked of batch, buffers and constants, with its answers.
        streams: of projected gradients, by parameter group of the optimizer; those of the graph.
        has_parts: whether a parameter, buffer or tensor of the batch is a DTensor, of which the program gets a part.
    """

    def __init__(self, request: StepRequest, captured: CapturedStep, rule: Rule, whole: Whole, plan: Plan) -> None:
        self.rule = rule
        self.whole = whole
        self.plan = plan
        self.constants = _constants(captured.graph)
        self.outside = [tensor for tensor, fresh in self.constants if not fresh]
        self.model = request.model
        self.optimizer = request.optimizer
        self.sources = captured.sources
        self.shared = _shared(captured.graph.inputs)
        self.handed = captured.handed
        self.questions = captured.questions
        self.cohort = _numbered(captured.cohorts)
        self.group = {name: cohort.group for name, cohort in captured.cohorts.items()}
        self.parameters = _slots(request.model, "_parameters")
        self.buffers = _slots(request.model, "_buffers")
        live = self.held()
        optim.share_streams(request.optimizer, {id(live[name]): at for name, at in captured.streams.items()})
        self.streams = optim.streams_of(request.optimizer)
        self.has_parts = any(map(is_dtensor, (*self.held().values(), *request.leaves)))
        self.places = self._places(request.leaves)

    def serves(self, captured: CapturedStep, mark: str) -> bool:
        """Whether this program also runs ``captured``, a step captured anew whose graph has the fingerprint ``mark``.

        It does not if operators may need more workspace than planned on the number of threads that torch now uses.
        """
        return (
            self.plan.fingerprint == mark
            and self.whole.executable.planned.covers(torch.get_num_threads())
            and self.sources == captured.sources
            and (not self.plan.room or self.shared == _shared(captured.graph.inputs))  # a total counts it once
            and self.handed == captured.handed
            and self.cohort == _numbered(captured.cohorts)
            and self.group == {name: cohort.group for name, cohort in captured.cohorts.items()}
            and _equal(self.constants, _constants(captured.graph))  # the fingerprint does not see their values
        )

    def answers(self, leaves: Sequence[Any]) -> bool:
        """Whether this program serves the batch ``leaves``: what tracing has asked of tensors has the same answers."""
        if self._places(leaves) != self.places or optim.streams_of(self.optimizer) != self.streams:
            return False
        if not self.questions:
            return True
        batch = {f"batch[{index}]": leaf for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        tensors = {name: part_of(tensor) for name, tensor in {**self.held(), **batch}.items()}
        return all(question.ask(tensors) for question in self.questions)

    def _places(self, leaves: Sequence[Any]) -> tuple[object, ...]:
        """Return how the constants outside lie in memory now, and what shares it; ``leaves`` are the batch."""
        if not self.outside:
            return ()
        others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return *map(geometry, self.outside), shared_key([*self.held().values()], others + self.outside, self.optimizer)

    def held(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters and buffers as they are now, by name."""
        return {name: slot[key] for name, (slot, key) in (*self.parameters.items(), *self.buffers.items())}

    def updated(self) -> dict[str, torch.Tensor]:
        """Return the parameters that the step updates, as they are now, by name."""
        return {name: self.parameters[name][0][self.parameters[name][1]] for name in self.cohort}

    def run(self, leaves: Sequence[Any], cohorts: dict[int, Cohort], after: Callable[[], None]) -> torch.Tensor:
        """Run one step and return the loss; parameters, buffers and optimizer state change in place.

        Gradients of tensors of the batch are added to their ``.grad``.

        Args:
            leaves: the tensors and other values of the batch, as :func:`roamc.capture.batch.take_apart` returns them.
            cohorts: what :meth:`cohorts_now` returns, not None.
            after: called behind the update, before handlers of signals run that came during the step.

        Raises:
            CaptureError: a tensor of the batch is on a device where no parameter is, or state of a DTensor is placed
                otherwise than its parameter; nothing has changed.
            Exception: as :meth:`roamc.runtime.program.Executable.run` raises.
        """
        check_devices(leaves, [slot[key] for slot, key in self.parameters.values()])
        live = {name: slot[key] for name, (slot, key) in self.parameters.items()}
        if self.has_parts:  # the program gets parts, which do not say of what
            for name, group in self.group.items():
                check_state(self.optimizer, self.rule, name, live[name], self.optimizer.param_groups[group])
        with uninterrupted(STEP_DONE) as signals:  # outermost, so that handlers run in the caller's modes
            with torch.no_grad(), _no_autocast(), self._with_state(live), self._counted(live):
                loss, *gradients = self.whole(self._arguments(leaves, live, cohorts))
                _accumulate([leaves[index] for index in self.handed], gradients)
            if self.has_parts:  # the program has written to the parts alone
                torch.autograd.graph.increment_version([live[name] for name in self.cohort])
            compat.note_optimizer_step(self.optimizer)
            signals.wait_once()
            after()
        result: torch.Tensor = loss
        return result

    def cohorts_now(self) -> dict[int, Cohort] | None:
        """Return the cohorts as they are now: number, as at capture, to :class:`roamc.capture.step.Cohort`.

        None if the parameters of one number no longer have equal cohorts, as may be after loading a checkpoint.
        """
        cohorts: dict[int, Cohort] = {}
        for name, number in self.cohort.items():
            slot, key = self.parameters[name]
            group = self.optimizer.param_groups[self.group[name]]
            cohort = cohort_of(self.optimizer, slot[key], group, self.group[name], self.rule)
            if cohorts.setdefault(number, cohort) != cohort:
                return None
        return cohorts

    @contextlib.contextmanager
    def _with_state(self, live: dict[str, torch.Tensor]) -> Iterator[None]:
        """Within this context the parameters in ``live``, by name, have optimizer state; made where there is none.

        If the body raises, the state that was made is taken away again.
        """
        with contextlib.ExitStack() as on_error:
            for name, group in self.group.items():
                take_away = init_state(self.optimizer, self.rule, live[name], self.optimizer.param_groups[group])
                if take_away is not None:
                    on_error.callback(take_away)
            yield
            on_error.pop_all()

    @contextlib.contextmanager
    def _counted(self, live: dict[str, torch.Tensor]) -> Iterator[None]:
        """Add 1 to the optimizer's step count of each updated parameter in ``live``, by name, before the body runs.

        If the body raises, 1 is taken off again. Nothing is done for an optimizer that counts no steps.
        """
        counts = [self.optimizer.state[live[name]]["step"] for name in self.cohort] if self.rule.has_step else []
        if not counts:
            yield
            return
        compat.add_to_all(counts, 1)
        with contextlib.ExitStack() as on_error:
            on_error.callback(compat.add_to_all, counts, -1)
            yield
            on_error.pop_all()

    def _arguments(self, leaves: Sequence[Any], live: dict[str, torch.Tensor], cohorts: dict[int, Cohort]) -> list[Any]:
        groups = self.optimizer.param_groups
        scalars = {n: self.rule.scalars(groups[c.group], c.step + 1, c.first) for n, c in cohorts.items()}
        state = self.optimizer.state
        arguments: list[Any] = []
        for source in self.sources:
            if source.kind == "parameter":
                arguments.append(live[source.name])
            elif source.kind == "state":
                arguments.append(state[live[source.name]][source.key])
            elif source.kind == "scalar":
                arguments.append(scalars[source.index][source.name])
            elif source.kind == "buffer":
                slot, key = self.buffers[source.name]
                arguments.append(slot[key])
            else:
                arguments.append(leaves[source.index])
        return list(map(part_of, arguments)) if self.has_parts else arguments


def _accumulate(leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add each of ``gradients`` to the ``.grad`` of the tensor in the same place of ``leaves``, as autograd does.

    A tensor that required none gets one where ``loss_fn`` has called its ``requires_grad_()``, which eager leaves so.
    """
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.requires_grad_()
        if leaf.grad is None:
            leaf.grad = gradient
        else:
            torch.autograd.backward(leaf, gradient)


def _shared(inputs: Sequence[Port]) -> tuple[tuple[int, Bytes] | None, ...]:
    """Return for each of ``inputs`` that shares the caller's memory the first input that does, and its bytes."""
    first: dict[StorageId, int] = {}
    memories = enumerate(port.memory for port in inputs)
    return tuple(memory and (first.setdefault(memory, at), memory.nbytes) for at, memory in memories)


def _constants(graph: TrainGraph) -> list[tuple[torch.Tensor, bool]]:
    """Return (tensor, whether tracing has made it anew) for each constant tensor of ``graph``, in the graph's order."""
    fresh = torch.ops.aten.lift_fresh_copy.default
    return [
        (attribute(graph.module, str(node.target)), all(user.target is fresh for user in node.users))
        for node in graph.graph.nodes
        if node.op == "get_attr"
    ]


def _equal(before: list[tuple[torch.Tensor, bool]], latest: list[tuple[torch.Tensor, bool]]) -> bool:
    """Whether two lists of :func:`_constants` hold the same tensors, or equal ones made by tracing."""
    return len(before) == len(latest) and all(
        one is other or (fresh and also and torch.equal(_bytes(one), _bytes(other)))
        for (one, fresh), (other, also) in zip(before, latest, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, of which those of 0.0 and -0.0 differ and those of one nan are equal."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _numbered(cohorts: dict[str, Cohort]) -> dict[str, int]:
    """Return parameter name to the number of its cohort, see :class:`roamc.capture.step.Cohort`.

    Numbers count from 0 as cohorts first come; equal cohorts share one.
    """
    numbers: dict[Cohort, int] = {}
    return {name: numbers.setdefault(cohort, len(numbers)) for name, cohort in cohorts.items()}


def _slots(model: nn.Module, kind: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Return name to (dictionary, key) of each parameter or buffer: the owning module's dictionary and the key there.

    ``kind`` is ``"_parameters"`` or ``"_buffers"``.
    """
    slots = {}
    for prefix, module in model.named_modules():
        own = getattr(module, kind)
        for key, value in own.items():
            if value is not None:
                slots[f"{prefix}.{key}" if prefix else key] = (own, key)
    return slots


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Turn autocast off inside: the program holds the casts already."""
    active = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with contextlib.ExitStack() as stack:
        for kind in active:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
