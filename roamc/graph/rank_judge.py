"""What else a graph on shards says, for :mod:`roamc.graph.shard_judge`: what ranks compare, what updates wait for.

A rank's rows stand for a value that all ranks must have. The judge notes each of them while it walks, as a term, and
follows the term down to inputs, tensors of the graph and random numbers. These must be among what the ranks compare
before the first step, see :class:`roamc.graph.Agreement`:

    own_part(x + b), norm(T, w)      x, b and w are asked for
    x = all_reduce(mm(y, w))         nothing below a sum, gather or broadcast of the group is: its ranks have that alike

This module shares no code with :mod:`roamc.passes.shard.agree`, which says what they compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from roamc.graph.shard_terms import Term, is_same, terms_of
from roamc.graph.storage_ids import ids_of
from roamc.graph.train_graph import placeholders
from roamc.operators import ops

if TYPE_CHECKING:
    from roamc.graph.shard_judge import Walk


WHY = "which all of them must have the same"


def check_agreements(walk: Walk) -> None:
    """Check that the ranks compare all that they must have the same of.

    Args:
        walk: the walk over the sharded graph, which has run.

    Raises:
        VerifyError: names what the ranks of a group do not compare.
    """
    compared = {agreement.group: agreement for agreement in walk.graph.agreements}
    attributes = {node.name: str(node.target) for node in walk.graph.graph.nodes if node.op == "get_attr"}
    for group, terms in walk.asked.items():
        agreement = compared.get(group)
        draws, inputs, attached = (agreement.draws, agreement.inputs, agreement.held) if agreement else ((), (), ())
        for kind, leaf in _met(walk, group, terms):
            if kind == "draw" and leaf not in draws:
                phase, device = leaf
                walk.lost(f"the ranks of {group!r} do not compare random numbers of {phase.name} on {device}, {WHY}")
            if kind == "input" and leaf not in inputs and attributes.get(leaf) not in attached:
                walk.lost(f"the ranks of {group!r} do not compare {leaf}, {WHY}")


def _met(walk: Walk, group: object, terms: set[Term]) -> Iterator[tuple[str, Any]]:
    """Inputs, tensors of the graph and draws that ``terms`` are made of, up to what all ranks get from the group."""
    waiting, seen = sorted(terms), set(terms)
    while waiting:
        term = waiting.pop()
        if term in walk.common.get(group, ()):
            continue
        key = walk.terms.key(term)
        if key[0] == "input":
            yield "input", key[1]
        for drawn in walk.drawn.get(term, ()):
            yield "draw", drawn
        fresh = [part for part in terms_of(_read(key)) if part not in seen] if not is_same(key, group) else []
        seen.update(fresh)
        waiting += fresh


def _read(key: tuple[object, ...]) -> tuple[object, ...]:
    """The parts of a term's key without arguments of which only the shape is read."""
    if key[0] not in ("elements", "operator"):
        return key
    shapes = ops.rule(key[1]).shape_of
    return tuple(part for at, part in enumerate(key[2:]) if at not in shapes)


def check_waits(walk: Walk) -> None:
    """Check that updates wait for the gradients that they wait for in the captured graph.

    Args:
        walk: the walk over the sharded graph, which has run as the one over the captured graph has.

    Raises:
        VerifyError: names what is updated without its gradient.
    """
    assert walk.captured is not None
    mine, theirs = _waits(walk), _waits(walk.captured)
    for name in {**theirs, **mine}:
        if mine.get(name) != theirs.get(name):
            walk.lost(f"updates of {name} do not wait for the gradient that they wait for in the captured graph")


def _waits(walk: Walk) -> dict[str, set[object]]:
    """Input that updates write to the terms of the gradients that they wait for, and what a rank has of these."""
    nodes = {node.name: node for node in walk.graph.graph.nodes}
    inputs = {storage: node.name for node in placeholders(walk.graph.graph) for storage in ids_of(node)}
    waits: dict[str, set[object]] = {}
    for update, gradient in walk.graph.waits.items():
        values = walk.values[nodes[gradient]] if gradient in nodes else ()
        for argument in ops.mutated_arguments(nodes[update]) if update in nodes else ():
            for name in (inputs[storage] for storage in ids_of(argument) if storage in inputs):
                waits.setdefault(name, set()).update((value.term, value.state) for value in values if value is not None)
    return waits
