"""The tables of ``results/shard.json``: planned layers of Korthikanti et al.'s models beside the paper's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.summary import Cells, Rows, markdown

PAPER_MS = {"t": 19.6, "t + sequence": 19.0, "t + selective": 20.9, "both": 20.3, "full": 27.2}
"""Milliseconds of a layer of the 22 G model on eight ranks; table 4 of the paper."""
PAPER_SHARE = {"gpt3-22b": 0.161, "gpt3-175b": 0.185, "gpt3-530b": 0.202, "gpt3-1t": 0.202}
"""Bytes of "both" over those of "t", by the paper's formulas."""
PAPER_ADDED = {"gpt3-22b": (0.04, 0.39), "gpt3-530b": (0.02, 0.36), "gpt3-1t": (0.02, 0.36)}
"""Added time of "both" and of "full" over "t"; section 6.2 of the paper."""
FIRST, RANKS = "gpt3-22b", 8
ABOUT = (
    "One layer of the models of arXiv 2205.05198, planned for one of t ranks on a machine without a GPU (`roamc plan "
    "... --mesh tp=8`; unfused attention, 16 bits). Recomputation is marked by hand, as in the paper, whose values are "
    "in brackets. Times are predicted with the shipped profile a100 and its links; nothing is fitted to the paper. "
)


SEQ, VOCAB, PEAK = 2048, 51200, 312e12
"""Tokens of a sequence, sizes of the vocabulary, and FLOP/s of an A100 in 16 bits by its data sheet."""


@dataclass(frozen=True)
class Iteration:
    """An iteration of the paper's table 5.

    Attributes:
        layers: of the whole model.
        width: of the residual stream.
        stages: of the pipeline.
        parts: how many parts of the model each stage has, interleaved.
        batches: micro-batches of an iteration.
        batch: sequences of a micro-batch.
        full: its seconds with full recomputation.
        both: its seconds with sequence parallelism and selective recomputation.
        utilisation: of "both" by the paper, model's and hardware's, in percent.
    """

    layers: int
    width: int
    stages: int
    parts: int
    batches: int
    batch: int
    full: float
    both: float
    utilisation: tuple[float, float]

    def utilised(self, seconds: float) -> tuple[float, float]:
        """Return the utilisation of model FLOPs and of hardware FLOPs, in percent, of an iteration with "both".

        Equations 7 to 9 of the paper; what runs again counts among the hardware's as the paper counts it.
        """
        tokens, head = self.batches * self.batch * SEQ, VOCAB / (12 * self.width * self.layers)
        products = 72 * tokens * self.layers * self.width**2
        ideal = products / (self.stages * RANKS * PEAK) / seconds
        model, hardware = (100 * ideal * (1 + SEQ / (part * self.width) + head) for part in (6, 3))
        return model, hardware


ITERATIONS = {
    "gpt3-22b": Iteration(48, 6144, 1, 1, 1, 4, 1.42, 1.10, (41.5, 43.7)),
    "gpt3-175b": Iteration(96, 12288, 8, 3, 64, 1, 18.13, 13.75, (51.4, 52.8)),
    "gpt3-530b": Iteration(105, 20480, 35, 3, 280, 1, 49.05, 37.83, (56.0, 57.0)),
    "gpt3-1t": Iteration(128, 25600, 64, 1, 512, 1, 94.42, 71.49, (56.3, 57.0)),
}


def full(rows: Rows) -> list[str]:
    """Layers and iterations of the paper's models, exposed collectives, and what the solver finds within the peak of
    each row that is marked by hand, as lines of Markdown.
    """
    inner = {(row["model"], row["ranks"], row["row"]): row for row in rows if "formula" in row}
    layers = [*_six(inner), *_models(inner), *_exposed(rows)] if inner else []
    return [*layers, *_iterations(rows), *_solver(rows)]


def _six(inner: dict[tuple[str, int, str], dict[str, Any]]) -> list[str]:
    ranks = sorted({at for model, at, _ in inner if model == FIRST})
    names = [name for model, at, name in inner if (model, at) == (FIRST, RANKS)]
    base = inner[FIRST, RANKS, "t"]["ms"]
    table: list[Cells] = []
    for name in names:
        cells = [inner[FIRST, at, name] for at in ranks]
        saved = [f"{cell['saved_of_sbh']:.2f} ({cell['formula']:.2f})" for cell in cells]
        ms = inner[FIRST, RANKS, name]["ms"]
        paper = PAPER_MS.get(name)
        times = (
            [f"{ms:.1f} ({paper})", _percent(ms / base - 1, paper / PAPER_MS["t"] - 1)] if paper else [f"{ms:.1f}", ""]
        )
        table.append([name, *saved, *times])
    return [
        f"{ABOUT}For the 22 G model: bytes that an inner layer saves, divided by sbh (in brackets by the paper's "
        f"formula), milliseconds at t = {RANKS}, and added time over row t.",
        "",
        *markdown(f"layer | {' | '.join(f't = {at}' for at in ranks)} | ms | over t", table),
    ]


def _models(inner: dict[tuple[str, int, str], dict[str, Any]]) -> list[str]:
    table = []
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
        table.append(cells)
    return [
        "",
        f"Row both against row t, t = {RANKS}: bytes of a layer, and the time that both and full recomputation add.",
        "",
        *markdown("model | bytes, both of t | added by both | added by full | ms, t", table),
    ]


def _iterations(rows: Rows) -> list[str]:
    parts = {(row["model"], row["row"]): row for row in rows if "iteration" in row}
    if not parts:
        return []
    factors = next(iter(parts.values()))["factors"]
    table = []
    for model, paper in ITERATIONS.items():
        if (model, "both") not in parts:
            continue
        full_s, both_s = (parts[model, name]["iteration"] for name in ("full", "both"))
        cells = [
            f"{full_s:.2f} ({paper.full}), {full_s / paper.full - 1:+.1%}",
            f"{both_s:.2f} ({paper.both}), {both_s / paper.both - 1:+.1%}",
            _percent(full_s / both_s - 1, paper.full / paper.both - 1),
            "{:.1f} / {:.1f}".format(*paper.utilised(both_s)),
            "{:.1f} / {:.1f} ({} / {})".format(*paper.utilised(paper.both), *paper.utilisation),
        ]
        table.append([model, *cells])
    return [
        "",
        "Seconds of an iteration, as `python -m benchmarks.shard_iteration` adds them up: micro-batches of the longest "
        "stage, the pipeline's idle time, what stages send, embedding, head and loss split among the ranks, sums of "
        "gradients over the micro-batches and AdamW with clipping, both in float32. Here two constants of the profile "
        "are fitted, to the 7.7 and 11.9 ms of forward and backward of a layer of the model of 22 G: products at "
        f"{factors['flops']:.3f} times its rate, memory at {factors['bandwidth']:.3f} times its bandwidth. Utilisation "
        "is that of model FLOPs and of hardware FLOPs by the paper's formulas for these seconds; `*` that for the "
        "published seconds.",
        "",
        *markdown(
            "model | full | both | gain | MFU / HFU | MFU / HFU*",
            table,
        ),
    ]


def _solver(rows: Rows) -> list[str]:
    budgeted = [row for row in rows if "budget" in row]
    if not budgeted:
        return []
    table = []
    for row in budgeted:
        ms = ["refused" if row["refused"] else f"{row['ms']:.1f}", f"{row['needed'] / 1e9:.3f}"]
        cells = [f"{row['model']}, {row['ranks']}", row["row"], f"{row['budget'] / 1e9:.3f}", f"{row['hand_ms']:.1f}"]
        free = "" if row["refused"] else f"{row['free_ms']:.1f}"
        table.append([*cells, row["shard"], *ms, free])
    return [
        "",
        f"{budgeted[0]['layers']} of these layers without any mark, with the peak of those that are marked by hand as "
        "their budget: predicted milliseconds of forward and backward, and those at no added time.",
        "",
        *markdown(
            "model, t | marked by hand | budget, GB | ms by hand | `shard` | ms by the solver | needs, GB | ms without",
            table,
        ),
    ]


def _exposed(rows: Rows) -> list[str]:
    exposed = [row for row in rows if "exposed_ms" in row]
    if not exposed:
        return []
    table = []
    for row in exposed:
        ms = [f"{row['program_ms']:.2f}", f"{row['exposed_ms']:.2f}", f"{row['exposed_ms'] / row['program_ms']:.0%}"]
        peaks = [f"{row[name] / 1e9:.3f}" for name in ("peak", "reorder_peak", "program_peak")]
        cells = (f"{row['model']}, {row['ranks']}", row["row"], *ms, f"{row['bound_ms']:.2f}", *peaks)
        table.append(cells)
    return [
        "",
        f"{exposed[0]['layers']} of these layers with pass overlap: milliseconds of exposed communication in forward "
        "and backward, its lower bound for any order, and peaks in GB. In program order each collective is waited for "
        "at once.",
        "",
        *markdown(
            "model, t | layer | ms, program order | ms exposed | share | bound | peak | reorder alone | program order",
            table,
        ),
    ]


def _percent(value: float, paper: float | None) -> str:
    return f"{value:.1%}" + (f" ({paper:.1%})" if paper is not None else "")
