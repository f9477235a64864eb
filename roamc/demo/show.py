"""The demo's result as text."""

from __future__ import annotations

import statistics

from rich.console import Console

from roamc.demo.race import WARM, Result
from roamc.report.text import show_rows, stage_times
from roamc.units import format_bytes


def show(out: Console, result: Result) -> None:
    """Losses side by side, then memory, then time."""
    task = result.task
    out.print(
        f"GPT of {result.parameters / 1e6:.1f} M parameters, batch {task.batch} of {task.seq} bytes, "
        f"dropout {task.dropout}, AdamW, {task.steps} steps, {result.threads} threads",
        soft_wrap=True,
    )
    out.print()
    _show_losses(out, result)
    out.print()
    _show_memory(out, result)
    out.print()
    _show_time(out, result)


def _show_losses(out: Console, result: Result) -> None:
    eager, ours = result.losses["eager"], result.losses["roamc"]
    count = len(eager)
    chosen = [index for index in range(count) if index in (0, count - 1) or (index + 1) % 5 == 0]
    same = {True: "same bits", False: "differs"}
    rows = [(str(i + 1), f"{eager[i]:.7f}", f"{ours[i]:.7f}", same[eager[i].hex() == ours[i].hex()]) for i in chosen]
    show_rows(out, ("step", "loss of eager", "loss of roamc", ""), rows, right=(0, 1, 2))
    verdict = "all" if result.equal_steps == count else f"only {result.equal_steps} of"
    out.print(f"{verdict} {count} losses are equal bit for bit")


def _show_memory(out: Console, result: Result) -> None:
    plan, measured = result.plan, result.peak_bytes
    error = measured["roamc"] / plan["peak_bytes"] - 1
    sizes = {key: format_bytes(plan[f"{key}_bytes"]) for key in ("peak", "baseline", "bound", "arena")}
    eager, ours = format_bytes(measured["eager"]), format_bytes(measured["roamc"])
    rows = [
        ("measured peak", eager, ours, f"{result.memory_ratio:.3f} of eager's"),
        ("predicted peak", "", sizes["peak"], f"measured is {error:+.2%}"),
        ("unplanned", "", sizes["baseline"], "same graph, program order; eager's dropout keeps more than the graph's"),
        ("lower bound", "", sizes["bound"], "of live bytes, any order"),
        ("arena", "", sizes["arena"], f"fragmentation {plan['fragmentation']:.3%}"),
    ]
    show_rows(out, ("memory of a step", "eager", "roamc", ""), rows, right=(1, 2))
    out.print("above parameters, optimizer state and batch; measured includes workspace inside operators", style="dim")


def _show_time(out: Console, result: Result) -> None:
    seconds = {kind: statistics.median(found[WARM:] or found) for kind, found in result.seconds.items()}
    ratio = result.time_ratio
    paired = "too few steps to compare" if ratio is None else f"{ratio:.3f} of eager's, median of pairs"
    rows = [
        ("step, median", f"{seconds['eager']:.3f} s", f"{seconds['roamc']:.3f} s", paired),
        ("planning", "", f"{sum(result.plan['seconds'].values()):.2f} s", stage_times(result.plan["seconds"])),
    ]
    show_rows(out, ("time", "eager", "roamc", ""), rows, right=(1, 2))
    out.print(f"{result.total_seconds:.0f} s in all", style="dim")
