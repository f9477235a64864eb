"""The results in short: one table, and what was counted in a sentence each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Rows = list[dict[str, Any]]
Cells = list[object]


def markdown(headings: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table; ``headings`` are separated by `` | ``."""
    return [
        f"| {headings} |",
        "|---" * len(headings.split(" | ")) + "|",
        *(f"| {' | '.join(map(str, cells))} |" for cells in rows),
    ]


def megabytes(count: int) -> str:
    """One decimal, without the unit."""
    return f"{count / 1e6:.1f}"


COLUMNS = {
    "eager": "eager",
    "eager+block": "checkpoint",
    "inductor": "`torch.compile`",
    "train_step@+1%": "`train_step`",
    "train_step": '`"+0%"`',
    "train_step@min": '`"min"`',
}
"""Programs of the table of budgets that :func:`overview` compares, and how it calls them."""


def overview(rows: Rows) -> list[str]:
    """Peak and step time of a few programs for every model of the table of budgets."""
    by_name = {(row["model"], row["kind"]): row for row in rows}
    return [
        "Measured peak of one AdamW step in float32 above parameters, optimizer state and batch (MB), and in brackets "
        "its time as a share of eager's, one thread. Checkpoint is `torch.utils.checkpoint` around every block. "
        '`train_step` has its default, `"+1%"`; the last two columns are the same with that `memory_budget`.',
        "",
        *markdown(
            f"model | {' | '.join(COLUMNS.values())}",
            (
                [model, *(_measured(by_name[model, kind]) for kind in COLUMNS)]
                for model in dict.fromkeys(model for model, _ in by_name)
            ),
        ),
    ]


def _measured(row: dict[str, Any]) -> str:
    return f"{megabytes(row['measured'])} ({row['time']['of eager']:.2f})"


def kept(rows: Rows) -> list[str]:
    """How many budgets were kept, as measured."""
    measured = [row for row in rows if "measured" in row]
    above = [row for row in measured if row["measured"] > row["budget"]]
    text = (
        f"Of {len(rows)} budgets ({len({row['model'] for row in rows})} models, `train_step` and `optimize`, from "
        f"100 % of what eager needs down to the minimum), {len(rows) - len(measured)} were refused, naming the lowest "
        f"peak, and {len(measured) - len(above)} kept, as measured"
    )
    if not above:
        return [f"{text}: all that were not refused.{same_bits(rows)}"]
    names = ", ".join(f"{row['model']} {row['dtype']} {row['kind']}" for row in above)
    worst = max(row["measured"] / row["budget"] for row in above) - 1
    return [f"{text}; exceeded, by {worst:.2%} at most: {names}.{same_bits(rows)}"]


def same_bits(rows: Rows) -> str:
    """A sentence on how many of the rows give the values of three steps with "+0%", if any were compared."""
    equal = [row["equal"] for row in rows if "equal" in row]
    if not equal:
        return ""
    return f' Losses and parameters are bit for bit those of `"+0%"` in {sum(equal)} of {len(equal)}.'


def rivals(rows: Rows) -> list[str]:
    """Added time and seconds taken against Moccasin."""
    solved = [row for row in rows if row["moccasin"]["added"] is not None]
    more = [row for row in solved if row["ours"]["added"] > row["moccasin"]["added"] * (1 + 1e-9)]
    faster = sorted(row["moccasin"]["seconds"] / row["ours"]["seconds"] for row in rows)
    return [
        f"Recomputation solver: Moccasin on CP-SAT solved {len(solved)} of {len(rows)} problems within "
        f"{rows[0]['limit']:g} s, {len(more)} of them with less added time than roamc. roamc was "
        f"{statistics.median(faster):.0f} times faster in the median ({faster[0]:.1f} to {faster[-1]:.0f} times; least "
        "on small problems).",
    ]
