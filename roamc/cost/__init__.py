"""Time, FLOPs and bytes of a node on a device profile, by its operator's row in :mod:`roamc.operators.costs`.

    flops(node), traffic(node)          FLOPs and bytes, counted off the fake tensors: the same on every device
    seconds(node, profile)              predicted time of the node on the device that ``profile`` describes
    load_profile("cpu")                 the profile that was measured on this machine, or a shipped one

:mod:`roamc.cost.measure` holds the micro-benchmarks that make a profile.
"""

from roamc.cost.count import Traffic, flops, traffic
from roamc.cost.kind import kind_of
from roamc.cost.predict import group_seconds, prices, seconds, step_seconds
from roamc.cost.profile import GENERIC, DeviceProfile, load_profile, read_profile, shipped_names, store_profile
from roamc.cost.tensor_objects import TensorObjects, objects, tensor_objects, view_bytes
from roamc.cost.workspace import group_workspace, workspace_bytes, workspaces

__all__ = [
    "GENERIC",
    "DeviceProfile",
    "TensorObjects",
    "Traffic",
    "flops",
    "group_seconds",
    "group_workspace",
    "kind_of",
    "load_profile",
    "objects",
    "prices",
    "read_profile",
    "seconds",
    "shipped_names",
    "step_seconds",
    "store_profile",
    "tensor_objects",
    "traffic",
    "view_bytes",
    "workspace_bytes",
    "workspaces",
]
