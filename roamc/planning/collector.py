"""The garbage collector of Python while a step is planned."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

OF_PYTHON = 10_000
"""Frozen objects that no caller has frozen are fewer: Python 3.12 starts with some hundred, torch alone has more."""


@contextlib.contextmanager
def older_objects_left_alone() -> Iterator[None]:
    """Let the collector walk, within this context, over objects that are made there alone.

    Torch's modules and a captured graph are a million objects, none of them garbage; each walk over them takes about
    0.2 s, and planning makes enough objects for several. Where the caller has frozen objects already, nothing changes.
    """
    if gc.get_freeze_count() > OF_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
