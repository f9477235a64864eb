"""torch's private interfaces: the lines of the user's program that traced operators come from. See roamc/compat.py."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import PythonKeyTracer


@contextlib.contextmanager
def lines_of_callers(tracing: Callable[..., Any]) -> Iterator[None]:
    """Within this context, traced operators that no ``forward`` calls, such as those of a loss function, have lines.

    torch keeps the lines of functions named "forward". Where there are none, those between ``tracing``, a function of
    roamc's, and the operator are kept that are neither roamc's nor torch's (some are written as a string). Losses of
    the command line's models are kept; what called roamc, such as the package that reads its command line, is not.
    """
    own, torchs = (os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))
    models = os.path.join(own, "cli", "")
    start = tracing.__code__.co_filename, tracing.__name__
    _without_export()
    of_modules = PythonKeyTracer._filter_traceback_frames

    def kept(tracer: PythonKeyTracer, frames: traceback.StackSummary) -> traceback.StackSummary:
        within = itertools.dropwhile(lambda frame: (frame.filename, frame.name) != start, frames)
        callers = [
            frame
            for frame in within
            if frame.filename.startswith(models) or not frame.filename.startswith((own, torchs, "<string>"))
        ]
        return of_modules(tracer, frames) or traceback.StackSummary.from_list(callers)

    with mock.patch.object(PythonKeyTracer, "_filter_traceback_frames", kept):
        yield


@contextlib.contextmanager
def no_line_left_over() -> Iterator[None]:
    """Within this context, an operator whose forward call has no line gets none; torch 2.11 gives it the last one."""
    put = fx.traceback.set_stack_trace

    def replace(stack: list[str]) -> None:
        fx.traceback.current_meta.pop("stack_trace", None)
        put(stack)

    with mock.patch.object(fx.traceback, "set_stack_trace", replace):
        yield


def _without_export() -> None:
    """Have torch name its files that are no user's lines, which it does once, without importing torch.export.

    That takes 0.9 s of CPU (partitioners, networkx, inductor's caches), for the name of one file of theirs.
    """
    name = "torch.export._trace"
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    assert spec is not None  # torch has it since 2.1
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with mock.patch.object(torch.export, "_trace", module, create=True):
            symbolic_shapes.uninteresting_files()
    finally:
        sys.modules.pop(name)
