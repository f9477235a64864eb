"""Choose what groups of backward rebuild inside, so that forward need not store it for them.

A saved value v = op(leaves) costs its bytes from forward until its last reader. Where all readers behind forward belong
to groups, or can, a copy of op inside each of these groups makes v once more; then v dies in forward, and the leaves
live until the groups run. Where the leaves would not live so long, their operators may be copied as well.

A value is rebuilt where the bytes that forward leaves fall, no step holds more than the fullest held before, and the
predicted time allows it: first what costs none, then what costs least for its bytes, as long as all copies together
take at most ``Effort.most_added`` of the step, and no more than the groups save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from roamc.graph import Phase, TrainGraph, copied
from roamc.graph.memory import MemoryModel, Place, Storage, build_memory
from roamc.operators import blocks, ops
from roamc.operators.gpu.results import made_by
from roamc.passes.fuse.copies import Writer, Written, repeats
from roamc.passes.fuse.decision import MOST_MEMBERS, Decision
from roamc.passes.fuse.estimates import Estimates
from roamc.passes.fuse.ledger import Ledger, Undo
from roamc.passes.fuse.write import Site
from roamc.rewriting.expiry import droppable, expiries, guarded
from roamc.units import Bytes, Seconds


@dataclass(frozen=True)
class Effort:
    """How far saved values are rebuilt inside the groups that read them.

    Attributes:
        most_added: share of the step's predicted seconds that all copies add at most. What all groups save is a second
            limit, so that a step with groups takes no longer than one without.
        most_operators: most operators that are copied for one value. The hyperbolic tangent in the approximate GELU
            takes six, from the operand of the GELU.
        least_bytes: bytes of the smallest value that is rebuilt; smaller ones, such as statistics of rows, are worth no
            copy.
    """

    most_added: float = 0.003
    most_operators: int = 8
    least_bytes: Bytes = 1 << 16


EFFORT = Effort()

LEAST_GAP = 1e-6
"""Between two positions of nodes, below which nothing is inserted between them."""


@dataclass(frozen=True)
class _Group:
    """Operators that run as one, or a single one.

    Attributes:
        members: the operators.
        root: the last of them in the graph.
        results: those whose results are read outside; all of a single operator.
    """

    members: frozenset[fx.Node]
    root: fx.Node
    results: frozenset[fx.Node]


@dataclass
class _Change:
    """What one attempt has changed so far.

    Attributes:
        undo: takes it back, the last entry first.
        copies: the copies, as :class:`Decision` lists them.
        took: root of each changed group to the seconds that its parts took before.
        leaves: storages that copies read.
    """

    undo: list[Undo] = field(default_factory=list)
    copies: list[tuple[str, str, str]] = field(default_factory=list)
    took: dict[fx.Node, Seconds] = field(default_factory=dict)
    leaves: dict[int, None] = field(default_factory=dict)

    def back(self, begun: int = 0) -> None:
        """Take back all but the first ``begun`` entries of ``undo``."""
        while len(self.undo) > begun:
            self.undo.pop()()


@dataclass(frozen=True)
class _Gain:
    """What an attempt gives.

    Attributes:
        nbytes: by how much the bytes fall that forward leaves for backward.
        seconds: predicted time that is added; below 0 where it falls.
    """

    nbytes: Bytes
    seconds: Seconds


@dataclass(frozen=True)
class Inlined:
    """Groups with copies in them, and what is noted of both.

    Attributes:
        decision: the groups and the copies.
        names: the nodes of a copy of the graph, copies of operators among them, by their names.
        site: that graph, with all groups noted.
        ledger: the lives of its storages, with all groups noted.
    """

    decision: Decision
    names: Mapping[str, fx.Node]
    site: Site
    ledger: Ledger


def may_save(memory: MemoryModel) -> bool:
    """Return whether forward saves a storage that is large enough to be rebuilt inside its readers."""
    return any(storage.nbytes >= EFFORT.least_bytes for storage in memory.saved)


def with_inlines(graph: TrainGraph, decision: Decision, estimates: Estimates, *, fast: bool) -> Inlined:
    """Return ``decision`` with copies of operators of forward in groups of backward, so that forward saves fewer bytes.

    Args:
        graph: the graph that the groups are chosen for; stays as it is. Copies read nothing of it in backward that the
            caller may write when forward has run, see :func:`roamc.rewriting.expiry.guarded`.
        decision: groups without copies.
        estimates: seconds and workspace of the groups.
        fast: whether groups may have other last bits than their operators.

    Returns:
        The groups and the copies in them. An operator that reads a copied value and was in no group becomes a group
        with the copy, and on a CPU a copied operator may join the group of its readers in forward. ``decision`` itself
        if no copy is worth its time.
    """
    inliner = _Inliner(guarded(copied(graph), inputs=True), decision, estimates, fast=fast)
    inliner.run()
    return Inlined(inliner.decision() if inliner.copies else decision, inliner.names, inliner.site, inliner.ledger)


class _Inliner:
    """Tries copies in a graph of its own, one value after the other, and takes back what is not worth it."""

    def __init__(self, graph: TrainGraph, decision: Decision, estimates: Estimates, *, fast: bool) -> None:
        self.memory = build_memory(graph)
        self.ledger = Ledger(self.memory)
        self.writer = Writer(dict(graph.phase))
        self.graph = graph.replace(phase=self.writer.phase)
        self.site = Site(self.graph, estimates.alike)
        self.kind, self.fast, self.estimates = self.site.kind, fast, estimates
        self.prices: dict[fx.Node, Seconds] = {}
        self.seconds: dict[_Group, Seconds] = {}
        self.alone: dict[fx.Node, bool] = {}
        self.names = {node.name: node for node in graph.graph.nodes}
        self.group_of: dict[fx.Node, _Group] = {}
        self.copies: list[tuple[str, str, str]] = []
        self.saved: dict[fx.Node, list[str]] = {}
        for name in graph.saved:
            self.saved.setdefault(blocks.base_of(self.names[name]), []).append(name)
        self.first = [self._begin(frozenset(self.names[name] for name in names)) for names in reversed(decision.groups)]
        self.allowed: Seconds = 0.0
        self.added: Seconds = 0.0
        self.able = dict(zip(self.memory.counted, droppable(self.memory, self.memory.counted, repeats), strict=True))
        steps = [operator.node.name for operator in self.memory.operators]
        self.until = expiries(self.memory, self.names, steps, range(len(steps)), boundary=graph.boundary)

    def _begin(self, members: frozenset[fx.Node]) -> _Group:
        """Note a group that was chosen before."""
        root = max(members)
        nodes = self.site.with_views(root, set(members), apart=self.kind.several)
        group = _Group(members, root, frozenset(self.site.results(nodes)))
        self._note(group, nodes)
        return group

    def _spare(self) -> Seconds:
        """The seconds that all copies may add together, while the graph has none."""
        saved = sum(sum(map(self._price, group.members)) - self._took(group) for group in self.first)
        step = sum(self._price(operator.node) for operator in self.memory.operators)
        return max(0.0, min(saved, EFFORT.most_added * step))

    def _price(self, node: fx.Node) -> Seconds:
        if node not in self.prices:
            self.prices[node] = self.estimates.operator_seconds(node)
        return self.prices[node]

    def _took(self, group: _Group) -> Seconds:
        """The predicted seconds of a group as it is now."""
        if group not in self.seconds:
            alone = len(group.members) == 1
            self.seconds[group] = self._price(group.root) if alone else self.estimates.group_seconds(*self._body(group))
        return self.seconds[group]

    def run(self) -> None:
        """Choose copies, those first that add no time, then those that add least for their bytes."""
        pending = [storage for storage in self.memory.saved if self._may_go(storage)]
        self.allowed = self._spare() if pending else 0.0
        while pending:
            leaves: dict[int, None] = {}
            worth: list[tuple[float, int, Storage]] = []
            for storage in pending:
                change = _Change()
                gain = self._attempt(storage, change)
                if gain is not None and gain.seconds <= 0:
                    leaves.update(self._taken(gain, change))
                    continue
                change.back()
                if gain is not None and gain.seconds <= self.allowed:
                    worth.append((gain.seconds / gain.nbytes, storage.index, storage))
            for _, _, storage in sorted(worth, key=lambda entry: entry[:2]):
                change = _Change()
                gain = self._attempt(storage, change)
                if gain is not None and self.added + gain.seconds <= self.allowed:
                    leaves.update(self._taken(gain, change))
                else:
                    change.back()
            pending = [self.memory.storages[index] for index in leaves if self._may_go(self.memory.storages[index])]

    def decision(self) -> Decision:
        """Return the groups with the copies that were taken."""
        groups = sorted(set(self.group_of.values()), key=lambda group: group.root)
        return Decision(tuple(tuple(node.name for node in sorted(g.members)) for g in groups), tuple(self.copies))

    def _taken(self, gain: _Gain, change: _Change) -> dict[int, None]:
        """Keep ``change``; return the storages that are read in the place of what is rebuilt."""
        self.added += gain.seconds
        self.copies += change.copies
        return change.leaves

    def _may_go(self, storage: Storage) -> bool:
        """Whether ``storage`` is large enough, and its operator may run once more inside a group."""
        if storage.nbytes < EFFORT.least_bytes or storage.place is not Place.TEMPORARY or not self.able.get(storage):
            return False
        maker = self.memory.operators[storage.producer]
        return maker.phase is Phase.FORWARD and self.kind.fits_numerics(maker.node, fast=self.fast)

    # -- one value ------------------------------------------------------------------------------------------------

    def _attempt(self, storage: Storage, change: _Change) -> _Gain | None:
        """Rebuild ``storage`` inside its late readers; return what that gives, None if nothing or it cannot be."""
        before, most = self.ledger.saved(), int(self.ledger.live().max())
        cone = self._cone(storage)
        if not all(self._rebuild(each, change) for each in cone) or not cone:
            return None
        left = before - self.ledger.saved()
        if left <= 0 or not self._holds(most, change):
            return None
        self._join_forward([self.memory.operators[each.producer].node for each in cone], most, change)
        return _Gain(left, self._added(change))

    def _cone(self, storage: Storage) -> list[Storage]:
        """The storages that are rebuilt for ``storage``: with it what would else live longer, if that is as large.

        Empty if nothing is gained, or some late reader cannot rebuild what it reads.
        """
        if not all(map(self._able_reader, self._late(storage))):
            return []
        cone, model = [storage], self.memory
        while len(cone) <= EFFORT.most_operators:
            read = dict.fromkeys(index for each in cone for index in model.operators[each.producer].reads)
            longer = [model.storages[index] for index in read if not self.ledger.crosses(index)]
            longer = [leaf for leaf in longer if leaf not in cone]
            if sum(leaf.nbytes for leaf in longer) < storage.nbytes:
                return [*cone, *filter(self._is_mask, longer)]
            able = [leaf for leaf in longer if self._may_go(leaf)]
            if not able:
                return []
            cone.append(max(able, key=lambda leaf: (leaf.nbytes, -leaf.index)))
        return []

    def _is_mask(self, storage: Storage) -> bool:
        """Whether ``storage`` follows from a seed: it is rebuilt wherever it is read, for it reads a few bytes."""
        return self._may_go(storage) and ops.rule(self.memory.operators[storage.producer].node.target).numbered

    def _able_reader(self, node: fx.Node) -> bool:
        """Whether ``node`` is in a group, or can be one."""
        if node in self.group_of:
            return True
        if node not in self.alone:
            framed = self.kind.frame(node) is not None and self.kind.fits_numerics(node, fast=self.fast)
            framed = framed and not ops.rule(node.target).mutates
            self.alone[node] = framed and not self.site.unfit(self.site.with_views(node, {node}))
        return self.alone[node]

    def _holds(self, most: Bytes, change: _Change) -> bool:
        """Whether no step holds more than ``most`` bytes, what the groups take for themselves included."""
        live = self.ledger.live()
        if int(live.max()) > most:
            return False
        for group in [self.group_of[root] for root in change.took if root in self.group_of]:
            own = self.estimates.group_workspace(*self._body(group))
            if int(live[self.ledger.runs_at(group.root)]) + own > most:
                return False
        return True

    def _added(self, change: _Change) -> Seconds:
        """The predicted seconds that the changed groups take more than what they consist of took before."""
        after = sum(self._took(self.group_of[root]) for root in change.took if root in self.group_of)
        return after - sum(change.took.values())

    def _late(self, storage: Storage) -> list[fx.Node]:
        """The nodes behind forward that read ``storage``."""
        readers = self.ledger.readers[storage.index]
        return [node for node in readers if self.writer.phase[node.name] is not Phase.FORWARD]

    def _rebuild(self, storage: Storage, change: _Change) -> bool:
        """Copy the operator of ``storage`` into the groups of all its late readers; whether that can be."""
        maker, late = self.memory.operators[storage.producer].node, self._late(storage)
        if not late or any(self.writer.phase[node.name] is not Phase.BACKWARD for node in late):
            return False
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in late:
            groups.setdefault(self._group(node).root, []).append(node)
        for root, readers in groups.items():
            if not self._copy(storage, maker, self._group(root), readers, change):
                return False
        freed = self.site.fixed.intersection(self.saved.get(maker, ()))
        self.site.fixed -= freed
        change.undo.append(lambda: self.site.fixed.update(freed))
        if not self.ledger.readers[storage.index]:
            return self._erase(maker, change)
        group = self.group_of.get(maker)
        if group is None:  # forward computes it by ATen, and a copy has to have these bits
            return self.kind.fits_numerics(maker, fast=False)
        return self._regroup(group.members, group.root, {group.root: self._took(group)}, change)

    def _erase(self, maker: fx.Node, change: _Change) -> bool:
        """Leave out ``maker``, whose result nothing reads any longer; whether that can be: it is in no group."""
        if maker in self.group_of:
            return False
        change.took[maker] = self._price(maker)
        self.site.idle.add(maker)
        change.undo.append(lambda: self.site.idle.discard(maker))
        for index in self.memory.operators[self.ledger.step[maker]].reads:
            change.undo.append(self.ledger.reread(index, [maker], ()))
            producer = self.memory.storages[index].producer
            if not self.ledger.readers[index] and producer >= 0:
                first = self.memory.operators[producer].node
                if first in self.writer.copy_of.values() and not self._erase(first, change):
                    return False
        return True

    def _group(self, node: fx.Node) -> _Group:
        """The group of ``node``; one of its own if it is in none."""
        return self.group_of.get(node) or _Group(frozenset({node}), node, frozenset({node}))

    def _copy(self, storage: Storage, maker: fx.Node, group: _Group, readers: list[fx.Node], change: _Change) -> bool:
        """Copy ``maker``, which makes ``storage``, into ``group`` in front of its first reader; whether that can be."""
        if len(group.members) >= MOST_MEMBERS:
            return False
        if self.ledger.runs_at(group.root) >= self.until[self.ledger.step[maker]]:
            return False
        before = min(readers)
        if self.site.position[before] - self.site.position[before.prev] < LEAST_GAP * len(group.members):
            return False
        took = change.took[group.root] if group.root in change.took else self._took(group)
        name = f"{maker.name}_in_{group.root.name}"
        while name in self.names:
            name += "_"
        written = self.writer.write(name, maker, before, sorted(group.members))
        change.undo.append(self._noted(written, before))
        change.copies.append((name, maker.name, before.name))
        copy = written.new[0]
        change.undo.append(self.ledger.reread(storage.index, readers, ()))
        for index in self._leaves(copy):
            change.leaves[index] = None
            change.undo.append(self.ledger.reread(index, (), [copy]))
        return self._regroup(group.members | {copy}, group.root, {group.root: took}, change)

    def _noted(self, written: Written, before: fx.Node) -> Undo:
        """Enter new nodes, and leave out views that nothing reads any longer."""
        copy, old = written.new[0], list[fx.Node]()
        for _, arguments in written.old:
            fx.map_arg(arguments, old.append)
        self.names.update((node.name, node) for node in written.new)
        self.ledger.step[copy] = self.ledger.step[before]
        undo = self.site.enter(written.new), self.site.leave_idle(old)

        def back() -> None:
            for one in undo:
                one()
            for node in written.new:
                del self.names[node.name]
            del self.ledger.step[copy]
            written.undo()

        return back

    def _leaves(self, copy: fx.Node) -> list[int]:
        """The storages that ``copy`` reads; what other copies make is none."""
        read = [node for node in copy.all_input_nodes if blocks.base_of(node) not in self.writer.copy_of]
        return list(dict.fromkeys(self.memory.owner[node.name, 0] for node in read))

    def _regroup(
        self, members: frozenset[fx.Node], root: fx.Node, parts: Mapping[fx.Node, Seconds], change: _Change
    ) -> bool:
        """Make a group of ``members``; whether they fit.

        Args:
            members: of the new group.
            root: the last of them.
            parts: roots of the groups that it consists of, beside copies, to the seconds that these take.
            change: what is changed by it.
        """
        nodes = self.site.with_views(root, set(members), apart=self.kind.several)
        if not nodes or len(members) > MOST_MEMBERS or self.site.unfit(nodes):
            return False
        change.undo.append(self._note(_Group(members, root, frozenset(self.site.results(nodes))), nodes))
        change.took[root] = sum(change.took.pop(part, took) for part, took in parts.items())
        return True

    def _note(self, group: _Group, nodes: Sequence[fx.Node]) -> Undo:
        """Enter ``group``, the nodes of which are ``nodes``, views included."""
        before = {node: self.group_of.get(node) for node in group.members}
        self.group_of.update(dict.fromkeys(group.members, group))
        step = self.ledger.step[self.site.place(nodes)]
        undo = self.ledger.group(group.members, step, set(map(made_by, group.results)))
        site = self.site.note(nodes)

        def back() -> None:
            site()
            undo()
            for node, was in before.items():
                if was is None:
                    del self.group_of[node]
                else:
                    self.group_of[node] = was

        return back

    def _body(self, group: _Group) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes of the group as it is now, views included, and those whose results it has."""
        nodes = self.site.with_views(group.root, set(group.members), apart=self.kind.several)
        return nodes, self.site.results(nodes)

    # -- forward --------------------------------------------------------------------------------------------------

    def _join_forward(self, makers: Sequence[fx.Node], most: Bytes, change: _Change) -> None:
        """Let what was copied run in the group of its readers in forward as well, where that adds no time.

        On a GPU it does already, where that is worth a group.
        """
        for maker in makers if not self.kind.several else ():
            (birth,) = self.memory.operators[self.ledger.step[maker]].births
            groups = list(dict.fromkeys(self._group(node) for node in self.ledger.readers[birth]))
            mine = self._group(maker)
            if len(groups) != 1 or groups[0] is mine or mine.root is not maker:
                continue
            root, members = groups[0].root, groups[0].members | mine.members
            begun, took = len(change.undo), dict(change.took)
            parts = {root: self._took(groups[0]), maker: self._took(mine)}
            joined = not self._written_between(members) and self._regroup(members, root, parts, change)
            if not joined or self._took(self.group_of[root]) > sum(parts.values()) or not self._holds(most, change):
                change.back(begun)
                change.took = took

    def _written_between(self, members: frozenset[fx.Node]) -> bool:
        """Whether something that ``members`` read is written between the first and the last of them."""
        steps = [self.ledger.step[node] for node in members]
        read = {storage for step in steps for storage in self.memory.operators[step].reads}
        return any(read.intersection(each.writes) for each in self.memory.operators[min(steps) : max(steps)])
