"""A plan: the decisions of all passes as frozen data, with their cost and bounds; written to JSON and read back.

A plan made once can be kept and given to a later run: the pipeline then skips every ``decide`` and runs
every ``apply`` and every check. Reading a plan executes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roamc import decode, files
from roamc.budget import LIGHT, NO_TIME
from roamc.errors import PlanError
from roamc.gpus import ROUNDED, rounding
from roamc.units import LARGEST, Bytes, Seconds, format_apart, format_bytes, format_parts, format_seconds

FORMAT = 13
"""Version of the JSON form; increased when a reader of an older version could misread it."""

KEPT = "kept plan"
"""The stage, in :attr:`Plan.seconds`, of reading a plan that an earlier run has kept."""


@dataclass(frozen=True)
class Plan:
    """What was decided for one graph, and what it costs. All sizes in bytes.

    Attributes:
        name: name of the graph.
        fingerprint: hash of the graph that the plan was made for.
        device: type of the device that the plan was made for, "cpu" or "cuda".
        versions: "roamc" and "torch" to the version that the plan was made with.
        threads: number of torch's threads on a CPU for which ``needed_bytes`` is counted: some operators have buffers
            for each.
        budget_bytes: the budget that was asked for, of ``needed_bytes``; 0 for the lowest peak or a share of time, None
            for ``"+0%"``.
        budget_added: most time that the plan was allowed to add, as a fraction of ``step_seconds``; 0 for any.
        least_bytes: lower bound of ``needed_bytes`` for any choice of reruns and codecs that adds no more, in any
            order; 0 where it is not known, or where ``budget_added`` is 0.
        peak_bytes: predicted peak of everything that the step allocates: the arena without what is trimmed at that
            time, and outside it outputs, results left with the allocator, and results on their way into the arena.
            Parameters, optimizer state and inputs are not in it, nor what operators take for themselves.
        needed_bytes: the same with what operators take for themselves while they run, and tensors' own objects, as
            estimated by :mod:`roamc.cost.workspace`, and with what others in flight hold
            meanwhile. This is what a budget is compared with.
        arena_bytes: size of the arena, all of it.
        live_bytes: most bytes of the arena in use at one step.
        bound_bytes: lower bound of the live bytes at the worst step, for any order of the operators of the plan, reruns
            included; 0 if pass reorder was left out.
        baseline_bytes: live bytes of eager PyTorch at its worst step of the same graph.
        baseline_needed_bytes: what eager PyTorch takes at its worst step, counted as ``needed_bytes`` is. Shares such
            as "80%" are of this.
        baseline_lost_bytes: what torch's caching allocator needs on a GPU beyond the bytes of eager's step and of what
            the caller holds, by rounding and fragmentation, as :mod:`roamc.cost.caching_allocator` simulates two steps
            on a GPU that is full; 0 on a CPU.
        in_flight: micro-batches of a pipeline, or calls of a module before one backward, that are in flight:
            ``needed_bytes`` and ``baseline_needed_bytes`` count all of them, and other numbers the one that runs; 1
            elsewhere.
        step_seconds: predicted time of a step in which nothing runs again, of collectives what no other operator hides.
        added_seconds: predicted time of all operators that run again and of codecs, per step.
        added_bound_seconds: lower bound of the added time, for any choice of reruns and codecs within the same peak; 0
            where it is not known.
        status: "optimal" if peak and bound meet, so that no order and no layout of these operators is better; "limit"
            if a search ended at its limit of work, else "gap".
        room: what is to hold the whole process, such as "H100 (80 GB)"; "" for nothing named.
        room_bytes: its bytes; 0 for nothing named.
        margin_bytes: what a process takes beside the plan, by name, such as CUDA's context; empty on a CPU.
        fixed_bytes: role to bytes of parameters, optimizer state, buffers and inputs, which the caller holds.
        decisions: pass name to the fields of that pass's ``Decision``, as plain data.
        notes: sentences for the user, such as what gradient clipping costs.
        seconds: stage of the planning to its wall time; not part of equality, nor of :meth:`to_json` unless asked for.
    """

    name: str
    fingerprint: str
    device: str
    versions: Mapping[str, str]
    threads: int
    budget_bytes: Bytes | None
    budget_added: float
    least_bytes: Bytes
    peak_bytes: Bytes
    needed_bytes: Bytes
    arena_bytes: Bytes
    live_bytes: Bytes
    bound_bytes: Bytes
    baseline_bytes: Bytes
    baseline_needed_bytes: Bytes
    baseline_lost_bytes: Bytes
    in_flight: int
    step_seconds: Seconds
    added_seconds: Seconds
    added_bound_seconds: Seconds
    status: str
    room: str
    room_bytes: Bytes
    margin_bytes: Mapping[str, Bytes]
    fixed_bytes: Mapping[str, Bytes]
    decisions: Mapping[str, Mapping[str, Any]] = field(repr=False)
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, Seconds] = field(default_factory=dict, compare=False, repr=False)

    @property
    def fragmentation(self) -> float:
        """Bytes of the arena above the most live bytes in it, as a fraction of these: arena / live - 1."""
        return self.arena_bytes / self.live_bytes - 1 if self.live_bytes else 0.0

    @property
    def total_bytes(self) -> Bytes:
        """Bytes of the whole process: what the caller holds, the step, and on a GPU the margin.

        On a CPU what Python and torch take for themselves is left out: it lies beside all tensors.
        """
        return sum(self.fixed_bytes.values()) + self.needed_bytes + sum(self.margin_bytes.values())

    @property
    def baseline_total_bytes(self) -> Bytes:
        """Bytes of the whole process that runs the same step with eager PyTorch, counted as :attr:`total_bytes` is.

        On a GPU with what torch's allocator was simulated to lose, in place of the share of it in the margin.
        """
        margin = sum(size for name, size in self.margin_bytes.items() if name != ROUNDED)
        return sum(self.fixed_bytes.values()) + self.baseline_needed_bytes + margin + self.baseline_lost_bytes

    def limited_bytes(self, *, total: bool) -> Bytes:
        """Return what a budget is compared with: ``needed_bytes``.

        Args:
            total: whether the budget is what a total leaves to the step. On a GPU, what torch's caching allocator
                loses of what the step holds outside its arena is then counted as well.
        """
        apart = self.needed_bytes - self.arena_bytes if total and self.margin_bytes else 0
        return self.needed_bytes + rounding(apart)

    @property
    def fits(self) -> bool | None:
        """Whether :attr:`room` holds the whole process; None where nothing was named."""
        return self.total_bytes <= self.room_bytes if self.room_bytes else None

    @property
    def baseline_fits(self) -> bool | None:
        """Whether :attr:`room` holds the process that runs eager PyTorch; None where nothing was named."""
        return self.baseline_total_bytes <= self.room_bytes if self.room_bytes else None

    @property
    def headline(self) -> str:
        """One sentence: what the whole process needs, of what, and whether it fits."""
        held = [name for role, name in HELD.items() if self.fixed_bytes.get(role)]
        parts = {
            _and(held): self.fixed_bytes.values(),
            "step": (self.needed_bytes,),
            "margin": self.margin_bytes.values(),
        }
        sizes = [f"{format_bytes(sum(sizes))} {name}" for name, sizes in parts.items() if sum(sizes)]
        total = f"{self.against_room[0]} = {' + '.join(sizes) or 'nothing'}"
        if self.fits is None:
            return f"{self.name} needs {total}{self._left_out()}"
        verdict = f"{_VERDICTS[self.fits]} {self.against_room[1]}"
        if self.added_share:
            verdict += f"{'' if self.fits else ' even'} with {self.added_share:.1%} more time"
        return f"{self.name} {verdict}{self._left_out()}: {total}"

    @property
    def against_room(self) -> tuple[str, str]:
        """The total, and :attr:`room` with its article, with as many digits as it takes to see which is larger."""
        return self._beside_room(self.total_bytes)

    def _beside_room(self, nbytes: Bytes) -> tuple[str, str]:
        size, room = format_apart(nbytes, self.room_bytes)
        if not self.room_bytes:
            return format_bytes(nbytes), ""
        return size, _with_article(self.room.replace(format_bytes(self.room_bytes), room))

    @property
    def left_bytes(self) -> Bytes:
        """What :attr:`room` leaves for the step: bytes beside all that is not planned; at least 1, 0 without a room."""
        return max(1, self.room_bytes - self.total_bytes + self.limited_bytes(total=True)) if self.room_bytes else 0

    def _left_out(self) -> str:
        return ", without the optimizer's states" if WITHOUT_STATES in self.notes else ""

    @property
    def allowed(self) -> str:
        """The operators that were allowed to run again, one of :data:`roamc.passes.retain.ALLOWED`."""
        return str(self.decisions.get("retain", {}).get("allowed", "all"))

    @property
    def asked_for(self) -> str:
        """The budget that the plan was made for, as users write it."""
        if self.budget_bytes is None:
            return NO_TIME
        lowest = LIGHT if self.allowed == LIGHT else "min"
        asked = f"+{100 * self.budget_added:g}%" if self.budget_added else lowest
        return format_bytes(self.budget_bytes) if self.budget_bytes else asked

    @property
    def added_share(self) -> float:
        """``added_seconds`` as a fraction of ``step_seconds``; 0 where the step takes no time."""
        return self.share_of_step(self.added_seconds)

    @property
    def added_bound_share(self) -> float:
        """``added_bound_seconds`` as a fraction of ``step_seconds``; 0 where the step takes no time."""
        return self.share_of_step(self.added_bound_seconds)

    def share_of_step(self, seconds: Seconds) -> float:
        """Return ``seconds`` as a fraction of ``step_seconds``; 0 where the step takes no time."""
        return seconds / self.step_seconds if self.step_seconds else 0.0

    def adds_at_most(self, share: float) -> bool:
        """Whether the plan adds at most ``share`` of the predicted time of the step; 0.01 is 1 %."""
        return self.added_seconds <= share * self.step_seconds

    @property
    def waiting_bytes(self) -> Bytes:
        """Bytes that others in flight hold: micro-batches of a pipeline, or calls; 0 where there are none."""
        waiting = self.decisions.get("layout", {}).get("waiting_bytes")
        return waiting if isinstance(waiting, int) else 0  # a text that no graph has been compared with says anything

    def to_dict(self, *, seconds: bool = False) -> dict[str, Any]:
        """Return the plan as plain data, ready for JSON.

        Args:
            seconds: add the wall times of planning, which differ from run to run.
        """
        data = {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        if not seconds:
            del data["seconds"]
        return {"format": FORMAT, **data}

    def report(self) -> dict[str, Any]:
        """Return the plan as plain data with wall times and what follows from its fields, for JSON that tools read."""
        own = {"fragmentation": self.fragmentation, "total_bytes": self.total_bytes, "fits": self.fits is not False}
        eager = {"baseline_total_bytes": self.baseline_total_bytes, "baseline_fits": self.baseline_fits}
        return {**self.to_dict(seconds=True), **own, **eager}

    def to_json(self, *, seconds: bool = False) -> str:
        """Return the plan as JSON text, which :meth:`from_json` reads.

        Without ``seconds``, the same graph, options, device profile, versions and number of threads give the same text
        byte for byte.

        Args:
            seconds: add the wall times of planning, which differ from run to run.
        """
        return json.dumps(self.to_dict(seconds=seconds), indent=1, sort_keys=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file as JSON, with a checksum, for :func:`load_plan` and the option ``plan``.

        Raises:
            OSError: the file cannot be written.
        """
        data = self.to_dict()
        sealed = {**data, CHECKSUM: _checksum(data)}
        files.write_text(Path(path), json.dumps(sealed, indent=1, sort_keys=True) + "\n")

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan from JSON text; nothing is executed, and the plan is not compared with any graph.

        Raises:
            PlanError: the text is not a plan of this format, or was changed behind its checksum; says what is wrong.
        """
        return _from_text(text)[0]

    def with_light_reruns(self) -> Plan:
        """Return the same plan, with which pass retain raises PlanError if an operator runs again that is not light."""
        decision = self.decisions.get("retain")
        if decision is None:
            return self
        return dataclasses.replace(self, decisions={**self.decisions, "retain": {**decision, "allowed": LIGHT}})

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """Return the lines of the plan as it is shown: (label, value with its unit, remark), each as text."""
        one = f", one of {self.in_flight} in flight" if self.in_flight > 1 else ""
        bound = ("unknown", "pass reorder was left out")
        if "reorder" in self.decisions:
            bound = (format_bytes(self.bound_bytes), "on live bytes, for any order")
        share = _against(self.peak_bytes, self.baseline_bytes, f"of eager's{one}")
        return (
            ("total", self.against_room[0], self._total_remark()),
            self._eager_row(),
            ("peak", format_bytes(self.peak_bytes), share),
            *self._workspace_rows(),
            *self._budget_rows(),
            ("eager's peak", format_bytes(self.baseline_bytes), f"same graph, program order{one}"),
            ("lower bound", *bound),
            ("arena", format_bytes(self.arena_bytes), f"fragmentation {self.fragmentation:.3%}"),
            ("fixed", format_bytes(sum(self.fixed_bytes.values())), format_parts(self.fixed_bytes)),
            *self._margin_rows(),
            ("step time", format_seconds(self.step_seconds + self.added_seconds), "predicted"),
            ("status", self.status, ""),
        )

    def _total_remark(self) -> str:
        size, room = format_apart(self.room_bytes, self.total_bytes)[0], self.against_room[1]
        of = room if size in room else f"{size}: {self.room}"
        beside = "" if self.margin_bytes else ", without what Python and torch take for themselves"
        return f"of {of if self.room_bytes else 'the whole process'}{beside}{self._left_out()}"

    def _eager_row(self) -> tuple[str, str, str]:
        """The total of the user's own loop, and its verdict."""
        total, room = self._beside_room(self.baseline_total_bytes)
        verdict = "" if self.baseline_fits is None else f"{_VERDICTS[self.baseline_fits]} {room}, "
        nbytes = self.baseline_lost_bytes
        lost = f", {format_bytes(nbytes)} of it lost by its allocator" if nbytes else ""
        return ("eager's total", total, f"{verdict}the same step as eager PyTorch runs it{lost}{self._left_out()}")

    def _margin_rows(self) -> tuple[tuple[str, str, str], ...]:
        if not self.margin_bytes:
            return ()
        return (("margin", format_bytes(sum(self.margin_bytes.values())), format_parts(self.margin_bytes)),)

    def _workspace_rows(self) -> tuple[tuple[str, str, str], ...]:
        others = f"the other {self.in_flight - 1}" if self.in_flight > 2 else "the other one"
        rows = [
            (
                "in flight",
                self.waiting_bytes,
                f"on top of the peak: saved for {others} of {self.in_flight} in flight",
            ),
            ("workspace", self.needed_bytes - self.peak_bytes - self.waiting_bytes, _INSIDE),
        ]
        if self.in_flight > 1:
            of = f"of eager's {format_bytes(self.baseline_needed_bytes)}, all that are in flight"
            rows.append(("needs", self.needed_bytes, _against(self.needed_bytes, self.baseline_needed_bytes, of)))
        return tuple((label, format_bytes(size), remark) for label, size, remark in rows if size)

    def _budget_rows(self) -> tuple[tuple[str, str, str], ...]:
        if self.budget_bytes is None:
            return ()
        added = ("added time", f"{self.added_share:.1%}", self._added_remark())
        asked = format_apart(self.budget_bytes, self._taken_bytes)[0] if self.budget_bytes else self.asked_for
        return (("budget", asked, self._budget_remark()), added)

    @property
    def _taken_bytes(self) -> Bytes:
        """The bytes that the budget was compared with."""
        return self.limited_bytes(total=self.budget_bytes == self.left_bytes)

    def _budget_remark(self) -> str:
        if self.budget_added:
            bound = f"; lower bound of any plan within it {format_bytes(self.least_bytes)}" if self.least_bytes else ""
            return f"of the step's time{bound}"
        if not self.budget_bytes:
            return ""
        whole = f"what {self.against_room[1]} leaves for the step" if self.budget_bytes == self.left_bytes else ""
        needed = format_apart(self._taken_bytes, self.budget_bytes)[0]
        lost = ", what the allocator loses by rounding among it" if self._taken_bytes > self.needed_bytes else ""
        if self._taken_bytes > self.budget_bytes:
            return "; ".join(filter(None, (whole, f"exceeded: {needed} needed{lost}")))
        free = self.budget_bytes >= self.baseline_needed_bytes and not any(self._changed)  # any plan needs less
        return "; ".join(filter(None, (whole, f"it does not bind: {needed} needed{lost}" if free else "")))

    @property
    def _changed(self) -> tuple[int, int]:
        """Numbers of operators that run again and of values that are encoded."""
        decision = self.decisions.get("retain", {})
        return len(decision.get("reruns", ())), len(decision.get("codes", ()))

    def _added_remark(self) -> str:
        again, smaller = self._changed
        if not again and not smaller:
            return "nothing is recomputed"
        bound = f"; lower bound {self.added_bound_share:.1%}" if self.added_bound_share else ""
        codes = f", {smaller} {'value' if smaller == 1 else 'values'} encoded" if smaller else ""
        return f"predicted; {again} {'operator' if again == 1 else 'operators'} recomputed{codes}{bound}"

    def metrics(self, prefix: str = "roamc/") -> dict[str, int | float]:
        """Return the numbers of the plan by name, for wandb, TensorBoard and the like.

        They are the attributes of these names in bytes and seconds, those with parts summed up, ``added_share``, the
        added time as a fraction of the step's, and ``predicted_seconds``, the time of the step with it. What is not
        known, or was not asked for, is left out.

        Args:
            prefix: begins each name.
        """
        numbers = {name: getattr(self, name) for name in _METRICS}
        numbers |= {name: sum(getattr(self, name).values()) for name in ("fixed_bytes", "margin_bytes")}
        if self.step_seconds:
            numbers["added_share"] = self.added_share
            numbers["predicted_seconds"] = self.step_seconds + self.added_seconds
        return {f"{prefix}{name}": value for name, value in numbers.items() if value or name not in _UNKNOWN_IF_ZERO}

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the headline, and the rows and notes of the text form, as HTML."""
        rows = "".join(
            f'<tr><th style="text-align:left">{label}</th><td style="text-align:right">{value}</td>'
            f'<td style="text-align:left">{remark}</td></tr>'
            for label, value, remark in (map(html.escape, row) for row in self.rows())
        )
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        head = f"<p><b>{html.escape(self.headline)}</b></p>"
        return f"{head}<table>{rows}</table>" + (f"<ul>{notes}</ul>" if notes else "")

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"  {label:<13}{value:>12}  {remark}".rstrip() for label, value, remark in self.rows()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file that :meth:`Plan.save` or ``--save`` has written.

    Nothing is executed, and the plan is not compared with any graph. ``train_step(..., plan=path)``, ``optimize`` and
    ``torch.compile`` apply it, and count again what it says of a step.

    Args:
        path: of the file.

    Raises:
        PlanError: the file cannot be read, is not a plan, or was changed after it was saved; names it.
    """
    try:
        plan, sealed = _from_text(files.read(Path(path), LONGEST).decode("utf-8"))
        if not sealed:
            raise PlanError("it has no checksum, so it was not saved by plan.save or --save: plan again")
        return plan
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
        raise PlanError(f"{os.fspath(path)}: {str(reason).lower()}") from None
    except PlanError as error:
        raise PlanError(f"{os.fspath(path)}: {error}") from None


WITHOUT_STATES = "forward and backward only: the optimizer's states come on top of the total"
"""The note of a plan without an update."""

_VERDICTS = {True: "fits", False: "does not fit"}

_METRICS = (
    "total_bytes", "needed_bytes", "peak_bytes", "bound_bytes", "arena_bytes", "live_bytes", "least_bytes",
    "baseline_bytes", "baseline_needed_bytes", "baseline_lost_bytes", "baseline_total_bytes", "budget_bytes",
    "room_bytes", "fragmentation", "in_flight", "step_seconds", "added_seconds", "added_bound_seconds",
)  # fmt: skip
"""The attributes that :meth:`Plan.metrics` has as they are."""

_UNKNOWN_IF_ZERO = ("bound_bytes", "least_bytes", "budget_bytes", "room_bytes", "margin_bytes", "added_bound_seconds")
"""Those of them that are 0, or None, where they are not known or were not asked for."""


_INSIDE = "on top of the peak: operator workspace and tensor objects, estimated"


HELD = {
    "parameter": "parameters", "buffer": "buffers", "optimizer state": "optimizer state",
    "assumed optimizer state": "assumed optimizer state", "accumulated gradient": "accumulated gradients",
    "input": "inputs",
}  # fmt: skip
"""Roles of ``fixed_bytes`` in the words of sentences and pages."""


def _and(names: list[str]) -> str:
    """The names as one enumeration."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _with_article(title: str) -> str:
    """A name with its article, as its first letter or digit is spoken; a number stands without one."""
    if title[:1].isdigit() or not title:
        return title
    return f"{'an' if title[0] in 'AEFHILMNORSX' else 'a'} {title}"


def _against(value: Bytes, base: Bytes, of: str) -> str:
    return f"{value / base:.3f} {of}" if base else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the JSON text as a dict.

    Raises:
        ValueError: a key is there twice, so that it is not known which value counts.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return fields


STATUSES = ("optimal", "gap", "limit")
"""The values of :attr:`Plan.status`."""

MOST_THREADS = 2**16
"""Of :attr:`Plan.threads`: no machine has more."""

LONGEST = 1 << 28
"""Bytes of a plan's file."""


CHECKSUM = "checksum"
"""Field of a plan file that no plan has: a hash of the others. It shows what was changed by hand, by a merge or by a
disk. Who writes a checksum anew can still lie: such a plan is judged by :mod:`roamc.planning.plan_check` alone."""


def _checksum(data: Mapping[str, Any]) -> str:
    """Return the hash of a plan as plain data, whatever the spaces and the sequence of its fields in a file."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _from_text(text: str) -> tuple[Plan, bool]:
    """Read a plan from JSON text, and say whether it has a checksum, which is then the right one.

    Raises:
        PlanError: as :meth:`Plan.from_json`.
    """
    try:
        data = decode.parse(text, _once)
        sealed = isinstance(data, dict) and CHECKSUM in data
        changed = sealed and data.pop(CHECKSUM) != _checksum(data)
    except ValueError as error:
        raise PlanError(f"not a plan: {error}") from None
    if changed:
        raise PlanError("it was changed after it was saved, as its checksum shows: plan again")
    return _from_dict(data), sealed


def _from_dict(data: Any) -> Plan:
    if not isinstance(data, dict):
        raise PlanError("not a plan: expected a JSON object")
    form = data.get("format")
    if type(form) is not int or form != FORMAT:
        raise PlanError(f"plan format {form!r}; this roamc reads format {FORMAT}: plan again")
    if "fits" in data:
        raise PlanError("a report of --json, not a plan: write one with --save")
    fields = {key: item for key, item in data.items() if key != "format"}
    plan = decode.read(Plan, {"seconds": {}, **fields}, "plan")
    for item in dataclasses.fields(Plan):
        value = getattr(plan, item.name)
        for number in value.values() if isinstance(value, Mapping) else (value,):
            _check_size(number, f"plan: {item.name}")
    if not 1 <= plan.threads <= MOST_THREADS:
        raise PlanError(f"plan: threads must be at least 1 and at most {MOST_THREADS}, not {plan.threads}")
    if plan.in_flight < 1:
        raise PlanError(f"plan: in_flight must be at least 1, not {plan.in_flight}")
    if plan.status not in STATUSES:
        raise PlanError(f"plan: status must be one of {', '.join(STATUSES)}, not {plan.status!r}")
    return dataclasses.replace(plan, decisions={name: _frozen(item, name) for name, item in plan.decisions.items()})


def _frozen(value: Any, where: str) -> Any:
    """Return ``value`` with tuples in the place of JSON's lists, as in the decisions that passes make.

    Raises:
        PlanError: a number is negative, none or too large, which no pass decides.
    """
    if isinstance(value, Mapping):
        return {key: _frozen(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, int | float) and not value >= 0:
        raise PlanError(f"the plan's decision of pass {where} must be a number from 0 on, not {value!r}")
    _check_size(value, f"the plan's decision of pass {where}")
    return tuple(_frozen(item, where) for item in value) if isinstance(value, list) else value


def _check_size(value: Any, where: str) -> None:
    """Refuse a number that is too large or infinite.

    Raises:
        PlanError: names it as ``where``.
    """
    if isinstance(value, int | float) and value > LARGEST:
        raise PlanError(f"{where} must be at most {LARGEST}, not {str(value)[:60]}")
