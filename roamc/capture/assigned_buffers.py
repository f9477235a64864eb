"""Buffers that a step assigns anew, as ``self.average = 0.9 * self.average + x.mean(0)`` does.

The step writes to the buffers that the model has when it begins, so the trace ends with copies into these:

    self.average = value                     average.copy_(value)
    self.old, self.new = self.new, value     kept = new.clone(); old.copy_(kept); new.copy_(value)

What is no change of values is refused: the next step would find the model as it was before this one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from roamc.capture.attributes import varies
from roamc.compat import CaptureMode, identity
from roamc.compat_dtensor import part_of
from roamc.errors import CaptureError


def buffers_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of ``model`` by all of their names, of which tied ones have several."""
    return dict(model.named_buffers(remove_duplicate=False))


def write_back(model: nn.Module, held: Mapping[str, torch.Tensor], mode: CaptureMode) -> None:
    """Copy each buffer that the model has assigned anew into the one that it had, so that the change is kept.

    Args:
        model: the model behind the call of the loss function, with the stand-ins of the trace.
        held: what :func:`buffers_by_name` returned before that call.
        mode: of the trace, which knows what the step has written to.

    Raises:
        CaptureError: a buffer has come, gone, got another shape or dtype, or comes to share memory that is written with
            another buffer or a parameter.
    """
    buffers = buffers_by_name(model)
    _check_names(buffers, held)
    assigned = {name: value for name, value in buffers.items() if name in held and value is not held[name]}
    for name, value in assigned.items():
        if value.shape != held[name].shape or value.dtype != held[name].dtype:
            raise CaptureError(f"buffer {name!r} changes shape or dtype during the step; keep both fixed")
    _check_apart(model, buffers, held, assigned, mode)
    written = {identity(part_of(held[name])) for name in assigned}
    with torch.no_grad():
        values = {n: x.clone() if identity(part_of(x)) in written else x for n, x in assigned.items()}
        for name, value in values.items():
            held[name].copy_(value)


def _check_names(buffers: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    for name in held:
        if name not in buffers:
            raise CaptureError(
                f"the step takes buffer {name!r} away, which the next step would find again; change the model before "
                "the step"
            )
    for name, value in buffers.items():
        if name not in held and varies(value):
            raise CaptureError(
                f"the step makes buffer {name!r}, which the next step would not find; give it a tensor of its shape "
                "before the first step"
            )


def _check_apart(
    model: nn.Module,
    buffers: Mapping[str, torch.Tensor],
    held: Mapping[str, torch.Tensor],
    assigned: Mapping[str, torch.Tensor],
    mode: CaptureMode,
) -> None:
    """Refuse a buffer that shares memory that is written with another one from now on, or was the same tensor before.

    The same holds for the memory of a parameter that is trained. Memory that nobody writes may be shared, such as that
    of the frequencies that a model chooses by the length of its batch.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained_names = {name for name, _ in trained}
    sharing, tied = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
    for name, tensor in (*trained, *buffers.items()):
        sharing[identity(part_of(tensor))].append(name)
        tied[id(held.get(name, tensor))].append(name)
    for name, value in assigned.items():
        after, before = sharing[identity(part_of(value))], tied[id(held[name])]
        is_written = mode.writes_to(part_of(value)) or not trained_names.isdisjoint(after)
        others = [one for one in (*before, *(after if is_written else ())) if one != name]
        if others and after != before:
            raise CaptureError(
                f"the step assigns a tensor to buffer {name!r} that shares memory with {others[0]!r}, or did before, "
                f"and the next step would not find it so; assign a .clone(), or write by {name}.copy_()"
            )
