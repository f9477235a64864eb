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
results nobody reads any more is left out if `RetainProblem.idle` allows that.

An offer may read other buffers than k, and serve readers of other buffers too: of what is made from k again, or of what
is made of k anew, as a smaller product in the place of one that is made late. Several offers may be of one buffer, and
several may serve one reader of one buffer: a solution takes one of them at most, see `clash`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import chain, pairwise

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
    """A smaller form in which one buffer can wait for its late readers, and for those of what is made of it.

    buffer: the buffer.
    nbytes: bytes that wait in its place, for all readers of what is made of the form.
    operators: what is added to the schedule, in program order within each part.
    instead: (reader, k, i) for each reader of buffer k that reads entry i of `made` in its place; mostly k is `buffer`.
    saves: seconds of each operator that is left out because the offer makes its results.
    """

    buffer: BufferIndex
    nbytes: Bytes
    operators: tuple[Extra, ...]
    instead: tuple[tuple[OpIndex, BufferIndex, int], ...]
    saves: tuple[Seconds, ...] = ()

    @cached_property
    def seconds(self) -> Seconds:
        """Seconds that the first runs of its operators take, without those of operators that are left out."""
        return math.fsum((*(each.seconds for each in self.operators), *(-each for each in self.saves)))

    @cached_property
    def made(self) -> tuple[Result, ...]:
        """The buffers that its operators make, in their sequence: entry i is what `Extra.reads` names ~i."""
        return tuple(result for each in self.operators for result in each.makes)

    @cached_property
    def others(self) -> tuple[BufferIndex, ...]:
        """The other buffers whose readers are in `instead`, each once."""
        return tuple(dict.fromkeys(k for _, k, _ in self.instead if k != self.buffer))

    @cached_property
    def shares(self) -> dict[BufferIndex, Seconds]:
        """The seconds of its operators, divided among the buffers whose readers it serves.

        An operator that makes what only readers of other buffers read is for the first of these; all others, and those
        that make the form, are for `buffer`, and so is what is saved.
        """
        maker = [number for number, each in enumerate(self.operators) for _ in each.makes]
        served = (self.buffer, *self.others)
        first = {number: self.buffer for number, each in enumerate(self.operators) if each.part is Part.ENCODE}
        for _, k, own in sorted(self.instead, key=lambda read: served.index(read[1])):
            first.setdefault(maker[own], k)
        shares: dict[BufferIndex, list[Seconds]] = {k: [] for k in served}
        shares[self.buffer] += [-each for each in self.saves]
        for number, each in enumerate(self.operators):
            shares[first.get(number, self.buffer)].append(each.seconds)
        return {k: math.fsum(row) for k, row in shares.items()}

    @cached_property
    def claims(self) -> frozenset[tuple[OpIndex, BufferIndex]]:
        """What no other taken offer may have: (-1, `buffer`), and each (reader, k) in `instead`."""
        return frozenset({(-1, self.buffer), *((reader, k) for reader, k, _ in self.instead)})

    @cached_property
    def read_instead(self) -> dict[tuple[OpIndex, BufferIndex], Bytes]:
        """Per (reader, k) in `instead` the bytes read in place of buffer k; what a reader reads for two counts once."""
        nbytes = {(reader, k): 0 for reader, k, _ in self.instead}
        for (reader, own), k in {(reader, own): k for reader, k, own in self.instead}.items():
            nbytes[reader, k] += self.made[own].size
        return nbytes

    @cached_property
    def decoded_for(self) -> tuple[OpIndex, ...]:
        """The readers in `instead` that read what is made of the smaller form."""
        return tuple(reader for reader, _, own in self.instead if own not in self._stand_ins)

    @cached_property
    def shaped_for(self) -> tuple[OpIndex, ...]:
        """The readers in `instead` that take a stand-in."""
        return tuple(reader for reader, _, own in self.instead if own in self._stand_ins)

    @cached_property
    def least_bytes(self) -> Bytes:
        """Bytes that are there in any case before the last reader in `decoded_for`: the form, or what is made of it."""
        read = [self.made[own].size for *_, own in self.instead if own not in self._stand_ins]
        return min([self.nbytes, *read])

    @cached_property
    def _stand_ins(self) -> frozenset[int]:
        """The entries of `made` that are stand-ins."""
        parts = [each.part for each in self.operators for _ in each.makes]
        return frozenset(own for own, part in enumerate(parts) if part is Part.STAND_IN)

    def price(self, per_byte: float) -> Seconds:
        """Return the seconds of the offer's operators plus `per_byte` seconds for each of the `nbytes` that wait."""
        return self.seconds + self.nbytes * per_byte


def cheapest(offers: Sequence[Offer], sizes: Sequence[Bytes], per_byte: float) -> tuple[int, ...]:
    """Return offers that cost less than to keep their buffers as they are; of those that clash, what saves most.

    offers: the offers; the result has their places in this sequence, sorted.
    sizes: bytes of every buffer.
    per_byte: seconds that a byte which waits costs; if infinite, the smallest form of each buffer is taken.
    """
    rows: list[tuple[float, float, float, int]] = []
    for place, offer in enumerate(offers):
        endless = math.isinf(per_byte)
        rate = 1.0 if endless else per_byte
        costs = (float(offer.nbytes), offer.seconds) if endless else (offer.price(per_byte), 0.0)
        saved = sum(sizes[k] for k in (offer.buffer, *offer.others)) * rate - costs[0]
        if saved > 0:
            rows.append((-saved, *costs, place))
    taken: list[int] = []
    claimed: set[tuple[OpIndex, BufferIndex]] = set()
    for *_, place in sorted(rows):
        if claimed.isdisjoint(offers[place].claims):
            taken.append(place)
            claimed |= offers[place].claims
    return tuple(sorted(taken))


def clash(offers: Iterable[Offer]) -> str:
    """Return why these offers may not be taken together; "" if they may.

    Two may not that are of one buffer, or give one reader something to read in place of one buffer.
    """
    claims = sorted(chain.from_iterable(offer.claims for offer in offers))
    for (reader, buffer), following in pairwise(claims):
        if (reader, buffer) == following:
            return f"{'are of' if reader < 0 else f'serve op {reader} as a reader of'} buffer {buffer}"
    return ""


def check_offers(offers: Iterable[Offer], num_ops: int, num_buffers: int) -> None:
    """Raise ValueError, naming the offer, if one names an operator or buffer that does not exist.

    num_ops, num_buffers: how many operators and buffers the problem has; they are numbered from 0.
    """
    for place, offer in enumerate(offers):
        num_made = len(offer.made)
        ops = [each.anchor for each in offer.operators] + [reader for reader, *_ in offer.instead]
        served = (offer.buffer, *offer.others)
        reads = [buffer for each in offer.operators for buffer in each.reads]
        if not all(0 <= op < num_ops for op in ops):
            raise ValueError(f"offer {place} names an op out of range 0..{num_ops - 1}")
        if min(served) < 0 or not all(-num_made <= buffer < num_buffers for buffer in (*served, *reads)):
            raise ValueError(f"offer {place} names a buffer out of range 0..{num_buffers - 1}")
        entries = [own for *_, own in offer.instead]
        if not all(0 <= own < num_made for own in entries):
            raise ValueError(f"offer {place} lets a reader read buffer {max(entries)} of {num_made}")
