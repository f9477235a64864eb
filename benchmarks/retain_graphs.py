"""Graphs for reruns that integer and constraint programs can still solve: random layers, chains, small networks.

A network is captured with forward and backward, at the granularity of its operators, in the order that roamc plans for
it. All come as :func:`benchmarks.rivals.one_result.one_result` makes them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rivals.one_result import one_result
from roamc.cli import zoo
from roamc.frontends.workload import Workload, capture
from roamc.options import Options
from roamc.planning.search import PlanSearch
from roamc.solvers.order import make_problem as make_order
from roamc.solvers.retain import RetainProblem, make_problem


def layers(count: int, seed: int = 0, width: int = 5) -> RetainProblem:
    """Random layered graph of `count` operators: each reads one to three of the layer before, now and then a far one.

    After the graphs of Gagrani and others (arXiv 2207.05899) on which Moccasin is measured; sizes and times as random.
    """
    dice = random.Random(seed)
    readers: list[list[int]] = [[] for _ in range(count)]
    for op in range(width, count):
        first = (op // width - 1) * width
        reads = set(dice.sample(range(first, first + width), dice.randint(1, 3)))
        if dice.random() < 0.3:
            reads.add(dice.randrange(first + width))
        for result in reads:
            readers[result].append(op)
    buffers = [(dice.randint(1, 20), op, row, False) for op, row in enumerate(readers)]
    order = make_order([0] * count, [], buffers)
    return make_problem(order, range(count), [dice.randint(1, 20) for _ in range(count)], *_all(count))


def chain(length: int) -> RetainProblem:
    """Training of a linear network whose layers are alike: backward of each reads its input and the next gradient."""
    count = 2 * length
    readers = [[op + 1, count - 1 - op] for op in range(length)]
    readers[-1] = [length]
    readers += [[op + 1] for op in range(length, count - 1)] + [[]]
    order = make_order([0] * count, [], [(10, op, row, False) for op, row in enumerate(readers)])
    return make_problem(order, range(count), [1.0] * length + [2.0] * length, *_all(count))


def _all(count: int) -> tuple[list[bool], list[bool]]:
    """Everything may run again, and be dropped."""
    return [True] * count, [True] * count


class _Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norms[0](self.one(x)))
        return functional.relu(x + self.norms[1](self.two(y)))


class _UNet(nn.Module):
    """Down and up again, each level joined with what it was on the way down."""

    def __init__(self, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.Conv2d(a + b, a, 3, padding=1) for a, b in pairwise(widths))
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [functional.relu(self.enter(x))]
        for convolution in self.down:
            kept.append(functional.relu(convolution(functional.max_pool2d(kept[-1], 2))))
        y = kept.pop()
        for convolution in reversed(self.up):
            joined = torch.cat([functional.interpolate(y, scale_factor=2.0), kept.pop()], 1)
            y = functional.relu(convolution(joined))
        return self.leave(y)


def _vgg() -> nn.Module:
    parts: list[nn.Module] = []
    for before, width in ((3, 16), (16, 32), (32, 64)):
        parts += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(64 * 8 * 8, 10))


def _resnet() -> nn.Module:
    parts = [nn.Conv2d(3, 16, 3, padding=1), *(_Block(16) for _ in range(3))]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def _mobilenet() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(3):
        wide = [nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU6()]
        deep = [nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False), nn.BatchNorm2d(64), nn.ReLU6()]
        parts += [*wide, *deep, nn.Conv2d(64, 16, 1, bias=False), nn.BatchNorm2d(16)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def _image_loss(model: nn.Module, pixels: Tensor) -> Tensor:
    return model(pixels).square().mean()


def _network(name: str, make: Callable[[], nn.Module]) -> RetainProblem:
    batch = (torch.zeros(8, 3, 64, 64),)
    return captured(Workload(name, make(), batch, _image_loss))


def _gpt() -> RetainProblem:
    sizes = {"layers": 2, "batch": 4, "seq": 64, "width": 64, "heads": 4, "vocab": 256}
    return captured(zoo.make("gpt", {**sizes, "dropout": 0.0}))


def captured(work: Workload) -> RetainProblem:
    """Forward and backward of a workload, with times of the shipped profile."""
    options = Options(disable=("reuse",), profile="cpu", memory_budget="min")
    return one_result(PlanSearch(capture(work, forward_backward=True), options, many=True).choice.plain.problem)


GRAPHS: dict[str, Callable[[], RetainProblem]] = {
    "chain-16": lambda: chain(16),
    "chain-32": lambda: chain(32),
    "layers-25": lambda: layers(25),
    "layers-50": lambda: layers(50),
    "layers-100": lambda: layers(100),
    "u-net": lambda: _network("u-net", _UNet),
    "vgg": lambda: _network("vgg", _vgg),
    "resnet": lambda: _network("resnet", _resnet),
    "mobilenet": lambda: _network("mobilenet", _mobilenet),
    "gpt": _gpt,
}
"""By name, in the sequence of the table."""
