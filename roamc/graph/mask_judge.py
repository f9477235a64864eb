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
``draw_seeds`` has drawn, or as that row moved to this rank's part of the mask:

    before   r = own_part(mask 7, 2, group)           rows 10 = (this rank of group) of mask 7, a quarter of which is n
    after    o = own_seeds(seeds, n, group)
             r = counter_mask(o[0], 0.9)              rows 10, since it has 4 * n elements

Later passes are judged by :mod:`roamc.graph.value_flow` alone, for which a mask is a value
like others, and a second draw of the seeds another value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from roamc.errors import VerifyError, way_out
from roamc.graph.train_graph import TrainGraph
from roamc.graph.value_flow import compare_by
from roamc.graph.value_numbers import Key, Number
from roamc.graph.value_walk import Walk
from roamc.operators.counter import WORDS, counter_mask, draw_seeds, own_seeds
from roamc.operators.random import replay
from roamc.operators.shards import own_part

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
    compare_by(_Walk, before, after, name)


class _Walk(Walk):
    """Numbers masks by their draw; of what the seeds are, only which row of which draw."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.draw_of: dict[Key, Number] = {}
        self.seeds: set[Number] = set()
        self.moved: dict[Number, tuple[Number, int, Any]] = {}

    def _run(self, node: fx.Node) -> tuple[Number, dict[int, Number]]:
        if node.target is draw_seeds:
            number = self.numbers.of("call", "seeds", node.name, len(self.seeds))
            self.seeds.add(self.numbers.of("part", number, 0))
            return number, {}
        if node.target is own_seeds:
            return self._by_rank(node)
        if node.target is counter_mask:
            return self._by_counter(node)
        if node.target is own_part:
            return self._rows(node) or super()._run(node)
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
            self.state = self._note("after", drawn, by=node.name)
        factors = self._key(x), ("read", content, place.geometry), self._key(1.0 / keep)
        product = self.called(PRODUCT, (factors, ()))
        return number, {0: self.numbers.of("part", product, 0), 1: content}

    def _saved(self, state: fx.Node) -> Number:
        """The state of the generator that ``state`` has kept."""
        key = self.numbers.key(self._read(state)[1])
        return int(key[1]) if key[0] == "saved" else self.numbers.of("no", key)

    def _by_rank(self, node: fx.Node) -> tuple[Number, dict[int, Number]]:
        """Seeds of parts of masks: which draw of seeds they are of, and how far those of two ranks lie apart."""
        seeds, step, group = node.args
        source = self._read(seeds)  # type: ignore[arg-type]
        drawn: torch.Tensor = seeds.meta["val"]  # type: ignore[union-attr]
        if source[1] not in self.seeds or source[2] != self.numbers.in_rows(drawn.shape, torch.int64):
            raise VerifyError(f"{node.name} moves seeds that are not those that were drawn; {way_out('masks')}")
        number, results = super()._run(node)
        self.moved[self.numbers.of("part", number, 0)] = source[1], int(step), self._key(group)  # type: ignore[arg-type]
        return number, results

    def _by_counter(self, node: fx.Node) -> tuple[Number, dict[int, Number]]:
        """A mask by its seed: the first of a row stands for the next draw, the others for the same one."""
        seed, size, stride, keep = node.args
        kind, content, *place = self._read(seed)  # type: ignore[arg-type]
        content, step, group = self.moved.get(content, (content, None, None))
        lies: torch.Tensor = seed.meta["val"]  # type: ignore[union-attr]
        if content not in self.seeds or tuple(lies.shape) != (2,) or lies.stride() != (1,) or lies.storage_offset() % 2:
            raise VerifyError(f"{node.name} has a seed that is no row of what was drawn; {way_out('masks')}")
        if step is not None and step * WORDS != math.prod(size):  # type: ignore[arg-type]
            raise VerifyError(f"{node.name} has rows that do not follow those of other ranks; {way_out('masks')}")
        row = kind, content, *place
        first = row not in self.draw_of
        drawn = self.draw_of.setdefault(row, self.state)
        if first:
            self.state = self._note("after", drawn, by=node.name)
        number, content = self._mask(drawn, size, stride, keep, group)  # type: ignore[arg-type]
        return number, {0: content}

    def _rows(self, node: fx.Node) -> tuple[Number, dict[int, Number]] | None:
        """This rank's rows of a mask whose elements are read in their order; None for rows of something else."""
        kind, *read = self._read(node.args[0])  # type: ignore[arg-type]
        if kind != "read" or len(read) != 2:
            return None
        whole: torch.Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
        content, place = read
        maker = self.numbers.key(content)
        called = self.numbers.key(maker[1]) if maker[0] == "part" else ()
        if called[:2] != ("call", "mask") or len(called[2]) != 3:
            return None
        _, _, (size, stride, keep), _, drawn, _ = called
        in_order = place == self.numbers.in_rows(whole.shape, torch.bool) and whole.numel() == math.prod(size)
        if not in_order or stride != tuple(math.prod(size[at + 1 :]) for at in range(len(size))):
            return None
        own: torch.Tensor = node.meta["val"]
        number, content = self._mask(drawn, own.shape, own.stride(), keep, self._key(node.args[2]))
        return number, {0: content}

    def _mask(
        self, drawn: Number, size: Sequence[int], stride: Sequence[int], keep: float, group: Any = None
    ) -> tuple[Number, Number]:
        """The numbers of a mask's operator and of its content; of this rank's rows, if there is a ``group``."""
        lies = tuple(map(int, size)), tuple(map(int, stride))
        number = self.numbers.of("call", "mask", (*lies, keep, *([] if group is None else [group])), (), drawn, None)
        return number, self.numbers.of("part", number, 0)
