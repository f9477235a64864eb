"""What is kept of kernels on this machine: the shape that was fastest, and whether a first result was right.

    {"machine": {"device": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "torch": "2.13.0", "triton": "3.9.0", ...},
     "kernels": [["8c1f...", [2048, 4], [2048, 4], "5e02..."], ...]}

One file for each kind of GPU, beside the measured profiles. An entry is a kernel's key, the shape that was fastest, the
shape whose first result was compared with what the operators give, and a hash of machine and entry. An entry with
another hash, or none that a kernel can have, is left out, and a warning is logged.

What is noted is written later, and at once for all kernels of a program: :func:`note`, then :func:`write`. Several
processes may share a file: one after the other reads it, and writes what it has read together with its own notes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roamc import files
from roamc.files import measured_folder
from roamc.locks import Lock
from roamc.operators.gpu.launch_shapes import LaunchShape

log = logging.getLogger(__name__)

Machine = Mapping[str, Any]
"""What results depend on besides the kernel, by name, see :func:`roamc.operators.gpu.here.machine`."""


@dataclass(frozen=True)
class Kept:
    """What the file of this kind of GPU holds of one kernel, for later processes.

    Attributes:
        fastest: the shape of a launch in which the kernel was fastest; None if none was timed.
        compared: the shape in which the kernel's first result was that of the operators; None if none was compared.
    """

    fastest: LaunchShape | None = None
    compared: LaunchShape | None = None


_held: dict[Path, dict[str, Kept]] = {}
"""File to what this process has read of it, and what it has noted."""

_unwritten: dict[Path, tuple[Machine, dict[str, Kept]]] = {}
"""File to the machine, and what was noted since the file was last written."""

_lock = Lock()


def forget() -> None:
    """Forget what was read and noted; the files are read again when they are next asked for."""
    with _lock.now:
        _held.clear()
        _unwritten.clear()


def of(machine: Machine, key: str) -> Kept:
    """Return what is kept of a kernel.

    Args:
        machine: the GPU and the versions.
        key: of the kernel, see :func:`roamc.operators.gpu.kernel_keys.key_of`.
    """
    path = _path(machine)
    with _lock.now:
        if path not in _held:
            _held[path] = _read(path, machine)
        return _held[path].get(key, Kept())


def note(machine: Machine, fresh: Mapping[str, Kept]) -> None:
    """Note results: they count in this process from now on, and in others once :func:`write` has been called.

    Args:
        machine: the GPU and the versions.
        fresh: key of each kernel to what is new; what is None there stays as it is kept.
    """
    if not fresh:
        return
    path = _path(machine)
    with _lock.now:
        if path not in _held:
            _held[path] = _read(path, machine)
        _, notes = _unwritten.setdefault(path, (machine, {}))
        for kept in (_held[path], notes):
            kept.update(_joined(fresh, kept))


def write() -> None:
    """Write what was noted to the files. Notes for one that cannot be written are dropped, and a warning is logged."""
    with _lock.now:
        while _unwritten:
            path, (machine, notes) = _unwritten.popitem()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with files.locked(path):
                    held, stored = _held[path], _read(path, machine)  # others may have written, too
                    stored = {**held, **_joined(stored, held)}
                    stored |= _joined(notes, stored)
                    rows = [_row(machine, key, kept) for key, kept in sorted(stored.items())]
                    files.write_text(path, json.dumps({"machine": machine, "kernels": rows}) + "\n")
            except OSError as error:
                log.warning("what was measured of kernels is not kept: %s", error)
                continue
            _held[path] = stored


def _joined(fresh: Mapping[str, Kept], kept: Mapping[str, Kept]) -> dict[str, Kept]:
    """Return what is kept of the kernels of ``fresh``, in which None leaves what was kept before."""
    pairs = ((key, new, kept.get(key, Kept())) for key, new in fresh.items())
    return {key: Kept(new.fastest or old.fastest, new.compared or old.compared) for key, new, old in pairs}


def _path(machine: Machine) -> Path:
    name = re.sub(r"[^a-z0-9]+", "_", str(machine["device"]).lower()).strip("_")
    return measured_folder() / f"kernels-{name}.json"


def _row(machine: Machine, key: str, kept: Kept) -> list[Any]:
    shapes = [[] if one is None else [one.block, one.warps] for one in (kept.fastest, kept.compared)]
    return [key, *shapes, _check(machine, [key, *shapes])]


def _check(machine: Machine, entry: list[Any]) -> str:
    return hashlib.sha256(json.dumps([machine, entry], sort_keys=True).encode()).hexdigest()


def _read(path: Path, machine: Machine) -> dict[str, Kept]:
    """Return key to what a file keeps; empty if there is none, it is of another machine, or it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["machine"] != machine:
            return {}
        rows = list(data["kernels"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("%s is measured anew: %r", path, error)
        return {}
    return dict(pair for row in rows if (pair := _entry(path, machine, row)) is not None)


def _entry(path: Path, machine: Machine, row: Any) -> tuple[str, Kept] | None:
    """Return key and content of an entry; None, with a warning, if it is none."""
    try:
        key, *shapes, check = row
        if check == _check(machine, [key, *shapes]):
            fastest, compared = (LaunchShape(*map(int, shape)) if shape else None for shape in shapes)
            return str(key), Kept(fastest, compared)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        log.warning("%s: an entry is left out: %r", path, error)
        return None
    log.warning("%s: the entry of kernel %s is left out, it has another hash", path, str(key)[:16])
    return None
