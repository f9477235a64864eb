"""Ranks that ``torchrun`` has started with one command line: what one of them does for all, and how they fail together.

A rank that raises an error alone leaves the others waiting for it. So what can fail is done by
:meth:`Ranks.each` or :meth:`Ranks.first`: all ranks learn of an error, and each raises it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from roamc.cost.links import Placement
from roamc.errors import OptionError, RanksError

T = TypeVar("T")

PATIENCE = datetime.timedelta(minutes=10)
"""How long a rank waits for the others; the first one measures operators in the meantime."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that run one command line.

    Attributes:
        placed: this rank's place among them; None where this process is alone.
        device: what this rank measures, such as "cpu" or "cuda:1".
        said: puts an error in words, in one line.
    """

    placed: Placement | None
    device: str
    said: Callable[[Exception], str]

    @property
    def number(self) -> int:
        """The number of this rank; 0 if it is alone."""
        return 0 if self.placed is None else self.placed.rank

    def each(self, work: Callable[[], T]) -> T:
        """Call ``work`` on every rank and return what it returns here.

        Raises:
            RanksError: ``work`` failed on a rank; all raise that of the first rank that failed. A process that is alone
                raises what ``work`` raises.
        """
        if self.placed is None:
            return work()
        result, own, failure = None, None, ""
        try:
            result = work()
        except Exception as error:  # it is raised below, on all ranks
            own, failure = error, self.said(error)
        failures: list[Any] = [""] * self.placed.ranks
        dist.all_gather_object(failures, failure)
        for rank, text in enumerate(failures):
            if text:
                raise RanksError(f"rank {rank}: {text}") from own
        return result  # type: ignore[return-value]

    def first(self, work: Callable[[], T]) -> T:
        """Call ``work`` on the first rank alone and return its result, which must be data, on every rank.

        Raises:
            RanksError: as :meth:`each`.
        """
        result = self.each(lambda: work() if self.number == 0 else None)
        if self.placed is None:
            return result  # type: ignore[return-value]
        results = [result]
        dist.broadcast_object_list(results, src=0)
        return results[0]  # type: ignore[return-value]


@contextlib.contextmanager
def among_ranks(device: str, said: Callable[[Exception], str]) -> Iterator[Ranks]:
    """Context manager: join the other ranks that ``torchrun`` has started, and leave them at the end.

    They talk by gloo, and by NCCL for tensors on GPUs. Without ``torchrun`` this process is alone.

    Args:
        device: as the user names it; for "cuda" each rank has the GPU of its number in its node, and torch uses that
            from then on if it is there.
        said: as for :class:`Ranks`.

    Raises:
        OptionError: ``torchrun`` has started one rank, or ``device`` is a GPU with a number.
        RanksError: nodes have different numbers of ranks.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield Ranks(None, device, said)
        return
    numbers = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    own = _own_device(device, numbers)
    with_nccl = own.startswith("cuda") and torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if with_nccl else "gloo", timeout=PATIENCE)
    try:
        placed = Placement(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_WORLD_SIZE"])
        ranks = Ranks(placed, own, said)
        ranks.each(lambda: _check_nodes(placed))
        yield ranks
    finally:
        dist.destroy_process_group()


def _own_device(device: str, numbers: Mapping[str, int]) -> str:
    """The device of this rank; where it is a GPU that is there, torch uses it from now on."""
    if numbers["WORLD_SIZE"] == 1:
        raise OptionError(
            "torchrun has started one rank, and links are between several: give --nproc-per-node 2 or more, or run "
            "roamc calibrate without torchrun"
        )
    if device.startswith("cuda:"):
        raise OptionError(f"under torchrun each rank takes the GPU of its own number: --device cuda, not {device}")
    if device != "cuda":
        return device
    if numbers["LOCAL_RANK"] < torch.cuda.device_count():
        torch.cuda.set_device(numbers["LOCAL_RANK"])
    return f"cuda:{numbers['LOCAL_RANK']}"


def _check_nodes(placed: Placement) -> None:
    """Check, on all ranks at once, that every node has as many ranks as the first one.

    Raises:
        OptionError: names the numbers of ranks.
    """
    each: list[Any] = [0] * placed.ranks
    dist.all_gather_object(each, placed.in_node)
    if len(set(each)) > 1:
        numbers = ", ".join(map(str, sorted(set(each))))
        raise OptionError(f"nodes have {numbers} ranks: links are measured among nodes with one number of ranks")
