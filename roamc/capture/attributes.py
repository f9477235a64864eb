"""What forward leaves in plain attributes of modules while it is traced, put back when the trace ends.

    self.hidden = h.detach()     # tracing would leave a tensor without elements there
    self.losses.append(loss)

In the captured step such an attribute is one more name of a value. After the trace the modules hold their old values
again: a tensor of the trace has no elements, and reading one raises an error of torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roamc import compat
from roamc.capture import python_state
from roamc.errors import CaptureError
from roamc.operators import ops

DEEP = 3
"""Levels of lists, dicts and sets inside others that are looked into, below the outermost."""

LONG = 1_000
"""Lists, dicts and sets of more elements are not looked into."""


@dataclass(frozen=True)
class Change:
    """An attribute of a module that forward set to a tensor of the trace, or to a list, dict or set of such tensors.

    Attributes:
        module: the module that has it.
        name: its name.
        varies: whether the tensor may be another in the next step: it is made of the batch, a weight or random numbers.
            True for a list, dict or set of tensors.
    """

    module: nn.Module
    name: str
    varies: bool


@contextlib.contextmanager
def put_back(modules: Sequence[nn.Module]) -> Iterator[list[Change]]:
    """Context manager: on exit, attributes of ``modules`` that were set to tensors of the trace get their old values.

    Lists, dicts and sets that hold such tensors on exit get their old elements back. Leave the context before the trace
    ends: behind it, every change counts as one that varies.

    Args:
        modules: all modules of the model.

    Yields:
        A list, empty until exit, which then gets a change for each attribute that was set.
    """
    before = [(module, dict(vars(module))) for module in modules]
    values = [value for _, own in before for value in own.values()]
    inside = {id(value): (value, type(value)(value)) for value in _containers(values, DEEP)}
    changes: list[Change] = []
    try:
        yield changes
    finally:
        for module, own in before:
            changes += _put_back(module, own)
        for value, content in [pair for pair in inside.values() if _holds_traced(pair[0], DEEP)]:
            refill(value, content)


def check_carried(model: nn.Module, changes: Sequence[Change], reads: python_state.Reads) -> None:
    """Refuse a step that reads an attribute and then sets it to a tensor: the next step would read the old value.

    A tensor that is the same in every step, such as a mask that eager makes once, is allowed: the captured step makes
    the tensor anew every time.

    Args:
        model: the model, for the names of its modules.
        changes: attributes that the step sets, as :func:`put_back` yields them.
        reads: attributes that the step reads.

    Raises:
        CaptureError: one line that names the attribute.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for change in changes:
        if change.varies and reads.has_read(change.module, change.name):
            owner = names.get(id(change.module)) or "the model"
            raise CaptureError(
                f"forward reads {change.name!r} of {owner} and then sets it to a tensor for the next step, which a "
                "captured step cannot carry over; make it a buffer (register_buffer), or use roamc.optimize or "
                "torch.compile"
            )


def _put_back(module: nn.Module, own: dict[str, Any]) -> list[Change]:
    """Give attributes of ``module`` that now hold tensors of the trace their values in ``own``; those not there go."""
    set_anew = {name: value for name, value in vars(module).items() if value is not own.get(name)}
    traced = {name: value for name, value in set_anew.items() if _is_traced(value)}
    for name in traced:
        if name in own:
            vars(module)[name] = own[name]
        else:
            del vars(module)[name]
    return [Change(module, name, varies(value)) for name, value in traced.items()]


def varies(value: Any) -> bool:
    """Return whether a tensor of the trace depends on anything that it is fed, or draws; True for lists of tensors."""
    node = compat.node_of(value) if isinstance(value, torch.Tensor) else None
    waiting, seen = [node], {node}
    while waiting:
        producer = waiting.pop()
        if producer is None or producer.op not in ("call_function", "get_attr"):
            return True
        if producer.op == "call_function" and ops.has_effect(producer.target):
            return True
        fresh = [argument for argument in producer.all_input_nodes if argument not in seen]
        seen.update(fresh)
        waiting += fresh
    return False


def _is_traced(value: Any) -> bool:
    return compat.is_traced(value) or (_is_plain(value) and _holds_traced(value, DEEP))


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is a list, dict or set that is looked into."""
    return type(value) in (list, dict, set) and len(value) <= LONG


def _items(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)


def _holds_traced(value: Any, depth: int) -> bool:
    """Whether a tensor of the trace is in a list, dict or set, or in those that it holds down to ``depth``."""
    items = _items(value)
    inner = [item for item in items if depth and _is_plain(item)]
    return any(map(compat.is_traced, items)) or any(_holds_traced(item, depth - 1) for item in inner)


def _containers(values: Sequence[Any], depth: int) -> Iterator[Any]:
    """The lists, dicts and sets among ``values``, and those that they hold down to ``depth``."""
    for value in filter(_is_plain, values):
        yield value
        if depth:
            yield from _containers(_items(value), depth - 1)


def refill(value: Any, content: Any) -> None:
    """Give a list, dict or set the elements that it had."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(content)
