"""Error messages of :mod:`roamc.graph.value_flow`: two numbers are followed down to where they begin to differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roamc.errors import VerifyError, way_out
from roamc.graph.value_numbers import Flow, Number, Numbers


def fail(flow: Flow, before: Flow, after: str, reader: str, old: Number | None, new: Number | None) -> None:
    """Follow two numbers down to where they begin to differ, and raise an error that says what is read there.

    Args:
        flow: values of the graph that a pass left.
        before: values of the graph before the pass, with the same ``numbers``.
        after: name of the pass.
        reader: operator, output or tensor of the caller's that gets another value.
        old: number that ``reader`` had before the pass; None if it had none.
        new: number that ``reader`` has now; None if it has none.

    Raises:
        VerifyError: always.
    """
    path = list(_path(flow.numbers, old, new))
    calls = [number for _, number in path if flow.numbers.key(number)[0] == "call"]
    via = next((flow.makers[number] for number in reversed(calls) if number in flow.makers), reader)
    old, new = path[-1] if path else (old, new)
    fault = f"would read {_words(flow, new)} and not {_words(before, old)}, as in the captured graph"
    if old is not None and new is not None and _is_same_call(flow.numbers, old, new):
        fault = "would run with other arguments than in the captured graph"
        if flow.numbers.key(old)[:-1] == flow.numbers.key(new)[:-1]:
            fault = "would run an operator again that may give other bits each time"
    through = f" through {via}, which" if via != reader else ""
    raise VerifyError(f"after pass {after!r}: {reader}{through} {fault}; {way_out(after)}")


def fail_effects(flow: Flow, before: Flow, after: str) -> None:
    """Raise an error that names the operator with an effect that runs in another place, or counts those before and now.

    Args:
        flow: values of the graph that a pass left; its ``effects`` have other numbers than those of ``before``.
        before: values of the graph before the pass.
        after: name of the pass.

    Raises:
        VerifyError: always.
    """
    for (number, name), (old, first) in zip(flow.effects, before.effects, strict=False):
        if number != old:
            raise VerifyError(f"after pass {after!r}: {name} runs where {first} ran in the captured graph")
    raise VerifyError(
        f"after pass {after!r}: {len(flow.effects)} operators with an effect, {len(before.effects)} before"
    )


WORDS = {
    "part": "the result of {}",
    "call": "what {} computes",
    "written": "what {} has written",
    "patched": "what {} has written to a part",
    "patched part": "what {} has written to a part",
    "filled": "what {} has copied",
    "copied": "what {} has copied",
    "scattered": "what {} has written to a part",
    "elements": "what lies in a tensor",
    "padded": "the result of {} with rows further apart",
    "handed": "what another forward may have written since",
    "overwritten": "what the caller has written since",
    "after": "a generator that {} has drawn from",
    "saved": "the generator's state that {} keeps",
    "generator": "a generator that has drawn nothing",
    "given": "what the caller gives",
    "output": "another value",
    "pick": "a result that is no tensor",
    "no": "no state of a generator",
    "target": "another operator",
}
"""First part of a key to what the key stands for; ``{}`` is the name of an operator."""


def _path(numbers: Numbers, old: Number | None, new: Number | None) -> Iterator[tuple[Number, Number]]:
    """Yield two numbers that differ, then the differing numbers inside these, and so on while operators agree."""
    pair = (old, new) if old is not None and new is not None else None
    while pair is not None:
        yield pair
        pair = _inside(numbers.key(pair[0]), numbers.key(pair[1]))
        calls = pair is not None and numbers.key(pair[1])[0] == "call"
        if calls and not _is_same_call(numbers, *pair):  # type: ignore[misc]
            return


def _is_same_call(numbers: Numbers, old: Number, new: Number) -> bool:
    """Whether both are calls of one operator."""
    return numbers.key(old)[:2] == numbers.key(new)[:2] and numbers.key(new)[0] == "call"


NUMBERED = {
    **dict.fromkeys(("part", "written", "handed", "overwritten", "after", "saved"), (1,)),
    **dict.fromkeys(("scattered", "elements", "padded", "copied"), (1,)),
    "call": (4,),
    "filled": (2,),
    "patched": (1, 3),
    "patched part": (1, 4),
}
"""First part of a key to the positions in the key that hold numbers; keys "read" and "other" hold them everywhere."""


def _inside(old_key: Any, new_key: Any) -> tuple[Number, Number] | None:
    """The first two numbers that differ in two keys; None where something else differs before."""
    if not (isinstance(old_key, tuple) and isinstance(new_key, tuple)) or len(old_key) != len(new_key):
        return None
    everywhere = range(len(old_key)) if old_key and old_key[0] in ("read", "other") else ()
    numbered = NUMBERED.get(old_key[0], everywhere) if old_key and isinstance(old_key[0], str) else ()
    for at, (one, other) in enumerate(zip(old_key, new_key, strict=True)):
        if one == other:
            continue
        if at in numbered and type(one) is type(other) is int:
            return one, other
        return _inside(one, other)
    return None


def _words(flow: Flow, number: Number | None) -> str:
    """What a number stands for in a graph, in words."""
    if number is None:
        return "nothing"
    key, maker = flow.numbers.key(number), flow.makers.get(number)
    kind = key[0]
    if number in flow.writers:
        return f"what {flow.writers[number]} has written"
    if kind == "part" and flow.numbers.key(key[1])[0] == "given":
        return f"{flow.numbers.key(key[1])[2]} as the caller gives it"
    if kind in ("place", "shape"):
        return f"a tensor that lies as {key[1:]}"
    return WORDS[kind].format(maker or "another operator")
