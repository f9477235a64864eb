"""Tables on a terminal, the same columns without colour or lines in a pipe or a file. Torch stays outside."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

BY = ("module", "line", "kind")
"""What storages of a peak are summed up by."""

UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|[mµn]?s)\b)")
"""The space between a number and its unit, which stay on one line."""

GAP = 2
"""Spaces between columns."""

PIPE_WIDTH = 160
"""Columns where the output is not a terminal and COLUMNS is not set."""


def console() -> Console:
    """Return a rich console that writes to standard output.

    Where that is no terminal, it writes plain text, :data:`PIPE_WIDTH` columns wide unless COLUMNS is set.
    """
    out = Console(highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out = Console(highlight=False, width=PIPE_WIDTH)
    return out


def say(out: Console, text: str, indent: int = 2, style: str = "") -> None:
    """Print one line to ``out``, on several where somebody's screen is narrower; words stay whole.

    Args:
        out: where to print. In a pipe for which nobody has set COLUMNS, a line stays one, however long it is.
        text: the line.
        indent: spaces in front of all but the first.
        style: as rich takes it.
    """
    if out.is_terminal or "COLUMNS" in os.environ:
        rest = " " * indent
        glued = UNIT.sub("\N{NO-BREAK SPACE}", text)
        text = textwrap.fill(glued, out.width, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
        text = text.replace("\N{NO-BREAK SPACE}", " ")
    out.print(text, style=style, markup=False, soft_wrap=True)


def show_rows(
    out: Console,
    headings: Sequence[str],
    rows: Iterable[Iterable[str]],
    right: Iterable[int] = (),
    spare: Iterable[str] = (),
) -> None:
    """Print one table to ``out``, without the columns that are empty, and without those for which there is no room.

    Cells are broken between words where whole ones are too wide; words and numbers stay whole.

    Args:
        out: where to print.
        headings: one text for each column.
        rows: for each row, one text for each column.
        right: numbers, from 0, of the columns that are aligned to the right.
        spare: headings of the columns that are left out first, the least valuable first; then the last ones follow.
    """
    edge, aligned = box.SIMPLE_HEAD if out.is_terminal else None, set(right)
    cells = [[str(cell) for cell in row] for row in rows]
    columns = [
        _Column(heading, tuple(row[at] for row in cells), at in aligned)
        for at, heading in enumerate(headings)
        if not cells or any(row[at] for row in cells)
    ]
    gap = GAP + (edge is not None)
    columns = _with_room(columns, out.width + gap, gap, spare)
    table = Table(box=edge, pad_edge=False, show_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for column, width in zip(columns, _widths(columns, out.width + gap, gap), strict=True):
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(column.heading, justify=justify, overflow="fold", width=width)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    out.print(table, markup=False)


@dataclass(frozen=True)
class _Column:
    """A column of a table; ``right`` says that it has numbers, which stay whole."""

    heading: str
    cells: tuple[str, ...]
    right: bool

    @property
    def most(self) -> int:
        """Characters that the column takes if nothing is broken."""
        return max(map(len, (self.heading, *self.cells)))

    @property
    def least(self) -> int:
        """Characters of what stays whole: the longest word, or the longest number with its unit."""
        whole = [
            *self.heading.split(),
            *(part for cell in self.cells for part in ([cell] if self.right else cell.split())),
        ]
        return max(map(len, whole), default=1)


def _with_room(columns: list[_Column], room: int, gap: int, spare: Iterable[str]) -> list[_Column]:
    """Return the columns without those for which there is no room; two stay, a name and what it has."""
    for heading in spare:
        if sum(column.most + gap for column in columns) > room:
            columns = [column for column in columns if column.heading != heading]
    while len(columns) > 2 and sum(column.least + gap for column in columns) > room:
        columns = columns[:-1]
    return columns


def _widths(columns: Sequence[_Column], room: int, gap: int) -> list[int]:
    """Return the width of each column: the widest of those that can be broken give way, or else the last one."""
    widths = [column.most for column in columns]
    while sum(width + gap for width in widths) > room:
        over = [width if width > column.least else 0 for column, width in zip(columns, widths, strict=True)]
        if not any(over):  # a word, such as a path, that is longer than the screen is wide
            return [*widths[:-1], max(1, room - gap - sum(width + gap for width in widths[:-1]))]
        widths[over.index(max(over))] -= 1
    return widths
