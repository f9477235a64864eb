"""What the choice of recomputed and encoded values may spend, and which differences it ignores, in one place."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """How many questions pass retain asks of its solver, and how close is close enough.

    A share is a fraction of what it is compared with. Where an entry names no measurement none is recorded; it then
    says what another value trades off.

    Attributes:
        worth_share: a storage gets a codec only if it is larger than this fraction, as a divisor, of all saved bytes. A
            larger divisor makes more candidates that save little.
        generous_factor: the second set takes every codec that costs, per saved byte, less than this many times the
            price. The price is an estimate, so codecs somewhat above it may pay.
        near_share: where a target differs from the last by at most this share, only the codecs that won there, and
            none, are tried. A larger share tries fewer sets.
        descents: times that the search for the lowest peak asks for a peak below the lowest so far.
        lower_share: the first of these questions asks for a peak lower by this share; each later one doubles the share.
        little_share: the search for the lowest peak ends when a question lowers the peak by no more than this share.
        enough_share: an answer is good enough if it adds at most this share of the step's time above the bound: prices
            are rougher.
    """

    worth_share: int = 1_000
    generous_factor: float = 2.0
    near_share: float = 0.02
    descents: int = 6
    lower_share: float = 0.02
    little_share: float = 0.001
    enough_share: float = 0.002


EFFORT = Effort()
"""What pass retain spends unless it is told otherwise."""
