"""What the choice of a layout may try, and the prices by which it compares layouts, in one place."""

from dataclasses import dataclass, field

from roamc.solvers.layout.effort import TrimEffort
from roamc.units import Bytes


@dataclass(frozen=True, slots=True)
class Effort:
    """How many placements pass layout tries, what a lower peak may cost, and which graphs count as small.

    A price is the number of bytes that one step may spend for each byte of a lower peak. An entry without a measured
    figure was not measured; it says what another value trades off.

    Attributes:
        small_graph: a graph of which eager holds fewer bytes is compared with eager at every operator, not by its peak
            alone: its arena is too small to be trimmed.
        allocator_steps: each entry is a trial that leaves results without an ``out=`` form with the allocator, if they
            live at most this many steps.
        allocator_shares: for each entry, and each of ``allocator_steps``, a trial takes only results of at least this
            share of the largest one.
        moves: storages that are moved between arena and allocator at most, one after the other.
        candidates: for each move, the largest storages on each side that are tried. More take longer.
        crowded_share: a step is crowded if it has more than this share of the bytes of the fullest one; a move that
            leaves the peak must lower the number of crowded steps.
        layouts: of the cheapest placements, and of those within the budget, at most this many are laid out, in addition
            to three others: the best one without trims, the one with the lowest peak, and the one without an arena.
        allocator_price: bytes that pass through the allocator: fresh memory costs time. AlexNet, batch 1, Adam: 2.6 %
            less peak with no arena at all, for steps 1.4 times as long.
        budget_price: the same under a budget, where a peak below it is worth less. LLaMA at the lowest peak for 1 % of
            time: logits of 67 MB with the allocator saved 1 MB and took 3 % of the step.
        allocator_call: bytes of peak that having any result with the allocator costs, and having no arena once more:
            calls of the allocator take time, however few bytes they ask for.
        trim_price: bytes that are trimmed and then used again, in large pages: 0.03 ms a MB.
        small_trim_price: the same in small pages, which cost what fresh memory from the allocator costs: 0.37 ms a MB.
        trim_share: a divisor: having any trims costs the peak divided by this number, because a few trims take a
            hundredth of a small step's time.
        higher_share: a divisor: a peak counts as higher than that of the best placement without trims if it is above
            that peak by more than the peak divided by this number, and by more than ``allocator_call``.
        trim: what the search for trims may try.
    """

    small_graph: Bytes = 8 << 20
    allocator_steps: tuple[int, ...] = (0, 1, 2, 4, 16, 64, 1 << 60)
    allocator_shares: tuple[float, ...] = (0.0, 1 / 64, 1 / 8, 1 / 2)
    moves: int = 512
    candidates: int = 12
    crowded_share: float = 0.995
    layouts: int = 4
    allocator_price: int = 32
    budget_price: int = 8
    allocator_call: Bytes = 64 << 10
    trim_price: int = 256
    small_trim_price: int = 32
    trim_share: int = 64
    higher_share: int = 256
    trim: TrimEffort = field(default_factory=TrimEffort)


EFFORT = Effort()
"""What pass layout tries unless it is told otherwise."""
