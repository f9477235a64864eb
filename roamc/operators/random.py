"""Random operators that run twice, the second time with the numbers of the first; and dropout's mask by itself.

A dropout that hands out its mask is one operator in ATen. Here its mask is drawn by an operator of ours, so that what
was dropped can be made again from a mask that is kept: two products, where a second draw takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
"""Reads nothing: the mask of a tensor of this size and these strides."""


def save_rng_state(device: torch.device) -> torch.Tensor:
    """The state of ``device``'s default generator, as bytes."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def replay(state: torch.Tensor, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """``operator(*args)`` with the numbers it drew when the generator was in ``state``; its state stays as it is."""
    given = kwargs.get("device")
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device(given or "cpu"))
    now = save_rng_state(device)
    _set(device, state)
    try:
        return operator(*args, **kwargs)
    finally:
        _set(device, now)


def _set(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        # torch looks for the state of a view at its offset times 5056 (and not at its offset): no view goes in.
        torch.set_rng_state(state.clone() if state.storage_offset() else state)
