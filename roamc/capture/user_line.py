"""The user's line at which a trace failed, on the error itself: torch's own frames hide it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import fx, nn

from roamc import compat
from roamc.graph import source_line

_FOREIGN = tuple(
    str(folder)
    for file in (torch.__file__, Path(__file__).parent)
    for folder in (Path(file).parent, Path(file).resolve().parent)
)
"""Folders of torch and of roamc, as they were imported and without links."""


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Context manager: an error inside gets a note with the innermost line of its traceback outside torch and roamc.

    The note names the module of torch that this line runs, too, if the error comes from one.
    """
    try:
        yield
    except Exception as error:
        last, layer = _last(traceback.extract_tb(error.__traceback__)), layer_of_torch(error)
        if last is not None:
            inside = f" (in {layer})" if layer else ""
            error.add_note(f"at {last.filename}:{last.lineno}, in {last.name}: {last.line}{inside}")
        raise


def layer_of_torch(error: Exception) -> str:
    """Return in whose ``forward`` the error was raised, such as ``Linear(...)``, if it is a layer of torch; else ""."""
    calls = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "forward"]
    module = calls[-1].f_locals.get("self") if calls else None
    if not isinstance(module, nn.Module) or not type(module).__module__.startswith("torch.nn."):
        return ""
    return "" if list(module.children()) else str(module)


def in_front(error: Exception) -> str:
    """Return the user's line at which ``error`` was raised as the start of its message: "train.py:10: ", or ""."""
    return _start(_last(traceback.extract_tb(error.__traceback__)))


def in_front_now() -> str:
    """Return the user's line that runs now, as :func:`in_front` does."""
    return _start(_last(traceback.extract_stack()))


def _last(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost of ``frames`` that is the user's."""
    return next((frame for frame in reversed(frames) if not frame.filename.startswith((*_FOREIGN, "<"))), None)


def _start(frame: traceback.FrameSummary | None) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno}: " if frame is not None else ""


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
    nodes = (node for node in graph.nodes if node.meta.get("seq_nr") == number)
    return next((line for node in nodes if (line := source_line(node))), "")
