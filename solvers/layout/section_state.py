"""The state of one section search, as arrays that compiled code can work on.

Sections are the stretches of time between births, but for those whose storages all live in the next one: within
one, the set of live storages only shrinks. Storages
are renamed by rank, the one to prefer first.
"""

from typing import NamedTuple

import numpy as np

from roamc.solvers.arrays import IntArray, LongArray
from roamc.solvers.layout.problem import LayoutProblem, padded

FRAME, FRAMES, RAISED, LISTED, NODES, WORK, FULL, FROM, TO = range(9)
"""What the elements of `SearchState.at` count: the current frame, frames in use, entries of the log of raises,
entries of `lists`, storages placed, items looked at, whether memory ran out, and the sections to which the last
refutation is due."""

WORK_OF_A_NODE = 4096
"""Items looked at that count as one more node, so that a limit on nodes takes about as long on large pieces. A
smaller value ends searches of large pieces earlier."""

_MOST_LISTED, _MOST_RAISED = 1 << 24, 1 << 22
"""Entries of `lists` and of the log of raises at most: 128 and 48 MiB; a search that needs more stops."""


class SearchState(NamedTuple):
    """The state of a section search over n storages, which `start` makes and `search` changes in place.

    Storages are numbered by rank. The search keeps frames, one for each set of waiting storages that are connected in
    time. A frame places one storage of its set; the others fall apart into sets of their own, the frame's children. A
    set is a list in `lists`: the number of its storages, then the storages.

    By storage: `size` and `alignment`, bytes; `first` and `end`, the sections [first, end) in which it lives; `alike`,
    a number shared by storages with equal sections and alignment, and with equal size if that is no multiple of the
    alignment; `floor`, the lowest offset that it may still have; `offset`, once it is placed; `most`, the bytes that
    wait with it in the fullest section of its life; `tie`, its rank among storages with equal `most`, for sets that are
    ranked again. `tie` is empty if storages keep their first ranks.
    By number in `alike`: `over`, the storage placed last, -1 for none.
    By place in `lists`: `ranks`, the rank of the storage there.
    By entry of the log of raised floors, which lets them be taken back: `raised`, the storage; `raised_from`, its floor
    before.
    By frame: `list_at`, where its list begins; `parent`, -1 for the first frame; `placed`, the storage that it has
    placed, -1 for none; `entered` and `before`, the entries of the log when the frame was opened and when it placed the
    storage; `children` and `children_end`, where the lists of its children begin and end; `under`, the entry of `over`
    before the storage was placed; `due_from` and `due_to`, the sections to which its refutations so far are due.
    Room for intermediate values: `top`, `births` and `cover`, by section; `slot`, by set.
    `at`: counts, see the names `FRAME` to `TO` of this module.
    """

    size: LongArray
    alignment: LongArray
    first: IntArray
    end: IntArray
    alike: IntArray
    floor: LongArray
    offset: LongArray
    over: IntArray
    lists: IntArray
    ranks: IntArray
    tie: IntArray
    raised: IntArray
    raised_from: LongArray
    list_at: LongArray
    parent: LongArray
    placed: IntArray
    entered: LongArray
    before: LongArray
    children: LongArray
    children_end: LongArray
    under: IntArray
    due_from: LongArray
    due_to: LongArray
    top: LongArray
    most: LongArray
    births: IntArray
    cover: IntArray
    slot: LongArray
    at: LongArray


def start(part: LayoutProblem, sequence: LongArray, tie: LongArray | None = None) -> SearchState:
    """Return the state of a section search in which no storage is placed and every floor is 0.

    A floor is the offset below which nothing more is placed in a section (see this module's docstring).

    part: a problem without gaps in lives and without storages whose offset is fixed; neither is checked here.
    sequence: int64[n], the storages by rank, the one to place first in front.
    tie: int64[n], all storages in a sequence. Where the search ranks storages again, by the bytes that are still to be
        placed in their sections, it decides between equal ones. If None, the search never ranks again.
    """
    size = padded(part)[sequence]
    sections = _fullest_births(part)
    first = np.searchsorted(sections, part.born[sequence]).astype(np.int32)
    end = np.searchsorted(sections, part.dead[sequence]).astype(np.int32)
    n, columns = len(size), len(sections) + 1
    longs = np.zeros((11, n + 1), dtype=np.int64)
    room = min(n * (n + 3) + 2, _MOST_LISTED)
    state = SearchState(
        size=size,
        alignment=part.own_alignment[sequence],
        first=first,
        end=end,
        alike=_alike(size, part.own_alignment[sequence], first, end),
        floor=longs[0],
        offset=longs[1],
        over=np.full(n, -1, dtype=np.int32),
        lists=np.empty(room, dtype=np.int32),
        ranks=np.empty(room, dtype=np.int32),
        tie=np.zeros(0, dtype=np.int32) if tie is None else _place_in(tie)[sequence],
        raised=np.empty(min(4 * n * n + n, _MOST_RAISED), dtype=np.int32),
        raised_from=np.empty(min(4 * n * n + n, _MOST_RAISED), dtype=np.int64),
        list_at=longs[2],
        parent=longs[3],
        placed=np.full(n + 1, -1, dtype=np.int32),
        entered=longs[4],
        before=longs[5],
        children=longs[6],
        children_end=longs[7],
        under=np.zeros(n + 1, dtype=np.int32),
        due_from=longs[8],
        due_to=longs[9],
        top=np.zeros(columns, dtype=np.int64),
        most=longs[10],
        births=np.zeros(columns, dtype=np.int32),
        cover=np.zeros(columns, dtype=np.int32),
        slot=np.zeros(columns, dtype=np.int64),
        at=np.zeros(TO + 1, dtype=np.int64),
    )
    state.lists[0] = n
    state.lists[1 : n + 1] = state.ranks[1 : n + 1] = np.arange(n)
    state.at[LISTED], state.at[FRAMES], state.parent[0] = n + 1, 1, -1
    state.due_from[0] = columns
    return state


def spent(state: SearchState) -> int:
    """Return the cost of the search so far in nodes.

    A storage placed counts as one node, and so do `WORK_OF_A_NODE` (a constant of this module) sections or storages
    that were looked at.
    """
    return int(state.at[NODES] + state.at[WORK] // WORK_OF_A_NODE)


def _place_in(sequence: LongArray) -> IntArray:
    place = np.empty(len(sequence), dtype=np.int32)
    place[sequence] = np.arange(len(sequence))
    return place


def _fullest_births(part: LayoutProblem) -> IntArray:
    """Steps of birth, but for those with nothing dying before the next: there the next has all that they have."""
    births, deaths = np.unique(part.born), np.unique(part.dead)
    died = np.searchsorted(deaths, births, side="right")  # deaths up to each birth
    fullest: IntArray = births[np.append(died[1:] > died[:-1], True)]
    return fullest


def _alike(size: LongArray, alignment: LongArray, first: IntArray, end: IntArray) -> IntArray:
    """Equal numbers for storages with the same life that may change places in a stack: aligned sizes."""
    numbers: dict[tuple[int, ...], int] = {}
    rows = zip(size.tolist(), alignment.tolist(), first.tolist(), end.tolist(), strict=True)
    keys = [(lo, hi, align, 0 if room % align == 0 else room) for room, align, lo, hi in rows]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int32)
