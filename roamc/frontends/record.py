"""What roamc has made for one compiled object: its programs, their plans, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from roamc.locks import Lock
from roamc.planning.plan import Plan
from roamc.runtime.open_calls import Held
from roamc.runtime.program import Pair, Whole
from roamc.units import format_bytes


class Calls:
    """Counts the calls of what was compiled; it holds no program, so that functions which count keep none alive.

    Attributes:
        count: number of calls so far, of all functions that :meth:`counted` returned.
    """

    def __init__(self) -> None:
        self.count = 0

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``function`` with its positional arguments, and adds 1 to ``count`` before."""

        def run(*args: Any) -> Any:
            self.count += 1
            return function(*args)

        return run


REMEMBERED = 64
"""The most programs, or plans, that are remembered."""


class Record:
    """The programs that roamc has made for one compiled object.

    Args:
        name: initial value of the attribute.

    Attributes:
        name: name of the model's class, or ``""`` if it is not known.
        held: what open calls of its programs hold.
        pieces: whether its programs are pieces of one model that torch.compile has split.
        calls: counts the calls of all functions that were compiled of the object, fallbacks included.
        programs: the last programs, oldest first; a :class:`Pair` runs forward and backward, a :class:`Whole` runs
            inference.
        fallbacks: one line for each time that planning or a program failed and something else ran in its place.
        in_eager: whether roamc has left a function of the object to eager.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.calls = Calls()
        self.held = Held()
        self.pieces = False
        self._lock = Lock()
        self.programs: list[Pair | Whole] = []
        self.fallbacks: list[str] = []
        self.in_eager = False

    def add(self, program: Pair | Whole) -> None:
        """Append ``program`` to ``programs``. Beyond REMEMBERED the oldest is taken off; its owner can still run it."""
        with self._lock.now:
            self.programs = [*self.programs, program][-REMEMBERED:]

    def remove(self, program: Pair | Whole) -> None:
        """Take ``program`` off ``programs``; nothing happens if it is not there."""
        with self._lock.now:
            self.programs = [other for other in self.programs if other is not program]

    @property
    def shared_groups(self) -> list[object]:
        """The groups whose ranks run the programs together."""
        graphs = [program.executable.planned.graph for program in self.programs]
        return list(dict.fromkeys(agreement.group for graph in graphs for agreement in graph.agreements))

    @property
    def plans(self) -> list[Plan]:
        """The plans, oldest first, but of programs that have failed; those of pieces have a note on all of them."""
        plans = [program.executable.planned.plan for program in self.programs if not program.executable.broken]
        if not self.pieces:
            return plans
        programs = f"{len(plans)} programs" if len(plans) > 1 else "1 program"
        note = (
            f"{self.name!r} runs in {programs} and in eager: a budget holds for each program by itself; those open "
            f"at one time have needed up to {format_bytes(self.held.most)} so far, and what eager holds comes on top"
        )
        return [replace(plan, notes=(*plan.notes, note)) for plan in plans]
