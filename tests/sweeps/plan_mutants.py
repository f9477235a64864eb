"""Plans with one field changed: each is refused by an error of ours, or its program gives the same bits."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roamc.errors import RoamcError
from roamc.graph import TrainGraph, copied
from roamc.options import Options
from roamc.passes import layout
from roamc.planning import layout_judge, search
from roamc.planning.plan import Plan
from roamc.solvers.layout.effort import TrimEffort
from tests.conftest import allow_arenas_of_any_size
from tests.graphs import clones, graph_and_inputs, run_real
from tests.models import NanoGPT, make, next_token, tokens
from tests.planning.test_pipeline import run_program
from tests.random_graphs import random_model
from tests.sweeps.compare import bits

Spot = tuple[Any, ...]
"""Keys from the plan's dictionary down to one value."""

SHARES = (None, 0.8, 0.0)
"""Bytes asked for, of those that the plan without reruns needs; None for that plan, 0 for the lowest peak."""


class Mixed(nn.Module):
    """Convolution, pooling, batch norm, relu, dropout, and a buffer that is read and then written."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.hidden, self.head = nn.Linear(128, 32), nn.Linear(32, 10)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        x = F.dropout(F.relu(self.hidden(x.flatten(1))), 0.3) * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.99)
        return self.head(x.tanh())


def mixed(batch: int) -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    torch.manual_seed(batch)
    return Mixed().train(), (torch.randn(batch, 3, 8, 8),), lambda m, x: m(x).square().mean()


def gpt(layers: int) -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
    torch.manual_seed(layers)
    return NanoGPT(dropout=0.1, layers=layers).train(), (tokens(),), next_token


MODELS: tuple[Callable[[], Any], ...] = (
    functools.partial(mixed, 48),
    functools.partial(gpt, 1),
    functools.partial(random_model, 1, size=8),
    functools.partial(mixed, 33),
    functools.partial(gpt, 2),
    functools.partial(make, "nanogpt-dropout"),  # the lowest peak of its step keeps values in smaller forms
)
COUNT = 2 * len(SHARES) * len(MODELS)
"""How many valid plans there are."""


@dataclass(frozen=True)
class Valid:
    """A plan as JSON data, the graph that it is for, inputs, and what a run of the graph gives."""

    graph: TrainGraph
    inputs: list[Any]
    data: dict[str, Any]
    expected: list[Any]

    @property
    def plan_text(self) -> str:
        """The plan as a file has it."""
        return json.dumps(self.data)


@functools.cache
def _trials(model: int, route: str) -> tuple[TrainGraph, list[Any], search.PlanSearch, list[Any]]:
    graph, inputs = graph_and_inputs(*MODELS[model](), route)
    used = clones(inputs)
    torch.manual_seed(3)
    returned, _ = run_real(copied(graph), used)
    expected = [*returned, *used, torch.get_rng_state()]
    with small_graphs_have_arenas_with_holes():
        return graph, inputs, search.PlanSearch(copied(graph), Options()), expected


@contextlib.contextmanager
def small_graphs_have_arenas_with_holes() -> Iterator[None]:
    """Else only those of megabytes have any."""
    with pytest.MonkeyPatch.context() as patch:
        allow_arenas_of_any_size(patch)
        trim = TrimEffort(least_bytes=1, pieces=(4096,))
        patch.setattr(layout, "EFFORT", dataclasses.replace(layout.EFFORT, trim=trim))
        with small_holes_are_judged():
            yield


@contextlib.contextmanager
def small_holes_are_judged() -> Iterator[None]:
    """Else only holes of more than any page are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_judge, "PIECE", 4096)
        yield


@contextlib.contextmanager
def numbers_are_believed() -> Iterator[None]:
    """What a plan says of itself is not counted again: only judges of what it does stand in its way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "check_numbers", lambda plan, planned: None)
        yield


@functools.cache
def valid_plan(number: int) -> Valid:
    """One of :data:`COUNT` plans: every model, both routes, every share of the bytes."""
    model, rest = divmod(number, 2 * len(SHARES))
    share, route = SHARES[rest // 2], ("step", "joint")[rest % 2]
    graph, inputs, trials, expected = _trials(model, route)
    with small_graphs_have_arenas_with_holes():
        if share is None:
            planned = trials.first
        elif share == 0:
            planned = trials.lowest()
        else:
            planned = trials.attempt(int(share * trials.first.plan.needed_bytes))
    return Valid(graph, inputs, json.loads(planned.plan.to_json()), expected)


def spots(value: Any, spot: Spot = ()) -> Iterator[Spot]:
    """Every value of the plan: containers, and what is in them."""
    if spot:
        yield spot
    items = sorted(value.items()) if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from spots(item, (*spot, key))


ODD: tuple[Any, ...] = (
    *(None, True, False, "", "x", 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -1.5, float("nan"), float("inf")),
    *([], {}, [1], ["x"], {"x": 1}),
)
"""Values of every type, negative, huge and not a number."""


OFTEN = ("reruns", "codes", "order", "overwrites", "offset", "trims", "with_allocator", "aliases", "dead", "dropouts")
"""Fields that are changed four times as often as others."""


def mutate(data: dict[str, Any], rng: Random) -> tuple[dict[str, Any], str]:
    """The plan with one value changed, taken away or doubled, and what was done."""
    changed = copy.deepcopy(data)
    decisions = changed["decisions"]
    part = rng.choice((*decisions, *decisions, "retain", "layout", "plan"))
    root = changed if part == "plan" else decisions[part]
    field = rng.choice([name for name in sorted(root) for _ in range(4 if root[name] and name in OFTEN else 1)])
    spot = rng.choice([(field,), *(inner for inner in spots(root[field], (field,)) if inner != (field,))])
    parent: Any = root
    for key in spot[:-1]:
        parent = parent[key]
    before, how = parent[spot[-1]], rng.choice(("near", "near", "odd", "other", "swap", "drop", "double"))
    _change(parent, spot[-1], how, root, rng)
    return changed, f"{part}: {spot} {how}: {str(before)[:60]} -> {str(parent)[:60]}"


def _change(parent: Any, key: Any, how: str, root: Any, rng: Random) -> None:
    value = parent[key]
    if how == "drop":
        del parent[key]
    elif how == "double" and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(value))
    elif how == "swap" and key == "offset":
        _shift(root, rng.choice((1, 2, 4, 8, 16, 32, 64)))
    elif how == "swap" and isinstance(parent, list):
        other = rng.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif how == "near" and isinstance(value, int | float) and not isinstance(value, bool):
        parent[key] = value + rng.choice((-512, -64, -1, 1, 64, 512, 4096))
    elif how == "odd":
        parent[key] = copy.deepcopy(rng.choice(ODD))
    else:  # a value of the same type from elsewhere in the same decision
        alike = [one for one in _leaves(root) if type(one) is type(value)]
        parent[key] = copy.deepcopy(rng.choice(alike)) if alike else rng.choice(ODD)


def _shift(layout: dict[str, Any], alignment: int) -> None:
    """Give the arena another alignment, and begin every tensor that many bytes later."""
    layout["alignment"] = alignment
    layout["offset"] = {name: offset + alignment for name, offset in layout["offset"].items()}
    layout["arena_bytes"] += alignment
    layout["trims"], layout["peak_bytes"], layout["needed_bytes"] = [], 2**40, 2**40


def _leaves(value: Any) -> Iterator[Any]:
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield inner
        yield from _leaves(inner)
    if isinstance(value, dict):
        yield from value


def outcome(valid: Valid, data: dict[str, Any], *, believed: bool = False) -> str:
    """``"refused"`` or ``"same bits"``.

    Args:
        valid: the plan before the change.
        data: the changed plan.
        believed: whether the numbers that it says of itself are not compared with what it does.

    Raises:
        AssertionError: the program gives other bits.
    """
    try:
        plan = Plan.from_json(json.dumps(data))
        with small_holes_are_judged(), numbers_are_believed() if believed else contextlib.nullcontext():
            planned = search.run(copied(valid.graph), Options(), plan)
    except RoamcError:
        return "refused"
    inputs = clones(valid.inputs)
    torch.manual_seed(3)
    returned = run_program(planned, inputs)
    actual = [*returned, *inputs, torch.get_rng_state()]
    for one, other in zip(valid.expected, actual, strict=True):
        same = torch.equal(bits(one), bits(other)) if isinstance(one, Tensor) else one == other
        assert same, "the program gives other bits"
    return "same bits"
