"""Texts that ranks exchange by their store, with threads in the place of ranks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roamc import compat_groups, exchange
from roamc.errors import RanksError
from tests.parallel import some_group


class Group:
    """What one of two ranks has of their group."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = lambda: rank, lambda: 2


def test_an_exchange_that_a_rank_has_missed_counts_on_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store, groups = dist.HashStore(), [Group(0), Group(1)]
    process_groups: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    for group in groups:
        monkeypatch.setitem(process_groups, group, ("gloo", store))

    def both(*texts: str) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(compat_groups.exchanged, groups, texts, (1, 1)))

    assert both("a", "b") == [["a", "b"]] * 2
    store.set_timeout(timedelta(milliseconds=100))
    assert compat_groups.exchanged(groups[0], "before", 1) == ["before", compat_groups.Absent()]
    store.set_timeout(timedelta(seconds=30))
    assert both("c", "d") == [["c", "d"]] * 2


def test_a_rank_that_waits_for_another_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat_groups, "LOOK", timedelta(milliseconds=10))
    begun = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    stores = (begun, dist.TCPStore("127.0.0.1", begun.port, 2, wait_for_workers=False))
    groups = [Group(0), Group(1)]
    process_groups: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    for group, store in zip(groups, stores, strict=True):
        monkeypatch.setitem(process_groups, group, ("gloo", store))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(compat_groups.exchanged, groups[0], "a", 1)
        time.sleep(0.1)
        assert compat_groups.exchanged(groups[1], "b", 1) == ["a", "b"]
        assert first.result() == ["a", "b"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("backend", "capability", "environment", "repeats"),
    [
        ("gloo", 9, {}, True),
        ("mpi", 9, {}, False),
        ("nccl", 8, {}, True),
        ("nccl", 9, {}, False),
        ("nccl", 9, {"NCCL_NVLS_ENABLE": "0"}, True),
        ("nccl", 9, {"NCCL_ALGO": "^NVLS"}, True),
        ("nccl", 9, {"NCCL_ALGO": "Ring"}, True),
        ("nccl", 9, {"NCCL_ALGO": "^Tree"}, False),
        ("nccl", 9, {"NCCL_ALGO": "allreduce:ring"}, False),
    ],
)
def test_sums_repeat_where_the_backend_has_one_order(
    backend: str, capability: int, environment: dict[str, str], repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_NVLS_ENABLE", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    assert compat_groups.sums_in_one_order(object()) is repeats
    assert not compat_groups.sums_in_one_order("a group that nobody knows")


def test_sums_of_a_planned_group_repeat() -> None:
    with compat_groups.planned_for({"tp": (0, 1)}):
        assert compat_groups.sums_in_one_order("tp")


def test_a_rank_that_withdraws_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store, first, second = dist.HashStore(), Group(0), Group(1)
    process_groups: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(compat_groups, "LOOK", timedelta(milliseconds=10))
    with monkeypatch.context() as alone:
        alone.setitem(process_groups, second, ("gloo", store))
        compat_groups.withdraw(3, "no such operator")
    monkeypatch.setitem(process_groups, first, ("gloo", store))
    store.set_timeout(timedelta(minutes=10))
    assert compat_groups.exchanged(first, "", 3) == ["", compat_groups.Absent("no such operator")]
    store.set_timeout(timedelta(milliseconds=30))
    assert compat_groups.exchanged(first, "", 4) == ["", compat_groups.Absent()]


def test_a_store_that_ended_with_its_process_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    held = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    asked, group = dist.TCPStore("127.0.0.1", held.port, None, False), Group(1)
    process_groups: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    monkeypatch.setitem(process_groups, group, ("gloo", asked))
    monkeypatch.setattr(exchange, "numbers_in", lambda group: [0, 1])
    del held
    with pytest.raises(RanksError, match=r"the store in which ranks 0, 1 meet to plan it does not answer: .* ended"):
        exchange.texts_of(group, "", "Model", "plan it")


def test_a_group_that_is_not_known_is_no_other_group() -> None:
    with pytest.raises(RuntimeError, match="knows no group of ranks that is called 'elsewhere'"):
        compat_groups.numbers_in("elsewhere")


def test_symmetric_memory_is_that_of_groups_that_torch_knows() -> None:
    from torch.distributed import _symmetric_memory

    with some_group():
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        assert not compat_groups.has_symmetric_memory(name)
        with _symmetric_memory._test_mode({name}):
            assert compat_groups.has_symmetric_memory(name)
            assert not compat_groups.has_symmetric_memory("elsewhere")
            with compat_groups.planned_for({name: (0, 1)}):
                assert not compat_groups.has_symmetric_memory(name)
