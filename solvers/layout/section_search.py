"""Depth-first search for a layout within a capacity, compiled.

In a layout whose sum of offsets is smallest nothing can be pushed down, so every storage lies at 0 or on top of
another, up to its alignment. Call the lowest offset that a waiting storage may still have its floor. One whose
floor is lowest can have nothing more put under it (it would have to reach above that floor), so either

- it lies at its floor: it is placed, and the floors of all that share a section with it rise to its top; or
- it lies higher: then it lies on top of another waiting storage, and its floor rises to the lowest top that any
  of those can have. So do the floors of its twins, of the same size and life: they are interchangeable.

What then waits falls apart where no waiting storage crosses from one section into the next. Each set is searched
by itself, and if one has no solution the others need not be tried in another way. It may be ranked by itself too:
first what waits in the section with the most waiting bytes, for that is now the one with the least room to lose:

    bytes   |        ........            placed: the two long ones at the bottom. What waits above falls apart
            | ..... |........|           into two sets, each with floors of its own
            |================|
            0              steps

A set is refuted as soon as one section cannot hold what waits in it: stack it by rising floors,

    top(section) = max(top(section), floor(i)) + size(i)      for its waiting i,

which is the shortest schedule of one machine with release dates and a bound on every real stack. The refutation
is due to the lives of those storages and no others; where a storage was placed that lives at another time, it is
passed over on the way back (conflict-directed backjumping: Prosser 1993, "Hybrid algorithms for the constraint
satisfaction problem"). Two storages of
the same life, one directly on the other, may change places, so the lower one has the lower rank.

Canonical layouts, sections, dominance, decomposition and the ranks of what it leaves follow Moffitt, "MiniMalloc: a
lightweight memory allocator for hardware-accelerated machine learning", ASPLOS 2023. The choice between two, with
floors that rise for the one that waits, the bound by release dates and the way back are our own.
"""

from roamc.solvers.compiled import compiled
from roamc.solvers.layout.section_state import (
    FRAME,
    FRAMES,
    FROM,
    FULL,
    LISTED,
    NODES,
    RAISED,
    TO,
    WORK,
    WORK_OF_A_NODE,
    SearchState,
)

NONE, FOUND, STOPPED = 0, 1, 2
"""How `search` ends: no layout is within the capacity, one was found, or the search was stopped before it knew."""


@compiled
def search(state: SearchState, capacity: int, limit: int) -> int:
    """Search for a layout within the capacity, from where the last call stopped; return FOUND, NONE or STOPPED.

    FOUND: `state.offset`, by rank, is a layout within the capacity. NONE: there is no such layout. STOPPED: at the
    limit (call again to go on) or out of memory.

    state: made by `section_state.start`, then changed in place by every call; all calls must have the same capacity.
    capacity: bytes of the arena.
    limit: nodes in all, those of earlier calls included; what a node is says `section_state.spent`.
    """
    at = state.at
    while True:
        frame = at[FRAME]
        list_at = state.list_at[frame]
        if _fits(state, list_at, capacity):
            if at[NODES] + at[WORK] // WORK_OF_A_NODE >= limit or at[FULL]:
                return STOPPED
            chosen = state.lists[list_at + 1]
            if not _misplaced(state, chosen):
                _place(state, frame, chosen)
                if at[FULL]:
                    return STOPPED
                if _children_fit(state, frame, capacity):
                    if not _open_next(state, frame):
                        return FOUND
                    continue
                _take_back(state, frame)
            if _lift(state, frame, chosen, capacity):
                continue
        if not _go_back(state, capacity):
            return NONE


@compiled
def _fits(state: SearchState, list_at: int, capacity: int) -> bool:
    """Sort a list by floor, then rank, and see whether its sections can hold it; if not, to what that is due."""
    lists, ranks, floor, top = state.lists, state.ranks, state.floor, state.top
    stop = list_at + 1 + lists[list_at]
    first, end, work = len(top), 0, 0
    for k in range(list_at + 1, stop):
        storage, rank = lists[k], ranks[k]
        place = k
        while place > list_at + 1 and (
            floor[lists[place - 1]] > floor[storage]
            or (floor[lists[place - 1]] == floor[storage] and ranks[place - 1] > rank)
        ):
            lists[place], ranks[place] = lists[place - 1], ranks[place - 1]
            place -= 1
        lists[place], ranks[place] = storage, rank
        work += k - place + 1
        first, end = min(first, state.first[storage]), max(end, state.end[storage])
    for section in range(first, end):
        top[section] = 0
    for k in range(list_at + 1, stop):
        storage = lists[k]
        for section in range(state.first[storage], state.end[storage]):
            top_behind = max(top[section], floor[storage]) + state.size[storage]
            if top_behind > capacity:
                state.at[WORK] += work + stop - list_at
                _blame(state, list_at, section)
                return False
            top[section] = top_behind
        work += state.end[storage] - state.first[storage]
    state.at[WORK] += work
    return True


@compiled
def _blame(state: SearchState, list_at: int, section: int) -> None:
    """Set FROM and TO to the lives of all storages of the list that wait in the section, which cannot hold them."""
    lo, hi = section, section + 1
    for k in range(list_at + 1, list_at + 1 + state.lists[list_at]):
        storage = state.lists[k]
        if state.first[storage] <= section and section < state.end[storage]:
            lo, hi = min(lo, state.first[storage]), max(hi, state.end[storage])
    state.at[FROM], state.at[TO] = lo, hi


@compiled
def _misplaced(state: SearchState, storage: int) -> bool:
    """Whether it would lie directly on one of the same life and a higher rank; that is due to this life."""
    below = state.over[state.alike[storage]]
    if below <= storage or state.offset[below] + state.size[below] != state.floor[storage]:
        return False
    state.at[FROM], state.at[TO] = state.first[storage], state.end[storage]
    return True


@compiled
def _raise_floor(state: SearchState, storage: int, height: int) -> None:
    entry = state.at[RAISED]
    state.raised[entry] = storage
    state.raised_from[entry] = state.floor[storage]
    state.at[RAISED] = entry + 1
    state.floor[storage] = -(-height // state.alignment[storage]) * state.alignment[storage]


@compiled
def _lower_floors(state: SearchState, mark: int) -> None:
    for entry in range(state.at[RAISED] - 1, mark - 1, -1):
        state.floor[state.raised[entry]] = state.raised_from[entry]
    state.at[RAISED] = mark


@compiled
def _place(state: SearchState, frame: int, chosen: int) -> None:
    """Place a storage at its floor, raise the others above it, and list what then waits, set by set."""
    at, lists = state.at, state.lists
    list_at = state.list_at[frame]
    count = lists[list_at]
    if at[LISTED] + 2 * count > len(lists) or at[RAISED] + count > len(state.raised):
        at[FULL] = 1
        return
    state.placed[frame] = chosen
    state.offset[chosen] = state.floor[chosen]
    state.before[frame], state.children[frame] = at[RAISED], at[LISTED]
    state.under[frame] = state.over[state.alike[chosen]]
    state.over[state.alike[chosen]] = chosen
    at[NODES] += 1
    at[WORK] += count
    top = state.floor[chosen] + state.size[chosen]
    first, end = state.first[chosen], state.end[chosen]
    for k in range(list_at + 1, list_at + 1 + count):
        storage = lists[k]
        meets = state.first[storage] < end and first < state.end[storage]
        if meets and storage != chosen and state.floor[storage] < top:
            _raise_floor(state, storage, top)
    state.children_end[frame] = at[LISTED] = _list_sets(state, list_at, chosen)


@compiled
def _list_sets(state: SearchState, list_at: int, chosen: int) -> int:
    """Write the sets that are left of a list without `chosen` behind the last list; the end of the last."""
    lists, births, cover, slot = state.lists, state.births, state.cover, state.slot
    stop = list_at + 1 + lists[list_at]
    lo, hi = len(births), 0
    for k in range(list_at + 1, stop):
        lo, hi = min(lo, state.first[lists[k]]), max(hi, state.end[lists[k]])
    for section in range(lo, hi + 1):
        births[section] = cover[section] = 0
    for k in range(list_at + 1, stop):
        if lists[k] != chosen:
            births[state.first[lists[k]]] += 1
            cover[state.end[lists[k]]] -= 1
    sets, waiting = 0, 0
    for section in range(lo, hi):  # from here on `births` is the number of the section's set
        waiting += cover[section] + births[section]
        if births[section] > 0 and waiting == births[section]:
            slot[sets] = 0
            sets += 1
        births[section] = sets - 1
    for k in range(list_at + 1, stop):
        if lists[k] != chosen:
            slot[births[state.first[lists[k]]]] += 1
    end = int(state.at[LISTED])
    for number in range(sets):
        lists[end] = slot[number]
        slot[number] = end + 1
        end += 1 + int(lists[end])
    for k in range(list_at + 1, stop):
        if lists[k] != chosen:
            number = births[state.first[lists[k]]]
            lists[slot[number]], state.ranks[slot[number]] = lists[k], state.ranks[k]
            slot[number] += 1
    if sets > 1 and len(state.tie):
        _rank_again(state, int(state.at[LISTED]), end)
    return end


@compiled
def _rank_again(state: SearchState, list_at: int, end: int) -> None:
    """Rank the storages of the sets between list_at and end, each set by the most bytes that wait in a section."""
    lists, ranks, most, tie = state.lists, state.ranks, state.most, state.tie
    while list_at < end:
        stop = list_at + 1 + lists[list_at]
        _add_waiting(state, list_at)
        for k in range(list_at + 1, stop):
            storage = lists[k]
            place = k
            while place > list_at + 1 and (
                most[lists[place - 1]] < most[storage]
                or (most[lists[place - 1]] == most[storage] and tie[lists[place - 1]] > tie[storage])
            ):
                lists[place] = lists[place - 1]
                place -= 1
            lists[place] = storage
            state.at[WORK] += k - place + 1
        for k in range(list_at + 1, stop):
            ranks[k] = k
        list_at = stop


@compiled
def _add_waiting(state: SearchState, list_at: int) -> None:
    """Write to `most`, for each storage of a list, the bytes that wait in the fullest section of its life."""
    lists, first, last, waiting = state.lists, state.first, state.end, state.top
    stop = list_at + 1 + lists[list_at]
    for k in range(list_at + 1, stop):
        waiting[first[lists[k]] : last[lists[k]]] = 0
    for k in range(list_at + 1, stop):
        waiting[first[lists[k]] : last[lists[k]]] += state.size[lists[k]]
    for k in range(list_at + 1, stop):
        storage = lists[k]
        state.most[storage] = waiting[first[storage] : last[storage]].max()
        state.at[WORK] += last[storage] - first[storage]


@compiled
def _children_fit(state: SearchState, frame: int, capacity: int) -> bool:
    child = state.children[frame]
    while child < state.children_end[frame]:
        if not _fits(state, child, capacity):
            return False
        child += 1 + state.lists[child]
    return True


@compiled
def _open_next(state: SearchState, frame: int) -> bool:
    """Make the next unsolved set the current frame: the first child, or else the next set of an ancestor."""
    child, parent = state.children[frame], frame
    while child >= state.children_end[parent]:
        frame, parent = parent, state.parent[parent]
        if parent < 0:
            return False
        child = state.list_at[frame] + 1 + state.lists[state.list_at[frame]]
    new = state.at[FRAMES]
    state.list_at[new], state.parent[new], state.placed[new] = child, parent, -1
    state.entered[new] = state.at[RAISED]
    state.due_from[new], state.due_to[new] = len(state.top), 0
    state.at[FRAMES] = new + 1
    state.at[FRAME] = new
    return True


@compiled
def _take_back(state: SearchState, frame: int) -> None:
    """Take back what a frame has placed, and with it everything after."""
    for later in range(state.at[FRAMES] - 1, frame - 1, -1):
        storage = state.placed[later]
        if storage >= 0:
            state.over[state.alike[storage]] = state.under[later]
            state.placed[later] = -1
    _lower_floors(state, state.before[frame])
    state.at[LISTED] = state.children[frame]
    state.at[FRAMES] = frame + 1


@compiled
def _lift(state: SearchState, frame: int, chosen: int, capacity: int) -> bool:
    """Say that a storage lies above its floor, because of the last refutation. False if it cannot, or need not.

    It need not where the refutation is due to another time. What it could lie on is due to the lives of all that
    meet it.
    """
    lists, floor, size = state.lists, state.floor, state.size
    list_at = state.list_at[frame]
    stop = list_at + 1 + lists[list_at]
    state.due_from[frame] = min(state.due_from[frame], state.at[FROM])
    state.due_to[frame] = max(state.due_to[frame], state.at[TO])
    first, end = state.first[chosen], state.end[chosen]
    if end <= state.at[FROM] or state.at[TO] <= first:
        return False
    lo, hi, lowest = first, end, capacity
    for k in range(list_at + 1, stop):
        other = lists[k]
        if other != chosen and state.first[other] < end and first < state.end[other]:
            lowest = min(lowest, max(floor[other] + size[other], floor[chosen] + 1))
            lo, hi = min(lo, state.first[other]), max(hi, state.end[other])
    state.due_from[frame], state.due_to[frame] = min(state.due_from[frame], lo), max(state.due_to[frame], hi)
    state.at[WORK] += lists[list_at]
    if lowest + size[chosen] > capacity:
        return False
    if state.at[RAISED] + lists[list_at] > len(state.raised):
        state.at[FULL] = 1
        return True
    for k in range(list_at + 1, stop):
        twin = lists[k]
        if state.alike[twin] == state.alike[chosen] and size[twin] == size[chosen] and floor[twin] < lowest:
            _raise_floor(state, twin, lowest)
    return True


@compiled
def _go_back(state: SearchState, capacity: int) -> bool:
    """The current frame has no solution: go up to one where the placed storage may lie higher. False at the root."""
    frame = state.at[FRAME]
    while True:
        state.at[FROM] = min(state.at[FROM], state.due_from[frame])
        state.at[TO] = max(state.at[TO], state.due_to[frame])
        _lower_floors(state, state.entered[frame])
        frame = state.parent[frame]
        if frame < 0:
            return False
        chosen = state.placed[frame]
        _take_back(state, frame)
        state.at[FRAME] = frame
        if _lift(state, frame, chosen, capacity):
            return True
