"""A layer of Korthikanti et al.'s 22 G model (arXiv 2205.05198) at the shapes of one of eight ranks, run on a GPU.

    python -m benchmarks.gpu_layer [--rounds N] [--quick]

Forward and backward of layers with plain attention and dropout, in bfloat16; no collectives. Rows of table 2, marked by
hand with ``torch.utils.checkpoint``: tensor parallelism (t), recomputation of attention's core, and of whole layers, by
eager PyTorch and by roamc; and roamc without marks within the peak of each marked program. Milliseconds and bytes of a
layer are what four layers have more than two, halved. Processes are made ready and timed as in :mod:`benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import roamc
from benchmarks._measure import Row, ratio, save, serve
from benchmarks.gpu import PROFILE, alone, at_rest, peak_of, ready_and_timed, seconds_of
from benchmarks.shard import ROWS, CoreAgain, Stack, sizes_of
from roamc.budget import NO_TIME
from roamc.cli.zoo import Block

RANKS, ROUNDS = 8, 7
AGAIN = {"t": "", "t + selective": "core", "full": "layer"}
"""Rows of the paper's table to what runs again."""

WAYS = ("eager", "exact", "fast", "within")
"""How a row runs: marked by hand, by PyTorch or by roamc in either numerics; or unmarked and fast, within its peak."""

SMALL = {"width": 128, "heads": 16, "seq": 64, "batch": 2}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Part(Block):
    """One rank's part of a block: its heads and columns; norms, dropout and residual are whole."""

    def __init__(self, width: int, heads: int, dropout: float, fused_attention: bool = True) -> None:
        super().__init__(width, heads, dropout, fused_attention)
        inner = width // RANKS
        self.qkv, self.proj = nn.Linear(width, 3 * inner), nn.Linear(inner, width)
        self.up, self.down = nn.Linear(width, 4 * inner), nn.Linear(4 * inner, width)


class PartAgain(CoreAgain, Part):
    """The same, its attention's core made again in backward."""


# -- in the process of one row ----------------------------------------------------------------------------------------


def worker(row: str, way: str, quick: bool) -> None:
    """Make two and four layers ready; then answer: what they are, and seconds of each."""
    with alone(False):
        two, four = (_ready(layers, row, way, quick) for layers in (2, 4))

    def answer(question: str) -> Any:
        if question == "about":
            return {"two": two[1], "four": four[1]}
        return (seconds_of(four[0]) - seconds_of(two[0])) / 2

    serve(answer)


def _ready(layers: int, row: str, way: str, quick: bool) -> tuple[Callable[[int], Any], Row]:
    marked, x = _made(layers, AGAIN[row], quick)
    if way == "eager":
        return _about(marked, x, lambda: None)
    options: dict[str, Any] = {"profile": PROFILE, "strict": True, "numerics": "exact" if way == "exact" else "fast"}
    options["memory_budget"] = NO_TIME
    _plan_of(marked, x, options)
    if way != "within":
        return _about(marked, x, lambda: roamc.plans(marked)[0])
    budget = roamc.plans(marked)[0].needed_bytes
    free, x = _made(layers, "", quick)
    _plan_of(free, x, {**options, "memory_budget": budget})
    return _about(free, x, lambda: roamc.plans(free)[0])


def _plan_of(model: nn.Module, x: Tensor, options: dict[str, Any]) -> None:
    roamc.optimize(model, **options)
    _step(model, x)()


def _made(layers: int, again: str, quick: bool) -> tuple[nn.Module, Tensor]:
    sizes = {**sizes_of("gpt3-22b"), **(SMALL if quick else {})}
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Stack(sizes, layers, again, (Part, PartAgain)).bfloat16()
        model.hidden = model.hidden.bool()
        x = torch.randn(sizes["batch"], sizes["seq"], sizes["width"], dtype=torch.bfloat16, requires_grad=True)
    return model, x


def _step(model: nn.Module, x: Tensor, held: list[int] | None = None) -> Callable[..., None]:
    """Forward and backward; notes in ``held`` the bytes that are allocated between them."""
    gradient = torch.randn_like(x)

    def step(seed: int = 0) -> None:
        torch.manual_seed(seed)
        y = model(x)
        if held is not None and DEVICE == "cuda":
            held.append(torch.cuda.memory_allocated())
        y.backward(gradient)
        model.zero_grad()
        x.grad = None

    return step


def _about(model: nn.Module, x: Tensor, plan: Callable[[], Any]) -> tuple[Callable[[int], Any], Row]:
    held: list[int] = []
    step = _step(model, x, held)
    for seed in range(3):
        step(seed)
    at_rest()
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    about = {**peak_of(lambda: step(3)), "held": held[-1] - before if held else 0}
    if (planned := plan()) is not None:
        about |= {"needed": planned.needed_bytes, "reruns": len(planned.decisions["retain"]["reruns"])}
    at_rest()
    return step, about


# -- in the process that asks -----------------------------------------------------------------------------------------


def measure(rounds: int, quick: bool) -> list[Row]:
    """All rows."""
    rest = ["--quick"] if quick else []
    programs = {(row, way): (row, way, *rest) for row in AGAIN for way in WAYS if way != "within" or AGAIN[row]}
    abouts, times = ready_and_timed(__file__, {f"{row}: {way}": args for (row, way), args in programs.items()}, rounds)
    sizes = sizes_of("gpt3-22b")
    unit = sizes["seq"] * sizes["batch"] * sizes["width"]
    attention = 5 * sizes["heads"] * sizes["seq"] / sizes["width"]
    formulas = {row.name: row.formula(RANKS, attention) for row in ROWS}
    rows = []
    for (name, way), kind in zip(programs, abouts, strict=True):
        row: Row = {"model": "gpt3-22b", "kind": kind, "row": name, "way": way, "formula": formulas[name]}
        row |= abouts[kind]
        if kind in times:
            row["ms"] = 1e3 * statistics.median(times[kind])
            row["held_of_sbh"] = (row["four"]["held"] - row["two"]["held"]) / 2 / unit
            first = f"t: {'fast' if way == 'within' else way}"
            if first in times:
                row["added"] = ratio(times, kind, first) - 1
        rows.append(row)
    return rows


def line(row: Row) -> str:
    """A row as one line of text."""
    if "failed" in row:
        return f"{row['kind']:<24}failed: {row['failed'].strip().splitlines()[-1]}"
    four = row["four"]
    planned = f", planned {four['needed'] / 1e6:.0f}, {four['reruns']} reruns" if "needed" in four else ""
    held = f"{row['held_of_sbh']:6.2f} sbh, formula {row['formula']:.2f}, {four['measured'] / 1e6:.0f} MB"
    return f"{row['kind']:<24}{row['ms']:7.2f} ms {row.get('added', 0):+.1%}  {held}{planned}"


def main() -> None:
    """Measure; print a line for each row; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", nargs=2)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker, options.quick)
        return
    rows = measure(options.rounds, options.quick)
    print("\n".join(map(line, rows)), flush=True)
    if not options.quick:
        with alone(True):
            save("gpu_layer", rows, __doc__ or "")


if __name__ == "__main__":
    main()
