"""What torch keeps private about groups of ranks: the group that a collective operator names."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch

from roamc.errors import OptionError

_EXCHANGES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Group to how often all of its ranks have exchanged texts."""

LOOK = timedelta(seconds=1)
"""The longest that a rank waits for the others before it looks again what they have sent.

It looks by itself: a store's own wait prints two lines of warnings each time that it ends before the keys are there.
"""

_PLANNED: ContextVar[Mapping[str, Sequence[int]]] = ContextVar("groups that are planned for", default={})  # noqa: B039
"""Name of a group of ranks that need not be there to the numbers of its ranks; this process counts as the first."""


@contextlib.contextmanager
def planned_for(groups: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Within this context collectives may name groups that no process has made; they can be planned and not run.

    The process group of this process, if it has one, is left alone.

    Args:
        groups: name of each group to the numbers of its ranks, among all ranks of the job.
    """
    before = _PLANNED.set({**_PLANNED.get(), **groups})
    try:
        yield
    finally:
        _PLANNED.reset(before)


@contextlib.contextmanager
def stand_in_group(ranks: int) -> Iterator[None]:
    """Within this context this process is the first of ``ranks`` ranks that are not there: nothing is sent.

    Raises:
        OptionError: it has a process group.
    """
    if torch.distributed.is_initialized():
        raise OptionError("this process has a process group already: leave fsdp out of the mesh, or the group")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def planned_groups() -> Sequence[str]:
    """Return the names of the groups of :func:`planned_for`, of those around this call."""
    return tuple(_PLANNED.get())


def ranks_in(group_name: Any) -> int | None:
    """Return how many ranks the group of a collective has; None if this process knows no such group.

    Args:
        group_name: the argument of an operator of ``_c10d_functional``: a name, or the group itself.
    """
    if planned := _planned(group_name):
        return len(planned)
    group = group_of_ranks(group_name)
    return None if group is None else int(group.size())


def is_planned_for(group_name: Any) -> bool:
    """Whether the group of a collective is one of :func:`planned_for`; ``group_name`` as for :func:`ranks_in`."""
    return bool(_planned(group_name))


def sums_in_one_order(group_name: Any) -> bool:
    """Return whether the same sum over the ranks of a group has the same bits each time.

    gloo sums in one order, and so does NCCL but by NVLS, in the switches between GPUs of compute capability 9 and
    above; ``NCCL_NVLS_ENABLE=0`` or an ``NCCL_ALGO`` without NVLS leaves that out. Of other backends it is unknown.

    Args:
        group_name: as for :func:`ranks_in`; of groups that are planned for the sums count as such.
    """
    if is_planned_for(group_name):
        return True
    group = group_of_ranks(group_name)
    backend = "" if group is None else str(torch.distributed.get_backend(group))
    if backend != "nccl":
        return backend in ("gloo", "fake")
    algorithms = os.environ.get("NCCL_ALGO", "")
    for_all = bool(algorithms) and ":" not in algorithms  # with a colon they are of some collectives alone
    without = for_all and algorithms.startswith("^") == ("NVLS" in algorithms.upper())
    return without or os.environ.get("NCCL_NVLS_ENABLE") == "0" or torch.cuda.get_device_capability()[0] < 9


def has_symmetric_memory(group_name: Any) -> bool:
    """Return whether the GPUs of a group read each other's memory, by ``enable_symm_mem_for_group`` of torch.

    Args:
        group_name: as for :func:`ranks_in`; of groups that are planned for, or whose name is none, they do not.
    """
    if is_planned_for(group_name) or not isinstance(group_name, str) or group_of_ranks(group_name) is None:
        return False
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    name: Any = group_name
    return bool(is_symm_mem_enabled_for_group(name))


def read_as_gathered(
    part: torch.Tensor, read: Callable[[torch.Tensor, int], None], whole: torch.Tensor, group_name: Any, needed: bool
) -> None:
    """Gather the ``part`` of every rank, and read each while the next is sent, on GPUs with symmetric memory.

    Args:
        part: rows of this rank, contiguous.
        read: called with the rows of each rank and its position in the group, in any order, on one of two streams.
        whole: memory for the rows of all ranks, one rank's behind another's.
        group_name: as for :func:`has_symmetric_memory`, which is true of it.
        needed: whether ``whole`` is read afterwards.
    """
    from torch.distributed._symmetric_memory import _pipelined_all_gather_and_consume

    _pipelined_all_gather_and_consume(part, read, whole, group_name, needed)


def sent_as_written(write: Callable[[int, torch.Tensor], None], received: torch.Tensor, group_name: Any) -> None:
    """Write rows for every rank, and send each while the next are written, on GPUs with symmetric memory.

    Args:
        write: called with the position of a rank in the group and memory for its rows, on one of two streams.
        received: memory for what the ranks have for this one, by rank, as many rows of each.
        group_name: as for :func:`has_symmetric_memory`, which is true of it.
    """
    from torch.distributed._symmetric_memory import _pipelined_produce_and_all2all

    _pipelined_produce_and_all2all(write, received, group_name)


def rank_in(group_name: Any) -> int:
    """Return the position of this process in the group of a collective, from 0; ``group_name`` as for :func:`ranks_in`.

    Raises:
        RuntimeError: this process knows no such group.
    """
    return int(_known_group(group_name).rank())


def known_rank_in(group_name: Any) -> int | None:
    """Return what :func:`rank_in` returns; 0 for a group that is planned for, None if this process knows no such group.

    Args:
        group_name: as for :func:`ranks_in`.
    """
    if _planned(group_name):
        return 0
    group = group_of_ranks(group_name)
    return None if group is None else int(group.rank())


def numbers_in(group_name: Any) -> list[int]:
    """Return the number, among all ranks of the job, of each rank of a group, in the group's order.

    Args:
        group_name: as for :func:`ranks_in`.

    Raises:
        RuntimeError: this process knows no such group.
    """
    if planned := _planned(group_name):
        return list(planned)
    return list(torch.distributed.get_process_group_ranks(_known_group(group_name)))


@dataclass(frozen=True)
class Absent:
    """A rank that has not come to an exchange.

    Attributes:
        why: what it has said of that, see :func:`withdraw`; empty if it did not come within the timeout.
    """

    why: str = ""


def exchanged(group_name: Any, text: str, attempt: int) -> list[str | Absent]:
    """Return what each rank of a group calls this function with, by position; every rank must call it.

    Texts go by the store in which the ranks of the group have found each other. Collectives of the group are left
    alone: a rank that runs one in the meantime, as its program is another one, is missed here, and nothing is mixed up.
    An exchange that a rank has missed counts on no rank, so that the next one is the same for all.

    Args:
        group_name: as for :func:`ranks_in`.
        text: what the other ranks get.
        attempt: number of the graph that this process compiles; waiting ends if a rank withdraws from it.

    Returns:
        A text for each rank, or that it is absent: it has withdrawn, or not called within the timeout of the group.

    Raises:
        ConnectionError: the store does not answer, as the process that holds it has ended.
    """
    try:
        return _exchanged(group_name, text, attempt)
    except torch.distributed.DistNetworkError as error:
        raise ConnectionError(str(error)) from error


def _exchanged(group_name: Any, text: str, attempt: int) -> list[str | Absent]:
    from torch.distributed import distributed_c10d

    group = group_of_ranks(group_name)
    ranks, (kind, store) = int(group.size()), distributed_c10d._world.pg_map.get(group, ("", None))
    if kind == "fake" or ranks == 1:  # one process that stands for all
        return [text] * ranks
    if store is None:
        gathered: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(gathered, text, group)
        return gathered
    count = _EXCHANGES.get(group, 0) + 1
    keys = [f"roamc/{count}/{position}" for position in range(ranks)]
    own = int(group.rank())
    withdrawals = [_withdrawn(attempt, count, position) for position in range(ranks)]
    if any(store.check([key]) for key in withdrawals):  # what that rank has sent since is of another graph
        absent = [Absent(store.get(key).decode() if store.check([key]) else "") for key in withdrawals]
        return [*absent[:own], text, *absent[own + 1 :]]
    store.set(keys[own], text)
    if not _all_come(store, keys, withdrawals):
        texts = [_text_or_reason(store, key, why) for key, why in zip(keys, withdrawals, strict=True)]
        if any(isinstance(answer, Absent) for answer in texts):
            store.delete_key(keys[own])  # else who was missed reads it in its next exchange
            return texts
    _EXCHANGES[group] = count
    store.delete_key(f"roamc/{count - 1}/{own}")  # all ranks are past it, or they would not have come to this one
    at_once = getattr(store, "has_extended_api", lambda: False)()  # torch's stubs of a store lack it
    return [text.decode() for text in (store.multi_get(keys) if at_once else map(store.get, keys))]


def leave_text(group_name: Any, text: str) -> None:
    """Give the other ranks of a group ``text`` at their next exchange, which counts for this rank: it does not wait.

    Args:
        group_name: as for :func:`ranks_in`.
        text: what the other ranks get.
    """
    from torch.distributed import distributed_c10d

    group = group_of_ranks(group_name)
    kind, store = distributed_c10d._world.pg_map.get(group, ("", None))
    if kind != "fake" and store is not None and int(group.size()) > 1:
        count = _EXCHANGES[group] = _EXCHANGES.get(group, 0) + 1
        with contextlib.suppress(RuntimeError):  # with the store, those are gone who could wait
            store.set(f"roamc/{count}/{int(group.rank())}", text)


def withdraw(attempt: int, why: str) -> None:
    """Tell the other ranks of every group of this process that it comes to no further exchange for a graph.

    Args:
        attempt: as for :func:`exchanged`; ranks that compile another graph at the same time are not told.
        why: the reason, for :class:`Absent`.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed import distributed_c10d

    for group, (kind, store) in distributed_c10d._world.pg_map.items():
        if kind != "fake" and store is not None and int(group.size()) > 1:
            count = _EXCHANGES.get(group, 0) + 1
            with contextlib.suppress(RuntimeError):  # with the store, those are gone who could wait
                store.set(_withdrawn(attempt, count, int(group.rank())), why or "unknown")


def _withdrawn(attempt: int, count: int, position: int) -> str:
    return f"roamc/withdrawn/{attempt}/{count}/{position}"


def _text_or_reason(store: Any, key: str, why: str) -> str | Absent:
    if store.check([key]):
        return str(store.get(key).decode())
    return Absent(store.get(why).decode() if store.check([why]) else "")


def _all_come(store: Any, keys: list[str], withdrawals: Sequence[str]) -> bool:
    """Wait for all of ``keys``, one of ``withdrawals``, or the store's timeout; return whether all are there."""
    begun, limit = time.monotonic(), store.timeout.total_seconds()
    while not store.check(keys):
        waited = time.monotonic() - begun
        if waited >= limit or any(store.check([key]) for key in withdrawals):
            return bool(store.check(keys))
        time.sleep(min(LOOK.total_seconds(), max(waited / 10, 0.001), limit - waited))
    return True


def _planned(group_name: Any) -> Sequence[int]:
    return _PLANNED.get().get(group_name, ()) if isinstance(group_name, str) else ()


def all_gather(out: torch.Tensor, input: torch.Tensor, group: Any) -> Any:
    """Begin an all-gather of ``input`` into ``out`` among a process group's ranks, and return its work."""
    return _either("all_gather_single", "all_gather_into_tensor")(out, input, group=group, async_op=True)


def reduce_scatter(out: torch.Tensor, input: torch.Tensor, reduction: Any, group: Any) -> Any:
    """Begin a reduce-scatter of ``input`` into ``out`` among a process group's ranks, and return its work.

    ``reduction`` is one of ``torch.distributed.ReduceOp``.
    """
    return _either("reduce_scatter_single", "reduce_scatter_tensor")(out, input, reduction, group, async_op=True)


def _either(name: str, before: str) -> Any:
    """The function ``name`` of torch.distributed, which was called ``before`` until torch 2.13."""
    return getattr(torch.distributed, name, None) or getattr(torch.distributed, before)


def _known_group(group_name: Any) -> Any:
    group = group_of_ranks(group_name)
    if group is None:
        raise RuntimeError(f"this process knows no group of ranks that is called {group_name!r}")
    return group


def group_of_ranks(group_name: Any) -> Any:
    """Return the process group of a collective, ``group_name`` as for :func:`ranks_in`; None where there is none."""
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
