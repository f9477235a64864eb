"""Names for new nodes: they follow from the names of nodes that are there, and not from those of nodes erased before.

FX remembers the names of erased nodes, so that names of its choice differ between a graph and a copy of it.
"""

from __future__ import annotations

import re

from torch import fx

from roamc.errors import PlanError

_NUMBERED = re.compile("(.+)_([0-9]+)")


def stem_of(name: str) -> str:
    """Return the name of a node without the number that tells it from others: ``mul`` for ``mul`` and ``mul_3``."""
    numbered = _NUMBERED.fullmatch(name)
    return numbered[1] if numbered else name


class Names:
    """The names that are taken: those of all nodes of the graph in ``Names(graph)``, and those taken since.

    Nothing is written into the graph; the caller names new nodes as :meth:`fresh` and :meth:`take` allow.
    """

    def __init__(self, graph: fx.Graph) -> None:
        """Take the names of all nodes of ``graph``."""
        self._taken: set[str] = set()
        self._highest: dict[str, int] = {}
        for node in graph.nodes:
            self._note(node.name)

    def fresh(self, name: str) -> str:
        """Mark a name as taken, and return it: ``name`` if that is free, else its stem with the next higher number.

        The stem is the name without the number at its end, see :func:`stem_of`.
        """
        if name in self._taken:
            stem = stem_of(name)
            name = f"{stem}_{self._highest.get(stem, 0) + 1}"
        self._note(name)
        return name

    def take(self, name: str) -> None:
        """Mark ``name`` as taken.

        Raises:
            PlanError: it is taken already.
        """
        if name in self._taken:
            raise PlanError(f"two operators would have the name {name!r}")
        self._note(name)

    def _note(self, name: str) -> None:
        self._taken.add(name)
        numbered = _NUMBERED.fullmatch(name)
        if numbered:
            stem, number = numbered.groups()
            self._highest[stem] = max(self._highest.get(stem, 0), int(number))
