"""Retention problems to test with, and slow, obvious answers to compare with."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from roamc.solvers.order import OrderProblem, make_problem
from roamc.solvers.order.problem import consumers, reads, reusables, writes
from roamc.solvers.retain import Extra, Offer, Part, Result, RetainProblem
from roamc.solvers.retain import make_problem as make_retain
from tests.solvers.order.cases import possible_reuses
from tests.solvers.order.cases import problems as order_problems


@st.composite
def problems(draw: st.DrawFn, most_ops: int = 14) -> RetainProblem:
    """Small random problems: any graph of the order solver's tests, a legal sequence, seconds, what may run again."""
    order = draw(order_problems(most_ops, stages=1))
    dice = random.Random(draw(st.integers(0, 2**32)))
    return random_retain(order, dice)


def random_retain(order: OrderProblem, dice: random.Random) -> RetainProblem:
    """Any legal sequence, seconds that tie now and then, one operator in six not repeatable, some that expire."""
    n = order.num_ops
    repeatable = [dice.random() < 0.85 for _ in range(n)]
    droppable = [
        bool(repeatable[producer] and not kept and dice.random() < 0.9)
        for producer, kept in zip(order.producer.tolist(), order.kept.tolist(), strict=True)
    ]
    seconds = [dice.choice([0.0, 1.0, 1.0, 2.5, 7.0]) for _ in range(n)]
    expires = [dice.randint(0, n) if dice.random() < 0.1 else n for _ in range(n)]
    return make_retain(order, legal_sequence(order, dice), seconds, repeatable, droppable, expires)


def in_flight(problem: RetainProblem, at: int, waiting: int) -> RetainProblem:
    """The problem with a boundary in front of step ``at``, where as many other micro-batches wait."""
    order, sequence = problem.order, problem.sequence.tolist()
    number = {op: step + (step >= at) for step, op in enumerate(sequence)}
    workspace = [int(order.workspace[op]) for op in sequence]
    split_order = make_problem(
        [0] * at + [1] + [2] * (len(sequence) - at),
        [(number[before], number[after]) for before, after in order.edges.tolist()],
        [
            (int(size), number[producer], sorted(number[op] for op in readers), bool(kept))
            for size, producer, readers, kept in zip(
                order.size, order.producer.tolist(), consumers(order).lists(), order.kept, strict=True
            )
        ],
        [*workspace[:at], 0, *workspace[at:]],
        reusables(order).lists(),
    )

    def by_step(row: Any, own: Any) -> list[Any]:
        items = [row[op] for op in sequence]
        return [*items[:at], own, *items[at:]]

    expires = [int(end) + (int(end) > at) for end in problem.expires]
    return make_retain(
        split_order,
        range(split_order.num_ops),
        by_step(problem.seconds.tolist(), 0.0),
        by_step(problem.repeatable.tolist(), False),
        problem.droppable,
        by_step(expires, split_order.num_ops),
        waiting=waiting,
        boundary=at if waiting else -1,
    )


def legal_sequence(order: OrderProblem, dice: random.Random) -> list[int]:
    """A random topological order."""
    before: list[set[int]] = [set() for _ in range(order.num_ops)]
    for first, second in order.edges.tolist():
        before[second].add(first)
    for buffer, producer in enumerate(order.producer.tolist()):
        for reader in order.consumer[order.consumer_start[buffer] : order.consumer_start[buffer + 1]].tolist():
            before[reader].add(producer)
    sequence: list[int] = []
    while len(sequence) < order.num_ops:
        ready = [op for op in range(order.num_ops) if op not in sequence and before[op] <= set(sequence)]
        sequence.append(dice.choice(ready))
    return sequence


def chain(blocks: int, inner: int = 3, large: int = 100, small: int = 10, reuse: bool = False) -> RetainProblem:
    """Training of equal blocks, in order: each reads a small input and keeps `inner` large results for its backward.

    Forward of a block: small → large → … → large → small.  Backward mirrors it, reads every large result and the
    block's input, and hands a small gradient on. An operator takes one second.
    """
    buffers: list[tuple[int, int, list[int], bool]] = []
    ops = 0

    def run(reads: list[int], size: int) -> int:
        nonlocal ops
        for buffer in reads:
            buffers[buffer][2].append(ops)
        buffers.append((size, ops, [], False))
        ops += 1
        return len(buffers) - 1

    flow = run([], small)
    saved = []
    for _ in range(blocks):
        row = [flow]
        for _ in range(inner):
            row.append(run([row[-1]], large))
        flow = run([row[-1]], small)
        saved.append(row)
    gradient = run([flow], small)
    for row in reversed(saved):
        for buffer in reversed(row):
            gradient = run([gradient, buffer], large if buffer != row[0] else small)
    reusable = possible_reuses(buffers) if reuse else None
    order = make_problem([0] * ops, [], buffers, reusable=reusable)
    return make_retain(order, range(ops), [1.0] * ops, [True] * ops, [True] * len(buffers))


def layered(layers: int, seed: int, reuse: bool = True) -> RetainProblem:
    """Random training graphs: blocks with branches and skips, backward that reads saved buffers, uneven seconds."""
    dice = random.Random(seed)
    buffers: list[tuple[int, int, list[int], bool]] = []
    seconds: list[float] = []

    def run(reads: list[int], size: int, cost: float) -> int:
        for buffer in sorted(set(reads)):
            buffers[buffer][2].append(len(seconds))
        buffers.append((size, len(seconds), [], False))
        seconds.append(cost)
        return len(buffers) - 1

    flow = run([], 8, 0.0)
    saved: list[tuple[int, list[int]]] = []
    for _ in range(layers):
        row = [flow]
        for _ in range(dice.randint(2, 5)):
            reads = [row[-1], *dice.sample(row, dice.randint(0, 1))]
            row.append(run(reads, dice.choice([4, 8, 8, 16, 32]), dice.choice([0.1, 0.2, 1.0, 3.0])))
            saved.append((row[-1], [item for item in row if dice.random() < 0.6]))
        flow = run([flow, row[-1]], 8, 0.1)
        saved.append((flow, []))
    gradient = run([flow], 8, 0.1)
    for _, reads in reversed(saved):
        gradient = run([gradient, *reads], dice.choice([8, 8, 16]), 2.0)
        if dice.random() < 0.3:
            run([gradient], 16, 0.5)
    once = [dice.random() < 0.05 for _ in seconds]
    reusable = possible_reuses(buffers) if reuse else None
    order = make_problem([0] * len(seconds), [], buffers, reusable=reusable)
    droppable = [not once[producer] for producer in order.producer.tolist()]
    return make_retain(order, range(len(seconds)), seconds, [not one for one in once], droppable)


def offers_of(problem: RetainProblem, code: Sequence[int], extra: Sequence[float], late: Sequence[bool]) -> list[Offer]:
    """An offer for each buffer that is not kept and has readers marked `late`, by operator.

    Its smaller form has code[k] bytes; to make it takes extra[k] seconds, and to make buffer k of it no time.
    """
    order, offers = problem.order, []
    for k in range(order.num_buffers):
        readers = order.consumer[order.consumer_start[k] : order.consumer_start[k + 1]].tolist()
        waiting = tuple(op for op in readers if late[op])
        if waiting and not order.kept[k]:
            size = int(order.size[k])
            form, again = Result(int(code[k]), code[k] > 0), Result(size, size > 0)
            operators = (
                Extra(Part.ENCODE, int(order.producer[k]), k, float(extra[k]), 0, True, (k,), (form,)),
                Extra(Part.DECODE, min(waiting), k, 0.0, 0, True, (~0,), (again,)),
            )
            offers.append(Offer(k, int(code[k]), operators, tuple((op, k, 1) for op in waiting)))
    return offers


def of_several(
    problem: RetainProblem, offers: Sequence[Offer], late: Sequence[bool], dice: random.Random
) -> list[Offer]:
    """Of some of ``offers`` and another buffer at random, one that serves the late readers of both.

    What readers of the other buffer read is made of the decoded buffer, or of the form alone if the buffer's own
    readers stay as they are. In the second case the buffer's readers may be left out with what they make.
    """
    order, rows = problem.order, consumers(problem.order).lists()
    step = {op: at for at, op in enumerate(problem.sequence.tolist())}
    several = []
    for offer in offers:
        born = int(order.producer[offer.buffer])
        waits = {k: tuple(op for op in rows[k] if late[op]) for k in range(order.num_buffers) if not order.kept[k]}
        others = [
            k
            for k, ops in waits.items()
            if k != offer.buffer and ops and min(ops) > born and min(map(step.__getitem__, ops)) > step[born]
        ]
        if not others:
            continue
        k, alone, seconds = dice.choice(others), dice.random() < 0.5, dice.choice([0.0, 0.5])
        encode, decode = offer.operators
        result = Result(int(order.size[k]), True)
        again = Extra(Part.DECODE, min(waits[k]), offer.buffer, seconds, 0, True, (~0 if alone else ~1,), (result,))
        moved = tuple((op, k, 1 if alone else 2) for op in waits[k])
        if alone:
            several.append(Offer(offer.buffer, offer.nbytes, (encode, again), moved))
        else:
            anchor = min(decode.anchor, again.anchor)
            extras = (encode, *(dataclasses.replace(one, anchor=anchor) for one in (decode, again)))
            several.append(Offer(offer.buffer, offer.nbytes, extras, (*offer.instead, *moved)))
    return several


def made_early(problem: RetainProblem, late: Sequence[bool], dice: random.Random) -> tuple[list[Offer], set[int]]:
    """Offers to run operators that are `late`, and read one buffer alone, right behind what makes that buffer.

    What they make then waits in the place of the buffer. To make it costs a little more than it does late, where the
    operator is left out. Returns the offers, and these operators.
    """
    order, rows, made_by = problem.order, consumers(problem.order).lists(), writes(problem.order).lists()
    read_by, offers, moved = reads(order).lists(), [], set()
    for op in range(problem.num_ops):
        if not late[op] or len(read_by[op]) != 1 or len(made_by[op]) != 1:
            continue
        (source,), (result,) = read_by[op], made_by[op]
        born = int(order.producer[source])
        if order.kept[result] or not rows[result] or order.stage[born] != order.stage[op] or dice.random() < 0.3:
            continue
        seconds, more = float(problem.seconds[op]), dice.choice([0.0, 0.1])
        early = Result(int(order.size[result]), bool(problem.droppable[result]))
        extra = Extra(Part.ENCODE, born, op, seconds + more, 0, bool(problem.repeatable[op]), (source,), (early,))
        instead = ((op, source, 0), *((reader, result, 0) for reader in rows[result]))
        offers.append(Offer(source, int(order.size[result]), (extra,), instead, (seconds,)))
        moved.add(op)
    return offers, moved
