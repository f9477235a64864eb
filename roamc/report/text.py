"""Reports as text: tables on a terminal, the same columns without colour or lines in a pipe or a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.syntax import Syntax

from roamc.planning import other_orders, search
from roamc.planning.pipeline import PIPELINE
from roamc.planning.plan import HELD, KEPT, Plan
from roamc.report.curve import Curve, Spot
from roamc.report.explain import Allocating, Explanation, Group, Live, Peak, by_default, groups
from roamc.report.frontier import Point
from roamc.report.fused import Grouped
from roamc.report.kernels import KernelReport
from roamc.report.pieces import show_pieces
from roamc.report.projected import WAITS
from roamc.report.tables import say, show_rows
from roamc.units import Bytes, Seconds, format_apart, format_bytes, format_parts

BAR = 20
"""Characters of the longest bar."""

REMARKS, NOTES = 29, 4
"""Spaces in front of what follows on the next line: of a row of the plan's table, and of other lines."""

STAGES = (
    "capture",
    search.PREPARE,
    *(each.name for each in PIPELINE),
    other_orders.NAME,
    search.OTHER_PLANS,
    "verify",
    "emit",
)
"""The order in which times are shown; any other stage comes last."""

RECOMPUTED, ENCODED = "recomputed for a lower peak", "encoded for a lower peak"
"""Titles of the lists of what pass retain decided."""


@dataclass(frozen=True)
class Listed:
    """A table, those rows first that matter most.

    Attributes:
        title: what it lists.
        headings: of its columns.
        right: which columns are numbers.
        rows: the texts of each row.
        sizes: the bytes of each row.
    """

    title: str
    headings: tuple[str, ...]
    right: tuple[int, ...]
    rows: Sequence[tuple[str, ...]]
    sizes: Sequence[Bytes]


def show_plan(out: Console, plan: Plan, *, debug: bool = False) -> None:
    """Print the table of ``plan`` to ``out``, and the seconds that planning took; of each stage with ``debug``."""
    for line in str(plan).splitlines():
        say(out, line, REMARKS if line.startswith("  ") and not line.startswith("  note:") else NOTES)
    if plan.seconds:
        stages = "  by the plan of an earlier run" if KEPT in plan.seconds else ""
        stages += f"  {stage_times(plan.seconds)}" if debug else ""
        say(out, f"  {'planned in':<13}{_seconds(sum(plan.seconds.values())):>12}{stages}", REMARKS)


def show_explanation(out: Console, report: Explanation, top: int, by: str | None = None) -> None:
    """Print all sections of an explanation but the curve, see :func:`show_curve`.

    Args:
        out: where to print.
        report: the explanation.
        top: the most rows that a list has.
        by: what a peak is summed up by, as for :func:`roamc.report.explain.groups`.
    """
    show_plan(out, report.plan)
    show_pieces(out, report.pieces)
    one = ", one micro-batch" if report.plan.in_flight > 1 else ""
    kept = "same graph, program order, gradients kept to the end"
    _show_peak(out, f"peak of {report.plan.name} as planned{one}", report.planned, top, by, report.plan.peak_bytes)
    _show_peak(out, f"peak of eager PyTorch: {kept}{one}", report.eager, top, by)
    for listed in tables(report):
        _show_listed(out, listed, top)
    _show_grouped(out, report.grouped, top)
    _show_allocating(out, report.allocating, top)
    _show_orders(out, report)
    show_layout(out, report.plan)
    if report.source:
        show_heading(out, "emitted program")
        show_source(out, report.source)


def show_source(out: Console, source: str) -> None:
    """Print the Python text ``source`` of an emitted program to ``out``: in colours on a terminal, else as it is."""
    if out.is_terminal:
        out.print(Syntax(source, "python", word_wrap=True))
    else:
        out.print(source, markup=False, highlight=False, soft_wrap=True)


def show_kernels(out: Console, reports: Sequence[KernelReport]) -> None:
    """Print what each kernel of ``reports`` takes of the GPUs that it was compiled for to ``out``."""
    show_heading(out, "kernels compiled ahead of time: registers and spilled bytes per thread; nothing was run")
    if not reports:
        out.print("  none: no group runs as a kernel", markup=False)
        return
    rows = []
    for kernel in reports:
        for each in kernel.targets:
            sizes = format_bytes(each.shared_bytes), format_bytes(each.spilled_bytes)
            group = kernel.source, kernel.operators, str(kernel.count)
            rows.append((*group, each.target, str(each.registers), *sizes))
    show_rows(
        out,
        ("line", "operators", "groups", "for", "registers", "shared", "spilled"),
        rows,
        (2, 4, 5, 6),
        ("groups", "shared"),
    )


def show_points(out: Console, name: str, points: Sequence[Point]) -> None:
    """Print one row for each budget.

    Args:
        out: where to print.
        name: name of the graph.
        points: plans of one graph, at least one, made with a budget; none adds time if pass retain was left out.
    """
    first = points[0].plan
    eager, all_of_them = first.baseline_needed_bytes, f", {first.in_flight} micro-batches in flight"
    more = all_of_them if first.in_flight > 1 else ""
    one = len({point.plan.room_bytes for point in points}) == 1  # totals that differ stand in the rows
    room = f"; the total is to fit {first.against_room[1]}" if one and first.room_bytes else ""
    total = format_apart(first.baseline_total_bytes, first.room_bytes)[0]
    say(out, f"plans of {name}, where eager needs {format_bytes(eager)}{more}, {total} in all{room}")
    rows = [
        (
            point.budget if isinstance(point.budget, str) else format_apart(point.budget, point.plan.needed_bytes)[0],
            format_apart(point.plan.needed_bytes, point.plan.budget_bytes or 0)[0],
            point.plan.against_room[0],
            f"{point.plan.needed_bytes / eager:.3f}",
            f"{point.plan.added_share:.1%}" if "retain" in point.plan.decisions else "",
            f"{point.plan.added_bound_share:.1%}" if point.plan.added_bound_share else "",
            str(len(point.plan.decisions.get("retain", {}).get("reruns", ()))),
            _verdict(point),
        )
        for point in points
    ]
    headings = ("budget", "needs", "total", "of eager's", "added time", "lower bound", "recomputed", "")
    show_rows(out, headings, rows, (0, 1, 2, 3, 4, 5, 6), ("of eager's", "recomputed", "lower bound"))


def _verdict(point: Point) -> str:
    if point.fits:
        return "fits" if point.plan.fits else ""
    return "above the budget" if point.plan.fits else "does not fit"


def in_order(names: Iterable[str]) -> list[str]:
    """Return ``names`` of stages in the order of :data:`STAGES`, those that it does not have behind them."""
    places = {name: at for at, name in enumerate(STAGES)}
    return sorted(names, key=lambda name: places.get(name, len(places)))


def stage_times(seconds: Mapping[str, Seconds]) -> str:
    """Return ``seconds`` by stage as one line, ``capture 1.80 s, reorder 0.20 s, …``, in the order of STAGES."""
    return ", ".join(f"{name} {_seconds(seconds[name])}" for name in in_order(seconds))


def layout_rows(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    """Return (label, size, remark) rows, as text, on what ``plan`` puts into the arena, outside it, and in place."""
    layout, reuse = plan.decisions.get("layout", {}), plan.decisions.get("reuse", {})
    tried = plan.decisions.get("reorder", {}).get("laid_out", ())
    again = (
        (("orders tried", str(len(tried)), "with the same peak, as the first order's arena was fragmented"),)
        if tried
        else ()
    )
    return (
        ("arena", format_bytes(plan.arena_bytes), f"by {layout.get('algorithm')}, {layout.get('status')}"),
        ("live in it", format_bytes(plan.live_bytes), f"fragmentation {plan.fragmentation:.3%}"),
        (
            "outside it",
            format_bytes(layout.get("outside_bytes", 0)),
            "outputs, results left with the allocator, results before their copy",
        ),
        (
            "allocator",
            format_bytes(layout.get("allocator_bytes", 0)),
            f"{len(layout.get('with_allocator', ()))} results left with it, most at one step",
        ),
        (
            "trimmed",
            format_bytes(layout.get("trimmed_bytes", 0)),
            f"{len(layout.get('trims', ()))} ranges of the arena, while nothing lies there; per step",
        ),
        ("copied", format_bytes(layout.get("copied_bytes", 0)), "into the arena, per step"),
        (
            "reused",
            format_bytes(reuse.get("nbytes", 0)),
            f"{len(reuse.get('overwrites', ()))} results written in place over an input",
        ),
        *again,
    )


def short(operator: str) -> str:
    """Return the name ``operator`` without leading ``aten.`` and final ``.default``: ``mm`` for ``aten.mm.default``."""
    return operator.removeprefix("aten.").removesuffix(".default")


def show_heading(out: Console, text: str) -> None:
    """Print ``text`` to ``out`` as the heading of a section."""
    out.print()
    say(out, text, style="bold")


def _seconds(value: Seconds) -> str:
    return f"{value:.2f} s"


def show_curve(out: Console, report: Explanation) -> None:
    """Print one row for each plan of the curve of ``report`` to ``out``; nothing if it has no curve."""
    if report.curve is None:
        return
    show_heading(out, "memory against time: plans for other budgets, and the lower bound on their added time")
    headings = ("needs", "of eager's", "added time", "lower bound", f"{'#' * 3} bound, {'-' * 3} added", "")
    rows = curve_rows(report.curve, report.plan.baseline_needed_bytes)
    show_rows(out, headings, rows, (0, 1, 2, 3), ("of eager's", "lower bound"))


def curve_rows(curve: Curve, eager: Bytes) -> list[tuple[str, ...]]:
    """Return one row for each plan of ``curve``, those that need the most bytes first.

    A row has six texts: bytes needed, their share of ``eager`` (bytes that eager needs), added time and its lower bound
    as shares of the step, a bar of both, and ``"this plan"``, ``"the lowest"`` or ``""``.
    """
    spots = sorted({*curve.spots, curve.now}, key=lambda spot: (-spot.needed_bytes, spot.added_seconds))
    most = max(spot.added_seconds for spot in spots)

    def row(spot: Spot) -> tuple[str, ...]:
        length, least = (round(BAR * part / most) if most else 0 for part in (spot.added_seconds, spot.bound_seconds))
        return (
            format_bytes(spot.needed_bytes),
            f"{spot.needed_bytes / eager:.3f}",
            f"{curve.share(spot.added_seconds):.1%}",
            f"{curve.share(spot.bound_seconds):.1%}",
            "#" * least + "-" * (length - least),
            "this plan" if spot == curve.now else "the lowest" if spot == curve.spots[-1] else "",
        )

    return [row(spot) for spot in spots]


def _show_peak(out: Console, title: str, peak: Peak, top: int, by: str | None, whole: Bytes = 0) -> None:
    """Print a peak; ``whole`` is that of the plan, which counts more than what lives, and 0 for eager's."""
    show_heading(out, title)
    at = "".join(f" {word} {text}" for word, text in (("at", peak.source), ("in", peak.module)) if text)
    counts = f"; the peak of {format_bytes(whole)} counts the whole arena, used or not, and what lies outside it"
    more = counts if whole not in (0, peak.live_bytes) else ""
    say(out, f"  {format_bytes(peak.live_bytes)} live at step {peak.step + 1} of {peak.steps}{more}", NOTES)
    say(out, f"  step       {peak.name} ({short(peak.operator)}), {peak.phase}{at}", 13)
    say(out, f"  by kind    {format_parts(peak.by_kind)}", 13)
    say(out, f"  created in {format_parts(peak.by_phase)}", 13)
    say(out, f"  peak in    {format_parts(peak.phase_peaks)}", 13)
    out.print()
    _show_groups(out, peak, top, by or by_default(peak))
    out.print()
    _show_storages(out, peak, top)


def group_rows(peak: Peak, by: str | None = None) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings and the rows, as text, of the storages of ``peak`` summed up as :func:`groups` does."""
    by = by or by_default(peak)
    whole = peak.live_bytes or 1
    rows = [
        (format_bytes(g.nbytes), f"{g.nbytes / whole:.1%}", str(g.count), g.kind, *_made_by(g, by))
        for g in groups(peak, by)
    ]
    more = {"module": ("module",), "line": ("operator", "line"), "kind": ()}[by]
    return ("bytes", "share", "storages", "kind", *more), rows


def _made_by(group: Group, by: str) -> tuple[str, ...]:
    if by == "module":
        return (_in_layers(group.module, group.modules),)
    return (short(group.operator), group.source) if by == "line" else ()


def _in_layers(module: str, modules: int) -> str:
    return f"{module} x {modules}" if modules > 1 else module


def _show_groups(out: Console, peak: Peak, top: int, by: str) -> None:
    headings, rows = group_rows(peak, by)
    show_rows(out, headings, rows[:top], (0, 1, 2), ("share", "storages", "operator"))
    _show_rest(out, [group.nbytes for group in groups(peak, by)[top:]])


def storage_rows(storages: Iterable[Live]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings and one row, as text, for each of ``storages``."""
    rows: list[tuple[str, ...]] = [
        (
            format_bytes(s.nbytes),
            called(s),
            s.kind,
            s.place,
            short(s.operator),
            s.phase,
            f"{s.born + 1} to {s.dead}",
            s.source,
            s.module,
        )
        for s in storages
    ]
    return ("bytes", "largest storages", "kind", "place", "operator", "phase", "steps", "line", "module"), rows


def called(storage: Live) -> str:
    """Return the name of ``storage``, and its place in what the model returns, if any: ``mm, output['logits']``."""
    return ", ".join(filter(None, (storage.name, storage.output)))


def _show_storages(out: Console, peak: Peak, top: int) -> None:
    headings, rows = storage_rows(peak.storages[:top])
    show_rows(out, headings, rows, (0,), ("place", "phase", "line", "operator", "steps", "kind"))
    _show_rest(out, [s.nbytes for s in peak.storages[top:]])


def _show_rest(out: Console, sizes: list[Bytes]) -> None:
    if sizes:
        out.print(f"and {len(sizes)} more, {format_bytes(sum(sizes))}", markup=False)


def tables(report: Explanation) -> tuple[Listed, ...]:
    """Return what ``report`` lists beside the peaks: what is held, and values that do not simply wait for backward.

    Empty lists are left out.
    """
    lists = (_held(report), _dropped(report), _smaller(report), _projected(report))
    return tuple(each for each in lists if each.rows)


def _held(report: Explanation) -> Listed:
    fixed = report.plan.fixed_bytes
    whole = sum(fixed.values())
    rows = [
        (
            format_bytes(h.nbytes),
            f"{h.nbytes / (whole or 1):.1%}",
            *(format_bytes(h.roles[role]) if h.roles.get(role) else "" for role in fixed),
            _in_layers(h.module, h.modules),
        )
        for h in report.held
    ]
    headings = ("bytes", "share", *(HELD.get(role, role) for role in fixed), "module")
    title = f"fixed: {format_bytes(whole)} that the caller holds during the whole step"
    return Listed(title, headings, tuple(range(2 + len(fixed))), rows, [h.nbytes for h in report.held])


def _dropped(report: Explanation) -> Listed:
    rows = [
        (
            format_bytes(d.nbytes),
            str(d.count),
            str(d.runs),
            f"{report.plan.share_of_step(d.seconds):.2%}",
            short(d.operator),
            d.source,
            d.module,
        )
        for d in report.dropped
    ]
    headings = ("bytes", "storages", "runs", "of a step", "operator", "line", "module")
    return Listed(RECOMPUTED, headings, (0, 1, 2, 3), rows, [d.nbytes for d in report.dropped])


def _smaller(report: Explanation) -> Listed:
    rows = [
        (
            format_bytes(s.before),
            format_bytes(s.after),
            f"{s.bits:.3g}",
            str(s.count),
            f"{report.plan.share_of_step(s.seconds):.2%}",
            s.codec,
            s.readers,
            f"{s.error:.2g}" if s.error else "",
            short(s.operator),
            s.source,
            s.module,
        )
        for s in report.smaller
    ]
    numbers = ("bytes", "encoded", "bits", "storages", "of a step")
    headings = (*numbers, "codec", "readers", "error", "operator", "line", "module")
    return Listed(ENCODED, headings, (0, 1, 2, 3, 4, 7), rows, [s.before for s in report.smaller])


def _projected(report: Explanation) -> Listed:
    rows = [
        (
            p.name,
            f"{p.rank} of {p.columns}",
            format_bytes(p.gradient_bytes),
            format_bytes(p.state_bytes),
            WAITS[p.waits],
            p.source,
        )
        for p in report.projected
    ]
    headings = ("weight", "columns", "gradient", "states", "what waits", "input's line")
    sizes = [p.gradient_bytes for p in report.projected]
    return Listed("projected: gradients that are never whole", headings, (1, 2, 3), rows, sizes)


def _show_listed(out: Console, listed: Listed, top: int) -> None:
    show_heading(out, listed.title)
    show_rows(out, listed.headings, listed.rows[:top], listed.right, ("line", "operator", "runs", "bits"))
    _show_rest(out, list(listed.sizes[top:]))


def _show_grouped(out: Console, grouped: tuple[Grouped, ...], top: int) -> None:
    if not grouped:
        return
    show_heading(out, "fused operators; values inside take no memory")
    rows = [
        (
            str(g.count),
            format_bytes(g.nbytes),
            format_bytes(g.rebuilt) if g.rebuilt else "",
            g.operators,
            g.source,
            g.module,
        )
        for g in grouped[:top]
    ]
    headings = ("groups", "bytes inside", "recomputed inside", "operators", "line", "module")
    show_rows(out, headings, rows, (0, 1, 2), ("line", "recomputed inside"))


def _show_allocating(out: Console, allocating: tuple[Allocating, ...], top: int) -> None:
    if not allocating:
        return
    show_heading(out, "operators without an out= variant, bytes per step")
    rows = [
        (short(a.operator), str(a.calls), format_bytes(a.copied_bytes), format_bytes(a.allocator_bytes))
        for a in allocating[:top]
    ]
    show_rows(out, ("operator", "calls", "copied into the arena", "left with the allocator"), rows, right=(1, 2, 3))


def _show_orders(out: Console, report: Explanation) -> None:
    if not report.candidates:
        return
    show_heading(out, f"orders tried (lower bound {format_bytes(report.plan.bound_bytes)})")
    rows = [
        (name, format_bytes(peak), f"{peak / report.eager.live_bytes:.4f}", "chosen" if name == report.order else "")
        for name, peak in report.candidates
    ]
    show_rows(out, ("order", "peak", "of eager's", ""), rows, right=(1, 2))


def show_layout(out: Console, plan: Plan) -> None:
    """Print the table of :func:`layout_rows` of ``plan`` to ``out``."""
    show_heading(out, "layout")
    show_rows(out, ("", "bytes", ""), layout_rows(plan), right=(1,))
