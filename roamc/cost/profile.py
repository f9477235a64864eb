"""Device profiles: how fast one machine does what; frozen data, JSON both ways, shipped or measured.

A measured profile lies in the user's cache folder, one file per device and number of threads. Whoever needs the same
plan on machines that differ names one profile for all: a plan follows from graph, options and profile.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch

from roamc import decode, files
from roamc.errors import PlanError, ProfileError
from roamc.units import Bytes, Seconds

FORMAT = 1
"""Version of the JSON form; raised when kinds or units change their meaning."""
SHIPPED = Path(__file__).parent / "profiles"
GENERIC = {"cpu": "cpu", "cuda": "h100"}
"""Device type to the shipped profile for machines that no other describes."""

Rates = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class DeviceProfile:
    """How fast one device is.

    Attributes:
        name: of the profile.
        device: type of the device, "cpu" or "cuda".
        model: what it is, such as "NVIDIA A100-SXM4-80GB"; of a shipped profile a part of that.
        threads: of torch, with which it was measured; 0 where that means nothing.
        source: where the numbers come from.
        overhead: seconds of an operator that does nothing.
        bandwidth: bytes a second, read or written, of large tensors.
        cache_bandwidth: the same for tensors that are in a cache.
        cache_bytes: traffic of an operator up to which that holds.
        flops: kind of product to dtype to operations a second.
        elements: other kind to dtype to elements a second, where that bounds it and not the bandwidth.
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

    def to_json(self) -> str:
        """JSON text, the same for the same profile."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> DeviceProfile:
        """Read a profile; executes nothing.

        Raises:
            ProfileError: the text is no profile of this format; says what is wrong.
        """
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ProfileError(f"its format is {found!r}, this roamc reads {FORMAT}")
        try:
            profile = decode.read(DeviceProfile, {k: v for k, v in data.items() if k != "format"}, "profile")
        except PlanError as error:
            raise ProfileError(str(error)) from None
        _check(profile)
        return profile


def _check(profile: DeviceProfile) -> None:
    """All rates are finite and above zero, and there is one for matrix products."""
    for name, value in _numbers(profile):
        if not (math.isfinite(value) and value > 0):
            raise ProfileError(f"{name} must be a number above zero, not {value!r}")
    if not profile.flops.get("matmul", {}).get("float32"):
        raise ProfileError("flops must have a rate for matmul in float32")


def _numbers(profile: DeviceProfile) -> Iterator[tuple[str, float]]:
    for name in ("overhead", "bandwidth", "cache_bandwidth"):
        yield name, getattr(profile, name)
    for family in ("flops", "elements"):
        for kind, rates in getattr(profile, family).items():
            yield from ((f"{family} of {kind} in {dtype}", value) for dtype, value in rates.items())


def load_profile(device: str | torch.device = "cpu", profile: str | None = None) -> DeviceProfile:
    """The profile to predict with: the named one, else the one measured here, else the shipped one.

    Args:
        device: type of the device, with or without an index.
        profile: a file, or the name of a shipped profile.

    Raises:
        ProfileError: there is no such file or name, or the file is no profile.
    """
    kind = torch.device(device).type
    if profile is not None:
        return _named(profile)
    stored = _nearest(kind)
    if stored is None:
        return read_profile(SHIPPED / f"{_shipped_for(kind)}.json")
    return read_profile(stored, f"measure again with: roamc calibrate --device {kind}")


def _named(profile: str) -> DeviceProfile:
    if profile in shipped_names():
        return read_profile(SHIPPED / f"{profile}.json")
    if not Path(profile).is_file():
        names = ", ".join(shipped_names())
        raise ProfileError(f"{profile!r} is neither a file nor a shipped profile ({names}); roamc calibrate makes one")
    return read_profile(Path(profile), "roamc calibrate makes a new one")


def read_profile(path: Path, advice: str = "") -> DeviceProfile:
    """The profile in a file.

    Raises:
        ProfileError: it cannot be read; names the file, what is wrong, and ``advice``.
    """
    try:
        return DeviceProfile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, ProfileError) as error:
        raise ProfileError(f"profile {path} cannot be read: {error}{'; ' if advice else ''}{advice}") from None


def shipped_names() -> tuple[str, ...]:
    """Names of the profiles that come with roamc."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def _shipped_for(kind: str) -> str:
    """The shipped profile whose ``model`` occurs in the name of this machine's device."""
    if kind == "cuda" and torch.cuda.is_available():
        found = torch.cuda.get_device_name().lower()
        for name in shipped_names():
            shipped = read_profile(SHIPPED / f"{name}.json")
            if shipped.device == kind and shipped.model.lower() in found:
                return name
    return GENERIC.get(kind, GENERIC["cuda"])


def folder() -> Path:
    """Where measured profiles lie: in the user's cache folder."""
    return platformdirs.user_cache_path("roamc", appauthor=False) / "profiles"


def device_model(kind: str) -> str:
    """What this machine's device is called; empty where nothing says so."""
    if kind == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if kind == "cpu" and cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def store_profile(profile: DeviceProfile, path: Path | None = None) -> Path:
    """Write ``profile`` to ``path``, or to where :func:`load_profile` finds it."""
    target = path or folder() / f"{_slug(profile.device)}-{profile.threads}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(target, profile.to_json())
    return target


def _slug(kind: str) -> str:
    """The device type, and for a GPU its model: a machine may have several."""
    model = device_model(kind) if kind != "cpu" else ""
    return re.sub(r"[^a-z0-9]+", "_", f"{kind} {model}".lower()).strip("_")


def _nearest(kind: str) -> Path | None:
    """The measured profile of this device with the nearest number of threads."""
    start = f"{_slug(kind)}-"
    threads = torch.get_num_threads() if kind == "cpu" else 0
    found = [path for path in sorted(folder().glob(f"{start}*.json")) if path.stem[len(start) :].isdigit()]
    return min(found, key=lambda path: abs(int(path.stem[len(start) :]) - threads), default=None)
