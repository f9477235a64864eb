"""Notes of a plan on codecs with an error: how far which values are off, and why a codec that may be used is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from roamc.graph import Encoding, TrainGraph
from roamc.operators.table import Kind
from roamc.rewriting.rerun import encodings_of

OFF: Mapping[Kind, str] = {
    Kind.WEIGHT: "gradients of weights off by {:.2g} of their norm",
    Kind.SLOPE: "slopes of activations off by {:.2g} of their norm",
    Kind.NORM: "inputs of norms off by {:.2g} of 1 / rstd",
}
"""How an error is told, by the only kind of the readers that get a decoded value."""

ANY = "what reads them off by {:.2g} of its norm"
"""The same of any other readers."""


def notes(
    graph: TrainGraph, codes: Iterable[tuple[str, str]], offered: Mapping[str, int], allowed: Collection[str]
) -> tuple[str, ...]:
    """Return one sentence for each codec with an error that ``graph`` has, or that the plan might have used.

    Args:
        graph: the graph behind all passes.
        codes: storage and codec of each value that readers behind forward get decoded.
        offered: codec to the number of storages that it could keep smaller, as far as that is known.
        allowed: names of the codecs that were to be decided on; empty where a plan from elsewhere is applied.
    """
    encodings = encodings_of(graph) if graph.encodings else {}
    by_codec: dict[str, list[Encoding]] = {name: [] for name in allowed}
    for code in codes:
        if code in encodings and encodings[code].error:
            by_codec.setdefault(code[1], []).append(encodings[code])
    return tuple(_note(name, used, offered.get(name)) for name, used in by_codec.items())


def _note(name: str, used: list[Encoding], fits: int | None) -> str:
    if not used and fits is None:
        return f"codec {name} is not used: all values wait as they are; a lower memory_budget may need it"
    if fits == 0:
        return f"codec {name} is not used: it makes no value that waits for backward smaller"
    of = "" if fits is None else f" of {fits}"
    rest = "; the rest are kept or made again" if fits is not None and fits > len(used) else ""
    values = "value" if (len(used) if fits is None else fits) == 1 else "values"
    return f"codec {name}: {len(used)}{of} {values}" + "".join(f", {part}" for part in _errors(used)) + rest


def _errors(used: list[Encoding]) -> Iterator[str]:
    counts = Counter(each.serves for each in used)
    for serves, count in counts.items():
        worst = max(each.error for each in used if each.serves == serves)
        told = OFF.get(next(iter(serves)), ANY) if len(serves) == 1 else ANY
        yield told.format(worst) + (f" ({count})" if len(counts) > 1 else "")
