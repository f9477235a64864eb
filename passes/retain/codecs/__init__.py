"""Smaller forms in which a value can wait for its readers in backward; one file each.

Read ``codec.py`` for the interface. A new codec is a file with a function that says where it fits, and a row here.
``shapes.py`` is for readers that need no element at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from roamc.errors import OptionError, PlanError, nearest
from roamc.operators.ops import Need
from roamc.operators.table import Kind
from roamc.passes.retain.codecs import bits, integers, signs, tempo
from roamc.passes.retain.codecs.codec import Codec, Coding, Saved

__all__ = ["CODECS", "Codec", "Coding", "Kind", "Saved", "check_lossy", "codec_of", "usable"]

CODECS: tuple[Codec, ...] = (
    Codec("bits", 0.0, bits.fit),
    Codec("signs", 0.0, signs.fit, Need.SIGN),
    Codec("integers", 0.0, integers.fit),
    Codec("tempo", tempo.ERROR, tempo.fit, serves=frozenset({Kind.SLOPE})),
)
"""All codecs. An exact codec (``error`` 0) changes nothing that its readers look at; one with an error is used only
where ``options.codecs`` names it."""


def usable(lossy: Collection[str] = ()) -> tuple[Codec, ...]:
    """Return the codecs that a plan may use: all exact ones, and those with an error whose names are in ``lossy``."""
    return tuple(codec for codec in CODECS if not codec.error or codec.name in lossy)


def check_lossy(names: Iterable[str]) -> None:
    """Check that each of ``names`` is the name of a codec with an error.

    Raises:
        OptionError: there is no codec of a name, or the codec is exact.
    """
    lossy = [codec.name for codec in CODECS if codec.error]
    for name in names:
        if name not in lossy:
            available = f"there are {', '.join(lossy)}" if lossy else "this roamc has none, all its codecs are exact"
            exact = ", ".join(codec.name for codec in CODECS if not codec.error)
            raise OptionError(
                f"codecs: {name!r} is not a codec with an error; {available}{nearest(name, lossy)} Exact ones, which "
                f"need no name: {exact}"
            )


def codec_of(name: str) -> Codec:
    """Return the codec called ``name``.

    Raises:
        PlanError: there is no codec of that name.
    """
    for codec in CODECS:
        if codec.name == name:
            return codec
    raise PlanError(f"there is no codec {name!r}; there are {', '.join(codec.name for codec in CODECS)}")
