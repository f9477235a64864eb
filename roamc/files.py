"""Files that are written whole or not at all: a process that is killed half-way leaves what was there before.

And the folders of those that keep what was measured on this machine, and plans.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import platformdirs

try:
    import fcntl
except ImportError:  # a system without these locks
    fcntl = None  # type: ignore[assignment]

FRESH = re.compile(r"\.roamc-\d+-[0-9a-f]{8}\.tmp")
"""Names of files that are being written."""

FORGOTTEN = 24 * 3600.0
"""Seconds after which such a file is that of a process that was killed."""

PATIENCE = 2.0
"""Seconds that a process waits for another one that has locked a file."""


def measured_folder() -> Path:
    """Return the folder of what is measured on this machine, which is in the user's cache folder and need not exist."""
    return _cache() / "profiles"


def plans_folder() -> Path:
    """Return the folder of plans that are kept for later runs, which is there too and need not exist."""
    return _cache() / "plans"


def _cache() -> Path:
    return platformdirs.user_cache_path("roamc", appauthor=False)


def read(path: Path, most: int) -> bytes:
    """Return the content of a file, which may be a device that never ends.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        OSError: it cannot be read, or has more.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


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


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within this context no other process is in one for the same file, so that what is read of it stays true.

    The lock is a file beside ``path``, and ends with the process that holds it. A process that holds it for more than
    :data:`PATIENCE` is not waited for; nor is any where the system has no such locks.

    Args:
        path: the file, which need not exist; its folder does.

    Raises:
        OSError: the lock's file cannot be made.
    """
    with path.with_name(f".{path.name}.lock").open("a") as file:
        end = time.monotonic() + PATIENCE
        while not _lock(file.fileno()) and time.monotonic() < end:
            time.sleep(0.005)
        yield


def _lock(file: int) -> bool:
    """Lock an open file until it is closed; False if another process has locked it."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


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
    _clear(target.parent)


def _clear(folder: Path) -> None:
    """Remove what processes that were killed have left in ``folder``; what cannot be removed stays."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if FRESH.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > FORGOTTEN:
                os.unlink(entry.path)
