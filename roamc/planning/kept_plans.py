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
from collections.abc import Sequence
from pathlib import Path

import torch

from roamc import cost, files, ticker
from roamc.compat import RECOMPUTATION_MARKS
from roamc.compat_eager import kernel_settings
from roamc.compat_groups import has_symmetric_memory, is_planned_for, numbers_in, ranks_in
from roamc.cost import products
from roamc.cost.profile import device_model
from roamc.errors import RoamcError
from roamc.graph import TrainGraph, copied, main_device, operators
from roamc.graph.eager_memory import eager_live_bytes
from roamc.graph.fingerprint import fingerprint
from roamc.graph.memory import build_memory
from roamc.operators.schemas import group_of
from roamc.options import Options
from roamc.planning import search
from roamc.planning.plan import KEPT, Plan, load_plan
from roamc.planning.plan_maker import eager_needs
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

    None as well where the graph talks to ranks that this process knows nothing of, or the user has no cache folder.

    Args:
        graph: the graph as it was captured, before it is planned.
        options: what the user set.
    """
    if not options.cache or options.plan or options.memory_budget == "device":
        return None
    groups = dict.fromkeys(group for node in operators(graph.graph) if (group := group_of(node)) is not None)
    try:
        folder = files.plans_folder()
    except RuntimeError:  # there is no home folder
        return None
    if any(ranks_in(group) is None for group in groups):
        return None
    facts = (_of_graph(graph), _of_groups(graph, list(groups)), _of_place(graph, options))
    return folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.json"


def _of_graph(graph: TrainGraph) -> tuple[object, ...]:
    """What plans depend on in the graph: what is marked at its nodes, and eager's bytes, are no part of its hash."""
    ports = [(port.role.value, int(port.phase), port.overwritten) for port in (*graph.inputs, *graph.outputs)]
    marks = [
        (node.name, mark, str(node.meta[mark]))
        for node in graph.graph.nodes
        for mark in RECOMPUTATION_MARKS
        if mark in node.meta
    ]
    memory = build_memory(graph)
    live = eager_live_bytes(memory)
    eager = int(live.max(initial=0)), eager_needs(graph, memory, live, torch.get_num_threads())
    return fingerprint(graph), ports, marks, eager, graph.notes, graph.assumed_state, graph.sums


def _of_groups(graph: TrainGraph, groups: Sequence[object]) -> list[object]:
    """What plans depend on of the groups of ranks: where their ranks are, and which of them have one plan."""
    number = {str(group): place for place, group in enumerate(groups)}
    places = [(numbers_in(group), is_planned_for(group), has_symmetric_memory(group)) for group in groups]
    return [places, [(number.get(str(same.group)), same.sums) for same in graph.same_plan]]


def _of_place(graph: TrainGraph, options: Options) -> tuple[object, ...]:
    """What plans depend on beside the graph: options, the device and its profile, versions, threads, roamc's code."""
    device = main_device(graph)
    return (
        [(name, value) for name, value in dataclasses.asdict(options).items() if name not in BESIDE],
        (device.type, device_model(device.type), torch.backends.cpu.get_cpu_capability()),
        cost.load_profile(device, options.profile).to_json(),
        sorted(products.stored().items()) if options.numerics == "fast" and device.type == "cpu" else (),
        (torch.__version__, torch.get_num_threads(), kernel_settings(), _source()),
    )


def taken(file: Path | None, graph: TrainGraph, options: Options) -> Planned | None:
    """Return the graph behind the passes of the plan in ``file``, and the plan; None where it has none that does.

    Args:
        file: what :func:`file_for` returned.
        graph: the graph as it was captured; stays as it is.
        options: what the user set.
    """
    begun = time.perf_counter()
    try:
        if file is None or not file.is_file():
            return None
        plan = load_plan(file)
        ticker.say("applying the plan of an earlier run")
        read = time.perf_counter() - begun
        planned = search.run(copied(graph), options, plan)
    except (RoamcError, OSError) as error:
        log.warning("%s is planned anew: the plan that was kept of it is refused: %s", graph.name, error)
        return None
    with contextlib.suppress(OSError):  # of another user's, or gone meanwhile
        os.utime(file)
    searched = {name: getattr(plan, name) for name in ("notes", "budget_bytes", "budget_added", "least_bytes")}
    seconds = {KEPT: read, **planned.plan.seconds}
    return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, **searched, seconds=seconds))


def keep(file: Path | None, plan: Plan) -> None:
    """Write a plan to ``file``, what :func:`file_for` returned, if planning took long; it is logged if that fails.

    Of more than :data:`MOST` plans those that were not used for longest are removed.
    """
    if file is None or sum(plan.seconds.values()) < WORTH:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        plan.save(file)
    except OSError as error:
        log.info("the plan of %s is not kept: %s", plan.name, error)
        return
    used: list[tuple[float, str]] = []
    with contextlib.suppress(OSError), os.scandir(file.parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has removed it
                used.append((entry.stat().st_mtime, entry.path))
    for _, old in sorted(used, reverse=True)[MOST:]:
        with contextlib.suppress(OSError):
            os.unlink(old)


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
