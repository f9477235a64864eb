"""Tables on a terminal, the same columns without colour or lines in a pipe or a file. Torch stays outside."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

BY = ("module", "line", "kind")
"""What storages of a peak are summed up by."""

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


def show_rows(out: Console, headings: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[int] = ()) -> None:
    """Print one table to ``out``.

    Args:
        out: where to print.
        headings: one text for each column.
        rows: for each row, one text for each column.
        right: numbers, from 0, of the columns that are aligned to the right.
    """
    edge = box.SIMPLE_HEAD if out.is_terminal else None
    table = Table(box=edge, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    aligned = set(right)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number in aligned else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    out.print(table, markup=False)
