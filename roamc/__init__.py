"""roamc: a memory compiler for PyTorch training.

>>> step = roamc.train_step(model, loss_fn, optimizer)  # forward, loss, backward and update in one program
>>> loss = step(tokens, targets)
>>> print(roamc.plans(step)[0])  # its predicted peak memory

What needs torch is imported when it is first named, so that ``import roamc.solvers`` and ``roamc --help`` do without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from roamc.errors import (
    BackwardTwiceError,
    BudgetError,
    CaptureError,
    OptionError,
    PlanError,
    ProfileError,
    RanksError,
    RoamcError,
    StaleError,
    UnfinishedError,
    VerifyError,
)
from roamc.version import __version__

if TYPE_CHECKING:
    from roamc import optim
    from roamc.frontends.largest import Fit
    from roamc.frontends.max_batch import max_batch
    from roamc.frontends.optimize import optimize, plan, plans, train_step
    from roamc.frontends.train_step import TrainStep
    from roamc.graph.keep import keep
    from roamc.options import Options
    from roamc.planning.plan import Plan, load_plan

progress = True
"""Whether planning that takes longer than two seconds says so on stderr. False, or ROAMC_PROGRESS=0, silences it."""

__all__ = [
    "BackwardTwiceError",
    "BudgetError",
    "CaptureError",
    "Fit",
    "OptionError",
    "Options",
    "Plan",
    "PlanError",
    "ProfileError",
    "RanksError",
    "RoamcError",
    "StaleError",
    "TrainStep",
    "UnfinishedError",
    "VerifyError",
    "__version__",
    "keep",
    "load_plan",
    "max_batch",
    "optim",
    "optimize",
    "plan",
    "plans",
    "progress",
    "train_step",
]

_MODULES = {
    "Fit": "roamc.frontends.largest",
    "Options": "roamc.options",
    "Plan": "roamc.planning.plan",
    "TrainStep": "roamc.frontends.train_step",
    "keep": "roamc.graph.keep",
    "load_plan": "roamc.planning.plan",
    "max_batch": "roamc.frontends.max_batch",
    "optim": "roamc.optim",
    **dict.fromkeys(("optimize", "plan", "plans", "train_step"), "roamc.frontends.optimize"),
}
"""The module of each name of the interface that is imported at its first use."""

if not TYPE_CHECKING:  # with a __getattr__, mypy takes every name for one of the interface

    def __getattr__(name: str) -> Any:
        """Import a name of the interface."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(_MODULES[name])
        return globals().setdefault(name, module if name == "optim" else getattr(module, name))


def __dir__() -> list[str]:
    return __all__
