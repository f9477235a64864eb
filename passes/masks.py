"""masks: on a GPU, dropouts take their masks from a counter, so that a mask is computed where it is read.

    rewrite:  y, mask = native_dropout(x, p)   -->  seeds = draw_seeds(n), once for n dropouts
                                                    mask = counter_mask(seeds[k], size, stride, 1 - p)
                                                    y = native_dropout_backward(x, mask, 1 / (1 - p))
              replay(state, native_dropout, x, p)   -->  counter_mask(seeds[k], ...) with the seed of the first draw
              own_part(mask, ranks, group)          -->  counter_mask(own_seeds(seeds, n, group)[k], ...), of these rows
    checks:   the user allows other numbers: ``numerics="fast"``; the graph has the dropouts that the decision names,
              each with all replays of its draw; they drop, on the graph's GPU, a tensor of a dtype that kernels hold

The mask is a pointwise value of 16 bytes, see :mod:`roamc.operators.counter`: pass ``fuse`` puts it into the group of
the product, and once more into the group of backward that reads it, and then it has no storage. An element is kept with
the probability that eager keeps it with, independently of all others, but other elements than in eager are. The seeds
come from the device's generator, so that steps after the same ``torch.manual_seed`` have the same masks. Where pass
``shard`` has a rank keep its rows of a mask that one rank draws, the rank computes its rows alone, with the same bits.
:mod:`roamc.graph.mask_judge` checks what the pass has written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roamc.errors import PlanError
from roamc.graph import TrainGraph, copied, main_device, operators
from roamc.graph.keep import is_kept
from roamc.graph.reader_kinds import readers_of
from roamc.graph.rewrite import Writer, mode_of
from roamc.operators import ops
from roamc.operators.counter import WORDS, counter_mask, draw_seeds, own_seeds
from roamc.operators.gpu.printed import printed
from roamc.operators.random import replay, save_rng_state
from roamc.operators.shards import own_part
from roamc.options import Options
from roamc.rewriting.dropouts import MaskCall, dropout_of, renamed, take_apart
from roamc.rewriting.versions import erase_dead, up_to_date

NAME = "masks"

aten = torch.ops.aten

DEVICES = frozenset({"cuda"})
"""Types of the devices whose groups keep values inside in registers."""

HELD = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Dtypes that kernels hold in registers; a dropout of another one would have to store its mask."""


@dataclass(frozen=True)
class Decision:
    """A decision names the dropouts whose masks follow from a seed.

    Attributes:
        seeds: for each seed, the names of the nodes whose mask it gives: the dropout, then the replays of its draw, in
            graph order.
    """

    seeds: tuple[tuple[str, ...], ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Find the dropouts that can take their masks from a counter; ``graph`` stays as it is.

    The decision is empty unless ``options.numerics`` is "fast" and the graph is on a GPU; and where pass ``fuse``,
    without which masks would be stored all the same, is left out.
    """
    if options.numerics != "fast" or "fuse" in options.disable or main_device(graph).type not in DEVICES:
        return Decision()
    device, nodes = main_device(graph), {node.name: node for node in operators(graph.graph)}
    return Decision(tuple(names for names in _draws(graph) if _fit([nodes[name] for name in names], device)))


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Return ``graph`` with masks from a counter, on a new FX graph; the given one stays as it is.

    Raises:
        PlanError: the graph has no such dropouts, or one of them cannot be split, or has other replays.
    """
    if not decision.seeds:
        return graph
    draws, device = set(_draws(graph)), main_device(graph)
    nodes = {node.name: node for node in operators(graph.graph)}
    for names in decision.seeds:
        if names not in draws or not _fit([nodes[name] for name in names], device):
            raise PlanError(f"this graph has no dropouts {', '.join(names) or '(none)'} with one draw, on a GPU")
    if len(set(decision.seeds)) != len(decision.seeds):
        raise PlanError("two seeds are drawn for one dropout")
    graph = copied(graph)
    phase, other = dict(graph.phase), dict[str, str]()
    nodes = {node.name: node for node in operators(graph.graph)}
    first = min(nodes[names[0]] for names in decision.seeds)
    mode = mode_of(graph.graph)
    assert mode is not None, "a graph with a dropout has tensors"
    writer = Writer(graph.graph, mode, phase[first.name])
    seeds = _Seeds(writer, first, writer.insert(first, draw_seeds, len(decision.seeds), device=device))
    for row, names in enumerate(decision.seeds):
        writer.current = phase[names[0]]
        seed = writer.insert(nodes[names[0]], aten.select.int, seeds.drawn, 0, row)
        for name in names:
            dropout = dropout_of(nodes[name])
            assert dropout is not None, f"{name} is no dropout"
            for part in _parts(nodes[name]):
                own = seeds.of_part(part, row)
                part.target, part.args = counter_mask, (own, *_lies(part.meta["val"]), dropout.keep)
            call = MaskCall(counter_mask, (seed, *_lies(dropout.mask), dropout.keep))
            split = take_apart(graph.graph, nodes[name], call, 1.0 / dropout.keep)
            phase |= dict.fromkeys(split.values(), phase[name])
            other |= split
    graph = renamed(graph, other)
    for node in reversed(operators(graph.graph)):
        if node.target is save_rng_state and not node.users:  # all replays of this draw are masks now
            graph.graph.erase_node(node)
    erase_dead(graph.graph, {*graph.gradients, *graph.saved})
    count = len(decision.seeds)
    who = "1 dropout takes its mask" if count == 1 else f"{count} dropouts take their masks"
    note = f"masks: {who} from a counter, and other elements are kept than in eager"
    return up_to_date(graph.replace(notes=(*graph.notes, note)), {**phase, **writer.phase})


@dataclass(frozen=True)
class _Seeds:
    """Seeds that are drawn, and those of this rank's parts of masks.

    Attributes:
        writer: writes nodes.
        first: the node in front of which all of them stand.
        drawn: the seeds of whole masks.
    """

    writer: Writer
    first: fx.Node
    drawn: fx.Node
    _own: dict[tuple[int, Any], fx.Node] = field(default_factory=dict)

    def of_part(self, part: fx.Node, row: int) -> fx.Node:
        """Return the seed of ``part``, this rank's rows of the mask with seed ``row``."""
        step, group = part.meta["val"].numel() // WORDS, part.args[2]
        if (step, group) not in self._own:
            phase, self.writer.current = self.writer.current, self.writer.phase[self.drawn.name]
            self._own[step, group] = self.writer.insert(self.first, own_seeds, self.drawn, step, group)
            self.writer.current = phase
        return self.writer.insert(part, aten.select.int, self._own[step, group], 0, row)


def _lies(mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of a mask, as arguments of an operator."""
    return list(mask.shape), list(mask.stride())


def _draws(graph: TrainGraph) -> list[tuple[str, ...]]:
    """Return for each call of ``native_dropout`` its name, then those of the nodes that replay its draw."""
    replays: dict[fx.Node, list[str]] = {}
    drawn_behind: dict[fx.Node, fx.Node] = {}
    states: list[fx.Node] = []
    for node in operators(graph.graph):
        if node.target is save_rng_state:
            states.append(node)
        elif node.target is replay:
            draw = drawn_behind.get(node.args[0])  # type: ignore[arg-type]
            if draw is not None:
                replays[draw].append(node.name)
        elif ops.rule(node.target).may_draw:
            drawn_behind |= dict.fromkeys(states, node)
            replays[node] = []
            states = []
    dropouts = (node for node in replays if node.target is aten.native_dropout.default)
    return [(node.name, *replays[node]) for node in dropouts]


def _fit(nodes: Sequence[fx.Node], device: torch.device) -> bool:
    """Whether these nodes are dropouts with one mask, which can be split, and whose mask a kernel can compute.

    What ``roamc.keep`` keeps is in no group, so its mask would be stored; and so would one that an operator outside of
    groups reads.
    """
    masks = [(pick, node) for node in nodes for pick in node.users if pick.args[1] == 1]
    if not all(_prints(reader, node) for mask, node in masks for reader in _readers(mask)):
        return False
    dropouts = [dropout_of(node) for node in nodes]
    fits = all(
        each is not None
        and 0 < each.keep < 1
        and each.dropped.dtype in HELD
        and each.mask.device == device
        and each.mask.dim() > 0
        and each.mask.numel() > 0
        for each in dropouts
    )
    return fits and len(set(_alike(dropouts))) == 1 and not any(map(is_kept, nodes))


def _readers(mask: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads a mask. Where views of it lead to a rank's parts of it alone, the parts."""
    for user in mask.users:
        parts = list(_readers(user)) if user.target is aten.view.default else []
        yield from parts if parts and all(part.target is own_part for part in parts) else [user]


def _parts(dropout: fx.Node) -> list[fx.Node]:
    """This rank's parts of the mask of a dropout."""
    masks = (pick for pick in dropout.users if pick.args[1] == 1)
    return [reader for mask in masks for reader in _readers(mask) if reader.target is own_part]


def _prints(reader: fx.Node, dropout: fx.Node) -> bool:
    """Whether a kernel computes what ``reader`` reads of the mask of ``dropout``.

    Of this rank's part, the readers have to print in turn, and the part has to be taken before the next draw: masks are
    judged in the order in which they are first read.
    """
    if reader.target is not own_part:
        return printed(reader.target) is not None
    begun = reader.prev
    while begun is not dropout and not ops.rule(begun.target).may_draw:
        begun = begun.prev
    part: torch.Tensor = reader.meta["val"]
    whole = dropout.meta["val"][1].is_contiguous() and not part.numel() % WORDS
    return whole and begun is dropout and all(printed(end.target) is not None for end, _ in readers_of(reader))


def _alike(dropouts: Iterable[object]) -> list[tuple[object, ...]]:
    """What dropouts with one draw have in common."""
    return [(each.keep, each.mask.shape, each.mask.stride()) for each in dropouts]  # type: ignore[attr-defined]
