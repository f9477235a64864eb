"""Utilisation of a device by a step: its products at the device's peak rate, over the seconds that it takes.

    MFU = model FLOPs / (peak rate x seconds)           each product of forward and backward once
    HFU = hardware FLOPs / (peak rate x seconds)        what runs again as well

Chowdhery et al., PaLM, arXiv 2204.02311, appendix B; Korthikanti et al., arXiv 2205.05198, section 6.3. Attention
counts in full, whatever its mask hides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from roamc.cost.count import Flops, flops
from roamc.cost.predict import dtype_of, step_seconds
from roamc.cost.profile import DeviceProfile
from roamc.graph import Phase, TrainGraph, operators
from roamc.graph.second_runs import second_runs
from roamc.units import Seconds

Products = Mapping[str, Flops]
"""Name of a dtype, such as "bfloat16", to the FLOPs of products in it."""


@dataclass(frozen=True)
class Utilisation:
    """What a step makes of its device.

    Attributes:
        model: FLOPs of its products, each counted once.
        hardware: FLOPs of all products that run.
        seconds: predicted time of the step.
        mfu: share of ``seconds`` in which the device does the model's FLOPs at its peak rate.
        hfu: the same for the hardware's FLOPs.
    """

    model: Flops
    hardware: Flops
    seconds: Seconds
    mfu: float
    hfu: float

    def __str__(self) -> str:
        return (
            f"utilisation: MFU {self.mfu:.1%}, HFU {self.hfu:.1%}, for {self.model / 1e12:.4g} T model FLOPs and "
            f"{self.hardware / 1e12:.4g} T hardware FLOPs of a rank in the predicted {self.seconds * 1e3:.4g} ms"
        )


def all_products(graph: TrainGraph) -> Products:
    """Count the FLOPs of all products of ``graph``."""
    return _by_dtype(list(operators(graph.graph)))


def model_products(graph: TrainGraph) -> Products:
    """Count the FLOPs of the products of a captured graph, without :func:`roamc.graph.second_runs.second_runs`."""
    forward = {node for node in operators(graph.graph) if graph.phase[node.name] is Phase.FORWARD}
    again = second_runs(graph.graph, forward)
    return _by_dtype([node for node in operators(graph.graph) if node not in again])


def _by_dtype(nodes: list[fx.Node]) -> Products:
    counted: dict[str, Flops] = {}
    for node in nodes:
        if count := flops(node):
            name = str(dtype_of(node)).removeprefix("torch.")
            counted[name] = counted.get(name, 0) + count
    return counted


def utilisation(graph: TrainGraph, model: Products, profile: DeviceProfile) -> Utilisation | None:
    """Predict the utilisation of the device that ``profile`` describes.

    Args:
        graph: the planned graph.
        model: what :func:`model_products` counts of the graph that was captured.
        profile: the profile.

    Returns:
        The utilisation; None if there are no products, or ``profile`` lacks the peak rate of one.
    """
    hardware = all_products(graph)
    if not hardware or not profile.peaks.keys() >= {*model, *hardware}:
        return None
    time = step_seconds(graph, profile)
    mfu, hfu = (sum(count / profile.peaks[name] for name, count in each.items()) / time for each in (model, hardware))
    return Utilisation(sum(model.values()), sum(hardware.values()), time, mfu, hfu)
