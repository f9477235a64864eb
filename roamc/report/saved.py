"""A saved plan told again without its graph: nothing is counted, so the text says where its numbers are from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from roamc.planning.plan import Plan
from roamc.report.tables import say, show_rows
from roamc.report.text import ENCODED, RECOMPUTED, in_order, show_heading, show_layout, show_plan
from roamc.units import format_bytes, format_seconds


def origin(plan: Plan, file: str) -> str:
    """Return a sentence on what speaks for the numbers of ``plan``, which was read from ``file``."""
    versions = " and ".join(f"{name} {version}" for name, version in sorted(plan.versions.items()))
    return f"as written in {file}, made with {versions}; nothing was counted again without the graph"


def show_saved(out: Console, plan: Plan, file: str) -> None:
    """Print the table of ``plan``, which was read from ``file``, to ``out``."""
    show_plan(out, plan)
    say(out, f"  note: {origin(plan, file)}", 4)


def show_decisions(out: Console, plan: Plan, top: int) -> None:
    """Print what ``plan`` decided, one row for each pass, what it recomputes and encodes, and its layout.

    Args:
        out: where to print.
        plan: the plan.
        top: the most rows of the lists.
    """
    show_heading(out, "decisions")
    rows = [(name, _in_words(plan.decisions[name]) or "nothing") for name in in_order(plan.decisions)]
    show_rows(out, ("pass", "decided"), rows)
    retained = plan.decisions.get("retain", {})
    again = [(seconds, operator) for _, operator, _, _, seconds in retained.get("reruns", ())]
    times = [(format_seconds(seconds), operator) for seconds, operator in sorted(again, reverse=True)]
    _show_list(out, RECOMPUTED, ("predicted", "operator"), times, top, (0,))
    codes = sorted(retained.get("codes", ()), key=lambda code: code[3] - code[2])
    sizes = [(format_bytes(code[2]), format_bytes(code[3]), code[1], code[0]) for code in codes]
    _show_list(out, ENCODED, ("bytes", "encoded", "codec", "storage"), sizes, top, (0, 1))
    show_layout(out, plan)


def _show_list(
    out: Console, title: str, headings: Sequence[str], rows: Sequence[tuple[str, ...]], top: int, right: Sequence[int]
) -> None:
    if not rows:
        return
    show_heading(out, title)
    show_rows(out, headings, rows[:top], right)
    if rows[top:]:
        out.print(f"and {len(rows) - top} more", markup=False)


def _in_words(decision: Mapping[str, Any]) -> str:
    """A decision as how many each field lists, and its sizes, times and words; fields with nothing are left out."""
    return ", ".join(f"{name} {_value(name, item)}" for name, item in decision.items() if item)


def _value(name: str, item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, Sequence | Mapping):
        return str(len(item))
    return format_seconds(item) if name.endswith("seconds") else format_bytes(item)
