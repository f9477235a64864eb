"""Files that are written whole or not at all: a process that is killed half-way leaves what was there before."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write ``text`` as UTF-8 to a new file beside ``path``, then give it that name.

    What is no plain file, such as ``/dev/stdout`` or a pipe, is written directly; a link stays, and its target is
    replaced. Of several processes that write at once the last one wins.

    Args:
        path: the file.
        text: all that it will hold; line ends stay as they are.
        errors: what becomes of characters that UTF-8 cannot say, see :func:`open`.

    Raises:
        OSError: it cannot be written, named by its own path; it is as before.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", errors=errors, newline="\n")
        else:
            _replace(path.resolve(), text, errors)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(target: Path, text: str, errors: str) -> None:
    fresh = target.with_name(f".roamc-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with fresh.open("x", encoding="utf-8", errors=errors, newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            fresh.chmod(target.stat().st_mode)
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)
