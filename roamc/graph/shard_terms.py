"""Terms for :mod:`roamc.graph.shard_judge`: numbers for how the elements of tensors come about, equal for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

aten = torch.ops.aten


@dataclass(frozen=True, order=True)
class Term:
    """A number that stands for the elements of a tensor in row-major order, whatever its shape."""

    number: int


PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.linear.default})
"""Operators that multiply a value with a parameter."""

TRANSPOSED = frozenset({aten.t.default, aten.transpose.int, aten.permute.default})

GIVE_ALL = ("roamc_collective.all_gather_into_tensor", "roamc_collective.broadcast")
"""How the names of collectives begin whose result all ranks have, besides sums."""


class Terms:
    """Numbers terms from 0: equal keys give the same term, so that equal terms mean equal elements."""

    def __init__(self) -> None:
        self._number: dict[tuple[object, ...], Term] = {}
        self._key: list[tuple[object, ...]] = []

    def of(self, *key: object) -> Term:
        """Return the term for ``key``, which says how elements are made: words, literals, terms, tuples of them."""
        if key not in self._number:
            self._number[key] = Term(len(self._key))
            self._key.append(key)
        return self._number[key]

    def key(self, term: Term) -> tuple[object, ...]:
        """Return the key that ``term`` was made of by :meth:`of`."""
        return self._key[term.number]

    def addends(self, term: Term) -> tuple[Term, ...]:
        """Return the terms whose sum ``term`` is; itself if it is no sum."""
        kind, *parts = self.key(term)
        return tuple(part for part in parts if isinstance(part, Term)) if kind == "sum" else (term,)

    def total(self, parts: Sequence[Term]) -> Term:
        """Return the term of the sum of ``parts``; it is the same in whatever order they are added."""
        every = sorted(addend for part in parts for addend in self.addends(part))
        return every[0] if len(every) == 1 else self.of("sum", *every)

    def expanded(self, term: Term, shape: Sequence[int], full: Sequence[int]) -> Term:
        """Return the term of a tensor with term ``term`` and shape ``shape``, broadcast to the shape ``full``."""
        padded = [1] * (len(full) - len(shape)) + list(shape)
        repeated = [at for at, (own, size) in enumerate(zip(padded, full, strict=True)) if own != size]
        if not repeated:
            return term
        sizes = merged(full, repeated)
        kind, *parts = self.key(term)
        inner = _composed(parts[1], sizes) if kind == "expanded" else None  # type: ignore[arg-type]
        return self.of("expanded", term, sizes) if inner is None else self.of("expanded", parts[0], inner)

    def shared(
        self, group: object, summed: tuple[Term, ...], gradients: tuple[tuple[Term, Term], ...]
    ) -> Callable[[Term], bool]:
        """Return a function that says whether all ranks of ``group`` have the same elements of a term.

        A parameter in a product that is summed over the ranks differs from rank to rank, and so does one whose gradient
        differs; so does what is computed of them, up to a sum over the ranks, a gather or a broadcast.

        Args:
            group: the group's name.
            summed: terms of all sums over ranks.
            gradients: pairs of an input and its gradient.
        """
        return _Shared(self, group, summed, gradients).holds


class _Shared:
    """Which terms are the same on all ranks of a group."""

    def __init__(
        self, terms: Terms, group: object, summed: Sequence[Term], gradients: Sequence[tuple[Term, Term]]
    ) -> None:
        self.terms, self.group = terms, group
        self.parts: set[Term] = set()
        for each in summed:
            _, _, of, piece = terms.key(each)
            if of == group and isinstance(piece, Term):
                self._find_parts(piece)
        self.differs: list[bool] = []
        while True:
            self.differs = []
            more = {term for term, gradient in gradients if not self.holds(gradient)} - self.parts
            if not more:
                break
            self.parts |= more

    def holds(self, term: Term) -> bool:
        """Whether all ranks have the same elements of ``term``."""
        for number in range(len(self.differs), term.number + 1):
            self.differs.append(self._differs(Term(number)))
        return not self.differs[term.number]

    def _differs(self, term: Term) -> bool:
        key = self.terms.key(term)
        if is_same(key, self.group):
            return False
        if key[0] == "operator" and str(key[1]) == "roamc.own_part.default" and _talks_to(key, self.group):
            return True
        return term in self.parts or any(self.differs[part.number] for part in terms_of(key))

    def _find_parts(self, summed: Term) -> None:
        """Inputs that are factors of products of which ``summed`` is made element by element."""
        waiting, seen = [summed], {summed}
        while waiting:
            key = self.terms.key(waiting.pop())
            if key[0] == "operator" and key[1] in PRODUCTS:
                self.parts |= {factor for factor in map(self._input, _factors(key)) if factor is not None}
            elif key[0] == "embedding" and isinstance(key[1], Term):
                factor = self._input(key[1])
                self.parts |= {factor} if factor is not None else set()
            elif key[0] in ("sum", "expanded", "elements"):
                fresh = [part for part in terms_of(key) if part not in seen]
                seen.update(fresh)
                waiting += fresh

    def _input(self, factor: Term) -> Term | None:
        """The input that ``factor`` is a transposed view, a cast or a part of; None for what is computed otherwise."""
        key = self.terms.key(factor)
        while key[0] != "input":
            inner = list(terms_of(key))
            cast = key[0] == "elements" and key[1] is aten._to_copy.default
            if len(inner) != 1 or not (cast or (key[0] == "operator" and key[1] in TRANSPOSED)):
                return None
            factor, key = inner[0], self.terms.key(inner[0])
        return factor


def _factors(key: tuple[object, ...]) -> list[Term]:
    """The last two operands of a product."""
    operands = [list(terms_of((part,))) for part in key[2:]]
    return [terms[0] for terms in operands if terms][-2:]


def is_same(key: Sequence[object], group: object) -> bool:
    """Return whether a term with this ``key`` is what a collective gives all ranks of ``group``."""
    if key[0] in ("all_reduce", "classes"):
        return key[2] == group
    return key[0] == "operator" and str(key[1]).startswith(GIVE_ALL) and _talks_to(key, group)


def _talks_to(key: Sequence[object], group: object) -> bool:
    """Whether the third argument is this group. Torch names groups "0", "1", ...: other arguments may read the same."""
    return tuple(key[4:5]) == ((type(group).__name__, str(group)),)


def terms_of(key: Sequence[object]) -> Iterator[Term]:
    """Yield the terms in the ``key`` of a term, those in tuples within it included."""
    for part in key:
        if isinstance(part, Term):
            yield part
        elif isinstance(part, tuple):
            yield from terms_of(part)


Sizes = tuple[tuple[int, bool], ...]
"""Sizes of a tensor that was broadcast, each with whether the elements are repeated along it; see :func:`merged`."""


def _composed(inner: Sizes, outer: Sizes) -> Sizes | None:
    """Return the sizes of what is broadcast by ``inner`` and then by ``outer``; None where these cut it differently."""
    if not all(size for size, _ in (*inner, *outer)):
        return None
    left = list(inner)
    pairs: list[tuple[int, bool]] = []
    for size, repeats in outer:
        if repeats:
            pairs.append((size, True))
            continue
        while size > 1:
            own, mark = left.pop(0)
            step = min(size, own)
            if size % step or own % step:
                return None
            pairs.append((step, mark))
            size //= step
            left[:0] = [(own // step, mark)] if own > step else []
    return merged([size for size, _ in pairs], [at for at, (_, repeats) in enumerate(pairs) if repeats])


def merged(shape: Sequence[int], marked: Sequence[int]) -> Sizes:
    """Return pairs (size, whether its dimension is marked) for ``shape``, with equally marked neighbours multiplied.

    Sizes of 1 are left out, so that the result is the same for tensors with the same elements in the same order.

    Args:
        shape: sizes of a tensor.
        marked: the dimensions that are marked, such as those along which elements are repeated.
    """
    pairs: list[tuple[int, bool]] = []
    for at, size in enumerate(shape):
        if size == 1:
            continue
        mark = at in marked
        if pairs and pairs[-1][1] == mark:
            pairs[-1] = (pairs[-1][0] * size, mark)
        else:
            pairs.append((size, mark))
    return tuple(pairs)
