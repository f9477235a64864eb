"""Random operators that run twice: the generator's state is kept, and the second run draws the same numbers."""

from __future__ import annotations

from typing import Any

import torch


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
