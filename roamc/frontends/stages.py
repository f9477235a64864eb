"""The stages of a pipeline: what each has of a model, and how many micro-batches it has in flight.

    stage        0           1 to pp - 2    pp - 1
    has          embedding   layers         layers,
                 layers                     norm, head, loss
    in flight    pp          pp - stage     1              of one forward, one backward (1F1B)

Stages are numbered from 0. No pipeline is run: a stage is planned with what its micro-batches in flight hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roamc.errors import OptionError
from roamc.graph.memory import SUMS
from roamc.planning.plan import Plan
from roamc.settings import EMBEDDING, HEAD, Setting
from roamc.units import format_bytes


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        number: from 0, the stage that has the embedding.
        count: number of stages.
    """

    number: int = 0
    count: int = 1

    @property
    def in_flight(self) -> int:
        """Micro-batches that have run forward before one runs backward, in a schedule of one forward, one backward.

        The last stage runs backward at once; each one before has sent one micro-batch more on its way (Narayanan et
        al., arXiv 2104.04473, section 2.2).
        """
        return self.count - self.number

    @property
    def of_graph(self) -> dict[str, Any]:
        """The fields of the graph of a stage's step that say so."""
        return {"in_flight": self.in_flight, "sums": self.count > 1}

    @property
    def ends(self) -> dict[str, Setting]:
        """Whether it has the embedding and the head, by :data:`EMBEDDING` and :data:`HEAD`."""
        return {EMBEDDING: self.number == 0, HEAD: self.number == self.count - 1}


def stage_of(count: int, number: int | None) -> Stage:
    """Return stage ``number`` of ``count``; None for the first.

    Raises:
        OptionError: there is no such stage; says which there are.
    """
    if number is None:
        return Stage(0, count)
    if type(number) is not int or not 0 <= number < count:
        there = f"stages 0 to {count - 1}" if count > 1 else "one stage, 0: name its stages in the mesh, such as pp=8"
        raise OptionError(f"there is no stage {number!r}: pp={count} has {there}")
    return Stage(number, count)


def stage_settings(
    settings: Mapping[str, Setting], defaults: Mapping[str, Setting], stage: Stage
) -> dict[str, Setting]:
    """Return the settings of a built-in model as a stage of the pipeline has it: its layers, and its ends.

    Args:
        settings: the settings that the user gives.
        defaults: all settings of the model, with their defaults.
        stage: the stage.

    Raises:
        OptionError: the model has no layers, the stages do not divide them, or the stage is not the first and the model
            has its ends in one piece with its layers.
    """
    if stage.count == 1:
        return dict(settings)
    whole = {**defaults, **settings}.get("layers")
    if "layers" not in defaults or not isinstance(whole, int):
        raise OptionError(f"pp={stage.count} needs a built-in model that has layers to divide among the stages")
    if whole % stage.count:
        raise OptionError(f"pp={stage.count} does not divide the {whole} layers")
    if stage.number and not stage.ends.keys() <= defaults.keys():
        raise OptionError(
            f"stage {stage.number} needs a built-in model that runs without its embedding, such as gpt or gpt3-175b; "
            "this one has its ends in one piece with its layers, and stage 0 counts both"
        )
    ends = {end: there for end, there in stage.ends.items() if end in defaults}
    return {**ends, **settings, "layers": whole // stage.count}


def ends_note(defaults: Mapping[str, Setting], stage: Stage) -> tuple[str, ...]:
    """Return a sentence for a stage that has both ends of its model, as :func:`stage_settings` could leave none out.

    Args:
        defaults: all settings of the built-in model.
        stage: the stage.
    """
    if stage.count == 1 or stage.ends.keys() <= defaults.keys():
        return ()
    return ("this model cannot run without its ends: the stage includes embedding, head and loss",)


def stage_note(plan: Plan, stage: Stage, layers: int | None = None) -> str:
    """Return a sentence on what a stage holds.

    Args:
        plan: of the stage.
        stage: the stage.
        layers: how many layers the whole model has; None if that is not known.
    """
    of_layers = f", {layers // stage.count} of {layers} layers," if layers else ""
    flight = "1 micro-batch in flight"
    if stage.in_flight > 1:
        each = format_bytes(plan.waiting_bytes // (stage.in_flight - 1))
        flight = f"{stage.in_flight} micro-batches in flight (each waiting one holds {each})"
    needed, total = format_bytes(plan.needed_bytes), format_bytes(plan.total_bytes)
    return (
        f"stage {stage.number} of pp={stage.count}{of_layers} has {flight}: it needs {needed} (what a budget limits), "
        f"or {total} with what is fixed, {format_bytes(plan.fixed_bytes.get(SUMS, 0))} of accumulated gradients "
        "among it; times and bytes sent are for one micro-batch; roamc does not run the pipeline"
    )
