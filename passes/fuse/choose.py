"""Choose groups of operators: the part of pass fuse that decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import fx

from roamc.cost import workspace_bytes
from roamc.cost.profile import DeviceProfile
from roamc.graph import Phase, TrainGraph, main_device, operators, tensors_of
from roamc.graph.keep import is_kept
from roamc.graph.lifetimes import lifetimes, live_bytes
from roamc.graph.memory import MemoryModel, Place, build_memory
from roamc.graph.storage_ids import all_ids, ids_of
from roamc.operators import blocks, in_place, ops
from roamc.operators.gpu.operands import needs_rows
from roamc.operators.gpu.printed import printed
from roamc.operators.table import Kind
from roamc.options import Options
from roamc.passes.fuse.decision import MOST_MEMBERS, Decision
from roamc.passes.fuse.estimates import Estimates
from roamc.passes.fuse.inline import may_save, with_inlines
from roamc.passes.fuse.launches import shared_launches
from roamc.passes.fuse.write import Site, operands_of
from roamc.units import Bytes


@dataclass(frozen=True)
class Effort:
    """How large the largest value inside a group must be for the group to be made.

    A group is made if that value has at least ``least_bytes`` and is larger than the device's cache or than
    ``least_share`` of eager's peak. Blocks of smaller values take as long as whole operators, or longer: 0.92 to 1.28
    of the time for values of 2 to 13 MB on a machine with 32 MB of cache, 0.83 for one of 67 MB.

    Attributes:
        least_bytes: fewest bytes of the largest value inside: four times those of a block.
        least_share: share of eager's peak bytes from which on a value need not be larger than the cache.
        least_update_bytes: fewest bytes of a parameter whose update, operators in place, is one group on a CPU. With
            AdamW blocks take 0.84 to 0.91 of the time for parameters of 67 and 154 MB, 0.88 to 1.1 for 13 to 21 MB, and
            1.0 to 1.3 for 2 to 8 MB.
    """

    least_bytes: Bytes = 4 * blocks.BLOCK_BYTES
    least_share: float = 1 / 16
    least_update_bytes: Bytes = 1 << 25


EFFORT = Effort()

Int64s = npt.NDArray[np.int64]

LARGEST_ITEM: Bytes = 16
"""Bytes of the largest element that tensors have."""


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Choose groups of operators, the one that ends last first; ``graph`` stays as it is.

    Each group is the largest that fits and in which no step holds more bytes than before. On a CPU it has a value
    inside that leaves the cache of the device profile ``options.profile``; on a GPU every group is worth it, and only
    the peak may not rise. Groups that have other last bits than their operators are chosen under ``numerics="fast"``
    alone, and so are launches that groups share. :func:`roamc.passes.fuse.inline.with_inlines` adds what groups of
    backward make once more.
    """
    site = Site(graph)
    estimates = Estimates.of(site, options)
    least, fast = _least_bytes(graph, estimates.profile), options.numerics == "fast"
    finder = Finder(site, least, estimates, fast=fast, decodes=bool(options.codecs))
    group_names: list[tuple[str, ...]] = []
    for node in reversed(operators(graph.graph)):
        members = [] if node in finder.taken else finder.group(node)
        if members:
            finder.note(members)
            group_names.append(tuple(member.name for member in members if not ops.is_view(member.target)))
    decision, shares = Decision(tuple(reversed(group_names))), finder.fast and site.kind.several
    if not shares and not may_save(finder.memory):
        return decision
    inlined = with_inlines(graph, decision, estimates, fast=finder.fast)
    if not shares:
        return inlined.decision
    groups = [[inlined.names[name] for name in names] for names in inlined.decision.groups]
    return replace(inlined.decision, launches=shared_launches(inlined.site, inlined.ledger, groups, estimates))


def _least_bytes(graph: TrainGraph, profile: DeviceProfile) -> float:
    """Bytes of the largest value inside a group at least."""
    if main_device(graph).type == "cuda":
        return 1
    share = EFFORT.least_share * (graph.eager_bytes or 0)
    return max(EFFORT.least_bytes, min(profile.cache_bytes, share))


class Finder:
    """Finds the group that ends with a node; knows the groups that were noted before.

    Args:
        site: the graph, in which no group is written yet.
        least: fewest bytes of the largest value inside a group.
        fast: groups may have other last bits than their operators.
        decodes: on a GPU a slope of an activation is a group, alone as well: it can decode its input.
    """

    def __init__(self, site: Site, least: float, estimates: Estimates, *, fast: bool, decodes: bool = False) -> None:
        self.site, self.graph, self.kind, self.estimates = site, site.graph, site.kind, estimates
        self.least, self.fast, self.decodes = least, fast, decodes and site.kind.several
        self.least_written = max(least, EFFORT.least_update_bytes) if self.kind.in_blocks else least
        self.taken: set[fx.Node] = set()
        self.memory: MemoryModel = build_memory(self.graph)
        self.step = {operator.node: step for step, operator in enumerate(self.memory.operators)}
        born, dead = lifetimes(self.memory)
        counted = [storage.index for storage in self.memory.counted]
        self.lives = dict(zip(counted, zip(born.tolist(), dead.tolist(), strict=True), strict=True))
        self.live = live_bytes(self.memory)
        self.written_at: dict[int, list[int]] = {}
        for step, operator in enumerate(self.memory.operators):
            for index in operator.writes:
                self.written_at.setdefault(index, []).append(step)
        self._ends: dict[fx.Node, fx.Node | None] = {}
        # A kernel of a GPU spares passes over memory: that is worth bytes where the step does not hold most.
        self.spare = int(self.live.max(initial=0)) if self.kind.several else 0

    def group(self, root: fx.Node) -> list[fx.Node]:
        """Return the largest group that ends with the operator ``root``; empty if none is worth it.

        The result has the group's operators, and the views between them, in graph order.
        """
        if root not in self.step or not self.kind.fits_numerics(root, fast=self.fast) or in_place.copies(root):
            return []
        if ops.rule(root.target).mutates and self.graph.phase[root.name] is not Phase.UPDATE:
            return []
        matrix = self.kind.frame(root)
        least = self.least_written if ops.rule(root.target).mutates else self.least
        if matrix is None or matrix.numel * LARGEST_ITEM < least:
            return []
        members = self.site.with_views(root, {root})
        if self.site.unfit(members):
            return []
        members = self._update(members)
        while len(members) < MOST_MEMBERS and (larger := self._larger(members)) is not None:
            members = larger
        while sum(node in self.step for node in members) > 1 and self._holds_more(members):
            members = self._smaller(members)
        if self.fast and self.kind.several:
            members = self._with_siblings(members)
        least = self.least_written if in_place.writers(members) else self.least
        decodes = self.decodes and Kind.SLOPE in ops.rule(root.target).kinds.values()
        return members if decodes or self._spared(members) >= least else []

    def _spared(self, members: Sequence[fx.Node]) -> Bytes:
        """Bytes of the largest value that goes less often through memory: one inside, or one written more than once."""
        called, results = [node for node in members if node in self.step], self.site.results(members)
        inside = [self._bytes(node) for node in called if node is not blocks.last_of(members)]
        if len(called) > 1 and in_place.writers(called):
            inside = [self._bytes(node) for node in called if node not in results]
            touched = Counter(own for node in called for own in all_ids(node.all_input_nodes))
            inside += [own.nbytes for own, times in touched.items() if times > 1 and own in self.site.touched]
        return max(inside, default=0)

    def _update(self, alone: list[fx.Node]) -> list[fx.Node]:
        """Return all operators as large as the last one that lead to it in an update; of others ``alone``, the last.

        To try all at once is quicker than one after the other, and some fit only together. ``alone`` if they do
        not fit.
        """
        root = blocks.last_of(alone)
        if not ops.rule(root.target).mutates:
            return alone
        members, size = alone, root.meta["val"].numel()
        while len(members) < MOST_MEMBERS:
            more = self._larger_by_one(members, size)
            larger = next((larger for larger in more if all(_elements(node) == size for node in larger)), None)
            if larger is None:
                break
            members = larger
        return alone if self.site.unfit(members) else members

    def _before(self, members: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """Yield operators that may join, the last first: they make what members read, or touch what members write."""
        inside, root = set(members), blocks.last_of(members)
        read = dict.fromkeys(argument for node in reversed(members) for argument in node.all_input_nodes)
        written = all_ids(argument for node in members for argument in ops.mutated_arguments(node))
        for argument in read:
            near = [blocks.base_of(argument)]
            for own in ids_of(argument):
                near += [node for node, writes in self.site.touched.get(own, ()) if writes or own in written]
            for node in sorted(near, key=self.site.position.__getitem__, reverse=True):
                behind = self.site.position[node] >= self.site.position[root]
                if node not in inside and not behind and self._may_join(node, root):
                    yield node

    def _with_siblings(self, members: list[fx.Node]) -> list[fx.Node]:
        """Return the group with operators that read what it reads, each with those that lead to it alone.

        What both read goes through memory once, and one launch does for two.
        """
        root = blocks.last_of(members)
        for sibling in list(self._siblings(members)):
            larger = self._beside(members, {sibling}, root)
            while larger and len(larger) < MOST_MEMBERS:
                before = (node for node in self._before(larger) if _elements(node) == _elements(root))
                more = next((more for node in before if (more := self._beside(larger, {node}, root))), None)
                if more is None:
                    break
                larger = more
            if larger and not self._holds_more(larger):
                members = larger
        return members

    def _beside(self, members: Sequence[fx.Node], more: set[fx.Node], root: fx.Node) -> list[fx.Node]:
        """The group with operators more, which need not lead to others; empty if that does not fit."""
        called = {node for node in members if node in self.step}
        larger = self.site.with_views(root, called | more, apart=True)
        return [] if not larger or self.site.unfit(larger) else larger

    def _siblings(self, members: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """Yield the ends of pointwise chains that begin with what ``members``, pointwise as well, read all of."""
        root, inside = blocks.last_of(members), set(members)
        matrix = self.kind.frame(root)
        if matrix is None or any(needs_rows(node) for node in members if node in self.step):
            return
        for argument in operands_of(members):
            whole = sum(tensor.numel() for _, tensor in tensors_of(argument)) == matrix.numel
            for node in dict.fromkeys(map(self._end, argument.users if whole else ())):
                if node is None or node in inside or node not in self.step or ops.rule(node.target).mutates:
                    continue
                same = self.kind.frame(node) == matrix and not needs_rows(node)
                if same and self.site.position[node] < self.site.position[root] and self._may_join(node, root):
                    yield node

    def _end(self, node: fx.Node) -> fx.Node | None:
        if node not in self._ends:
            self._ends[node] = _end(node)
        return self._ends[node]

    def _larger(self, members: list[fx.Node]) -> list[fx.Node] | None:
        """Return the group with one operator more; None if there is none that fits."""
        return next((larger for larger in self._larger_by_one(members) if not self.site.unfit(larger)), None)

    def _larger_by_one(self, members: list[fx.Node], size: int | None = None) -> Iterator[list[fx.Node]]:
        """Yield the group with each operator that may join it, of ``size`` elements alone unless that is None."""
        called = {node for node in members if node in self.step}
        for node in self._before(members):
            if size is not None and _elements(node) != size:
                continue
            larger = self.site.with_views(blocks.last_of(members), called | {node})
            if larger:
                yield larger

    def _smaller(self, members: list[fx.Node]) -> list[fx.Node]:
        """Return the group without its first operator, and without those that fit in none then, such as its copy."""
        called, root = [node for node in members if node in self.step], blocks.last_of(members)
        smaller = (self.site.with_views(root, set(called[begin:])) for begin in range(1, len(called)))
        return next(left for left in smaller if left[0] is root or not self.site.unfit(left))

    def _may_join(self, node: fx.Node, root: fx.Node) -> bool:
        if node in self.taken:
            return False
        named = (node.name in self.site.fixed and not self.kind.several) or is_kept(node) or node not in self.step
        copied = in_place.copies(node)  # what it copies joins, and the copy with it
        named = named or not (copied or self.kind.fits_numerics(node, fast=self.fast))
        phase = self.graph.phase[root.name]
        named = named or (bool(ops.rule(node.target).mutates) and phase is not Phase.UPDATE)
        return not named and self.graph.phase[node.name] is phase

    def _holds_more(self, members: Sequence[fx.Node]) -> bool:
        """Whether some step would hold more bytes with the group, or the group would read what is written in between.

        On a GPU steps may hold more, but none more than the largest of them does without groups.
        """
        mine = [self.step[node] for node in members if node in self.step]
        at, begin, end = self.step[self.site.place(members)], min(mine), max(mine)
        writes = (step for index in self._operands(members) for step in self.written_at.get(index, ()))
        if any(begin <= step < end and step not in mine for step in writes):
            return True
        more = self._more(members)
        inside = np.zeros(len(more), dtype=bool)
        inside[np.array(mine) - begin] = True
        higher = bool(((more > 0) & (self.live[begin : end + 1] + more > self.spare))[~inside].any())
        return higher or self._own(members, at, int(more[at - begin]))

    def note(self, members: Sequence[fx.Node]) -> None:
        """Note that ``members`` are one group: they join no other, and later choices count the live bytes with it."""
        self.taken.update(members)
        begin = min(self.step[node] for node in members if node in self.step)
        more = self._more(members)
        self.live[begin : begin + len(more)] += more
        self.site.note(members)

    def _operands(self, members: Sequence[fx.Node]) -> set[int]:
        """The storages that members read and none of them makes."""
        return {self.memory.owner[argument.name, 0] for argument in operands_of(members) if ids_of(argument)}

    def _more(self, members: Sequence[fx.Node]) -> Int64s:
        """Return by how many bytes each step holds more with the group, from the first of its members to the last.

        It runs in the place of :meth:`Site.place`: there its result may exist earlier, or operands longer than before.
        """
        mine = [self.step[node] for node in members if node in self.step]
        at, begin, end = self.step[self.site.place(members)], min(mine), max(mine)
        operands = self._operands(members)
        more: Int64s = np.zeros(end + 1 - begin, dtype=np.int64)

        def add(nbytes: Bytes, first: int, last: int) -> None:
            more[max(first, begin) - begin : max(last, begin) - begin] += nbytes

        results = {self.memory.owner[node.name, 0] for node in self.site.results(members)}
        for step in mine:
            for birth in self.memory.operators[step].births:
                born, dead = self.lives[birth]
                add(-self.memory.storages[birth].nbytes, born, dead)
                if birth in results:
                    add(self.memory.storages[birth].nbytes, at, dead)
        for index in operands:
            if self.memory.storages[index].place is Place.TEMPORARY:
                born, dead = self.lives[index]
                others = [use for use in self.memory.uses[index] if use not in mine]
                new_dead = max([at, born, *others]) + 1
                add(self.memory.storages[index].nbytes, dead, new_dead)
                add(-self.memory.storages[index].nbytes, new_dead, dead)
        return more

    def _own(self, members: Sequence[fx.Node], at: int, more: Bytes) -> bool:
        """Whether the group, run at step ``at``, holds more than the worst of its members, workspace included."""
        threads = self.graph.threads
        before = max(
            int(self.live[self.step[node]]) + workspace_bytes(node, threads) for node in members if node in self.step
        )
        own = self.estimates.group_workspace(members, self.site.results(members))
        return int(self.live[at]) + more + own > max(before, self.spare)

    def _bytes(self, node: fx.Node) -> Bytes:
        return sum(self.memory.storages[birth].nbytes for birth in self.memory.operators[self.step[node]].births)


def _end(node: fx.Node) -> fx.Node | None:
    """The operator behind which none prints in a kernel that reads the last result; None where several read one."""
    while True:
        left, readers = [node], list[fx.Node]()
        while left:
            for user in left.pop().users:
                (left if ops.is_view(user.target) else readers).append(user)
        printable = list(dict.fromkeys(user for user in readers if printed(user.target) is not None))
        if len(printable) != 1:
            return None if printable else node
        (node,) = printable


def _elements(node: fx.Node) -> int:
    """Elements of the tensors that a node makes or writes."""
    return sum(tensor.numel() for _, tensor in tensors_of(node))
