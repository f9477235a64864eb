"""Saved plans as targets of the command line: ``roamc plan plan.json``, ``roamc explain plan.json``."""

from __future__ import annotations

import json
from pathlib import Path

from roamc.cli.asked import Asked
from roamc.errors import OptionError
from roamc.planning.plan import Plan, load_plan

WITHOUT_GRAPH = {"target", "as_json", "debug", "top"}
"""Parameters of the commands that say how a saved plan is told; all others are for planning, or need its graph."""


def saved_plan(asked: Asked) -> Plan | None:
    """Return the plan in the file that is asked for, told by its content; None for whatever is no plan.

    Raises:
        PlanError: the file has a plan of another format, or one that was changed after it was saved.
        OptionError: an option was given that needs the model or the graph.
    """
    target = asked.request.target
    if not target.endswith(".json") or not _is_plan(Path(target)):
        return None
    for name, option in asked.given.items():
        if name not in WITHOUT_GRAPH:
            raise OptionError(f"{target} is a saved plan without its model and graph, which {option} needs")
    return load_plan(target)


def _is_plan(path: Path) -> bool:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # who reads it as a configuration says what is wrong
    return isinstance(data, dict) and {"format", "fingerprint", "decisions"} <= set(data)
