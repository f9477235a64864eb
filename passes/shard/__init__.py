"""shard: activations that every rank of a tensor-parallel group holds whole are split along the tokens.

    rewrite:  y = all_reduce(p); z = norm(y)   -->  y = reduce_scatter(p); z = norm(y), on this rank's tokens
              mm(z, w), z read as a whole      -->  mm(all_gather(z), w), one gather for each phase
              g = sum of z over the tokens     -->  g = all_reduce(sum over this rank's tokens), in one bucket
              loss of gathered scores          -->  loss of the scores of this rank's classes, see :mod:`.classes`
    checks:   every value that the decision names can be computed from rows of its arguments, or is a sum over the
              ranks; the ranks divide the tokens; outputs lie as before

This is the sequence parallelism of Korthikanti et al., arXiv 2205.05198: norms, dropouts, residuals and what else works
on each token apart runs on shards, for the traffic of tensor parallelism alone, since an all-reduce is a reduce-scatter
and an all-gather. Backward gathers again: what is saved is the shard, unless pass ``retain`` finds room for the whole
under a budget. Batch and sequence count as one dimension of tokens, so that a shard lies in one piece.

Random operators draw what one rank draws, and a rank keeps its rows. The rank is no part of the decision, the graph or
the plan: :mod:`roamc.operators.shards` reads it where the program runs. Sums of several ranks are made in another order
than by an all-reduce, so last bits may differ: the pass runs where the user asks for it, ``shard="sequence"``.
:mod:`roamc.graph.shard_judge` checks what it has written.

Every parameter that meets a sharded value element by element, such as the weight of a norm, must be the same on all
ranks, and so must be the batch and the states of random generators; see :mod:`roamc.passes.shard.varying`. The ranks
compare them before the first step: :mod:`roamc.passes.shard.agree` says what, :mod:`roamc.runtime.agreement` does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from roamc.cost.collectives import traffic
from roamc.errors import PlanError
from roamc.graph import Agreement, TrainGraph, operators
from roamc.operators.schemas import group_of
from roamc.options import Options
from roamc.passes.shard import choose, classes
from roamc.passes.shard.agree import agreement
from roamc.passes.shard.classes import Head
from roamc.passes.shard.rows import Form
from roamc.passes.shard.varying import OWN
from roamc.passes.shard.write import Region, sharded

NAME = "shard"


@dataclass(frozen=True)
class Decision:
    """A decision says which values are split among the ranks of which group.

    Attributes:
        regions: for each region: the name of an operator that talks to its group, the number of ranks, the number of
            tokens, the names of the values of which a rank has the rows of its tokens, and the names of those of which
            it has an addend. A value has the name of its node, with ``#k`` for result k of several.
        classes: for each gather of scores by class that the loss can do without: the name of the gathered scores, the
            number of ranks, and the names of the values of which a rank has its own classes. What the other attributes
            name is in the graph that has these split.
        uneven: for each region that stays whole because the ranks do not divide its tokens: the name of its first
            all-reduce, the number of ranks and the number of tokens.
    """

    regions: tuple[tuple[str, int, int, tuple[str, ...], tuple[str, ...]], ...] = ()
    uneven: tuple[tuple[str, int, int], ...] = ()
    classes: tuple[tuple[str, int, tuple[str, ...]], ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Find the regions that can be sharded; ``graph`` stays as it is.

    The decision is empty unless ``options.shard`` is "sequence", and for a graph without all-reduces of activations. It
    is the same on every rank.
    """
    if options.shard != "sequence":
        return Decision()
    heads = classes.heads(graph)
    all_regions = choose.regions(_by_class(graph, heads))
    regions = tuple(
        (each.first.name, each.ranks, each.tokens, _named(each, Form.SHARD), _named(each, Form.SUM))
        for each in all_regions
        if each.even
    )
    uneven = tuple((each.first.name, each.ranks, each.tokens) for each in all_regions if not each.even)
    return Decision(regions, uneven, tuple((head.gathered, head.ranks, head.values) for head in heads))


def _by_class(graph: TrainGraph, heads: Iterable[Head]) -> TrainGraph:
    for head in heads:
        graph = classes.by_class(graph, head)
    return graph


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Return ``graph`` on shards, on a new FX graph; the given one stays as it is.

    Raises:
        PlanError: the graph lacks a value that the decision names, the value cannot be computed from rows, the group
            has another number of ranks, a value that the decision leaves out would have to be sharded, or the ranks
            divide the tokens of a region that is said to stay whole.
    """
    notes: list[str] = []
    alike: dict[object, list[str]] = {}
    for head in (Head(name, ranks, tuple(values)) for name, ranks, values in decision.classes):
        group, read = classes.read_whole(graph, head)
        alike.setdefault(group, []).extend(read)
        before, graph = graph, classes.by_class(graph, head)
        notes.append(_told_of_head(before, graph, head))
    captured = graph
    names = {node.name for node in operators(graph.graph)}
    for name, ranks, tokens in decision.uneven:
        if name not in names or ranks < 2 or tokens < 1 or tokens % ranks == 0:
            raise PlanError(f"{tokens} tokens of {name!r} are not left whole for {ranks} ranks: plan again")
    uneven = [
        f"shard: {tokens} tokens are left whole on each of {ranks} ranks, which do not divide them: the next number of "
        f"tokens that fits is {tokens + -tokens % ranks}"
        for _, ranks, tokens in decision.uneven
    ]
    for region in map(Region._make, decision.regions):
        before, graph = graph, sharded(graph, region)
        notes.append(_told(before, graph, region))
    if not notes and not uneven:
        return graph
    return graph.replace(notes=(*graph.notes, *notes, *uneven), agreements=_agreements(captured, decision, alike))


def _agreements(graph: TrainGraph, decision: Decision, alike: Mapping[object, Sequence[str]]) -> tuple[Agreement, ...]:
    """What the ranks of each group must have the same of; ranks whose regions stay whole compare their decision.

    ``graph`` has the scores split by class that the decision names, and no regions yet; ``alike`` has, for each group
    of a head, the names of what is read with these scores.
    """
    groups = {node.name: group_of(node) for node in operators(graph.graph)}
    sharded_by = {group: list(names) for group, names in alike.items()}
    for first, *_ in decision.uneven:
        sharded_by.setdefault(groups[first], [])
    for first, _, _, shards, sums in decision.regions:
        sharded_by.setdefault(groups[first], []).extend((*shards, *sums))
    for node in operators(graph.graph):
        if node.target in OWN:
            sharded_by.setdefault(groups[node.name], []).append(node.name)
    return tuple(agreement(graph, group, names, repr(decision)) for group, names in sharded_by.items())


def _told(before: TrainGraph, after: TrainGraph, region: Region) -> str:
    """What became of a region, for the plan."""
    values = f"{len(region.shards)} values of {region.tokens} tokens, from {region.shards[0]} to {region.shards[-1]}"
    return f"shard: {values}, are split among {region.ranks} ranks; {_sent(before, after, region.first, region.ranks)}"


def _told_of_head(before: TrainGraph, after: TrainGraph, head: Head) -> str:
    """What became of scores that were gathered, for the plan."""
    values = f"{len(head.values)} values, from {head.gathered} to {head.values[-1]}"
    sent = _sent(before, after, classes.gather_of(before, head), head.ranks)
    return f"shard: {values}, stay split by class among {head.ranks} ranks; {sent}"


def _sent(before: TrainGraph, after: TrainGraph, first: str, ranks: int) -> str:
    """What a step of the group of the collective ``first`` sends."""
    group = next(group_of(node) for node in operators(before.graph) if node.name == first)
    was, has = (traffic(graph, group, ranks) for graph in (before, after))
    return f"a step has {has}, and had {was}"


def _named(region: choose.Candidate, form: Form) -> tuple[str, ...]:
    """The names of the region's values that have ``form``; a picked result has that of what it is picked from."""
    return tuple(
        name
        for node, forms in region.forms.items()
        if choose.maker(node) is node
        for name in choose.names(node, forms, form)
    )
