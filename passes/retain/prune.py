"""Find the codecs of an answer that are not needed, because the whole value has room while its code waits.

A price per byte takes or leaves all codecs of one rate together. Where the budget needs only some of them, this module
says which storages may stay whole; the solver is then asked again, and the better answer is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from roamc.passes.retain.compress import Mark
from roamc.units import Bytes

Spare = tuple[str, Bytes]
"""Name of a storage with a codec, and the bytes that the codec saves."""


def not_needed(
    runs: Sequence[tuple[str, Bytes]], marks: Mapping[str, Mark], coded: Iterable[Spare], target: Bytes
) -> set[str]:
    """Return the names of storages in ``coded`` that can stay whole without a run above ``target``.

    The storages are tried in the sequence of ``coded``. One that can stay whole adds its bytes to the runs during which
    its code waits, before the next one is tried.

    Args:
        runs: (operator, live bytes with workspace) of every run in the schedule with codecs and reruns.
        marks: name of each operator that belongs to a codec to what the operator does there.
        coded: (name, bytes that its codec saves) of the storages to try, those whose codec takes most time first.
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
