"""How Python functions use what they name, read off their code: whether they look into it, or only add to it."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from roamc.capture.python_names import (
    ATTRIBUTES,
    OUTER,
    VARIABLES,
    WHOLE,
    attributes_in,
    codes_in,
    libraries_in,
    parameters_in,
    steps_of,
)

ADDING = ("append", "appendleft", "extend", "extendleft", "insert", "add")
"""Methods that add to a container and read nothing of it."""

ANY = object()
"""In the place of a name that is computed, for all names."""

LOCAL = "LOAD_FAST"
"""What the names of instructions that read a local variable begin with."""

_PUT = ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "PUSH_NULL")
"""Instructions beside those of local variables that put a value on Python's stack and take none."""

_COMPUTE = ("BINARY_OP", "BINARY_SUBSCR", "BUILD_STRING", "BUILD_TUPLE", "CALL", "FORMAT_VALUE", "KW_NAMES", "PRECALL")
"""Instructions by which an index is computed of values on Python's stack, beside those of attributes."""


class Use(NamedTuple):
    """Something that a function looks into.

    Attributes:
        variable: whether it is a variable; if not, it is an attribute or an entry of a dict.
        name: its name, the entry's key, or :data:`ANY`.
        keyed: whether only entries by keys are looked into that are written there, each of which is a use of its own.
    """

    variable: bool
    name: object
    keyed: bool


def of_attribute(name: object) -> Use:
    """Return the use of an attribute as a whole, or of an entry of a dict."""
    return Use(False, name, False)


@functools.lru_cache(maxsize=4096)
def looked_into(code: types.CodeType, libraries: frozenset[str] = frozenset()) -> frozenset[Use]:
    """Return what a function and those inside it use for more than to add to it, as a log is used.

    To ask whether it is there or None is no such use: what a trace has brought there is read anew in any case. To put
    an entry there, or to give it another name, is none either. A function that computes names of attributes may use
    any.

    Args:
        code: the function's.
        libraries: global variables whose attributes do not count, such as ``torch`` with its ``torch.log``.
    """
    computed = any(name in WHOLE for name in attributes_in(code))
    uses = {use for part in codes_in(code) for use in _looked_into(part, libraries)}
    return frozenset(uses | {of_attribute(ANY)} if computed else uses)


def looks_into(frame: types.FrameType, name: str) -> bool:
    """Whether a function's frame, which is reading attribute ``name`` of an object, may look into it."""
    code = frame.f_code
    uses = looked_into(code, libraries_in(code, frame.f_globals))
    if _opnames_in(code).get(frame.f_lasti) in ATTRIBUTES:  # by its written name
        return any(Use(False, name, keyed) in uses for keyed in (False, True))
    return name not in attributes_in(code) or is_looked_into(uses, False, name)


@functools.lru_cache(maxsize=4096)
def _opnames_in(code: types.CodeType) -> dict[int, str]:
    """Names of a function's instructions, by their offsets in bytes."""
    return {step.offset: step.opname for step in dis.get_instructions(code)}


def is_looked_into(uses: AbstractSet[Use], variable: bool, name: object) -> bool:
    """Whether a variable or attribute is among ``uses``, if only by entries."""
    return Use(variable, name, True) in uses or _is_whole(uses, variable, name)


def is_entry_looked_into(uses: AbstractSet[Use], variable: bool, name: object, key: object) -> bool:
    """Whether an entry of a dict is among ``uses``, by its own key or with all entries."""
    return of_attribute(key) in uses or _is_whole(uses, variable, name)


def _is_whole(uses: AbstractSet[Use], variable: bool, name: object) -> bool:
    return Use(variable, name, False) in uses or (not variable and of_attribute(ANY) in uses)


def _looked_into(code: types.CodeType, libraries: frozenset[str]) -> Iterator[Use]:
    steps = steps_of(code)
    parameters = parameters_in(code)
    for at, step in enumerate(steps):
        variable = step.opname in (*VARIABLES, *OUTER) or (step.opname.startswith(LOCAL) and step.argval in parameters)
        if step.opname in ATTRIBUTES and steps[at - 1].opname in VARIABLES and steps[at - 1].argval in libraries:
            continue
        word = step.opname == "LOAD_CONST" and isinstance(step.argval, str)
        if variable or word or step.opname in ATTRIBUTES:
            keyed = _keyed(steps, at)
            if keyed is not None:
                yield Use(variable, step.argval, keyed)


def _keyed(
    steps: Sequence[dis.Instruction], begin: int, renamed: frozenset[str] = frozenset(), indexed: bool = False
) -> bool | None:
    """Return ``Use.keyed`` of what the step at ``begin`` puts on Python's stack; None if it is not looked into.

    The steps behind are followed to the one that takes it off the stack; from there, its entry if that is what they
    take, and the local variable that they put it into. A string stands for the entry whose key it is.

    Args:
        steps: those of a function.
        begin: the index of one of them.
        renamed: local variables that are being followed.
        indexed: whether it is an element, or an entry by a computed key: to ask for one asks how many there are.
    """
    is_key = steps[begin].opname == "LOAD_CONST"
    if is_key and _is_asked_for(steps, begin):
        return None
    keyed: bool | None = False if is_key else None  # of the first entry
    above = 0  # values on the stack above the one that is followed
    for at in range(begin + 1, len(steps)):
        step, effect = steps[at], dis.stack_effect(steps[at].opcode, steps[at].arg, jump=False)
        if step.opname == "BINARY_SUBSCR" and above == (0 if is_key else 1):
            written = is_key or (steps[at - 1].opname == "LOAD_CONST" and isinstance(steps[at - 1].argval, str))
            keyed = written if keyed is None else keyed
            indexed |= not written
            is_key, above = False, 0
        elif step.opname == "STORE_SUBSCR" and above == 1 and not is_key:
            return None
        elif above or step.opname in _PUT or step.opname.startswith(LOCAL):
            above += effect
            computed = step.opname in (*_PUT, *_COMPUTE, *ATTRIBUTES) or step.opname.startswith(LOCAL)
            if above < 1 or not computed:
                break
        elif step.opname == "STORE_FAST" and not is_key and step.argval not in renamed:
            uses = _keyed_of_local(steps, step.argval, renamed | {step.argval}, indexed)
            return uses if uses is None or keyed is None else keyed
        elif not is_key and ((_asks_for_none(step) and not indexed) or _adds(step)):
            return None
        else:
            break
    return bool(keyed)


def _keyed_of_local(steps: Sequence[dis.Instruction], name: str, renamed: frozenset[str], indexed: bool) -> bool | None:
    """Return the same for all that a local variable may be, wherever it is read."""
    read = [at for at, step in enumerate(steps) if step.opname.startswith(LOCAL) and step.argval == name]
    uses = [keyed for at in read if (keyed := _keyed(steps, at, renamed, indexed)) is not None]
    return all(uses) if uses or (indexed and not read) else None


def _asks_for_none(step: dis.Instruction) -> bool:
    """Whether a step goes on elsewhere if a value is None, or if it is not."""
    return step.opname.startswith("POP_JUMP") and "NONE" in step.opname


def _adds(step: dis.Instruction) -> bool:
    """Whether a step takes a method off an object that adds to it."""
    return step.opname in ATTRIBUTES and step.argval in ADDING


def _is_asked_for(steps: Sequence[dis.Instruction], at: int) -> bool:
    """Whether the string at ``at`` is the second argument of ``hasattr``."""
    if steps[at + 1].opname not in ("PRECALL", "CALL"):
        return False
    before = at - 1
    while steps[before].opname in (*ATTRIBUTES, *OUTER) or steps[before].opname.startswith(LOCAL):
        before -= 1
    named = steps[before - 1 : before + 1]  # the object itself may be a global variable
    return any(step.opname in VARIABLES and step.argval == "hasattr" for step in named)
