"""Time, FLOPs and bytes of a node on a device profile; the only place that knows them.

    flops(node), traffic(node)          counted off the fake tensors, the same on every device
    seconds(node, profile)              what the node takes on the device that ``profile`` describes
    load_profile("cpu")                 the profile that was measured here, or the shipped one

:mod:`roamc.operators.costs` holds what is known of operators, :mod:`roamc.cost.measure` the micro-benchmarks.
"""

from roamc.cost.count import Traffic, flops, traffic
from roamc.cost.kinds import kind_of
from roamc.cost.predict import prices, seconds, step_seconds
from roamc.cost.profile import DeviceProfile, load_profile, read_profile, shipped_names, store_profile
from roamc.cost.workspace import objects, workspace_bytes, workspaces

__all__ = [
    "DeviceProfile",
    "Traffic",
    "flops",
    "kind_of",
    "load_profile",
    "objects",
    "prices",
    "read_profile",
    "seconds",
    "shipped_names",
    "step_seconds",
    "store_profile",
    "traffic",
    "workspace_bytes",
    "workspaces",
]
