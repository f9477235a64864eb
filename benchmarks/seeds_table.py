"""The tables of ``results/seeds.json`` and ``results/seeds_loss.json``: Tempo and CompAct, by hand and by roamc."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.summary import Cells, Rows, markdown, megabytes


def programs(rows: Rows) -> list[str]:
    """Peak, states, time and error of every program."""
    eager = {row["model"]: row["measured"] for row in rows if row["kind"] == "eager"}
    return [
        "Tempo and CompAct (n/4): their layers as published, by hand, and `train_step` of the model as it is, exact, "
        'with `codecs="tempo"`, with `roamc.optim.CompAct`, and with both; behind `@` stands `memory_budget`. Peak of '
        "a step above parameters, optimizer state and batch, counted under malloc, and the optimizer's states (MB); "
        "step time to eager's, one thread; error of all gradients that are not projected, as a share of their norm. "
        "torch.compile draws other dropout masks on bert; Tempo's error is that of its polynomials. On these models "
        "roamc's plans run GELU and norms again in the place of Tempo's codes, which is cheaper:",
        "",
        *markdown(
            "model | program | peak | / eager | states | time / eager | error",
            (_program_row(row, eager[row["model"]]) for row in rows),
        ),
    ]


def _program_row(row: dict[str, Any], eager: int) -> Cells:
    sizes = megabytes(row["measured"]), f"{row['measured'] / eager:.3f}", megabytes(row["states"])
    return [row["model"], row["kind"], *sizes, f"{row['time']:.2f}", f"{row['error']:.0e}" if row["error"] else "0"]


def losses(rows: Rows) -> list[str]:
    """The loss of each rank."""
    return [
        f"Held-out loss (nats) of a language model of three layers on bytes after {rows[0]['steps']:,} steps, mean of "
        f"{len(rows[0]['losses'])} seeds, with AdamW and with CompAct, both learning rates tuned for each:",
        "",
        *markdown(
            "rank | loss | least to most | above AdamW | rate of linear layers | rate of the rest",
            (_loss_row(row) for row in rows),
        ),
    ]


def _loss_row(row: dict[str, Any]) -> Cells:
    reached = row["losses"]
    between = f"{min(reached):.3f} to {max(reached):.3f}"
    gap = "–" if row["kind"] == "dense" else f"{row['gap']:+.3f}"
    return [row["kind"], f"{statistics.fmean(reached):.3f}", between, gap, f"{row['rate']:g}", f"{row['rest']:g}"]
