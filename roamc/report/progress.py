"""Progress on stderr: nothing for two seconds, nothing at all where stderr is not a terminal."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

DELAY = 2.0
"""Seconds before anything is shown."""


class Stages:
    """A context manager that shows on stderr what is being done and for how long.

    Args:
        text: what is being done at first.
        steps: number of steps, shown with a bar; None for no bar.

    >>> with Stages("capturing gpt2") as stages:
    ...     ...
    ...     stages.now("planning gpt2")
    """

    def __init__(self, text: str, steps: int | None = None) -> None:
        console = Console(stderr=True)
        columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
        if steps is not None:
            columns[2:2] = [BarColumn(), MofNCompleteColumn()]
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(text, total=steps)
        self._lock = threading.Lock()
        self._ended = False
        self._timer = threading.Timer(DELAY, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Stages:
        if not self._progress.disable:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            self._progress.stop()

    def now(self, text: str, done: int | None = None) -> None:
        """Show ``text`` as what is being done now, and ``done`` as the number of steps that are done; None keeps it."""
        self._progress.update(self._task, description=text, completed=done)

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._progress.start()
