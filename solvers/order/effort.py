"""What the order solver may spend: its limits, shares and prices, in one place.

Constants that compiled loops read stand in the files of the loops: numba cannot read a field of a Python object.
"""

from dataclasses import dataclass

NO_LIMIT = 2**62
"""A limit that no amount of work reaches, in operators."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work each part of the order solver may do.

    Work is counted in operators and arcs looked at. A share is a divisor: a piece with share 4 may spend a fourth of
    the work that is left. An entry without a measured figure was not measured; it says what another value trades off.

    Attributes:
        work_limit: most work of one `solve`. A wide graph of 12,000 operators takes 13 seconds with this limit; the
            training graphs measured at the same time used less than a sixth of it.
        quick_search_work: work of the first exact search. It runs before the cuts and the either-or, which cost more
            than most searches need; a larger value closes more gaps without them and is lost where a search needs
            longer still.
        full_work_gap_share: divisor of the peak. A gap of one part in 100, or more, is worth all work that is left, a
            smaller one proportionally less, so that a peak that is nearly proved does not take as long as one that is
            far off.
        full_work_gap_bytes: a gap of fewer bytes is worth proportionally less as well, down to `quick_search_work`.
            With 0 only the share counts, so that no order depends on the unit of the sizes; who knows the unit sets it.
            With 1 MiB a step of Mamba with 329 operators and a gap of 2 kB has the same peak after a ninth of the work.
        disjunction_share: share of the either-or bound. A smaller divisor asks more operators and leaves the searches
            less.
        cuts_share: share of list scheduling from cut to cut. A smaller divisor lets more rounds run and leaves the
            searches less.
        search_share: share of the second exact search where subgraphs follow it. With 2 each gets half of what both may
            spend.
        bounded_ops: operators that the reachability bound and the min-cut bound look at, the fullest first. More
            operators may raise the bound further and take time in proportion.
        reachability_batch_ops: operators whose reachability is computed at a time, one bit each of a Python integer.
            More need more memory, fewer need more walks over the graph; the bound stays the same.
        reachability_batch_buffers: buffers whose bits are unpacked at a time: with 1,024 operators 32 MiB of numbers.
            The bound stays the same.
        min_cut_patience: operators in a row that do not raise the min-cut bound before it ends. With a larger value it
            finds more operators that do, at one cut for each operator.
        reuse_sets: sets of inputs that an operator's results could take over together. Each set costs a cut; with more
            sets than this all of their inputs form one, which gives a lower bound that is true as well.
        disjunction_ops: hottest operators of which the either-or bound asks. Each costs a cut for every operator that
            no dependency relates to it.
        largest_branch: most operators of an update branch. Larger branches hold more of the operators that make the
            gradient and move as a whole; smaller ones leave these operators where they are.
        branch_ops_per_work: operators that count as one in the work of moving a branch, which is vectorised. A smaller
            value counts the same moves as more work and moves fewer branches.
        cut_rounds: most rounds of list scheduling from cut to cut. Each round settles one operator; with more rounds
            the search goes on although the orders no longer get better.
        cut_round_price: work of a round for each operator, in addition to the arcs of the round's cut. This work stands
            for two list schedules and a narrowed problem; a smaller price lets the rounds take more time than their
            share.
        search_questions: capacities that one exact search asks about. It is no limit in practice: after the first two
            each question halves the bytes between peak and bound, which are fewer than 2**62.
        question_share: share of one capacity in the work of an exact search. A smaller divisor decides harder
            capacities; a larger one leaves more for others after one that is too hard.
        first_look_share: share of a capacity's work for a first search from the front, and the same from the back. A
            capacity that is hard from one end may be easy from the other; a smaller divisor decides more of them at
            this look and spends more at the wrong end.
        second_look_share: share of the work then left for a second search from the front; the back gets the rest. A
            smaller divisor leaves the back less.
        leaf_ops: consecutive operators of a leaf of the tree of subgraphs. Larger leaves let operators move further,
            and their searches end at the limit more often.
        subgraph_work: work of each node of that tree in the first round. A smaller value decides fewer nodes; a larger
            one leaves less for other nodes.
        subgraph_work_growth: factor of that work after a round that lowered nothing. With 8 a node may spend ten
            million after three such rounds, as much as the whole solve.
        subgraph_patience: rounds in a row that lower nothing before the subgraphs end. A smaller value ends them before
            nodes get work enough for hard parts.
        swap_sweeps: sweeps each way of the swaps that make an order of equal peak, which end earlier where a sweep
            changes nothing. With more, operators move further, at one pass over the order for each.
        relieved_parts: parts of an order that `relieve` orders anew, the widest first. Each costs two list schedules of
            the part; more parts lower the live bytes at more steps.
        drawn_orders: orders of equal peak that come from program orders drawn at random. More orders give layouts more
            to choose from and take time to make and to lay out.
        drawn_distance: operators that an operator may move in a drawn program order. A larger distance gives orders
            that differ more and whose peak is higher more often, and those are thrown away.
        equal_peak_branch_work: work of placing update branches for an order of equal peak. It is one of several
            attempts, so it gets less than in `solve`.
    """

    work_limit: int = 10_000_000
    quick_search_work: int = 250_000
    full_work_gap_share: int = 100
    full_work_gap_bytes: int = 0
    disjunction_share: int = 8
    cuts_share: int = 4
    search_share: int = 2
    bounded_ops: int = 512
    reachability_batch_ops: int = 1024
    reachability_batch_buffers: int = 4096
    min_cut_patience: int = 16
    reuse_sets: int = 8
    disjunction_ops: int = 4
    largest_branch: int = 16
    branch_ops_per_work: int = 16
    cut_rounds: int = 256
    cut_round_price: int = 8
    search_questions: int = 64
    question_share: int = 4
    first_look_share: int = 16
    second_look_share: int = 2
    leaf_ops: int = 24
    subgraph_work: int = 20_000
    subgraph_work_growth: int = 8
    subgraph_patience: int = 4
    swap_sweeps: int = 8
    relieved_parts: int = 64
    drawn_orders: int = 2
    drawn_distance: int = 64
    equal_peak_branch_work: int = 200_000


EFFORT = Effort()
"""What the solver spends unless it is told otherwise."""
