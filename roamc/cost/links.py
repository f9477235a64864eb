"""Links between ranks, measured by rings among them: what ``roamc calibrate`` does under ``torchrun``.

    seconds = overhead + turns latency + sent / bandwidth                             fit()

Turns and sent bytes of a collective are those of :func:`roamc.cost.collectives.ring`, which also predicts with the
result. In every round each collective runs at each size, and the slowest rank's time counts, since no rank goes on
before it. The median of the rounds is kept: a collective waits for the network and for other processes, so that a
shortest time is one that no step sees again.

    in a node        a ring over the ranks of each node, of all nodes at the same time
    between nodes    a ring over the first ranks of all nodes, one over the second ones and so on, all at the same time:
                     ranks share their node's way out, as replicas of a model that is split within a node do
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from roamc.compat_groups import all_gather, reduce_scatter
from roamc.cost.collectives import WORDS, ring
from roamc.cost.profile import LEAST, NETWORK, NODE, Rates
from roamc.errors import ProfileError
from roamc.units import Bytes, Seconds

SIZES: Mapping[str, Sequence[Bytes]] = {
    "cpu": [1 << power for power in range(10, 25, 2)],
    "cuda": [1 << power for power in range(12, 29, 2)],
}
"""Device type to the bytes of the tensors that are reduced, gathered and scattered."""
QUICK: Sequence[Bytes] = (1 << 10, 1 << 24)
"""The same where ``quick`` is set: so far apart that the larger ones take longer on any machine."""
ROUNDS, QUICK_ROUNDS = 9, 3
"""How often every collective is timed at every size, and how often where ``quick`` is set."""
SMALL: Bytes = 1 << 18
"""Collectives of at most this many bytes run :data:`CALLS` times between two readings of the clock, others once."""
CALLS = 10


@dataclass(frozen=True)
class Placement:
    """Where this process is among the ranks that measure together.

    Attributes:
        rank: number of this rank, from 0.
        ranks: how many ranks there are.
        in_node: how many of them each node has; those of a node have numbers one after the other.
    """

    rank: int
    ranks: int
    in_node: int

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.ranks // self.in_node

    def rings(self) -> dict[str, list[list[int]]]:
        """Return NODE and NETWORK to the ranks of each ring that measures such links; without rings of one rank."""
        numbers = np.arange(self.ranks).reshape(self.nodes, self.in_node)
        by_link = {NODE: numbers.tolist(), NETWORK: numbers.T.tolist()}
        return {link: rings for link, rings in by_link.items() if len(rings[0]) > 1}


@dataclass(frozen=True)
class Sample:
    """One collective among some ranks.

    Attributes:
        turns: turns of the ring.
        sent: bytes that each rank sends.
        seconds: how long it takes.
    """

    turns: int
    sent: Bytes
    seconds: Seconds


def fit(samples: Sequence[Sample], overhead: Seconds = 0.0) -> dict[str, float]:
    """Return the "latency" and "bandwidth" with the least squares of relative errors of the seconds of ``samples``.

    Relative errors let a short collective count as much as a long one. Neither number is below zero: a latency that
    would be is the least that a profile may have.

    Args:
        samples: at least two of different turns and bytes.
        overhead: seconds of a call that are no part of the ring.

    Raises:
        ProfileError: the samples do not take longer for more bytes.
    """
    durations = np.array([max(sample.seconds - overhead, LEAST) for sample in samples])
    turns = np.array([sample.turns for sample in samples]) / durations
    sent = np.array([sample.sent for sample in samples]) / durations
    (latency, of_a_byte), *_ = np.linalg.lstsq(np.stack([turns, sent], axis=1), np.ones(len(durations)))
    if latency < LEAST:
        latency, of_a_byte = LEAST, sent.sum() / (sent @ sent)
    if of_a_byte <= 0:
        raise ProfileError("collectives took no longer for more bytes: measure on a machine with nothing else to do")
    return {"latency": _digits(latency), "bandwidth": _digits(1 / of_a_byte)}


def measure_links(
    device: torch.device,
    placed: Placement,
    overhead: Seconds,
    *,
    quick: bool = False,
    say: Callable[[str, int], None] | None = None,
) -> Rates:
    """Measure the links between the ranks of the process group; all of them must call it, and all get the same result.

    The group must have a backend for CPU tensors, and one for ``device``.

    Args:
        device: where the tensors of this rank lie.
        placed: this rank's place among all.
        overhead: seconds of a call, as the profile has them that gets the result.
        quick: use two sizes and three rounds; the result is valid but its numbers mean nothing; for tests.
        say: called before every round with what is done, and the number of rounds done before.

    Returns:
        The links of a profile; NODE is missing where each node has one rank, NETWORK where there is one node.

    Raises:
        ProfileError: as :func:`fit`.
    """
    links: dict[str, dict[str, float]] = {}
    for link, rings in placed.rings().items():
        groups = [dist.new_group(ranks) for ranks in rings]
        mine = next(at for at, ranks in enumerate(rings) if placed.rank in ranks)
        samples = _timed(_Ring(device, groups[mine], len(rings[mine])), quick, say)
        links[link] = fit(samples, overhead)
    if NODE in links:
        links[NODE]["ranks"] = placed.in_node
    return links


@dataclass(frozen=True)
class _Ring:
    """The ranks of one ring, seen from one of them: where its tensors lie, its group, and the number of ranks."""

    device: torch.device
    group: Any
    ranks: int

    def together(self) -> None:
        """Wait until this device has nothing to do, and for the other ranks."""
        self.finish()
        dist.all_reduce(torch.zeros(1), group=self.group)

    def finish(self) -> None:
        """Wait until this device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class _Run:
    """A collective that can be run again and again: how often its ring sends ``whole`` bytes, and what runs it."""

    times: int
    whole: Bytes
    work: Callable[[], object]


def _runs(among: _Ring, size: Bytes) -> list[_Run]:
    """Prepare each collective of a tensor of at least ``size`` bytes. It has zeros, whose sums stay zeros."""
    whole = torch.zeros(among.ranks * -(-size // (4 * among.ranks)), device=among.device)
    part = torch.zeros(len(whole) // among.ranks, device=among.device)
    works: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=among.group),
        "all_gather_into_tensor": lambda: all_gather(whole, part, among.group).wait(),
        "reduce_scatter_tensor": lambda: reduce_scatter(part, whole, dist.ReduceOp.SUM, among.group).wait(),
    }
    return [_Run(WORDS[name][1], whole.numel() * whole.itemsize, work) for name, work in works.items()]


def _timed(among: _Ring, quick: bool, say: Callable[[str, int], None] | None) -> list[Sample]:
    """Time every collective at every size, on all ranks at once, and return the medians of the slowest rank's times."""
    runs = [run for size in (QUICK if quick else SIZES[among.device.type]) for run in _runs(among, size)]
    for run in runs:  # the first call sets up connections
        run.work()
    rounds = []
    for done in range(QUICK_ROUNDS if quick else ROUNDS):
        if say is not None:
            say(f"measuring links among {among.ranks} ranks", done)
        rounds.append([_seconds(among, run) for run in runs])
    slowest = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    medians = slowest.median(dim=0).values.tolist()
    return [
        Sample(*ring(run.times, run.whole, among.ranks), seconds) for run, seconds in zip(runs, medians, strict=True)
    ]


def _seconds(among: _Ring, run: _Run) -> Seconds:
    """The seconds of one call of a collective, begun on all ranks at once."""
    calls = CALLS if run.whole <= SMALL else 1
    among.together()
    start = time.perf_counter()
    for _ in range(calls):
        run.work()
    among.finish()
    return (time.perf_counter() - start) / calls


def _digits(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")
