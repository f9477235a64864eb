"""Offers to keep a buffer in a smaller form, and the schedule in which some of them are taken.

An offer names a buffer k, operators that make a smaller form of k and others that make k again from the form, and the
readers of k that would read what is made again. A taken offer adds its operators to the schedule:

    without     producer of k ... early reader ............................ late reader
    with        producer of k ... early reader, encode, ................... decode, late reader
                |==== k =======================|=== the smaller form ======|=== k again ===|

- `ENCODE` operators run behind the last early reader that runs before the first late one.
- `DECODE` operators run in front of the first late reader.
- `STAND_IN` operators run in front of the first reader that looks at the shape of k alone; it is given something of
  that shape, and k need not be there for it.

In the new schedule these are operators like others: what they make may be dropped and made again. An operator whose
results nobody reads any more is left out if `RetainProblem.idle` allows that. An offer may read other buffers than k,
and several offers may be of one buffer, of which a solution takes one at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from roamc.solvers.order.problem import BufferIndex, Bytes, OpIndex

Seconds = float


class Part(IntEnum):
    """What an operator of an offer makes.

    ENCODE: the smaller form of the buffer.
    DECODE: the buffer from the smaller form.
    STAND_IN: what readers that need only the shape of the buffer read in its place.
    """

    ENCODE = 0
    DECODE = 1
    STAND_IN = 2


@dataclass(frozen=True)
class Result:
    """A buffer that an operator of an offer makes.

    size: bytes.
    droppable: whether it may be dropped and made again.
    reusable: buffers whose bytes it may take over, the best first, numbered as `Extra.reads`.
    """

    size: Bytes
    droppable: bool
    reusable: tuple[int, ...] = ()


@dataclass(frozen=True)
class Extra:
    """An operator that a taken offer adds to the schedule.

    part: what it is for.
    anchor: in program order it stands right behind this operator (ENCODE) or right in front of it (others). It belongs
        to the anchor's stage.
    rank: of several that stand at one place, that with the lower rank comes first; equals keep their sequence.
    seconds: what a run takes.
    workspace: bytes that it takes for itself.
    repeatable: whether it may run again.
    reads: the buffers that it reads: buffer k of the problem as k, entry i of `Offer.made` as ~i.
    makes: the buffers that it makes.
    """

    part: Part
    anchor: OpIndex
    rank: int
    seconds: Seconds
    workspace: Bytes
    repeatable: bool
    reads: tuple[int, ...]
    makes: tuple[Result, ...]


@dataclass(frozen=True)
class Offer:
    """A smaller form in which one buffer can wait for its late readers.

    buffer: the buffer.
    nbytes: bytes that wait in its place.
    operators: what is added to the schedule, in program order within each part.
    instead: (reader, i) for each reader of `buffer` that reads entry i of `made` in its place.
    """

    buffer: BufferIndex
    nbytes: Bytes
    operators: tuple[Extra, ...]
    instead: tuple[tuple[OpIndex, int], ...]

    @cached_property
    def seconds(self) -> Seconds:
        """Seconds that the first runs of its operators take."""
        return math.fsum(each.seconds for each in self.operators)

    @cached_property
    def made(self) -> tuple[Result, ...]:
        """The buffers that its operators make, in their sequence: entry i is what `Extra.reads` names ~i."""
        return tuple(result for each in self.operators for result in each.makes)

    def read_by(self, reader: OpIndex) -> Bytes:
        """Return the bytes that `reader` reads in place of the buffer; 0 for a reader that is not in `instead`."""
        return sum(self.made[own].size for op, own in self.instead if op == reader)

    @cached_property
    def decoded_for(self) -> tuple[OpIndex, ...]:
        """The readers in `instead` that read what is made of the smaller form."""
        return self._readers(stand_ins=False)

    @cached_property
    def shaped_for(self) -> tuple[OpIndex, ...]:
        """The readers in `instead` that take a stand-in."""
        return self._readers(stand_ins=True)

    def _readers(self, *, stand_ins: bool) -> tuple[OpIndex, ...]:
        """The readers of those buffers that operators for stand-ins make, or that others make."""
        parts = [each.part for each in self.operators for _ in each.makes]
        return tuple(reader for reader, own in self.instead if (parts[own] is Part.STAND_IN) is stand_ins)

    def price(self, per_byte: float) -> Seconds:
        """Return the seconds of the offer's operators plus `per_byte` seconds for each of the `nbytes` that wait."""
        return self.seconds + self.nbytes * per_byte


def cheapest(offers: Sequence[Offer], sizes: Sequence[Bytes], per_byte: float) -> tuple[int, ...]:
    """Return the offers, one for each buffer at most, that cost less than to keep their buffers as they are.

    offers: the offers; the result has their places in this sequence, sorted.
    sizes: bytes of every buffer.
    per_byte: seconds that a byte which waits costs; if infinite, the smallest form of each buffer is taken.
    """
    best: dict[BufferIndex, tuple[float, float, int]] = {}
    for place, offer in enumerate(offers):
        endless = math.isinf(per_byte)
        costs = (float(offer.nbytes), offer.seconds) if endless else (offer.price(per_byte), 0.0)
        whole = float(sizes[offer.buffer]) * (1.0 if endless else per_byte)
        if costs[0] < whole:
            best[offer.buffer] = min(best.get(offer.buffer, (*costs, place)), (*costs, place))
    return tuple(sorted(place for *_, place in best.values()))


def check_offers(offers: Iterable[Offer], num_ops: int, num_buffers: int) -> None:
    """Raise ValueError, naming the offer, if one names an operator or buffer that does not exist.

    num_ops, num_buffers: how many operators and buffers the problem has; they are numbered from 0.
    """
    for place, offer in enumerate(offers):
        num_made = len(offer.made)
        ops = [each.anchor for each in offer.operators] + [reader for reader, _ in offer.instead]
        reads = [buffer for each in offer.operators for buffer in each.reads]
        if not all(0 <= op < num_ops for op in ops):
            raise ValueError(f"offer {place} names an op out of range 0..{num_ops - 1}")
        if not 0 <= offer.buffer < num_buffers or not all(-num_made <= buffer < num_buffers for buffer in reads):
            raise ValueError(f"offer {place} names a buffer out of range 0..{num_buffers - 1}")
        if not all(0 <= own < num_made for _, own in offer.instead):
            raise ValueError(
                f"offer {place} lets a reader read buffer {max(own for _, own in offer.instead)} of {num_made}"
            )
