"""Which targets of the command line are files with graphs. No torch in here."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

PRINTED = "fx_graph_readable.py"
"""Name that torch gives a printed graph; any other ``.py`` is a program of the user's."""


def logs_in(folder: Path) -> list[Path]:
    """Return the logs in ``folder`` and the folders in it, by name."""
    return sorted(_logs(folder))


def _logs(folder: Path) -> Iterator[Path]:
    return (each for each in folder.rglob("*.log*") if each.is_file() and each.name.endswith((".log", ".log.gz")))


def printed_in(folder: Path) -> list[Path]:
    """Return the graphs that Inductor has printed in the folders of ``folder``, by name."""
    return sorted(_printed(folder))


def _printed(folder: Path) -> Iterator[Path]:
    return (each for each in folder.rglob(PRINTED) if each.is_file())


def is_archive(target: str) -> bool:
    """Whether ``target`` is an archive, as torch.export writes: by its name, or by its first bytes."""
    path = Path(target)
    if not os.path.isfile(target) or path.suffix in (".json", ".py"):
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == ".pt2" or file.read(4) == b"PK\x03\x04"
    except OSError:
        return False  # who reads it says why


def is_dump(target: str) -> bool:
    """Whether ``target`` is a file or folder that may have graphs of a step: not of a model, a plan or a program."""
    path = Path(target)
    if is_archive(target):
        return False
    if os.path.isdir(target):  # no error for a name that no file can have
        graphs = itertools.chain(_logs(path), _printed(path))
        return not os.path.exists(path / "config.json") and next(graphs, None) is not None
    return os.path.isfile(target) and (path.suffix not in (".json", ".py") or path.name == PRINTED)
