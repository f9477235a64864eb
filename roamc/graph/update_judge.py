"""The judge of updates: none begins before the gradient is there that it waited for in the captured graph.

An update that does not read its gradient, such as a weight's decay, could run at any time. It waits all the same, so
that a step that fails before the gradient is there has changed nothing: :attr:`roamc.graph.TrainGraph.waits` says for
what. Passes join and rename operators, and bring these names along. The judge goes by values alone:

    captured    tensors of the caller that an update writes, and the value of the gradient that it waits for
    later       the first operator of UPDATE that writes such a tensor stands behind what makes this value

Tensors may be parts of one storage, such as parameters in a flat buffer. Each waits for its own gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from roamc.errors import VerifyError, way_out
from roamc.graph.memory import started_by
from roamc.graph.storage_ids import StorageId, placed
from roamc.graph.train_graph import Phase, TrainGraph, operators, placeholders
from roamc.operators import ops
from roamc.units import Bytes

if TYPE_CHECKING:
    from roamc.graph.value_walk import Walk

Number = int


@dataclass(frozen=True)
class Updates:
    """When the gradients of a graph are there, and when its updates begin.

    Attributes:
        waits: name of an input that updates write to the number of the gradient that the first of them waits for, and
            its name.
        begun: name of an input to the position of the first operator of UPDATE that writes it, among all operators.
        there: number of a value that is not made in FORWARD to the position of the operator behind which it is there.
    """

    waits: Mapping[str, tuple[Number, str]] = field(default_factory=dict)
    begun: Mapping[str, int] = field(default_factory=dict)
    there: Mapping[Number, int] = field(default_factory=dict)


class Recorder:
    """Notes gradients and updates of ``graph`` while a walk numbers its values.

    A graph without updates has nothing to note.
    """

    def __init__(self, graph: TrainGraph) -> None:
        self.graph = graph
        self.inputs: dict[StorageId, dict[str, tuple[Bytes, Bytes]]] = {}
        for node in placeholders(graph.graph) if Phase.UPDATE in graph.phase.values() else ():
            for _, tensor, storage in placed(node):
                self.inputs.setdefault(storage, {})[node.name] = _span(tensor)
        self.awaited = set(graph.waits.values())
        self.starts = {started_by(node) for node in operators(graph.graph)} if self.inputs else set()
        self.numbers: dict[str, Number] = {}
        self.writes: dict[str, list[str]] = {}
        self.begun: dict[str, int] = {}
        self.there: dict[Number, int] = {}
        self.position = 0

    def note(self, walk: Walk, node: fx.Node) -> None:
        """Note what ``node`` has made and written; ``walk`` has just run it."""
        if not self.inputs:
            return
        self.position += 1
        phase = self.graph.phase[node.name]
        if phase is not Phase.FORWARD or node.name in self.awaited:
            self._note_values(walk, node)
        if phase is Phase.UPDATE:
            self._note_writes(node)

    def _note_values(self, walk: Walk, node: fx.Node) -> None:
        waits = ops.rule(node.target).finishes is not None  # and gives its argument, which is there by now
        maker = node.args[0] if node.target is operator.getitem else node
        there = waits or not (ops.is_view(node.target) or maker in self.starts)
        for place in walk.numbers.places(node):
            number = walk.content(place)
            if there:
                self.there.setdefault(number, self.position)
            if node.name in self.awaited:
                self.numbers[node.name] = number

    def _note_writes(self, node: fx.Node) -> None:
        for argument in ops.mutated_arguments(node):
            names = list(self._names(argument))
            self.writes.setdefault(node.name, []).extend(names)
            for name in names:
                self.begun.setdefault(name, self.position)

    def _names(self, written: fx.Node) -> Iterator[str]:
        """The inputs in whose memory ``written`` lies: those that begin and end there, else all it reaches into."""
        for _, tensor, storage in placed(written):
            begin, end = _span(tensor)
            spans = self.inputs.get(storage, {})
            same = [name for name, span in spans.items() if span == (begin, end)]
            yield from same or (name for name, (first, last) in spans.items() if first < end and begin < last)

    def finished(self) -> Updates:
        """Return what was noted; the walk is at its end."""
        waits: dict[str, tuple[Number, str]] = {}
        for update, names in self.writes.items():
            gradient = self.graph.waits.get(update, "")
            for name in names if gradient in self.numbers else ():
                waits.setdefault(name, (self.numbers[gradient], gradient))
        return Updates(waits, self.begun, self.there)


def _span(tensor: torch.Tensor) -> tuple[Bytes, Bytes]:
    """Where in its storage ``tensor`` begins and ends."""
    begin = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return begin * tensor.itemsize, (begin + (reach if tensor.numel() else 0)) * tensor.itemsize


def check(later: Updates, before: Updates, after: str) -> Updates:
    """Check that updates begin behind the gradients that they wait for.

    Args:
        later: of the graph that a pass left; its own ``waits`` are not read.
        before: of the graph before the pass, with the same numbers.
        after: name of the pass, for the message.

    Returns:
        ``later``, with what the updates wait for in ``before``.

    Raises:
        VerifyError: an update begins earlier; names what it writes, and the gradient.
    """
    for name, (number, gradient) in before.waits.items():
        there = later.there.get(number, 0)  # else inside of a group, in front of what the group writes
        if later.begun.get(name, there) < there:
            raise VerifyError(
                f"after pass {after!r}: {name} is updated before its gradient {gradient} is there, so that a step "
                f"that fails in between has changed it; {way_out(after)}"
            )
    return replace(later, waits=before.waits)
