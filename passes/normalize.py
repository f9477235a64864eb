"""normalize: take out operators without effect or that repeat another, and split dropout into its mask and a product.

    rewrite:  y = detach(x); f(y)              -->  f(x)
              y = op(x), y never read          -->  nothing, if op has no other effect
              y = op(x); z = op(x)             -->  y = op(x), if y is still read behind z
              y, mask = native_dropout(x, p)   -->  mask = dropout_mask(size, stride, 1 - p)
                                                    y = native_dropout_backward(x, mask, 1 / (1 - p))
    checks:   the graph has every node that the decision names; nodes that are erased have no readers left;
              a dropout that is split runs on a CPU, drops, and has a dense input

Dropout is split because torch's CPU kernel computes these two steps anyway, with the same bits. ``y`` may then be
written over ``x``, and recomputing ``y`` takes ``x`` and the saved mask but draws no numbers. The product is the
operator of dropout's backward; the scale is rounded to the dtype of ``x``, as torch does in forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from roamc.errors import PlanError
from roamc.graph import TrainGraph, operators, output_node
from roamc.operators import ops
from roamc.operators.random import FLOATS, dropout_mask, rounded
from roamc.options import Options
from roamc.rewriting.dropouts import MaskCall, dropout_of, renamed, take_apart
from roamc.rewriting.repeats import read_first, repeats
from roamc.rewriting.versions import saved_values

NAME = "normalize"

aten = torch.ops.aten


@dataclass(frozen=True)
class Decision:
    """A decision names the nodes to take out and the dropouts to split.

    Attributes:
        aliases: names of nodes that only give their input another name; their users read the input instead. ``dead``
            lists these nodes as well.
        dead: names of nodes to erase; a node is listed behind all of its users.
        dropouts: names of ``native_dropout`` nodes to split into a mask and a product with the mask.
        repeats: pairs of names: a node, and the earlier one that its readers read instead. ``dead`` lists the first.
    """

    aliases: tuple[str, ...]
    dead: tuple[str, ...]
    dropouts: tuple[str, ...]
    repeats: tuple[tuple[str, str], ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Find aliases and dead nodes to take out, and dropouts to split; ``graph`` stays as it is.

    A node is dead if no node, or only dead ones, read its results, and it has no other effect. Aliases are dead once
    their users read their inputs; aliases that are outputs, gradients or saved stay. Random operators stay even without
    readers: without them later ones would draw other numbers. A dropout is split if it runs on a CPU, drops, and its
    input is contiguous. ``options`` are not read.
    """
    named = {*graph.saved, *graph.gradients, *_handed_out(graph.graph)}
    aliases = [n.name for n in operators(graph.graph) if ops.rule(n.target).renames and n.name not in named]
    apart = {node: None for node in operators(graph.graph) if _comes_apart(node)}
    again = repeats(graph, lambda instead: _live(graph.graph, apart, instead))
    live = _live(graph.graph, apart, again)
    skipped = set(aliases)
    dead = [n.name for n in reversed(graph.graph.nodes) if n not in live or n.name in skipped]
    pairs = tuple((node.name, earlier.name) for node, earlier in again.items())
    return Decision(tuple(aliases), tuple(dead), tuple(node.name for node in apart), pairs)


def _live(graph: fx.Graph, apart: Collection[fx.Node], instead: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes that something reads, or that have another effect.

    Args:
        graph: the graph.
        apart: dropouts that are split.
        instead: nodes to the nodes that their readers read instead.
    """
    live: dict[fx.Node, None] = {}
    read: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        required = node.op in ("placeholder", "output") or (node.op == "call_function" and ops.must_run(node.target))
        used = any(user in live and (user not in apart or _drops(user, live)) for user in node.users)
        if used and node in instead:
            read[instead[node]] = None
        elif required or used or node in read:
            live[node] = None
    return live


def _handed_out(graph: fx.Graph) -> set[str]:
    """Names of outputs, and of all that they are views of: a detach among these must stay.

    Autograd sees outputs, and takes a view of ``x`` for one that needs a gradient where ``x`` does, unless a detach
    lies between them.
    """
    names: set[str] = set()
    waiting = list(output_node(graph).all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node.name not in names:
            names.add(node.name)
            if node.op == "call_function" and ops.is_view(node.target):
                waiting.extend(node.all_input_nodes)
    return names


def _drops(dropout: fx.Node, live: Collection[fx.Node]) -> bool:
    """Whether somebody reads more of ``dropout`` than its mask, which is drawn whatever it is given."""
    return any(pick in live and pick.args[1] == 0 for pick in dropout.users)


def _comes_apart(node: fx.Node) -> bool:
    """Whether ``node`` can be split: a dropout on a CPU that drops, of a contiguous tensor.

    For other tensors the fake result has other strides than the kernel's.
    """
    if node.target is not aten.native_dropout.default:
        return False
    dropout = dropout_of(node)
    if dropout is None:
        return False
    x: torch.Tensor = dropout.x.meta["val"]
    alike = x.is_contiguous() and x.stride() == dropout.dropped.stride() == dropout.mask.stride()
    return bool(alike and x.numel() and x.dtype in FLOATS and x.device.type == "cpu")


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Apply ``decision``: let readers of aliases read their inputs, erase dead nodes, and split dropouts.

    A split dropout becomes ``dropout_mask``, which draws the numbers, and, if its result is read, a product of its
    input with that mask.

    Args:
        graph: the graph that :func:`decide` saw, or an equal one; its FX graph is changed in place.
        decision: names of nodes of ``graph``.

    Returns:
        A train graph on the same FX graph, with the new nodes in ``phase``, ``saved``, ``gradients`` and ``waits``.

    Raises:
        PlanError: a node that the decision names is missing or cannot be treated so, or other nodes read a dead one.
    """
    by_name = {node.name: node for node in graph.graph.nodes}
    inner = {node.name for node in graph.graph.nodes if node.op in ("call_function", "get_attr")}
    unknown = [name for name in (*decision.aliases, *decision.dead, *decision.dropouts) if name not in inner]
    loose = [name for name in decision.aliases if name in inner and not ops.rule(by_name[name].target).renames]
    whole = [name for name in decision.dropouts if name in inner and not _comes_apart(by_name[name])]
    if unknown or loose or whole:
        odd = (unknown + loose + whole)[0]
        raise PlanError(f"the plan names {odd!r}, which this graph does not have as such")
    read_first(graph, decision.repeats)
    for name in decision.aliases:
        by_name[name].replace_all_uses_with(by_name[name].all_input_nodes[0])
    phase = dict(graph.phase)
    other: dict[str, str] = {}
    dead, dropouts = frozenset(decision.dead), frozenset(decision.dropouts)
    for node in reversed(list(graph.graph.nodes)):  # what reads a dropout goes first, what it no longer reads after it
        if node.name in dead and node.users:
            raise PlanError(f"the plan takes out {node.name!r}, which other nodes read")
        if node.name in dead:
            graph.graph.erase_node(node)
        elif node.name in dropouts:
            split = _take_apart(graph.graph, node)
            phase |= dict.fromkeys(split.values(), phase[node.name])
            other |= split
    phase = {node.name: phase[node.name] for node in operators(graph.graph)}
    graph = renamed(graph, {**dict(decision.repeats), **other}).replace(phase=phase)
    return graph.replace(saved=saved_values(graph)) if graph.boundary else graph


def _take_apart(graph: fx.Graph, node: fx.Node) -> dict[str, str]:
    """Split the dropout ``node`` as :func:`roamc.rewriting.dropouts.take_apart` does, with a mask that is drawn."""
    dropout = dropout_of(node)
    assert dropout is not None, f"{node.name} is no dropout"
    mask, keep = dropout.mask, dropout.keep
    call = MaskCall(dropout_mask, (list(mask.shape), list(mask.stride()), keep), {"device": mask.device})
    return take_apart(graph, node, call, rounded(1.0 / keep if keep else 0.0, dropout.dropped.dtype))
