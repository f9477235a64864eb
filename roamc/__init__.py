"""roamc: a memory compiler for PyTorch training.

>>> step = roamc.train_step(model, loss_fn, optimizer)  # forward, loss, backward and update in one program
>>> loss = step(tokens, targets)
>>> print(roamc.plans(step)[0])  # its predicted peak memory
"""

import torch

from roamc import optim
from roamc.errors import (
    BackwardTwiceError,
    BudgetError,
    CaptureError,
    OptionError,
    PlanError,
    RanksError,
    RoamcError,
    StaleError,
    UnfinishedError,
    VerifyError,
)
from roamc.frontends.max_batch import Fit, max_batch
from roamc.frontends.optimize import optimize, plan, plans, train_step
from roamc.frontends.train_step import TrainStep
from roamc.graph.keep import keep
from roamc.options import Options
from roamc.planning.plan import Plan
from roamc.version import __version__, warn_of_untested_torch

warn_of_untested_torch(torch.__version__)

__all__ = [
    "BackwardTwiceError",
    "BudgetError",
    "CaptureError",
    "Fit",
    "OptionError",
    "Options",
    "Plan",
    "PlanError",
    "RanksError",
    "RoamcError",
    "StaleError",
    "TrainStep",
    "UnfinishedError",
    "VerifyError",
    "__version__",
    "keep",
    "max_batch",
    "optim",
    "optimize",
    "plan",
    "plans",
    "train_step",
]
