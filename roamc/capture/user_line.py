"""The user's line at which a trace failed, on the error itself: torch's own frames hide it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import fx

from roamc import compat
from roamc.graph import source_line

_FOREIGN = tuple(str(Path(file).resolve().parent) for file in (torch.__file__, Path(__file__).parent))
"""Folders of torch and of roamc."""


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Context manager: an error inside gets a note with the innermost line of its traceback outside torch and roamc."""
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


@contextlib.contextmanager
def of_backward() -> Iterator[None]:
    """Context manager around the trace of a backward: an error gets a note with the user's line of the forward call."""
    try:
        yield
    except Exception as error:
        number = compat.backward_of()
        line = "" if number is None else _line_of(compat.graph_so_far(), number)
        if line:
            error.add_note(f"in the backward of {line}")
        raise


def _line_of(graph: fx.Graph, number: int) -> str:
    """The user's line of the first operator that has this ``seq_nr``; empty if none is known."""
    made = (node for node in graph.nodes if node.meta.get("seq_nr") == number)
    return next((line for node in made if (line := source_line(node))), "")
