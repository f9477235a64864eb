"""What the search for a plan spends its time on, by stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from roamc.units import Seconds


class Stopwatch:
    """Adds up wall time by stage; a stage within another counts for itself alone.

    Attributes:
        seconds: stage to its time so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, Seconds] = {}
        self._within: Seconds = 0.0

    @contextlib.contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """Count the time within this context for ``stage``."""
        begun, outer, self._within = time.perf_counter(), self._within, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - begun
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent - self._within
            self._within = outer + spent
