"""Every error that roamc raises on purpose. Each message says what to do next."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from types import FrameType

REQUIRED = frozenset({"layout"})
"""Passes that no option leaves out: without them there is no program."""


def way_out(after: str) -> str:
    """Return advice, for an error message, on a graph that breaks a rule behind the pass ``after`` or ``"capture"``."""
    if after in REQUIRED or after == "capture":
        return "please report this model, and leave roamc out until then"
    return f"leave the pass out with options={{'disable': {after!r}}}"


def nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the end of an error's sentence: ``"; did you mean 'x'?"`` for the nearest of ``names``, or ``"."``.

    Args:
        name: the name that is not known.
        names: those that are.
        cutoff: how near it must be, from 0 to 1, see :func:`difflib.get_close_matches`.
    """
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else "."


def printable(text: str) -> str:
    """Return ``text`` with a question mark for what a terminal would obey, as names in a stranger's file may have."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def with_article(noun: str) -> str:
    """Return the name of a class with "a" or "an" in front, as messages say what something is."""
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


_INNER = ("roamc", "torch", "contextlib", "functools", "importlib", None)
"""Packages whose lines a warning does not point at; None is code that was generated."""


def users_level() -> int:
    """Return the ``stacklevel`` with which a warning of the calling function points at the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _package(frame) in _INNER:
        frame = frame.f_back
        level += not frame.f_code.co_filename.startswith("<frozen importlib")  # python does not count these either
    return level


def _package(frame: FrameType) -> str | None:
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else None


class RoamcError(Exception):
    """Base of all errors raised by roamc."""


class OptionError(RoamcError, ValueError):
    """An option has an unknown name or a value out of its range."""


class CaptureError(RoamcError):
    """A model or step could not be turned into one graph."""


class VerifyError(RoamcError):
    """A graph or a plan broke a rule; at debug level the log ``roamc.graph.verify`` shows the nodes around it."""


SMALLER = ", or use a smaller batch"
"""End of advice where a budget is too low."""


class BudgetError(RoamcError):
    """No plan fits the budget; the message names the smallest budget that would, where that is known.

    Attributes:
        plan: the plan that did not fit, a :class:`roamc.planning.plan.Plan`; None if there is none.
        reason: the message without the advice at its end.
        advice: what to do, beside :data:`SMALLER`; "" if the message has no such end.
        verdict: whether the message itself says that something does not fit.
    """

    def __init__(self, reason: str, plan: object = None, *, advice: str = "", verdict: bool = False) -> None:
        super().__init__(f"{reason}. {advice}{SMALLER}" if advice else reason)
        self.plan, self.reason, self.advice, self.verdict = plan, reason, advice, verdict


class PlanError(RoamcError, ValueError):
    """A plan is malformed, or does not belong to the graph it is used with."""


class ProfileError(RoamcError, ValueError):
    """A device profile is malformed, or none has the name that was asked for."""


class BackwardTwiceError(RoamcError, RuntimeError):
    """Backward has run: a first call has freed the saved tensors, or a train step has updated the parameters."""


class UnfinishedError(RoamcError, RuntimeError):
    """A program failed in a step that cannot be finished with the same values; the message says what was written."""


class StaleError(RoamcError):
    """A compiled module has changed since it was planned, and torch did not recompile it."""


class RanksError(RoamcError, RuntimeError):
    """Ranks that must agree have different inputs, parameters, random states or plans; the message says which."""


class OtherStepError(RanksError):
    """Ranks are about to run different steps: each would wait for the others, in a fallback too."""


class DumpError(RoamcError, ValueError):
    """A file has no graph that can be read; the message names file and line and says what to do."""
