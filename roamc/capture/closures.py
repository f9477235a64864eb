"""Parameters and buffers that a step reads past the model, through a name of its own:

    w = model.head.weight
    loss_fn = lambda model, x: model(x).sum() + w.square().sum()

The trace puts other tensors in the model's place, and they have to be put in the place of ``w`` as well: else its
gradient would be lost, and the graph would not know that it reads what the update writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from roamc import compat_hooks
from roamc.errors import CaptureError


class Closures(TorchFunctionMode):
    """While inside, every function of torch that is handed a held tensor gets the traced one for it.

    Only what torch is handed directly, or in lists, tuples and dicts.
    """

    def __init__(self, traced: Mapping[int, torch.Tensor]) -> None:
        """``traced``: identity of a parameter or buffer to the tensor in its place."""
        super().__init__()
        self.traced = traced

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*self._swapped(args), **self._swapped(kwargs or {}))

    def _swapped(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.traced.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self._swapped, value))
        if type(value) is dict:
            return {key: self._swapped(item) for key, item in value.items()}
        return value


def check_origins(loss: torch.Tensor, held: Mapping[int, str]) -> None:
    """Refuse a loss whose gradient flows to a model's parameter past the trace.

    Args:
        loss: traced.
        held: identity of each parameter to its name.

    Raises:
        CaptureError: a tensor that was computed from a parameter before the step is used in it; names the parameter.
    """
    for variable in compat_hooks.leaves_behind(loss):
        if id(variable) in held:
            raise CaptureError(
                f"the step uses a tensor that was computed from parameter {held[id(variable)]!r} before it began; "
                "compute it inside loss_fn, or detach and clone it"
            )
