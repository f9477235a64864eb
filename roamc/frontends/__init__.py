"""The ways in from Python: the torch.compile backend, ``optimize``, ``train_step`` and ``max_batch``."""

import torch

from roamc.version import warn_of_untested_torch

warn_of_untested_torch(torch.__version__)
