"""What forward leaves in plain attributes of modules while it is traced, put back when the trace ends.

    self.hidden = h.detach()     # tracing would leave a tensor without elements there
    self.losses.append(loss)

In the step that is captured such an attribute is a name like others. Once it is over the modules have what they had: a
tensor of the trace has no elements, and whoever reads one gets an error of torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from roamc import compat
from roamc.capture import python_state
from roamc.errors import CaptureError

LONG = 1_000
"""Lists, dicts and sets of more elements are not looked into."""


@dataclass(frozen=True)
class Change:
    """An attribute that held a tensor of the trace: of which module, and its name."""

    module: nn.Module
    name: str


@contextlib.contextmanager
def put_back(modules: Sequence[nn.Module]) -> Iterator[list[Change]]:
    """Keep tensors of a trace out of the plain attributes of ``modules``; yields what it has put back, at the end."""
    before = [(module, dict(vars(module))) for module in modules]
    inside = {id(value): (value, type(value)(value)) for _, own in before for value in own.values() if _is_plain(value)}
    changes: list[Change] = []
    try:
        yield changes
    finally:
        for module, own in before:
            changes += _put_back(module, own)
        for value, content in inside.values():
            if _holds_traced(value):
                _refill(value, content)


def check_carried(model: nn.Module, changes: Sequence[Change], reads: python_state.Reads) -> None:
    """Refuse a step that reads an attribute and then sets it to a tensor: the next one would read the old tensor.

    Raises:
        CaptureError: one line that names the attribute.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for change in changes:
        if reads.has_read(change.module, change.name):
            owner = names.get(id(change.module)) or "the model"
            raise CaptureError(
                f"forward reads {change.name!r} of {owner} and then sets it to a tensor for the next step, which a "
                "captured step cannot carry over; make it a buffer (register_buffer), or use roamc.optimize or "
                "torch.compile"
            )


def _put_back(module: nn.Module, own: dict[str, Any]) -> list[Change]:
    """Give a module the attributes that it had, where others hold tensors of the trace."""
    traced = [name for name, value in vars(module).items() if value is not own.get(name) and _is_traced(value)]
    for name in traced:
        if name in own:
            vars(module)[name] = own[name]
        else:
            del vars(module)[name]
    return [Change(module, name) for name in traced]


def _is_traced(value: Any) -> bool:
    return compat.is_traced(value) or (_is_plain(value) and _holds_traced(value))


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is a list, dict or set that is looked into."""
    return type(value) in (list, dict, set) and len(value) <= LONG


def _holds_traced(value: Any) -> bool:
    return any(compat.is_traced(item) for item in (value.values() if isinstance(value, dict) else value))


def _refill(value: Any, content: Any) -> None:
    """Give a list, dict or set the elements that it had."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(content)
