"""Train a random model by every route and budget, and compare with aot_eager or eager, each as a whole."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends import common
from torch._functorch import partitioners

import roamc.frontends.backend
from roamc.errors import StaleError, VerifyError
from tests.end_to_end.helpers import eager_step, onednn
from tests.sweeps import in_place_models, random_models
from tests.sweeps.compare import OutOfTime, Verdict, different, time_limit
from tests.sweeps.databases import named, tensors_in
from tests.sweeps.random_models import Example

ROUTES = ("compile", "optimize", "step")
BUDGETS = (None, "60%")
FAMILIES = {"blocks": random_models.example, "in-place": in_place_models.example}
"""Kinds of random models by name: each gives the model of a number."""
FALLS_BACK = ("roamc could not plan", "failed while it ran")
"""Words of the warnings that something else than a planned program runs."""
OWN_FAULT = "please report"
"""Words of a warning that one of roamc's own judges refuses what roamc has made."""

Results = dict[str, Tensor | None]
Plans = list[roamc.Plan]


def loss_of(model: nn.Module, *batch: Any) -> Tensor:
    """One number; each of several outputs counts with its mean, so that sizes of views do not matter."""
    outputs = model(*batch)
    if isinstance(outputs, Tensor):
        return outputs.float().square().sum()
    return torch.stack([output.float().square().mean() for output in outputs]).sum()


def optimizer_of(source: Example, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum or AdamW."""
    if source.adam:
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def trained(source: Example, wrap: Callable[[nn.Module], nn.Module], *, kept: bool = True) -> Results:
    """Losses, gradients and tensors of one forward and backward per batch; gradients add up.

    Unless ``kept``, what backward writes to buffers is undone after it.
    """
    torch._dynamo.reset()
    model = source.make()
    compiled = wrap(model)
    results: Results = {}
    for number, batch in enumerate(source.batches):
        torch.manual_seed(number)
        batch = copy.deepcopy(batch)
        loss = loss_of(compiled, *batch)
        before = [(buffer, buffer.clone()) for buffer in model.buffers() if not kept]
        loss.backward()
        for buffer, was in before:
            buffer.copy_(was)
        results[f"loss {number}"] = loss.detach()
        _note(results, model, batch, number)
    return results


def _note(results: Results, model: nn.Module, batch: tuple[Any, ...], number: int) -> None:
    for index, tensor in enumerate(tensors_in(batch)):
        results[f"input {index} after {number}"] = tensor
    for name, tensor in named(model):
        results[f"{name} after {number}"] = tensor.detach().clone()
        results[f"gradient of {name} after {number}"] = None if tensor.grad is None else tensor.grad.clone()


def stepped(source: Example, make: Callable[[nn.Module, torch.optim.Optimizer], Callable[..., Tensor]]) -> Results:
    """Losses and tensors of one whole step per batch."""
    torch._dynamo.reset()
    model = source.make()
    step = make(model, optimizer_of(source, model))
    results: Results = {}
    for number, batch in enumerate(source.batches):
        torch.manual_seed(number)
        batch = copy.deepcopy(batch)
        results[f"loss {number}"] = step(*batch).detach()
        _note(results, model, batch, number)
    return results


def aot_eager(model: nn.Module) -> nn.Module:
    """The reference of what torch.compile runs."""
    return torch.compile(model, backend="aot_eager", dynamic=False)


def aot_eager_at_full_save(model: nn.Module) -> nn.Module:
    """The same with all saved that eager saves; aot_eager's partition may read again what torch has overwritten."""
    backend = common.aot_autograd(fw_compiler=lambda gm, _: gm, partition_fn=partitioners.default_partition)
    return torch.compile(model, backend=backend, dynamic=False)


def aot_eager_of_cells(model: nn.Module) -> nn.Module:
    """The same with recurrent layers traced as their cells, as ``optimize`` does, and not run in one by eager."""
    compiled = aot_eager(model)

    def forward(*batch: Any) -> Any:
        with torch._dynamo.config.patch(allow_rnn=True):
            return compiled(*batch)

    return Called(forward)


class Called(nn.Module):
    """A module that is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """The reference of whole steps."""
    return lambda *batch: eager_step(model, loss_of, optimizer, *batch)


def by_aot_eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """The other one: autocast and recurrent layers have other bits in eager than as ATen operators."""
    compiled = aot_eager(model)

    def step(*batch: Any) -> Tensor:
        loss = loss_of(compiled, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_roamc(source: Example, route: str, budget: str | None) -> tuple[Results, Plans]:
    """What roamc gives by a route under a budget, and its plans."""
    if route == "step":
        steps: list[roamc.TrainStep] = []

        def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> roamc.TrainStep:
            steps.append(roamc.train_step(model, loss_of, optimizer, memory_budget=budget))
            return steps[0]

        results = stepped(source, make)
        return results, steps[0].plans
    models: list[nn.Module] = []

    def wrap(model: nn.Module) -> nn.Module:
        if route == "optimize":
            models.append(roamc.optimize(model, memory_budget=budget))
            return models[0]
        return torch.compile(model, backend="roamc", dynamic=False, options={"memory_budget": budget})

    roamc.frontends.backend.LATEST.clear()
    results = trained(source, wrap)
    return results, roamc.plans(models[0]) if models else roamc.plans()


def judge(seed: int, route: str, budget: str | None, seconds: int = 120, family: str = "blocks") -> Verdict:
    """The verdict on a model of a family; "refused" is an error in one line, "falls back" a warning and the right bits.

    "no graph": torch.compile runs the model in eager and hands nothing to any backend; "silent": roamc was handed a
    graph, and neither planned it nor said so; "own fault": a judge of roamc's refuses what roamc has made. A budget
    that cannot be met is tried again as "min".
    """
    at = "reference"
    try:
        with time_limit(seconds), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            source = FAMILIES[family](seed)
            references = answers(seed, route, family)
            wanted = next(references)
            at = route
            results, plans = _planned_or_smallest(source, route, budget)
            wrong = different(results, wanted)
            at = "reference"
            if wrong and any(not different(results, other) for other in references):
                wrong = ""
            if not wrong and not plans and route == "compile" and not graphs_of(source):
                return Verdict("no graph", "torch.compile runs the model in eager")
    except OutOfTime:
        return Verdict("left out" if at == "reference" else "time", f"{at}: over {seconds} s")
    except Exception as error:  # whatever fails is a line of the log
        return _refusal(error, at)
    if wrong:
        return Verdict("differs", wrong)
    return _planned(plans, [str(one.message) for one in said], budget, _kept_twice(source, route))


def _kept_twice(source: Example, route: str) -> int:
    """Bytes of buffers that forward writes and backward reads: torch.compile keeps a copy, see docs/limits.md."""
    if route == "step":
        return 0
    model, saved = source.make(), set()
    versions = [(buffer, buffer._version) for buffer in model.buffers()]

    def note(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model, *copy.deepcopy(source.batches[0]))
    return sum(
        buffer.nbytes
        for buffer, version in versions
        if buffer._version > version and buffer.untyped_storage().data_ptr() in saved
    )


def answers(seed: int, route: str, family: str) -> Iterator[Results]:
    """What each reference of a route gives that does not raise: at least one, or the last one's error."""
    kinds, errors = REFERENCES[route], []
    for kind in kinds:
        try:
            results = reference(seed, kind, route != "compile", family)
        except RuntimeError as error:
            errors.append(error)
        else:
            yield results
    if len(errors) == len(kinds):
        raise errors[0]


REFERENCES = {
    "compile": ("aot_eager", "aot_eager at full save", "eager", "eager forward's buffers"),
    "optimize": ("aot_eager", "aot_eager at full save", "eager", "aot_eager of cells", "eager forward's buffers"),
    "step": ("eager step", "aot_eager step"),
}
"""Whose bits a route gives: all of them one reference's. ``roamc.optimize`` traces recurrent layers as eager runs them;
aot_eager ends a graph there, and lays a gradient that enters the next one like its tensor, which sums in another order.
A plain LSTM has the bits of ATen's steps by ``roamc.optimize`` and in whole steps, see ``lstm_of_aten``.

Where a checkpointed part updates a buffer, its second run in backward updates the buffer again in eager, and computes
the update without keeping it under torch.compile: that is eager with forward's buffers put back after backward.
aot_eager's gradients (torch 2.13) are wrong where the part also reads what it has updated."""


@functools.lru_cache(maxsize=4)
def reference(seed: int, kind: str, aten_lstm: bool = False, family: str = "blocks") -> Results:
    """What torch gives for a model: by one of ``REFERENCES``; with ``aten_lstm``, no LSTM runs in oneDNN."""
    with lstm_of_aten() if aten_lstm else contextlib.nullcontext():
        source = FAMILIES[family](seed)
        if kind.endswith("step"):
            return stepped(source, eager if kind == "eager step" else by_aot_eager)
        return trained(source, WRAPPED.get(kind, lambda model: model), kept=kind != "eager forward's buffers")


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "aot_eager": aot_eager,
    "aot_eager at full save": aot_eager_at_full_save,
    "aot_eager of cells": aot_eager_of_cells,
}
"""References that torch.compile runs."""


@contextlib.contextmanager
def lstm_of_aten() -> Iterator[None]:
    """LSTMs run ATen's steps, as roamc traces them: oneDNN's layer adds up in another order."""
    own = nn.LSTM.forward

    def forward(layer: nn.LSTM, *args: Any) -> Any:
        with onednn(False):
            return own(layer, *args)

    nn.LSTM.forward = forward
    try:
        yield
    finally:
        nn.LSTM.forward = own


def graphs_of(source: Example) -> int:
    """How many graphs torch.compile hands to a backend while it trains the model."""
    handed: list[torch.fx.GraphModule] = []

    def count(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        handed.append(gm)
        return gm.forward

    trained(source, lambda model: torch.compile(model, backend=count, dynamic=False))
    return len(handed)


def _planned_or_smallest(model: Example, route: str, budget: str | None) -> tuple[Results, Plans]:
    try:
        return by_roamc(model, route, budget)
    except Exception as error:  # only a budget that is too small has another way
        if not isinstance(_cause(error), roamc.BudgetError):
            raise
    return by_roamc(model, route, "min")


def _cause(error: Exception) -> Exception:
    """What a backend raised, without what dynamo wraps it in."""
    inner: Exception = getattr(error, "inner_exception", error)
    return inner


def _refusal(error: Exception, at: str) -> Verdict:
    cause = _cause(error)
    text = f"{type(cause).__name__}: {cause}"
    if isinstance(cause, VerifyError):
        return Verdict("own fault", text[:400])
    if at == "reference":
        return Verdict("left out", text.splitlines()[0][:200])
    # Nothing of these models changes, so that none is stale.
    clear = isinstance(cause, roamc.RoamcError) and not isinstance(cause, StaleError) and "\n" not in str(cause)
    return Verdict("refused" if clear else "raises", text[:400])


def _planned(plans: Plans, said: list[str], budget: str | None, spare: int = 0) -> Verdict:
    fallbacks = [text for text in said if any(words in text for words in FALLS_BACK)]
    if any(OWN_FAULT in text for text in fallbacks):
        return Verdict("own fault", fallbacks[0][:400])
    if fallbacks:
        return Verdict("falls back", fallbacks[0][:300])
    if not plans:
        return Verdict("silent", "nothing was planned, and no warning says so")
    above = [plan for plan in plans if budget is None and plan.peak_bytes > plan.baseline_bytes + spare]
    if above:
        worst = max(plan.peak_bytes / max(plan.baseline_bytes, 1) for plan in above)
        return Verdict("above", f"a peak {worst:.3f} of eager's")
    return Verdict("same")
