"""Warnings that are given once for a model, however many graphs and input sizes of the model are compiled."""

from __future__ import annotations

import logging
import re
import warnings
import weakref

import torch

from roamc.budget import asks_for_fewer_bytes
from roamc.errors import RoamcError, users_level
from roamc.locks import Lock
from roamc.options import Options

log = logging.getLogger(__name__)

_said: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()
_lock = Lock()


def is_new(about: object, key: str) -> bool:
    """Whether this is the first call with this ``key`` for ``about``, a model or a function; the call is remembered."""
    with _lock.now:
        keys = _said.setdefault(about, set())
        if key in keys:
            return False
        keys.add(key)
        return True


def warn(about: object, key: str, message: str) -> None:
    """Warn at the user's line, unless ``about``, a model or a function, had a warning with this ``key`` before."""
    if is_new(about, key):
        warnings.warn(message, stacklevel=users_level())


def warn_or_raise(about: object, key: str, error: RoamcError, options: Options, instead: str = "") -> None:
    """Warn with the message of ``error``, as :func:`warn` does; raise it in its place if the option ``strict`` is set.

    Args:
        about: the model or function.
        key: of the warning.
        error: has the message.
        options: what the user set.
        instead: end of the warning, about what happens where nothing is raised.
    """
    if options.strict:
        raise error from None
    warn(about, key, f"{error}{instead} (options={{'strict': True}} raises)")


def reason_of(error: Exception) -> str:
    """Return an error in one line: the first of its message, behind its type unless it is one of roamc's."""
    text = str(error) if isinstance(error, RoamcError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]


def lost_budget(options: Options, scope: str = "for this graph") -> str:
    """Return the end of a warning about a fallback, which says that the budget is not kept; empty without one.

    ``scope`` says for what it is not kept, in words.
    """
    budget = options.memory_budget
    return f"; memory_budget={budget!r} IS NOT KEPT {scope}" if asks_for_fewer_bytes(budget) else ""


def warn_of_failure(about: object, name: str, options: Options, error: Exception) -> None:
    """Warn that a program failed while it ran, and say what runs from there on.

    Args:
        about: the model or function; it gets the warning once for each reason.
        name: name of the graph.
        options: what the user set.
        error: the failure.
    """
    reason = reason_of(error)
    more = " and takes more memory" if isinstance(error, MemoryError | torch.OutOfMemoryError) else ""
    warn(
        about,
        re.sub(r"\d+", "#", reason),
        f"roamc's program of {name!r} failed while it ran: {reason}. This step and all later ones run operator by "
        f"operator, with the same values{more}{lost_budget(options)} (options={{'strict': True}} raises)",
    )
    log.debug("a program of %s failed", name, exc_info=error)
