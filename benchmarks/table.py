"""Write ``RESULTS.md``, and the README's table and example, from the results: ``python -m benchmarks.table``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from benchmarks import (
    budget,
    gpu_table,
    kept,
    order_layout,
    planning,
    processes_table,
    retain_rivals,
    seeds_table,
    shard_table,
    summary,
)
from benchmarks._measure import HERE, RESULTS
from benchmarks.summary import Cells, Rows, markdown, megabytes
from roamc.operators.gpu.ahead import TARGETS


def full() -> str:
    """All tables as Markdown; the last ones as far as they were measured."""
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.table` from the files in `benchmarks/results`, which say with what each was "
        f"made. {_machine()}",
        "",
        *summary.overview(_budget_rows(_rows_of("budget"))),
        "",
        *summary.kept(_rows_of("kept")),
        "",
        *summary.rivals(_rows_of("retain_rivals")),
    ]
    for name, title, section in SECTIONS:
        rows = _rows_of(name)
        lines += ["", f"## {title}", "", *section(rows)] if rows else []
    return "\n".join([*lines, ""])


def short() -> str:
    """What the README shows."""
    lines = [
        *summary.overview(_budget_rows(_rows_of("budget"))),
        "",
        *summary.kept(_rows_of("kept")),
        f"{_machine()} [All tables](benchmarks/RESULTS.md).",
    ]
    return "\n".join(lines)


def example() -> str:
    """One plan, as the command line prints it."""
    (row,) = _rows_of("example")
    return "\n".join(["```", f"$ {row['command']}", *row["lines"], "```"])


def _machine() -> str:
    where = json.loads((RESULTS / "peak.json").read_text())["machine"]
    return (
        f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, Python {where['python']}, {where['date']}; "
        "`make bench` measures again."
    )


def _peak(rows: Rows) -> list[str]:
    """Peaks at no added time, on both routes."""
    return [
        "Peak bytes of one step with AdamW above parameters, optimizer state and batch, each in a fresh process, "
        "counted under malloc (MB). Tensors are what the plan holds of them at its peak; predicted is that with the "
        "estimate of what operators take for themselves, and workspace the most that one was seen to take.",
        "",
        *markdown(
            "model | dtype | eager | `train_step` | of eager's | tensors | predicted | measured / predicted "
            "| workspace | fragmentation",
            (_peak_row(row) for row in rows),
        ),
        "",
        "The same for a loop around a compiled model, gradients handed out in `.grad` (MB):",
        "",
        *markdown(
            "model | dtype | eager | `aot_eager` | `roamc.optimize` | of eager's | `idle_arena=\"free\"` | of eager's",
            (_loop_row(row) for row in rows),
        ),
    ]


def _speed(rows: Rows) -> list[str]:
    """Step times at no added time."""
    return [
        "Step time, median of ratios over interleaved steps, and seconds to capture and to plan the whole step:",
        "",
        *markdown(
            "model | `train_step` / eager | `train_step` / `aot_eager` | `optimize` / eager | `optimize` / `aot_eager` "
            "| capture s | planning s",
            (_speed_row(row) for row in rows),
        ),
    ]


def _fast(rows: Rows) -> list[str]:
    """Step times with other numerics."""
    ratios = ("fast / eager", "fast / compile", "fast / exact", "exact / compile")
    return [
        'Step time with `numerics="fast"`, float32, one thread, CPU time, median of ratios over interleaved steps. '
        "With torch.compile, AdamW is not part of the graph:",
        "",
        *markdown(
            'processor | model | `"fast"` / eager | / torch.compile | / `"exact"` | exact / torch.compile',
            ([row["cpu"], row["model"], *(f"{row[ratio]:.3f}" for ratio in ratios)] for row in rows),
        ),
    ]


def _groups(rows: Rows) -> list[str]:
    """Peaks and times with and without pass fuse, of each model where it was measured last."""
    latest = {row["model"]: row for row in sorted(rows, key=lambda row: row["date"])}.values()
    return [
        "Fused operators, exact: peak heap memory of a step (MB) with pass `fuse`, in brackets without it, and step "
        "time with / without:",
        "",
        *markdown(
            'model | groups | torch.compile | `"+0%"` | `"light"` | `"min"` | time',
            (_groups_row(row) for row in latest if "peaks" in row),
        ),
    ]


def _groups_row(row: dict[str, Any]) -> Cells:
    peaks = {key: megabytes(peak["measured"]) for key, peak in row["peaks"].items()}
    ours = (f"{peaks[f'fused {kind}']} ({peaks[f'unfused {kind}']})" for kind in ("none", "light", "min"))
    return [row["model"], len(row["groups"]), peaks["compile"], *ours, f"{row['exact / unfused']:.3f}"]


def _kernels(rows: Rows) -> list[str]:
    """What programs for a GPU launch, and what their kernels move and take."""
    return [
        'Programs for a GPU, bfloat16, `numerics="fast"`, made without one. Launches of kernels and operators of '
        "forward and backward without and with pass `fuse`, beside what torch.compile's scheduler makes of the same "
        "graph (generated kernels + operators of ATen), and those of the whole step with AdamW, of which the groups "
        "and kernels are. Bytes are what all kernels move by their text, to their operands and results once; loops "
        "are kernels that read their rows more than once, for these do not fit into registers, and other is the most "
        "that any other kernel moves, partial sums of columns left out. Registers of a thread and spilled bytes are "
        "the most of any kernel, compiled for A100, H100 and MI300; nothing was timed:",
        "",
        *markdown(
            "model | groups | without | with | torch.compile | step without | step with | kernels | bytes | loops "
            "| other | registers, sm_80 | sm_90 | gfx942 | spilled",
            (_kernels_row(row) for row in rows),
        ),
    ]


def _kernels_row(row: dict[str, Any]) -> Cells:
    kernels, rival = row["kernels"], row["torch.compile"]
    moved, least = (sum(kernel[key] * kernel["count"] for kernel in kernels) for key in ("moved", "least"))
    held = [kernel for kernel in kernels if kernel["reads"] == 1]
    takes = [one for kernel in kernels for one in kernel["takes"]]
    registers = (max(one["registers"] for one in takes if one["target"] == name) for name in TARGETS)
    return [
        *(row["model"], row["groups"], row["launches"]["before"], row["launches"]["after"]),
        "–" if "refused" in rival else f"{sum(rival.values())} ({rival['triton']} + {rival['extern']})",
        *(row["step launches"]["before"], row["step launches"]["after"], len(kernels), f"{moved / least:.3f}"),
        *(len(kernels) - len(held), f"{max((k['moved'] - 2 * k['partials']) / k['least'] for k in held):.3f}"),
        *(*registers, max(one["spilled_bytes"] for one in takes)),
    ]


def _rows_of(name: str) -> Rows:
    """What was measured; nothing where nobody has."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _budget(rows: Rows) -> list[str]:
    """Step time against measured peak."""
    return [
        "Step time against measured peak, one thread, AdamW (MB, s). `+block` is `torch.utils.checkpoint` around every "
        "block, `+select` keeps its matrix products and attention; after `@` stands `memory_budget`, or the budget of "
        'torch.compile; programs of roamc without it have `"+0%"`, and `@+1%` is the default. Times are medians of '
        "ratios over interleaved steps: to the same program of no added time, and to eager; quickest is the ratio of "
        "the quickest steps. Predicted are the first, the seconds added, and the least that any choice of reruns adds "
        "within that peak. Values are compared with the same program of no added time, that with `aot_eager`, and "
        "that with eager:",
        "",
        *markdown(
            "model | program | measured peak | planned | workspace | time / no added | quickest | time / eager "
            "| predicted | added | lower bound | planning | values",
            (_budget_row(row) for row in rows),
        ),
    ]


def _budget_rows(rows: Rows) -> Rows:
    return sorted(rows, key=_place)


def _place(row: dict[str, Any]) -> tuple[int, int]:
    """Models and their programs in the sequence in which they are measured."""
    kinds = budget.rows_of(row["model"])
    kind = kinds.index(row["kind"]) if row["kind"] in kinds else len(kinds)
    return budget.MODELS.index(row["model"]), kind


def _budget_row(row: dict[str, Any]) -> Cells:
    if "refused" in row:
        return [row["model"], row["kind"], "–", f"needs {megabytes(row['refused'])}", *"–" * 9]
    time, ours = row.get("time"), "peak_bytes" in row
    return [
        row["model"],
        row["kind"],
        megabytes(row["measured"]),
        megabytes(row["peak_bytes"]) if ours else "–",
        megabytes(row["workspace"]) if ours else "–",
        f"{time['of free']:.2f}" if time else "–",
        f"{time['least of free']:.2f}" if time and "least of free" in time else "–",
        f"{time['of eager']:.2f}" if time else "–",
        f"{row['predicted_ratio']:.2f}" if "predicted_ratio" in row else "–",
        f"{row['added_seconds']:.3f}" if ours else "–",
        f"{row['added_bound_seconds']:.3f}" if ours else "–",
        f"{row['planning']:.1f}" if ours else "–",
        _values(row.get("like")),
    ]


def _falling(rows: Rows) -> list[str]:
    """Peaks and times under one budget after another, each planned by itself."""
    row_at = {(row["model"], *row["kind"].split("@")): row for row in rows if "@" in row["kind"]}
    routes = dict.fromkeys(key[:2] for key in row_at)
    return [
        "Ten falling budgets, shares of what eager takes, each planned by itself: measured peak (MB) and measured step "
        'time to that of `"+0%"`; – is refused:',
        "",
        *markdown(
            f"model | route | measured | {' | '.join(budget.FALLING)}",
            (
                [model, route, what, *(cell(row_at[model, route, at]) for at in budget.FALLING)]
                for model, route in routes
                for what, cell in (("peak", _falling_peak), ("time", _falling_time))
            ),
        ),
    ]


def _falling_peak(row: dict[str, Any]) -> str:
    return "–" if "refused" in row else megabytes(row["measured"])


def _falling_time(row: dict[str, Any]) -> str:
    return f"{row['time']['of free']:.3f}" if "time" in row else "–"


def _values(like: dict[str, Any] | None) -> str:
    if like is None:
        return "–"
    return "the same bits" if like["equal"] else f"off by {like['error']:.0e}"


def _grouped(rows: Rows, key: Callable[[dict[str, Any]], tuple[Any, ...]]) -> dict[tuple[Any, ...], Rows]:
    """Rows with one key together, in the sequence in which the keys come first."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _kept(rows: Rows) -> list[str]:
    """Measured peaks as shares of the budget."""
    by_route = _grouped(rows, lambda row: (row["model"], row["dtype"], row["kind"].split()[0]))
    return [
        "Whether budgets are kept: the measured peak as a share of `memory_budget`, a share of what eager takes. "
        "`min` is measured against what the plan says that it needs; – is refused, with the smallest budget that the "
        "planner reached as a share of what eager takes. Where torch.compile splits a model each piece keeps the "
        f"budget by itself, and the peak is that of all.{summary.same_bits(rows)}",
        "",
        *markdown(
            f"model | dtype | route | {' | '.join(kept.BUDGETS)}",
            ([*name, *map(_kept_cell, cells)] for name, cells in by_route.items()),
        ),
    ]


def _exact(rows: Rows) -> list[str]:
    """How many programs with groups, under every budget, have the bits of that of ``"+0%"`` without groups."""
    by_type = _grouped(rows, lambda row: (row["model"], row["dtype"], row["threads"]))
    return [
        'Whether exact is exact: on all three ways in, with `"+0%"`, 70 %, 40 %, `light` and `min`, losses, gradients '
        'and parameters of three steps against the program of `"+0%"` without pass `fuse`. Groups are those of all '
        "programs of a row together, and so are operators that run again.",
        "",
        *markdown(
            "model | dtype | threads | programs | refused | same bits | tensors compared | groups | run again",
            ([*name, *_exact_cells(group)] for name, group in sorted(by_type.items())),
        ),
    ]


def _exact_cells(rows: Rows) -> Cells:
    ran = [row for row in rows if "equal" in row]
    totals = [sum(row[key] for row in ran) for key in ("compared", "groups", "reruns")]
    return [len(rows), len(rows) - len(ran), sum(row["equal"] for row in ran), *totals]


def _collectives(rows: Rows) -> list[str]:
    """Gradients of several ranks against those of one."""
    by_way = _grouped(rows, lambda row: (row["ranks"], row["split"], row["way"]))
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    budgets = ", ".join(dict.fromkeys(row["budget"] for row in rows))
    return [
        f"Gradients of several gloo ranks against those of one rank: {models}; budgets {budgets}. R is "
        '`torch.compile(backend="roamc")`, O `roamc.optimize`, S `roamc.train_step`. Worst is the largest relative '
        "error of a gradient in any pass; a fault is an error, no end, or a collective that nobody waited for.",
        "",
        *markdown(
            "ranks | split | way | plans | refused | passes | worst | eager's | eager's bits | faults",
            ([*name, *_collective_cells(group)] for name, group in sorted(by_way.items())),
        ),
    ]


def _collective_cells(rows: Rows) -> Cells:
    measured = [row for row in rows if "worst" in row]
    faults = sum("fault" in row or bool(row["unwaited"]) for row in rows)
    counts = [len(rows), sum("refused" in row for row in rows), sum(row["runs"] for row in measured)]
    errors = [f"{max(row[key] for row in measured):.1e}" if measured else "–" for key in ("worst", "eager")]
    same = f"{sum(row['same'] for row in measured)} of {len(measured)}" if measured else "–"
    return [*counts, *errors, same, faults]


def _kept_cell(row: dict[str, Any]) -> str:
    if "refused" in row:
        share = float(row["kind"].split()[1].rstrip("%")) / 100
        return f"– ({row['refused'] / row['budget'] * share:.0%})"
    pieces = f" ({row['pieces']} pieces)" if row["pieces"] > 1 else ""
    return f"{row['measured'] / row['budget']:.3f}{pieces}"


def _planning(rows: Rows) -> list[str]:
    """What plans add, how far that can be from the least, and what making them takes."""
    by_route = _grouped(rows, lambda row: (row["model"], row["kind"].split()[0], row["operators"]))
    lines = [
        "Planning under a budget, from graphs alone: predicted added time, in brackets the gap (predicted step time "
        "over the least that is proved for any choice within the budget), and processor seconds, capture apart; – is "
        "refused:",
        "",
        *markdown(
            f"model | route | operators | {' | '.join(planning.BUDGETS)}",
            ([*key, *map(_planning_cell, cells)] for key, cells in by_route.items()),
        ),
    ]
    for row in rows:
        if "torch" in row:
            lines += [
                "",
                f"torch's own partitioner takes {row['torch']:.1f} s for {row['model']}, {row['kind'].split()[0]}.",
            ]
    return lines


def _planning_cell(row: dict[str, Any]) -> str:
    seconds = f"{row['seconds']:.1f} s"
    if row["refused"]:
        return f"– {seconds}"
    return seconds if row["kind"].endswith("none") else f"{row['added']:.1%} ({row['gap']:.1%}) {seconds}"


def _repeats(rows: Rows) -> list[str]:
    """What tracing layers that are alike once is worth."""
    return [
        "Capturing the whole step of a deep model for a plan: processor seconds with every layer traced, and with "
        "layers that are alike traced once and copied, one thread; medians over interleaved captures. The graphs are "
        f"the same, name for name, in {sum(row['same'] for row in rows)} of {len(rows)}.",
        "",
        *markdown(
            "model | layers | nodes | every layer s | copied s | copied / every layer",
            (
                [
                    row["model"],
                    *(f"{row[key]:,}" for key in ("layers", "nodes")),
                    *(f"{row[key]:.2f}" for key in ("whole", "copied", "ratio")),
                ]
                for row in rows
            ),
        ),
    ]


def _cost(rows: Rows) -> list[str]:
    """Predicted step times and the errors of operators."""
    return [
        "Predicted step time of `train_step` after `roamc calibrate`, against the least of several steps, one "
        "thread by processor time; and the error of single operators (all of one name and shapes together, those above "
        "1 % of the step):",
        "",
        *markdown(
            "model | threads | predicted s | measured s | predicted / measured | operators: median error | "
            "operators compared | their share of the step",
            (_cost_row(row) for row in rows),
        ),
    ]


def _cost_row(row: dict[str, Any]) -> Cells:
    step, compared = row["step"], row["compared"]
    return [
        row["model"],
        row["threads"],
        f"{step['predicted']:.3f}",
        f"{step['measured']:.3f}",
        f"{row['predicted / measured']:.3f}",
        f"{row['median operator error']:.1%}",
        compared["operators"],
        f"{compared['share']:.0%}",
    ]


def _order_layout(rows: Rows) -> list[str]:
    """Means over the paper's models, then the graphs with SGD."""
    return [
        *_saving(rows),
        "",
        "Temporary bytes of the whole step with SGD (MB). The bound holds for every order; fragmentation is arena over "
        "peak. MODeL is its integer program on CP-SAT with a time limit:",
        "",
        *markdown(
            "model | batch | operators | reserved by PyTorch | best of lpmf, bfs, dfs, LESCEA | MODeL | ours | bound "
            "| fragmentation | seconds",
            (_order_row(row) for row in rows if row["kind"] == "sgd"),
        ),
    ]


def _saving(rows: Rows) -> list[str]:
    """Means over the paper's models."""
    return [
        "Order and layout alone: memory saved in total (parameters, state, batch and temporaries) against what "
        "PyTorch's caching allocator reserves in eager mode (simulated). Mean over AlexNet, VGG-16, MNASNet, "
        "MobileNet, EfficientNet, ViT and BERT at batch 1 and 32:",
        "",
        *markdown(
            "graph | order and layout | with in-place reuse | as planned | as planned, against expandable segments",
            (_mean_row(rows, kind) for kind in order_layout.KINDS),
        ),
    ]


def _mean_row(rows: Rows, kind: str) -> Cells:
    ways = ({}, {"ours": "reuse"}, {"ours": "plan"}, {"ours": "plan", "allocator": "expandable"})
    means = (order_layout.mean_saved(rows, kind, **how) for how in ways)
    return [kind, *("–" if mean is None else f"{mean:.1%}" for mean in means)]


def _order_row(row: dict[str, Any]) -> Cells:
    ours, ilp = row["ours"], row["model_ilp"].get("peak")
    return [
        row["model"],
        row["batch"],
        row["operators"],
        megabytes(row["pytorch"]["reserved"]),
        megabytes(order_layout.best_order(row)[1]),
        "–" if ilp is None else megabytes(ilp),
        megabytes(ours["peak"]),
        megabytes(ours["bound"]),
        f"{ours['arena'] / max(ours['arena_bound'], 1) - 1:.3%}",
        f"{ours['seconds'] + ours['layout_seconds']:.2f}",
    ]


def _retain_rivals(rows: Rows) -> list[str]:
    """Seconds added and seconds taken, ours and the published formulations'."""
    return [
        "Which operators run again under a budget, against Moccasin (retention intervals) and Checkmate (integer "
        f"program), both on CP-SAT with one thread and {rows[0]['limit']:g} s: the same operators in the same order, "
        "no in-place reuse. Budgets are shares of the way from the lowest peak that ours finds to that without reruns. "
        "Added time is a share of the step's; an optimum that is proved is marked * (Moccasin's: of at most one rerun "
        "of each operator), and – is no answer in time, or none with so few reruns. All may rerun an operator before "
        "its result is needed, while its inputs are still there, which pays on random layers:",
        "",
        *markdown(
            "graph | operators | budget | ours | lower bound | Moccasin | Checkmate | seconds: ours | Moccasin "
            "| Checkmate",
            (_retain_row(row) for row in rows),
        ),
    ]


def _retain_row(row: dict[str, Any]) -> Cells:
    ours, rivals = row["ours"], [row[name] for name in retain_rivals.RIVALS]
    return [
        row["model"],
        row["operators"],
        row["kind"],
        _share(ours["added"], row, ours["status"] == "optimal"),
        _share(ours["bound"], row),
        *(_share(rival["added"], row, rival["status"] == "OPTIMAL") for rival in rivals),
        *(f"{each['seconds']:.2f}" for each in (ours, *rivals)),
    ]


def _share(added: float | None, row: dict[str, Any], proved: bool = False) -> str:
    return "–" if added is None else f"{added / row['step']:.2%}{'*' if proved else ''}"


def _peak_row(row: dict[str, Any]) -> Cells:
    step, eager = row["train_step"], row["eager"]["measured"]
    return [
        row["model"],
        row["dtype"],
        megabytes(eager),
        megabytes(step["measured"]),
        f"{step['measured'] / eager:.3f}",
        megabytes(step["peak_bytes"]),
        megabytes(step["needed_bytes"]),
        f"{step['measured'] / step['needed_bytes']:.4f}",
        megabytes(step["workspace"]),
        f"{step['arena_bytes'] / max(step['live_bytes'], 1) - 1:.2%}",
    ]


def _loop_row(row: dict[str, Any]) -> Cells:
    eager = row["eager"]["measured"]
    cells = [row["model"], row["dtype"], megabytes(eager), megabytes(row["aot_eager"]["measured"])]
    for route in ("optimize", "optimize_free"):
        cells += [megabytes(row[route]["measured"]), f"{row[route]['measured'] / eager:.3f}"]
    return cells


def _speed_row(row: dict[str, Any]) -> Cells:
    ratios = ("train_step / eager", "train_step / aot_eager", "optimize / eager", "optimize / aot_eager")
    capture = row["planning"]["capture"]
    rest = sum(row["planning"].values()) - capture
    return [row["model"], *(f"{row[ratio]:.3f}" for ratio in ratios), f"{capture:.2f}", f"{rest:.2f}"]


SECTIONS: tuple[tuple[str, str, Callable[[Rows], list[str]]], ...] = (
    ("peak", "Peaks at no added time", _peak),
    ("speed", "Step times at no added time", _speed),
    ("fuse", "Fast numerics on a CPU", _fast),
    ("fuse", "Fused operators on a CPU", _groups),
    ("kernels", "Kernels of a GPU", _kernels),
    ("budget", "Under a budget", _budget),
    ("processes", "The default in several processes", processes_table.programs),
    ("falling", "Falling budgets", _falling),
    ("kept", "Whether budgets are kept", _kept),
    ("exact", "Whether exact is exact", _exact),
    ("collectives", "Gradients of several ranks", _collectives),
    ("shard", "Ranks of a mesh", shard_table.full),
    ("gpu", "Steps on a GPU", gpu_table.steps),
    ("gpu_layer", "A layer on a GPU", gpu_table.layer),
    ("repeats", "Capture", _repeats),
    ("planning", "Planning", _planning),
    ("cost", "Predicted times", _cost),
    ("order_layout", "Order and layout", _order_layout),
    ("retain_rivals", "Recomputation solvers", _retain_rivals),
    ("seeds", "Tempo and CompAct", seeds_table.programs),
    ("seeds_loss", "Loss with CompAct", seeds_table.losses),
)
"""Name of a file of results, and heading and lines of what the page of all tables shows of it."""

MARKS: dict[str, Callable[[], str]] = {"example": example, "results": short}
"""Word in the README's comments ``<!-- table: WORD -->`` and ``<!-- end -->`` to what stands between them."""


def main() -> None:
    """Write the page of all tables, and put those of the README between their marks."""
    (HERE / "RESULTS.md").write_text(full())
    page = HERE.parent / "README.md"
    page.write_text(filled(page.read_text()))


def filled(text: str) -> str:
    """Return a page with every table between its marks written anew."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(\n<!-- end -->)",
        lambda mark: mark[1] + MARKS[mark[2]]() + mark[3],
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    main()
