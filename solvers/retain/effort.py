"""How much the searches try, and what they take for promising: the numbers that trade time for better answers.

`solve` hands them to every search, so a caller can leave one trick out:

    solve(problem, budget, effort=dataclasses.replace(EFFORT, anneal_rounds=0))

Work is counted in operators that simulations run, about twenty nanoseconds each, and in arcs of networks. Constants of
compiled loops stand in the files of the loops, `anneal.py`, `search.py` and `ways.py`: numba compiles them in, keeps
the result on disk, and compiles again only when the loop's own file changes.
"""

from dataclasses import dataclass

CLOSE = 1e-9
"""Seconds that differ by less than this share of themselves count as equal.

Rounding errors are smaller: doubles hold 16 digits, and the bound's cuts round capacities to 2^-50 of their sum. A
smaller gain is worth no further search.
"""

FEWER = 1 - CLOSE
"""Seconds count as fewer than other seconds if they are less than this share of the others."""

INSTANT = 1e-12
"""Seconds, far fewer than any operator takes: added to a divisor or a limit, they keep it above zero."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of work, and thresholds, of all searches for reruns.

    The text below each field says what the field limits. It also names the measurement that decided on the value; where
    none was made, it says what a larger or a smaller value changes.
    """

    # One call as a whole: portfolio.py.

    simulations: int = 12_000
    """The default work limit, in simulations of the whole schedule: a quarter of a second for 1,000 operators."""

    cut_starts: int = 6
    """The number of the bound's cuts, at most, that greedy drops begin with; 0 leaves these starts out.

    More cuts find better sets of buffers to keep, fewer leave more work for the neighbourhoods.
    """

    rival_divisor: int = 8
    """Where fewer seconds are to be beaten, this share of the work goes into improving first.

    They are those of another set of offers, or the most that is allowed. The rest of the work is done only if they are
    beaten. With 1, gpt2 at half of its peak took 13 instead of 7 seconds, for the same plan.
    """

    rival_work: int = 3_000_000
    """At least this work goes into improving, whatever is to be beaten; about 0.06 seconds.

    Without it, sets of offers of small steps are missed that add less than half.
    """

    large_work: int = 40_000_000
    """A search with a higher work limit, which begins with a known solution and is to find no more than enough seconds,
    ends where that solution, improved, still adds more.

    Of four such questions about GPT-2 XL, the other ways took 2 seconds each and found nothing. For MobileNet, whose
    searches are short, they save 2 % of the bytes.
    """

    anneal_rounds: int = 6
    """The number of rounds of annealing, at most, each with a seed of its own; 0 leaves annealing out.

    Every round adds its work to the call's limit: more rounds may find fewer seconds, and take longer.
    """

    anneal_vain_rounds: int = 2
    """Annealing ends after this number of rounds in a row without fewer seconds.

    With 1, one unlucky seed ends it. With more, calls that annealing cannot help take longer.
    """

    anneal_work: int = 2_000_000
    """A round of annealing takes this work at most, about 0.04 seconds, times the share that the bound leaves open.

    A longer round cools more slowly, which may find fewer seconds, and takes longer where it finds none.
    """

    anneal_times: int = 4
    """A round of annealing takes the work limit of the call times this at most.

    A larger factor helps calls with small limits, and makes them wait longer than they asked for.
    """

    # Small problems: exact.py.

    exact_gaps: int = 14
    """All combinations are tried where the problem has this number of gaps to decide at most; 0 leaves that out.

    14 gaps have 3^14, nearly five million combinations, and `exact_work` refuses most problems well below. This limit
    refuses large problems without listing their choices.
    """

    exact_work: int = 20_000_000
    """All combinations are tried where that takes less work than this, about 0.4 seconds, and less than is left.

    A larger limit proves more answers optimal, and makes problems of this size wait for it.
    """

    # The bound: bound.py.

    bound_operators: int = 3
    """The bound makes minimum cuts at this number of operators, unless told otherwise.

    The highest of their bounds counts, and their cuts are starts. More operators raise the bound and add starts; each
    takes up to `bound_cuts` cuts and one more for a budget.
    """

    bound_candidates: int = 64
    """The bound chooses its operators among this number, by the bytes that surely live while each runs.

    Those bytes are computed on sets of candidates, one bit each, so 64 fill a machine word. Fewer candidates may miss
    the operator with the highest bound.
    """

    bound_spacing: int = 8
    """With all operators sorted by live bytes, one in this number is a candidate.

    Those next to each other in the row are often neighbours in the order, with much the same bound. A larger spacing
    takes in operators at which fewer bytes live.
    """

    bound_cuts: int = 12
    """The bound makes this number of cuts at most, for one operator and one budget, after the one with fewest bytes.

    A handful usually finds the best rate. Fewer may leave the bound lower, but never wrong.
    """

    # The way down to the lowest peak: descent.py.

    descent_steps: tuple[float, ...] = (0.6, 0.8, 0.9, 0.97)
    """There is one descent for each, in stages that aim at this share of the peak before the stage.

    Large steps (0.6) drop nothing for targets in between, which the lowest peak may not need dropped. Small steps
    (0.97) go on where a large one gets stuck.
    """

    # Greedy drops: greedy.py and drops.py.

    refresh_drops: int = 8
    """After this number of drops the guesses of what drops are worth are raised, or later by `refresh_divisor`.

    Every drop changes what other drops are worth. More frequent raises correct the guesses sooner, by more simulations.
    """

    refresh_divisor: int = 8
    """Guesses are raised no sooner than after the number of possible drops divided by this.

    Each raise has many drops measured again, which takes long where many are possible.
    """

    stuck_target: float = 0.98
    """Where drops get stuck above the budget, they aim at this share of the peak instead.

    Area counts from there, so drops that lower only the highest steps show. A share closer to 1 shows more of them, and
    takes more targets on the way down.
    """

    stuck_targets: int = 3
    """Drops end after this number of `stuck_target` attempts in a row that leave the peak as high; 0 makes none.

    Drops for a target that was not reached stay, and may let the next attempt succeed. More attempts meet more budgets,
    and take longer where no budget can be met.
    """

    near_best: float = 0.97
    """The best measured drop is made if it is worth this share of the best guess; otherwise that guess is measured.

    At 1, each drop would measure a whole family of like gaps that seem hardly better. It was 0.9 until it was raised
    together with `hope`.
    """

    hope: float = 4.0
    """A gap that was not measured is guessed to be worth this multiple of the first measured gap of its family.

    A raise multiplies all guesses by this number too. With 1 the first gap decided for its whole family, and BERT took
    7 % more added seconds. A larger multiple measures more gaps.
    """

    keep_rounds: int = 3
    """Needless drops are undone in this number of rounds at most; 0 undoes none.

    Each round tries to undo every drop, because another drop that was undone may have made room. A round that saves
    nothing is the last in any case.
    """

    # Neighbourhoods of the best: neighbours.py.

    vain_changes: int = 100
    """The search of neighbourhoods ends after this number of changes in a row without a better state; 0 leaves it out.

    Changes are drawn from four kinds, so each kind has some 25 tries. More find rarer gains, by more work.
    """

    change_divisor: int = 8
    """After one change, drops may take the work that is left, divided by this.

    A smaller divisor lets one hopeless change take most of the work.
    """

    change_target: float = 0.99
    """While the best is above the budget, a change must lower the peak to this share.

    Closer to 1 smaller gains count, and the way down takes more of them.
    """

    promising: float = 1.5
    """A changed state has its needless drops undone if it takes fewer than this multiple of the best's seconds.

    That takes a simulation for each drop, and above 1.5 it would have to save a third of the seconds. A larger multiple
    misses less.
    """

    # What every search needs: search.py and starts.py.

    room_runs: int = 6
    """A simulation has room for this number of runs for each operator, originals included.

    A longer schedule counts as impossible. More room takes memory, and time for schedules with very many reruns.
    """

    room_spare: int = 64
    """A simulation has room for this number of runs in addition to `room_runs` for each operator.

    In a small problem an operator may then run again more often.
    """

    start_repairs: int = 1000
    """A start keeps this number of buffers at most because it needs them and cannot make them again.

    Each takes a simulation, up to where the buffer is missing. A start that needs more is given up.
    """

    # Annealing: anneal.py, which also has the chances of each kind of move.

    anneal_hot: float = 0.3
    """The first temperature, in mean seconds of the operators that take any.

    A hotter search leaves the good state that it begins with; a colder one cannot get out of it.
    """

    anneal_cold: float = 0.03
    """The last temperature, as a share of the first.

    A move that adds a hundredth of an operator is then refused two times in three. Colder, more of the work goes into
    the last small gains.
    """

    area_price: float = 3.0
    """The first price of area above the budget: this multiple of the seconds at first, for all area without reruns.

    Above 1, giving up all reruns does not pay. The price then follows the search, so this matters for the first moves.
    """

    move_changes: int = 48
    """One move of annealing may change about this number of decisions: on one or two gaps, and on what reruns read.

    The trail to go back on is this long. A move that has filled it changes nothing more.
    """

    # The order to begin with: reference.py.

    late_gain: float = 0.001
    """Operators that read nothing are put off if that saves at least this share of the live bytes.

    Live bytes are summed over the steps of operators that read something. With a smaller gain the order stays, because
    another order changes what the searches find without being better.
    """

    # Which offers to take: choice.py.

    generous_factor: float = 2.0
    """The second set takes every offer that costs, per saved byte, less than this many times the price of a byte.

    The price is an estimate, so offers somewhat above it may pay.
    """

    near_share: float = 0.02
    """Where a budget differs from the last one by at most this share, two sets are tried: the one that won, and none.

    A larger share tries fewer sets.
    """

    descents: int = 6
    """The search for the lowest peak asks at most this number of times for a peak below the lowest so far."""

    lower_share: float = 0.02
    """The first time, that search asks for a peak lower by this share; each further time doubles it."""

    little_share: float = 0.001
    """The search for the lowest peak ends when a question lowers the peak by no more than this share."""

    enough_share: float = 0.002
    """An answer is good enough if its seconds exceed the bound by at most this share of the seconds of the schedule.

    Predicted seconds are less exact than that.
    """


EFFORT = Effort()
"""The effort of a call that names no other."""
