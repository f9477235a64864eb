"""Replay of random numbers: random operators that draw what earlier ones drew, after the generator was set back.

``torch.utils.checkpoint`` does that around its second run, in Python, which leaves nothing in a trace:

    forward     state = get_rng_state()     dropout     rand_like
    backward    set_rng_state(state)        dropout_1   rand_like_1     draw again what forward's drew

So while a step is traced the CPU's generator holds a number instead of draws: the place in the list of all draws at
which the step is. Each operator that draws is traced with it and moves it on, and what is at a place that was drawn at
before becomes a replay of the operator there. States are kept and set back by any of torch's names, as they hold it.
All generators count as one: checkpoint keeps and sets back those of all its devices.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import fx

from roamc import compat
from roamc.errors import CaptureError
from roamc.graph import attribute, tensors_of
from roamc.graph.rewrite import keep_state, mode_of
from roamc.operators import ops
from roamc.operators.random import replay

FIRST = "roamc_draws_as"
"""Key of a node's ``meta``: name of the operator that first drew the numbers that this node draws again."""

MARKER = 0xF_A57EB
"""Stands in the generator's state during a trace, next to the trace's number; no other state has both."""

WORDS = slice(24, 40)
"""Bytes of the generator's state that hold ``MARKER`` and the trace's number: words from which the generator draws.

They lie behind the seed and the position.
"""

PLACE = slice(40, 48)
"""Bytes of the word behind ``WORDS``: during a trace, the number of draws up to where the step is."""

_traces = itertools.count(1)


class _Followed:
    """The CPU's generator while a graph is traced, and the names of the operators that drew there, each once."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.drawn: list[str] = []
        with compat.without_modes():
            self.before = generator.get_state()
            self.marked = self.before.clone()
            self.marked[WORDS] = torch.tensor([MARKER, next(_traces) % 2**32], device="cpu").view(torch.uint8)
        self.move(0)

    def move(self, place: int) -> None:
        """Set the generator to ``place``, counted in draws."""
        with compat.without_modes():
            state = self.marked.clone()
            state[PLACE] = torch.tensor([place], device="cpu").view(torch.uint8)
            self.generator.set_state(state)

    def place(self) -> int:
        """Where the generator is, in draws.

        Raises:
            CaptureError: it was seeded, was set to a state from outside of the step, or really drew, in any thread.
        """
        with compat.without_modes():
            state = self.generator.get_state()
            place = int(state[PLACE].view(torch.int64))
            state[PLACE] = self.marked[PLACE]
            if not torch.equal(state, self.marked):
                raise CaptureError(f"{SEEDED}. {BESIDE}")
        return place

    def draw(self, node: fx.Node) -> None:
        """Note what ``node`` draws, which has been traced this moment."""
        place = self.place()
        if place < len(self.drawn):
            node.meta[FIRST] = self.drawn[place]
        else:
            self.drawn.append(node.name)
        self.move(place + 1)

    def check_end(self) -> None:
        """Refuse a step that ends with its generator set back, which its program leaves behind all draws."""
        if self.place() != len(self.drawn):
            raise CaptureError(
                "the step ends with torch's generator set back (set_rng_state, torch.random.fork_rng), so that what is "
                "drawn next was drawn before; draw such numbers outside of the step and pass them in the batch, or use "
                "roamc.optimize or torch.compile"
            )


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

READING = [(module, "initial_seed") for module in (torch, torch.random, torch.cuda, torch.cuda.random)]
"""Modules with the names of their functions that return the seed of a generator of torch's."""


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """Context manager inside a trace: mark operators that draw random numbers which were drawn before.

    The mark stands under ``FIRST`` in a node's ``meta``; :func:`replay_marked` acts on it. Leave the context before the
    trace ends; on exit the CPU's generator gets the state that it had on entry.

    Raises:
        CaptureError: a generator is seeded inside of the step, its seed is read there, or it is set to a state from
            outside of the step or left at one from which the step has drawn; or another thread has drawn or seeded.
    """
    with _watched() as generator, contextlib.ExitStack() as patches:
        for names, refuse in ((SEEDING, _refuse_seed), (READING, _refuse_reading)):
            for module, name in names:
                patches.enter_context(mock.patch.object(module, name, _refused_here(refuse, getattr(module, name))))
        # Also behind torch's functions that a user's module has bound to names of its own.
        for module in (torch, torch.random):
            patches.enter_context(mock.patch.object(module, "default_generator", _Named()))
        yield
        generator.check_end()


@contextlib.contextmanager
def _watched() -> Iterator[_Followed]:
    """Follow the CPU's generator through what is traced; put it back."""
    generator = _Followed(torch.default_generator)
    graph = compat.graph_so_far()
    create = graph.create_node

    def traced(*args: Any, **kwargs: Any) -> fx.Node:
        node = create(*args, **kwargs)
        if node.op == "call_function" and _is_replayed(node.target):
            generator.draw(node)
        return node

    try:
        with mock.patch.object(graph, "create_node", traced):
            yield generator
    finally:
        generator.generator.set_state(generator.before)


class _Named(torch.Generator):
    """torch's default generator by its name, during a trace: what a graph cannot hold is refused in the user's line."""

    def __init__(self) -> None:
        self.refused = {name: _refused_here(refuse, getattr(DEFAULT, name)) for name, refuse in REFUSED.items()}

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("refused").get(name) or getattr(DEFAULT, name)


def _refused_here(refuse: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``refuse`` for the thread that calls this, and ``function`` for others, which a trace has no part in."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (refuse if threading.get_ident() == thread else function)(*args, **kwargs)

    return call


def _set_state(state: torch.Tensor) -> None:
    if compat.is_traced(state):
        raise CaptureError(
            "the step computes the state to which it sets torch's generator; set it to what get_rng_state returned, "
            "without a copy"
        )
    DEFAULT.set_state(state)


SEEDED = (
    "the step seeds torch's generator (torch.manual_seed) or sets it to a state from outside of the step, which a "
    "captured step would do once, while it is traced, and not in every step; seed outside of the step, or use "
    "roamc.optimize or torch.compile"
)

"""What a step may not do, and what to do instead."""

BESIDE = (
    "If it does neither, another thread has drawn from torch's generator while the step was traced: give that thread a "
    "generator of its own, or run the first step before it starts"
)
"""What looks the same where the generator is found changed."""


def _refuse_seed(*_: object, **__: object) -> NoReturn:
    raise CaptureError(SEEDED)


def _refuse_reading(*_: object, **__: object) -> NoReturn:
    raise CaptureError(
        "the step reads the seed of torch's generator (torch.initial_seed), which a captured step would do once, while "
        "it is traced, and not in every step; read it outside of the step and pass it in the batch as a tensor, or use "
        "roamc.optimize or torch.compile"
    )


DEFAULT = torch.default_generator
"""The CPU's generator, which has another name during a trace."""

REFUSED: dict[str, Callable[..., None]] = {
    "manual_seed": _refuse_seed,
    "seed": _refuse_seed,
    "initial_seed": _refuse_reading,
    "set_state": _set_state,
}
"""Methods of the default generator that a step may not call by its name, or not with every argument."""


def check_read(module: fx.GraphModule) -> None:
    """Refuse a step that computes with the bytes of the generator's state: it would keep those of its trace.

    Args:
        module: the step, traced under :func:`followed`.

    Raises:
        CaptureError: an operator reads a state that the generator had in a trace.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        value = attribute(module, str(node.target))
        if node.users and isinstance(value, torch.Tensor) and _is_marked(value):
            raise CaptureError(
                "the step computes with the state of torch's generator (torch.get_rng_state), which a captured step "
                "would read once, while it is traced; read it outside of the step and pass it in the batch"
            )


def _is_marked(state: torch.Tensor) -> bool:
    if state.dtype != torch.uint8 or state.shape != (DEFAULT.get_state().numel(),) or compat.is_traced(state):
        return False
    return int(state.clone()[WORDS].view(torch.int64)[0]) == MARKER


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
