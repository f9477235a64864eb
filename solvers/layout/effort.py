"""What the layout solver may spend: its limits, shares and prices, in one place.

Constants that compiled loops read stand in the files of the loops: numba cannot read a field of a Python object.
"""

from dataclasses import dataclass

LARGE_PAGE = 2 << 20
"""Bytes of a large page of the system."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work each part of the layout solver may do.

    A node is one storage placed by a search. A capacity is an arena size, in bytes, within which a search looks for a
    layout; the target is the lowest of them. A share is a divisor: a capacity with share 8 may spend an eighth of the
    nodes that are left. An entry without a measured figure was not measured; it says what another value trades off.

    Attributes:
        node_limit: most nodes of one `solve`. A search that finds nothing, which is rare, takes seconds to this limit.
        improved_layouts: number of layouts that are improved, the lowest first. On a training step of GPT2-XL the best
            heuristic stays half a percent above the bound, and another one is improved down to the bound; each further
            layout costs its rounds.
        improve_rounds: most rounds of first fit for each improved layout. More rounds lower a few layouts further and
            take longer on all that stay above the bound.
        improve_patience: rounds in a row that bring no lower arena before a layout is given up. A smaller value ends
            layouts that get lower after a pause.
        improve_turn: rounds that a layout gets in its turn. Some layouts get lower in the first few, others never. An
            instance of 28,526 storages ends 0.25 % above the bound in 5.5 seconds with turns, and ended 1.67 % above it
            in 10 without.
        improve_pairs: pairs of storages that live together that all rounds of all layouts may compare, about. Large
            problems get fewer rounds, so that improvement ends in seconds; each layout may make at least one.
        first_search_nodes: nodes of the first search where seconds are limited. Each capacity between bound and best
            gets its share of the nodes; a smaller search has tried all capacities sooner, a larger one decides more.
        search_growth: factor from the nodes of one search to those of the next where seconds are limited. A smaller
            value repeats more of what was searched.
        target_share: share of the target itself in the nodes that are left. It is asked first; a smaller divisor leaves
            less for the capacities above it.
        capacity_share: share of every other capacity. A smaller divisor decides harder capacities and asks fewer.
        restart_nodes: nodes of a search with a drawn order, for each storage that there is. Some orders end at once and
            most never, so many short searches find more than few long ones; below 1 none could place all storages.
        cp_sat_storages: storages with bytes of the largest problem that CP-SAT gets. No proof was seen in reasonable
            time above.
        cp_sat_unit_nodes: nodes that take about as long as one unit of CP-SAT's deterministic time. With more CP-SAT
            stops earlier at the same limit on nodes.
        slice_births: parts of storages that are born in each slice of time of first fit; problems with less than twice
            as many have no slices. Short slices let short lives walk over less and keep long lives in more slices. The
            layout stays the same. The heuristics in `ALGORITHMS` always take the default.
    """

    node_limit: int = 1_000_000
    improved_layouts: int = 8
    improve_rounds: int = 40
    improve_patience: int = 12
    improve_turn: int = 4
    improve_pairs: int = 4_000_000_000
    first_search_nodes: int = 100_000
    search_growth: int = 4
    target_share: int = 4
    capacity_share: int = 8
    restart_nodes: int = 3
    cp_sat_storages: int = 64
    cp_sat_unit_nodes: int = 20_000
    slice_births: int = 256


@dataclass(frozen=True, slots=True)
class TrimEffort:
    """What the search for trims in :mod:`roamc.solvers.layout.trim` may try.

    Attributes:
        least_bytes: a smaller arena is not trimmed.
        pieces: sizes in bytes of the pieces that the arena is cut into, the larger first; a piece is trimmed as a
            whole. Each size is tried. Per byte, the system brings a large page back in a tenth of the time that small
            pages take.
        most_pieces: most pieces of an arena. An arena that would have more is cut into pieces of a multiple of the
            size. More pieces find smaller idle ranges and take longer.
        shares: shares, 0 to 1, of the most bytes that trims can save; for each, the peak that is tried is the lowest
            that trims can reach, plus this share.
    """

    least_bytes: int = 8 << 20
    pieces: tuple[int, ...] = (LARGE_PAGE, LARGE_PAGE // 8)
    most_pieces: int = 1024
    shares: tuple[float, ...] = (0.5, 0.25, 0.1, 0.05, 0.02, 0.0)


EFFORT = Effort()
"""What the solver spends unless it is told otherwise."""
