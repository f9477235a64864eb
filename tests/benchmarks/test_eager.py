"""What eager PyTorch is said to allocate, against what it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.rivals import eager
from roamc.frontends.workload import OPTIMIZERS, Workload, capture
from roamc.graph.memory import build_memory
from roamc.options import Options
from roamc.passes import normalize


def traced(optimizer: str) -> eager.Trace:
    model = nn.Linear(64, 32)
    work = Workload("net", model, (torch.zeros(4, 64),), lambda m, x: m(x).sum(), OPTIMIZERS[optimizer])
    graph = capture(work)
    return eager.trace(build_memory(normalize.apply(graph, normalize.decide(graph, Options()))))


def test_gradients_live_to_the_end_of_the_step() -> None:
    trace = traced("sgd")
    weight, bias = 4 * 64 * 32, 4 * 32
    to_the_end = sorted(trace.size[trace.dead == trace.steps].tolist())
    assert to_the_end == [4, bias, weight]


def test_adam_divides_the_root_into_a_new_tensor() -> None:
    trace = traced("adam")
    weight, gradients = 4 * 64 * 32, 4 * 64 * 32 + 4 * 32
    at_worst = np.sort(trace.size[(trace.born <= worst_step(trace)) & (worst_step(trace) < trace.dead)])
    assert at_worst.tolist() == [4, 128, weight, weight, weight]
    assert trace.peak_bytes == 4 + gradients + 2 * weight


def worst_step(trace: eager.Trace) -> int:
    live = [int(trace.size[(trace.born <= t) & (t < trace.dead)].sum()) for t in range(trace.steps)]
    return int(np.argmax(live))


class Divisions(TorchDispatchMode):
    """Notes whether divisions give new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "div" in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_torch_still_divides_out_of_place() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.Adam([parameter], foreach=False)
    with Divisions() as seen:
        optimizer.step()
    assert "aten::div.Tensor" in seen.names
