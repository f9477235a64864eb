"""fuse: operators that run as one over blocks of rows, so that the values between them have no storage.

    rewrite:  t = op1(x, y); r = op2(t, z)  -->  r = fused(x, y, z)
                                            -->  t, r = fused(x, y, z)      (on a GPU, if t is read elsewhere)
    checks:   every operator that the decision names treats rows apart and has one dense result; all of a group are of
              one phase and see the same rows and columns; nothing outside a group reads a value inside; blocks have the
              bits of the whole with as many threads as the plan is made for

A group ends with one operator and has operators before it that lead there. On a CPU only the last result is read
outside the group; on a GPU others may be, and are written as well. A group is made where it saves a pass over memory
and where, in the present order, no step holds more bytes. The backward of cross-entropy gains most: the gradient of the
log-probabilities, a number for every token and word, never exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem

import numpy as np
from torch import fx

from roamc.cost import group_workspace, load_profile, workspace_bytes
from roamc.errors import PlanError
from roamc.graph import TrainGraph, main_device, operators
from roamc.graph.keep import is_kept
from roamc.graph.memory import MemoryModel, Place, build_memory, lifetimes, live_bytes
from roamc.graph.storage_ids import STORAGES, id_of
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
        most_members: operators in a group at most. A kernel of more takes long to compile, and to choose: each operator
            that might join is tried with all that have joined. Groups of language models have up to 12.
    """

    least_bytes: Bytes = 4 * blocks.BLOCK_BYTES
    least_share: float = 1 / 16
    most_members: int = 48


EFFORT = Effort()

LARGEST_ITEM: Bytes = 16
"""Bytes of the largest element that tensors have."""


@dataclass(frozen=True)
class Decision:
    """A decision lists the groups.

    Attributes:
        groups: for each group the names of its operators in graph order. Its results are that of the last operator and
            those that are read outside the group.
    """

    groups: tuple[tuple[str, ...], ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose groups of operators, the one that ends last first; ``graph`` stays as it is.

    Each group is the largest that fits and in which no step holds more bytes than before. On a CPU it has a value
    inside that leaves the cache of the device profile ``options.profile``; on a GPU every group is worth it. Groups
    that have other last bits than their operators are chosen under ``numerics="fast"`` alone.
    """
    finder = _Finder(_Site(graph), _least_bytes(graph, options), fast=options.numerics == "fast")
    found: list[tuple[str, ...]] = []
    for node in reversed(operators(graph.graph)):
        members = [] if node in finder.taken else finder.group(node)
        if members:
            finder.taken.update(members)
            finder.site.note(members)
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
    """Replace each group by one node; changes the FX graph in place.

    The node stands in the place of the group's first operator in front of which all operands of the group exist. With
    one result it has the name of the group's last operator; with several, each is picked by a node of its old name.

    Raises:
        PlanError: the graph has no such operators, or they cannot run as a group.
    """
    if not decision.groups:
        return graph
    nodes = {node.name: node for node in operators(graph.graph)}
    site = _Site(graph)
    phase = dict(graph.phase)
    for names in reversed(decision.groups):  # as they were chosen
        if len(set(names)) != len(names) or not names or any(name not in nodes for name in names):
            raise PlanError(f"this graph has no operators {', '.join(names) or '(none)'} that could be one group")
        views = [name for name in names if ops.is_view(nodes[name].target)]
        if views:
            raise PlanError(f"{', '.join(names)} cannot be one group: {views[0]} is a view, and no operator")
        members = site.with_views(nodes[names[-1]], {nodes[name] for name in names})
        wrong = site.unfit(members) if members else "they do not lead to one result"
        if wrong:
            raise PlanError(f"{', '.join(names)} cannot be one group: {wrong}")
        node = site.write(members)
        phase[node.name] = graph.phase[members[-1].name]
        for member in members[:-1]:
            nodes.pop(member.name)
    left = {node.name for node in operators(graph.graph)}
    return graph.replace(phase={name: part for name, part in phase.items() if name in left})


def kind_of_groups(graph: TrainGraph) -> type[Fused]:
    """Return how groups run on the device of ``graph``."""
    return FusedKernel if main_device(graph).type == "cuda" else Fused


class _Site:
    """A graph while groups are chosen or written in it.

    Attributes:
        graph: the graph.
        kind: how groups run on its device.
        position: node to its index among all nodes, as counted before groups are written.
        made: node to the place where its result exists: just in front of the group's place, if that has several.
        read: node to the place where it reads: that of its group, if it is in one.
        fixed: names of nodes that the train graph names, which have to stay.
    """

    def __init__(self, graph: TrainGraph) -> None:
        self.graph = graph
        self.kind = kind_of_groups(graph)
        self.position = {node: at for at, node in enumerate(graph.graph.nodes)}
        self.made: dict[fx.Node, float] = dict(self.position)
        self.read: dict[fx.Node, float] = dict(self.position)
        self.fixed = {*graph.gradients, *graph.saved, *(name for pair in graph.waits.items() for name in pair)}

    def place(self, members: Sequence[fx.Node]) -> fx.Node:
        """Return the first member in front of which all operands of the group exist: in its place the group runs."""
        ready = max((self.made[argument] for argument in _operands(members)), default=-1)
        return next(node for node in members if self.position[node] > ready and not ops.is_view(node.target))

    def results(self, members: Sequence[fx.Node]) -> list[fx.Node]:
        """The members whose results are the group's, in graph order: the last, and those that are needed outside."""
        inside = set(members)
        needed = {blocks.base_of(node) for node in members if _read_outside(node, inside) or node.name in self.fixed}
        return [node for node in members if node in needed or node is members[-1]]

    def with_views(self, root: fx.Node, members: set[fx.Node]) -> list[fx.Node]:
        """Return the members and the views between them in graph order; empty if they do not all lead to ``root``."""
        reached, left = {root}, [root]
        while left:
            for argument in left.pop().all_input_nodes:
                base = blocks.base_of(argument)
                if base in members:
                    chain = list(_chain(argument, base))
                    left += [node for node in chain if node not in reached]
                    reached.update(chain)
        in_order = sorted(reached, key=self.position.__getitem__)
        return in_order if members <= reached and in_order[-1] is root else []

    def unfit(self, members: Sequence[fx.Node]) -> str:
        """Say why these nodes, views between members included, cannot be one group; "" if they can."""
        root, phase = members[-1], self.graph.phase
        matrix = self.kind.frame(root)
        if matrix is None:
            return f"{root.name} has no rows"
        for node in members:
            if phase[node.name] is not phase[root.name]:
                return f"{node.name} belongs to another phase than {root.name}"
            if node is not root and is_kept(node):
                return f"{node.name} is kept by roamc.keep"
        results = self.results(members)
        if len(results) > 1:
            if not self.kind.several:
                return f"{results[0].name} is read outside"
            early = self._early_reader(members)
            if early:
                return early
        wrong = next((said for node in results if (said := self.kind.unwritable(node, matrix))), "")
        return wrong or self.kind.misfit(members, matrix, self.graph.threads)

    def _early_reader(self, members: Sequence[fx.Node]) -> str:
        """Say which node outside reads a member in front of the place where the group runs; "" if none does."""
        inside, place = set(members), self.position[self.place(members)]
        for node in members:
            early = [user for user in node.users if user not in inside and self.read[user] < place]
            if early:
                return f"{early[0].name} reads {node.name} before all that the group reads exists"
        return ""

    def note(self, members: Sequence[fx.Node]) -> None:
        """Note that ``members`` are one group, for the choice of others."""
        place = self.position[self.place(members)]
        several = len(self.results(members)) > 1
        for member in members:
            self.read[member] = place
            if several:
                self.made[member] = place - 0.5

    def write(self, members: Sequence[fx.Node]) -> fx.Node:
        """Note the group and write it into the graph; return its node."""
        self.note(members)
        root, results, place = members[-1], self.results(members), self.place(members)
        group, read = fuse(root, members, self.kind, results)
        if len(results) > 1:
            node = _write_several(self.graph.graph, members, results, place, (group, read))
            self.read[node] = self.read[root]
            return node
        if place is not root:
            place.prepend(root)
        root.target, root.args, root.kwargs = group, tuple(read), {}
        for member in reversed(members[:-1]):
            self.graph.graph.erase_node(member)
        return root


def _write_several(
    graph: fx.Graph,
    members: Sequence[fx.Node],
    results: Sequence[fx.Node],
    place: fx.Node,
    group: tuple[Fused, list[fx.Node]],
) -> fx.Node:
    """Write a group with several results in front of ``place``; views that are read outside stay, behind it."""
    inside = set(members)
    views = [node for node in members if node not in results and _read_outside(node, inside)]
    with graph.inserting_before(place):
        node = graph.create_node("call_function", group[0], tuple(group[1]), name=f"{results[-1].name}_group")
    values, ids = (tuple(result.meta["val"] for result in results), tuple(id_of(result) for result in results))
    node.meta = {**results[-1].meta, "val": values, STORAGES: ids}
    behind = node
    for member in [*results, *views]:
        if member in results:
            member.target, member.args, member.kwargs = getitem, (node, results.index(member)), {}
        behind.append(member)
        behind = member
    for member in reversed(members):
        if not member.users and member not in results:
            graph.erase_node(member)
    return node


def _read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(user not in inside for user in node.users)


def _operands(members: Sequence[fx.Node]) -> list[fx.Node]:
    """Return what the members read that is not made by one of them, in the order in which they read it."""
    inside = set(members)
    return list(dict.fromkeys(a for node in members for a in node.all_input_nodes if a not in inside))


def _chain(node: fx.Node, base: fx.Node) -> Iterator[fx.Node]:
    """Yield ``node``, what it is a view of, and so on up to ``base``."""
    yield node
    while node is not base:
        node = node.all_input_nodes[0]
        yield node


class _Finder:
    """Finds the group that ends with a node, with a value inside of at least ``least`` bytes."""

    def __init__(self, site: _Site, least: float, *, fast: bool) -> None:
        self.site, self.graph, self.kind = site, site.graph, site.kind
        self.least, self.fast = least, fast
        self.taken: set[fx.Node] = set()
        self.memory: MemoryModel = build_memory(self.graph)
        self.step = {operator.node: step for step, operator in enumerate(self.memory.operators)}
        born, dead = lifetimes(self.memory)
        counted = [storage.index for storage in self.memory.counted]
        self.lives = dict(zip(counted, zip(born.tolist(), dead.tolist(), strict=True), strict=True))
        self.live = live_bytes(self.memory)

    def group(self, root: fx.Node) -> list[fx.Node]:
        """Return the largest group that ends with ``root``, in graph order with views; empty if none is worth it."""
        if root not in self.step or not self.kind.fits_numerics(root, fast=self.fast):
            return []
        matrix = self.kind.frame(root)
        if matrix is None or matrix.numel * LARGEST_ITEM < self.least:
            return []
        if self.site.unfit([root]):
            return []
        members = [root]
        while len(members) < EFFORT.most_members and (larger := self._larger(members)) is not None:
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
            larger = self.site.with_views(members[-1], {node for node in inside if node in self.step} | {base})
            if not self.site.unfit(larger):
                return larger
        return None

    def _smaller(self, members: list[fx.Node]) -> list[fx.Node]:
        """Return the group without its first operator."""
        first = next(node for node in members if node in self.step)
        left = {node for node in members if node in self.step and node is not first}
        return self.site.with_views(members[-1], left)

    def _may_join(self, node: fx.Node, root: fx.Node) -> bool:
        if node in self.taken:
            return False
        named = (node.name in self.site.fixed and not self.kind.several) or is_kept(node) or node not in self.step
        named = named or not self.kind.fits_numerics(node, fast=self.fast)
        return not named and self.graph.phase[node.name] is self.graph.phase[root.name]

    def _holds_more(self, members: Sequence[fx.Node]) -> bool:
        """Whether some step would hold more bytes with the group, or the group would read what is written in between.

        It runs in the place of :meth:`_Site.place`: there its result may exist earlier, or operands longer than before.
        """
        mine = [self.step[node] for node in members if node in self.step]
        at, begin, end = self.step[self.site.place(members)], min(mine), max(mine)
        operands = {self.memory.owner[argument.name, 0] for argument in _operands(members)}
        if any(operands.intersection(operator.writes) for operator in self.memory.operators[begin:end]):
            return True
        more = np.zeros(end + 1 - begin, dtype=np.int64)

        def add(nbytes: Bytes, first: int, last: int) -> None:
            more[max(first, begin) - begin : max(last, begin) - begin] += nbytes

        made = {self.step[node] for node in self.site.results(members)}
        for step in mine:
            for birth in self.memory.operators[step].births:
                born, dead = self.lives[birth]
                add(-self.memory.storages[birth].nbytes, born, dead)
                if step in made:
                    add(self.memory.storages[birth].nbytes, at, dead)
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
        group, _ = fuse(members[-1], members, self.kind, self.site.results(members))
        return int(self.live[at]) + more + group_workspace(group, threads) > before

    def _bytes(self, node: fx.Node) -> Bytes:
        return sum(self.memory.storages[birth].nbytes for birth in self.memory.operators[self.step[node]].births)
