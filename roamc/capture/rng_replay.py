"""Replay of random numbers: random operators that draw what others drew, as the generator was set back in between.

``torch.utils.checkpoint`` does that around its second run, in Python, which leaves nothing in a trace:

    forward     state = get_rng_state()     dropout     rand_like
    backward    set_rng_state(state)        dropout_1   rand_like_1     draw again what forward's drew

So a state is followed as a place in the list of all draws, and what draws at a place that was drawn at before becomes
a replay of that operator. All generators count as one: checkpoint keeps and sets back those of all its devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import fx

from roamc import compat
from roamc.errors import CaptureError
from roamc.graph import tensors_of
from roamc.graph.rewrite import keep_state, mode_of
from roamc.operators import ops
from roamc.operators.random import replay

FIRST = "roamc_draws_as"
"""Key of a node's meta: the name of the operator that drew first what it draws."""


class _Generator:
    """The place of the generator in the list of all draws, while a graph is being traced."""

    def __init__(self) -> None:
        self.drawn: list[str] = []
        self.place = 0
        self.last: fx.Node | None = None
        self.states: list[tuple[torch.Tensor, int]] = []
        self.get, self.set = torch.get_rng_state, torch.set_rng_state

    def get_state(self) -> torch.Tensor:
        self.catch_up()
        state = self.get()
        self.states.append((state, self.place))
        return state

    def set_state(self, state: torch.Tensor) -> None:
        self.catch_up()
        self.place = next((place for known, place in self.states if known is state), len(self.drawn))
        self.set(state)

    def catch_up(self) -> None:
        """Follow the draws that were traced since the last call, and mark those that draw again."""
        fresh = []
        for node in reversed(compat.graph_so_far().nodes):
            if node is self.last:
                break
            fresh.append(node)
        for node in reversed(fresh):
            self.last = node
            if node.op == "call_function" and _is_replayed(node.target):
                self._draw(node)

    def _draw(self, node: fx.Node) -> None:
        if self.place < len(self.drawn):
            node.meta[FIRST] = self.drawn[self.place]
        else:
            self.drawn.append(node.name)
        self.place += 1


def _is_replayed(target: Any) -> bool:
    """Whether ``target`` draws, or may, so that another run has to draw what the first drew."""
    rule = ops.rule(target)
    return rule.random or (rule.unknown and not rule.mutates)


SEEDING = [
    *((module, name) for module in (torch, torch.random) for name in ("manual_seed", "seed")),
    *((module, name) for module in (torch.cuda, torch.cuda.random) for name in ("manual_seed", "manual_seed_all")),
    *((module, name) for module in (torch.cuda, torch.cuda.random) for name in ("seed", "seed_all")),
]
"""Modules with the names of their functions that seed a generator of torch's."""


MARKER = 0x5EED_0F_A_57EB
"""Stands for the seed of the CPU's generator during a trace: seeds and states from elsewhere take its place."""

SEED_BYTES = 8
"""Bytes at the front of that generator's state that are its seed; the numbers from which it draws lie behind."""


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """Mark operators that draw what an earlier one drew, while a step is traced; see ``FIRST``.

    Enter and leave it inside the traced function. :func:`replay_marked` replaces what is marked.

    Raises:
        CaptureError: a generator is seeded inside of the step, or set to a state from outside of it.
    """
    generator = _Generator()
    with contextlib.ExitStack() as patches:
        # Those of torch.random stay: Dynamo calls them around what it compiles.
        patches.enter_context(mock.patch.object(torch, "get_rng_state", generator.get_state))
        patches.enter_context(mock.patch.object(torch, "set_rng_state", generator.set_state))
        for module, name in SEEDING:
            patches.enter_context(mock.patch.object(module, name, _refuse_seed))
        patches.enter_context(_untouched())
        yield
    generator.catch_up()


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """Refuse whatever moves the CPU's generator, from which traced operators do not draw; it is then put back.

    Meanwhile it has another seed, with which it draws the same: to be seeded with the seed that it has is seen, too.
    """
    generator = torch.default_generator
    with compat.without_modes():
        before = generator.get_state()
        marked = torch.cat((torch.tensor([MARKER]).view(torch.uint8), before[SEED_BYTES:]))
        generator.set_state(marked)
    try:
        yield
        with compat.without_modes():
            if not torch.equal(generator.get_state(), marked):
                _refuse_seed()
    finally:
        generator.set_state(before)


def _refuse_seed(*_: object, **__: object) -> NoReturn:
    raise CaptureError(
        "the step seeds torch's generator (torch.manual_seed), which a captured step would do once, while it is "
        "traced, and not in every step; seed outside of the step, or use roamc.optimize or torch.compile"
    )


def replay_marked(graph: fx.Graph) -> None:
    """Replace each marked operator by a replay of the draw that its mark names, and remove the marks.

    A replay leaves the generator as it finds it. The state that it needs is kept by a new node in front of the first
    draw.

    Args:
        graph: traced under :func:`followed`; changed in place.

    Raises:
        CaptureError: a marked operator writes in place, or is another than the one that drew first.
    """
    by_name = {node.name: node for node in graph.nodes}
    states: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if FIRST in node.meta]:
        first = by_name.get(node.meta.pop(FIRST))
        if first is None or first.target is not node.target or _geometry(first) != _geometry(node):
            raise CaptureError(
                f"{node.target} draws from a generator that was set back, and not what was drawn there first; "
                "leave set_rng_state out of the step"
            )
        if ops.rule(node.target).mutates:
            raise CaptureError(
                f"{node.target} draws in place inside a torch.utils.checkpoint region; draw out of place, as "
                "torch.rand_like and torch.bernoulli do, or use torch.compile"
            )
        if first not in states:
            states[first] = keep_state(graph, first, mode_of(graph) or contextlib.nullcontext())
        node.args = (states[first], node.target, *node.args)
        node.target = replay


def _geometry(node: fx.Node) -> list[tuple[object, ...]]:
    return [(tuple(t.shape), t.stride(), t.dtype, t.device) for _, t in tensors_of(node)]
