"""The tables of ``results/shard.json``: planned layers of Korthikanti et al.'s models beside the paper's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PAPER_MS = {"t": 19.6, "t + sequence": 19.0, "t + selective": 20.9, "both": 20.3, "full": 27.2}
"""Milliseconds of a layer of the 22 G model on eight ranks; table 4 of the paper."""
PAPER_SHARE = {"gpt3-22b": 0.161, "gpt3-175b": 0.185, "gpt3-530b": 0.202, "gpt3-1t": 0.202}
"""Bytes of "both" over those of "t", by the paper's formulas."""
PAPER_ADDED = {"gpt3-22b": (0.04, 0.39), "gpt3-530b": (0.02, 0.36), "gpt3-1t": (0.02, 0.36)}
"""Added time of "both" and of "full" over "t"; section 6.2 of the paper."""
FIRST, RANKS = "gpt3-22b", 8
ABOUT = (
    "One layer of the models of arXiv 2205.05198, planned for one of t ranks on one machine without a GPU (`roamc plan "
    "... --mesh tp=8`; attention of plain operators, 16 bits). What runs again is marked by hand, as in the paper; its "
    "values stand in brackets. Times are predictions by the shipped profile a100 with its links; nothing is fitted to "
    "the paper. "
)


@dataclass(frozen=True)
class Iteration:
    """An iteration of the paper's table 5.

    Attributes:
        layers: of the whole model.
        stages: of the pipeline.
        parts: how many parts of the model each stage has, interleaved.
        batches: micro-batches of an iteration.
        full: its seconds with full recomputation.
        both: its seconds with sequence parallelism and selective recomputation.
    """

    layers: int
    stages: int
    parts: int
    batches: int
    full: float
    both: float

    def seconds(self, layer: float) -> float:
        """Return the seconds of an iteration whose layers take ``layer`` seconds, with the pipeline's idle time."""
        return (self.batches + (self.stages - 1) / self.parts) * self.layers / self.stages * layer


ITERATIONS = {
    "gpt3-22b": Iteration(48, 1, 1, 1, 1.42, 1.10),
    "gpt3-175b": Iteration(96, 8, 3, 64, 18.13, 13.75),
    "gpt3-530b": Iteration(105, 35, 3, 280, 49.05, 37.83),
    "gpt3-1t": Iteration(128, 64, 1, 512, 94.42, 71.49),
}

Rows = Sequence[dict[str, Any]]


def short(rows: Rows) -> list[str]:
    """Table 2 of the paper for its smallest model, its four models, and exposed collectives, as lines of Markdown."""
    inner = {(row["model"], row["ranks"], row["row"]): row for row in rows if "formula" in row}
    return [*_six(inner), *_models(inner), *_exposed(rows)] if inner else []


def full(rows: Rows) -> list[str]:
    """As :func:`short`, and what the solver finds within the peak of each row that is marked by hand."""
    return ["", *short(rows), *_iterations(rows), *_solver(rows)] if rows else []


def _six(inner: dict[tuple[str, int, str], dict[str, Any]]) -> list[str]:
    ranks = sorted({at for model, at, _ in inner if model == FIRST})
    names = [name for model, at, name in inner if (model, at) == (FIRST, RANKS)]
    base = inner[FIRST, RANKS, "t"]["ms"]
    lines = [
        f"{ABOUT}The model of 22 G parameters: bytes that an inner layer saves, divided by sbh (in brackets by the "
        f"paper's formula), its milliseconds at t = {RANKS}, and those over t.",
        "",
        f"| layer | {' | '.join(f't = {at}' for at in ranks)} | ms | over t |",
        "|---|" + "---|" * (len(ranks) + 2),
    ]
    for name in names:
        cells = [inner[FIRST, at, name] for at in ranks]
        saved = [f"{cell['saved_of_sbh']:.2f} ({cell['formula']:.2f})" for cell in cells]
        ms = inner[FIRST, RANKS, name]["ms"]
        paper = PAPER_MS.get(name)
        times = (
            [f"{ms:.1f} ({paper})", _percent(ms / base - 1, paper / PAPER_MS["t"] - 1)] if paper else [f"{ms:.1f}", ""]
        )
        lines.append(f"| {' | '.join((name, *saved, *times))} |")
    return lines


def _models(inner: dict[tuple[str, int, str], dict[str, Any]]) -> list[str]:
    lines = [
        "",
        f"Both against t alone, t = {RANKS}: bytes of a layer, and what both and full recomputation add to its time.",
        "",
        "| model | bytes, both of t | added by both | added by full | ms, t |",
        "|---|---|---|---|---|",
    ]
    for model in PAPER_SHARE:
        if (model, RANKS, "t") not in inner:
            continue
        alone, both, again = (inner[model, RANKS, name] for name in ("t", "both", "full"))
        paper = PAPER_ADDED.get(model, (None, None))
        cells = [
            model,
            _percent(both["saved"] / alone["saved"], PAPER_SHARE[model]),
            *(_percent(row["ms"] / alone["ms"] - 1, of) for row, of in zip((both, again), paper, strict=True)),
            f"{alone['ms']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _iterations(rows: Rows) -> list[str]:
    lines = [
        "",
        "Seconds of an iteration, from the time of a layer and the idle time of the pipeline alone: without embedding, "
        "head, optimizer and what stages send.",
        "",
        "| model | full | both | gain |",
        "|---|---|---|---|",
    ]
    layer = {(row["model"], row["row"]): row["ms"] / 1e3 for row in rows if "formula" in row and row["ranks"] == RANKS}
    for model, paper in ITERATIONS.items():
        if (model, "both") not in layer:
            continue
        full_s, both_s = (paper.seconds(layer[model, name]) for name in ("full", "both"))
        gain = _percent(full_s / both_s - 1, paper.full / paper.both - 1)
        lines.append(f"| {model} | {full_s:.2f} ({paper.full}) | {both_s:.2f} ({paper.both}) | {gain} |")
    return lines


def _solver(rows: Rows) -> list[str]:
    found = [row for row in rows if "budget" in row]
    if not found:
        return []
    lines = [
        "",
        f"{found[0]['layers']} of these layers without any mark, with the peak of those that are marked by hand as "
        "their budget: predicted milliseconds of forward and backward, and those without a budget.",
        "",
        "| model, t | marked by hand | budget, GB | ms by hand | `shard` | ms by the solver | needs, GB | ms without |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ms = ["refused" if row["refused"] else f"{row['ms']:.1f}", f"{row['needed'] / 1e9:.3f}"]
        cells = [f"{row['model']}, {row['ranks']}", row["row"], f"{row['budget'] / 1e9:.3f}", f"{row['hand_ms']:.1f}"]
        free = "" if row["refused"] else f"{row['free_ms']:.1f}"
        lines.append(f"| {' | '.join((*cells, row['shard'], *ms, free))} |")
    return lines


def _exposed(rows: Rows) -> list[str]:
    found = [row for row in rows if "exposed_ms" in row]
    if not found:
        return []
    lines = [
        "",
        f"{found[0]['layers']} of these layers, their collectives split by pass overlap: milliseconds of collectives "
        "that no other operator hides, in forward and backward, their lower bound for any order, and peaks in GB. In "
        "program order each collective is waited for at once.",
        "",
        "| model, t | layer | ms, program order | ms exposed | share | bound | peak | reorder alone | program order |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ms = [f"{row['program_ms']:.2f}", f"{row['exposed_ms']:.2f}", f"{row['exposed_ms'] / row['program_ms']:.0%}"]
        peaks = [f"{row[name] / 1e9:.3f}" for name in ("peak", "reorder_peak", "program_peak")]
        cells = (f"{row['model']}, {row['ranks']}", row["row"], *ms, f"{row['bound_ms']:.2f}", *peaks)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _percent(value: float, paper: float | None) -> str:
    return f"{value:.1%}" + (f" ({paper:.1%})" if paper is not None else "")
