"""Which storages are worth a codec, in one place; the limits of the choice are those of :mod:`roamc.solvers.retain`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """Which storages may get a codec.

    Attributes:
        worth_share: a divisor: a storage gets a codec only if the storage is larger than all saved bytes divided by
            this number. A larger divisor makes more offers that save little.
    """

    worth_share: int = 1_000


EFFORT = Effort()
"""What pass retain spends unless it is told otherwise."""
