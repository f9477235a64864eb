"""Files of torch as targets of the command line: ``roamc explain trace``, ``roamc plan issue.txt``, ``… model.pt2``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from roamc import ticker
from roamc.capture.dump import confined, graphs
from roamc.capture.dump.archive import Program
from roamc.capture.dump.exported import Exported, no_size, sizes_of
from roamc.capture.dump.files import Dump
from roamc.capture.moved import device_of
from roamc.capture.optimizers import fresh_state, rule_for
from roamc.cli.asked import Request
from roamc.cli.words import NO_OPTIMIZER, settings_in
from roamc.errors import DumpError, OptionError, nearest
from roamc.frontends.mesh import parse_mesh
from roamc.frontends.workload import OPTIMIZERS, Workload
from roamc.graph import TrainGraph, copied, placeholders
from roamc.report.pieces import Piece, in_words, piece_of
from roamc.units import Bytes, format_bytes


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
    if asked.type == "cuda":
        return asked
    if request.is_archive:
        return device_of("cuda" if _program(request).on_cuda else "cpu")
    return graphs.device_in(_dump(request)[0])


def graph_in(request: Request) -> TrainGraph:
    """Return the graph of a step from a file: the one that is asked for, else the one that needs most.

    Raises:
        DumpError: the file has no graph that can be read or planned, or it leaves a size open.
        OptionError: it has no such graph, or a setting is no size of it.
    """
    dump, others = _dump(request)
    _check_sizes(request, (dump, *others))
    if not others:
        return _graph_of(request, dump)[0]
    pieces, graph = _counted(*_key(request))
    name = next(each.name for each in pieces if each.planned)
    note = f"graph {name} of {len(pieces)}, the one that needs most; --piece plans another"
    return _noted(_noted(copied(graph), in_words(pieces)), note)


def _check_sizes(request: Request, dumps: Sequence[Dump]) -> None:
    symbols = {name for dump in dumps for name in dump.symbols}
    unknown = next((name for name in _sizes(request) if name not in symbols), None)
    if unknown is not None:
        raise OptionError(no_size(request.target, unknown, {name: name for name in symbols}))


def pieces_in(request: Request) -> tuple[Piece, ...]:
    """Return what each graph of a file takes; none where it has one alone or one is asked for.

    Raises as :func:`graph_in` does.
    """
    return _counted(*_key(request))[0] if _dump(request)[1] else ()


Key = tuple[str, float, tuple[str, ...], str, str | None]


def _key(request: Request) -> Key:
    changed = Path(request.target).stat().st_mtime
    return request.target, changed, request.sets, request.device, request.optimizer


@functools.lru_cache(maxsize=1)
def _counted(
    target: str, changed: float, sets: tuple[str, ...], device: str, optimizer: str | None
) -> tuple[tuple[Piece, ...], TrainGraph]:
    """What each graph of a file takes, and the graph that needs most."""
    request = Request(target, sets=sets, device=device, optimizer=optimizer)
    pieces: list[Piece] = []
    built: list[tuple[int, TrainGraph]] = []
    for dump in _dumps(target, changed):
        ticker.say(f"reading graph {dump.piece}")
        try:
            graph, shared = _graph_of(request, dump)
        except DumpError as error:
            if not pieces:  # the one with most operators: what the others need says little
                raise
            pieces.append(Piece(dump.piece, dump.frame, dump.statements, str(error)))
            continue
        built.append((len(pieces), graph))
        pieces.append(piece_of(graph, dump.piece, dump.frame, dump.statements, shared))
    place, graph = max(built, key=lambda pair: pieces[pair[0]].eager_bytes)
    pieces[place] = replace(pieces[place], planned=True)
    return tuple(pieces), graph


def _graph_of(request: Request, dump: Dump) -> tuple[TrainGraph, Mapping[str, Bytes]]:
    """The graph of ``dump``, and the bytes of parameters that the file tells apart from those of other graphs."""
    graph = graphs.train_graph(dump, _name(request), _sizes(request), device_in(request))
    return _with_states(graph, dump.trained, request.optimizer), _told_apart(graph, dump, request.optimizer)


OWN = ("L['self']", "G[")
"""How the expressions begin that mean one object in all graphs of one function."""


def _told_apart(graph: TrainGraph, dump: Dump, optimizer: str | None) -> Mapping[str, Bytes]:
    """Name of each parameter that means one object in all graphs of its function to its bytes, its states included."""
    nodes = {node.name: node for node in placeholders(graph.graph)}
    trained, told, seen = dump.trained or (), {}, set[int | None]()
    for position, (each, (source, storage)) in enumerate(zip(dump.primals, dump.inputs, strict=False)):
        if dump.function and position in (dump.static or ()) and source.startswith(OWN) and each.name in nodes:
            value = nodes[each.name].meta["val"]
            state = _state_bytes(optimizer, [value]) if optimizer in OPTIMIZERS and each.name in trained else 0
            told[f"{dump.function} {source}"] = state + (0 if storage in seen else value.untyped_storage().nbytes())
            seen.add(storage)
    return told


USUAL = "adamw"
"""The optimizer that a note speaks of where none is named."""


def _with_states(graph: TrainGraph, trained: tuple[str, ...] | None, optimizer: str | None) -> TrainGraph:
    """``graph`` with the bytes of an optimizer's states for the inputs ``trained``, and a note that they are assumed.

    Without an ``optimizer``, the note says what :data:`USUAL` would add; without roles, that nothing is assumed.
    """
    if optimizer == NO_OPTIMIZER or (optimizer is None and not trained):
        return graph
    if not trained:
        why = "the file does not say which inputs are parameters" if trained is None else "no parameter gets a gradient"
        return _noted(graph, f"{why}: nothing is assumed for --optimizer {optimizer}")
    parameters = [node.meta["val"] for node in placeholders(graph.graph) if node.name in trained]
    state = _state_bytes(optimizer or USUAL, parameters)
    of = f"{format_bytes(state)} of states; parameters that get a gradient: {len(parameters)}"
    if optimizer is None:
        return _noted(graph, f"--optimizer {USUAL} adds {of}")
    beside = "gradients are in the step, and what the update takes for a moment is not counted"
    return _noted(graph.replace(assumed_state=state), f"assumed for --optimizer {optimizer}: {of}; {beside}")


def _noted(graph: TrainGraph, note: str) -> TrainGraph:
    return graph.replace(notes=(note, *graph.notes))


def workload_in(request: Request) -> Workload:
    """Return the model in an archive with inputs of the sizes that are asked for; of sizes that are not, the export's.

    Raises:
        DumpError: the archive has no forward that can be read.
        OptionError: a setting is no size of it.
    """
    program, asked = _program(request), _sizes(request)
    if request.mesh is not None:
        splitting = [axis for axis in ("tp", "fsdp") if getattr(parse_mesh(request.mesh), axis) > 1]
        if splitting:
            raise OptionError(
                f"{request.target} has no layers that {splitting[0]} could split, only operators: give the model"
            )
    model = Exported(program, sizes_of(program, asked))
    notes = program.notes
    kept = [f"{program.described(name)} = {size}" for name, size in program.exported.items() if name not in asked]
    if kept:
        notes = (f"sizes as at the export: {', '.join(kept)}; --set {kept[0].split()[0]}=N plans another", *notes)
    if program.losses > 1:
        notes = (*notes, f"the first of {program.losses} scalar outputs is taken for the loss")
    if not program.losses:
        _check_no_update(request)
        notes = (*notes, _NO_LOSS)
    return Workload(_name(request), model, model.batch, notes=notes)


_NO_LOSS = "a .pt2 takes no loss_fn beside it: for a training step export a module that returns its loss"


def _check_no_update(request: Request) -> None:
    asked = f"--optimizer {request.optimizer}" if request.optimizer in OPTIMIZERS else ""
    asked = asked or ("" if request.clip_grad_norm is None else "--clip-grad-norm")
    if asked:
        raise OptionError(f"{request.target} has no loss, so {asked} has nothing to do; {_NO_LOSS}")


def _name(request: Request) -> str:
    return Path(request.target).resolve().name.partition(".")[0]


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


def _state_bytes(name: str, parameters: Sequence[torch.Tensor]) -> Bytes:
    """The bytes of an optimizer's states of ``parameters``, as a captured step has them."""
    optimizer = OPTIMIZERS[name](each.detach() for each in parameters)
    rule = rule_for(optimizer)
    return sum(
        fresh_state(rule, group, each).untyped_storage().nbytes()
        for group in optimizer.param_groups
        for each in group["params"]
        for _ in rule.states(group)
    )
