"""The command line: ``plan``, ``explain``, ``max-batch``, ``layout``, ``calibrate``, ``models``, ``warm-up``, ``demo``.

Exit codes: 0 all is well, 1 an error (one line on stderr), 2 the plan does not fit ``--memory-budget`` or ``--gpu``, or
the layout ``--capacity``, 141 nobody reads the output any more.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from roamc.budget import parse_budget
from roamc.cli.asked import Asked, Request, asking
from roamc.cli.models import MODELS
from roamc.cli.saved import is_plan, saved_plan
from roamc.cli.sentences import check_writable, sentence
from roamc.cli.words import check_kernels, check_report, check_words
from roamc.errors import BudgetError, OptionError
from roamc.report.progress import Stages
from roamc.report.tables import console, say, show_rows
from roamc.units import parse_bytes
from roamc.version import __version__

if TYPE_CHECKING:  # each command imports what it runs: help and errors of usage do without torch
    from roamc.cli.request import Explained
    from roamc.frontends.largest import Fit
    from roamc.planning.plan import Plan
    from roamc.report.explain import Explanation
    from roamc.report.kernels import KernelReport

ERROR, DOES_NOT_FIT = 1, 2

READER_GONE = 128 + signal.SIGPIPE
"""The exit code where nobody reads stdout any more, as behind ``| head -1``: that of a process that SIGPIPE ends."""


class _DoesNotFit(SystemExit):
    """Ends the process with code 2: a plan is above its budget, or a layout above its capacity."""


class _Commands(TyperGroup):
    """Ends the process with code 1 where typer ends with 2, at an unknown command or option: 2 has its own meaning.

    Where nobody reads the output, typer and rich end with 1 as for an error; here it is :data:`READER_GONE`.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line."""
        try:
            return super().main(*args, **extra)
        except _DoesNotFit:
            raise
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):
                raise SystemExit(READER_GONE) from None
            raise SystemExit(ERROR if end.code == DOES_NOT_FIT else end.code) from None


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False)

IMPORTING = "importing torch"
"""What a command is at before it does anything else."""

ALL = "all"
"""What ``--stage`` takes beside a number."""

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of text.")]
Save = Annotated[Path | None, typer.Option("--save", metavar="PATH", help="Write the plan to a file.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """roamc: a memory compiler for PyTorch training. Example: roamc plan gpt2 --batch 8 --memory-budget 16GiB"""
    if version:
        typer.echo(f"roamc {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@asking
def plan(
    asked: Asked, as_json: Json = False, debug: Debug = False,
    save: Save = None,
) -> None:  # fmt: skip
    """Plan a training step and print its peak memory. Allocates no weights and runs nothing.

    The file of a saved plan is told again. Example: roamc plan gpt2-xl --batch 4 --memory-budget 40GiB
    """
    budgets = asked.budgets
    with _reported(debug, as_json):
        if (saved := saved_plan(asked)) is not None:
            _tell(saved, asked.request.target, as_json)
            return
        check_words(asked)
        number = None if asked.stage == ALL else _stage_number(asked.stage, f", or {ALL}")
        budget = budgets[0] if len(budgets) == 1 else None
        request = dataclasses.replace(asked.request, memory_budget=budget, stage=number)
        if asked.stage == ALL:
            _stages(request, budgets, save, as_json)
            return
        if len(budgets) > 1:
            _several(request, budgets, save, as_json)
            return
        if save is not None:
            check_writable(save)
        report = _explained(request).report
        step_plan = report.plan
        if save is not None:
            step_plan.save(save)
        if as_json:
            _print_json(report.plan_dict())
        else:
            from roamc.report.pieces import show_pieces
            from roamc.report.text import show_plan

            show_plan(console(), step_plan, debug=debug)
            show_pieces(console(), report.pieces)
        _check_fits(step_plan)


@app.command()
@asking
def explain(
    asked: Asked, as_json: Json = False, debug: Debug = False,
    source: Annotated[bool, typer.Option("--source", help="Print only the generated program.")] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Print only the planned graph, one line per operator and storage.")
    ] = False,
    graphml: Annotated[
        Path | None,
        typer.Option("--graphml", metavar="PATH", help="Write the planned graph for Gephi, yEd or networkx."),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write the report as HTML.")] = None,
    curve: Annotated[
        bool | None,
        typer.Option("--curve/--no-curve", help="Also plan for other budgets, to show what a lower peak costs. Off by "
                     "default with --source and --graph."),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="With --device cuda: also compile every kernel for A100 and H100 and show its "
                     "registers. Needs Triton; takes about a second per kernel."),
    ] = False,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="module|line|kind", help="What a peak is summed up by. Default: module, or line "
                     "for a graph without modules."),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Number of rows per list.")] = 10,
    save: Save = None,
) -> None:  # fmt: skip
    """Explain a plan: what is live at the peak, what is recomputed or fused, by module and line.

    Of a saved plan, its decisions. Example: roamc explain gpt --batch 8 --top 20
    """
    with _reported(debug, as_json):
        if (saved := saved_plan(asked)) is not None:
            _tell(saved, asked.request.target, as_json, top)
            return
        check_words(asked)
        check_report(source=source, graph=graph, kernels=kernels, by=by)
        budget, number = _only(asked.budgets), _stage_number(asked.stage)
        request = dataclasses.replace(asked.request, memory_budget=budget, stage=number)
        traced = not (source or graph) if curve is None else curve
        for path in (graphml, save, html):
            if path is not None:
                check_writable(path)
        if kernels:
            check_kernels(request.device)
        first = _explained(request, source, traced, html is not None)
        report = first.report
        from roamc.graph.printed import printed, write_graphml
        from roamc.report import text

        if graphml is not None:
            write_graphml(report.graph, graphml)
        if save is not None:
            report.plan.save(save)
        as_text = not as_json and (not (source or graph) or curve or html is not None)
        if as_text:
            text.show_explanation(console(), report, top, by)
        elif source and not as_json:
            text.show_source(console(), report.source)
        compiled = _kernels(report) if kernels else ()
        if as_text and kernels:
            text.show_kernels(console(), compiled)
        if graph and not as_json:
            typer.echo(printed(report.graph), nl=False)
        if traced or html is not None:
            console().file.flush()  # who interrupts what takes long, or reads no more, has the tables
            report = _rest(first, traced, html)
        if as_json:
            more: dict[str, Any] = {"graph": printed(report.graph)} if graph else {}
            more |= {"kernels": [dataclasses.asdict(kernel) for kernel in compiled]} if kernels else {}
            _print_json({**report.to_dict(top, by), **more})
        elif as_text:
            text.show_curve(console(), report)
            for content, path in (("picture", html), ("graph", graphml), ("plan", save)):
                if path is not None:
                    typer.echo(f"\nthe {content} is in {path}")
        _check_fits(report.plan)


@app.command(name="max-batch")
@asking
def largest_size(
    asked: Asked, as_json: Json = False, debug: Debug = False,
    size: Annotated[
        str, typer.Option("--size", metavar="NAME", help="What to look for: batch, seq, or any other setting of the "
                          "model or argument of the function that is a whole number."),
    ] = "batch",
    smallest: Annotated[int, typer.Option("--smallest", min=1, help="The smallest value.")] = 1,
    largest: Annotated[int, typer.Option("--largest", min=1, help="The largest value.")] = 1 << 20,
    recomputation: Annotated[
        bool,
        typer.Option("--recomputation/--no-recomputation", help="Whether operators may run again and values be encoded "
                     "to keep the budget, which takes time."),
    ] = True,
) -> None:  # fmt: skip
    """Find the largest batch whose training step fits a memory budget or a GPU, from a few plans. Exit code 2 if none.

    Functions of files are called on the meta device. Example: roamc max-batch gpt2 --gpu a100-40
    """
    with _reported(debug, as_json):
        if is_plan(target := asked.request.target) or asked.request.is_dump:
            what = "a saved plan" if is_plan(target) else "the graph of a step"
            raise OptionError(f"{target} is {what} of one size, and max-batch plans several: give it the model")
        check_words(asked)
        if len(asked.budgets) > 1:
            raise OptionError("max-batch takes one --memory-budget")
        if asked.request.sizes.get(size) is not None:
            raise OptionError(f"--{size} is what max-batch looks for: leave it out")
        budget, number = (asked.budgets or (None,))[0], _stage_number(asked.stage)
        request = dataclasses.replace(asked.request, memory_budget=budget, stage=number)
        with Stages(request.begins) as stages:
            from roamc.cli.request import largest as search
            from roamc.report.text import show_plan

            fit = search(request, size, (smallest, largest), recomputation=recomputation, say=stages.now)
        if as_json:
            more = {"what": size, "added_share": fit.added_share, "fits": True, "plan": fit.plan.report()}
            _print_json({**dataclasses.asdict(fit), **more})
        else:
            say(console(), _in_words(fit, size, recomputation))
            show_plan(console(), fit.plan)


@app.command()
def layout(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.csv", help="CSV with minimalloc's columns id,lower,upper,size.")
    ],
    capacity: Annotated[
        str | None,
        typer.Option(
            "--capacity", metavar="BYTES", help="Stop once the arena is this small; exit code 2 if it is not reached."
        ),
    ] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0, help="Approximate time limit.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="OUT.csv", help="Write the rows with their offsets.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Assign offsets in one arena to buffers with given lifetimes, minimising its size. Optional columns: alignment,
    hint, gaps and offset (fixed position).

    Example: roamc layout A.csv --capacity 1MiB --output out.csv
    """
    with _reported(debug, as_json):
        capacity_bytes = None if capacity is None else parse_bytes(capacity)
        if output is not None:
            check_writable(output)
        with Stages(f"placing the buffers of {file}"):
            from roamc.cli import layout_file

            outcome = layout_file.lay_out(file, capacity_bytes, seconds, output)
        if as_json:
            _print_json(outcome)
        else:
            show_rows(console(), ("layout", str(file)), layout_file.rows(outcome))
        if not outcome["fits"]:
            typer.echo(f"does not fit: {layout_file.shortfall(outcome)}", err=True)
            raise _DoesNotFit(DOES_NOT_FIT)


@app.command(name="calibrate")
def measure(
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, or cuda:N.")] = "cpu",
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the profile here instead of to roamc's cache folder."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", hidden=True)] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how fast this machine runs each kind of operator, for time predictions. Takes up to a minute.

    Later runs use the result automatically. Under torchrun, the links between the ranks are measured as well:
    torchrun --nproc-per-node 8 -m roamc calibrate --device cuda
    """
    with Stages(IMPORTING):
        import torch

        from roamc.cli.calibration import busy, measured, stored
        from roamc.cli.ranks import among_ranks
        from roamc.cost.measure import ROUNDS
        from roamc.report.device import rows

    with _reported(debug, as_json), among_ranks(device, lambda error: sentence(error, debug)) as ranks:
        if output is not None:
            ranks.first(lambda: check_writable(output))
        load = busy(torch.get_num_threads())
        with Stages(f"measuring {device}", ROUNDS) if ranks.number == 0 else contextlib.nullcontext() as stages:
            profile = measured(ranks, quick=quick, say=None if stages is None else stages.now)
        path = stored(ranks, profile, output)
        if load and ranks.number == 0:
            typer.echo(f"note: {load}", err=True)
        if ranks.number != 0:
            typer.echo(f"rank {ranks.number}: rank 0 has written the profile to {path}", err=as_json)
        elif as_json:
            typer.echo(profile.to_json(), nl=False)
        else:
            show_rows(console(), ("what", "speed", "remark"), rows(profile))
            typer.echo(f"\nthe profile is in {path}")


@app.command(name="warm-up")
def compile_solvers(debug: Debug = False) -> None:
    """Compile the solvers, where the machine code that came with roamc does not fit, so that no plan waits for it."""
    with _reported(debug, as_json=False):
        with Stages("compiling the solvers"):
            from roamc.solvers.compiled import compiling
            from roamc.solvers.warm_up import warm_up

            warm_up()
        why = f"; the machine code that came with roamc is not used: {compiling.reason}" if compiling.reason else ""
        typer.echo(f"the solvers are compiled{why}")


@app.command()
def models(as_json: Json = False) -> None:
    """List the built-in models and their settings."""
    if as_json:
        _print_json({name: {"about": row.about, "settings": dict(row.settings)} for name, row in MODELS.items()})
        return
    rows = [(name, row.about, " ".join(f"{k}={v}" for k, v in row.settings.items())) for name, row in MODELS.items()]
    show_rows(console(), ("model", "what it is", "settings"), rows)


@app.command()
def demo(
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps of each run.")] = 30,
    batch: Annotated[int, typer.Option("--batch", min=1, hidden=True)] = 4,
    seq: Annotated[int, typer.Option("--seq", "--sequence", min=1, hidden=True)] = 192,
    layers: Annotated[int, typer.Option("--layers", min=1, hidden=True)] = 6,
    width: Annotated[int, typer.Option("--width", min=1, hidden=True)] = 384,
    heads: Annotated[int, typer.Option("--heads", min=1, hidden=True)] = 6,
    memory_budget: Annotated[
        str, typer.Option("--memory-budget", metavar="SIZE", help="Budget of the third run, as for roamc plan.")
    ] = "50%",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small language model with eager PyTorch, with roamc, and with roamc under a memory budget, and compare
    loss, memory and time.
    """
    with _reported(debug, as_json):
        parse_budget(memory_budget)
        with Stages(IMPORTING):
            from roamc.cli.demo.race import race
            from roamc.cli.demo.show import show
            from roamc.cli.demo.worker import Task
            from roamc.solvers.warm_up import warm_up

        stage = "training with and without roamc"
        with Stages(stage, steps) as stages:
            task = Task("eager", steps, batch, seq, layers, width, heads, memory_budget)
            stages.now("getting the solvers ready")
            warm_up()
            stages.now("starting a process for each side")
            result = race(task, lambda done: stages.now(stage, done))
        if as_json:
            _print_json(result.to_dict())
        else:
            show(console(), result)


def main() -> NoReturn:
    """Run the command line on ``sys.argv`` and end the process, which is the command's alone, with its exit code.

    Graphs are many objects and hardly any garbage: the collector looks seldom, and at the end nothing is taken apart.
    Both are a fifth of a short command.
    """
    gc.set_threshold(100_000, 50, 100)
    try:
        code = _ended()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as where it was closed
                stream.flush()
    except BrokenPipeError:
        code = READER_GONE
    except OSError as error:  # of the output, as where a disk is full
        typer.echo(f"error: {sentence(error, debug=False)}", err=True)
        code = ERROR
    atexit._run_exitfuncs()
    os._exit(code)


def _ended() -> int:
    """The exit code of the command."""
    try:
        app(prog_name="roamc")
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        raise
    return 0


def _tell(plan: Plan, file: str, as_json: bool, top: int | None = None) -> None:
    """Print a saved plan as it is written, and its decisions if ``top`` says how many rows a list has at most."""
    from roamc.report.saved import origin, show_decisions, show_saved

    if as_json:
        _print_json({**plan.report(), "origin": origin(plan, file)})
    else:
        show_saved(console(), plan, file)
        if top is not None:
            show_decisions(console(), plan, top)
    _check_fits(plan)


def _in_words(fit: Fit, size: str, recomputation: bool) -> str:
    """The answer of ``max-batch`` in one line."""
    limit = "no larger one was tried" if fit.too_large is None else f"{fit.too_large} does not fit"
    cost = f"recomputation adds {fit.added_share:.1%} to a step" if recomputation else "nothing is recomputed"
    looks = f"{len(fit.tried)} sizes looked at, {len(fit.planned)} planned"
    return f"{fit.plan.name}: the largest {size} that fits is {fit.size}; {limit}; {cost} ({looks})"


def _several(request: Request, budgets: tuple[str, ...], save: Path | None, as_json: bool) -> None:
    """Print one row for each budget; end with code 2 if one cannot be kept."""
    if save is not None:
        raise OptionError("--save writes one plan: give one --memory-budget")
    with Stages(request.begins) as stages:
        from roamc.cli.request import points
        from roamc.report.text import show_points

        frontier_points = points(request, budgets, say=stages.now)
    if as_json:
        _print_json([point.to_dict() for point in frontier_points])
    else:
        show_points(console(), frontier_points[0].plan.name, frontier_points)
    if not all(point.fits for point in frontier_points):
        raise _DoesNotFit(DOES_NOT_FIT)


def _stages(request: Request, budgets: tuple[str, ...], save: Path | None, as_json: bool) -> None:
    """Print one row for each stage of a pipeline, and the plan of the fullest; end with code 2 if one does not fit."""
    if save is not None or len(budgets) > 1:
        raise OptionError(
            f"--stage {ALL} plans each stage once: leave --save out, and give one --memory-budget at most"
        )
    with Stages(request.begins) as shown:
        from roamc.cli.request import stages
        from roamc.cli.stages import HEADINGS, ON_THE_RIGHT, fullest, rows
        from roamc.report.text import show_plan

        plans = stages(request, say=shown.now)
    if as_json:
        _print_json([each.to_dict() for each in plans])
    else:
        show_rows(console(), HEADINGS, rows(plans), right=ON_THE_RIGHT)
        typer.echo()
        show_plan(console(), fullest(plans).plan)
    if not all(each.fits for each in plans):
        raise _DoesNotFit(DOES_NOT_FIT)


def _stage_number(stage: str | None, others: str = "") -> int | None:
    """The number of the stage that ``--stage`` names, which is none of ``others``; None where it is left out."""
    if stage is None:
        return None
    if re.fullmatch("[0-9]{1,9}", stage):
        return int(stage)
    raise OptionError(f"--stage takes the number of one stage, from 0{others}, not {stage[:60]!r}")


def _only(budgets: tuple[str, ...]) -> str | None:
    if len(budgets) > 1:
        raise OptionError("one --memory-budget is explained at a time; roamc plan compares several")
    return budgets[0] if budgets else None


def _explained(request: Request, source: bool = False, curve: bool = False, drawn: bool = False) -> Explained:
    with Stages(request.begins) as stages:
        from roamc.cli.request import explained

        return explained(request, source=source, curve=curve, drawn=drawn, say=stages.now)


def _kernels(report: Explanation) -> tuple[KernelReport, ...]:
    from roamc.report.kernels import kernels

    with Stages("compiling kernels") as stages:
        return kernels(report.graph, stages.now)


def _rest(first: Explained, curve: bool, html: Path | None) -> Explanation:
    """Plan the curve and draw the page, where they are asked for, and return the explanation with the curve."""
    with Stages(f"planning {first.report.plan.name}, the curve") as stages:
        report = first.with_curve(stages.now) if curve else first.report
        if html is not None:
            from roamc.report.html import write

            stages.now(f"drawing {report.plan.name}")
            write(html, first.drawn(report))
    return report


def _check_fits(plan: Plan) -> None:
    """End with code 2 where the plan does not fit the GPU that ``--gpu`` names."""
    if plan.fits is False:
        raise _DoesNotFit(DOES_NOT_FIT)


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=1))


@contextlib.contextmanager
def _reported(debug: bool, as_json: bool) -> Iterator[None]:
    """Turn errors into one line on stderr and an exit code; ``debug`` shows where they come from."""
    try:
        yield
    except BudgetError as error:
        typer.echo(str(error) if error.verdict else f"does not fit: {error}", err=True)
        if as_json:
            _print_json({"fits": False, "error": str(error)})
        raise _DoesNotFit(DOES_NOT_FIT) from None
    except BrokenPipeError:  # of `roamc ... | head`: typer ends without a word
        raise
    except Exception as error:  # whatever it is, a user of the command line gets a sentence
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {sentence(error, debug)}", err=True)
        raise SystemExit(ERROR) from None
