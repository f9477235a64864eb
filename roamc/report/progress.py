"""Progress of a command on stderr: nothing for two seconds, then a live line on a terminal, elsewhere one every 4 s."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from roamc.ticker import Ticker, is_on, write_line
from roamc.units import Seconds

LIVE: Seconds = 0.1
"""Between two looks at what is being done, on a terminal."""

LINES: Seconds = 4.0
"""Between two lines elsewhere: with what a process does at its end, at most some 6 s pass without one."""


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
        self._live = console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=not self._live)
        self._task = self._progress.add_task(text, total=steps)
        self._steps = "" if steps is None else f" of {steps}"
        self._ticker = Ticker(text, self._show, LIVE if self._live else LINES)

    def __enter__(self) -> Stages:
        if is_on():
            self._ticker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ticker.__exit__(kind, error, traceback)
        self._progress.stop()

    def now(self, text: str, done: int | None = None) -> None:
        """Show ``text`` as what is being done now, and ``done`` as the number of steps that are done; None keeps it."""
        self._progress.update(self._task, completed=done)
        self._ticker.now(text if done is None or self._live else f"{text}, {done}{self._steps}")

    def _show(self, text: str) -> None:
        if self._live:
            self._progress.update(self._task, description=text)
            self._progress.start()
        else:
            write_line(f"{text} ({self._ticker.seconds:.0f} s)")
