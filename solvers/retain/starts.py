"""States to begin with: what a minimum cut keeps at its operator, and nothing else."""

import numpy as np

from roamc.solvers.retain.bound import Cut
from roamc.solvers.retain.search import Search, State


def from_cut(search: Search, cut: Cut, budget: int) -> State:
    """Keep over the cut's step what the cut keeps, also behind the last read, and drop all else that is there.

    Gaps that begin and end on one side of the step stay as they are without reruns.
    """
    gaps, plain = search.gaps, search.keep_everything()
    over = gaps.free & (gaps.begin < cut.step) & (gaps.end > cut.step)
    release = plain.release.copy()
    release[over] = np.where(cut.kept[gaps.buffer[over]], search.steps, 0)
    return possible(search, search.state(release, np.zeros_like(release), budget), budget)


def possible(search: Search, state: State, budget: int) -> State:
    """Keep what cannot be rebuilt when it is needed, until a simulation gets through; infinite seconds if none does.

    What must not run again, or not any more, must have its result kept.
    """
    for _ in range(search.effort.start_repairs):
        stuck = int(search.room.stuck[0])
        if state.score.seconds < np.inf or stuck < 0:
            break
        state.release[search.room.gap[stuck]] = search.steps
        state = search.state(state.release, state.hold, budget)
    return state
