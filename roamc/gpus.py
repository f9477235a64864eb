"""The GPUs that a step can be planned for by name: memory and speed of each, and what a process takes beside the plan.

One table. Speeds are those of the vendors' data sheets, dense; :func:`roamc.cost.profile.of_gpu` turns them into a
device profile. No torch in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roamc.errors import OptionError, nearest
from roamc.units import Bytes, format_bytes, parse_bytes

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One model of GPU, or a number of bytes.

    Attributes:
        name: what users write, such as "h100".
        title: what reports say, such as "H100 (80 GB)".
        capacity: bytes that CUDA reports as the total of the device, which is less than what is sold.
        profile: name of the device profile that predicts times; "" for the generic one.
        model: part of the name that CUDA reports.
        like: the shipped profile of whose data sheet and rates this GPU's rates have the shares.
        flops: dtype to the most FLOP/s of products, dense; "tf32" for float32 multiplied as TF32.
        bandwidth: bytes a second of the memory.
        cache_bytes: bytes of the second-level cache.
        nvlink: bytes a second of NVLink each way; 0 without it.
    """

    name: str
    title: str
    capacity: Bytes
    profile: str = ""
    model: str = ""
    like: str = ""
    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 0.0
    cache_bytes: Bytes = 0
    nvlink: float = 0.0


def _row(
    name: str, title: str, gib: float, model: str, like: str,
    speeds: tuple[float, float, float, float], bandwidth: float, cache: int, nvlink: float, profile: str = "",
) -> Gpu:  # fmt: skip
    """One row; ``speeds`` in TFLOP/s of bfloat16, TF32, float32, float64, both bandwidths in GB/s, ``cache`` in MB."""
    flops = dict(zip(("bfloat16", "tf32", "float32", "float64"), (1e12 * speed for speed in speeds), strict=True))
    return Gpu(
        name, title, int(gib * GIB), profile or name, model, like, flops, 1e9 * bandwidth, cache * 10**6, 1e9 * nvlink
    )


# capacity: the lowest "total capacity of … GiB" that torch.OutOfMemoryError reports on this model, in public reports
# such as vllm#27508 (H100: 79.11 GiB); ECC and driver take the rest of what is sold.
# speeds: data sheets of NVIDIA: H100 SXM, H200 SXM, HGX B200 (an eighth), A100 SXM 40 GB and 80 GB, L40S, L4, and
# white papers of the architectures of GeForce RTX 3090, 4090 and 5090 (products of 16 bits added up in float32).
_ROWS = (
    _row("h100", "H100 (80 GB)", 79.10, "H100", "h100", (989, 495, 67, 67), 3350, 50, 450),
    _row("h200", "H200 (141 GB)", 139.72, "H200", "h100", (989, 495, 67, 67), 4800, 50, 450),
    _row("b200", "B200 (180 GB)", 178.35, "B200", "h100", (2250, 1125, 75, 37), 7700, 126, 900),
    _row("a100-40", "A100 (40 GB)", 39.39, "A100-SXM4-40GB", "a100", (312, 156, 19.5, 19.5), 1555, 40, 300),
    _row("a100-80", "A100 (80 GB)", 79.14, "A100", "a100", (312, 156, 19.5, 19.5), 2039, 40, 300, "a100"),
    _row("l40s", "L40S (48 GB)", 44.34, "L40S", "a100", (362, 183, 91.6, 1.43), 864, 96, 0),
    _row("l4", "L4 (24 GB)", 22.03, "L4", "a100", (121, 60, 30.3, 0.47), 300, 48, 0),
    _row("rtx3090", "RTX 3090 (24 GB)", 23.68, "RTX 3090", "a100", (71, 35.6, 35.6, 0.556), 936, 6, 0),
    _row("rtx4090", "RTX 4090 (24 GB)", 23.53, "RTX 4090", "a100", (165.2, 82.6, 82.6, 1.29), 1008, 72, 0),
    _row("rtx5090", "RTX 5090 (32 GB)", 31.36, "RTX 5090", "a100", (209.5, 104.8, 104.8, 1.64), 1792, 96, 0),
)

GPUS: Mapping[str, Gpu] = {row.name: row for row in _ROWS}
"""Every GPU by its name."""


def gpu_of(asked: str | Bytes) -> Gpu:
    """Return the GPU of a name of :data:`GPUS`, or one with a capacity such as "40GB".

    Raises:
        OptionError: neither a name, nor a size above 1 MiB; names the nearest.
    """
    text = str(asked).strip().lower()
    if text in GPUS:
        return GPUS[text]
    alike = [name for name in GPUS if name.startswith(f"{text}-")]
    advice = f"GPUs: {', '.join(GPUS)}; or a size such as 40GB"
    if alike:
        raise OptionError(f"gpu: {asked!r} is one of {' and '.join(alike)}: say which")
    try:
        capacity = parse_bytes(asked)
    except OptionError:
        raise OptionError(f"gpu: unknown GPU {asked!r}{nearest(text, GPUS)} {advice}") from None
    if capacity < MIB:
        meant = f"did you mean '{text}GB'? " if text.isdecimal() else ""
        raise OptionError(f"gpu: {asked!r} is {format_bytes(capacity)}; {meant}{advice}")
    return Gpu(format_bytes(capacity), f"GPU of {format_bytes(capacity)}", capacity)


# The margin: what no plan of a step can know.
CONTEXT: Bytes = 512 * MIB
"""Of CUDA itself: 300 MB with lazily loaded kernels (pytorch#107667, torch 2.0) and up to 600 MB on a Hopper."""

LIBRARIES: Bytes = 64 * MIB
"""Workspaces of cuBLAS (32 MiB a handle on a Hopper, 8 MiB before it) and of cuDNN."""

ROUNDING = 0.02
"""Share of what lies with torch's caching allocator that it loses to whole blocks of 2 and 20 MiB; not of an arena."""

ROUNDED = "allocator rounding"
"""Name of that part of the margin."""

NCCL: Bytes = 512 * MIB
"""Buffers and channels of one communicator of NCCL."""


def rounding(nbytes: Bytes) -> Bytes:
    """Return what torch's caching allocator loses by rounding where it holds ``nbytes`` bytes."""
    return int(nbytes * ROUNDING)


def margin(fixed: Bytes, apart: Bytes, groups: int) -> dict[str, Bytes]:
    """Return what a process on a GPU takes beside what roamc plans, by name.

    Args:
        fixed: bytes of parameters, optimizer state and inputs, which lie with torch's caching allocator.
        apart: bytes that the step holds there, outside its arena.
        groups: number of groups of ranks that send to one another.
    """
    parts = {
        "CUDA context": CONTEXT,
        "library workspaces": LIBRARIES,
        ROUNDED: rounding(fixed) + rounding(apart),
        "NCCL": groups * NCCL,
    }
    return {name: size for name, size in parts.items() if size}
