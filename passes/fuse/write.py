"""Write groups into a graph: the part of pass fuse that rewrites, and says which nodes can be one group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import getitem

import torch
from torch import fx

from roamc.errors import PlanError
from roamc.graph import TrainGraph, main_device, operators
from roamc.graph.keep import is_kept
from roamc.graph.storage_ids import STORAGES, StorageId, all_ids, id_of
from roamc.operators import blocks, in_place, ops
from roamc.operators.alike import Alike
from roamc.operators.fused import Fused, fuse
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.passes.fuse.copies import with_copies
from roamc.passes.fuse.decision import Decision
from roamc.passes.fuse.multi_tensor import with_shared_launches


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Write the copies, and replace each group by one node; changes the FX graph in place.

    The node stands in the place of the group's first operator in front of which all operands of the group exist. With
    one result it has the name of the group's last operator; with several, each is picked by a node of its old name.
    Groups that share a launch are one node.

    Raises:
        PlanError: the graph has no such operators, or they cannot run as a group.
    """
    if not decision.groups:
        return graph
    graph = with_copies(graph, decision)
    nodes = {node.name: node for node in operators(graph.graph)}
    site = Site(graph)
    phase, waits = dict(graph.phase), dict(graph.waits)
    for names in reversed(decision.groups):  # as they were chosen
        if len(set(names)) != len(names) or not names or any(name not in nodes for name in names):
            raise PlanError(f"this graph has no operators {', '.join(names) or '(none)'} that could be one group")
        views = [name for name in names if ops.is_view(nodes[name].target)]
        if views:
            raise PlanError(f"{', '.join(names)} cannot be one group: {views[0]} is a view, and no operator")
        members = site.with_views(nodes[names[-1]], {nodes[name] for name in names}, apart=site.kind.several)
        wrong = site.unfit(members) if members else "they do not lead to one result"
        if wrong:
            raise PlanError(f"{', '.join(names)} cannot be one group: {wrong}")
        part = graph.phase[names[-1]]
        node = site.write(members)
        phase[node.name] = part
        gradients = [waits.pop(name) for name in names if name in waits]  # one and the same, see Site.unfit
        if gradients:
            waits[node.name] = gradients[0]
        for name in {member.name for member in members} - {node.name}:
            nodes.pop(name)
    left = {node.name for node in operators(graph.graph)}
    left_phase = {name: part for name, part in phase.items() if name in left}
    return with_shared_launches(graph.replace(phase=left_phase, waits=waits), decision.launches)


def kind_of_groups(graph: TrainGraph) -> type[Fused]:
    """Return the class of groups for the device of ``graph``: :class:`FusedKernel` on CUDA, else :class:`Fused`."""
    return FusedKernel if main_device(graph).type == "cuda" else Fused


class Site:
    """A graph while groups are chosen or written in it; ``Site(graph)`` has no group yet.

    Attributes:
        graph: the graph.
        alike: makes the keys by which groups that differ in names alone are judged once.
        kind: class of its groups, which says how groups run on its device.
        position: node to its index among all nodes, as counted before groups are written; a node that is inserted later
            has a number between those of its neighbours.
        made: node to the position from which on its result exists; for a member of a group with several results, just
            in front of the place of the group.
        read: node to the position at which it reads; for a member of a group, the place of the group.
        fixed: names of nodes that the train graph names, such as gradients and saved values, which have to stay.
        touched: id of a storage that some operator writes over to all operators that read, make or write it, each with
            whether it makes or writes.
        idle: views that nothing reads any longer; their bases are not read for them.
    """

    def __init__(self, graph: TrainGraph, alike: Alike | None = None) -> None:
        self.graph = graph
        self.alike = alike or Alike()
        self.kind = kind_of_groups(graph)
        self.position: dict[fx.Node, float] = {node: at for at, node in enumerate(graph.graph.nodes)}
        self.made: dict[fx.Node, float] = dict(self.position)
        self.read: dict[fx.Node, float] = dict(self.position)
        self.fixed = {*graph.gradients, *graph.saved, *graph.waits.values()}
        written = all_ids(argument for node in operators(graph.graph) for argument in ops.mutated_arguments(node))
        self._misfits: dict[Hashable, str] = {}
        self._unwritables: dict[tuple[fx.Node, blocks.Matrix], tuple[object, str]] = {}
        self.touched = {own: uses for own, uses in _touched(graph).items() if own in written}
        self.idle: set[fx.Node] = set()

    def place(self, members: Sequence[fx.Node]) -> fx.Node:
        """Return the first member in front of which all operands of the group exist: in its place the group runs."""
        ready = max((self.made[argument] for argument in operands_of(members)), default=-1)
        return next(node for node in members if self.position[node] > ready and not ops.is_view(node.target))

    def results(self, members: Sequence[fx.Node]) -> list[fx.Node]:
        """The members whose results are the group's, in graph order: the last, and those that are needed outside.

        Of an operator with several results, the picks of those that are needed. One that writes over an argument has no
        result of its own.
        """
        inside, last = set(members), blocks.last_of(members)
        outside = (node for node in members if self.read_outside(node, inside) or node.name in self.fixed)
        needed = {blocks.value_of(node) for node in outside}
        ends = isinstance(last.meta["val"], torch.Tensor) and not ops.rule(last.target).mutates
        needed.update([last] if ends else [])
        return [node for node in members if node in needed]

    def with_views(self, root: fx.Node, members: set[fx.Node], *, apart: bool = False) -> list[fx.Node]:
        """Return the members and the views between them in graph order; empty if they do not all lead to ``root``.

        Of a member with several results all picks are there.

        Args:
            root: the last of the members.
            members: operators of one group.
            apart: members may also lead to none of the others; then they share operands.
        """
        left = list(members) if apart else [root, *in_place.writers(list(members))]
        reached = set(left)
        while left:
            for argument in left.pop().all_input_nodes:
                if argument in reached:
                    continue
                base = blocks.base_of(argument)
                if base in members:
                    chain = list(views_between(argument, base))
                    left += [node for node in chain if node not in reached]
                    reached.update(chain)
        several = (node for node in members & reached if isinstance(node.meta.get("val"), list | tuple))
        reached.update(pick for node in several for pick in node.users if pick.target is getitem)
        in_order = sorted(reached, key=self.position.__getitem__)
        return in_order if members <= reached and blocks.last_of(in_order) is root else []

    def unfit(self, members: Sequence[fx.Node]) -> str:
        """Say why these nodes, views between members included, cannot be one group; "" if they can.

        Where it is their values that do not fit, names in the answer may be those of an earlier group that is alike.
        """
        root, phase = blocks.last_of(members), self.graph.phase
        matrix = self.kind.frame(root)
        if matrix is None:
            return f"{root.name} has no rows"
        for node in members:
            if phase[node.name] is not phase[root.name]:
                return f"{node.name} belongs to another phase than {root.name}"
            if node is not root and is_kept(node):
                return f"{node.name} is kept by roamc.keep"
        writes = bool(in_place.writers(members))
        if writes and (reason := in_place.unfit(members)):
            return reason
        place = self.position[self.place(members)]
        reason = self._other_waits(members) or self._out_of_order(members, place)
        if reason:
            return reason
        results = self.results(members)
        if not results and not writes:
            return f"nothing reads {root.name}"
        if results and results != [root]:
            if not self.kind.several:
                return f"{results[0].name} is read outside"
            early = self._early_reader(members, place)
            if early:
                return early
        wrong = next((reason for node in results if (reason := self._unwritable(node, matrix))), "")
        if wrong:
            return wrong
        alike = self.alike.key(members, results if writes else ())
        if alike not in self._misfits:
            misfit = (
                self._unfit_values(members, results)
                if writes
                else self.kind.misfit(members, matrix, self.graph.threads)
            )
            self._misfits[alike] = misfit
        return self._misfits[alike]

    def _unwritable(self, node: fx.Node, matrix: blocks.Matrix) -> str:
        """Say why the result of a member cannot be one of its group, with this ``matrix``; "" if it can. Asked once."""
        key = node, matrix
        args, reason = self._unwritables.get(key, (None, ""))
        if args is not node.args:
            reason = self.kind.unwritable(node, matrix)
            self._unwritables[key] = node.args, reason
        return reason

    def _unfit_values(self, members: Sequence[fx.Node], results: Sequence[fx.Node]) -> str:
        """Say why members, some of which write an argument, cannot run as one on values; "" if they can."""
        group, _ = fuse(members[-1], members, self.kind, results)
        if len(blocks.results_of(group.body)) != len(results) + len(group.writes):
            return f"{results[0].name} is read outside, and is written over an argument"
        values = [node for node in group.body.nodes if node.op == "call_function"]
        return self.kind.misfit(values, group.matrix, self.graph.threads) or group.unfit_writes()

    def _other_waits(self, members: Sequence[fx.Node]) -> str:
        """Say which member waits for another gradient than others; "" if none does."""
        waits = {self.graph.waits[node.name]: node for node in members if node.name in self.graph.waits}
        return "" if len(waits) < 2 else f"{members[0].name} and {members[-1].name} wait for different gradients"

    def _out_of_order(self, members: Sequence[fx.Node], place: float) -> str:
        """Say which operator outside would run on the other side of a write than it does now; "" if none would.

        Args:
            members: of the group.
            place: position at which the group runs.
        """
        inside = set(members)
        for node in (node for node in members if not ops.is_view(node.target)):
            used = [own for value in (node, *node.all_input_nodes) for own in value.meta.get(STORAGES, ())]
            for uses in (self.touched[own] for own in dict.fromkeys(used) if own in self.touched):
                mine = (node, True) in uses
                for other, writes in uses:
                    if other in inside or not (mine or writes):
                        continue
                    if (self.position[other] < self.position[node]) is not (self.read[other] < place):
                        return f"{other.name} and {node.name} use what one of them writes"
        return ""

    def _early_reader(self, members: Sequence[fx.Node], place: float) -> str:
        """Say which node outside reads a member in front of ``place``, where the group runs; "" if none does."""
        inside = set(members)
        for node in (node for node in members if not inside.issuperset(node.users)):
            outside = (user for user in node.users if user not in inside and user not in self.idle)
            early = next((user for user in outside if self.read[user] < place), None)
            if early is not None:
                return f"{early.name} reads {node.name} before all that the group reads exists"
        return ""

    def read_outside(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether a node that is not among ``inside`` reads ``node``."""
        if inside.issuperset(node.users):
            return False
        return any(user not in inside and user not in self.idle for user in node.users)

    def note(self, members: Sequence[fx.Node]) -> Callable[[], None]:
        """Note that ``members`` are one group, for the choice of others; return a function that takes the note back."""
        before = [(member, self.read[member], self.made[member]) for member in members]
        place = self.position[self.place(members)]
        several = len(self.results(members)) > 1
        for member in members:
            self.read[member] = place
            self.made[member] = place - 0.5 if several else self.position[member]

        def back() -> None:
            for member, read, born in before:
                self.read[member], self.made[member] = read, born

        return back

    def enter(self, nodes: Sequence[fx.Node]) -> Callable[[], None]:
        """Give ``nodes``, which were inserted, positions between their neighbours; return a function that undoes it."""
        for node in sorted(nodes):
            behind = node.next
            while behind not in self.position:
                behind = behind.next
            self.position[node] = (self.position[node.prev] + self.position[behind]) / 2
            self.made[node] = self.read[node] = self.position[node]

        def back() -> None:
            for node in nodes:
                for places in (self.position, self.made, self.read):
                    del places[node]

        return back

    def leave_idle(self, views: Iterable[fx.Node]) -> Callable[[], None]:
        """Note which of ``views``, and of the views that they view, nothing reads; return a function that undoes it."""
        idle_views: list[fx.Node] = []
        for view in views:
            while view.op == "call_function" and ops.is_view(view.target) and not self.read_outside(view, set()):
                idle_views.append(view)
                self.idle.add(view)
                view = view.all_input_nodes[0]

        def back() -> None:
            self.idle.difference_update(idle_views)

        return back

    def write(self, members: Sequence[fx.Node]) -> fx.Node:
        """Note that ``members`` are one group, and replace them by one node in the graph; return that node."""
        self.note(members)
        root, results, place = blocks.last_of(members), self.results(members), self.place(members)
        group, read = fuse(root, members, self.kind, results)
        if not results:
            root.meta = {**root.meta, "val": None, STORAGES: ()}
        elif len(results) == 1 and results[0] is not root:
            root = results[0]  # the last write is to this result
        if len(results) > 1:
            node = self._write_several(members, results, place, (group, read))
            self.read[node] = self.read[root]
            return node
        if place is not root:
            place.prepend(root)
        root.target, root.args, root.kwargs = group, tuple(read), {}
        for member in reversed(members):
            if member is not root:
                self.graph.graph.erase_node(member)
        return root

    def _write_several(
        self,
        members: Sequence[fx.Node],
        results: Sequence[fx.Node],
        place: fx.Node,
        group: tuple[Fused, list[fx.Node]],
    ) -> fx.Node:
        """Write a group with several results in front of ``place``; views that are read outside stay, behind it."""
        views = self._views_outside(members, results)
        graph = self.graph.graph
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
            if not member.users and member not in results and member not in views:
                graph.erase_node(member)
        return node

    def _views_outside(self, members: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
        """The views among ``members`` that are read outside, and those that these are views of, in graph order."""
        inside, left = set(members), set[fx.Node]()
        for node in reversed(members):
            if node not in results and (self.read_outside(node, inside) or not left.isdisjoint(node.users)):
                left.add(node)
        return [node for node in members if node in left]


def _touched(graph: TrainGraph) -> dict[StorageId, list[tuple[fx.Node, bool]]]:
    """Return storage id to the operators of ``graph`` that touch it, each with whether it writes or makes it."""
    touches: dict[StorageId, list[tuple[fx.Node, bool]]] = {}
    for node in operators(graph.graph):
        if ops.is_view(node.target):
            continue
        read = all_ids(node.all_input_nodes)
        changed = {*all_ids([node]), *all_ids(ops.mutated_arguments(node))}
        for own in dict.fromkeys([*read, *changed]):
            touches.setdefault(own, []).append((node, own in changed))
    return touches


def operands_of(members: Sequence[fx.Node]) -> list[fx.Node]:
    """Return what the members read that is not made by one of them, in the order in which they read it."""
    inside = set(members)
    return list(dict.fromkeys(a for node in members for a in node.all_input_nodes if a not in inside))


def views_between(node: fx.Node, base: fx.Node) -> Iterator[fx.Node]:
    """Yield ``node``, what it is a view of, and so on up to ``base``."""
    yield node
    while node is not base:
        node = node.all_input_nodes[0]
        yield node
