"""async_tp: matrix products and the collective that brings or takes their rows run as one operator.

    rewrite:  w = all_gather(x); y1 = mm(w, b1); y2 = addmm(c, w, b2)  -->  y1, y2 = all_gather_mm(x, [b1, b2], [-, c])
              z = reduce_scatter(mm(a1, b1) + mm(a2, b2))              -->  z = mm_reduce_scatter([a1, a2], [b1, b2])
    checks:   the products read all that is gathered, in its phase, and by matrices and biases that are there when it
              begins; nothing else reads a product that is reduced, or the sum of such; nothing is written in between

The operators send the rows of one rank while they multiply those of another, see
:mod:`roamc.operators.products_sent` and ``_micro_pipeline_tp`` in torch's Inductor. A GPU sums over the ranks in
another order then, so they are for ``numerics="fast"`` alone, and products have fewer rows at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from roamc.compat_groups import has_symmetric_memory
from roamc.cost import load_profile, prices
from roamc.errors import PlanError
from roamc.graph import TrainGraph, copied, main_device, operators
from roamc.graph.keep import is_kept
from roamc.graph.reader_kinds import readers_of
from roamc.graph.storage_ids import STORAGES, all_ids, id_of
from roamc.operators import ops
from roamc.operators.collectives import FINISHED, NAMESPACE
from roamc.operators.products_sent import ALL_GATHER_MM, MM_REDUCE_SCATTER
from roamc.operators.schemas import group_of
from roamc.options import Options
from roamc.rewriting.versions import erase_dead, up_to_date

NAME = "async_tp"

aten = torch.ops.aten
_NAMED = {finished._schema.name: finished for finished in FINISHED.values()}
ALL_GATHER = _NAMED.get(f"{NAMESPACE}::all_gather_into_tensor")
REDUCE_SCATTER = _NAMED.get(f"{NAMESPACE}::reduce_scatter_tensor")
REDUCTIONS = ("sum", "avg")


@dataclass(frozen=True)
class Decision:
    """A decision says which collectives run with which products.

    Attributes:
        gathers: name of an all-gather to the names of the products that run with it, in graph order.
        scatters: name of a reduce-scatter to the names of the products whose sum it reduces, in the order in which they
            are added up.
    """

    gathers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scatters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose the collectives that take less time with their products than both one after the other.

    ``graph`` stays as it is. The decision is empty unless ``options.numerics`` is "fast". With ``options.async_tp``
    "auto" only groups count whose GPUs have symmetric memory and whose ranks run one plan: a rank that ran collective
    and product apart would wait for the others for ever.
    """
    if options.numerics != "fast" or options.async_tp == "off":
        return Decision()
    written = _Written(graph)
    gathers, scatters = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]]()
    sums: dict[str, tuple[str, ...]] = {}
    for node in operators(graph.graph):
        if node.target not in (ALL_GATHER, REDUCE_SCATTER) or not _counts(graph, group_of(node), options):
            continue
        if products := _names(_products(graph, node, written)):
            gathers[node.name] = products
            continue
        reduced = _reduced(graph, node, written)
        if reduced.products and _all(gathers).isdisjoint(_names(reduced.products)):
            scatters[node.name], sums[node.name] = _names(reduced.products), _names(reduced.sums)
    return _faster(graph, Decision(gathers, scatters), sums, options)


def _counts(graph: TrainGraph, group: object, options: Options) -> bool:
    """Whether collectives of ``group`` may run with products."""
    at_once = main_device(graph).type == "cuda" and has_symmetric_memory(group)
    one_plan = any(planned.group == group for planned in graph.same_plan)
    return (at_once and one_plan) or (options.async_tp == "on" and (one_plan or not at_once))


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _all(gathers: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The names of all products that run with an all-gather."""
    return {name for names in gathers.values() for name in names}


def _faster(graph: TrainGraph, decision: Decision, sums: Mapping[str, tuple[str, ...]], options: Options) -> Decision:
    """The part of ``decision`` whose operators take less time by the device profile.

    ``sums`` are the operators that add up the products of each reduce-scatter.
    """
    if decision == Decision():
        return decision
    profile = load_profile(main_device(graph), options.profile)
    apart = prices(graph, profile)
    at_once = prices(apply(copied(graph), decision), profile)

    def pays(collective: str, *products: str) -> bool:
        return at_once[collective] < apart[collective] + sum(apart[product] for product in products)

    return Decision(
        {name: products for name, products in decision.gathers.items() if pays(name, *products)},
        {name: products for name, products in decision.scatters.items() if pays(name, *products, *sums[name])},
    )


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Let the collectives that the decision names run with their products; the FX graph is changed in place.

    An operator of both has the name of its collective, and each result that of its product.

    Raises:
        PlanError: a name in the decision is no such collective, or its products are others.
    """
    if decision == Decision():
        return graph
    nodes, written = {node.name: node for node in operators(graph.graph)}, _Written(graph)
    rewritten = []
    for name, names in decision.gathers.items():
        products = [] if name not in nodes else list(_products(graph, nodes[name], written))
        if not names or not set(names) <= {product.name for product in products}:
            raise PlanError(f"{', '.join(names)} cannot run with the all-gather {name!r} of this graph")
        rewritten.append((nodes[name], [product for product in products if product.name in names]))
    for name, names in decision.scatters.items():
        reduced = () if name not in nodes else _reduced(graph, nodes[name], written).products
        if not names or _names(reduced) != names or not _all(decision.gathers).isdisjoint(names):
            raise PlanError(f"{', '.join(names)} cannot run with the reduce-scatter {name!r} of this graph")
        factors = [_factors(product) for product in reduced]
        inputs, others = [first for _, first, _ in factors], [other for *_, other in factors]
        nodes[name].args = (inputs, others, factors[0][0], *nodes[name].args[1:])
        nodes[name].target = MM_REDUCE_SCATTER
    phase = dict(graph.phase)
    for gather, products in rewritten:
        if (whole := _multiply(gather, products, written)) is not None:
            phase[whole.name] = phase[gather.name]
    erase_dead(graph.graph, set(graph.gradients))
    return up_to_date(graph, phase)


def _multiply(gather: fx.Node, products: list[fx.Node], written: _Written) -> fx.Node | None:
    """Let ``gather`` make ``products`` as well; the node of what is gathered, if something else reads that."""
    graph, factors = gather.graph, [_factors(product) for product in products]
    others, biases = [other for *_, other in factors], [bias for bias, *_ in factors]
    for read in (*others, *biases):
        for view in reversed(list(_views(read))):
            if written.place[view] > written.place[gather]:  # a view of what is there already
                gather.prepend(view)
    results, ids = [product.meta["val"] for product in products], [id_of(product) for product in products]
    for at, product in enumerate(products):
        product.target, product.args = operator.getitem, (gather, at)
    whole: fx.Node | None = None
    if any(user not in products and not _idle(user) for user in gather.users):
        with graph.inserting_after(gather):
            whole = graph.create_node(
                "call_function", operator.getitem, (gather, len(ids)), name=f"{gather.name}_whole"
            )
        whole.meta.update({"val": gather.meta["val"], STORAGES: gather.meta[STORAGES]})
        results, ids = [*results, gather.meta["val"]], [*ids, id_of(gather)]
        pick: fx.Node = whole
        gather.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not pick and user not in products)
    added = biases if any(biases) else []
    gather.target, gather.args = ALL_GATHER_MM, (gather.args[0], others, *gather.args[1:], whole is not None, added)
    gather.meta.update({"val": results, STORAGES: tuple(ids)})
    return whole


def _idle(node: fx.Node) -> bool:
    """Whether ``node`` is a view that nothing reads: that of a product which is one no more."""
    return node.op == "call_function" and ops.is_view(node.target) and all(_idle(user) for user in node.users)


def _products(graph: TrainGraph, gather: fx.Node, written: _Written) -> Iterator[fx.Node]:
    """Yield the products that can run with ``gather``, in graph order; none if it is no all-gather of a matrix."""
    if gather.target is not ALL_GATHER or gather.kwargs or not _is_free(gather):
        return
    readers = {reader for reader, _ in readers_of(gather)}
    products = (reader for reader in readers if _factors(reader) is not None and _is_free(reader))
    for product in sorted(products, key=written.place.__getitem__):
        bias, first, other = _factors(product)
        same_phase = graph.phase[product.name] is graph.phase[gather.name]
        if not same_phase or not isinstance(other, fx.Node) or not _is_as_it_was(first, gather):
            continue
        read = [other] if bias is None else [other, bias]
        ready = all(written.place[_base(node)] < written.place[gather] for node in read)
        if ready and not written.between(gather, product, gather, gather.all_input_nodes[0], *read):
            yield product


class _Reduced(NamedTuple):
    """What a reduce-scatter can run with.

    Attributes:
        products: the products whose sum it reduces, in the order in which they are added up; empty if there are none.
        sums: what adds them up.
    """

    products: tuple[fx.Node, ...] = ()
    sums: tuple[fx.Node, ...] = ()


def _reduced(graph: TrainGraph, scatter: fx.Node, written: _Written) -> _Reduced:
    """The products that can run with ``scatter``; none if something else reads one of them, or their sum."""
    if scatter.target is not REDUCE_SCATTER or scatter.kwargs or scatter.args[1] not in REDUCTIONS:
        return _Reduced()
    summands = _added_up(scatter.args[0]) if _is_free(scatter) else _Reduced()
    for node in (*summands.products, *summands.sums):
        stays = node.name in graph.gradients or not _is_free(node)
        if stays or graph.phase[node.name] is not graph.phase[scatter.name]:
            return _Reduced()
        if written.between(node, scatter, node, *node.all_input_nodes):
            return _Reduced()
    return summands


def _added_up(value: Any) -> _Reduced:
    """The products of which ``value`` is the sum, from the first on, and that nothing else reads."""
    chain: list[Any] = [value, *(view.args[0] for view in _views(value))]
    maker = chain[-1]
    if any(len(node.users) != 1 for node in chain) or not _is_as_it_was(value, maker):
        return _Reduced()
    if _factors(maker) is not None:
        return _Reduced((maker,))
    if maker.target is not aten.add.Tensor or maker.kwargs or maker.args[0] is maker.args[1]:
        return _Reduced()
    if not all(isinstance(part, fx.Node) and _fills(part, maker) for part in maker.args):
        return _Reduced()
    first, last = map(_added_up, maker.args)
    if not first.products or len(last.products) != 1 or _factors(last.products[0])[0] is not None:
        return _Reduced()
    return _Reduced(first.products + last.products, (*first.sums, maker))


def _fills(part: fx.Node, total: fx.Node) -> bool:
    """Whether ``part`` has the shape and dtype of ``total``, and is neither repeated nor cast in it."""
    value, whole = part.meta["val"], total.meta["val"]
    return bool(value.shape == whole.shape and value.dtype == whole.dtype)


def _factors(node: fx.Node) -> Any:
    """Bias, None for none, and the two matrices of a product; None for another operator.

    The bias is the same for all rows.
    """
    if node.kwargs or not _is_free(node):
        return None
    if node.target is aten.mm.default:
        return (None, *node.args)
    if node.target is not aten.addmm.default or not isinstance(node.args[0], fx.Node):
        return None
    bias, result = node.args[0].meta["val"], node.meta["val"]
    row = bias.dim() in (1, 2) and bias.shape[-1] == result.shape[1] and bias.numel() == result.shape[1]
    return node.args if row and bias.dtype == result.dtype else None


def _base(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, through any number of views; itself if it is none."""
    return next((view.all_input_nodes[0] for view in reversed(list(_views(node)))), node)


def _is_free(node: fx.Node) -> bool:
    """Whether the user has asked nothing of ``node``, such as to make its result again or to keep it."""
    return "recompute" not in node.meta and not is_kept(node)


def _is_as_it_was(view: Any, maker: fx.Node) -> bool:
    """Whether ``view`` is what ``maker`` made, with the same shape and strides."""
    if not isinstance(view, fx.Node) or id_of(view) != id_of(maker):
        return False
    value, whole = view.meta["val"], maker.meta["val"]
    lies = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.is_conj(), value.is_neg())
    return lies == (whole.shape, whole.stride(), whole.storage_offset(), whole.dtype, False, False) and value.dim() == 2


def _views(node: Any) -> Iterator[fx.Node]:
    """Yield ``node`` and what it is a view of, as long as that is a view of another node."""
    while isinstance(node, fx.Node) and node.op == "call_function" and ops.is_view(node.target):
        yield node
        node = node.args[0]


class _Written:
    """Where the nodes of a graph stand, and which storages are written where.

    Attributes:
        place: node to its position in the graph.
    """

    def __init__(self, graph: TrainGraph) -> None:
        self.place = {node: at for at, node in enumerate(graph.graph.nodes)}
        self._writes = [
            (at, all_ids(written))
            for node, at in self.place.items()
            if node.op == "call_function" and (written := ops.mutated_arguments(node))
        ]

    def between(self, first: fx.Node, last: fx.Node, *read: fx.Node) -> bool:
        """Return whether an operator behind ``first`` and in front of ``last`` writes to a storage of ``read``."""
        storages = all_ids(read)
        begin, end = self.place[first], self.place[last]
        return any(begin < at < end and not storages.isdisjoint(written) for at, written in self._writes)
