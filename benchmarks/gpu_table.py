"""The tables of ``results/gpu.json`` and ``results/gpu_layer.json``: what was measured on a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu import RIVAL
from benchmarks.summary import Cells, Rows, markdown, megabytes


def steps(rows: Rows) -> list[str]:
    """Times and peaks of whole steps."""
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows if "device" in row))
    return [
        f"Steps on a GPU ({devices}; bfloat16, AdamW fused): milliseconds, and peak of torch's allocator above "
        f"parameters, optimizer state and batch (MB), and both divided by those of torch.compile (`{RIVAL}`). Planned "
        "is the peak with what operators are estimated to take for themselves:",
        "",
        *markdown(
            "model | program | ms | / torch.compile | peak | / torch.compile | planned",
            (_step_row(row) for row in rows if "failed" not in row),
        ),
    ]


def _step_row(row: dict[str, Any]) -> Cells:
    ratios = [f"{row[key]:.3f}" if key in row else "–" for key in ("of rival", "peak of rival")]
    planned = megabytes(row["needed_bytes"]) if "needed_bytes" in row else "–"
    ms = f"{1e3 * row['seconds']:.1f}"
    return [row["model"], f"`{row['kind']}`", ms, ratios[0], megabytes(row["measured"]), ratios[1], planned]


def layer(rows: Rows) -> list[str]:
    """Bytes and times of a paper's layer."""
    devices = ", ".join(dict.fromkeys(row["four"]["device"] for row in rows if "four" in row))
    return [
        f"A layer of the 22 G model of arXiv 2205.05198 at the shapes of one of eight ranks, without collectives, on a "
        f"GPU ({devices}): what PyTorch holds between forward and backward, divided by sbh (the paper's formula in "
        "brackets), milliseconds, and what recomputation adds. By PyTorch and by "
        "roamc with marks by hand, and by roamc without marks within the peak of the marked program. Peaks are of four "
        "layers (MB):",
        "",
        *markdown(
            "recomputed | by | held / sbh | ms | added | peak | planned | run again",
            (_layer_row(row) for row in rows if "failed" not in row),
        ),
    ]


def _layer_row(row: dict[str, Any]) -> Cells:
    four = row["four"]
    planned = [megabytes(four["needed"]), four["reruns"]] if "needed" in four else ["–", "–"]
    added = f"{row['added']:+.1%}" if row["row"] != "t" and "added" in row else "–"
    held = f"{row['held_of_sbh']:.2f} ({row['formula']:.2f})" if row["way"] == "eager" else "–"  # arenas hold more
    return [row["row"], row["way"], held, f"{row['ms']:.2f}", added, megabytes(four["measured"]), *planned]
