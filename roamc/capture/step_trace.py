"""Forward, loss and backward of a training step, traced under fake tensors: the first half of a captured step.

:mod:`roamc.capture.step` adds the optimizer's update.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from roamc import compat, compat_dynamo, compat_hooks
from roamc.capture import (
    communication,
    dropouts,
    fully_sharded,
    gather_judge,
    module_paths,
    recurrent,
    refusals,
    rng_replay,
    user_line,
)
from roamc.capture.assigned_buffers import buffers_by_name, write_back
from roamc.capture.attributes import Change, put_back
from roamc.capture.batch_gradients import handed_over, laid_out, stand_for_batch, wanted_of
from roamc.capture.closures import Closures, check_followed, check_origins
from roamc.capture.hooks import follow_hooks
from roamc.capture.in_place_views import as_views
from roamc.capture.leaves import (
    check_memory,
    check_same_parameters,
    check_untouched,
    memory_of,
    parameters_by_name,
    state_of,
)
from roamc.capture.parts import place_gradient, stand_in
from roamc.capture.questions import Question, Questions
from roamc.capture.repeats import DiffersError, Repeats
from roamc.capture.replicas import check_called, followed, replicas_of
from roamc.compat_dtensor import gathered, part_of
from roamc.compat_fsdp import casts_alone
from roamc.errors import CaptureError
from roamc.graph import Phase, attribute, operators, output_node
from roamc.graph.keep import keep_saved
from roamc.operators.fakes import kept_whole
from roamc.operators.prod_backward import products_as_eager

aten = torch.ops.aten
log = logging.getLogger(__name__)

LossFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class StepRequest:
    """A training step that is to be captured: ``loss_fn(model, *rebuild(leaves))``, its backward and the update.

    Attributes:
        model: with parameters on any device, the meta device included.
        loss_fn: returns the loss, a floating-point scalar.
        optimizer: holds parameters of ``model`` and no others.
        leaves: tensors and other values of the batch, as :func:`roamc.capture.batch.take_apart` gives them.
        rebuild: turns leaves into the arguments that ``loss_fn`` gets after the model.
        clip_grad_norm: the largest 2-norm of all gradients together; None for no clipping.
        device: where tensors on the meta device are taken to be; None for the CPU.
        runs_on: the GPU that the step is planned for where it is traced on a CPU; None, or a CPU, for none.
        reduced: :attr:`roamc.capture.step.CapturedStep.reduced` of an earlier capture of this step, whose order is
            kept; else empty.
        repeated: whether layers that are alike are traced once, see :mod:`roamc.capture.repeats`; for plans alone.
    """

    model: nn.Module
    loss_fn: LossFunction
    optimizer: torch.optim.Optimizer
    leaves: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], tuple[Any, ...]]
    clip_grad_norm: float | None = None
    device: torch.device | None = None
    runs_on: torch.device | None = None
    reduced: tuple[str, ...] = ()
    repeated: bool = False


class Trace:
    """Forward, loss and backward of a step, traced to one FX graph.

    Args:
        request: the step.
        parameters: all parameters of its model, by name.
        buffers: all buffers of its model, by name.
        trained: names of the parameters that the optimizer updates, in its order.

    Attributes:
        tensor_leaves: positions of the tensors among the leaves of the batch; the graph's inputs are parameters,
            buffers and these.
        updated: those of ``trained`` that have a gradient; the graph returns the loss, the gradients of these, and
            those of ``handed``.
        handed: positions among the leaves of the batch of the tensors whose gradients the graph returns.
        changes: attributes of modules that forward has set, put back.
        replicas: the DistributedDataParallel modules of the model.
        shardings: parameter name to how ``fully_shard`` has split it.
    """

    def __init__(
        self,
        request: StepRequest,
        parameters: dict[str, nn.Parameter],
        buffers: dict[str, torch.Tensor],
        trained: list[str],
    ) -> None:
        self.request = request
        self.parameters = parameters
        self.buffers = buffers
        self.trained = trained
        self.tensor_leaves = [i for i, leaf in enumerate(request.leaves) if isinstance(leaf, torch.Tensor)]
        self.updated: list[str] = []
        self.handed: tuple[int, ...] = ()
        self.changes: Sequence[Change] = ()
        self.replicas = replicas_of(request.model)
        self.shardings = fully_sharded.shardings(request.model)
        self.repeats: Repeats | None = None
        askable = {**buffers, **{f"batch[{index}]": request.leaves[index] for index in self.tensor_leaves}}
        askable = {name: part_of(tensor) for name, tensor in askable.items()}
        self._questions = Questions([*parameters, *askable], askable)

    @property
    def questions(self) -> Sequence[Question]:
        """What the step has asked of batch and buffers, with the answers."""
        return self._questions.asked

    def run(self, mode: compat.CaptureMode) -> fx.GraphModule:
        """Return the traced graph, with fake values of ``mode``; afterwards the attributes are set.

        Raises:
            CaptureError: the step cannot be one graph; one line that says what to do.
        """
        self._mode = mode
        mode.answer = self._questions.answer
        device = self.request.device or torch.device("cpu")
        reals = [*self.parameters.values(), *self.buffers.values()]
        fakes = [compat.fake_parameter(mode, part_of(tensor), device) for tensor in reals]
        fakes += [compat.fake_input(mode, part_of(self.request.leaves[i]), device) for i in self.tensor_leaves]
        try:
            with (
                refusals.in_one_line(),
                compat_dynamo.uncompiled(self.request.model),
                recurrent.decomposed(),
                dropouts.as_eager(),
                products_as_eager(),
                kept_whole(),
                compat_dynamo.unchecked_distributions(),
                user_line.noted(),
                compat_hooks.off_meta(),
            ):
                module = self._traced(fakes, mode)
                check_followed(module, mode)
            if self.shardings:
                self._place_gathers(module.graph)
            as_views(module.graph)
            rng_replay.check_read(module)
            rng_replay.replay_marked(module.graph)
            keep_saved(module.graph)
            return module
        finally:
            torch.clear_autocast_cache()  # its casts may be fake tensors of the trace

    def _traced(self, fakes: list[torch.Tensor], mode: compat.CaptureMode) -> fx.GraphModule:
        if not self.request.repeated:
            return compat.trace(self._step, fakes, mode)
        self.repeats = Repeats(self.request.model, (self.parameters[name] for name in self.trained), mode)
        try:
            module = compat.trace(self._step, fakes, mode)
            constants = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
            self.repeats.check({name: attribute(module, name) for name in constants})
        except DiffersError as error:
            log.debug("the step of %s is traced again: %s", type(self.request.model).__name__, error)
        else:
            return module
        self.repeats, mode.over = None, False
        return compat.trace(self._step, fakes, mode)

    def _place_gathers(self, graph: fx.Graph) -> None:
        phase = phases_of(graph, returned_values(output_node(graph))[0])
        fully_sharded.place(graph, phase, self.shardings)
        gather_judge.check(graph, list(self.parameters), self.updated, self.shardings)

    def _leaves(self, parts: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What stands for parameters and buffers in the model, and the tensors that autograd gives gradients of."""
        stand_ins, leaves = {}, {}
        for part, (name, real) in zip(parts, {**self.parameters, **self.buffers}.items(), strict=False):
            sharding = self.shardings.get(name)
            if sharding is None:
                stand_ins[name] = leaves[name] = stand_in(part, real)
            else:
                leaves[name] = part.detach().requires_grad_(real.requires_grad)
                stand_ins[name] = fully_sharded.whole(leaves[name], name, sharding)
        return stand_ins, leaves

    def _step(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        self._questions.begin()
        reals = {**self.parameters, **self.buffers}
        stand_ins, leaves = self._leaves(flat)
        closures = Closures({id(real): stand_ins[name] for name, real in reals.items()})
        for name, parameter in self.parameters.items():
            if name not in self.shardings:
                follow_hooks(stand_ins[name], parameter, name, closures)
                place_gradient(stand_ins[name])
        fed = dict(zip(self.tensor_leaves, flat[len(reals) :], strict=True))
        batch = stand_for_batch(fed, self.request.leaves, {id(real): stand_ins[name] for name, real in reals.items()})
        values = [batch.get(index, leaf) for index, leaf in enumerate(self.request.leaves)]
        model, before = self.request.model, state_of(leaves, stand_ins)
        named = {**stand_ins, **{f"batch[{index}]": tensor for index, tensor in batch.items()}}
        memory = memory_of(named)
        with (
            put_back(tuple(model.modules())) as self.changes,
            torch.enable_grad(), torch.autograd.set_detect_anomaly(False), compat.reparametrized(model, stand_ins),
            rng_replay.followed(), closures, communication.followed(), followed(self.replicas) as called,
            casts_alone(model), self.repeats.followed() if self.repeats else contextlib.nullcontext(),
            module_paths.noted(compat_dynamo.original(model)),
        ):  # fmt: skip
            parameters, buffers = parameters_by_name(model), buffers_by_name(model)
            with module_paths.inside(module_paths.LOSS):
                loss = self.request.loss_fn(model, *self.request.rebuild(values))
            check_untouched(leaves, stand_ins, before)
            check_memory(named, memory)
            check_same_parameters(model, parameters)
            check_loss(loss)
            check_origins(model, loss, {id(real): name for name, real in self.parameters.items()})
            whole_loss = gathered(loss)  # by now: backward begins behind it
            compat.number_backward(loss)
            trained = {name: leaves[name] for name in self.trained}
            asking = wanted_of(batch)
            with user_line.of_backward(), module_paths.of_backward():
                gradients = torch.autograd.grad(loss, [*trained.values(), *asking.values()], allow_unused=True)
            write_back(model, buffers, self._mode)  # by now: backward may read what a buffer was
        check_gradients([*trained, *(f"a batch tensor of shape {tuple(x.shape)}" for x in asking.values())], gradients)
        of_batch = dict(zip(asking, gradients[len(trained) :], strict=True))
        self.updated = [name for name, grad in zip(trained, gradients, strict=False) if grad is not None]
        check_called(self.replicas, called, self.updated)
        pairs = zip(trained.values(), gradients, strict=False)
        owned = [laid_out(part_of(grad), part_of(leaf)) for leaf, grad in pairs if grad is not None]
        results = [whole_loss.detach(), *owned]
        handed = handed_over(of_batch, batch, (*flat, *results))
        self.handed = tuple(handed)
        return [*results, *handed.values()]


def check_loss(loss: object) -> None:
    """Refuse a ``loss`` that is not a floating-point tensor of no dimension that requires a gradient.

    Raises:
        CaptureError: says what ``loss_fn`` has returned instead.
    """
    if not isinstance(loss, torch.Tensor):
        several = isinstance(loss, tuple | Mapping)  # as are the outputs of transformers
        advice = "; of several results, return the loss alone" if several else ""
        raise CaptureError(f"loss_fn must return a scalar tensor, not {type(loss).__name__}{advice}")
    if loss.numel() != 1 or loss.dim() != 0:
        raise CaptureError(
            f"loss_fn must return a scalar tensor, not one of shape {tuple(loss.shape)}; use .mean() or .sum()"
        )
    if not loss.is_floating_point():
        raise CaptureError(f"the loss must be a floating-point number, not {loss.dtype}")
    if not loss.requires_grad:
        raise CaptureError("the loss does not depend on any parameter that requires grad; nothing to train")


def check_gradients(sources: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse sparse gradients.

    Args:
        sources: what they are the gradients of, in words.
        gradients: the gradient of each, in the same order; None where there is none.

    Raises:
        CaptureError: names the first.
    """
    for name, grad in zip(sources, gradients, strict=True):
        if grad is not None and grad.layout is not torch.strided:
            raise CaptureError(f"the gradient of {name} is sparse; train_step needs nn.Embedding(sparse=False)")


def returned_values(end: fx.Node) -> list[fx.Node]:
    """Return what the output node of a traced graph returns: the loss, then the gradients.

    Raises:
        CaptureError: one of them is no node.
    """
    nodes: list[fx.Node] = []
    fx.map_arg(end.args[0], nodes.append)
    flat = end.args[0]
    if isinstance(flat, list | tuple) and len(flat) != len(nodes):
        raise CaptureError("tracing lost a gradient; please report this model")
    return list(flat)  # type: ignore[arg-type]


_DETACHED = (aten.detach.default, aten.alias.default)
"""What tracing makes of ``loss.detach()``: the first up to torch 2.13, the second from 2.14 on."""


def phases_of(graph: fx.Graph, loss: fx.Node) -> dict[str, Phase]:
    """Return the phase of every operator by name: FORWARD up to the loss in trace order, BACKWARD behind it."""
    nodes = operators(graph)
    last = loss.all_input_nodes[0] if loss.target in _DETACHED else loss
    phase, current = {}, Phase.FORWARD
    for node in nodes:
        phase[node.name] = current
        if node is last:
            current = Phase.BACKWARD
    if last.op == "call_function" and current is Phase.FORWARD:
        raise CaptureError(f"torch traced no backward behind the loss ({last.target}); please report this model")
    return phase
