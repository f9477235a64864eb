"""Train a stranger's model by each way in and budget: the bits of torch, no more memory than the plan says."""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.utils import _pytree as pytree

import roamc.frontends.backend
from benchmarks._measure import Heap
from roamc.cli.demo.worker import peak_bytes
from tests.end_to_end.helpers import differences, state_of, tensors_of
from tests.graphs import WithLoss
from tests.sweeps.compare import OutOfTime, Verdict, time_limit
from tests.sweeps.programs import program
from tests.sweeps.strangers import BY_HAND, Loss, Stranger
from tests.sweeps.strangers_attention import WITH_ATTENTION
from tests.sweeps.strangers_hf import OF_TRANSFORMERS
from tests.sweeps.strangers_loops import LOOPS

NEAR = 1e-3
"""Distance of what fast numerics give from what torch gives, as a share of the length of the latter."""
MOVES = 10
"""Or in what torch's results move by when every parameter moves by its last bit: some gradients are only roundings."""
ROUNDINGS = 1e-5
"""Distance that sums in another order may have, as a share of the length."""
NOISE = 20 << 10
"""Bytes of Python's own that are in a peak of the heap, in no peak of torch's allocator. Measured: up to 18.8 kB."""

STRANGERS: dict[str, Stranger] = {**BY_HAND, **WITH_ATTENTION, **OF_TRANSFORMERS, **LOOPS}
ROUTES = ("train_step", "optimize", "compile")
BUDGETS = (None, "50%", "min", "+1%")
GOOD = ("same", "limit", "refused")
TURNS = 3
"""Memory is measured in the last one: roamc plans in the first."""

Step = Callable[..., Tensor]
Compare = Callable[[Any, Any], list[str]]


@dataclass
class Run:
    """What training gives.

    Attributes:
        results: losses, and after each turn parameters, buffers and states of optimizers.
        peaks: most bytes that each step of the last turn takes beside what is there before; of ``train_step`` with the
            update, else of forward and backward.
        plans: the plans of each of these steps.
        refused: what torch's own way in says where it fails; eager's results then stand for it.
    """

    results: dict[str, Any] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)
    plans: list[list[roamc.Plan]] = field(default_factory=list)
    refused: str = ""


def run(stranger: Stranger, route: str, budget: str | None = None) -> Run:
    """Train by a way in, or by what it is compared with: "eager", "optimize by torch" or "compile by torch"."""
    torch._dynamo.reset()
    roamc.frontends.backend.LATEST.clear()
    torch.manual_seed(0)
    model = stranger.build().train()
    pairs = [(stranger.loss, stranger.optimizer), *stranger.more]
    optimizers = [make(model) for _, make in pairs]
    outcome = Run()
    options = {"strict": True, "memory_budget": budget, "idle_arena": "free"}
    options["numerics"] = stranger.numerics
    called: list[Step] = []
    of = _prepared(model, route, options)
    for (loss, _), optimizer in zip(pairs, optimizers, strict=True):
        whole = route == "train_step"
        clip = {"clip_grad_norm": stranger.clip}
        called.append(roamc.train_step(model, loss, optimizer, **clip, **options) if whole else of(loss))
    for turn in range(TURNS):
        torch.manual_seed(turn)
        numpy.random.seed(turn)  # Wav2Vec2 masks by it
        batch = stranger.batch()
        for number, (call, optimizer) in enumerate(zip(called, optimizers, strict=True)):
            loss, peak = taken(functools.partial(call, *batch)) if turn == TURNS - 1 else (call(*batch), 0)
            outcome.results[f"loss {number} of turn {turn}"] = loss.detach().clone()
            outcome.peaks += [peak] if turn == TURNS - 1 else []
            if route != "train_step":
                _update(model, optimizer, stranger.clip)
        stranger.after(model, optimizers, turn)
        outcome.results[f"tensors after turn {turn}"] = tensors_of(model)
        outcome.results[f"states after turn {turn}"] = [state_of(optimizer) for optimizer in optimizers]
    outcome.plans = [_plans(call, model, route) for call in called]
    return outcome


def counts_heap() -> bool:
    """Whether this process has the heap counter of the benchmarks."""
    return "heapcount" in os.environ.get("LD_PRELOAD", "")


def taken(call: Callable[[], Any]) -> tuple[Any, int]:
    """What ``call`` returns, and its peak: of the heap if the process counts that, else of torch's allocator."""
    if not counts_heap():
        return peak_bytes(call)
    heap = Heap()
    gc.collect()
    before = heap.live()
    heap.reset()
    result = call()
    return result, heap.peak() - before


def _prepared(model: nn.Module, route: str, options: dict[str, Any]) -> Callable[[Loss], Step]:
    """The model by a way in, as what turns a loss into forward and backward."""
    if route == "optimize":
        roamc.optimize(model, **options)
    elif route == "optimize by torch":
        model.compile(backend="aot_eager", dynamic=False)

    def of(loss: Loss) -> Step:
        call: Step = functools.partial(loss, model)
        if route == "compile":
            call = torch.compile(WithLoss(model, loss), backend="roamc", dynamic=False, options=options)
        elif route == "compile by torch":
            call = torch.compile(WithLoss(model, loss), backend="aot_eager", dynamic=False)

        def forward_backward(*batch: Any) -> Tensor:
            value = call(*batch)
            value.backward()
            return value.detach()

        return forward_backward

    return of


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    model.zero_grad()


def _plans(call: Step, model: nn.Module, route: str) -> list[roamc.Plan]:
    """Of ``train_step`` those of one step; else all, and all may hold memory at one time."""
    if isinstance(call, roamc.TrainStep):
        return [max(call.plans, key=lambda plan: plan.needed_bytes)]
    if route not in ROUTES:
        return []
    plans = roamc.plans(model) if route == "optimize" else roamc.plans()
    open_calls = max((plan.in_flight for plan in plans), default=1)  # plans for fewer are used no more
    return [plan for plan in plans if plan.in_flight == open_calls]


REFERENCES = {"train_step": "eager", "optimize": "optimize by torch", "compile": "compile by torch"}


@functools.lru_cache(maxsize=4)
def stranger_of(name: str) -> Stranger:
    """The row of a name, or the random program of "program N"."""
    if name in STRANGERS:
        return STRANGERS[name]
    return program(int(name.removeprefix("program "))).stranger()


@functools.lru_cache(maxsize=6)
def reference(name: str, route: str, threads: int) -> Run:
    """What torch gives for a row on so many threads; where torch's own way in fails, what eager gives.

    As Inductor's option has it, torch draws what nobody reads, too: else all later draws are others than eager's.
    """
    torch.set_num_threads(threads)
    try:
        with inductor_config.patch(fallback_random=True):
            return run(stranger_of(name), REFERENCES[route])
    except Exception as error:
        if route == "train_step":
            raise
        refused = _said(error)
        warnings.warn(f"{REFERENCES[route]}: {refused}", stacklevel=2)
    outcome = run(stranger_of(name), "eager")
    outcome.refused = refused
    return outcome


@functools.lru_cache(maxsize=6)
def moved_by(name: str, threads: int) -> dict[str, float]:
    """How far each of eager's results for a row moves with the last bits of its parameters: the most of two draws.

    By place; torch's own way in may have more, such as the states of parameters whose gradient is none in eager.
    """
    wanted, stranger = reference(name, "train_step", threads).results, stranger_of(name)
    draws = [_distances(run(with_other_last_bits(stranger, seed), "eager").results, wanted) for seed in range(2)]
    return {path: max(draw[path] for draw in draws) for path in draws[0]}


def with_other_last_bits(stranger: Stranger, seed: int) -> Stranger:
    """The row with each element of its parameters a rounding error larger, smaller or as it is."""

    def build() -> nn.Module:
        model, generator = stranger.build(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                bits = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.mul_(1 + bits * torch.finfo(parameter.dtype).eps)
        return model

    return replace(stranger, build=build)


@functools.lru_cache(maxsize=6)
def outside(name: str, threads: int) -> list[tuple[int, int]]:
    """How often each loss of a row calls the model, and most bytes that it takes beside it, which no plan counts."""
    torch.set_num_threads(threads)
    stranger = stranger_of(name)
    model, batch = stranger.build().train(), stranger.batch()
    losses = [stranger.loss, *(loss for loss, _ in stranger.more)]
    return [_loss_bytes(loss, model, batch) for loss in losses]


def _loss_bytes(loss: Loss, model: nn.Module, batch: tuple[Any, ...]) -> tuple[int, int]:
    outputs: list[Any] = []

    def noted(*args: Any, **named: Any) -> Any:
        outputs.append(_leaves(model(*args, **named)))
        return outputs[-1]

    loss(noted, *batch)
    again = iter(outputs)
    leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    value_of = functools.partial(loss, lambda *_, **__: next(again), *batch)
    return len(outputs), taken(lambda: torch.autograd.grad(value_of(), leaves, allow_unused=True))[1]


def _leaves(outputs: Any) -> Any:
    """The outputs of a model, in tensors of their own."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), outputs)


def judge(name: str, route: str, budget: str | None, seconds: int = 300, threads: int | None = None) -> Verdict:
    """The verdict on a row, on the threads that torch has if none are named.

    "same": the bits of torch, within the plan's memory and the budget; "refused": the budget cannot be kept, which is
    said in one line; "limit": what the row names; "left out": torch's own way in fails in the same words. Else
    "differs", "above", "raises" or "time".
    """
    stranger, at, theirs = stranger_of(name), "reference", Run()
    before = torch.get_num_threads()
    threads = threads or before
    try:
        with time_limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = reference(name, route, threads)
            at = route
            more = outside(name, threads) if route == "optimize" else [(1, 0)] * (1 + len(stranger.more))
            torch.set_num_threads(threads)
            ours = run(stranger, route, budget)
            fast = stranger.numerics == "fast"
            compare = functools.partial(far, moves=moved_by(name, threads)) if fast else differences
            verdict = compared(ours, theirs, more, compare)
            if verdict.outcome == "differs" and route != "train_step":  # aot_eager may move draws before one another
                at, eager = "eager", reference(name, "train_step", threads)
                verdict = compared(ours, eager, more, compare)
                if verdict.outcome == "differs" and not fast:
                    moves = moved_by(name, threads)
                    between = functools.partial(far, moves=moves, near=ROUNDINGS, other=theirs.results)
                    verdict = compared(ours, eager, more, between)
    except OutOfTime:
        verdict = Verdict("time", f"{at}: over {seconds} s")
    except Exception as error:  # whatever fails is a line of the log
        verdict = _failed(error, at)
    finally:
        torch.set_num_threads(before)
    limit = stranger.limits.get(route)
    if limit is not None and verdict.outcome != "same" and re.search(limit, f"{verdict.outcome}: {verdict.text}"):
        return Verdict("limit", verdict.text)
    if verdict.outcome == "raises" and theirs.refused and theirs.refused in verdict.text:
        return Verdict("left out", verdict.text)
    return verdict


def compared(ours: Run, theirs: Run, around: list[tuple[int, int]], compare: Compare = differences) -> Verdict:
    """The verdict on memory and, by ``compare``, on results; ``around`` is of each step as :func:`outside` says.

    Without a budget a plan is of one call; under a budget it holds for all calls before one backward.
    """
    text = f"peak {ours.peaks}, torch {theirs.peaks}"
    noise = NOISE if counts_heap() else 0
    if wrong := compare(ours.results, theirs.results):
        return Verdict("differs", f"{len(wrong)} places, first {wrong[0]}")
    if not all(ours.plans):
        return Verdict("above", "nothing was planned")
    for peak, plans, (calls, more) in zip(ours.peaks, ours.plans, around, strict=True):
        needed = sum(plan.needed_bytes * (1 if plan.in_flight > 1 else calls) for plan in plans) + more
        text += f", needed {[plan.needed_bytes for plan in plans]} of {[plan.baseline_needed_bytes for plan in plans]}"
        budget = sum(plan.budget_bytes for plan in plans) + more if all(plan.budget_bytes for plan in plans) else 0
        if peak > needed + noise or (budget and peak > budget + noise):
            more_text = f", outside {more}, budget {budget}, measured {peak / needed:.3f} of the plan"
            return Verdict("above", text + more_text)
    return Verdict("same", text)


def far(actual: Any, wanted: Any, moves: Mapping[str, float], *, near: float = NEAR, other: Any = None) -> list[str]:
    """Places of ``wanted`` from which ``actual`` is farther than ``near``, a share of the length, and than ``moves``.

    With ``other``, which torch's own way in gives, also those from which it is farther than that.
    """
    places, distances = [], _distances(actual, wanted)
    others = {} if other is None else _distances(other, wanted)
    for path, theirs in _places(wanted).items():
        length, distance = _length(theirs), distances[path]
        allowed = min(max(near * length, MOVES * moves.get(path, 0)), others.get(path, math.inf))
        if not distance <= allowed:
            places.append(f"{path}: {distance:.1e} away from a length of {length:.1e}, not {allowed:.1e}")
    return places


def _places(nest: Any) -> dict[str, Tensor]:
    return {pytree.keystr(path): value for path, value in pytree.tree_flatten_with_path(nest)[0]}


def _distances(actual: Any, wanted: Any) -> dict[str, float]:
    """Of each place of ``wanted``; infinite where ``actual`` has no such place."""
    ours = _places(actual)
    return {
        path: _distance(ours[path].double(), theirs.double()) if path in ours else math.inf
        for path, theirs in _places(wanted).items()
    }


def _length(values: Tensor) -> float:
    return float(values.double()[values.isfinite()].norm())


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Of the elements that are not alike: an infinity is like itself, what is no number like what is none."""
    apart = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    return float((ours[apart] - theirs[apart]).norm())


def _failed(error: Exception, at: str) -> Verdict:
    """Only a budget that cannot be kept is refused as a matter of course."""
    cause = getattr(error, "inner_exception", error)
    clear = isinstance(cause, roamc.BudgetError) and "\n" not in str(cause)
    return Verdict("refused" if clear else "raises", f"{at}: {_said(error)}")


def _said(error: Exception) -> str:
    cause = getattr(error, "inner_exception", error)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:300]
