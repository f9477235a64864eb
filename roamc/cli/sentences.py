"""What the command line says of an error, in one line."""

from __future__ import annotations

import errno
import os
import traceback
from pathlib import Path

import roamc
from roamc.errors import OptionError, RoamcError, printable

_FILE_ERRORS: dict[type[OSError], str] = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "this is a folder",
    PermissionError: "no permission",
}

_WITHOUT_GPU = ("not linked with support for cuda", "not compiled with CUDA", "no NVIDIA driver", "No CUDA GPUs")
"""Parts of what torch says where a program asks for a GPU that is not there."""

NO_GPU = ": leave .cuda() and device='cuda' out; --device cuda or --gpu plans what lies on the CPU for a GPU"
"""What is said behind it."""


def sentence(error: Exception, debug: bool) -> str:
    """Return the line for an error that is being handled; ``debug`` says that more is shown beside it."""
    lines = [printable(line) for line in str(error).splitlines()] or [""]
    if isinstance(error, RoamcError):
        return lines[0] if len(lines) == 1 or debug else f"{lines[0]} (--debug shows more)"
    if isinstance(error, OSError):
        return _said_of_file(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {error.msg}"
    where, more = _place(error), NO_GPU if any(said in lines[0] for said in _WITHOUT_GPU) else ""
    return f"{where}{type(error).__name__}: {lines[0]}{more}" + ("" if debug else " (--debug shows the traceback)")


def _place(error: Exception) -> str:
    """Where an error was raised, in front of it: the user's line, or the layer of torch's that roamc itself has called.

    It is a line of roamc if roamc raised it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(roamc.__file__).parent in Path(frame.filename).parents]
    users = [frame for frame in frames if frame not in ours and "site-packages" not in frame.filename]
    last = users[-1] if users else frames[-1] if frames and frames[-1] in ours else None
    if last is not None:
        return f"{Path(last.filename).name}:{last.lineno}: "
    from roamc.capture.user_line import layer_of_torch

    layer = layer_of_torch(error)
    return f"in {layer}: " if layer else ""


def _said_of_file(error: OSError) -> str:
    """The file first and then what is wrong with it, as in ``plan.csv: no such file``."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {_FILE_ERRORS.get(type(error), error.strerror.lower())}"


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, before planning and not after it; leaves no file behind.

    Raises:
        OptionError: says why.
    """
    if not path.parent.is_dir():
        raise OptionError(f"{path.parent}: no such folder")
    new = not path.exists()
    try:
        # files.write_text makes its new file beside the path.
        if (new or path.is_file()) and not os.access(path.resolve().parent, os.W_OK):
            raise PermissionError(errno.EACCES, "permission denied", str(path.resolve().parent))
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        # a new file is not missing: its folder takes none
        why = "" if new and isinstance(error, FileNotFoundError) else f": {_said_of_file(error)}"
        raise OptionError(f"cannot write {path}{why}") from None
