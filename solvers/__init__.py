"""Solvers: plain data in, frozen solution out. No torch in here, and nothing else of roamc.

Each folder is one problem and has the same parts: `problem.py` (the question and the answer as data),
`validate.py` (a judge that shares no code with any algorithm), one file per algorithm, and `portfolio.py`
whose `solve` runs them, keeps the best and states a lower bound beside it.

- `roamc.solvers.order`: in which order operators run, so that the peak of live bytes is low.
- `roamc.solvers.layout`: at which offset of one arena each storage lives, so that the arena is no higher than
  that peak.
"""

from roamc.solvers.status import Status

__all__ = ["Status"]
