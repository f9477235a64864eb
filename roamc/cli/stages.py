"""The stages of a pipeline side by side: ``roamc plan MODEL --mesh pp=8 --stage all``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roamc.frontends.stages import Stage
from roamc.planning.plan import Plan
from roamc.units import Seconds, format_bytes

HEADINGS = ("stage", "ends", "in flight", "peak", "needs", "in all", "time", "")
"""Of the table that :func:`rows` returns. "in all" counts what is fixed as well; "time" is that of one micro-batch."""

ON_THE_RIGHT = (0, 2, 3, 4, 5, 6)
"""Columns of the table with numbers."""


@dataclass(frozen=True)
class StagePlan:
    """The plan of one rank of one stage.

    Attributes:
        stage: the stage.
        plan: its plan; the lowest one that was found where none keeps the budget.
        seconds: predicted time of forward, backward and update of one micro-batch.
        fits: whether the plan keeps the budget.
    """

    stage: Stage
    plan: Plan
    seconds: Seconds
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and those of the plan, as plain data, ready for JSON."""
        own = {"stage": self.stage.number, "micro_batch_seconds": self.seconds}
        return {**self.plan.report(), **own, "fits": self.fits}


def fullest(stages: Sequence[StagePlan]) -> StagePlan:
    """Return the stage with the most bytes in all, the first of equals."""
    return max(stages, key=lambda each: each.plan.total_bytes)


def rows(stages: Sequence[StagePlan]) -> list[tuple[str, ...]]:
    """Return one row of texts for each stage, see :data:`HEADINGS`."""
    most = fullest(stages)
    return [
        (
            str(each.stage.number),
            ", ".join(end for end, there in each.stage.ends.items() if there),
            str(each.stage.in_flight),
            format_bytes(each.plan.peak_bytes),
            format_bytes(each.plan.needed_bytes),
            format_bytes(each.plan.total_bytes),
            f"{each.seconds * 1e3:.1f} ms",
            ", ".join([*(["fullest"] if each is most else []), *([] if each.fits else ["does not fit"])]),
        )
        for each in stages
    ]
