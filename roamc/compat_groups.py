"""What torch keeps private about groups of ranks: the group that a collective operator names."""

from __future__ import annotations

from typing import Any

import torch


def ranks_in(group_name: Any) -> int | None:
    """Return how many ranks the group of a collective has; None if this process knows no such group.

    Args:
        group_name: the argument of an operator of ``_c10d_functional``: a name, or the group itself.
    """
    group = _group(group_name)
    return None if group is None else int(group.size())


def rank_in(group_name: Any) -> int:
    """Return the position of this process in the group of a collective, from 0; ``group_name`` as for :func:`ranks_in`.

    Raises:
        RuntimeError: this process knows no such group.
    """
    group = _group(group_name)
    if group is None:
        raise RuntimeError(f"no group of ranks is called {group_name!r}: torch.distributed is not initialized")
    return int(group.rank())


def _group(group_name: Any) -> Any:
    if not isinstance(group_name, str):
        return group_name
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _resolve_process_group

    name: Any = group_name
    try:
        return _resolve_process_group(name)
    except (RuntimeError, LookupError):  # a graph from another process
        return None
