"""The judge of pass project: projected gradients are products of the same matrices, in another order.

Both graphs run on numbers in the place of values, see :mod:`roamc.graph.value_flow`. A product of several matrices, the
last of which is a projection, has one number, whichever two are multiplied first:

    before   w = mm(a, x)    7                             after   z = mm(x, p)    9 = product of x, p
             g = mm(w, p)    8 = product of a, x, p                g = mm(a, z)    8

The factors count with their places in memory: a transposed one is another. Everything else has the number that it has
for other passes, so that ``w`` may go and ``z`` may come, and nothing may read another value. Later passes are judged
by :mod:`roamc.graph.value_flow` alone.
"""

from __future__ import annotations

import torch
from torch import fx

from roamc.graph.train_graph import TrainGraph
from roamc.graph.value_flow import compare_by
from roamc.graph.value_numbers import Key, Number
from roamc.graph.value_walk import Walk
from roamc.operators.projection import projection

MM = torch.ops.aten.mm.default

PRODUCT = "product with a projection"


def check(before: TrainGraph, after: TrainGraph, name: str) -> None:
    """Compare the graphs before and behind a pass that multiplies by projections in another order.

    Args:
        before: the graph before the pass.
        after: what the pass left.
        name: of the pass.

    Raises:
        VerifyError: an operator, an output or a tensor of the caller gets another value than such a product.
    """
    compare_by(_Walk, before, after, name)


class _Walk(Walk):
    """Numbers products of matrices, the last of which is a projection, by their factors."""

    def _run(self, node: fx.Node) -> tuple[Number, dict[int, Number]]:
        if node.target is not MM:
            return super()._run(node)
        factors = [factor for side in self.keys(MM, node.args, {})[0] for factor in self._factors(side)]
        if self._call_of(factors[-1])[:1] != (self.numbers.target(projection).number,):
            return super()._run(node)
        return self.numbers.of("call", PRODUCT, *factors), {}

    def _factors(self, matrix: Key) -> list[Key]:
        """The matrices that ``matrix`` is the product of, as it was made; itself if it is none."""
        target, *parts = self._call_of(matrix) or (None,)
        if target == PRODUCT:
            return parts
        if target == self.numbers.target(MM).number:
            return [factor for side in parts[0] for factor in self._factors(side)]
        return [matrix]

    def _call_of(self, matrix: Key) -> Key:
        """The target and what else is numbered of the call whose result ``matrix`` is, as it was made; else empty."""
        kind, *lies = matrix
        if kind != "read" or len(lies) != 2 or self.numbers.elements(*lies) != lies[0]:
            return ()
        part = self.numbers.key(lies[0])
        called = self.numbers.key(part[1]) if part[0] == "part" else ()
        return called[1:] if called[:1] == ("call",) else ()
