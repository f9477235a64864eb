"""Texts that ranks exchange by their store, with threads in the place of ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from roamc import compat_groups


class Group:
    """What one of two ranks has of their group."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = lambda: rank, lambda: 2


def test_an_exchange_that_a_rank_has_missed_counts_on_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store, groups = dist.HashStore(), [Group(0), Group(1)]
    known: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    for group in groups:
        monkeypatch.setitem(known, group, ("gloo", store))

    def both(*texts: str) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(compat_groups.exchanged, groups, texts))

    assert both("a", "b") == [["a", "b"]] * 2
    store.set_timeout(timedelta(milliseconds=100))
    assert compat_groups.exchanged(groups[0], "before") == ["before", None]
    store.set_timeout(timedelta(seconds=30))
    assert both("c", "d") == [["c", "d"]] * 2
