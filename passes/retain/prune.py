"""Which codecs of an answer are not needed: there is room for the whole value while its code waits.

All storages whose codec costs the same for a byte are taken or left together by a price. Where the budget needs only
some of them, this says which may stay whole; the solver is then asked again, and the better answer taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from roamc.passes.retain.compress import Mark
from roamc.units import Bytes

Spare = tuple[str, Bytes]
"""A storage that is kept smaller, and by how many bytes."""


def not_needed(
    runs: Sequence[tuple[str, Bytes]], marks: Mapping[str, Mark], coded: Iterable[Spare], target: Bytes
) -> set[str]:
    """The storages, of those in ``coded`` as many as possible from the first on, that fit as they are.

    Args:
        runs: of the schedule with codecs and reruns, operator and live bytes, operators' own memory included.
        marks: of the operators that belong to a codec, by name.
        coded: those that may be taken back, the dearest first.
        target: live bytes that no run may exceed.
    """
    live = np.array([nbytes for _, nbytes in runs], dtype=np.int64)
    waits = _waits([name for name, _ in runs], marks)
    found: set[str] = set()
    for storage, more in coded:
        begin, end = waits.get(storage, (0, len(live)))
        if live[begin:end].max(initial=0) + more <= target:
            live[begin:end] += more
            found.add(storage)
    return found


def _waits(runs: Sequence[str], marks: Mapping[str, Mark]) -> dict[str, tuple[int, int]]:
    """Per storage the runs in which its code waits: behind the last that writes it, up to the first that reads it."""
    found: dict[str, tuple[int, int]] = {}
    for at, name in enumerate(runs):
        mark = marks.get(name)
        if mark is not None and mark.role == "encode":
            found[mark.storage] = at, len(runs)
        elif mark is not None and mark.role == "decode":
            begin, end = found.get(mark.storage, (0, at))
            found[mark.storage] = begin, min(end, at)
    return {storage: (begin, end) for storage, (begin, end) in found.items() if begin < end}
