"""fuse: operators that run as one over blocks of rows, so that the values between them have no storage.

    rewrite:  t = op1(x, y); r = op2(t, z)  -->  r = fused(x, y, z)
    checks:   every operator that the decision names treats rows apart and has one dense result; all of a group are of
              one phase and see the same rows and columns; nothing outside a group reads a value inside; blocks have the
              bits of the whole with as many threads as the plan is made for

A group has one result: an operator, with operators before it whose results are read inside the group alone. A group is
made where it saves a pass over memory and where, in the present order, no step holds more bytes. The backward of
cross-entropy gains most: the gradient of the log-probabilities, a number for every token and word, never exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from roamc.cost import group_workspace, load_profile, workspace_bytes
from roamc.errors import PlanError
from roamc.graph import TrainGraph, main_device, operators
from roamc.graph.keep import is_kept
from roamc.graph.memory import MemoryModel, Place, build_memory, lifetimes, live_bytes
from roamc.operators import blocks, ops
from roamc.operators.fused import Fused, fuse
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.options import Options
from roamc.units import Bytes

NAME = "fuse"


@dataclass(frozen=True)
class Effort:
    """How large the largest value inside a group must be for the group to be made.

    A group is made if that value has at least ``least_bytes`` and is larger than the device's cache or than
    ``least_share`` of eager's peak. Blocks of smaller values take as long as whole operators, or longer: 0.92 to 1.28
    of the time for values of 2 to 13 MB on a machine with 32 MB of cache, 0.83 for one of 67 MB.

    Attributes:
        least_bytes: fewest bytes of the largest value inside: four times those of a block.
        least_share: share of eager's peak bytes from which on a value need not be larger than the cache.
    """

    least_bytes: Bytes = 4 * blocks.BLOCK_BYTES
    least_share: float = 1 / 16


EFFORT = Effort()

LARGEST_ITEM: Bytes = 16
"""Bytes of the largest element that tensors have."""


@dataclass(frozen=True)
class Decision:
    """A decision lists the groups.

    Attributes:
        groups: for each group the names of its operators in graph order; the result of the last is that of the group.
    """

    groups: tuple[tuple[str, ...], ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose groups of operators, the one that ends last first; ``graph`` stays as it is.

    Each group is the largest that fits and in which no step holds more bytes than before. On a CPU it has a value
    inside that leaves the cache of the device profile ``options.profile``; on a GPU every group is worth it. Groups
    that have other last bits than their operators are chosen under ``numerics="fast"`` alone.
    """
    finder = _Finder(graph, _least_bytes(graph, options), fast=options.numerics == "fast")
    found: list[tuple[str, ...]] = []
    taken: set[fx.Node] = set()
    for node in reversed(operators(graph.graph)):
        members = [] if node in taken else finder.group(node)
        if members:
            taken.update(members)
            found.append(tuple(member.name for member in members if not ops.is_view(member.target)))
    return Decision(tuple(reversed(found)))


def _least_bytes(graph: TrainGraph, options: Options) -> float:
    """Bytes of the largest value inside a group at least."""
    device = main_device(graph)
    if device.type == "cuda":
        return 1
    share = EFFORT.least_share * (graph.eager_bytes or 0)
    return max(EFFORT.least_bytes, min(load_profile(device, options.profile).cache_bytes, share))


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Replace each group by one node that has the name of the group's last operator; changes the FX graph in place.

    The node stands in the place of the group's first operator in front of which all operands of the group exist.

    Raises:
        PlanError: the graph has no such operators, or they cannot run as a group.
    """
    if not decision.groups:
        return graph
    nodes = {node.name: node for node in operators(graph.graph)}
    position, kind = positions(graph), _kind(graph)
    for names in decision.groups:
        if len(set(names)) != len(names) or not names or any(name not in nodes for name in names):
            raise PlanError(f"this graph has no operators {', '.join(names) or '(none)'} that could be one group")
        views = [name for name in names if ops.is_view(nodes[name].target)]
        if views:
            raise PlanError(f"{', '.join(names)} cannot be one group: {views[0]} is a view, and no operator")
        members = _with_views(nodes[names[-1]], {nodes[name] for name in names}, position)
        wrong = _unfit(graph, members, kind) if members else "they do not lead to one result"
        if wrong:
            raise PlanError(f"{', '.join(names)} cannot be one group: {wrong}")
        _rewrite(graph, members, position, kind)
        for member in members[:-1]:
            nodes.pop(member.name)
    left = {node.name for node in operators(graph.graph)}
    return graph.replace(phase={name: phase for name, phase in graph.phase.items() if name in left})


Positions = Mapping[fx.Node, int]
"""Node to its index among all nodes of the graph, as counted before groups are written."""


def positions(graph: TrainGraph) -> Positions:
    """Return the index, from 0, of every node of ``graph`` in the present order of the FX graph."""
    return {node: at for at, node in enumerate(graph.graph.nodes)}


def _rewrite(graph: TrainGraph, members: list[fx.Node], position: Positions, kind: type[Fused]) -> None:
    root = members[-1]
    group, read = fuse(root, members, kind)
    place = _place(members, position)
    if place is not root:
        place.prepend(root)
    root.target, root.args, root.kwargs = group, tuple(read), {}
    for member in reversed(members[:-1]):
        graph.graph.erase_node(member)


def _with_views(root: fx.Node, members: set[fx.Node], position: Positions) -> list[fx.Node]:
    """Return the members and the views between them in graph order; empty if they do not all lead to ``root``."""
    reached, left = {root}, [root]
    while left:
        for argument in left.pop().all_input_nodes:
            base = blocks.base_of(argument)
            if base in members:
                chain = list(_chain(argument, base))
                left += [node for node in chain if node not in reached]
                reached.update(chain)
    in_order = sorted(reached, key=position.__getitem__)
    return in_order if members <= reached and in_order[-1] is root else []


def _chain(node: fx.Node, base: fx.Node) -> Iterator[fx.Node]:
    """Yield ``node``, what it is a view of, and so on up to ``base``."""
    yield node
    while node is not base:
        node = node.all_input_nodes[0]
        yield node


def _unfit(graph: TrainGraph, members: Sequence[fx.Node], kind: type[Fused]) -> str:
    """Say why these nodes, views between members included, cannot be one group; "" if they can."""
    inside, root = set(members), members[-1]
    matrix = kind.frame(root)
    if matrix is None:
        return f"{root.name} has no rows"
    for node in members:
        if graph.phase[node.name] is not graph.phase[root.name]:
            return f"{node.name} belongs to another phase than {root.name}"
        if node is not root and is_kept(node):
            return f"{node.name} is kept by roamc.keep"
        if node is not root and any(user not in inside for user in node.users):
            return f"{node.name} is read outside"
    return kind.misfit(members, matrix, graph.threads)


def _kind(graph: TrainGraph) -> type[Fused]:
    """How groups run on the device of ``graph``."""
    return FusedKernel if main_device(graph).type == "cuda" else Fused


class _Finder:
    """Finds the group that ends with a node, with a value inside of at least ``least`` bytes."""

    def __init__(self, graph: TrainGraph, least: float, *, fast: bool) -> None:
        self.graph, self.least, self.fast, self.kind = graph, least, fast, _kind(graph)
        self.memory: MemoryModel = build_memory(graph)
        self.position = positions(graph)
        self.step = {operator.node: step for step, operator in enumerate(self.memory.operators)}
        born, dead = lifetimes(self.memory)
        counted = [storage.index for storage in self.memory.counted]
        self.lives = dict(zip(counted, zip(born.tolist(), dead.tolist(), strict=True), strict=True))
        self.live = live_bytes(self.memory)
        waits = {name for pair in graph.waits.items() for name in pair}
        self.fixed = {*graph.gradients, *graph.saved, *waits}

    def group(self, root: fx.Node) -> list[fx.Node]:
        """Return the largest group that ends with ``root``, in graph order with views; empty if none is worth it."""
        if root not in self.step or not self.kind.fits_numerics(root, fast=self.fast):
            return []
        matrix = self.kind.frame(root)
        if matrix is None or matrix.numel * LARGEST_ITEM < self.least:
            return []
        if _unfit(self.graph, [root], self.kind):
            return []
        members = [root]
        while (larger := self._larger(members)) is not None:
            members = larger
        while len(members) > 1 and self._holds_more(members):
            members = self._smaller(members)
        inside = [self._bytes(node) for node in members[:-1] if node in self.step]
        return members if max(inside, default=0) >= self.least else []

    def _larger(self, members: list[fx.Node]) -> list[fx.Node] | None:
        """Return the group with one operator more; None if there is none that fits."""
        inside = set(members)
        read = dict.fromkeys(argument for node in reversed(members) for argument in node.all_input_nodes)
        for argument in read:
            base = blocks.base_of(argument)
            if argument in inside or base in inside or not self._may_join(base, members[-1]):
                continue
            larger = _with_views(members[-1], {node for node in inside if node in self.step} | {base}, self.position)
            if not _unfit(self.graph, larger, self.kind):
                return larger
        return None

    def _smaller(self, members: list[fx.Node]) -> list[fx.Node]:
        """Return the group without its first operator."""
        first = next(node for node in members if node in self.step)
        left = {node for node in members if node in self.step and node is not first}
        return _with_views(members[-1], left, self.position)

    def _may_join(self, node: fx.Node, root: fx.Node) -> bool:
        named = node.name in self.fixed or is_kept(node) or node not in self.step
        named = named or not self.kind.fits_numerics(node, fast=self.fast)
        return not named and self.graph.phase[node.name] is self.graph.phase[root.name]

    def _holds_more(self, members: Sequence[fx.Node]) -> bool:
        """Whether some step would hold more bytes with the group, or the group would read what is written in between.

        It runs in the place of :func:`_place`: there its result may exist earlier, or operands longer than before.
        """
        mine = [self.step[node] for node in members if node in self.step]
        at, begin, end = self.step[_place(members, self.position)], min(mine), max(mine)
        operands = {self.memory.owner[argument.name, 0] for argument in _operands(members)}
        if any(operands.intersection(operator.writes) for operator in self.memory.operators[begin:end]):
            return True
        more = np.zeros(end + 1 - begin, dtype=np.int64)

        def add(nbytes: Bytes, first: int, last: int) -> None:
            more[max(first, begin) - begin : max(last, begin) - begin] += nbytes

        for step in mine[:-1]:
            for birth in self.memory.operators[step].births:
                add(-self.memory.storages[birth].nbytes, *self.lives[birth])
        for birth in self.memory.operators[end].births:
            add(self.memory.storages[birth].nbytes, at, end)
        for index in operands:
            if self.memory.storages[index].place is Place.TEMPORARY:
                born, dead = self.lives[index]
                others = [use for use in self.memory.uses[index] if use not in mine]
                now = max([at, born, *others]) + 1
                add(self.memory.storages[index].nbytes, dead, now)
                add(-self.memory.storages[index].nbytes, now, dead)
        inside = np.zeros(len(more), dtype=bool)
        inside[np.array(mine) - begin] = True
        return self._own(members, at, int(more[at - begin])) or bool((more[~inside] > 0).any())

    def _own(self, members: Sequence[fx.Node], at: int, more: Bytes) -> bool:
        """Whether the group, run at step ``at``, holds more than the worst of its members, workspace included."""
        threads = self.graph.threads
        before = max(
            int(self.live[self.step[node]]) + workspace_bytes(node, threads) for node in members if node in self.step
        )
        group, _ = fuse(members[-1], members, self.kind)
        return int(self.live[at]) + more + group_workspace(group, threads) > before

    def _bytes(self, node: fx.Node) -> Bytes:
        return sum(self.memory.storages[birth].nbytes for birth in self.memory.operators[self.step[node]].births)


def _operands(members: Sequence[fx.Node]) -> list[fx.Node]:
    """Return what the members read that is not made by one of them, in the order in which they read it."""
    inside = set(members)
    return list(dict.fromkeys(a for node in members for a in node.all_input_nodes if a not in inside))


def _place(members: Sequence[fx.Node], position: Positions) -> fx.Node:
    """Return the first member in front of which all operands of the group exist: in its place the group runs."""
    ready = max((position[argument] for argument in _operands(members)), default=-1)
    return next(node for node in members if position[node] > ready and not ops.is_view(node.target))
