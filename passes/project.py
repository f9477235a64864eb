"""project: a projected weight gradient is made of the projected input, so that the whole gradient never is.

    rewrite:  w = aten.mm(dy_t, x)                   p = roamc.projection(...)
              p = roamc.projection(...)         -->  z = aten.mm(x, p)
              g = aten.mm(w, p)                      g = aten.mm(dy_t, z)
    checks:   every product g that the decision names reads a projection and, alone, the product w, through views that
              keep its elements in their places

``w`` has ``n`` columns, ``g`` and ``z`` have ``r``. All products of one ``x`` and ``p`` read one ``z``. It stands where
the first of them does, in backward: so it never has to be kept for backward, as ``x`` or what ``x`` is made of has.
Where it is better that ``z`` waits than that ``x`` does or runs again, pass ``retain`` makes ``z`` in forward.

A product of three matrices in another order is another order of sums, which ``numerics="exact"`` allows nowhere else.
Here the user asks for it: there are projections only in the steps of :class:`roamc.optim.CompAct`, whose definition
this is. :mod:`roamc.graph.projection_judge` checks that nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from roamc.errors import PlanError
from roamc.graph import Phase, TrainGraph, copied, operators
from roamc.graph.reader_kinds import chain_to_product
from roamc.graph.rewrite import Writer, mode_of
from roamc.graph.storage_ids import StorageId, id_of
from roamc.operators import ops
from roamc.operators.projection import projection
from roamc.options import Options
from roamc.rewriting.versions import erase_dead, up_to_date

NAME = "project"

aten = torch.ops.aten


@dataclass(frozen=True)
class Decision:
    """A decision names the projected gradients that are made of projected inputs.

    Attributes:
        gradients: names of the products with projections, in graph order.
    """

    gradients: tuple[str, ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Find the projected gradients whose whole ones nothing else reads; ``graph`` stays as it is.

    ``options`` are not read.
    """
    return Decision(tuple(node.name for node in operators(graph.graph) if _chain(graph, node)))


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Return ``graph`` with these gradients made of projected inputs, on a new FX graph; the given one stays.

    Raises:
        PlanError: a name in the decision is no operator of the graph, or no projected gradient that nothing else reads.
    """
    if not decision.gradients:
        return graph
    graph = copied(graph)
    nodes = {node.name: node for node in operators(graph.graph)}
    for name in decision.gradients:
        if name not in nodes or not _chain(graph, nodes[name]):
            raise PlanError(f"{name!r} is no projection of a product that nothing else reads in this graph")
    position = {node: index for index, node in enumerate(graph.graph.nodes)}
    chains = {name: _chain(graph, nodes[name]) for name in decision.gradients}
    instead: dict[str, str] = {}
    writer = _Writer(graph)
    for name in sorted(chains, key=lambda each: position[chains[each][-1]]):
        writer.rewrite(nodes[name], chains[name][-1])
        instead.update((node.name, name) for node in chains[name])
    erase_dead(graph.graph, {*graph.gradients} - instead.keys())
    gradients = tuple(dict.fromkeys(instead.get(name, name) for name in graph.gradients))
    return up_to_date(graph.replace(gradients=gradients), {**graph.phase, **writer.phase})


class _Writer:
    """Writes projected inputs into a graph, in place, and has gradients read them.

    Attributes:
        phase: name to phase of the new operators.
    """

    def __init__(self, graph: TrainGraph) -> None:
        mode = mode_of(graph.graph)
        assert mode is not None, "a product has tensors"
        self._writer = Writer(graph.graph, mode, Phase.BACKWARD)
        self.phase = self._writer.phase
        self._written = set(_written(graph))
        self._inputs: dict[tuple[object, ...], fx.Node] = {}
        self._position = {node: index for index, node in enumerate(graph.graph.nodes)}

    def rewrite(self, gradient: fx.Node, product: fx.Node) -> None:
        """Have ``gradient`` read the projected input of ``product``, in front of which it then stands.

        Calls go by the places of the products in the graph, from the first on.
        """
        left, x = product.args
        p = gradient.args[1]
        assert isinstance(x, fx.Node)
        assert isinstance(p, fx.Node)
        if self._position[p] > self._position[product]:
            product.prepend(p)  # it reads inputs alone
            self._position[p] = self._position[product]
        gradient.args = left, self._projected(x, p, product)
        product.prepend(gradient)

    def _projected(self, x: fx.Node, p: fx.Node, at: fx.Node) -> fx.Node:
        value: torch.Tensor = x.meta["val"]
        storage = id_of(x)
        own = x if storage in self._written else None  # two products may see two contents of it
        key = storage, tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, p, own
        if key not in self._inputs:
            self._inputs[key] = self._writer.insert(at, aten.mm.default, x, p)
        return self._inputs[key]


def _written(graph: TrainGraph) -> Iterator[StorageId]:
    for node in operators(graph.graph):
        yield from (id_of(argument) for argument in ops.mutated_arguments(node))


def _chain(graph: TrainGraph, node: fx.Node) -> list[fx.Node]:
    """What ``node`` projects and nothing else reads: views, from the last to the first, then a product of backward.

    Empty if ``node`` is no projection of that.
    """
    p = node.args[1] if node.target is aten.mm.default else None
    if not isinstance(p, fx.Node) or p.target is not projection:
        return []
    whole = node.args[0]
    chain = chain_to_product(whole) if isinstance(whole, fx.Node) else []
    is_read = any(len(each.users) > 1 for each in chain)
    return [] if is_read or not chain or graph.phase[chain[-1].name] is not Phase.BACKWARD else chain
