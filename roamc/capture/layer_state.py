"""What the modules of a layer hold as attributes, so that a trace on trial leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from roamc.capture.attributes import refill
from roamc.capture.tensor_parallel import calls_of


class LayerState:
    """Attributes of the modules of a layer, and the elements of lists, dicts and sets among them."""

    def __init__(self, layer: nn.Module) -> None:
        attributes = [vars(part) for part in layer.modules()]
        inside = [value for own in attributes for value in own.values() if isinstance(value, dict | list | set)]
        self._before = [(held, _elements(held)) for held in (*attributes, *inside)]
        self._counts = [(calls, calls.count) for calls in calls_of(layer)]

    def has_changed(self) -> bool:
        """Return whether anything is another object than it was."""
        return any(_identities(held) != _identities(before) for held, before in self._before)

    def calls(self) -> list[int]:
        """Return how often each of :func:`roamc.capture.tensor_parallel.calls_of` has counted since."""
        return [calls.count - before for calls, before in self._counts]

    def restore(self) -> None:
        """Put everything back, in its order."""
        for held, before in self._before:
            if list(map(id, held)) != list(map(id, before)) or _identities(held) != _identities(before):
                refill(held, before)
        for calls, count in self._counts:
            calls.count = count


@contextlib.contextmanager
def kept(layer: nn.Module) -> Iterator[LayerState]:
    """Context manager: what the modules of ``layer`` hold is put back in the end; yields what they held."""
    state = LayerState(layer)
    try:
        yield state
    finally:
        state.restore()


def _elements(held: Any) -> Any:
    return next(kind for kind in (dict, list, set) if isinstance(held, kind))(held)


def _identities(held: Any) -> Any:
    if isinstance(held, dict):
        return {id(key): id(value) for key, value in held.items()}
    return list(map(id, held)) if isinstance(held, list) else set(map(id, held))
