"""Graphs whose calls wait for one backward: planned again, once the first step has shown how many are open at one time.

    first step   a forward, b forward, c forward, backward of all     plan for one call; three are open at one time
    second step  a: planned again for three                           the budget holds for all of them together

Siamese and triplet losses do so, contrastive ones over two views, and a cell that is called in a loop. Values do not
depend on the plan, so calls of the old program may still be open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from roamc import compat_dynamo
from roamc.errors import BudgetError
from roamc.frontends.dynamic_shapes import owned
from roamc.locks import Lock
from roamc.runtime.open_calls import OpenCalls

TIMES = 4
"""A graph is planned again at most so often for more open calls; planning takes seconds."""

Unit = tuple[Callable[..., Any], Callable[[], None]]
"""A compiled graph: the function that runs it, and one that forgets its plan."""


class Compiler(Protocol):
    """Compiles a graph for a number of open calls."""

    def compile_for(
        self, gm: fx.GraphModule, inputs: Sequence[Any], calls: OpenCalls, number: int, *, lowest: bool
    ) -> Unit:
        """Compile ``gm``.

        Args:
            gm: the graph, which may be taken apart.
            inputs: its inputs, fake.
            calls: counts the open calls of what is compiled.
            number: how many calls are open at one time, for which the budget is to hold.
            lowest: whether to plan for the lowest peak, in place of the budget.

        Raises:
            BudgetError: no plan keeps the budget.
        """

    def refuse_calls(self, number: int, error: BudgetError) -> None:
        """Warn that no plan keeps the budget for ``number`` open calls; raise that if the option ``strict`` is set."""

    def refuse_more_calls(self, number: int, planned: int) -> None:
        """Warn that ``number`` calls are open, the plan is for ``planned``, and no other is made; or raise it."""


class PlannedAgain:
    """A compiled function that counts its open calls, and is compiled again for more than its plan counts.

    Call it with the graph's inputs; it returns the graph's results.

    Args:
        gm: the graph, with known sizes.
        inputs: its inputs, fake.
        compiler: compiles it.
        calls: counts the calls.

    Raises:
        Exception: as ``compiler`` raises.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, calls: OpenCalls) -> None:
        self._graph = owned(gm)
        self._compiler = compiler
        self._calls = calls
        self._times = 0
        self._lock = Lock()
        self._call, self._forget = compiler.compile_for(gm, inputs, calls, 1, lowest=False)
        calls.planned = 1

    def __call__(self, *args: Any) -> Any:
        """Run the program; before, plan again if more calls were open than the plan counts.

        Raises:
            BudgetError: the budget cannot hold for all open calls, and the option ``strict`` is set.
        """
        if self._calls.outgrown:
            with self._lock.now:
                self._plan_again(args)
        return self._call(*args)

    def forget(self) -> None:
        """Forget the plan."""
        self._forget()

    def _plan_again(self, args: Sequence[Any]) -> None:
        calls, number = self._calls, self._calls.most
        if not calls.outgrown:  # another thread was first
            return
        if self._times == TIMES:
            self._compiler.refuse_more_calls(number, calls.planned)
            calls.planned = sys.maxsize
            return
        with compat_dynamo.compilation(args) as inputs:
            call, forget = self._compiled(inputs, number)
        self._forget()
        self._call, self._forget, calls.planned = call, forget, number
        self._times += 1

    def _compiled(self, inputs: Sequence[Any], number: int) -> Unit:
        try:
            return self._compiler.compile_for(owned(self._graph), inputs, self._calls, number, lowest=False)
        except BudgetError as error:
            self._compiler.refuse_calls(number, error)
        return self._compiler.compile_for(owned(self._graph), inputs, self._calls, number, lowest=True)
