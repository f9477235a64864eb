"""Every field of plan files changed, one at a time: a changed file is refused by name, and a forged one is counted.

A forged file has the checksum of what it says, as one has that :meth:`roamc.planning.plan.Plan.save` wrote of a changed
plan. Numbers that can be counted are then those of the plan that is applied, whatever the file says.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from roamc.errors import RoamcError
from roamc.frontends.workload import Workload, capture
from roamc.graph import TrainGraph, copied
from roamc.optim import CompAct
from roamc.options import parse_options
from roamc.planning import search
from roamc.planning.plan import Plan, load_plan
from tests.graphs import captured_step, graph_and_inputs
from tests.models import make
from tests.passes.test_overlap import graph_of as with_collectives
from tests.sweeps.plan_mutants import (
    Spot,
    gpt,
    mixed,
    small_graphs_have_arenas_with_holes,
    small_holes_are_judged,
    spots,
)


def _projected() -> TrainGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return CompAct(parameters, lr=lr, rank=1 / 4, dense=())

    return captured_step(model, (torch.randn(128, 32),), lambda m, x: m(x).square().mean(), optimizer).graph


def _on_a_gpu() -> TrainGraph:
    with torch.device("meta"):
        model, batch = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (torch.zeros(2, 4, 16),)
    workload = Workload("encoder", model, batch, lambda m, x: m(x).square().mean(), torch.optim.AdamW)
    return capture(workload, device=torch.device("cuda"))


def _captured(model: Any, route: str) -> TrainGraph:
    return graph_and_inputs(*model, route)[0]


KINDS: dict[str, tuple[Callable[[], TrainGraph], dict[str, Any]]] = {
    "plain": (lambda: _captured(mixed(33), "step"), {}),
    "halves": (lambda: _captured(mixed(48), "joint"), {}),
    "budget": (lambda: _captured(gpt(1), "step"), {"memory_budget": "80%"}),
    "lowest": (lambda: _captured(make("nanogpt-dropout"), "joint"), {"memory_budget": "min"}),
    "light": (lambda: _captured(gpt(1), "joint"), {"memory_budget": "light"}),
    "share of time": (lambda: _captured(gpt(1), "step"), {"memory_budget": "+5%"}),
    "lossy": (lambda: _captured(make("nanogpt-dropout"), "step"), {"memory_budget": "min", "codecs": "tempo"}),
    "overlap": (with_collectives, {"profile": "cpu"}),
    "project": (_projected, {}),
    "gpu": (_on_a_gpu, {"gpu": "l4"}),
}
"""What plan files are taken of, by name: how the graph is captured, and options."""


@dataclass(frozen=True)
class Saved:
    """A plan in a file, the graph that it is for, and what is applied of it.

    Attributes:
        graph: the captured graph.
        settings: the options that the plan was made under, and is applied under.
        data: what the file says, the checksum included.
        applied: the plan that the file as it is gives.
    """

    graph: TrainGraph
    settings: dict[str, Any]
    data: dict[str, Any]
    applied: Plan


@functools.cache
def saved(kind: str, folder: Path) -> Saved:
    """The plan of a kind, saved to a file in ``folder``."""
    make_graph, settings = KINDS[kind]
    graph, path = make_graph(), folder / "plan.json"
    with small_graphs_have_arenas_with_holes():
        search.run(copied(graph), parse_options(settings)).plan.save(path)
    return Saved(graph, settings, json.loads(path.read_text()), applied(graph, settings, load_plan(path)))


def applied(graph: TrainGraph, settings: dict[str, Any], plan: Plan) -> Plan:
    """The plan that is counted where ``plan`` is applied to a copy of ``graph``."""
    with small_holes_are_judged():
        return search.run(copied(graph), parse_options(settings), plan).plan


def changes(data: dict[str, Any]) -> Iterator[tuple[Spot, Any]]:
    """Every changed plan's spot, and what stands there instead; :data:`DROPPED` for an item that is taken away."""
    for spot in spots(data):
        value = functools.reduce(lambda inner, key: inner[key], spot, data)
        others: tuple[Any, ...] = (None, "x", 0, -1)
        if isinstance(value, int | float):
            others = (value + 1, 2 * value, 0, -1, None, "x")
        elif isinstance(value, str):
            others = (value + "x", "", 0, None)
        for other in others:
            if type(other) is not type(value) or other != value:
                yield spot, other
        yield spot, DROPPED


DROPPED = object()
"""Stands for nothing at all, where a value was."""


def changed(data: dict[str, Any], spot: Spot, other: Any) -> dict[str, Any]:
    """A copy of ``data`` with ``other`` at ``spot``."""
    data = copy.deepcopy(data)
    parent = functools.reduce(lambda inner, key: inner[key], spot[:-1], data)
    if other is DROPPED:
        del parent[spot[-1]]
    else:
        parent[spot[-1]] = other
    return data


def of_file(data: dict[str, Any], path: Path) -> str:
    """``"refused"`` where :func:`load_plan` refuses a file with ``data`` by its name, else what it does."""
    path.write_text(json.dumps(data))
    try:
        load_plan(path)
    except RoamcError as error:
        return "refused" if str(error).startswith(f"{path}: ") else f"FAULT: refused without its name: {error}"
    return "FAULT: believed"


def forged(one: Saved, data: dict[str, Any]) -> str:
    """``"refused"``, ``"counted"``, or what is believed of a forged plan: names of fields of the plan that differ."""
    data = {key: value for key, value in data.items() if key != "checksum"}
    try:
        plan = applied(one.graph, one.settings, Plan.from_json(json.dumps(data)))
    except RoamcError:
        return "refused"
    fields = [item.name for item in dataclasses.fields(Plan) if item.compare]
    differ = [name for name in fields if getattr(plan, name) != getattr(one.applied, name)]
    return f"believed: {', '.join(differ)}" if differ else "counted"


SAID = {
    "layout": ("offset", "with_allocator", "trims", "alignment"),
    "overlap": ("collectives", "order"),
    "reorder": ("order",),
    "retain": ("reruns", "codes", "once", "allowed"),
    "reuse": ("overwrites",),
}
"""What decisions with numbers do; their other fields are what they say of that."""

NOT_COUNTED = {
    "budget_added", "budget_bytes", "least_bytes", "threads",  # what was asked for, and the machine
    "step_seconds", "overlap.link_seconds",  # of a profile
    "layout.algorithm", "overlap.status", "reorder.algorithm", "reorder.candidates", "reorder.laid_out",  # the search
    "reorder.peak_bytes",  # of the order in front of pass overlap
    "retain.bound_seconds", "retain.peak_bytes", "retain.status",  # of the solver's order, which no plan has
}  # fmt: skip
"""What a plan says that nobody can count again from the graph: its checksum alone speaks for it."""


def is_counted(spot: Spot) -> bool:
    """Whether a spot is of what a plan says of itself, and can be counted again."""
    if spot[0] != "decisions":
        return spot[0] not in (*NOT_COUNTED, "checksum")
    says = len(spot) > 2 and spot[1] in SAID and spot[2] not in SAID[spot[1]]
    return says and f"{spot[1]}.{spot[2]}" not in NOT_COUNTED


def sample(one: Saved, count: int, among: Callable[[Spot], bool] = lambda spot: True) -> list[tuple[Spot, Any]]:
    """At most ``count`` changes of a plan, of spots ``among`` says; drawn with a fixed seed."""
    every = [(spot, other) for spot, other in changes(one.data) if among(spot)]
    return Random(0).sample(every, min(count, len(every)))
