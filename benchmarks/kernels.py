"""The kernels of a GPU's programs: launches, bytes that each moves, what each takes of the GPU; no GPU is needed.

    python -m benchmarks.kernels [MODEL ...]

Models of roamc's zoo, and those of benchmarks/models.py at their small sizes, in bfloat16 with numerics="fast",
captured for a GPU on fake tensors. Kernels are those of the whole step with AdamW. Launches are counted for
forward and backward, before and behind passes masks, scores, padding and fuse, beside what Inductor's scheduler makes
of the same graph, and for the whole step with AdamW. Bytes that a kernel moves follow from its text: each operand once
for every line that loads it, each result once, partial sums twice; least are all that it needs and makes, once.
Registers, shared memory and spilled bytes are what the assemblers say for A100, H100 and MI300.

benchmarks/gpu_kernels.py times kernels.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import Any

import torch
from torch import fx

from benchmarks import inductor_kernels
from benchmarks._measure import fresh, save
from benchmarks.models import WORKLOADS, make
from roamc.cli import zoo
from roamc.frontends.workload import Workload, capture
from roamc.graph import TrainGraph, operators, placeholders
from roamc.graph.storage_ids import ids_of
from roamc.operators import ops
from roamc.operators.blocks import only_tensor
from roamc.operators.gpu.ahead import TARGETS, compiled
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kernel_keys import nameless
from roamc.operators.gpu.multi_tensor import MultiTensorKernel
from roamc.operators.gpu.operands import is_number
from roamc.operators.gpu.shifts import columns_before, moves_columns
from roamc.options import Options
from roamc.passes import fuse, masks, normalize, padding, scores
from roamc.units import Bytes

HALF = {"dtype": "bfloat16"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 124M": ("gpt2", {**HALF, "batch": 8}),
    "LLaMA 1B, 2 layers": ("llama", {**HALF, "layers": 2, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192}),
    "BERT-large, 2 layers": ("bert", {**HALF, "layers": 2, "width": 1024, "heads": 16, "hidden": 4096}),
}
"""Name to the model of the zoo and its settings."""

FAST = Options(numerics="fast")

REST_OF_ROWS = r"    for start in range\(\d+ // COLUMNS.*\n(?:        .*\n)*"
"""The loop over what is left of rows behind whole pieces, which have a loop of their own."""


def worker(name: str) -> dict[str, Any]:
    """Count and compile the kernels of one model."""
    graph = captured(_workload(name), whole=False)
    rival = _rival(graph)
    before = launches(graph)
    after = launches(grouped(graph))
    step = captured(_workload(name), whole=True)
    step_before = launches(step)
    step = grouped(step)
    alike = kernels_of(step)
    return {
        "model": name,
        "groups": sum(map(len, alike.values())),
        "launches": {"before": before, "after": after},
        "step launches": {"before": step_before, "after": launches(step)},
        "torch.compile": rival,
        "kernels": [_kernel(groups) for groups in alike.values()],
    }


def _rival(graph: TrainGraph) -> dict[str, Any]:
    """What Inductor would launch; why not, where it cannot lower constants that lie on a GPU that is not here."""
    try:
        return inductor_kernels.kernels(graph)
    except RuntimeError as error:
        return {"refused": str(error).splitlines()[0]}


def captured(work: Workload, *, whole: bool) -> TrainGraph:
    """The graph of a model, or of its whole step, on fake tensors of a GPU."""
    graph = capture(work, forward_backward=not whole, device=torch.device("cuda"))
    return normalize.apply(graph, normalize.decide(graph, FAST))


def _workload(name: str) -> Workload:
    if name in MODELS:
        return zoo.make(*MODELS[name])
    work = make(name, HALF["dtype"])
    return Workload(name, work.model, work.batch, work.loss)


def grouped(graph: TrainGraph) -> TrainGraph:
    """The same with kernels."""
    for each in (masks, scores, padding, fuse):
        graph = each.apply(graph, each.decide(graph, FAST))
    return graph


def kernels_of(graph: TrainGraph) -> dict[str, list[FusedKernel]]:
    """The kernels of a graph, those that differ in names alone together."""
    alike: dict[str, list[FusedKernel]] = {}
    for node in operators(graph.graph):
        if isinstance(node.target, FusedKernel):
            alike.setdefault(nameless(node.target.text.source), []).append(node.target)
    return alike


def launches(graph: TrainGraph) -> int:
    """How many kernels and calls of operators a graph launches; views launch nothing."""
    return sum(getattr(n.target, "launches", 1) for n in operators(graph.graph) if not ops.is_view(n.target))


def _kernel(groups: list[FusedKernel]) -> dict[str, Any]:
    group = groups[0]
    moved, least = bytes_moved(group)
    return {
        "operators": group.title,
        "count": len(groups),
        "rows": group.matrix.rows,
        "columns": group.matrix.columns,
        "moved": moved,
        "least": least,
        "reads": group.text.reads,
        "partials": 0 if group.text.partials is None else group.text.partials.nbytes,
        "takes": [asdict(one) for target in TARGETS for one in compiled(group, target)],
    }


def bytes_moved(group: FusedKernel) -> tuple[Bytes, Bytes]:
    """Return the bytes that a kernel moves by its text, and those of its operands and results, each once.

    An operand that the text does not load counts nothing. What is the same for several rows is in a cache when it is
    loaded again; so is what a program loads once more at other columns of its rows, and a slice of another operand.
    """
    text, loads = group.text, _loads(group)
    moved = least = 0
    for node, count in loads.items():
        if count and not any(_is_slice(node, other) for other in loads):
            once = _distinct(only_tensor(node))
            moved, least = moved + count * once, least + once
    inputs = placeholders(group.body)
    stored = sum(_distinct(only_tensor(node)) for node in (*group.results, *(inputs[at] for at in group.writes)))
    partials = 0 if text.partials is None else 2 * text.partials.nbytes
    return moved + stored + partials, least + stored


def _loads(group: FusedKernel) -> dict[fx.Node, int]:
    """Every operand that is a tensor, and how many lines of the kernel load it."""
    inputs, form = placeholders(group.body), group.form if isinstance(group, MultiTensorKernel) else group
    head = re.search(rf"def {form.text.function}\(([^)]*)\)", form.text.source)
    assert head is not None, f"{form.text.function} has no head"
    names = head[1].split(", ")[: len(placeholders(form.body))]
    once = re.sub(REST_OF_ROWS, "", form.text.source)
    counts = [len(re.findall(rf"tl\.load\({name}\b", once)) for name in names]
    if moves_columns(group.nodes):
        counts = [min(count, 1) for count in counts]
    parts = [part.arguments for part in group.parts] if isinstance(group, MultiTensorKernel) else [range(len(inputs))]
    loads = {inputs[at]: count for part in parts for at, count in zip(part, counts, strict=True)}
    return {node: count for node, count in loads.items() if not is_number(node)}


def _is_slice(node: fx.Node, other: fx.Node) -> bool:
    """Whether an operand has some columns of another one."""
    part, whole = only_tensor(node), only_tensor(other)
    return ids_of(node) == ids_of(other) and columns_before(part, whole) is not None


def _distinct(tensor: torch.Tensor) -> Bytes:
    """Bytes of the elements of a tensor, each once where a dimension is expanded."""
    sizes = (size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = 1
    for size in sizes:
        count *= int(size)
    return count * tensor.itemsize


def main() -> None:
    """Count and compile for every model; print a line for each; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS, *WORKLOADS])
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker)))
        return
    for name in options.models:
        row = fresh(__file__, name, threads=1)
        print(json.dumps({key: value for key, value in row.items() if key != "kernels"}), flush=True)
        save("kernels", [row], __doc__ or "")


if __name__ == "__main__":
    main()
