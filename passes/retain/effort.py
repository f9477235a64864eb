"""What the choice of recomputed and encoded values may spend, and which differences it ignores, in one place."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """How many questions pass retain asks of its solver, and how close is close enough.

    A share is a fraction of the value that it is compared with. An entry without a measured figure was not measured; it
    says what another value trades off.

    Attributes:
        worth_share: a divisor: a storage gets a codec only if the storage is larger than all saved bytes divided by
            this number. A larger divisor makes more candidates that save little.
        generous_factor: the second set takes every codec that costs, per saved byte, less than this many times the
            price. The price is an estimate, so codecs somewhat above the price may pay.
        near_share: where a target differs from the last target by at most this share, two sets are tried: the codecs
            that won at the last target, and none. A larger share tries fewer sets.
        descents: largest number of times that the search for the lowest peak asks for a peak below the lowest so far.
        lower_share: the first time, that search asks for a peak lower by this share; each further time doubles it.
        little_share: the search for the lowest peak ends when a question lowers the peak by no more than this share.
        enough_share: an answer is good enough if its added time exceeds the bound by at most this share of the step's
            time: predicted times are less exact than that.
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
