"""Which operators of a joint graph eager computes in place: functionalization has made new values of the writes.

The graph of dynamo, which stands in the same log, still has them: ``relu_``, ``x += 1``, ``x[:, 0] = y``, and functions
called with ``inplace = True``. They are found again in the joint graph by the user's line and the operator's name, in
their sequence.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from roamc.capture.dump.text import FILE
from roamc.compat import OpOverload
from roamc.graph.memory import WROTE_OVER
from roamc.operators import ops
from roamc.operators.schemas import name_of

Line = tuple[str, int]
"""File and number of the user's line."""

_ASSIGNED = re.compile(r"^\s*\w+(?:\.\w+)* (\+|-|\*\*|\*|//|/|%|&|\||\^|@|<<|>>)= ")
_PART = re.compile(r"^\s*\w+\[.*?\] = ")
_METHOD = re.compile(r"= [\w.]*?\.(?!_)(\w*?[a-z0-9])_\(")
_FUNCTION = re.compile(r"= [\w.]*?\.(\w+)\(.*\binplace = True")

MOST_OF_WRITE = 4_096
"""Characters of a line above which it is no write: the expressions take a time that grows with their square."""

_NAMES = {
    **{"+": "add", "-": "sub", "*": "mul", "/": "div", "//": "floor_divide", "%": "remainder", "**": "pow"},
    **{"&": "bitwise_and", "|": "bitwise_or", "^": "bitwise_xor", "@": "matmul", "<<": "lshift", ">>": "rshift"},
}
_PARTS_WRITTEN = ("copy", "index_put", "fill", "masked_fill")
"""Operators that ``x[...] = y`` becomes."""

DROPOUT = ("bernoulli", "div", "mul")
"""What a dropout in place becomes, one write after the other."""

_SCATTERS = ("slice_scatter", "select_scatter", "as_strided_scatter", "diagonal_scatter")


def mark(joint: fx.Graph, dynamo: str) -> tuple[int, int]:
    """Set ``meta[WROTE_OVER]`` of forward's operators that stand for a write in place, as capture does.

    Args:
        joint: forward and backward, with stack traces and tags of phases.
        dynamo: the text of dynamo's graph.

    Returns:
        How many writes of ``dynamo`` were not found in ``joint``, and how many are of lines that it has nothing of:
        torch leaves out what no result needs.
    """
    waiting: dict[Line, deque[tuple[str, ...]]] = defaultdict(deque)
    for line, operators in _writes(dynamo.split("\n")):
        waiting[line].append(operators)
    inside = False
    for node in joint.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        if node.target in (torch.ops.aten.copy_.default, torch.ops.aten.embedding_renorm.default):
            node.meta[WROTE_OVER] = True
            continue
        expected = waiting.get(_line(node))
        if expected and _stem(node) in expected[0]:
            expected.popleft()
            inside = True
        elif inside and not (_stem(node) in _SCATTERS or _views_a_scatter(node) or _is_scattered(node)):
            inside = False
        if inside:
            node.meta[WROTE_OVER] = True
    there = {_line(node) for node in joint.nodes if node.meta.get("partitioner_tag") != "is_backward"}
    gone = sum(len(operators) for line, operators in waiting.items() if line not in there)
    return sum(map(len, waiting.values())) - gone, gone


def _writes(lines: Sequence[str]) -> Iterator[tuple[Line, tuple[str, ...]]]:
    """(the user's line, names of the operators that it may become) of every write."""
    line: Line = "", 0
    for text in lines:
        if len(text) > MOST_OF_WRITE:
            continue
        if text.lstrip().startswith("#"):
            if place := FILE.search(text):
                line = place["file"], int(place["line"])
        elif assigned := _ASSIGNED.match(text):
            yield line, (_NAMES[assigned[1]],)
        elif _PART.match(text):
            yield line, _PARTS_WRITTEN
        elif call := _METHOD.search(text) or _FUNCTION.search(text):
            yield from ((line, (name,)) for name in (DROPOUT if "dropout" in call[1] else (call[1],)))


def _line(node: fx.Node) -> Line:
    match = re.match(r'\s*File "(.*)", line (\d+), in ', node.meta.get("stack_trace", ""))
    return (match[1], int(match[2])) if match else ("", 0)


def _stem(node: fx.Node) -> str:
    return name_of(node.target).split(".")[1] if isinstance(node.target, OpOverload) else ""


def _is_scattered(node: fx.Node) -> bool:
    """Whether what is written to a view is brought to the shape of its base, to be written into that."""
    while ops.is_view(node.target):
        users = list(node.users)
        if any(_stem(user) in _SCATTERS and user.args[1] is node for user in users):
            return True
        if len(users) != 1:
            return False
        node = users[0]
    return False


def _views_a_scatter(node: fx.Node) -> bool:
    first = node.args[0] if node.args else None
    while isinstance(first, fx.Node) and ops.is_view(first.target):
        first = first.args[0]
    return ops.is_view(node.target) and isinstance(first, fx.Node) and _stem(first) in _SCATTERS
