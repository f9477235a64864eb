"""The judge of pass masks: dropouts whose masks follow from a seed drop what the captured dropouts could have dropped.

Both graphs run on numbers in the place of values, see :mod:`roamc.graph.value_flow`. A mask has the number of (the draw
that it is of, its shape and strides, the probability that an element is kept), whatever makes it:

    before   y, mask = native_dropout(x, 0.1)         mask 7 = of(draw 3, ...)    y = 8 = product of x, mask 7 and scale
             replay(state of draw 3, ...)             mask 7
    after    m  = counter_mask(seeds[0], 0.9)         mask 7, since no mask before it reads this row of the seeds
             y  = native_dropout_backward(x, m, 1.1)  8
             m1 = counter_mask(seeds[0], 0.9)         mask 7: a row that was read before gives the mask of the same draw
             m2 = counter_mask(seeds[1], 0.9)         mask 9, of draw 4

So masks of two draws never have one seed, and all that read one mask read it still. A seed counts only as a row of what
``draw_seeds`` has drawn. Later passes are judged by :mod:`roamc.graph.value_flow` alone, for which a mask is a value
like others, and a second draw of the seeds another value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from roamc.errors import VerifyError, way_out
from roamc.graph import update_judge
from roamc.graph.train_graph import TrainGraph
from roamc.graph.value_flow import Walk, compare, read
from roamc.graph.value_numbers import Key, Number, Numbers
from roamc.operators.counter import counter_mask, draw_seeds
from roamc.operators.random import replay

aten = torch.ops.aten

PRODUCT = aten.native_dropout_backward.default


def check(before: TrainGraph, after: TrainGraph, name: str) -> None:
    """Compare the graphs before and behind a pass that gives dropouts a seed.

    Args:
        before: the graph before the pass.
        after: what the pass left.
        name: of the pass.

    Raises:
        VerifyError: an operator gets another value, where masks count as those that a draw of the captured graph could
            have given; or the seed of a mask was not drawn.
    """
    numbers = Numbers()
    earlier = read(before, numbers, name, _Walk)
    later = read(after, numbers, name, _Walk)
    compare(later, earlier, name)
    update_judge.check(later.updates, earlier.updates, name)


class _Walk(Walk):
    """Numbers masks by their draw; of what the seeds are, only which row of which draw."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.draw_of: dict[Key, Number] = {}
        self.seeds: set[Number] = set()

    def _run(self, node: fx.Node) -> tuple[Number, dict[int, Number]]:
        if node.target is draw_seeds:
            number = self.numbers.of("call", "seeds", node.name, len(self.seeds))
            self.seeds.add(self.numbers.of("part", number, 0))
            return number, {}
        if node.target is counter_mask:
            return self._by_counter(node)
        again = node.target is replay and node.args[1] is aten.native_dropout.default
        if not again and node.target is not aten.native_dropout.default:
            return super()._run(node)
        x, share, train = node.args[2:] if again else (*node.args, None)[:3]
        if train is False or not isinstance(share, float) or not 0 < share < 1:
            return super()._run(node)
        return self._by_draw(node, x, 1.0 - share, node.args[0] if again else None)

    def _by_draw(self, node: fx.Node, x: Any, keep: float, state: Any) -> tuple[Number, dict[int, Number]]:
        """A dropout of the captured graph: its mask by the state of the generator, and the product."""
        drawn = self.state if state is None else self._saved(state)
        (place,) = (place for place in self.numbers.places(node) if place.position == 1)
        mask: torch.Tensor = node.meta["val"][1]
        number, content = self._mask(drawn, mask.shape, mask.stride(), keep)
        if state is None:
            self.state = self._note("after", number, by=node.name)
        factors = self._key(x), ("read", content, place.geometry), self._key(1.0 / keep)
        product = self.called(PRODUCT, (factors, ()))
        return number, {0: self.numbers.of("part", product, 0), 1: content}

    def _saved(self, state: fx.Node) -> Number:
        """The state of the generator that ``state`` has kept."""
        key = self.numbers.key(self._read(state)[1])
        return int(key[1]) if key[0] == "saved" else self.numbers.of("no", key)

    def _by_counter(self, node: fx.Node) -> tuple[Number, dict[int, Number]]:
        """A mask by its seed: the first of a row stands for the next draw, the others for the same one."""
        seed, size, stride, keep = node.args
        row = self._read(seed)  # type: ignore[arg-type]
        lies: torch.Tensor = seed.meta["val"]  # type: ignore[union-attr]
        if row[1] not in self.seeds or tuple(lies.shape) != (2,) or lies.stride() != (1,) or lies.storage_offset() % 2:
            raise VerifyError(f"{node.name} has a seed that is no row of what was drawn; {way_out('masks')}")
        first = row not in self.draw_of
        number, content = self._mask(self.draw_of.setdefault(row, self.state), size, stride, keep)  # type: ignore[arg-type]
        if first:
            self.state = self._note("after", number, by=node.name)
        return number, {0: content}

    def _mask(self, drawn: Number, size: Sequence[int], stride: Sequence[int], keep: float) -> tuple[Number, Number]:
        """The numbers of a mask's operator and of its content."""
        number = self.numbers.of("call", "mask", tuple(map(int, size)), tuple(map(int, stride)), drawn, keep)
        return number, self.numbers.of("part", number, 0)
