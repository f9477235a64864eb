"""What the search for a plan may spend, and which differences it ignores, in one place."""

from dataclasses import dataclass

from roamc.units import Bytes


@dataclass(frozen=True, slots=True)
class Effort:
    """How many plans and orders the planner may try, and how close is close enough.

    A share is a fraction of what it is compared with. Where an entry names no measurement none is recorded; it then
    says what another value trades off.

    Attributes:
        budget_rounds: times that pass retain is asked in the search for one budget. Each asks for one more plan; a
            smaller value leaves budgets less well used.
        close_share: a plan that fits ends the search if the next target would be higher by at most this fraction of the
            budget. A smaller value makes more plans for less added time.
        default_from: a step of which eager holds fewer bytes is not planned for a share of time unless it is asked for.
            Nobody lacks these bytes, and planning takes two to four times as long: 1.4 seconds for 0.3 of an MLP.
        time_rounds: maximum number of questions to pass retain for the lowest peak within a share of time.
        first_share: where the first of them asks, as a share of the way from the peak without reruns down to the bound.
            Answers for eight models came to 0.87 to 0.99 of that way.
        left_share: they end when at most this share of the peak without reruns is left between a peak that adds too
            much and one that does not. A smaller value asks more often for fewer bytes.
        descents: plans that the search for that of ``"min"`` asks for beside those for the fewest live bytes, for each
            order in which it looks for reruns.
        descent_share: each of these plans is to need less than the lowest plan so far by this fraction of it. A larger
            value is refused sooner, above the lowest plan that there is.
        nearly_factor: a quick search for a budget makes the plan of ``"min"`` only if it has a plan that needs at most
            this multiple of the budget; else it refuses the budget at once.
        alignment_share: pass retain is asked for less than the budget by this fraction, as a divisor, because tensors
            are rounded up to the alignment. Plans of ``"min"`` that differ by no more count as equally low.
        padding_share: a peak counts as optimal up to this fraction above the bound of live bytes: sizes are rounded up
            to the alignment. No other order is laid out for less, nor is a long layout search made: Mamba's, of a
            million nodes for 512 of 3.8 million bytes, took 4.3 seconds and found nothing.
        first_nodes: node limit of the layout search of the first order, where other orders can be tried afterwards. If
            that layout falls short, another order may do better than a long search.
        trial_nodes: node limit of the layout search of each other order.
        trial_orders: other orders that are laid out. Each more costs a layout.
    """

    budget_rounds: int = 6
    close_share: float = 0.01
    default_from: Bytes = 8 << 20
    time_rounds: int = 12
    first_share: float = 0.875
    left_share: float = 1 / 256
    descents: int = 8
    descent_share: float = 0.005
    nearly_factor: float = 1.1
    alignment_share: int = 1000
    padding_share: float = 0.001
    first_nodes: int = 40_000
    trial_nodes: int = 5_000
    trial_orders: int = 12

    def aligned(self, budget: Bytes) -> Bytes:
        """Return the part of ``budget`` that is set aside for alignment, in bytes."""
        return budget // self.alignment_share


EFFORT = Effort()
"""What the planner spends unless it is told otherwise."""
