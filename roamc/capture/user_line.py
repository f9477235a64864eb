"""The user's line at which a trace failed, on the error itself: torch's own frames hide it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

_FOREIGN = tuple(str(Path(file).resolve().parent) for file in (torch.__file__, Path(__file__).parent))
"""Folders of torch and of roamc."""


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """While inside, an error gets a note with the innermost line of its traceback outside torch and roamc."""
    try:
        yield
    except Exception as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith((*_FOREIGN, "<"))
        ]
        if frames:
            last = frames[-1]
            error.add_note(f"at {last.filename}:{last.lineno}, in {last.name}: {last.line}")
        raise
