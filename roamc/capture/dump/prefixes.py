"""What stands in front of lines that went through a logger, a launcher or a terminal, taken away."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

_RANK = r"(?:\[(?:default|rank)?\d+\]:? ?)?"
"""What launchers write: ``[rank0]:``, or torchrun's ``[default0]:``."""

TODAY = r"[VIWE]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ [^\]\s]+:\d+\] "
"""``I1122 15:24:01.361000 77 torch/x.py:12] ``, since torch 2.2."""

_OF_2023 = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\] "
"""``[2023-11-20 15:52:38,797] ``, torch 2.0 and 2.1."""

_PREFIX = re.compile(rf"^(?:{_RANK}(?:{TODAY}|{_OF_2023})(?:\[[\w/ .-]*\] ?)*(?:[\w.]+: \[[A-Z]+\] ?)?|{_RANK[:-1]})")
"""All of them, with ``[0/0] [__aot_joint_graph] `` or ``torch._functorch.aot_autograd: [INFO] `` after them."""

_QUOTE = re.compile(r"^ {0,3}> ?")


_FRAME = re.compile(r"\[(\d+/\d+)(?:_\d+)?\]")


def frames(text: str, lines: Sequence[int]) -> list[str]:
    """Return which compilation each of ``lines``, counted from 1, is of by its prefix, as ``0/0``.

    Empty unless all of them say it, each another.
    """
    every = _lines(text)
    said = [match[1] for line in lines if (match := _FRAME.search(every[line - 1]))]
    return said if len(set(said)) == len(lines) else []


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def without_prefixes(text: str) -> list[str]:
    """Return the lines of ``text`` without log prefixes, ranks, colours, carriage returns and a Markdown quote's marks.

    The spaces that indent all lines are taken away as well.
    """
    lines = _unquoted(_lines(_COLOUR.sub("", text)))
    lines = [_PREFIX.sub("", line, count=1) for line in lines]
    return _dedented(lines)


def _unquoted(lines: Sequence[str]) -> list[str]:
    """``lines`` without the marks of quotes that have a graph, or of one that all are part of."""
    filled = [line for line in lines if line.strip()]
    everything = all(_QUOTE.match(line) for line in filled)
    left = list[str]()
    for quoted, group in itertools.groupby(lines, lambda line: _QUOTE.match(line) is not None):
        part = list(group)
        graph = quoted and any("def forward(" in line for line in part)
        left += [_QUOTE.sub("", line, count=1) for line in part] if everything or graph else part
    return left


def _dedented(lines: Sequence[str]) -> list[str]:
    lines = [line.expandtabs(4) for line in lines]
    least = min((len(line) - len(line.lstrip(" ")) for line in lines if line.strip()), default=0)
    return [line[least:] for line in lines]
