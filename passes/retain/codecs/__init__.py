"""Smaller forms in which a value can wait for its readers in backward; one file each.

Read ``codec.py`` for the interface. A new codec is a file with a function that says where it fits, and a row here.
``shapes.py`` is for readers that need no element at all.
"""

from __future__ import annotations

from roamc.errors import PlanError
from roamc.passes.retain.codecs import bits, integers, signs
from roamc.passes.retain.codecs.codec import Codec, Coding, Saved

__all__ = ["CODECS", "Codec", "Coding", "Saved", "codec_of"]

CODECS: tuple[Codec, ...] = (
    Codec("bits", 0.0, bits.fit),
    Codec("signs", 0.0, signs.fit),
    Codec("integers", 0.0, integers.fit),
)
"""All of them; each gives back exactly what it was given, as far as its readers look."""


def codec_of(name: str) -> Codec:
    """The codec of this name.

    Raises:
        PlanError: there is none.
    """
    for codec in CODECS:
        if codec.name == name:
            return codec
    raise PlanError(f"retain: there is no codec {name!r}; there are {', '.join(codec.name for codec in CODECS)}")
