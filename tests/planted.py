"""Faults planted in the source of a group, which its judge has to name."""

from __future__ import annotations

import dataclasses
import re
from typing import TypeVar

from roamc.operators.fused import Fused

Group = TypeVar("Group", bound=Fused)


def planted(group: Group, right: str, wrong: str) -> Group:
    """Change the source of ``group`` at the first place that matches ``right``.

    Args:
        group: changed in place, and returned.
        right: a regular expression; it must match.
        wrong: what stands there instead, as in :func:`re.sub`.
    """
    source, count = re.subn(right, wrong, group.text.source, count=1)
    assert count == 1, f"{right} is not in\n{group.text.source}"
    group.__dict__["text"] = dataclasses.replace(group.text, source=source)
    return group
