"""Pictures of plans, as the command line draws them."""

from __future__ import annotations

from roamc.cost import load_profile
from roamc.graph import TrainGraph, main_device
from roamc.options import Options
from roamc.planning import search
from roamc.planning.planned import Planned
from roamc.report.explain import explain, find_peak, lives_of
from roamc.report.picture import Picture, draw, follow


def picture_of(graph: TrainGraph, options: Options) -> tuple[Picture, Planned]:
    """Plan a captured graph, and return the picture of its plan, and the planned graph."""
    lives, profile = lives_of(graph, eager=True), load_profile(main_device(graph), options.profile)
    eager, before = find_peak(graph, lives), follow(graph, lives, profile)
    planned = search.run(graph, options)
    lives = lives_of(planned.graph)
    return draw(explain(eager, planned, lives), before, planned.graph, lives, profile), planned
