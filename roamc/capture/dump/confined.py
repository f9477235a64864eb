"""Reads a file in a process of its own, with limits on time, memory and files: the file may be a stranger's.

The process reads to plain data and imports no torch. It hands back a pickle of classes of :mod:`text`, :mod:`files` and
:mod:`archive`, or an error; no other class is looked up.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roamc.capture.dump import archive, files, text
from roamc.errors import DumpError, printable

CPU_SECONDS = 30
MEMORY = 1 << 30
"""Most bytes of addresses."""

OPEN_FILES = 16

SECONDS = 120
"""Most seconds in all, for a file on a disk that does not answer."""

READERS: Mapping[str, Callable[..., Any]] = {"graphs": files.read, "archive": archive.read}

_CLASSES: Mapping[tuple[str, str], type] = {
    (each.__module__, each.__qualname__): each
    for each in (
        *(text.Name, text.Dotted, text.Item, text.Call, text.Origin, text.Input, text.Statement, text.Result),
        *(text.GraphText, files.Dump, archive.Geometry, archive.State, archive.Operator, archive.Graph),
        *(archive.Program, complex),
    )
}

_START = "import sys; sys.path.append(sys.argv[1]); from roamc.capture.dump import confined; confined.main()"


class _PlainData(pickle.Unpickler):
    """Makes classes of plain data alone."""

    def find_class(self, module: str, name: str) -> type:
        """Return a class of plain data."""
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is no plain data")
        return _CLASSES[module, name]


def read(reader: str, path: str, *more: str) -> Any:
    """Return what one of :data:`READERS` returns for a file.

    Args:
        reader: its name.
        path: of the file or folder.
        more: further arguments.

    Raises:
        DumpError: the file has nothing that can be read, or it takes more time or memory than it may.
    """
    root = str(Path(__file__).parents[3])  # of the package
    command = (sys.executable, "-IS", "-c", _START, root, reader, path, *more)  # S: without packages and their hooks
    try:
        child = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)  # stdin may be the file
    except subprocess.TimeoutExpired:
        raise DumpError(f"{path}: takes more than {SECONDS} seconds to read") from None
    if child.returncode:
        said = child.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        if child.returncode < 0:
            said = (
                f"signal {-child.returncode} ended it, as after more than {CPU_SECONDS} seconds. "
                "Cut the file to the graph that matters"
            )
        raise DumpError(printable(f"{path}: cannot be read: {said or child.returncode}"))
    try:
        result = _PlainData(io.BytesIO(child.stdout)).load()
    except (pickle.UnpicklingError, EOFError, ValueError) as error:
        raise DumpError(
            printable(f"{path}: cannot be read: the process that reads it gave no plain data: {error}")
        ) from None
    if isinstance(result, str):
        raise DumpError(printable(result))
    return result


def main() -> None:
    """Read what the arguments say, and write it to stdout; a text for an error."""
    _, _, reader, path, *more = sys.argv
    limits = {
        resource.RLIMIT_CPU: CPU_SECONDS,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        with contextlib.suppress(ValueError):  # a lower limit is there
            resource.setrlimit(kind, (most, most))
    try:
        result = READERS[reader](path, *more)
        data = pickle.dumps(result, protocol=5)
    except DumpError as error:
        data = pickle.dumps(str(error))
    except MemoryError:
        result = None
        data = pickle.dumps(f"{path}: takes more than {MEMORY >> 30} GiB of memory to read")
    sys.stdout.buffer.write(data)
