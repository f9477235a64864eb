"""The programs that the budget table compares: one training step each, by name.

A name is a family, then what it does about memory: ``eager``, ``eager+block``, ``inductor@0.5``, ``optimize@300MB``.
After ``+`` stands what torch's checkpointing keeps of a block, or ``fast`` for roamc's numerics; after ``@`` the budget
in the family's own terms; roamc's programs without one have "+0%".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import roamc
from benchmarks.blocks import Blocked, wrap
from roamc.budget import NO_TIME
from roamc.graph import TrainGraph
from roamc.options import Options
from roamc.planning import search
from roamc.planning.plan import Plan
from roamc.planning.planned import Planned

FAMILIES = ("eager", "aot_eager", "inductor", "max-autotune", "optimize", "train_step")
FAST, FREED = "fast", "freed"
"""How roamc runs a program: with ``numerics="fast"``, or with ``idle_arena="free"``."""
Look = Callable[[], None]


@dataclass(frozen=True)
class Name:
    """The parts of a program's name; ``how`` and ``budget`` are empty where there is none."""

    family: str
    how: str
    budget: str

    @staticmethod
    def parse(text: str) -> Name:
        """Take a name apart.

        Raises:
            ValueError: there is no such family.
        """
        left, _, budget = text.partition("@")
        family, _, how = left.partition("+")
        if family not in FAMILIES:
            raise ValueError(f"{text!r}: families are {', '.join(FAMILIES)}")
        return Name(family, how, budget)

    def values_like(self) -> str:
        """The program whose loss and gradients this one has to give; "" for eager, and for other numerics."""
        if self.how == FAST:
            return f"{self.family}+{FAST}" if self.budget else ""
        if self.how or self.budget:
            return self.family
        return {"eager": "", "optimize": "aot_eager"}.get(self.family, "eager")


@dataclass(frozen=True)
class Program:
    """One way to train one model.

    Attributes:
        step: one step; returns the loss. Calls what it is given between backward and update, if the two are apart.
        model: its parameters are trained, and have their gradients at that moment.
        plans: what roamc planned, once a step has run.
    """

    step: Callable[[Look | None], Tensor]
    model: nn.Module
    plans: Callable[[], list[Plan]]


def build(name: str, work: Blocked, profile: str) -> Program:
    """The program called ``name`` over the model and batch of ``work``, which it owns from now on."""
    row, model = Name.parse(name), work.model
    if row.how not in ("", FAST, FREED):
        wrap(work, row.how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options = {"memory_budget": row.budget or NO_TIME, "profile": profile, "strict": True, "cache": False}
    if row.how == FAST:
        options["numerics"] = FAST
    if row.how == FREED:
        options["idle_arena"] = "free"
    if row.family == "train_step":
        whole = roamc.train_step(model, lambda net, *batch: net(*batch), optimizer, **options)
        return Program(lambda look: whole(*work.batch), model, lambda: whole.plans)
    if row.family == "optimize":
        roamc.optimize(model, **options)
        return Program(_loop(work, optimizer), model, lambda: roamc.plans(model))
    if row.family == "max-autotune":
        model.compile(mode=row.family, dynamic=False)
    elif row.family != "eager":
        model.compile(backend=row.family, dynamic=False)
    step = _loop(work, optimizer)
    if row.family == "inductor":
        step = _first_under(step, float(row.budget or 1.0))
    return Program(step, model, list)


@contextlib.contextmanager
def plan_kept_in(path: Path) -> Iterator[None]:
    """Where ``path`` has a plan, roamc takes that one and decides nothing: planning twice gives the same."""
    decide = search.run

    def run(graph: TrainGraph, options: Options, **how: Any) -> Planned:
        return decide(graph, options, Plan.from_json(path.read_text()) if path.exists() else None, **how)

    with mock.patch.object(search, "run", run):
        yield


@contextlib.contextmanager
def timed_planning() -> Iterator[list[tuple[float, TrainGraph]]]:
    """Seconds of the process that each plan took, and its graph. (A plan's own ``seconds`` are of its last attempt.)"""
    decide = search.run
    taken: list[tuple[float, TrainGraph]] = []

    def run(graph: TrainGraph, options: Options, **how: Any) -> Planned:
        start = time.process_time()
        planned = decide(graph, options, **how)
        taken.append((time.process_time() - start, planned.graph))
        return planned

    with mock.patch.object(search, "run", run):
        yield taken


def _loop(work: Blocked, optimizer: torch.optim.Optimizer) -> Callable[[Look | None], Tensor]:
    def step(look: Look | None) -> Tensor:
        loss = work.model(*work.batch)
        loss.backward()
        if look is not None:
            look()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        result: Tensor = loss.detach()
        return result

    return step


def _first_under(step: Callable[[Look | None], Tensor], budget: float) -> Callable[[Look | None], Tensor]:
    """``step``, its first call, which compiles, under torch's activation memory budget."""
    done = False

    def run(look: Look | None) -> Tensor:
        nonlocal done
        with contextlib.nullcontext() if done else _torch_budget(budget):
            done = True
            return step(look)

    return run


@contextlib.contextmanager
def _torch_budget(budget: float) -> Iterator[None]:
    with torch._functorch.config.patch(activation_memory_budget=budget):
        yield
