"""retain: choose for every saved value whether it is kept, recomputed or encoded, so that the peak keeps a budget.

    rewrite:  y = op(x), backward: g = f(y)   -->  y = op(x), backward: y' = op(x); g = f(y')            (recomputed)
                                              -->  c = encode(y), backward: y' = decode(c); g = f(y')    (encoded)
                                              -->  y = op(x), backward: g = f(y)                         (gathered once)
    checks:   the graph has every operator, storage and codec that the decision names, and every reader reads the
              storage; recomputed operators give the same bits again; encoded values fill their storage and no operator
              writes them

Without a limit nothing is recomputed or encoded, and what pass ``shard`` gathers is gathered again in backward. Under
a limit a gather of backward is a rerun of that of forward: a value may also stay whole, which takes less time.
Collectives run again where all ranks of their group run one plan.

The choice is made by :mod:`roamc.solvers.retain` on a model of the graph in bytes and seconds, for the whole graph at
once:

    problem.py      the graph as numbers
    fits.py         which values codecs can keep smaller
    offers.py       what codecs can do for it, as further columns of the same problem
    search.py       asks the solver for one peak after another, and judges its answers in a graph with their codecs
    compress.py     writes codecs into the graph; apply.py codecs and reruns, as decided
    kernels.py      lets kernels of a GPU decode: one of their own, or those that read the value
"""

from __future__ import annotations

from roamc.passes.retain.apply import apply
from roamc.passes.retain.compress import Code, compress
from roamc.passes.retain.decide import decide
from roamc.passes.retain.decision import NOTHING, Decision
from roamc.passes.retain.problem import ALLOWED, SAFE
from roamc.passes.retain.search import Choice, once

__all__ = ["ALLOWED", "NAME", "NOTHING", "SAFE", "Choice", "Code", "Decision", "apply", "compress", "decide", "once"]

NAME = "retain"
