"""torch.distributions in a trace: without the checks of arguments and samples, which read values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributions import Distribution


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Leave out the checks that are on by default, as torch.compile does from its first use on, for the whole process.

    A distribution that is made with ``validate_args=True`` is checked, and the trace refused.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
