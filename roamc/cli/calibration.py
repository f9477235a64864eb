"""``roamc calibrate``: one process measures operators; under ``torchrun`` all ranks then measure their links."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from roamc.cli.ranks import Ranks
from roamc.cost import DeviceProfile, store_profile
from roamc.cost.links import Placement, measure_links
from roamc.cost.measure import calibrate, checked_device
from roamc.cost.profile import NETWORK, NODE


def measured(ranks: Ranks, *, quick: bool, say: Callable[[str, int], None] | None = None) -> DeviceProfile:
    """Return the profile of this machine's device, with its links where there are several ranks; the same on all.

    Args:
        ranks: the ranks that run this together.
        quick: use tiny tensors; the numbers mean nothing; for tests.
        say: called before every round of measurements with what is done, and the number of rounds done before.

    Raises:
        ProfileError: the device cannot be measured, or the links cannot.
        RanksError: the same, of several ranks; says which.
    """
    device = ranks.each(lambda: checked_device(ranks.device))
    profile = ranks.first(lambda: calibrate(device, quick=quick, say=say))
    if ranks.placed is None:
        return profile
    placed = ranks.placed
    links = ranks.each(lambda: measure_links(device, placed, profile.overhead, quick=quick, say=say))
    return dataclasses.replace(
        profile, links={**profile.links, **links}, source=f"{profile.source}; {_source(placed, device)}"
    )


def busy(threads: int) -> str:
    """Return a sentence about other load on this machine beside ``threads`` of torch's; "" where they have cores."""
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if load + threads <= cores + 1:
        return ""
    return (
        f"other processes were busy here, with a load average of {load:.1f} on {cores} cores: what was measured may be "
        "too slow; calibrate again when the machine is idle"
    )


def _source(placed: Placement, device: torch.device) -> str:
    links = " and ".join({NODE: "in a node", NETWORK: "between nodes"}[link] for link in placed.rings())
    nodes = "1 node" if placed.nodes == 1 else f"{placed.nodes} nodes"
    backend = {"cpu": "gloo", "cuda": "NCCL"}[device.type]
    return f"links {links} by {backend} among {placed.ranks} ranks on {nodes}"


def stored(ranks: Ranks, profile: DeviceProfile, output: Path | None) -> Path:
    """Write ``profile`` to ``output``, or where roamc looks, on the first rank alone; return the path on every rank.

    Raises:
        OSError: the file cannot be written.
        RanksError: the same, of several ranks.
    """
    return ranks.first(lambda: store_profile(profile, output))
