"""Plans that are kept from one run to the next: planning takes seconds, and the same again is the same plan.

A plan that took long is written to the user's cache folder under a hash of all that it depends on. A run with the same
hash applies it, and checks what it does, as it does with a plan of the option ``plan``; where that fails it plans anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import logging
import os
import time
from pathlib import Path

import torch

from roamc import cost, files, ticker
from roamc.compat_groups import numbers_in
from roamc.cost.profile import device_model
from roamc.errors import RoamcError
from roamc.graph import TrainGraph, copied, main_device, operators
from roamc.graph.fingerprint import fingerprint
from roamc.operators.schemas import group_of
from roamc.options import Options
from roamc.planning import search
from roamc.planning.plan import KEPT, Plan, load_plan
from roamc.planning.planned import Planned
from roamc.units import Seconds

WORTH: Seconds = 1.0
"""Planning that takes less is done again: to apply a plan takes a fifth to a third of the time."""

MOST = 100
"""Plans that are kept, of about 50 kB to 1 MB each: those that were used last."""

BESIDE = ("cache", "max_plans", "plan", "profile", "strict", "tune")
"""Options that no plan depends on, or that count by what they name."""

log = logging.getLogger(__name__)


def run(graph: TrainGraph, options: Options) -> Planned:
    """Plan a graph as :func:`roamc.planning.search.run` does, by the plan of an earlier run where one is kept.

    Raises:
        RoamcError: as :func:`roamc.planning.search.run` raises.
    """
    file = file_for(graph, options)
    planned = taken(file, graph, options)
    if planned is None:
        planned = search.run(graph, options)
        keep(file, planned.plan)
    return planned


def file_for(graph: TrainGraph, options: Options) -> Path | None:
    """Return where the plan of a graph is kept; None where it is not: by the options, or as it depends on the moment.

    Args:
        graph: the graph as it was captured, before it is planned.
        options: what the user set.
    """
    if not options.cache or options.plan or options.memory_budget == "device":
        return None
    device = main_device(graph)
    groups = dict.fromkeys(group for node in operators(graph.graph) if (group := group_of(node)) is not None)
    number = {str(group): place for place, group in enumerate(groups)}
    facts = (
        fingerprint(graph),
        [(port.role.value, int(port.phase), port.overwritten) for port in (*graph.inputs, *graph.outputs)],
        [numbers_in(group) for group in groups],
        [(number.get(str(same.group)), same.sums) for same in graph.same_plan],
        (graph.assumed_state, graph.sums, device.type),
        [(name, value) for name, value in dataclasses.asdict(options).items() if name not in BESIDE],
        cost.load_profile(device, options.profile).to_json(),
        (torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()),
        device_model(device.type),
        _source(),
    )
    return files.plans_folder() / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.json"


def taken(file: Path | None, graph: TrainGraph, options: Options) -> Planned | None:
    """Return the graph behind the passes of the plan in ``file``, and the plan; None where it has none that does.

    Args:
        file: what :func:`file_for` returned.
        graph: the graph as it was captured; stays as it is.
        options: what the user set.
    """
    if file is None or not file.is_file():
        return None
    begun = time.perf_counter()
    try:
        plan = load_plan(file)
        ticker.say("applying the plan of an earlier run")
        read = time.perf_counter() - begun
        planned = search.run(copied(graph), options, plan)
    except RoamcError as error:
        log.warning("%s is planned anew: the plan that was kept of it is refused: %s", graph.name, error)
        return None
    with contextlib.suppress(OSError):  # of another user's, or gone meanwhile
        os.utime(file)
    seconds = {KEPT: read, **planned.plan.seconds}
    return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, seconds=seconds))


def keep(file: Path | None, plan: Plan) -> None:
    """Write a plan to ``file``, what :func:`file_for` returned, if planning took long; a warning is logged if it fails.

    Of more than :data:`MOST` plans those that were not used for longest are removed.
    """
    if file is None or sum(plan.seconds.values()) < WORTH:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        plan.save(file)
        used = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in used[MOST:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the plan of %s is not kept: %s", plan.name, error)


@functools.cache
def _source() -> str:
    """A hash of roamc's own code: another version of it may decide otherwise."""
    digest = hashlib.sha256()
    for package in ("roamc", "roamc.passes", "roamc.solvers"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for source in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{source.relative_to(folder).as_posix()} {source.stat().st_size}\n".encode())
                digest.update(source.read_bytes())
    return digest.hexdigest()
