"""The demo's result as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from roamc.cli.demo.race import WARM, Result
from roamc.cli.demo.worker import BUDGET, EAGER, SIDES
from roamc.report.tables import say, show_rows
from roamc.units import format_bytes


def show(out: Console, result: Result) -> None:
    """Print ``result`` to ``out``: losses side by side, then memory, then time, then what to try next."""
    task = result.task
    say(
        out,
        f"GPT of {result.parameters / 1e6:.1f} M parameters, batch {task.batch} of {task.seq} bytes, "
        f"dropout {task.dropout}, AdamW, {task.steps} steps, {result.threads} threads",
    )
    out.print()
    _show_losses(out, result)
    out.print()
    _show_memory(out, result)
    out.print()
    _show_time(out, result)
    out.print()
    _show_next(out, result)


def _show_losses(out: Console, result: Result) -> None:
    count = len(result.losses[EAGER])
    chosen = [index for index in range(count) if index in (0, count - 1) or (index + 1) % 5 == 0]
    rows = []
    for index in chosen:
        losses = [result.losses[side][index] for side in SIDES]
        same = len({loss.hex() for loss in losses}) == 1
        rows.append((str(index + 1), *(f"{loss:.7f}" for loss in losses), "same bits" if same else "differs"))
    show_rows(out, ("step", *(f"loss of {side}" for side in _headings(result)), ""), rows, right=range(4))
    verdict = "all" if result.equal_steps == count else f"only {result.equal_steps} of"
    out.print(f"{verdict} {count} losses are equal bit for bit, on all three sides")


def _show_memory(out: Console, result: Result) -> None:
    plans = [result.plans.get(side) for side in SIDES]
    measured = [result.peak_bytes[side] for side in SIDES]
    ratios = [f"{result.memory_ratio(side):.3f}" for side in SIDES]

    def planned(key: str) -> list[str]:
        return [format_bytes(plan[key]) if plan else "" for plan in plans]

    errors = [
        f"{size / plan['peak_bytes'] - 1:+.2%}" if plan else "" for size, plan in zip(measured, plans, strict=True)
    ]
    rows = [
        ("measured peak", *map(format_bytes, measured)),
        ("  over eager's", *ratios),
        ("predicted peak", *planned("peak_bytes")),
        ("  measured over it", *errors),
        ("lower bound", *planned("bound_bytes")),
        ("arena", *planned("arena_bytes")),
    ]
    show_rows(out, ("memory of a step", *_headings(result)), rows, right=(1, 2, 3))
    say(
        out,
        "above parameters, optimizer state and batch; measured includes workspace inside operators. Lower bound: of "
        "live bytes, for what the plan recomputes, in any order",
        style="dim",
    )


def _show_time(out: Console, result: Result) -> None:
    medians = [statistics.median(result.seconds[side][WARM:] or result.seconds[side]) for side in SIDES]
    ratios = [result.time_ratio(side) for side in SIDES]
    paired = ["too few steps" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
    plans = [result.plans.get(side) for side in SIDES]
    planning = [f"{sum(plan['seconds'].values()):.2f} s" if plan else "" for plan in plans]
    added = [_added(plan) if plan else "" for plan in plans]
    rows = [
        ("step, median", *(f"{seconds:.3f} s" for seconds in medians)),
        ("  over eager's, median of pairs", *paired),
        ("recomputation, predicted", *added),
        ("planning", *planning),
    ]
    show_rows(out, ("time", *_headings(result)), rows, right=(1, 2, 3))
    out.print(f"{result.total_seconds:.0f} s in all", style="dim")


def _show_next(out: Console, result: Result) -> None:
    budget = result.task.memory_budget
    out.print("Next, with a model of yours:", style="bold")
    out.print(
        f'  step = roamc.train_step(model, loss_fn, optimizer, memory_budget="{budget}"); loss = step(*batch)',
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _headings(result: Result) -> tuple[str, ...]:
    """The sides, the budget by its value."""
    return tuple(f"roamc at {result.task.memory_budget}" if side == BUDGET else side for side in SIDES)


def _added(plan: Mapping[str, Any]) -> str:
    """Predicted time of what runs again, as a share of the step."""
    seconds = plan["step_seconds"]
    return f"{plan['added_seconds'] / seconds:.1%}" if seconds else "none"
