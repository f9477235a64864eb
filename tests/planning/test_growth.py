"""Planning takes work in proportion to the graph: twice the operators, about twice the lines of this project that run.

Lines are counted, not seconds, so that the test says the same on every machine. Each function is looked at by itself:
one that grows with the square is found before it takes most of the time. Loops in C are not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import roamc

ROOT = Path(__file__).parents[2]
FOLDERS = tuple(f"{ROOT / name}/" for name in ("roamc", "passes", "solvers"))

SMALL = 60
"""Size of the smaller model of each pair."""

GROWTH = 2.6
"""Most times as many lines that a model of twice the size may take; 4 times would be the square."""

COUNTED = 0.002
"""Share of all lines from which on a function is looked at."""

Shape = Callable[[torch.Tensor, int], torch.Tensor]


def split(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.stack([part.sum() for part in x.repeat(size).split(8)])


def picks(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([part.sin() for part in x.repeat(size).chunk(size)])


def cat(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([x.sin() for _ in range(size)])


def chain(x: torch.Tensor, size: int) -> torch.Tensor:
    for _ in range(size):
        x = x.sin()
    return x


def tree(x: torch.Tensor, size: int) -> torch.Tensor:
    level = [x + number for number in range(size)]
    while len(level) > 1:
        level = [sum(level[at : at + 2]) for at in range(0, len(level), 2)]  # type: ignore[misc]
    return level[0]


def views(x: torch.Tensor, size: int) -> torch.Tensor:
    whole = x.repeat(size)
    return torch.stack([whole[at : at + 1].sum() for at in range(size)])


def writes(x: torch.Tensor, size: int) -> torch.Tensor:
    written = torch.zeros(size)
    for at in range(size):
        written[at] = x[0]
    return written


def in_place(x: torch.Tensor, size: int) -> torch.Tensor:
    x = x * 2
    for _ in range(size):
        x.add_(1.0)
    return x


SHAPES: list[Shape] = [split, picks, cat, chain, tree, views, writes, in_place]


class Shaped(nn.Module):
    def __init__(self, shape: Shape, size: int, parameters: int = 1) -> None:
        super().__init__()
        self.shape, self.size = shape, size
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(parameters)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x * weight
        return self.shape(x, self.size).square().mean()


def lines_of(model: nn.Module) -> Counter[str]:
    """The lines that the first step of ``model`` runs, by function."""
    lines: Counter[str] = Counter()

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(FOLDERS):
            return None
        name = f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            lines[name] += 1
            return line

        return line

    step = roamc.train_step(model, lambda model, x: model(x), torch.optim.SGD(model.parameters(), 0.1), strict=True)
    before = sys.gettrace()
    sys.settrace(called)
    try:
        step(torch.ones(8))
    finally:
        sys.settrace(before)
    return lines


def too_fast(small: Counter[str], large: Counter[str]) -> list[str]:
    total = large.total()
    return [
        f"{name}: {small[name]} lines, then {count}"
        for name, count in large.items()
        if count > COUNTED * total and count > GROWTH * small[name] and small[name]
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_work_grows_with_operators_and_results(shape: Shape) -> None:
    lines_of(Shaped(shape, 4))  # what is done once in a process
    small, large = lines_of(Shaped(shape, SMALL)), lines_of(Shaped(shape, 2 * SMALL))
    assert large.total() <= GROWTH * small.total()
    assert too_fast(small, large) == []


def test_work_grows_with_parameters() -> None:
    lines_of(Shaped(chain, 1, 4))
    small, large = lines_of(Shaped(chain, 1, SMALL)), lines_of(Shaped(chain, 1, 2 * SMALL))
    assert large.total() <= GROWTH * small.total()
    assert too_fast(small, large) == []
