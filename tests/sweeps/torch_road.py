"""Whether torch's own road, AOTAutograd with all saved that eager saves, computes what eager does, by operator.

roamc's programs have the bits of the graph that this road hands over, so what the road gets wrong is wrong in them too,
unless a row of :mod:`roamc.capture.torch_faults` leaves the graph to eager. Eager itself is compared with finite
differences. A third way is eager inside a dispatch mode that does nothing: torch runs the first call of what it has
compiled in a mode, out of which roamc's programs step.

    python -m tests.sweeps.torch_road [--samples N] [--only REGEX] [--log FILE]
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config, partitioners
from torch._functorch.aot_autograd import aot_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sweeps import command, pool
from tests.sweeps.compare import SEED, OutOfTime, Verdict, time_limit
from tests.sweeps.databases import Case, Entry, Operator, database, operators_in, tensors_in, verdicts

DTYPES = (torch.complex128, torch.float64)
ROUNDING = 1e-6
"""Share of the largest element by which a result may differ: the dtypes have 16 digits, and sums another order."""
FLAG = "a kernel made of other operators conjugates by a flag, which a mode forgets: pytorch/pytorch#198118"
LOW = "has fewer digits than the step of a finite difference"
EXPLAINED = {
    **{("mode", name): FLAG for name in ("pinverse", "linalg.pinv", "linalg.polar", "linalg.matrix_sqrth")},
    **{("slope", name): LOW for name in ("bfloat16", "half", "float", "cfloat", "chalf")},
    ("slope", "normal"): "draws around a mean, which gets no gradient",
    ("slope", "__rpow__"): "has no finite value beside the sample",
    ("slope", "nn.functional.max_unpool2d"): "writes some places twice, of which the last write counts",
    ("slope", "nn.functional.max_unpool3d"): "writes some places twice, of which the last write counts",
    ("slope", "nn.functional.cosine_embedding_loss"): "labels are 1 or -1, and not what lies beside them",
    ("slope", "nn.functional.hinge_embedding_loss"): "labels are 1 or -1, and not what lies beside them",
    ("slope", "as_strided_scatter"): "eager's gradient of what is written over is not 0; AOTAutograd gives the same",
    ("slope", "nn.functional.max_unpool1d"): "writes some places twice, of which the last write counts",
}
"""Outcomes other than "same" and "left out" by outcome and operator, and why they are as they should be."""
STEP, SLOPES = 1e-6, 1e-3
"""Of finite differences: the step, and the share by which a slope may differ from that of a gradient."""


@dataclass(frozen=True)
class Answer:
    """Outputs, and the gradients of the tensors that have one; None where backward gives none."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]


def entries() -> Iterator[Entry]:
    """Every operator of torch's database in every dtype of ``DTYPES`` that it has on a CPU."""
    for dtype in DTYPES:
        yield from operators_in(dtype)


def cases(entry: Entry) -> list[Case]:
    """The samples of an entry as torch's gradient checks call it: on a domain, and up to signs that are free."""
    torch.manual_seed(0)
    info = database(entry.database)[entry.number]
    trains = entry.dtype in info.supported_backward_dtypes("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(info.sample_inputs("cpu", entry.dtype, requires_grad=trains))
    return [
        Case(Operator(_checked(info, sample)), (sample.input, *sample.args), dict(sample.kwargs)) for sample in samples
    ]


def _checked(info: Any, sample: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return sample.output_process_fn_grad(info.gradcheck_wrapper(info.op, *args, **kwargs))

    return call


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` itself."""
    return function


def by_aot(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as AOTAutograd traces it, split at full save, each half run operator by operator, in no mode."""
    compiled: Callable[..., Any] = aot_function(
        function, fw_compiler=_seeded, partition_fn=partitioners.default_partition
    )

    def call(*args: Any) -> Any:
        with config.patch(check_custom_op_aliasing=False) if hasattr(config, "check_custom_op_aliasing") else NO_MODE:
            return compiled(*args)

    return call


def _seeded(gm: Any, _: Any) -> Callable[..., Any]:
    """``gm`` with random numbers from the seed on: the trace in front of its first call has drawn some."""

    def run(*args: Any) -> Any:
        torch.manual_seed(SEED)
        return gm(*args)

    return run


class Watching(TorchDispatchMode):
    """Sees every operator, and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_a_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` inside a dispatch mode."""

    def call(*args: Any) -> Any:
        with Watching():
            return function(*args)

    return call


NO_MODE = contextlib.nullcontext()


def answer(case: Case, way: Callable[[Callable[..., Any]], Callable[..., Any]], directions: list[Tensor]) -> Answer:
    """What one call gives by a way; gradients are those of the sum of products with ``directions``, filled if empty."""
    case = case.fresh()
    leaves, spec = pytree.tree_flatten((case.args, case.kwargs))
    where = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(*tensors: Tensor) -> list[Tensor]:
        values = list(leaves)
        for at, tensor in zip(where, tensors, strict=True):
            values[at] = tensor
        args, kwargs = pytree.tree_unflatten(values, spec)
        return tensors_in(case.model(*args, **kwargs))

    tensors_in_call = [leaves[at] for at in where]
    torch.manual_seed(SEED)
    outputs = way(call)(*tensors_in_call)
    wanted = [output for output in outputs if output.requires_grad]
    if not directions:
        directions.extend(torch.randn_like(output.detach()) for output in wanted)
    sources = [tensor for tensor in tensors_in_call if tensor.requires_grad]
    torch.manual_seed(SEED)
    gradients = torch.autograd.grad(wanted, sources, directions, allow_unused=True) if wanted and sources else []
    return Answer([output.detach() for output in outputs], list(gradients))


def judge(case: Case, seconds: int = 30) -> Verdict:
    """Three comparisons: "same", or "differs" (AOTAutograd), "mode" or "slope"; "left out" if torch has no answer."""
    at = "eager"
    try:
        with time_limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            directions: list[Tensor] = []
            wanted = answer(case, eager, directions)
            for outcome, way in (("differs", by_aot), ("mode", in_a_mode)):
                at = way.__name__
                if said := difference(answer(case, way, directions), wanted):
                    again = difference(answer(case, eager, directions), wanted)
                    return Verdict("left out", "two runs of eager differ") if again else Verdict(outcome, said)
            at = "finite differences"
            said = slope(case, wanted, directions)
            return Verdict("slope", said) if said else Verdict("same")
    except OutOfTime:
        return Verdict("left out", f"{at}: over {seconds} s")
    except Exception as error:  # whatever fails is a line of the log
        return Verdict("left out", f"{at}: {type(error).__name__}: {str(error)[:200]}")


def difference(actual: Answer, wanted: Answer) -> str:
    """The first result that differs by more than rounding; empty if none."""
    pairs = [("output", *pair) for pair in zip(actual.outputs, wanted.outputs, strict=True)]
    pairs += [("gradient", *pair) for pair in zip(actual.gradients, wanted.gradients, strict=True)]
    for number, (kind, ours, theirs) in enumerate(pairs):
        if ours is None or theirs is None:
            present = ours if theirs is None else theirs
            if present is not None and present.abs().max() > 0:
                return f"{kind} {number}: none where the other is not zero"
        elif ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{kind} {number}: {ours.dtype}{list(ours.shape)} for {theirs.dtype}{list(theirs.shape)}"
        elif (off := _off(ours, theirs)) > ROUNDING:
            return f"{kind} {number}: off by {off:.2g} of the largest element"
    return ""


def _off(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = (t.to_dense() if t.layout is not torch.strided else t for t in (ours, theirs))
    if not ours.is_floating_point() and not ours.is_complex():
        return float(not torch.equal(ours, theirs))
    ours, theirs = (torch.nan_to_num(t.resolve_conj().resolve_neg(), 1.5, 2.5, 3.5) for t in (ours, theirs))
    gap = (ours - theirs).abs().max() if ours.numel() else torch.zeros(())
    return float(gap / theirs.abs().max().clamp(min=1e-8)) if gap > 0 else 0.0


def slope(case: Case, wanted: Answer, directions: list[Tensor]) -> str:
    """Compare the slope along one random direction with that of the gradients; empty if they agree."""
    sources = [t for t in tensors_in((case.args, case.kwargs)) if t.requires_grad]
    if not directions or not sources:
        return ""
    torch.manual_seed(SEED + 1)
    along = [torch.randn_like(tensor.detach()) for tensor in sources]
    pairs = [(g, d) for g, d in zip(wanted.gradients, along, strict=True) if g is not None]
    expected = sum(float((g.conj() * d).sum().real) for g, d in pairs)
    scale = sum(float((g.abs() * d.abs()).sum()) for g, d in pairs)
    ends = [_weighted(case, along, sign * STEP, directions) for sign in (1, -1)]
    measured = (ends[0] - ends[1]) / (2 * STEP)
    if abs(measured - expected) <= SLOPES * max(scale, 1e-3):
        return ""
    return f"slope {measured:.6g} by finite differences, {expected:.6g} by gradients"


def _weighted(case: Case, along: list[Tensor], step: float, directions: list[Tensor]) -> float:
    """The sum of products of the outputs with ``directions``, a step away."""
    moved = case.fresh()
    sources = [t for t in tensors_in((moved.args, moved.kwargs)) if t.requires_grad]
    with torch.no_grad():
        for source, direction in zip(sources, along, strict=True):
            source.add_(direction, alpha=step)
    torch.manual_seed(SEED)
    outputs = [output for output in tensors_in(moved.model(*moved.args, **moved.kwargs)) if output.requires_grad]
    return sum(float((w.conj() * out.detach()).sum().real) for out, w in zip(outputs, directions, strict=True))


def unexplained(entry: Entry, outcome: str) -> bool:
    """Whether an outcome is none that is known for the operator."""
    return outcome not in ("same", "left out") and (outcome, database("op")[entry.number].name) not in EXPLAINED


def work(job: tuple[Entry, int | None], first: int) -> Iterator[pool.Row]:
    """The verdicts of an entry's samples, from the ``first`` on."""
    entry, samples = job
    for row in verdicts(entry, samples, judge, first, cases=cases):
        outcome = row["outcome"]
        is_known = outcome not in ("same", "left out") and not unexplained(entry, outcome)
        yield {**row, "outcome": "known" if is_known else outcome, "text": f"{outcome}: {row['text']}"}


def main() -> int:
    """Run the sweep; 1 if an outcome is not explained."""
    about = "torch's database of operators by torch's own road"
    return command.by_operator(about, "build/torch-road.jsonl", entries(), work, ("same", "known", "left out"))


if __name__ == "__main__":
    sys.exit(main())
