"""Files of torch as targets of the command line: ``roamc explain trace``, ``roamc plan issue.txt``, ``… model.pt2``."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from roamc.capture.dump import confined, graphs
from roamc.capture.dump.archive import Program
from roamc.capture.dump.exported import Exported, sizes_of
from roamc.capture.dump.files import Dump
from roamc.capture.dump.recognise import is_archive
from roamc.capture.moved import device_of
from roamc.cli.asked import Request
from roamc.cli.words import settings_in
from roamc.errors import OptionError, nearest
from roamc.frontends.mesh import parse_mesh
from roamc.frontends.workload import Workload
from roamc.graph import TrainGraph


@functools.lru_cache(maxsize=1)
def _dumps(target: str, changed: float) -> tuple[Dump, ...]:
    """All graphs of a file; read once, as its device is asked for first. ``changed`` is when the file was."""
    dumps: tuple[Dump, ...] = confined.read("graphs", target)
    return dumps


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


@functools.lru_cache(maxsize=1)
def _programs(target: str, piece: str | None, changed: float) -> Program:
    """A forward in an archive; read once, as several plans may be made of it. ``changed`` is when the file was."""
    program: Program = confined.read("archive", target, *(() if piece is None else (piece,)))
    return program


def _program(request: Request) -> Program:
    return _programs(request.target, request.piece, Path(request.target).stat().st_mtime)


def device_in(request: Request) -> torch.device:
    """Return the device that a file is planned for: the one that is asked for, else that of its graph.

    Raises:
        DumpError: the file has no graph that can be read.
        OptionError: it has no such graph, or the device is unknown.
    """
    asked = device_of(request.device)
    if asked.type == "cuda" or not is_archive(request.target):
        return asked if asked.type == "cuda" else graphs.device_in(_dump(request)[0])
    return device_of("cuda" if _program(request).on_cuda else "cpu")


def graph_in(request: Request) -> TrainGraph:
    """Return the graph of a step from a file.

    Raises:
        DumpError: the file has no graph that can be read, or it leaves a size open.
        OptionError: it has no such graph, or a setting is no size of it.
        CaptureError: an operator of the graph cannot be planned.
    """
    dump, others = _dump(request)
    graph = graphs.train_graph(dump, _name(request), _sizes(request), device_in(request))
    if not others:
        return graph
    first = ", ".join(f"{other.piece} ({other.statements} operators)" for other in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    note = f"graph {dump.piece} of {len(others) + 1}, the largest; --piece plans another: {first}{more}"
    return graph.replace(notes=(note, *graph.notes))


def workload_in(request: Request) -> Workload:
    """Return the model in an archive with inputs of the sizes that are asked for; of sizes that are not, the export's.

    Raises:
        DumpError: the archive has no forward that can be read.
        OptionError: a setting is no size of it.
    """
    program, asked = _program(request), _sizes(request)
    if request.mesh is not None and parse_mesh(request.mesh).tp > 1:
        raise OptionError(f"{request.target} has no layers that tp could split, only operators: give the model")
    model = Exported(program, sizes_of(program, asked))
    notes = program.notes
    kept = [f"{name} = {size}" for name, size in program.exported.items() if name not in asked]
    if kept:
        notes = (f"sizes as at the export: {', '.join(kept)}; --set {kept[0].split()[0]}=N plans another", *notes)
    if program.losses > 1:
        notes = (*notes, f"the first of {program.losses} scalar outputs is taken for the loss")
    return Workload(_name(request), model, model.batch, notes=notes)


def _name(request: Request) -> str:
    return Path(request.target).name.partition(".")[0]


def _sizes(request: Request) -> dict[str, int]:
    """Values of symbolic sizes.

    Raises:
        OptionError: a setting is none.
    """
    sizes = settings_in(request)
    wrong = next((name for name, size in sizes.items() if isinstance(size, bool) or not isinstance(size, int)), None)
    if wrong is not None:
        raise OptionError(f"--set {wrong}={sizes[wrong]}: settings of a file are values of its symbolic sizes, numbers")
    return {key: int(size) for key, size in sizes.items()}
