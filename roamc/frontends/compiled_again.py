"""Optimized modules in another compilation, and their copies.

What an optimized module carries for both is one object, the compiled call of the module, which is its own attribute
``__call__`` as well. Python does not look at that when the module is called:

- ``copy.deepcopy``, ``pickle`` and ``torch.save`` copy the object with the module, and that optimizes the copy;
- torch.compile would trace through the module as if it were not compiled. For one with a ``__call__`` of its own it
  asks the module, which then runs by its own plan, with a graph break around it. If roamc compiles what is around it,
  it becomes a part of that plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roamc import compat_dynamo, notices
from roamc.budget import DEFAULT
from roamc.errors import CaptureError, RoamcError
from roamc.frontends.record import Record
from roamc.options import Options

Optimize = Callable[[nn.Module], "Carried"]
"""Optimizes a module that may have no attributes yet; it can be pickled."""


class Carried:
    """The compiled call of an optimized module, and its attribute ``__call__``.

    Args:
        optimize: optimizes a copy like the module.
        model: the module.
        call: runs a call of the module.
    """

    def __init__(self, optimize: Optimize, model: nn.Module, call: Callable[..., Any]) -> None:
        self._optimize = optimize
        self._model = weakref.ref(model)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Carried:
        copy = memo.get(id(self._model()))
        if not isinstance(copy, nn.Module):
            raise RoamcError("what roamc.optimize has put into a module cannot be copied without the module")
        return self._optimize(copy)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._optimize, (self._model(),)


ROAMC, OTHER = "roamc", "other"
"""Who traces a call of a module: a compilation by roamc, or by another backend."""


class Around:
    """Decides what runs when another compilation traces a call of an optimized module.

    Args:
        record: the module's; each warning is given once for it.
        options: those of the module.
    """

    def __init__(self, record: Record, options: Options) -> None:
        self._record = record
        self._options = options

    def tracer(self) -> str:
        """Return who traces a call of the module in this thread: ROAMC, OTHER, or nobody, ``""``.

        For roamc the module is a part of the plan; warns, once, if that has another budget than the module.
        """
        backend, keywords = compat_dynamo.compiling_backend()
        if backend is None:  # torch.compiler.is_compiling is true in all threads while one compiles
            return ""
        if not hasattr(backend, "roamc_options"):
            return OTHER
        outer: Options = backend.roamc_options(keywords)
        if self._options.memory_budget not in (None, outer.memory_budget):
            self._say(
                "budget",
                f"{self._record.name!r}, which roamc.optimize has compiled, is a part of a model that roamc compiles: "
                f"one plan covers both, with memory_budget={outer.memory_budget or DEFAULT!r} in the place of "
                f"memory_budget={self._options.memory_budget!r}. Give the budget to the outer model, and leave "
                "roamc.optimize of its part out",
            )
        return ROAMC

    def say_apart(self) -> None:
        """Warn, once, that another backend compiles what is around the module.

        Raises:
            CaptureError: that, if the option ``strict`` is set.
        """
        self._say(
            "compiled again",
            f"{self._record.name!r} was compiled by roamc.optimize, and torch.compile compiles it, or what is around "
            "it, again: it keeps roamc's plan, and the other graph breaks there. Use one of them: torch.compile "
            "without roamc.optimize, or roamc.optimize of the outer model",
        )

    def _say(self, key: str, message: str) -> None:
        notices.warn_or_raise(self._record, key, CaptureError(message), self._options)


@torch.compiler.disable(reason="roamc.optimize has compiled this module")  # type: ignore[untyped-decorator]
def apart(around: Around, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call of an optimized module outside of the graph that another backend compiles.

    Raises:
        CaptureError: the module's option ``strict`` is set.
    """
    around.say_apart()
    return compiled(*args, **kwargs)
