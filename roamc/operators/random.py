"""Reruns of random operators with the numbers of the first run, and an operator that draws a dropout's mask alone.

In ATen a dropout that hands out its mask is one operator. Here the mask has an operator of its own, so that the result
of the dropout can be recomputed from a mask that is kept, by two products: to draw again takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from roamc.units import Bytes

LIBRARY = torch.library.Library("roamc", "FRAGMENT")
LIBRARY.define(
    "dropout_mask(SymInt[] size, SymInt[] stride, float keep, *, Device? device=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl(LIBRARY, "dropout_mask", "CompositeExplicitAutograd")
def _dropout_mask(
    size: Sequence[int], stride: Sequence[int], keep: float, *, device: torch.device | None = None
) -> torch.Tensor:
    """True with probability ``keep``: draws what ``aten.native_dropout(x, 1 - keep, True)`` draws on a CPU."""
    return torch.empty_strided(size, stride, dtype=torch.bool, device=device).bernoulli_(keep)


dropout_mask = torch.ops.roamc.dropout_mask.default
"""``roamc::dropout_mask(size, stride, keep, *, device)``: draws a bool tensor, True with probability ``keep``."""


FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Dtypes that :func:`rounded` can round to, and that a dropout may have to be split."""


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return ``value`` rounded to ``dtype``, one of :data:`FLOATS`, as a tensor of that dtype holds it: ties to even.

    No tensor is made: under the fake mode of a compilation it would be a fake one.
    """
    if dtype is torch.float64:
        return value
    narrow = np.float32(value)
    if dtype is torch.float16:
        with np.errstate(over="ignore"):  # infinite, as in torch
            narrow = np.float32(np.float16(narrow))
    elif dtype is torch.bfloat16:  # the upper half of the bits of a float32
        bits = int(narrow.view(np.uint32))
        narrow = np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return float(narrow)


def save_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the default generator of ``device``, as a tensor of uint8 on the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def state_bytes(device: torch.device) -> Bytes:
    """Return the size of what :func:`save_rng_state` returns for ``device``; a GPU need not be there."""
    return 16 if device.type == "cuda" else torch.get_rng_state().numel()


def replay(state: torch.Tensor, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a random operator again with the numbers that it drew when its generator was in ``state``.

    The generator is the default one of the first tensor's device in ``args``, else of the keyword ``device``, else of
    the CPU. Its present state is restored afterwards.

    Args:
        state: what :func:`save_rng_state` returned before the first run.
        operator: the random operator.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        What ``operator`` returns.
    """
    device_argument = kwargs.get("device")
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device(device_argument or "cpu"))
    present_state = save_rng_state(device)
    _set(device, state)
    try:
        return operator(*args, **kwargs)
    finally:
        _set(device, present_state)


def _set(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        # torch looks for the state of a view at its offset times 5056 (and not at its offset): no view goes in.
        torch.set_rng_state(state.clone() if state.storage_offset() else state)
