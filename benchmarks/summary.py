"""What the README shows of the results: the tables that most people ask for, and the rest in a sentence each."""

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


def peaks(rows: Rows) -> list[str]:
    """Measured peaks of whole steps, on both routes, in float32."""
    return [
        "Peak memory of one AdamW step in float32 (MB) on top of parameters, optimizer state and batch, without a "
        "budget. Counted under malloc, each in a fresh process.",
        "",
        *markdown(
            "model | eager | `roamc.train_step` | / eager | measured / predicted | `roamc.optimize` | / eager",
            (_peak_row(row) for row in rows if row["dtype"] == "float32"),
        ),
    ]


def _peak_row(row: dict[str, Any]) -> Cells:
    eager, step, loop = (row[name]["measured"] for name in ("eager", "train_step", "optimize"))
    shares = (f"{step / eager:.3f}", f"{step / row['train_step']['needed_bytes']:.3f}")
    return [row["model"], megabytes(eager), megabytes(step), *shares, megabytes(loop), f"{loop / eager:.3f}"]


SHOWN = (
    "eager", "eager+block", "eager+select", "inductor", "inductor@0.5", "inductor@0.2", "inductor+block",
    "optimize", "optimize@+1%", "optimize@170MB", "optimize@min",
    "train_step", "train_step@+1%", "train_step@300MB", "train_step@170MB", "train_step@110MB", "train_step@min",
)  # fmt: skip
"""Programs of :func:`frontier` that the README shows; RESULTS.md has all."""


def frontier(rows: Rows, model: str = "gpt") -> list[str]:
    """Step time against measured peak for one model."""
    shown = [row for row in rows if row["model"] == model]
    ours = [row for row in shown if "peak_bytes" in row]
    equal = [row["like"]["equal"] for row in ours if "like" in row]
    return [
        "Under a budget: GPT with 6 layers, width 384, 256 tokens, batch 16, one thread. `+block` is "
        "`torch.utils.checkpoint` around every block, `+select` a policy that saves its matrix products and attention; "
        "`@` is followed by `memory_budget`, or by torch.compile's activation memory budget. Times are medians of "
        f"ratios over interleaved steps. Loss, gradients and parameters are bit for bit equal in {sum(equal)} of "
        f"{len(equal)} comparisons: roamc's programs under a budget with those without, and these with eager "
        "(`train_step`) or `aot_eager` (`optimize`).",
        "",
        *markdown(
            "program | measured peak (MB) | time / no budget | time / eager | planning s",
            (_frontier_row(row) for row in shown if row["kind"] in SHOWN),
        ),
    ]


ONE_PERCENT = "train_step@+1%"
"""The program of :func:`one_percent`."""


def one_percent(rows: Rows) -> list[str]:
    """What a budget of 1 % more time buys, for every model of the table of budgets."""
    by_name = {(row["model"], row["kind"]): row for row in rows}
    models = [model for model, kind in by_name if kind == ONE_PERCENT]
    return [
        'With `memory_budget="+1%"`, the lowest peak for at most 1 % more predicted time, measured in the same way:',
        "",
        *markdown(
            "model | eager (MB) | torch.compile | `train_step` | `train_step`, +1% | time / no budget | time / eager",
            (_one_percent_row(by_name, model) for model in models),
        ),
    ]


def _one_percent_row(by_name: dict[tuple[str, str], dict[str, Any]], model: str) -> Cells:
    peaks = (by_name[model, kind]["measured"] for kind in ("eager", "inductor", "train_step", ONE_PERCENT))
    time = by_name[model, ONE_PERCENT]["time"]
    return [model, *map(megabytes, peaks), f"{time['of free']:.2f}", f"{time['of eager']:.2f}"]


def _frontier_row(row: dict[str, Any]) -> Cells:
    if "refused" in row:
        return [row["kind"], f"refused: needs {megabytes(row['refused'])}", *"–––"]
    time, planning = row["time"], f"{row['planning']:.1f}" if "planning" in row else "–"
    return [row["kind"], megabytes(row["measured"]), f"{time['of free']:.2f}", f"{time['of eager']:.2f}", planning]


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
    """A sentence on how many of the rows give the values of three steps without a budget, if any were compared."""
    equal = [row["equal"] for row in rows if "equal" in row]
    if not equal:
        return ""
    return f" Losses and parameters are bit for bit those without a budget in {sum(equal)} of {len(equal)}."


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
