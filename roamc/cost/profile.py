"""Device profiles: the rates at which one device computes and moves bytes; frozen data that is stored as JSON.

Some profiles are shipped, others are measured. A measured profile lies in the user's cache folder, one file per device
and number of threads. A plan follows from graph, options, profile and number of threads: to get the same plan on
different machines, name one profile and set one number of threads for all of them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from roamc import decode, files
from roamc.errors import PlanError, ProfileError, nearest
from roamc.files import measured_folder
from roamc.gpus import GPUS, Gpu
from roamc.units import Bytes, Seconds

FORMAT = 1
"""Version of the JSON form; increased when kinds or units change their meaning."""
SHIPPED = Path(__file__).parent / "profiles"
"""Folder of the shipped profiles."""
GENERIC = {"cpu": "cpu", "cuda": "h100", "meta": "h100"}
"""Device type to the name of the shipped profile for devices whose model no shipped profile has."""

NODE, NETWORK = "node", "network"
LINKS = {NODE: {"latency", "bandwidth", "ranks"}, NETWORK: {"latency", "bandwidth"}}
"""Name of a link to the names of its numbers."""

Rates = Mapping[str, Mapping[str, float]]
"""Kind of operator to name of a dtype, such as "float32", to FLOPs or elements a second."""


@dataclass(frozen=True)
class DeviceProfile:
    """The rates of one device, by kind of operator and dtype.

    Attributes:
        name: name of the profile.
        device: type of the device, "cpu" or "cuda".
        model: name of the device, such as "NVIDIA A100-SXM4-80GB"; in a shipped profile a part of that name.
        threads: number of torch's threads with which a CPU was measured; 0 for a GPU.
        source: where the numbers come from, as text.
        overhead: seconds that a call of an operator takes beside its work.
        bandwidth: bytes a second that an operator reads and writes, for tensors too large for a cache.
        cache_bandwidth: the same for tensors in a cache.
        cache_bytes: an operator that reads and writes at most this many bytes runs at ``cache_bandwidth``.
        flops: kind of product, see :data:`roamc.operators.costs.kinds.PRODUCTS`, to dtype to FLOP/s.
        elements: other kind to dtype to elements a second, for kinds that are slower than memory. May also
            have "convolution_weights", the rate at which convolutions reorder their weights.
        links: how ranks on such devices send to one another; what is not known is left out. NODE and NETWORK map to the
            "latency" of a turn of a ring, in seconds, and the "bandwidth" of a rank in bytes a second, of links in a
            node and between nodes; NODE also to the "ranks" of a node, which has one where NODE is left out.
        peaks: dtype to the most FLOP/s of products by the data sheet, for utilisation alone; float32 may be multiplied
            as TF32. Empty where that is not known.
    """

    name: str
    device: str
    model: str
    threads: int
    source: str
    overhead: Seconds
    bandwidth: float
    cache_bandwidth: float
    cache_bytes: Bytes
    flops: Rates
    elements: Rates
    links: Rates = field(default_factory=dict)
    peaks: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the profile as JSON text; equal profiles have equal text."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> DeviceProfile:
        """Read the profile in JSON text; nothing is executed.

        Raises:
            ProfileError: the text is no profile of this format, a rate is not above zero, or that of matmul in float32
                is missing. The message says what is wrong.
        """
        try:
            data: Any = decode.parse(text)
        except ValueError as error:
            raise ProfileError(f"not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            stated_format = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ProfileError(f"its format is {stated_format!r}, this roamc reads {FORMAT}")
        try:
            written = {key: value for key, value in data.items() if key != "format"}
            profile = decode.read(DeviceProfile, {"links": {}, "peaks": {}, **written}, "profile")
        except PlanError as error:
            raise ProfileError(str(error)) from None
        _check(profile)
        return profile


LEAST, MOST = 1e-15, 1e30
"""Of rates and seconds, in their units: with others the times of operators would not be numbers."""


def _check(profile: DeviceProfile) -> None:
    """Check that all rates are numbers from LEAST to MOST, and that there is one for matmul in float32.

    Raises:
        ProfileError: a rate is wrong or missing.
    """
    for name, value in _numbers(profile):
        if not LEAST <= value <= MOST:
            raise ProfileError(f"{name} must be a number from {LEAST:g} to {MOST:g}, not {str(value)[:40]}")
    if not profile.flops.get("matmul", {}).get("float32"):
        raise ProfileError("flops must have a rate for matmul in float32")
    if any(set(numbers) != LINKS.get(link) for link, numbers in profile.links.items()):
        raise ProfileError(f"links may have the numbers { ({k: sorted(v) for k, v in LINKS.items()}) } and no others")
    ranks = profile.links[NODE]["ranks"] if NODE in profile.links else 1
    if ranks < 1 or ranks != int(ranks):
        raise ProfileError(f"links of node in ranks must be a whole number from 1, not {ranks}")


def _numbers(profile: DeviceProfile) -> Iterator[tuple[str, float]]:
    """Yield every number that must be above zero, with its name for messages."""
    for name in ("overhead", "bandwidth", "cache_bandwidth"):
        yield name, getattr(profile, name)
    yield from ((f"peaks of {dtype}", value) for dtype, value in profile.peaks.items())
    for family in ("flops", "elements", "links"):
        for kind, rates in getattr(profile, family).items():
            yield from ((f"{family} of {kind} in {dtype}", value) for dtype, value in rates.items())


def load_profile(device: str | torch.device = "cpu", profile: str | None = None) -> DeviceProfile:
    """Return the profile to predict with: that of ``profile``, else a measured one, else a shipped one.

    Args:
        device: the device to predict for; its index does not count. Unused where ``profile`` is given.
        profile: path of a file, or name of a shipped profile. Without it, the profile that was measured on this machine
            with the nearest number of threads is taken, or the shipped one that describes the device best.

    Raises:
        ProfileError: there is no such file or name, the file is no profile, or none describes a device of that type.
    """
    kind = torch.device(device).type
    if profile is not None:
        return _named(profile)
    stored = _nearest(kind)
    if stored is None and kind not in GENERIC:
        raise ProfileError(f"no shipped profile describes a device of type {kind!r}: name one with the option profile")
    if stored is None:
        return shipped_like(kind) or _named(GENERIC[kind])
    return read_profile(stored, f"measure again with: roamc calibrate --device {kind}")


def _named(profile: str) -> DeviceProfile:
    if profile in _files():
        return read_profile(SHIPPED / f"{profile}.json")
    if profile in GPUS:
        return of_gpu(GPUS[profile])
    if not Path(profile).is_file():
        names = ", ".join(shipped_names())
        near = nearest(profile, shipped_names())
        raise ProfileError(
            f"{profile!r} is neither a file nor a shipped profile ({names}){near} roamc calibrate makes one"
        )
    return read_profile(Path(profile), "roamc calibrate makes a new one")


def read_profile(path: Path, advice: str = "") -> DeviceProfile:
    """Read the profile in a JSON file.

    Args:
        path: the file.
        advice: what the user can do if it cannot be read; ends the message.

    Raises:
        ProfileError: the file cannot be read or is no profile; names the file, what is wrong, and ``advice``.
    """
    try:
        return DeviceProfile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, ProfileError) as error:
        raise ProfileError(f"profile {path} cannot be read: {error}{'; ' if advice else ''}{advice}") from None


def shipped_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with roamc, sorted: the files, and those of :data:`GPUS`."""
    return tuple(sorted({*_files(), *(gpu.profile for gpu in GPUS.values())}))


def _files() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def of_gpu(gpu: Gpu) -> DeviceProfile:
    """Return the profile of a row of :data:`GPUS`: the file that it names, or that of the GPU that it is like.

    The rates of another GPU have the same shares of its data sheet: products and convolutions of each dtype's peak,
    scans and scatters of the bandwidth. The overhead of a launch stays; links of a GPU without NVLink are not known.
    """
    if gpu.profile in _files():
        return read_profile(SHIPPED / f"{gpu.profile}.json")
    base = read_profile(SHIPPED / f"{gpu.like}.json")
    row = next(each for each in GPUS.values() if each.profile == gpu.like)
    faster = {dtype: rate / row.flops[dtype] for dtype, rate in gpu.flops.items()}
    faster["float16"], moved = faster["bfloat16"], gpu.bandwidth / row.bandwidth
    flops = {
        kind: {dtype: rate * faster[_peak_of(kind, dtype)] for dtype, rate in rates.items()}
        for kind, rates in base.flops.items()
    }
    return dataclasses.replace(
        base,
        name=gpu.profile,
        model=gpu.model,
        source=f"data sheet of {gpu.title} at the shares that {base.name} has of its own; not measured",
        bandwidth=base.bandwidth * moved,
        cache_bandwidth=base.cache_bandwidth * moved,
        cache_bytes=gpu.cache_bytes // 2,
        flops=flops,
        elements={kind: {dtype: rate * moved for dtype, rate in each.items()} for kind, each in base.elements.items()},
        links=_links(base, gpu.nvlink / row.nvlink),
        peaks={dtype: rate * faster["tf32" if dtype == "float32" else dtype] for dtype, rate in base.peaks.items()},
    )


def _peak_of(kind: str, dtype: str) -> str:
    """The peak that bounds products of a kind; convolutions multiply float32 as TF32."""
    return "tf32" if dtype == "float32" and kind.startswith("convolution") else dtype


def _links(base: DeviceProfile, faster: float) -> Rates:
    if not faster:
        return {}
    node = {**base.links[NODE], "bandwidth": base.links[NODE]["bandwidth"] * faster}
    return {**base.links, NODE: node}


def shipped_like(kind: str) -> DeviceProfile | None:
    """Return the shipped profile whose ``model`` is part of this machine's GPU's name; None without one, or GPU."""
    model = device_model(kind).lower() if kind == "cuda" else ""
    alike = [gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.model.lower()}\b", model)]
    return of_gpu(max(alike, key=lambda gpu: len(gpu.model))) if alike else None


def device_model(kind: str) -> str:
    """Return the model name of this machine's device of type ``kind``, "cpu" or "cuda"; "" where it is not known."""
    if kind == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if kind == "cpu" and cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def store_profile(profile: DeviceProfile, path: Path | None = None) -> Path:
    """Write ``profile`` as JSON and return the path of its file; missing folders are made.

    Args:
        profile: the profile to write.
        path: the file to write. Without it, the file in :func:`roamc.files.measured_folder` where :func:`load_profile`
            finds it; a profile of the same device and number of threads is overwritten.
    """
    target = path or measured_folder() / f"{_slug(profile.device)}-{profile.threads}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(target, profile.to_json())
    return target


def _slug(kind: str) -> str:
    """Return the first part of a profile's file name: the device type, and for a GPU its model."""
    model = device_model(kind) if kind != "cpu" else ""
    return re.sub(r"[^a-z0-9]+", "_", f"{kind} {model}".lower()).strip("_")


def _nearest(kind: str) -> Path | None:
    """Return the file of this device's measured profile with the nearest number of threads; None without any."""
    start = f"{_slug(kind)}-"
    threads = torch.get_num_threads() if kind == "cpu" else 0
    paths = [path for path in sorted(measured_folder().glob(f"{start}*.json")) if path.stem[len(start) :].isdecimal()]
    return min(paths, key=lambda path: abs(int(path.stem[len(start) :]) - threads), default=None)
