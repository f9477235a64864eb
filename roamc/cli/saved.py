"""Saved plans as targets of the command line: ``roamc plan plan.json``, ``roamc explain plan.json``."""

from __future__ import annotations

from pathlib import Path

from roamc import decode, files
from roamc.cli.asked import Asked
from roamc.errors import OptionError, PlanError
from roamc.planning.plan import LONGEST, Plan, load_plan

WITHOUT_GRAPH = {"target", "as_json", "debug", "top"}
"""Parameters of the commands that say how a saved plan is told; all others are for planning, or need its graph."""


def saved_plan(asked: Asked) -> Plan | None:
    """Return the plan in the file that is asked for, told by its content; None for whatever is no plan.

    Raises:
        PlanError: the file has a plan of another format, or one that was changed after it was saved.
        OptionError: an option was given that needs the model or the graph.
    """
    target = asked.request.target
    try:
        plan = load_plan(target) if target.endswith(".json") else None
    except PlanError:
        if is_plan(target):
            raise
        plan = None
    if plan is None:
        return None
    for name, option in asked.given.items():
        if name not in WITHOUT_GRAPH:
            raise OptionError(
                f"{target} is a saved plan without its model and graph, which {option} needs: leave it out, or give "
                "the model in place of the plan"
            )
    return plan


def is_plan(target: str) -> bool:
    """Return whether a target of the command line is the file of a saved plan, readable or not."""
    if not target.endswith(".json"):
        return False
    try:
        data = decode.parse(files.read(Path(target), LONGEST))
    except (OSError, ValueError):
        return False  # who reads it as a configuration says what is wrong
    return isinstance(data, dict) and {"format", "fingerprint", "decisions"} <= set(data)
