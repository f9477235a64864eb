"""Time the shapes in which a kernel has the same bits, and launch it in the fastest.

It is done when a program is first made for a GPU that is here, before its arena is allocated, and once for each kernel:
what was fastest is kept in a file, see :mod:`roamc.operators.gpu.kept`. Kernels that move most bytes come first. Those
for which no time is left run as they are printed, until a later program. No bit depends on any of it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

import torch

from roamc import ticker
from roamc.compat import without_modes
from roamc.graph import TrainGraph, operators, placeholders, tensors_of
from roamc.interruptions import interruption
from roamc.operators.gpu import here, kept
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kept import Kept, Machine
from roamc.operators.gpu.launch import launcher
from roamc.operators.gpu.launch_shapes import LaunchShape, launched_in
from roamc.operators.gpu.results import first_of
from roamc.units import Bytes, Seconds

log = logging.getLogger(__name__)

PATIENCE: Seconds = 5.0
"""A program begins to time kernels for this long at most; the rest is left to later programs."""

LEAST_BYTES: Bytes = 1 << 22
"""Kernels that read and write less take about as long as their launch, in every shape."""

clock: Callable[[], Seconds] = time.perf_counter
"""What :data:`PATIENCE` is measured with."""


def groups_of(graph: TrainGraph) -> list[FusedKernel]:
    """Return the groups of a planned graph that run as kernels, in its order."""
    return [node.target for node in operators(graph.graph) if isinstance(node.target, FusedKernel)]


def tune(groups: Sequence[FusedKernel]) -> None:
    """Let each kernel be launched in its fastest shape; nothing happens where the GPU of ``groups`` is not here.

    Args:
        groups: the groups of a program, one entry for each launch. Those on another device than the first stay as they
            are printed.
    """
    device = first_of(groups[0].nodes[-1]).device if groups else torch.device("cpu")
    machine = here.machine(device)
    if machine is None:
        return
    alike: dict[str, list[FusedKernel]] = {}
    for group in groups:
        if len(group.shapes) > 1 and first_of(group.nodes[-1]).device == device:
            alike.setdefault(group.key, []).append(group)
    shapes = {key: _kept(machine, key, same[0]) for key, same in alike.items()}
    left = [key for key, shape in shapes.items() if shape is None and bytes_of(alike[key][0]) >= LEAST_BYTES]
    left.sort(key=lambda key: -len(alike[key]) * bytes_of(alike[key][0]))
    shapes |= _timed({key: alike[key][0] for key in left}, machine, device)
    for key, shape in shapes.items():
        for group in alike[key]:
            if shape is not None:
                group.launch_in(shape)


def _kept(machine: Machine, key: str, group: FusedKernel) -> LaunchShape | None:
    """The shape that was fastest before; None if that is not known, or is no shape of the kernel."""
    shape = kept.of(machine, key).fastest
    if shape is None or shape in group.shapes:
        return shape
    log.warning("the kernel of %s has no shape %s: it is measured anew", group.title, shape)
    return None


def _timed(groups: dict[str, FusedKernel], machine: Machine, device: torch.device) -> dict[str, LaunchShape]:
    """Time kernels, by their keys, while there is time; return and keep the shapes that were fastest."""
    if not groups:
        return {}
    begun, shapes = clock(), {}
    # Programs are made under fake tensors, too.
    with without_modes(), torch.no_grad(), here.borrowed(device):
        for number, (key, group) in enumerate(groups.items()):
            if clock() - begun >= PATIENCE:
                log.info("%d of %d kernels were not timed yet", len(groups) - number, len(groups))
                break
            ticker.say(f"timing kernel {number + 1} of {len(groups)}")
            shape = fastest(group, device)
            if shape is not None:
                shapes[key] = shape
    kept.note(machine, {key: Kept(shape) for key, shape in shapes.items()})
    kept.write()
    return shapes


def bytes_of(group: FusedKernel) -> Bytes:
    """Return the bytes of all operands and results of a group, each once."""
    nodes = {*placeholders(group.body), *group.results}
    return sum(tensor.numel() * tensor.itemsize for node in nodes for _, tensor in tensors_of(node))


def fastest(group: FusedKernel, device: torch.device) -> LaunchShape | None:
    """Time a kernel in all of its shapes on operands of zeros, and return the fastest.

    Returns:
        The shape; None if the kernel does not run as it is printed, or there is no memory for its operands.
    """
    try:
        args = [_operand(group, at, device) for at, _ in enumerate(placeholders(group.body))]
        out = group.allocated()
        runs: dict[LaunchShape, Callable[[], None]] = {}
        for shape in group.shapes:
            run = launcher(launched_in(group.printed, group.matrix, shape))
            if run is not None and _runs(functools.partial(run, *args, out=out), group, shape):
                runs[shape] = functools.partial(run, *args, out=out)
        if group.shapes[0] not in runs:
            return None
        seconds = here.seconds_of(list(runs.values()), device)
    except torch.OutOfMemoryError as error:
        log.info("the kernel of %s is not timed: %s", group.title, error)
        return None
    log.debug("%s: %s", group.title, dict(zip(runs, seconds, strict=True)))
    return min(zip(seconds, range(len(runs)), runs, strict=True))[2]


def _operand(group: FusedKernel, at: int, device: torch.device) -> torch.Tensor | float:
    """Zeros that lie as argument ``at`` of a group does; 1 for a number. As indices zeros are inside of any tensor."""
    fake = next((tensor for _, tensor in tensors_of(placeholders(group.body)[at])), None)
    if fake is None:
        return 1.0
    steps = zip(fake.shape, fake.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if fake.numel() else 0
    return torch.zeros(extent, dtype=fake.dtype, device=device).as_strided(fake.shape, fake.stride())


def _runs(run: Callable[[], None], group: FusedKernel, shape: LaunchShape) -> bool:
    """Compile and launch a kernel; return whether that went well."""
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever Triton raises
        if interruption(error) is not None:
            raise
        log.info("the kernel of %s does not run in %s: %s: %s", group.title, shape, type(error).__name__, error)
        return False
    return True
