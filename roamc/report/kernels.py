"""The kernels of a GPU's program, compiled ahead of time: what each takes of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roamc.graph import TrainGraph, operators
from roamc.operators.gpu.ahead import Compiled, compiled
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kernel_keys import described
from roamc.report.origin import Origins

REPORTED = ("sm_80", "sm_90")
"""The GPUs that a report names."""


@dataclass(frozen=True)
class KernelReport:
    """The kernel of all groups that end at one line of the model and differ in names alone, such as one per layer.

    Attributes:
        source: line of the model, as :class:`roamc.report.origin.Origin` has it.
        operators: names of the operators, such as ``fused(mul.Tensor, silu_backward)``.
        count: number of groups.
        targets: registers and memory of the kernel on each GPU; where a second kernel adds up its sums over rows, each
            is followed by those of the second kernel.
    """

    source: str
    operators: str
    count: int
    targets: tuple[Compiled, ...]


def kernels(graph: TrainGraph, say: Callable[[str], None] = lambda stage: None) -> tuple[KernelReport, ...]:
    """Compile each kernel of a planned graph once for every target; takes about a second a kernel.

    Args:
        graph: behind all passes, planned for a GPU.
        say: called with a few words on what is being done.

    Returns:
        One report for each kernel that differs by more than names, in the order of the graph; empty without groups.

    Raises:
        OptionError: Triton is not installed.
    """
    origins = Origins(graph)
    alike: dict[tuple[str, str], list[FusedKernel]] = {}
    for node in operators(graph.graph):
        if isinstance(node.target, FusedKernel):
            line = origins.of(node, graph.phase[node.name]).source
            alike.setdefault((line, described(node.target.body)), []).append(node.target)
    reports = []
    for number, ((line, _), groups) in enumerate(alike.items()):
        say(f"compiling kernel {number + 1} of {len(alike)}")
        targets = tuple(one for name in REPORTED for one in compiled(groups[0], name))
        reports.append(KernelReport(line, groups[0].title, len(groups), targets))
    return tuple(reports)
