"""Bound programs: emitted source that is compiled once, bound to an arena, and called in every step."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from roamc import compat
from roamc.codegen.judge import check_program
from roamc.codegen.partition import partitioned
from roamc.codegen.source import ARGUMENT, Entry, Program, emit
from roamc.compat_operators import direct
from roamc.errors import BackwardTwiceError, StaleError, VerifyError, users_level
from roamc.graph import Phase, TrainGraph, main_device, operators
from roamc.graph.in_flight import call_bytes
from roamc.graph.memory import MemoryModel, build_memory
from roamc.interruptions import came_from_elsewhere, interruption
from roamc.operators import kernels, ops, split_collectives
from roamc.operators.gpu import kept, tuning
from roamc.planning.planned import Planned
from roamc.runtime import agreement, blocks, fallback
from roamc.runtime.arena import Arena, ArenaPool, Bound
from roamc.runtime.open_calls import OpenCalls
from roamc.runtime.whole_storage import extent_of, own, put, together
from roamc.units import Bytes

log = logging.getLogger(__name__)
_numbers = itertools.count()
OnFailure = Callable[[Exception], None]
"""Called with the error when a program has failed and all later steps run without it."""

REPORT = "please report the operator, and use the aot_eager backend until then"
"""Advice in errors about an operator that does not give what was planned."""


class Executable:
    """A planned graph that runs: its program, its plan and its pool of arenas.

    Making one emits, compiles and checks the program; no arena is made yet.

    Args:
        planned: the graph, whose layout pass has run, and its plan.
        keep: whether an idle arena keeps its memory.
        tune: whether kernels may be timed first, see :mod:`roamc.operators.gpu.tuning`.
        on_failure: called with the error when the program has failed and is not used any more; None lets the error out.

    Attributes:
        planned: the graph and its plan.
        program: the emitted source.
        pool: the arenas of the program.
        broken: whether the program has failed; the caller then uses :meth:`run_plain`.

    Raises:
        PlanError: the graph has no layout.
        VerifyError: the emitted program is not the graph.
    """

    def __init__(
        self, planned: Planned, *, keep: bool = True, tune: bool = False, on_failure: OnFailure | None = None
    ) -> None:
        self.planned = planned
        if tune:
            tuning.tune(tuning.groups_of(planned.graph))
        self.program: Program = emit(planned.graph)
        layout = planned.graph.layout
        if layout is None:
            raise VerifyError("the plan has no layout")
        self._filename = f"<roamc {planned.graph.name} {next(_numbers)}>"
        code = compiled(self.program, self._filename)
        weakref.finalize(self, linecache.cache.pop, self._filename, None).atexit = False
        check_program(planned.graph, self.program, code)
        bind = load(self.program, code)
        self.pool = ArenaPool(layout.arena_bytes, main_device(planned.graph), bind, keep, layout.trimmed)
        self.broken = False
        self._on_failure = on_failure
        self._dtypes = {name: _dtypes(entry) for name, entry in self.program.entries.items()}
        self._checked: set[str] = set()
        self._meetings = agreement.Meetings(planned.graph, self.program.entries)
        self._plain: dict[str, fallback.Boxed] = {}
        log.debug("program of %s:\n%s", planned.graph.name, self.program.source)

    def agree(self, entry: str, args: Sequence[Any]) -> None:
        """Compare with the other ranks what they must have the same of, before function ``entry`` runs.

        Args:
            entry: name of the function: "step", "forward" or "backward".
            args: one value per parameter of the function.

        Raises:
            RanksError: as :meth:`roamc.runtime.agreement.Meetings.check` raises.
        """
        if self.planned.graph.agreements:
            self._meetings.check(entry, args)

    def arena(self) -> Arena | None:
        """Take an arena for a step, which the caller gives back by ``pool.release``.

        Returns:
            The arena; None if none could be made. The program is then :attr:`broken`: use :meth:`run_plain`.

        Raises:
            Exception: no arena could be made, and ``on_failure`` is None or the error is a signal handler's.
        """
        try:
            return self.pool.acquire()
        except Exception as error:
            self._give_up(error)
            return None

    def run(self, entry: str, arena: Arena, args: list[Any]) -> tuple[Any, ...]:
        """Run one function of the program over ``arena``.

        If the program fails, the planned operators run one by one with torch's allocator instead, :attr:`broken` is set
        and no result lies in the arena. Where ``on_failure`` is None, failures are raised instead.

        Args:
            entry: name of the function: "step", "forward" or "backward".
            arena: an arena of :attr:`pool`, taken for this step.
            args: one value per parameter of the function; the list is emptied.

        Returns:
            One value per item of :attr:`roamc.codegen.source.Entry.results`. They may lie in the arena.

        Raises:
            StaleError: an input has another dtype than was planned.
            UnfinishedError: an operator may have done half of its work, and the function cannot be finished.
            VerifyError: torch gave a tensor another dtype or shape than was planned, and failures are raised or the
                function cannot run once more.
            Exception: an operator raised, and failures are raised, or it raised again when it was run once more; or a
                collective that was under way then failed.
        """
        if [getattr(value, "dtype", None) for value in args] != self._dtypes[entry]:
            self._give_up(self._misfit(entry, args))
            return self.run_plain(entry, args)
        again = list(args) if entry not in self._checked and self._may_start_again(entry) else None
        try:
            results: tuple[Any, ...] = arena.entry[entry](args)
        except BaseException as error:
            split_collectives.finish_all(error)  # they use the arena
            if not isinstance(error, Exception):
                raise
            return self._finished(entry, arena, error)
        if entry not in self._checked:
            moved = arena.moved_views()
            if moved:
                return self._started_again(entry, moved[0], again)
            self._checked.add(entry)
            kept.write()
        return results

    def run_plain(self, entry: str, args: list[Any]) -> tuple[Any, ...]:
        """Run one function of the planned graph operator by operator, with torch's allocator and no arena.

        Args:
            entry: name of the function: "step", "forward" or "backward".
            args: one value per parameter of the function; the list is emptied.

        Returns:
            One value per item of :attr:`roamc.codegen.source.Entry.results`.

        Raises:
            Exception: whatever an operator raises.
        """
        if not self._plain:
            graph = self.planned.graph
            parts = partitioned(graph) if graph.boundary else (graph.module,)
            pairs = zip(self.program.entries, parts, strict=True)
            self._plain = {name: fallback.interpreter(part) for name, part in pairs}
        try:
            return tuple(self._plain[entry](args))
        except BaseException as error:
            split_collectives.finish_all(error)
            raise

    def _give_up(self, error: Exception) -> None:
        """Stop using the program and tell ``on_failure``; raise ``error`` if there is none or a signal raised it."""
        if self._on_failure is None or interruption(error) is not None:
            raise error
        self._retire()
        self._on_failure(error)

    def _retire(self) -> None:
        """Mark the program as broken and drop its free arenas."""
        self.broken = True
        self.pool.clear()

    def _finished(self, entry: str, arena: Arena, error: Exception) -> tuple[Any, ...]:
        """Return the results of function ``entry``, which raised ``error`` half-way, by running the rest plainly.

        Raises:
            UnfinishedError: an operator may have done half of its work, and cannot run again.
            Exception: ``error``, where failures are raised or ``error`` did not come from the program's own operators;
                a note says what was updated before.
        """
        planned = self.planned.graph, self.program, self._filename, self.program.entries[entry]
        try:
            if self._on_failure is None or came_from_elsewhere(error, self._filename, kernels.__file__):
                raise error
            results = fallback.finish(*planned, arena, error)
        except BaseException as raised:  # an interruption too: the arena is free once this returns
            split_collectives.finish_all(raised)
            updates = fallback.written_before(*planned, error)
            if updates:
                raised.add_note(f"roamc: the step was ended by this error in its middle; {updates}")
            raise
        if results is None:
            self._retire()
            raise fallback.unfinished(*planned, error) from error
        self._give_up(error)
        return results

    def _may_start_again(self, entry: str) -> bool:
        """Whether function ``entry``, after it has run, may run once more on the same arguments.

        So it is for a forward or a whole step without an operator that has an effect, unless failures are raised.
        """
        phases = self.program.entries[entry].phases
        mine = [node for node in operators(self.planned.graph.graph) if self.planned.graph.phase[node.name] in phases]
        fresh = Phase.FORWARD in phases
        return fresh and self._on_failure is not None and not any(ops.has_effect(node.target) for node in mine)

    def _started_again(self, entry: str, moved: str, args: list[Any] | None) -> tuple[Any, ...]:
        """Return the results of function ``entry``, run once more without the program, which has moved a tensor.

        Args:
            entry: name of the function.
            moved: name of the planned tensor that has another shape or place than was planned.
            args: arguments to run with; None if the function may not run once more.

        Raises:
            VerifyError: failures are raised, or ``args`` is None.
        """
        error = VerifyError(
            f"{self.planned.graph.name}: torch gave {moved} another shape than was planned, and what the step has "
            f"given or written may be wrong; {REPORT}"
        )
        if args is None:
            if self._on_failure is not None:
                self._retire()
            raise error
        self._give_up(error)
        return self.run_plain(entry, args)

    def _misfit(self, entry: str, args: list[Any]) -> VerifyError:
        """Return the error for the first of ``args`` whose dtype is not the planned one, where an operator has made it.

        Raises:
            StaleError: the argument came from the caller; dynamo before torch 2.13 does not notice that a compiled
                module was moved to another dtype.
        """
        pairs = zip(self.program.entries[entry].parameters, args, self._dtypes[entry], strict=True)
        node, argument, planned = next((n, a, p) for n, a, p in pairs if getattr(a, "dtype", None) != p)
        name = self.planned.graph.name
        if node.op != "placeholder":
            return VerifyError(
                f"{name}: torch gave {node.name} as {_kind(argument)}, where roamc planned {planned}; {REPORT}"
            )
        raise StaleError(
            f"{name} was compiled for {planned} and now gets {_kind(argument)} ({node.name}): make a new train_step "
            "after changing the dtype of its optimizer's state, or call torch.compiler.reset() after changing that of "
            "a compiled module"
        )


class Whole:
    """A graph that runs as one function: a whole training step, or inference.

    Call it with a list of one value per placeholder of the graph; the list is emptied. The call returns a tuple of one
    value per output, None where the graph returns nothing.

    Args:
        planned: the graph, which has no boundary, and its plan.
        keep: whether an idle arena keeps its memory.
        tune: whether kernels may be timed first.
        on_failure: called with the error when the program has failed; all later steps run without program and arena.
            None lets the error out.

    Attributes:
        executable: the program, its plan and its arenas.
    """

    def __init__(
        self, planned: Planned, *, keep: bool = True, tune: bool = False, on_failure: OnFailure | None = None
    ) -> None:
        self.executable = Executable(planned, keep=keep, tune=tune, on_failure=on_failure)

    def prepare(self) -> None:
        """Make the first arena now, so that a failure to allocate it is raised before the first step."""
        self.executable.pool.release(self.executable.pool.acquire())

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        """Run once over an arena of its own.

        Args:
            args: one value per placeholder of the graph. The list is emptied; its tensors may be updated in place.

        Returns:
            One value per output of the graph; None where the graph returns nothing.

        Raises:
            Exception: as :meth:`Executable.run` raises.
        """
        self.executable.agree("step", args)
        arena = None if self.executable.broken else self.executable.arena()
        if arena is None:
            return self.executable.run_plain("step", args)
        try:
            return self.executable.run("step", arena, args)
        finally:
            self.executable.pool.release(arena)


class Pair:
    """Forward and backward of one module, called apart by AOTAutograd, over the arena that forward took.

    A forward parks its arena until its backward has run or its saved tensors are gone; a forward in
    between takes another. With ``retain_graph=True`` backward runs over a copy of the arena, and over copies of the
    saved tensors outside it that it would write over.

    Args:
        planned: the graph, which has a boundary, and its plan.
        keep: whether an idle arena keeps its memory.
        tune: whether kernels may be timed first.
        on_failure: called with the error when the program has failed; all later steps run without program and arena.
            None lets the error out.
        calls: counts the calls whose backward is still to run.

    Attributes:
        executable: the program, its plan and its arenas.
        calls: as given.
        held_bytes: what a call holds between its forward and its backward.
        token: position, among the saved tensors, of the one by which an open call is known; None if forward makes none
            of them.
        first_saved: number of the user's outputs, behind which the results of forward are the saved tensors.
        threads: number of torch's threads that the plan counts with; 0 if the number does not matter, or once a warning
            about more threads was given.
        hooked: whether a forward has run under the user's ``saved_tensors_hooks``.
        in_arena: positions, among the saved tensors, of those that are planned.
        extents: for each of ``in_arena``, the range of the arena that counts as the tensor's storage.
        parked: the ranges of the arena that are trimmed between forward and backward.
        written_over: positions, among the saved tensors, of those outside the arena that backward writes over.
    """

    def __init__(
        self,
        planned: Planned,
        *,
        keep: bool = True,
        tune: bool = False,
        on_failure: OnFailure | None = None,
        calls: OpenCalls | None = None,
    ) -> None:
        self.executable = Executable(planned, keep=keep, tune=tune, on_failure=on_failure)
        self.calls = calls or OpenCalls()
        graph = planned.graph
        by_name = {node.name: node for node in graph.graph.nodes}
        saved = [by_name[name] for name in graph.saved]
        placed = graph.layout.offset if graph.layout is not None else {}
        memory = build_memory(graph)
        names = _storage_names(memory)
        self.first_saved = sum(port.phase.name == "FORWARD" for port in graph.outputs)
        self.hooked = False
        limited = planned.plan.budget_bytes is not None and not planned.plan.budget_added
        budgeted = limited and main_device(graph).type == "cpu"
        self.threads = planned.plan.threads if budgeted else 0
        self.in_arena = [i for i, node in enumerate(saved) if names.get(node.name) in placed]
        self.extents = [extent_of(saved[index].meta["val"]) for index in self.in_arena]
        late = {names[name] for name in graph.reuse if graph.phase[name] is not Phase.FORWARD}
        self.parked = _trimmed_between(graph)
        temporaries = {storage.name for storage in memory.counted if storage.nbytes}
        own = [index for index, node in enumerate(saved) if names.get(node.name) in temporaries]
        self.token = next(iter((*self.in_arena, *own)), None)
        self.held_bytes = self._held(memory, placed)
        self.written_over = [i for i, node in enumerate(saved) if names.get(node.name) in late.difference(placed)]

    def _held(self, memory: MemoryModel, placed: Mapping[str, Bytes]) -> Bytes:
        """The bytes of the arena while it is parked, where something is saved in it, and of what is held outside."""
        if not self.in_arena:
            return call_bytes(memory)
        inside = sum(storage.nbytes for storage in memory.saved if storage.name in placed)
        parked = self.executable.pool.nbytes - sum(high - low for low, high in self.parked)
        return call_bytes(memory) - inside + parked

    def forward(self, args: list[Any]) -> tuple[Any, ...]:
        """Run forward and park its arena for the backward.

        Under the user's ``saved_tensors_hooks`` saved tensors get memory of their own, and nothing is parked.

        Args:
            args: one value per parameter of the program's "forward"; the list is emptied.

        Returns:
            The user's outputs, then the saved tensors.

        Raises:
            Exception: as :meth:`Executable.run` raises.
        """
        self.executable.agree("forward", args)
        pool, plan = self.executable.pool, self.executable.planned.plan
        self.calls.begin(plan.needed_bytes - plan.waiting_bytes)
        arena = None if self.executable.broken else self.executable.arena()
        if arena is None:
            return self.executable.run_plain("forward", args)
        with contextlib.ExitStack() as on_error:
            on_error.callback(pool.release, arena)
            results = list(self.executable.run("forward", arena, args))
            on_error.pop_all()
        saved = [self.first_saved + index for index in self.in_arena]
        hooks = compat.saved_tensor_hooks_active()
        self.hooked |= hooks
        if not saved or self.executable.broken:
            pool.release(arena)
        elif hooks:
            # The hooks may keep the tensors in any form: they get tensors of their own.
            for index, extent in zip(saved, self.extents, strict=True):
                results[index] = own(results[index], extent)
            pool.release(arena)
        else:
            token = results[saved[0]] = _alias(results[saved[0]])
            pool.park(arena, token)
        if self.token is not None and not hooks:
            self.calls.open(results[self.first_saved + self.token], self.held_bytes)
        return tuple(results)

    def _warn_of_threads(self) -> None:
        """Warn, once, if backward runs with another number of threads, with which operators may take more."""
        count = torch.get_num_threads()
        if self.threads and not self.executable.planned.covers(count):
            planned, self.threads = self.threads, 0
            warnings.warn(
                f"backward of {self.executable.planned.graph.name} runs with {count} threads, and its plan counts the "
                f"operators' own memory for {planned}: the memory budget may be exceeded. Call torch.set_num_threads "
                "before forward, so that it is planned again",
                stacklevel=users_level(),
            )

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """Run backward over the arena in which the saved tensors lie, or over another to which they are copied.

        Args:
            args: the saved tensors, then one value per input of backward; the list is emptied. Saved tensors may be
                written over, unless the graph is kept (``retain_graph=True``).

        Returns:
            One value per output of backward, None where the graph returns nothing.

        Raises:
            BackwardTwiceError: backward has run already on these saved tensors, without ``retain_graph=True``.
            Exception: as :meth:`Executable.run` raises.
        """
        self._warn_of_threads()
        self.executable.agree("backward", args)
        if self.token is not None:
            self.calls.backward(args[self.token], kept=compat.keeps_graph())
        pool = self.executable.pool
        saved = [args[index] for index in self.in_arena]
        parked = pool.take(saved[0]) if saved else None
        if parked is None:
            return self._elsewhere(args, saved)
        ticket, arena = parked
        if compat.keeps_graph():
            pool.put_back(ticket, arena)
            return self._over_copy(arena, args)
        try:
            if self.executable.broken:
                return self._plainly(args)
            return self.executable.run("backward", arena, args)
        finally:
            pool.release(arena)
            if self.calls.outgrown:  # another program takes the place of this one
                pool.clear()

    def _plainly(self, args: list[Any]) -> tuple[Any, ...]:
        """Run backward without the program, on copies of the saved tensors that lie in an arena.

        Operators may read by offsets into storages, so each copy has a storage of its own.
        """
        for index, extent in zip(self.in_arena, self.extents, strict=True):
            args[index] = own(args[index], extent)
        return self.executable.run_plain("backward", args)

    def _over_copy(self, arena: Arena, args: list[Any]) -> tuple[Any, ...]:
        """Run backward over a copy of ``arena``, whose saved tensors another backward will read."""
        pool = self.executable.pool
        spare = None if self.executable.broken else self.executable.arena()
        if spare is None:
            return self._plainly(args)
        try:
            spare.copy_from(arena)
            self._spare(args)
            return self.executable.run("backward", spare, args)
        finally:
            pool.release(spare)

    def _elsewhere(self, args: list[Any], saved: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Run backward where no parked arena has the saved tensors: ``saved`` are copied to their places in an arena.

        So it is if the user's hooks have kept them elsewhere, or if none of them is planned.

        Raises:
            BackwardTwiceError: one of ``saved`` lies in a block that its arena has given up.
        """
        pool = self.executable.pool
        if any(blocks.holds(tensor) for tensor in saved):
            raise BackwardTwiceError(
                "backward ran already and its saved tensors are gone; call the first one with retain_graph=True"
            )
        arena = None if self.executable.broken else self.executable.arena()
        if arena is None:
            return self.executable.run_plain("backward", args)
        try:
            arena.have_closed(self.parked)
            planned = arena.entry["saved"]() if saved else ()
            put(planned, saved, self.extents if saved else ())
            if self.hooked or compat.keeps_graph():
                self._spare(args)
            return self.executable.run("backward", arena, args)
        finally:
            pool.release(arena)

    def _spare(self, args: list[Any]) -> None:
        """Replace the saved tensors in ``args`` that backward writes over by copies: others may read them again."""
        copies = together([args[index] for index in self.written_over])
        for index, copy in zip(self.written_over, copies, strict=True):
            args[index] = copy


def _kind(argument: object) -> str:
    """Return what an error calls an argument: the dtype of a tensor, else the name of the type."""
    return str(argument.dtype) if isinstance(argument, torch.Tensor) else type(argument).__name__


def _trimmed_between(graph: TrainGraph) -> tuple[blocks.Range, ...]:
    """Return the ranges of the arena that are trimmed when forward has ended and backward has not begun."""
    early = {"", *(name for name, phase in graph.phase.items() if phase is Phase.FORWARD)}
    trims = graph.layout.trims if graph.layout is not None else ()
    return tuple(
        (trim.low, trim.high) for trim in trims if trim.after in early and (not trim.before or trim.before not in early)
    )


def _dtypes(entry: Entry) -> list[torch.dtype | None]:
    """Return the dtype of each parameter of a function; None for numbers and states of generators."""
    return [getattr(node.meta.get("val"), "dtype", None) for node in entry.parameters]


def compiled(program: Program, filename: str) -> CodeType:
    """Return the source of ``program``, compiled under ``filename``.

    The lines of the source are entered in ``linecache``, so that tracebacks show them.
    """
    linecache.cache[filename] = (len(program.source), None, program.source.splitlines(keepends=True), filename)
    return compile(program.source, filename, "exec")


def load(program: Program, code: CodeType) -> Callable[[Arena], Bound]:
    """Run ``code``, the compiled source of ``program``, with the program's constants, and return its ``bind``.

    ``bind`` makes the planned tensors over an arena and returns the program's functions by name.
    """
    namespace = {
        name: value if name.startswith(ARGUMENT) else direct(value) for name, value in program.constants.items()
    }
    exec(code, namespace)
    bind: Callable[[Arena], Bound] = namespace["bind"]
    return bind


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor object over the same bytes; when it is freed, nobody can run backward any more."""
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return compat.with_bits(fresh, conj=tensor.is_conj(), neg=tensor.is_neg())


def _storage_names(memory: MemoryModel) -> dict[str, str]:
    """Return node name to the name of the storage behind the first result, for nodes whose first result is a tensor."""
    return {name: memory.storages[index].name for (name, position), index in memory.owner.items() if position == 0}
