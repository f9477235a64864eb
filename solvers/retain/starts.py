"""States for searches to begin with: over the step of a minimum cut only what the cut keeps is kept."""

import numpy as np

from roamc.solvers.retain.bound import Cut
from roamc.solvers.retain.search import Search, State


def from_cut(search: Search, cut: Cut, budget: int) -> State:
    """Return the state that keeps over the cut's step only the buffers that the cut keeps, and drops the others once.

    The cut decides on the free gaps that begin before its step and end behind it, also those behind a last read. All
    other gaps stay as in `Search.keep_everything`. The state is repaired by `possible`, and has infinite seconds if the
    repair fails. `search.work` grows.

    budget: bytes; the result's score counts the live bytes above it, added up over all runs.
    """
    gaps, plain = search.gaps, search.keep_everything()
    over = gaps.free & (gaps.begin < cut.step) & (gaps.end > cut.step)
    release = plain.release.copy()
    release[over] = np.where(cut.kept[gaps.buffer[over]], search.steps, 0)
    return possible(search, search.state(release, np.zeros_like(release), budget), budget)


def possible(search: Search, state: State, budget: int) -> State:
    """Keep buffers that the state rebuilds although their operators must not run again, and return the new state.

    Each repair keeps one buffer through the gap in which it is missing, and simulates again. Repairs end when a
    simulation succeeds, when `search.room`, the tables of a simulation, is full, or after `search.effort.start_repairs`
    repairs. The seconds of the result are infinite if no simulation succeeded. `search.work` grows.

    state: the state simulated last in `search`; its `release` is changed in place.
    budget: bytes; the result's score counts the live bytes above it, added up over all runs.
    """
    for _ in range(search.effort.start_repairs):
        stuck = int(search.room.stuck[0])
        if state.score.seconds < np.inf or stuck < 0:
            break
        state.release[search.room.gap[stuck]] = search.steps
        state = search.state(state.release, state.hold, budget)
    return state
