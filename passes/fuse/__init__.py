"""fuse: operators that run as one over blocks of rows, so that the values between them have no storage.

    rewrite:  t = op1(x, y); r = op2(t, z)  -->  r = fused(x, y, z)
                                            -->  t, r = fused(x, y, z)      (on a GPU, if t is read elsewhere)
              mul_(m, b); add_(m, g); add_(p, m)
                                            -->  fused(m, b, g, p)          (an update: it writes m and p)
              v = op(x), backward: r = f(v, g)   -->  v = op(x), backward: r = fused(x, g)
              fused(m, b, g, p); fused(n, c, h, q)   -->  fused(m, b, g, p, n, c, h, q)     (on a GPU: one launch)
    checks:   every operator that the decision names treats rows apart and has one dense result; all of a group are of
              one phase and see the same rows and columns; nothing outside a group reads a value inside; blocks have the
              bits of the whole with as many threads as the plan is made for; what operators in place write is a whole
              storage, which the group reads element by element, and nobody else touches where order would matter; what
              runs once more inside a group draws and writes nothing, and stands in front of its readers

A group ends with one operator and has operators before it that lead there; of pointwise operators on a GPU, under
``numerics="fast"``, also some that only read the same. On a CPU only the last result is read outside the group; on a
GPU others may be, and are written as well. A group is made where it saves a pass over memory
and where, in the present order, no step holds more bytes. The backward of cross-entropy gains most: the gradient of the
log-probabilities, a number for every token and word, never exists. Operators in place join in an optimizer's update
alone; see :mod:`roamc.operators.in_place`.

    decision.py     what is decided
    choose.py       which operators are one group
    inline.py       what groups of backward make once more, so that forward need not store it; ledger.py: live bytes
    launches.py     which updates share a launch of a GPU; multi_tensor.py: how they are written into the graph
    estimates.py    what groups take
    write.py        which nodes fit a group, and how it is written into the graph; copies.py: what runs once more
"""

from __future__ import annotations

from roamc.passes.fuse.choose import Effort, decide
from roamc.passes.fuse.decision import Decision
from roamc.passes.fuse.write import apply

__all__ = ["NAME", "Decision", "Effort", "apply", "decide"]

NAME = "fuse"
