"""Solvers: each takes a problem as plain data and returns a frozen solution. Torch and the rest of roamc stay outside.

Each folder is one problem and has the same parts: `problem.py` (the question and the answer as data),
`validate.py` (a judge that shares no code with any algorithm), one file per algorithm, and `portfolio.py`
whose `solve` runs them, keeps the best and states a lower bound.

- `roamc.solvers.order`: in which order operators run, so that the peak of live bytes is low.
- `roamc.solvers.layout`: at which offset of one arena each storage lives, so that the arena is no higher than
  that peak.
- `roamc.solvers.retain`: which buffers are dropped between two reads and made again, so that the peak fits a budget
  at few seconds more.
"""

from roamc.solvers.status import Status

__all__ = ["Status"]
