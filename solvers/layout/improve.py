"""Repeat first fit, each time with the storages that did not fit under the bound moved to the front.

This is squeaky wheel optimization (Joslin and Clements 1999, JAIR 10): construct, find what went wrong, give
it priority, construct again. Deterministic, and bounded in rounds.
"""

import numpy as np

from roamc.solvers.arrays import LongArray
from roamc.solvers.layout.effort import EFFORT, Effort
from roamc.solvers.layout.first_fit import first_fit
from roamc.solvers.layout.problem import Bytes, LayoutProblem, arena_bytes, padded


class Improvement:
    """A layout that is improved round by round: `Improvement(problem, offset, target_bytes, effort)`.

    The constructor makes no round. Its `offset`, int64[n] bytes, is a legal layout of `problem` and stays unchanged; an
    arena of `target_bytes` is low enough, which mostly is the lower bound.

    best: int64[n] bytes, the offsets of the lowest layout so far, at first the given `offset`.
    best_arena: bytes of the arena of `best`.
    rounds: number of rounds that were made.
    ended: whether no further round is made: the arena is no higher than `target_bytes`,
        `effort.improve_patience` rounds in a row found no lower arena, or a round changed nothing.
    """

    def __init__(self, problem: LayoutProblem, offset: LongArray, target_bytes: Bytes, effort: Effort = EFFORT) -> None:
        self.best = offset
        self.best_arena = arena_bytes(problem, offset)
        self.rounds = 0
        self.ended = False
        self._problem, self._target, self._effort = problem, target_bytes, effort
        self._size = padded(problem)
        self._sequence = np.lexsort((problem.born, offset))
        self._best_round = 0

    def go_on(self, rounds: int) -> None:
        """Make up to `rounds` further rounds of first fit, fewer if `ended` becomes true; updates the attributes."""
        until = self.rounds + rounds
        while not self.ended and self.rounds < until:
            self._improve_once()

    def _improve_once(self) -> None:
        current = first_fit(self._problem, self._sequence, self._effort)
        arena = arena_bytes(self._problem, current)
        self.rounds += 1
        if arena < self.best_arena:
            self.best, self.best_arena, self._best_round = current, arena, self.rounds
        too_high = (self._size > 0) & (current + self._size > self._target)
        front = too_high[self._sequence]
        moved = np.concatenate([self._sequence[front], self._sequence[~front]])
        self.ended = (
            self.best_arena <= self._target
            or self.rounds - self._best_round >= self._effort.improve_patience
            or np.array_equal(moved, self._sequence)
        )
        self._sequence = moved
