"""Step time against measured peak: activations dropped under a budget, by roamc, by torch.compile and by hand.

    python -m benchmarks.budget [--models gpt,bert] [--rows eager,optimize@300MB] [--rounds N]
        [--processes N | --falling] [--quick]

Peaks are measured as in :mod:`benchmarks.peak`: in a fresh process, counted under malloc over the whole third step,
above parameters, optimizer state and batch. Values are compared there as well: loss and gradients of the first step,
losses and parameters after three, with the program that they have to be like. Times are those of whole steps with one
thread, program after program in turn, each in a process of its own: what one leaves in its heap is nobody else's. A
ratio is taken within its round, and the median over rounds is quoted, beside the ratio of the quickest steps. They are
processor seconds: what else runs on the machine counts little. roamc plans with a shipped profile, so that the plans
are the same on every machine.

With ``--processes`` the default and what it stands beside, of two more models too: every program of a round runs in
that many processes, one after the other, and medians are of theirs.
With ``--falling`` roamc alone under ten budgets, each lower than the one before: whether peaks fall and times rise.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._measure import Heap, Lines, by_line, fresh, in_turn, ratio, refused_plan, resident, save, serve

MODELS = ("gpt", "bert", "llama", "resnet50")
RIVALS = (
    *("eager", "eager+block", "eager+select"),
    *("inductor", "inductor@0.8", "inductor@0.5", "inductor@0.2", "inductor@0.0", "inductor+block", "inductor+select"),
)
BUDGETS = {"gpt": ("+1%", "430MB", "300MB", "170MB", "110MB", "min")}
LOWER = {"gpt": ("400MB", "270MB", "140MB"), "llama": ("138MB",)}
"""Of ``train_step``: GPT's gradients die at their update, 30 MB below the others; LLaMA's: inductor+block's peak."""

FAST = {"llama": ("train_step+fast", "train_step+fast@130MB")}
"""Programs with ``numerics="fast"``."""

SHARES = ("+1%", "70%", "50%", "30%", "min")
FALLING = (*(f"{share}%" for share in range(100, 10, -10)), "min")
ROUNDS = 9

SEVERAL = (*MODELS, "llama-long", "gpt-vocabulary")
DEFAULTS = tuple(f"{route}{way}" for route in ("optimize", "train_step") for way in ("", "@+1%", "+freed@+1%", "+fast"))
"""Programs that are timed in several processes, beside eager and torch.compile; the default is "@+1%"."""


def rows_of(model: str) -> list[str]:
    """All programs of the table for one model; a program comes behind the one that it has to be like."""
    budgets, lower = BUDGETS.get(model, SHARES), LOWER.get(model, ())
    ours = [*_under("optimize", budgets), *_under("train_step", (*budgets[:-1], *lower, budgets[-1]))]
    return [*RIVALS, "aot_eager", *ours, *FAST.get(model, ())]


def falling_rows() -> list[str]:
    """roamc with "+0%" and under each of :data:`FALLING`, on both routes."""
    return ["eager", "aot_eager", *_under("optimize", FALLING), *_under("train_step", FALLING)]


def _under(route: str, budgets: Sequence[str]) -> list[str]:
    return [route, *(f"{route}@{budget}" for budget in budgets)]


def peak_worker(model: str, row: str, quick: bool, profile: str, values: Path) -> dict[str, Any]:
    """Measure the peak of one program in this process, and write what it computes to ``values``."""
    import torch

    from benchmarks.blocks import make
    from benchmarks.programs import build, timed_planning

    program = build(row, make(model, quick=quick), profile)
    losses, gradients = [], []

    def look() -> None:
        gradients.extend(p.grad.detach().clone() for p in program.model.parameters())

    def step(number: int, look: Callable[[], None] | None = None) -> None:
        torch.manual_seed(number)
        losses.append(program.step(look))

    try:
        with timed_planning() as planning:
            step(0, look)
    except Exception as error:
        return {"refused": refused_plan(error).needed_bytes}
    first = [losses[0], *gradients]
    del gradients[:]
    torch.save(first, values)
    del first
    step(1)
    result = _measured(lambda look=None: step(2, look))
    parameters = [p.detach() for p in program.model.parameters()]
    torch.save([*torch.load(values), *losses, *parameters], values)
    if program.plans():
        values.with_suffix(".json").write_text(program.plans()[0].to_json())
        result |= {**_planned(program.plans(), lambda: step(3)), **_foreseen(planning, profile)}
    return result


def _measured(step: Callable[..., None]) -> dict[str, Any]:
    """Peak bytes of ``step``, and those up to the end of backward, above what the process holds in front of it."""
    from roamc.runtime import blocks

    heap, backward = Heap(), []
    before = heap.live() - blocks.held()
    heap.reset()
    step(lambda: backward.append(heap.peak()))
    return {"measured": heap.peak() - before, "backward": backward[0] - before if backward else None}


def _planned(plans: list[Any], step: Callable[[], None]) -> dict[str, Any]:
    """What roamc says of its plan, and what its program's lines take for themselves."""
    from roamc.runtime import blocks

    (plan,) = plans
    heap = Heap()
    before = heap.live() - blocks.held()
    lines: Lines = by_line(heap, step)
    keys = ("budget_bytes", "peak_bytes", "needed_bytes", "arena_bytes", "baseline_bytes")
    keys += ("added_seconds", "added_bound_seconds")
    return {
        **{key: getattr(plan, key) for key in keys},
        "status": plan.status,
        "retain": plan.decisions["retain"]["status"],
        "reruns": len(plan.decisions["retain"]["reruns"]),
        "workspace": lines.workspace,
        "worst_line": lines.worst,
        "worst_line_bytes": lines.peak - before,
    }


def _foreseen(planning: list[tuple[float, Any]], profile: str) -> dict[str, float]:
    """Seconds that planning took, and predicted seconds of a step."""
    from roamc.cost import load_profile, step_seconds

    ((taken, graph),) = planning
    return {"planning": taken, "predicted_seconds": step_seconds(graph, load_profile("cpu", profile))}


def timed_step(model: str, row: str, quick: bool, profile: str, folder: Path) -> Callable[[str], float]:
    """A step of one program, which takes its seed and says how many seconds it took. The first has run."""
    import torch

    from benchmarks.blocks import make
    from benchmarks.programs import build, plan_kept_in

    step = build(row, make(model, quick=quick), profile).step
    with plan_kept_in(folder / f"{model} {row}.json"):
        step(None)

    def timed(seed: str) -> float:
        torch.manual_seed(int(seed))
        start = time.process_time()
        step(None)
        return time.process_time() - start

    return timed


def race(steps: dict[str, Callable[[str], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step in every round; one round before them is not counted.

    Where the arena goes back between steps, a step that is not counted comes before each: while the others run, the
    host of a virtual machine takes the free pages, which a training loop would have kept.
    """
    from benchmarks.programs import FREED, Name

    times: dict[str, list[float]] = {row: [] for row in steps}
    for number in range(-1, rounds):
        for row in in_turn(steps, number + 1):
            for _ in range(2 if Name.parse(row).how == FREED else 1):
                taken = steps[row](str(number + 1))
            if number >= 0:
                times[row].append(taken)
    return times


def _compare(mine: Path, other: Path) -> dict[str, Any]:
    """Whether two programs computed the same bits; else the largest difference of a tensor, as a share of itself.

    ``loss`` says so of the first loss alone. What only one of the two has, such as gradients, is left out.
    """
    import torch

    one, two = torch.load(mine), torch.load(other)
    if len(one) != len(two):  # a whole step hands out no gradients
        one, two = ([v[0], *v[-tail:]] for v, tail in ((one, min(len(one), len(two)) - 1),) for v in (one, two))
    equal = all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    error = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(one, two, strict=True))
    return {"equal": equal, "error": 0.0 if equal else error, "loss": bool(torch.equal(one[0], two[0]))}


class Sheet:
    """The measurements of one model, row by row."""

    def __init__(self, model: str, rows: list[str], quick: bool, profile: str, folder: Path) -> None:
        self.model, self.rows, self.folder = model, rows, folder
        self.common = (str(int(quick)), profile)
        self.found: dict[str, dict[str, Any]] = {}

    def measure(self) -> None:
        """Peaks and values of all rows; says so where a measured peak is above the budget."""
        from benchmarks.programs import Name

        for row in self.rows:
            values = self.folder / f"{self.model} {row}.pt"
            result = fresh(__file__, "peak", self.model, row, *self.common, str(values), count_heap=True, threads=1)
            like = Name.parse(row).values_like()
            if like in self.found and values.exists():
                result["like"] = {"row": like, **_compare(values, self.folder / f"{self.model} {like}.pt")}
            free = self.found.get(Name.parse(row).family, {})
            if "predicted_seconds" in result and "predicted_seconds" in free:
                result["predicted_ratio"] = result["predicted_seconds"] / free["predicted_seconds"]
            self.found[row] = result
            print(line(self.model, row, result), flush=True)

    def time(self, rounds: int) -> None:
        """Ratios of times to eager and to the same family without a budget, which is "+0%" for roamc's."""
        from benchmarks.programs import FAMILIES, Name

        for family in FAMILIES:
            rows = [row for row in self.rows if Name.parse(row).family == family and "refused" not in self.found[row]]
            rows = list(dict.fromkeys(("eager", *rows)))
            if rows == ["eager"] and family != "eager":
                continue
            with contextlib.ExitStack() as stack:
                seconds = race({row: stack.enter_context(self._racer(row)) for row in rows}, rounds)
            for row in rows:
                if Name.parse(row).family == family and row in self.found:
                    self.found[row] |= _ratios(seconds, row, family)
                    print(f"{self.model:<9}{row:<18}{self.found[row]['time']}", flush=True)

    def time_in(self, processes: int, rounds: int) -> None:
        """Ratios of times to other rows: the median over processes of each row, and the least and most of them."""
        runs = []
        for number in range(processes):
            with contextlib.ExitStack() as stack:
                runs.append(race({row: stack.enter_context(self._racer(row)) for row in self.rows}, rounds))
            least = ", ".join(f"{row} {min(runs[-1][row]):.3f} s" for row in self.rows)
            print(f"{self.model:<9}process {number}: {least}", flush=True)
        for row, result in self.found.items():
            others = {other for other in ("eager", "inductor", *parents(row)) if other in self.rows and other != row}
            ratios = {other: sorted(ratio(run, row, other) for run in runs) for other in others}
            result["processes"] = processes
            result["times"] = {
                other: {"median": statistics.median(values), "least": values[0], "most": values[-1]}
                for other, values in sorted(ratios.items())
            }

    def _racer(self, row: str) -> contextlib.AbstractContextManager[Callable[[str], float]]:
        return resident(__file__, "time", self.model, row, *self.common, str(self.folder), threads=1)

    def results(self) -> list[dict[str, Any]]:
        """The rows for the results file."""
        return [{"model": self.model, "kind": row, "threads": 1, **result} for row, result in self.found.items()]


def parents(row: str) -> tuple[str, str]:
    """The programs that one of :data:`DEFAULTS` is to be no slower than: without added time, with a kept arena."""
    from benchmarks.programs import FREED, Name

    return Name.parse(row).family, row.replace(f"+{FREED}", "")


def _ratios(seconds: dict[str, list[float]], row: str, family: str) -> dict[str, Any]:
    """Medians of the ratios of one round each, and the ratio of the quickest steps: what else ran only adds."""
    free = family if family in seconds else "eager"
    return {
        "time": {
            "seconds": statistics.median(seconds[row]),
            "of eager": ratio(seconds, row, "eager"),
            "of free": ratio(seconds, row, free),
            "least of free": round(min(seconds[row]) / min(seconds[free]), 4),
        },
        "free_seconds": statistics.median(seconds[free]),
    }


def over_budget(result: dict[str, Any]) -> int:
    """Measured bytes above the budget, or above what the plan needs where the budget is "min"; 0 where all is well."""
    allowed = result.get("budget_bytes") or result.get("needed_bytes")
    return max(0, result["measured"] - allowed) if allowed and result["reruns"] else 0


def line(model: str, row: str, result: dict[str, Any]) -> str:
    """What was measured, in one line."""
    if "refused" in result:
        return f"{model:<9}{row:<18} refused: needs {result['refused'] / 1e6:.1f} MB"
    text = f"{model:<9}{row:<18} measured {result['measured'] / 1e6:7.1f}"
    if "peak_bytes" in result:
        text += (
            f"  planned {result['peak_bytes'] / 1e6:7.1f}  workspace {result['workspace'] / 1e6:5.1f}"
            f"  arena {result['arena_bytes'] / 1e6:6.1f}  reruns {result['reruns']}"
            f"  added {result['added_seconds']:.3f} s (bound {result['added_bound_seconds']:.3f})"
            f"  planning {result['planning']:.1f} s"
            f"  predicted time {result.get('predicted_ratio', 1.0):.3f}"
        )
    if "like" in result:
        like = result["like"]
        text += f"  values of {like['row']}: {'equal' if like['equal'] else 'off by {:.1e}'.format(like['error'])}"
    if over_budget(result):
        text += (
            f"\n  FAILURE: {over_budget(result)} bytes above the budget of {result['budget_bytes']}, planned "
            f"{result['peak_bytes']}, workspace {result['workspace']}, {result['backward']} until the end of backward; "
            f"the heap is fullest ({result['worst_line_bytes']}) at: {result['worst_line']}"
        )
    return text


def _worker(kind: str, model: str, row: str, quick: str, profile: str, path: str) -> None:
    import torch

    torch.set_num_threads(1)
    arguments = (model, row, bool(int(quick)), profile, Path(path))
    if kind == "peak":
        print(json.dumps(peak_worker(*arguments)))
    else:
        serve(timed_step(*arguments))


def main() -> None:
    """Measure every model and program; print lines; write the results file; 1 if a budget was not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="separated by commas; all of them unless given")
    parser.add_argument("--rows", help="programs, separated by commas; all of them unless given")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="0 measures no times")
    parser.add_argument("--profile", default="cpu", help="that roamc plans with: a file or the name of a shipped one")
    parser.add_argument("--processes", type=int, default=0, help="the default alone, timed in so many")
    parser.add_argument("--falling", action="store_true", help="roamc alone, under ten budgets")
    parser.add_argument("--quick", action="store_true", help="tiny models; nothing is written")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _worker(*options.worker)
        return
    kept = True
    models = options.models.split(",") if options.models else SEVERAL if options.processes else MODELS
    file = "processes" if options.processes else "falling" if options.falling else "budget"
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            rows = ["eager", "inductor", "aot_eager", *DEFAULTS] if options.processes else rows_of(model)
            rows = options.rows.split(",") if options.rows else falling_rows() if options.falling else rows
            sheet = Sheet(model, rows, options.quick, options.profile, Path(folder))
            timed = functools.partial(sheet.time_in, options.processes) if options.processes else sheet.time
            for measured in (sheet.measure, *(functools.partial(timed, options.rounds),) * bool(options.rounds)):
                measured()
                if not options.quick:
                    print(save(file, sheet.results(), __doc__ or ""))
            kept &= not any(over_budget(row) for row in sheet.found.values() if "measured" in row)
    sys.exit(not kept)


if __name__ == "__main__":
    main()
