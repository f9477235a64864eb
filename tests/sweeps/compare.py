"""Run a case by roamc and by aot_eager, and say where the bits differ."""

from __future__ import annotations

import contextlib
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.sweeps.databases import Case, named, tensors_in

SEED = 17
BUDGETS = (None, "min")


class OutOfTime(BaseException):
    """A case took longer than it may. No ``Exception``: torch wraps those, and roamc falls back on them."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        outcome: "same", "differs", "raises", "left out" (aot_eager has no answer), "time" or "crash".
        text: where or why.
    """

    outcome: str
    text: str = ""

    @property
    def counts(self) -> bool:
        """Whether the case says anything about roamc."""
        return self.outcome != "left out"


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise ``OutOfTime`` after so many seconds of processor time."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def results(case: Case, backend: str, budget: str | None = None) -> dict[str, Tensor | None]:
    """Outputs, gradients, and what arguments, parameters and buffers are afterwards, of one compiled call."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case = case.fresh()
    options: dict[str, Any] = {"options": {"strict": True, "memory_budget": budget}} if backend == "roamc" else {}
    compiled = torch.compile(case.model, backend=backend, dynamic=False, **options)
    torch.manual_seed(SEED)
    outputs = tensors_in(compiled(*case.args, **case.kwargs))
    wanted = [output for output in outputs if output.requires_grad]
    if wanted:
        torch.manual_seed(SEED)
        torch.autograd.backward(wanted, [_cotangent(output) for output in wanted])
    tensors: dict[str, Tensor | None] = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    held = [*enumerate(tensors_in((case.args, case.kwargs))), *named(case.model)]
    for name, tensor in held:
        tensors[f"{name} afterwards"] = tensor.detach()
        tensors[f"gradient of {name}"] = tensor.grad
    return tensors


def _cotangent(output: Tensor) -> Tensor:
    dense = output.detach().to_dense() if output.layout is not torch.strided else output.detach()
    return torch.randn_like(dense, memory_format=torch.contiguous_format)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements in their logical order."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return (
        tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    )


def different(actual: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> str:
    """The first place where two results are not the same bits in the same geometry; empty if none."""
    if actual.keys() != wanted.keys():
        return f"results {sorted(actual)} for {sorted(wanted)}"
    for name, ours in actual.items():
        theirs = wanted[name]
        if ours is None or theirs is None:
            if ours is not theirs:
                return f"{name}: {ours if ours is None else 'a tensor'} where aot_eager has the other"
            continue
        if _geometry(ours) != _geometry(theirs):
            return f"{name}: {_geometry(ours)} for {_geometry(theirs)}"
        if not torch.equal(bits(ours), bits(theirs)):
            return f"{name}: other bits"
    return ""


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    """What must be equal; strides only of dimensions that have another element to go to."""
    strided = tensor.layout is torch.strided and tensor.numel() > 0
    stride = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1] if strided else []
    return tuple(tensor.shape), tuple(stride), tensor.dtype, tensor.device.type


def judge(case: Case, seconds: int = 60) -> Verdict:
    """One case by default and with the smallest, against aot_eager."""
    step = "aot_eager"
    try:
        with time_limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = results(case, "aot_eager")
            if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
                return Verdict("left out", "torch.compile leaves it to eager")
            for budget in BUDGETS:
                step = f"budget {budget}"
                if said := different(results(case, "roamc", budget), wanted):
                    if different(results(case, "aot_eager"), wanted):
                        return Verdict("left out", "two runs of aot_eager differ")
                    return Verdict("differs", f"{step}: {said}")
    except OutOfTime:
        return Verdict("left out" if step == "aot_eager" else "time", f"{step}: over {seconds} s")
    except Exception as error:  # whatever fails is a line of the log
        said = f"{step}: {type(error).__name__}: {_first_line(error)}"
        return Verdict("left out" if step == "aot_eager" else "raises", said)
    return Verdict("same")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " | ".join(lines[:2])[:300] if lines else ""
