"""Bound programs: emitted source compiled once, bound to an arena, fed every step."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from roamc import compat
from roamc.codegen.source import Entry, Program, emit, entries_of
from roamc.errors import BackwardTwiceError, StaleError, VerifyError
from roamc.graph import Phase, TrainGraph, main_device
from roamc.memory import build_memory
from roamc.pipeline import Planned
from roamc.runtime import blocks
from roamc.runtime.arena import Arena, ArenaPool, Bound

log = logging.getLogger(__name__)
_numbers = itertools.count()


class Executable:
    """A planned graph that runs: its source, its plan and its pool of arenas.

    Attributes:
        planned: the graph and the plan behind it.
        program: the emitted source.
        pool: arenas in flight and free.
    """

    def __init__(self, planned: Planned, *, keep: bool = True) -> None:
        self.planned = planned
        self.program: Program = emit(planned.graph)
        layout = planned.graph.layout
        if layout is None:
            raise VerifyError("the plan has no layout")
        filename = f"<roamc {planned.graph.name} {next(_numbers)}>"
        bind = load(self.program, filename)
        weakref.finalize(self, linecache.cache.pop, filename, None).atexit = False
        self.pool = ArenaPool(layout.arena_bytes, main_device(planned.graph), bind, keep, layout.away)
        self._dtypes = {entry.name: _dtypes(entry) for entry in entries_of(planned.graph)}
        self._checked: set[str] = set()
        log.debug("program of %s:\n%s", planned.graph.name, self.program.source)

    def run(self, entry: str, arena: Arena, args: list[Any]) -> tuple[Any, ...]:
        """Run one function of the program over ``arena``; ``args`` is emptied.

        Raises:
            StaleError: an input has another dtype than was planned.
        """
        if [getattr(value, "dtype", None) for value in args] != self._dtypes[entry]:
            self._refuse(entry, args)
        results: tuple[Any, ...] = arena.entry[entry](args)
        if entry not in self._checked:
            self._check(entry, arena)
        return results

    def _refuse(self, entry: str, args: list[Any]) -> NoReturn:
        """Dynamo before torch 2.13 does not notice that a compiled module was moved to another dtype."""
        pairs = zip(self.program.entries[entry], args, self._dtypes[entry], strict=True)
        name, found, planned = next((n, a, p) for n, a, p in pairs if getattr(a, "dtype", None) != p)
        raise StaleError(
            f"{self.planned.graph.name} was compiled for {planned} and now gets {_kind(found)} ({name}): call "
            "torch.compiler.reset() after changing the dtype of a compiled module"
        )

    def _check(self, entry: str, arena: Arena) -> None:
        moved = arena.moved_views()
        if moved:
            raise VerifyError(
                f"{self.planned.graph.name}: torch gave {moved[0]} another shape than was planned; "
                "please report the operator, and use the aot_eager backend until then"
            )
        self._checked.add(entry)


class Whole:
    """A graph that runs in one go: a whole training step, or inference.

    Args:
        planned: the graph and its plan.
        keep: whether an idle arena keeps its memory.
    """

    def __init__(self, planned: Planned, *, keep: bool = True) -> None:
        self.executable = Executable(planned, keep=keep)

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        """Run once over an arena of its own. ``args`` is emptied; tensors of it may be updated in place."""
        pool = self.executable.pool
        arena = pool.acquire()
        try:
            return self.executable.run("step", arena, args)
        finally:
            pool.release(arena)


class Pair:
    """Forward and backward of one module, called apart by AOTAutograd, over the arena that forward took.

    A forward parks its arena until its backward has run or its saved tensors are gone; a forward in
    between takes another. With ``retain_graph=True`` backward runs over a copy of the arena, and over copies of the
    saved tensors outside it that it would write over.

    Args:
        planned: the graph and its plan.
        keep: whether an idle arena keeps its memory.
    """

    def __init__(self, planned: Planned, *, keep: bool = True) -> None:
        self.executable = Executable(planned, keep=keep)
        graph = planned.graph
        by_name = {node.name: node for node in graph.graph.nodes}
        saved = [by_name[name] for name in graph.saved]
        placed = graph.layout.offset if graph.layout is not None else {}
        names = _storage_names(graph)
        self.first_saved = sum(port.phase.name == "FORWARD" for port in graph.outputs)
        self.hooked = False
        self.in_arena = [i for i, node in enumerate(saved) if names.get(node.name) in placed]
        late = {names[name] for name in graph.donated if graph.phase[name] is not Phase.FORWARD}
        self.parked = _closed_between(graph)
        self.written_over = [i for i, node in enumerate(saved) if names.get(node.name) in late.difference(placed)]

    def forward(self, args: list[Any]) -> tuple[Any, ...]:
        """Run forward; returns the user's outputs, then the saved tensors."""
        pool = self.executable.pool
        arena = pool.acquire()
        with contextlib.ExitStack() as on_error:
            on_error.callback(pool.release, arena)
            results = list(self.executable.run("forward", arena, args))
            on_error.pop_all()
        saved = [self.first_saved + index for index in self.in_arena]
        hooks = compat.saved_tensor_hooks_active()
        self.hooked |= hooks
        if not saved:
            pool.release(arena)
        elif hooks:
            # The hooks may keep the tensors in any form: they get tensors of their own.
            for index in saved:
                results[index] = results[index].clone()
            pool.release(arena)
        else:
            token = results[saved[0]] = _alias(results[saved[0]])
            pool.park(arena, token)
        return tuple(results)

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """Run backward over the arena that the saved tensors lie in."""
        pool = self.executable.pool
        saved = [args[index] for index in self.in_arena]
        found = pool.take(saved[0]) if saved else None
        if found is None:
            return self._elsewhere(args, saved)
        ticket, arena = found
        if compat.keeps_graph():
            pool.put_back(ticket, arena)
            return self._over_copy(arena, args)
        try:
            return self.executable.run("backward", arena, args)
        finally:
            pool.release(arena)

    def _over_copy(self, arena: Arena, args: list[Any]) -> tuple[Any, ...]:
        pool = self.executable.pool
        spare = pool.acquire()
        try:
            spare.copy_from(arena)
            self._spare(args)
            return self.executable.run("backward", spare, args)
        finally:
            pool.release(spare)

    def _elsewhere(self, args: list[Any], saved: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Saved tensors that hooks have kept outside any arena, or none at all: copied to their places."""
        pool = self.executable.pool
        arena = pool.acquire()
        try:
            if any(blocks.holds(tensor) for tensor in saved):
                raise BackwardTwiceError(
                    "backward ran already and its saved tensors are gone; call the first one with retain_graph=True"
                )
            arena.have_closed(self.parked)
            planned = arena.entry["saved"]() if saved else ()
            for place, tensor in zip(planned, saved, strict=True):
                _fill(place, tensor)
            if self.hooked or compat.keeps_graph():
                self._spare(args)
            return self.executable.run("backward", arena, args)
        finally:
            pool.release(arena)

    def _spare(self, args: list[Any]) -> None:
        """Saved tensors that somebody else may read again: backward gets copies to write over."""
        for index in self.written_over:
            tensor = args[index]
            args[index] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            args[index].copy_(tensor)


def _kind(argument: object) -> str:
    """What an argument is, as an error names it: a tensor's dtype, else the type."""
    return str(argument.dtype) if isinstance(argument, torch.Tensor) else type(argument).__name__


def _fill(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy; of what is expanded, only what has bytes of its own: torch does not write the same element twice."""
    for dim, (size, step) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if size > 1 and not step:
            place, tensor = place.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    place.copy_(tensor)


def _closed_between(graph: TrainGraph) -> tuple[blocks.Range, ...]:
    """The ranges of the arena that are closed when forward has ended and backward has not begun."""
    early = {"", *(name for name, phase in graph.phase.items() if phase is Phase.FORWARD)}
    holes = graph.layout.holes if graph.layout is not None else ()
    return tuple(
        (hole.low, hole.high) for hole in holes if hole.after in early and (not hole.before or hole.before not in early)
    )


def _dtypes(entry: Entry) -> list[torch.dtype | None]:
    """What each parameter of an entry has; None for numbers and states of generators."""
    return [getattr(node.meta.get("val"), "dtype", None) for node in entry.parameters]


def load(program: Program, filename: str) -> Callable[[Arena], Bound]:
    """Compile emitted source; tracebacks show its lines."""
    linecache.cache[filename] = (len(program.source), None, program.source.splitlines(keepends=True), filename)
    namespace = {key: compat.direct(value) for key, value in program.constants.items()}
    exec(compile(program.source, filename, "exec"), namespace)
    bind: Callable[[Arena], Bound] = namespace["bind"]
    return bind


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor object over the same bytes, whose end tells that nobody can run backward any more."""
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return compat.with_bits(fresh, conj=tensor.is_conj(), neg=tensor.is_neg())


def _storage_names(graph: TrainGraph) -> dict[str, str]:
    """Node name to the name of the storage behind its (first) tensor."""
    memory = build_memory(graph)
    return {name: memory.storages[index].name for (name, position), index in memory.owner.items() if position == 0}
