"""The schedule in which some offers are taken, as a problem of its own: `offers.py` says what that schedule is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.order.problem import (
    BufferIndex,
    BufferSpec,
    Bytes,
    OpIndex,
    OrderProblem,
    Step,
    consumers,
    reusables,
    writes,
)
from roamc.solvers.order.problem import make_problem as make_order
from roamc.solvers.order.problem import reads as reads_of
from roamc.solvers.retain.offers import Extra, Offer, Part, clash
from roamc.solvers.retain.problem import RetainProblem, make_problem

_Item = TypeVar("_Item")
_Key = tuple[int, int, int, int]
"""Sorts operators in program order: anchor, side of the anchor, rank, and the sequence in which they were added."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """A problem with taken offers, and where their operators are.

    problem: the problem with the operators of the taken offers, and without `offers`. Operators whose results nobody
        reads any more are left out where `idle` allows that; operators and buffers keep their relative order.
    encodes, decodes: for each taken offer, the numbers in `problem` of its operators with the part ENCODE, and of those
        with the part DECODE.
    """

    problem: RetainProblem
    encodes: tuple[tuple[OpIndex, ...], ...]
    decodes: tuple[tuple[OpIndex, ...], ...]


def encoded(problem: RetainProblem, taken: Sequence[int]) -> Encoded:
    """Return the problem of the schedule in which the offers at the places `taken` in `problem.offers` are taken.

    Raises ValueError if two of them clash, see `offers.clash`.
    """
    offers = [problem.offers[place] for place in taken]
    if why := clash(offers):
        raise ValueError(f"two taken offers {why}")
    if not offers:
        return Encoded(replace(problem, offers=()), (), ())
    return _Writer(problem, offers).write()


class _Writer:
    """Adds the operators and buffers of offers to a problem.

    Items are named before they are numbered: operators and buffers of the problem by their numbers, those that are
    added by the numbers behind these, in the sequence in which they are added.

    problem, order: the problem.
    offers: what is taken.
    firsts: by offer, the number of the first buffer that it makes.
    extras: the added operators, with the number of the first buffer of their offer.
    parts: by offer, its operators by what they are for.
    sizes, kept, droppable, producer: by buffer.
    readers: by buffer, the operators that read it.
    reusable: by buffer, the buffers whose bytes it may take over.
    makes: by operator of the problem, the buffers that it makes.
    dead: the operators that are left out.
    alive: the operators that are left.
    """

    def __init__(self, problem: RetainProblem, offers: Sequence[Offer]) -> None:
        self.problem, self.order, self.offers = problem, problem.order, offers
        order = self.order
        self.firsts: list[BufferIndex] = []
        self.extras: list[tuple[Extra, int]] = []
        self.parts: list[dict[Part, list[OpIndex]]] = []
        self.sizes: list[Bytes] = order.size.tolist()
        self.kept: list[bool] = order.kept.tolist()
        self.droppable: list[bool] = problem.droppable.tolist()
        self.producer: list[OpIndex] = order.producer.tolist()
        self.readers = [dict.fromkeys(row) for row in consumers(order).lists()]
        self.reusable = reusables(order).lists()
        self.makes = writes(order).lists()
        for offer in offers:
            self._add(offer)
        self.dead = self._without_readers()
        self.alive = [op for op in range(order.num_ops + len(self.extras)) if op not in self.dead]

    def _add(self, offer: Offer) -> None:
        """Add the operators of an offer, and let readers read what it makes."""
        first = len(self.sizes)
        self.firsts.append(first)
        parts: dict[Part, list[OpIndex]] = {part: [] for part in Part}
        for extra in offer.operators:
            number = self.order.num_ops + len(self.extras)
            self.extras.append((extra, first))
            parts[extra.part].append(number)
            for buffer in extra.reads:
                self.readers[_named(buffer, first)][number] = None
            for result in extra.makes:
                self.sizes.append(result.size)
                self.kept.append(False)
                self.droppable.append(result.droppable)
                self.producer.append(number)
                self.readers.append({})
                self.reusable.append([_named(buffer, first) for buffer in result.reusable])
        self.parts.append(parts)
        for reader, buffer, own in offer.instead:
            self.readers[buffer].pop(reader, None)
            self.readers[first + own][reader] = None
        self._redirect_reuse(offer, first)

    def _redirect_reuse(self, offer: Offer, first: BufferIndex) -> None:
        """Let results that could take over the bytes of what is no longer read take over those of what is instead."""
        for reader, buffer, i in offer.instead:
            own = first + i
            for result in self.makes[reader]:
                row = self.reusable[result]
                if buffer in row:
                    replacement = [own] if self.sizes[own] == self.sizes[result] else []
                    at = row.index(buffer)
                    self.reusable[result] = [*row[:at], *replacement, *row[at + 1 :]]

    def _without_readers(self) -> set[OpIndex]:
        """The operators that are left out because nothing reads a result of theirs any more; their reads are gone."""
        dead: set[OpIndex] = set()
        pending = [self.producer[buffer] for offer in self.offers for buffer in (offer.buffer, *offer.others)]
        if not any(self._unread(op) for op in pending):
            return dead
        reads = reads_of(self.order).lists()
        for first, offer in zip(self.firsts, self.offers, strict=True):
            for reader, _, own in offer.instead:
                reads[reader].append(first + own)
        while pending:
            op = pending.pop()
            if op in dead or not self._unread(op):
                continue
            dead.add(op)
            for buffer in reads[op]:
                self.readers[buffer].pop(op, None)
                if self.producer[buffer] < self.order.num_ops:
                    pending.append(self.producer[buffer])
        return dead

    def _unread(self, op: OpIndex) -> bool:
        """Whether the operator is one that is left out without readers, and has none."""
        results = self.makes[op]
        unread = not any(self.readers[buffer] or self.kept[buffer] for buffer in results)
        return bool(self.problem.idle[op]) and bool(results) and unread

    def write(self) -> Encoded:
        """Number everything in program order, and return the problem."""
        number = {op: new for new, op in enumerate(sorted(self.alive, key=self._key))}
        buffers = self._buffers(number)
        order = self._order(number, buffers)
        sequence = self._sequence(number)
        problem = make_problem(
            order,
            [number[op] for op in sequence],
            seconds=self._row(number, self.problem.seconds.tolist(), [extra.seconds for extra, _ in self.extras]),
            repeatable=self._row(
                number, self.problem.repeatable.tolist(), [extra.repeatable for extra, _ in self.extras]
            ),
            droppable=[self.droppable[buffer] for buffer in buffers],
            expires=self._expires(number, sequence),
            waiting=self.problem.waiting,
            boundary=number.get(self.problem.boundary, -1),
        )
        rows = [
            tuple(tuple(number[op] for op in parts[part]) for parts in self.parts)
            for part in (Part.ENCODE, Part.DECODE)
        ]
        return Encoded(problem, *rows)

    def _key(self, op: OpIndex) -> _Key:
        """The place of an operator in program order."""
        if op < self.order.num_ops:
            return op, 1, 0, 0
        extra, _ = self.extras[op - self.order.num_ops]
        return extra.anchor, 2 if extra.part is Part.ENCODE else 0, extra.rank, op

    def _row(self, number: dict[OpIndex, OpIndex], old: list[_Item], added: list[_Item]) -> list[_Item]:
        """The entries of all operators that are left, in program order."""
        both = old + added
        return [both[op] for op in number]

    def _order(self, number: dict[OpIndex, OpIndex], buffers: Sequence[BufferIndex]) -> OrderProblem:
        """The ordering problem with everything numbered anew."""
        order = self.order
        buffer_number = {buffer: new for new, buffer in enumerate(buffers)}
        specs: list[BufferSpec] = [
            (
                self.sizes[buffer],
                number[self.producer[buffer]],
                [number[op] for op in self.readers[buffer]],
                self.kept[buffer],
            )
            for buffer in buffers
        ]
        removed = {(self.producer[buffer], reader) for offer in self.offers for reader, buffer, _ in offer.instead}
        edges = [
            (number[before], number[after])
            for before, after in order.edges.tolist()
            if before in number and after in number and (before, after) not in removed
        ]
        stage = order.stage.tolist()
        return make_order(
            self._row(number, stage, [stage[extra.anchor] for extra, _ in self.extras]),
            edges,
            specs,
            self._row(number, order.workspace.tolist(), [extra.workspace for extra, _ in self.extras]),
            [[buffer_number[reused] for reused in self.reusable[buffer]] for buffer in buffers],
        )

    def _buffers(self, number: dict[OpIndex, OpIndex]) -> list[BufferIndex]:
        """The buffers that are left, those that were added among the others by when they are made."""
        old = [buffer for buffer in range(self.order.num_buffers) if self.producer[buffer] in number]
        makers = np.array([number[self.producer[buffer]] for buffer in old], dtype=np.int64)
        later: LongArray = np.minimum.accumulate(makers[::-1])[::-1]
        added = range(self.order.num_buffers, len(self.sizes))
        place = {buffer: (2 * at + 1, 0, 0) for at, buffer in enumerate(old)}
        for buffer in added:
            at = number[self.producer[buffer]]
            place[buffer] = 2 * int(np.searchsorted(later, at)), at, buffer
        return sorted(place, key=place.__getitem__)

    def _sequence(self, number: dict[OpIndex, OpIndex]) -> list[OpIndex]:
        """The reference order with the added operators in their places; operators are named, not numbered."""
        sequence = self.problem.sequence.tolist()
        step = {op: at for at, op in enumerate(sequence)}
        front: dict[Step, list[OpIndex]] = {}
        behind: dict[Step, list[OpIndex]] = {}
        for offer, parts in zip(self.offers, self.parts, strict=True):
            last, late, shape = self._places(offer, step)
            behind.setdefault(last, []).extend(parts[Part.ENCODE])
            front.setdefault(late, []).extend(parts[Part.DECODE])
            front.setdefault(shape, []).extend(parts[Part.STAND_IN])
        placed: list[OpIndex] = []
        for at, op in enumerate(sequence):
            placed += sorted(front.get(at, ()), key=number.__getitem__)
            placed += [op] if op in number else []
            placed += sorted(behind.get(at, ()), key=number.__getitem__)
        return placed

    def _places(self, offer: Offer, step: dict[OpIndex, Step]) -> tuple[Step, Step, Step]:
        """Three steps: of the last reader before the form is read, the first late reader, the first of the shape.

        What is left out and made what the offer makes anew is no reader; the form reads its buffer in its place.
        """
        late = min((step[op] for op in offer.decoded_for), default=self.order.num_ops)
        shape = min((step[op] for op in offer.shaped_for), default=self.order.num_ops)
        moved = {reader for reader, buffer, _ in offer.instead if buffer == offer.buffer}
        moved |= self.dead & {self.producer[buffer] for buffer in offer.others}
        begin, end = self.order.consumer_start[offer.buffer : offer.buffer + 2].tolist()
        early = [step[op] for op in self.order.consumer[begin:end].tolist() if op not in moved]
        encode = (extra for extra in offer.operators if extra.part is Part.ENCODE)
        inputs = [step[self.producer[buffer]] for extra in encode for buffer in extra.reads if buffer >= 0]
        last = max(step[self.order.producer[offer.buffer]], *inputs, *(at for at in early if at < late), 0)
        return last, late, shape

    def _expires(self, number: dict[OpIndex, OpIndex], sequence: list[OpIndex]) -> list[Step]:
        """The steps in front of which operators must not run again: right behind what ran last before their limits."""
        step, end = {op: at for at, op in enumerate(sequence)}, len(sequence)
        behind = [0]
        for op in self.problem.sequence.tolist():
            behind.append(step[op] + 1 if op in step else behind[-1])
        limit = [end if at >= self.order.num_ops else behind[at] for at in self.problem.expires.tolist()]
        return self._row(number, limit, [end] * len(self.extras))


def _named(buffer: int, first: BufferIndex) -> BufferIndex:
    """What an operator of an offer reads, whose own buffers are named from `first` on."""
    return buffer if buffer >= 0 else first + ~buffer
