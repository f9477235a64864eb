"""Choose which updates share a launch: groups of equal form that write small tensors, such as biases and norms.

    before                          after
    fused(p1, grad1, m1, v1)        fused(p1, grad1, m1, v1, p2, grad2, m2, v2, p3, grad3, m3, v3)
    fused(p2, grad2, m2, v2)
    fused(p3, grad3, m3, v3)

Each gradient then lives until the last one exists. Groups share a launch only where the peak does not rise in two
orders: the present one, and that in which every update runs as soon as it can, which holds least gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import fx

from roamc.graph.storage_ids import StorageId, all_ids
from roamc.operators import in_place, ops
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.multi_tensor import MOST_ARGUMENTS, MOST_TENSORS, form_of
from roamc.passes.fuse.estimates import Estimates
from roamc.passes.fuse.ledger import Ledger
from roamc.passes.fuse.write import Site, operands_of


@dataclass(frozen=True)
class Effort:
    """Which groups are small enough to share a launch.

    Attributes:
        most_share: predicted seconds of a group beside its launch, as a share of those of the launch, at most.
    """

    most_share: float = 1 / 8


EFFORT = Effort()


@dataclass(frozen=True)
class _Update:
    """A group that only writes arguments.

    Attributes:
        members: its operators, in graph order.
        operands: what it reads and writes.
        form: equal for groups that may share a launch; None if it shares none.
        ready: the last step that has to come before it.
    """

    members: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    form: Hashable | None
    ready: int

    @property
    def name(self) -> str:
        """The name of the last operator, which is that of the group."""
        return self.members[-1].name


def shared_launches(
    site: Site, ledger: Ledger, groups: Sequence[Sequence[fx.Node]], estimates: Estimates
) -> tuple[tuple[str, ...], ...]:
    """Choose which groups share a launch.

    Args:
        site: the graph, with all groups noted.
        ledger: the lives of its storages, with all groups noted. The same when the function returns.
        groups: the operators of each group.
        estimates: seconds of the groups.

    Returns:
        For each launch the names of its groups' last operators.
    """
    return _Chooser(site, ledger, estimates).choose(groups)


class _Chooser:
    """Tries shared launches in a ledger."""

    def __init__(self, site: Site, ledger: Ledger, estimates: Estimates) -> None:
        self.site, self.ledger, self.estimates = site, ledger, estimates
        self.before: dict[int, list[int]] = {}
        self.behind: dict[int, list[int]] = {}

    def choose(self, groups: Sequence[Sequence[fx.Node]]) -> tuple[tuple[str, ...], ...]:
        writing = [sorted(members) for members in groups if in_place.writers(members)]
        if len(writing) < 2:
            return ()
        self._read_edges({self.ledger.step[node] for members in writing for node in members})
        updates = [update for members in writing if (update := self._update(members)) is not None]
        alike: dict[Hashable, list[_Update]] = {}
        for update in sorted(updates, key=lambda update: (update.ready, self.ledger.step[update.members[0]])):
            if update.form is not None:
                alike.setdefault(update.form, []).append(update)
        chosen = [launch for same in alike.values() for launch in _divided(same)]
        with ExitStack() as undo:
            chosen = [fitting for launch in chosen for fitting in self._kept(launch, self._place, undo)]
        with ExitStack() as undo:
            for update in updates:
                undo.callback(self.ledger.group(update.members, update.ready, ()))
            chosen = [fitting for launch in chosen for fitting in self._kept(launch, _ready, undo)]
        return tuple(tuple(update.name for update in launch) for launch in chosen)

    def _read_edges(self, steps: set[int]) -> None:
        for first, second in self.ledger.memory.edges:
            if second in steps:
                self.before.setdefault(second, []).append(first)
            if first in steps:
                self.behind.setdefault(first, []).append(second)

    def _update(self, members: Sequence[fx.Node]) -> _Update | None:
        """The group as an update; None if it has results, or operators that lead to none of its others."""
        nodes = self.site.with_views(members[-1], set(members))
        if not nodes or self.site.results(nodes):
            return None
        group = self.estimates.group(nodes, ())
        launch = self.estimates.profile.overhead
        small = self.estimates.group_seconds(nodes, ()) <= (1 + EFFORT.most_share) * launch
        form = form_of(group) if small and isinstance(group, FusedKernel) else None
        return _Update(tuple(members), tuple(operands_of(nodes)), form, self._ready(members))

    def _ready(self, members: Sequence[fx.Node]) -> int:
        steps = {self.ledger.step[node] for node in members}
        before = (first for step in steps for first in self.before.get(step, ()) if first not in steps)
        return max((self._runs_at(step) for step in before), default=0)

    def _runs_at(self, step: int) -> int:
        return self.ledger.runs_at(self.ledger.memory.operators[step].node)

    def _kept(
        self, launch: Sequence[_Update], at: Callable[[Sequence[_Update]], int | None], undo: ExitStack
    ) -> Iterator[Sequence[_Update]]:
        """Yield the updates as one launch, or as several where they cannot be one; notes them in the ledger.

        Args:
            launch: updates of one form.
            at: says at which step they run; None if at none.
            undo: gets what takes the notes back.
        """
        if len(launch) < 2:
            return
        step = at(launch)
        if step is not None and _fit(launch):
            most = int(self.ledger.live().max())
            back = self.ledger.group([node for update in launch for node in update.members], step, ())
            if int(self.ledger.live().max()) <= most:
                undo.callback(back)
                yield launch
                return
            back()
        half = len(launch) // 2
        yield from self._kept(launch[:half], at, undo)
        yield from self._kept(launch[half:], at, undo)

    def _place(self, launch: Sequence[_Update]) -> int | None:
        """The step of the first operator in front of which all operands exist; None if others need a result before."""
        steps = {self.ledger.step[node] for update in launch for node in update.members}
        place = min(step for step in steps if step > _ready(launch))
        behind = (second for step in steps for second in self.behind.get(step, ()) if second not in steps)
        return place if all(self._runs_at(step) > place for step in behind) else None


def _ready(launch: Sequence[_Update]) -> int:
    """The last step that has to come before all of the updates."""
    return max(update.ready for update in launch)


def _fit(launch: Sequence[_Update]) -> bool:
    """Whether one kernel takes all arguments, and no update touches what another one writes."""
    if len({node for update in launch for node in update.operands}) > MOST_ARGUMENTS:
        return False
    touched, written = Counter[StorageId](), set[StorageId]()
    for update in launch:
        touched.update(all_ids(update.operands))
        written.update(all_ids(argument for node in update.members for argument in ops.mutated_arguments(node)))
    return all(touched[own] < 2 for own in written)


def _divided(updates: Sequence[_Update]) -> list[Sequence[_Update]]:
    """The updates in parts of about the same length, none longer than a kernel takes."""
    count = -(-len(updates) // MOST_TENSORS)
    size = -(-len(updates) // count)
    return [updates[begin : begin + size] for begin in range(0, len(updates), size)]
