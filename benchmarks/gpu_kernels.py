"""Kernels timed on a GPU, beside their operators, torch.compile's kernels for them, and the memory's rate.

    python -m benchmarks.gpu_kernels [MODEL ...]

The kernels of whole steps with AdamW, bfloat16, numerics="fast", of models with batches so large that most kernels
move 64 MiB and more; each on random numbers, launched in its fastest shape, with caches flushed before every run,
shortest of eight. Bytes are those of operands and results once. The rate of a copy of 1 GiB is measured as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from benchmarks._measure import Row, fresh, save
from benchmarks.gpu import alone
from benchmarks.kernels import HALF, bytes_moved, captured, grouped, kernels_of
from roamc.cli import zoo
from roamc.graph import placeholders
from roamc.operators.blocks import only_tensor
from roamc.operators.gpu import here, tuning
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.operands import is_number
from roamc.units import Bytes

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 124M, 2 layers": ("gpt2", {**HALF, "layers": 2, "batch": 32}),
    "LLaMA 1B, 2 layers": (
        "llama", {**HALF, "layers": 2, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "batch": 8},
    ),
    "BERT-large, 2 layers": ("bert", {**HALF, "layers": 2, "width": 1024, "heads": 16, "hidden": 4096, "batch": 64}),
}  # fmt: skip
"""Name to the model of the zoo and its settings."""

LEAST: Bytes = 1 << 22
"""Kernels that move less take about as long as their launch."""

DEVICE = torch.device("cuda", 0)


def worker(name: str) -> list[Row]:
    """Rows of the kernels of one model; made ready beside others, timed alone."""
    with alone(False):
        groups = kernels_of(grouped(captured(zoo.make(*MODELS[name]), whole=True)))
        rows: dict[FusedKernel, Row] = {
            same[0]: {"kind": f"{number} {same[0].title}", "count": len(same)}
            for number, same in enumerate(groups.values())
        }
        runs = {group: _runs(group) for group in rows if bytes_moved(group)[1] >= LEAST}
    with alone(True):
        rate = _rate_of_a_copy()
        tuning.tune([*runs])
        for group, of in runs.items():
            rows[group] |= _timed(group, of(), rate)
    return [{"model": name, "device": torch.cuda.get_device_name(), **rows[group]} for group in runs]


def _rate_of_a_copy() -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    (seconds,) = here.seconds_of([lambda: target.copy_(source)], DEVICE)  # type: ignore[list-item]
    return 2 * source.nbytes / seconds


def _runs(group: FusedKernel) -> Callable[[], dict[str, Callable[[], Any]]]:
    """Compile what runs in the place of a group; return a function that gives the runs, with operands of their own."""
    module = fx.GraphModule({}, group.body)
    compiled = torch.compile(module, dynamic=False)

    def runs() -> dict[str, Callable[[], Any]]:
        operands = [1.0 if is_number(node) else _filled(only_tensor(node)) for node in placeholders(group.body)]
        results = [only_tensor(node) for node in group.results]
        outs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=DEVICE) for t in results]
        out = (*outs, None)[0] if len(outs) < 2 else tuple(outs)
        return {
            "ours": lambda: group.write(*operands, out=out),
            "operators": lambda: module(*operands),
            "compile": lambda: compiled(*operands),
        }

    for run in runs().values():
        run()
    torch.cuda.empty_cache()
    return runs


def _timed(group: FusedKernel, runs: dict[str, Callable[[], Any]], rate: float) -> Row:
    """Seconds of each run, and the share of the memory's peak rate, and of a copy's rate, that ours has.

    Where the kernel writes over operands, the others return what it would write.
    """
    least = bytes_moved(group)[1]
    for run in runs.values():
        run()
    seconds = dict(zip(runs, here.seconds_of(list(runs.values()), DEVICE), strict=True))
    about = torch.cuda.get_device_properties(DEVICE)
    peak = about.memory_clock_rate * 1e3 * 2 * about.memory_bus_width / 8
    achieved = least / seconds["ours"]
    return {
        "bytes": least,
        "reads": group.text.reads,
        "seconds": seconds,
        "of peak": achieved / peak,
        "of copy": achieved / rate,
    }


def _filled(fake: torch.Tensor) -> torch.Tensor:
    """Random numbers that lie as a fake tensor does; integers and booleans are zero."""
    extent = 1 + sum((n - 1) * s for n, s in zip(fake.shape, fake.stride(), strict=True))
    numbers = torch.zeros(extent, dtype=fake.dtype, device=DEVICE)
    return (numbers.normal_() if fake.is_floating_point() else numbers).as_strided(fake.shape, fake.stride())


def line(row: Row) -> str:
    """A row as one line of text."""
    ours = row["seconds"]["ours"]
    ratios = " ".join(f"{name} {ours / row['seconds'][name]:.2f}" for name in ("operators", "compile"))
    share = f"{row['of peak']:.0%} of the peak rate, {row['of copy']:.0%} of a copy's"
    return f"{row['bytes'] / 2**20:7.0f} MiB {ours * 1e6:7.0f} us {share}, {ratios}  x{row['count']} {row['kind'][:90]}"


def main() -> None:
    """Time the kernels of every model; print a line for each; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker)))
        return
    for name in options.models:
        rows = fresh(__file__, name, threads=1)
        print("\n".join([name, *map(line, rows)]), flush=True)
        with alone(True):
            save("gpu_kernels", rows, __doc__ or "")


if __name__ == "__main__":
    main()
