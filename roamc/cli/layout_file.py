"""``roamc layout``: offsets for the storages of a CSV file, as a table or as JSON."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from roamc import files
from roamc.errors import PlanError, VerifyError
from roamc.solvers.layout import solve, validate
from roamc.solvers.layout.csv_form import CsvError, format_csv, read_csv
from roamc.units import Bytes, Seconds, format_bytes

_NO_LIMIT = 1 << 60


def lay_out(path: Path, capacity: Bytes | None, seconds: Seconds | None, output: Path | None) -> dict[str, Any]:
    """Solve the layout problem in a CSV file, and write it with its offsets to another, if one is named.

    Args:
        path: CSV file of minimalloc's form: columns id, lower, upper (steps, half-open) and size (bytes).
        capacity: bytes of the arena at which the search may stop; None for no such limit.
        seconds: stop after about this time; None for the usual node limit.
        output: file for the rows with their offsets; None for none.

    Returns:
        What ``--json`` prints: ``storages`` (number), ``arena_bytes``, ``bound_bytes`` (lower bound of the arena),
        ``fragmentation`` (share by which the arena is above the bound), ``capacity``, ``fits``, ``status``,
        ``algorithm`` and ``seconds``.

    Raises:
        PlanError: the file is not of minimalloc's form; the message names the line.
        OSError: a file cannot be read or written.
        VerifyError: the judge does not accept the layout.
    """
    try:
        instance = read_csv(path)
    except CsvError as error:
        raise PlanError(str(error)) from None
    began = time.perf_counter()
    nodes = None if seconds is None else _NO_LIMIT
    solution = solve(instance.problem, node_limit=nodes, capacity=capacity, seconds=seconds)
    took = time.perf_counter() - began
    report = validate(instance.problem, solution)
    if not report.good:
        raise VerifyError(f"{solution.algorithm} gave a layout that is not legal: {report.detail}")
    if output is not None:
        files.write_text(output, format_csv(instance, solution.offset))
    return {
        "storages": instance.problem.num_storages,
        "arena_bytes": solution.arena_bytes,
        "bound_bytes": solution.bound_bytes,
        "fragmentation": solution.arena_bytes / solution.bound_bytes - 1 if solution.bound_bytes else 0.0,
        "capacity": capacity,
        "fits": capacity is None or solution.arena_bytes <= capacity,
        "status": solution.status.value,
        "algorithm": solution.algorithm,
        "seconds": round(took, 6),
    }


def rows(layout: dict[str, Any]) -> list[tuple[str, str]]:
    """Return ``layout``, a result of :func:`lay_out`, as (label, text) rows of a table."""
    shown = {
        "storages": f"{layout['storages']}",
        "arena": f"{layout['arena_bytes']} ({format_bytes(layout['arena_bytes'])})",
        "lower bound": f"{layout['bound_bytes']}",
        "fragmentation": f"{layout['fragmentation']:.4%}",
        "status": layout["status"],
        "algorithm": layout["algorithm"],
        "seconds": f"{layout['seconds']:.3f}",
    }
    return list(shown.items())


def shortfall(layout: dict[str, Any]) -> str:
    """Return a sentence on why the capacity is not met; ``layout`` is a result of :func:`lay_out` that does not fit."""
    arena, bound, capacity = layout["arena_bytes"], layout["bound_bytes"], layout["capacity"]
    if bound > capacity:
        return f"{bound} bytes are live at once, the capacity is {capacity}"
    proof = "no layout is lower" if layout["status"] == "infeasible" else "the search has ended without a proof"
    return f"the lowest arena found has {arena} bytes, the capacity is {capacity}; {proof}"
