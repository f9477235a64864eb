"""Table of the default beside torch.compile, in several processes."""

from __future__ import annotations

from typing import Any

from benchmarks import budget
from benchmarks.summary import Cells, Rows, markdown, megabytes


def programs(rows: Rows) -> list[str]:
    """Times of the default over several processes."""
    peaks = {row["model"]: row["measured"] for row in rows if row["kind"] == "inductor"}
    processes = min((row["processes"] for row in rows if "processes" in row), default=0)
    return [
        f"The default, `@+1%`, beside torch.compile (`inductor`), one thread, AdamW: every program runs in {processes} "
        "processes, one after the other, and a ratio is the median over them, with the least and the most in "
        "brackets. Programs of roamc without a budget have `+0%`; `+freed` gives its arena back between steps, and "
        "`+fast` has fast numerics:",
        "",
        *markdown(
            "model | program | measured peak | / inductor's | time / eager | / inductor | / no added | / kept",
            (_row(row, peaks[row["model"]]) for row in rows),
        ),
    ]


def _row(row: dict[str, Any], rival: int) -> Cells:
    times, kind = row.get("times", {}), row["kind"]
    free, kept = budget.parents(kind)
    shown = [times.get(other) for other in ("eager", "inductor", free)]
    shown.append(times.get(kept) if kept != kind else None)
    cells = [f"{each['median']:.2f} ({each['least']:.2f} to {each['most']:.2f})" if each else "–" for each in shown]
    return [row["model"], kind, megabytes(row["measured"]), f"{row['measured'] / rival:.2f}", *cells]
