"""Files of torch as targets of the command line: ``roamc explain trace``, ``roamc plan joint_graph.txt``."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from roamc.capture.dump import graphs
from roamc.capture.dump.graphs import Dump
from roamc.capture.moved import device_of
from roamc.cli.asked import Request
from roamc.cli.words import settings_in
from roamc.errors import OptionError, nearest
from roamc.graph import TrainGraph


@functools.lru_cache(maxsize=1)
def _dumps(target: str, changed: float) -> tuple[Dump, ...]:
    """All graphs of a file; read once, as its device is asked for first. ``changed`` is when the file was."""
    return graphs.read(target)


def _dump(request: Request) -> tuple[Dump, tuple[Dump, ...]]:
    """The graph that is asked for, and all graphs beside it."""
    dumps = _dumps(request.target, Path(request.target).stat().st_mtime)
    names = [dump.piece for dump in dumps]
    if request.piece is None:
        return dumps[0], dumps[1:]
    if request.piece not in names:
        raise OptionError(
            f"no graph {request.piece!r} is in {request.target}{nearest(request.piece, names)} "
            f"Graphs, the largest first: {', '.join(names)}"
        )
    return dumps[names.index(request.piece)], ()


def device_in(request: Request) -> torch.device:
    """Return the device that a file is planned for: the one that is asked for, else that of its graph.

    Raises:
        DumpError: the file has no graph that can be read.
        OptionError: it has no such graph, or the device is unknown.
    """
    asked = device_of(request.device)
    return asked if asked.type == "cuda" else graphs.device_in(_dump(request)[0])


def graph_in(request: Request) -> TrainGraph:
    """Return the graph of a step from a file.

    Raises:
        DumpError: the file has no graph that can be read, or it leaves a size open.
        OptionError: it has no such graph, or a setting is no size of it.
        CaptureError: an operator of the graph cannot be planned.
    """
    dump, others = _dump(request)
    sizes = settings_in(request)
    wrong = next((name for name, size in sizes.items() if isinstance(size, bool) or not isinstance(size, int)), None)
    if wrong is not None:
        raise OptionError(f"--set {wrong}={sizes[wrong]}: settings of a file are values of its symbolic sizes, numbers")
    name = Path(request.target).name.partition(".")[0]
    graph = graphs.train_graph(dump, name, {key: int(size) for key, size in sizes.items()}, device_in(request))
    if not others:
        return graph
    first = ", ".join(f"{other.piece} ({other.statements} operators)" for other in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    note = f"graph {dump.piece} of {len(others) + 1}, the largest; --piece plans another: {first}{more}"
    return graph.replace(notes=(note, *graph.notes))
