"""Smaller forms in which a value can wait for its readers in backward; one file each.

Read ``codec.py`` for the interface. A new codec is a file with a function that says where it fits, and a row here.
``shapes.py`` is for readers that need no element at all, ``projections.py`` for those that project.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from roamc.errors import OptionError, PlanError, nearest
from roamc.operators.ops import Need
from roamc.operators.table import Kind
from roamc.passes.retain.codecs import bits, compact, integers, norms, signs, tempo
from roamc.passes.retain.codecs.codec import Codec, Coding, Saved

__all__ = ["CODECS", "Codec", "Coding", "Kind", "Saved", "codec_of", "lossy_names", "usable"]


def _tempo(saved: Saved) -> Coding | None:
    return tempo.fit(saved) or norms.fit(saved)


CODECS: tuple[Codec, ...] = (
    Codec("bits", bits.fit),
    Codec("signs", signs.fit, Need.SIGN),
    Codec("integers", integers.fit),
    Codec("tempo", _tempo, lossy=True),
    compact.CODEC,
)
"""All codecs. A lossy one is used only where ``options.codecs`` names it."""


def usable(lossy: Collection[str] = ()) -> tuple[Codec, ...]:
    """Return the codecs that a plan may use: all exact ones, and those with an error that ``lossy`` names."""
    return *(codec for codec in CODECS if not codec.lossy), *map(codec_of, lossy)


def lossy_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of codecs with an error, with all their settings, in the form that plans have.

    Args:
        names: names of such codecs, with or without settings: "compact", "compact:rank=1/8".

    Raises:
        OptionError: there is no codec of a name, the codec is exact, it has no such settings, or it has two of them.
    """
    lossy = [codec.name for codec in CODECS if codec.lossy]
    exact = ", ".join(codec.name for codec in CODECS if not codec.lossy)
    complete: dict[str, str] = {}
    for name in names:
        head = name.partition(":")[0]
        if head not in lossy:
            raise OptionError(
                f"codecs: {head!r} is not a codec with an error; there are {', '.join(lossy)}{nearest(head, lossy)} "
                f"Exact ones, which need no name: {exact}"
            )
        complete_name = _set(name).name
        if complete.setdefault(head, complete_name) != complete_name:
            raise OptionError(f"codecs: {head!r} has two settings, {complete[head]!r} and {complete_name!r}; give one")
    return tuple(complete.values())


def codec_of(name: str) -> Codec:
    """Return the codec called ``name``, which may have settings behind it.

    Raises:
        PlanError: there is no codec of that name, or it has no such settings.
    """
    if all(codec.name != name.partition(":")[0] for codec in CODECS):
        raise PlanError(f"there is no codec {name!r}; there are {', '.join(codec.name for codec in CODECS)}")
    try:
        return _set(name)
    except OptionError as error:
        raise PlanError(str(error)) from None


def _set(name: str) -> Codec:
    """The codec of a name that there is, with its settings."""
    head, *parts = name.split(":")
    codec = next(codec for codec in CODECS if codec.name == head)
    settings = dict(part.partition("=")[::2] for part in parts)
    if len(settings) < len(parts):
        raise OptionError(f"codecs: {name!r} gives {head!r} a setting twice")
    if codec.set_to is not None:
        return codec.set_to(settings)
    if settings:
        raise OptionError(f"codecs: {head!r} has no settings, and {name!r} gives it {', '.join(settings)}")
    return codec
