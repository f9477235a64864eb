"""Korthikanti et al. (arXiv 2205.05198), table 5: seconds of whole iterations, from planned graphs; nothing runs.

    python -m benchmarks.shard_iteration [MODEL ...]

A stage of the pipeline is its layers, the embedding in the first and the head with its loss in the last, each split
among the ranks as in the paper (vocabulary-parallel), and what it sends to its neighbours. Times of layers and ends are
what a graph with them has more than one without. Of m micro-batches and stages with v parts each,

    iteration = m longest + (sum of all stages - longest) / v + update                Times.iteration()

Gradients are summed over the micro-batches in float32 (Megatron-LM's main_grad): to add one to its sum reads 4 bytes
and writes 4, where a planned graph, which is one micro-batch, writes 2. A layer that the paper times alone is taken to
sum nothing.

Two constants of the profile a100 are fitted to two values of the paper, forward and backward of a layer of the 22 G
model (7.7 and 11.9 ms, table 4): the rate of products and the bandwidth of memory. Links, launches and all else are the
profile's. Nothing is fitted to the iterations.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks._measure import save
from benchmarks.shard import NAMES, PROFILE, ROWS, Row, Stack, sizes_of
from benchmarks.shard_table import ITERATIONS, RANKS, Iteration
from roamc.budget import NO_TIME
from roamc.capture.tensor_parallel import enter, leave, summed
from roamc.cli.zoo import RECIPES
from roamc.cost import DeviceProfile, load_profile, prices
from roamc.cost.profile import NETWORK, NODE
from roamc.frontends.mesh import TP, Mesh, on_mesh
from roamc.frontends.workload import Workload, capture
from roamc.graph import Phase, Role, TrainGraph, placeholders
from roamc.operators.collectives import FUNCTIONAL
from roamc.options import parse_options
from roamc.planning import search
from roamc.planning.planned import Planned
from roamc.units import Seconds

LAYER_22B = (7.7e-3, 11.9e-3)
"""Seconds of forward and of backward of a layer of the 22 G model, tensor parallelism alone; table 4 of the paper."""
OF = {row.name: row for row in ROWS}
PLANNED = ("full", "both")
VOCAB = 51200
COPIED = 6
"""Bytes that copy a parameter from float32, in which it is updated, to 16 bits."""
SUMMED = 4 + 4 - 2
"""Bytes that adding an element of a gradient to its sum in float32 takes more than writing it in 16 bits."""


class _Loss(torch.autograd.Function):
    """Cross entropy of logits of which each rank has some columns, as Megatron-LM has it, for the first rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.float()
        highest = FUNCTIONAL.wait_tensor.default(FUNCTIONAL.all_reduce.default(logits.amax(-1), "max", TP))
        powers = (logits - highest.unsqueeze(-1)).exp()
        total = summed(powers.sum(-1), TP)
        ctx.save_for_backward(powers / total.unsqueeze(-1), targets)
        mine = (targets < logits.shape[-1]).float()
        picked = logits.gather(-1, targets.clamp_max(logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        return (total.log() + highest - summed(picked * mine, TP)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        softmax, targets = ctx.saved_tensors
        mine = (targets < softmax.shape[-1]).float().unsqueeze(-1)
        one = torch.zeros_like(softmax).scatter(-1, targets.clamp_max(softmax.shape[-1] - 1).unsqueeze(-1), mine)
        return ((softmax - one) * (grad / targets.numel())).to(torch.bfloat16), None


class Ended(nn.Module):
    """Some layers of one rank with the embedding in front, or norm, head and loss behind."""

    def __init__(self, sizes: dict[str, Any], layers: int, row: Row, *, first: bool, last: bool) -> None:
        super().__init__()
        width, seq = sizes["width"], sizes["seq"]
        self.blocks = Stack(sizes, layers, row.again)
        self.tokens = nn.Embedding(VOCAB // RANKS, width) if first else None
        self.places = nn.Embedding(seq, width) if first else None
        self.drop = nn.Dropout(sizes["dropout"])
        self.norm = nn.LayerNorm(width) if last else None
        self.head = nn.Linear(width, VOCAB // RANKS, bias=False) if last else None

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss, or the residual stream, for tokens (batch, seq), or for ``x`` (batch, seq, width)."""
        if self.tokens is not None and self.places is not None:
            size = self.tokens.num_embeddings
            rows = self.tokens(tokens.clamp_max(size - 1)) * (tokens < size).unsqueeze(-1)
            x = self.drop(leave(rows, TP) + self.places.weight[: x.shape[1]])
        x = self.blocks(x)
        if self.norm is None or self.head is None:
            return x
        loss: Tensor = _Loss.apply(self.head(enter(self.norm(x), TP)), tokens)  # type: ignore[no-untyped-call]
        return loss


def graph_of(sizes: dict[str, Any], layers: int, row: Row, *, first: bool = False, last: bool = False) -> TrainGraph:
    """Forward and backward of one rank's part of ``layers`` layers of a stage, with an end, for a GPU."""
    shape = (sizes["batch"], sizes["seq"])
    with torch.device("meta"):
        model = Ended(sizes, layers, row, first=first, last=last).bfloat16()
        model.blocks.hidden = model.blocks.hidden.bool()
        x = torch.zeros((*shape, sizes["width"]), dtype=torch.bfloat16, requires_grad=not first)
        tokens = torch.zeros(shape, dtype=torch.int64)
    plan = {f"blocks.{name}": word for name, word in RECIPES[NAMES[0]].tp_plan.items()}
    workload = Workload("stage", model, (x, tokens), tp_plan=plan)
    return capture(on_mesh(workload, Mesh(tp=RANKS)), device=torch.device("cuda"))


def planned(sizes: dict[str, Any], layers: int, row: Row, *, first: bool = False, last: bool = False) -> Planned:
    """The plan of that graph; of the profile that is not fitted, whose rates decide little with "+0%"."""
    with Mesh(tp=RANKS).planned_for():
        graph = graph_of(sizes, layers, row, first=first, last=last)
        return search.run(graph, parse_options({"shard": row.shard, "profile": PROFILE, "memory_budget": NO_TIME}))


def seconds(planned_graph: Planned, profile: DeviceProfile, *phases: Phase) -> Seconds:
    """Predicted seconds of the operators of some phases of a planned graph; of all where none is named."""
    with Mesh(tp=RANKS).planned_for():
        price = prices(planned_graph.graph, profile)
    return sum(taken for name, taken in price.items() if not phases or planned_graph.graph.phase[name] in phases)


def layer_seconds(shorter: Planned, longer: Planned, profile: DeviceProfile) -> tuple[Seconds, Seconds]:
    """Seconds of forward and of backward of what ``longer`` has more than ``shorter``."""
    forward, backward = (
        seconds(longer, profile, phase) - seconds(shorter, profile, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    return forward, backward


def fitted(
    shorter: Planned, longer: Planned, layer: tuple[Seconds, Seconds] = LAYER_22B
) -> tuple[DeviceProfile, dict[str, float]]:
    """Fit two constants of the profile to the time of a layer, by Newton's method.

    Args:
        shorter: some layers.
        longer: one more.
        layer: seconds of forward and of backward of that one.

    Returns:
        The profile, and by what each constant was multiplied: "flops" of products, "bandwidth" of memory.
    """
    rates = load_profile(profile=PROFILE)
    slower = np.ones(2)  # times are nearly linear in what a FLOP and a byte take

    def off(slower: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array(layer_seconds(shorter, longer, scaled(rates, *map(float, 1 / slower)))) - layer

    for _ in range(8):
        slopes = [(off(slower + step) - off(slower)) / 1e-4 for step in 1e-4 * np.eye(2)]
        slower = slower - np.linalg.solve(np.array(slopes).T, off(slower))
    flops, bandwidth = map(float, 1 / slower)
    return scaled(rates, flops, bandwidth), {"flops": flops, "bandwidth": bandwidth}


def scaled(profile: DeviceProfile, flops: float, bandwidth: float) -> DeviceProfile:
    """``profile`` with the rates of all products, and the bandwidths of memory and cache, multiplied."""
    rates = {kind: {dtype: flops * rate for dtype, rate in each.items()} for kind, each in profile.flops.items()}
    return dataclasses.replace(
        profile,
        flops=rates,
        bandwidth=bandwidth * profile.bandwidth,
        cache_bandwidth=bandwidth * profile.cache_bandwidth,
    )


@dataclass(frozen=True)
class Times:
    """Seconds of the parts of an iteration, of one micro-batch and rank but for the update.

    Attributes:
        layer: forward and backward of a layer; here and below, gradients are added to their sums.
        embedding: of the embedding.
        head: of the last norm, the head and the loss.
        sent: what a part of a stage sends to the next and, backward, to the one before.
        update: of the optimizer, in the first stage, which has the embedding and most parameters.
    """

    layer: Seconds
    embedding: Seconds
    head: Seconds
    sent: Seconds
    update: Seconds

    def iteration(self, shape: Iteration) -> Seconds:
        """Return the seconds of an iteration: the longest stage's work, filling and emptying the pipeline, the update.

        Micro-batches go through the stages one behind the other (1F1B), and where a stage has several parts of the
        model, the pipeline stands still for as many times less (Narayanan et al., arXiv 2104.04473, section 2.2).
        """
        stage = shape.layers / shape.stages * self.layer + (shape.parts * self.sent if shape.stages > 1 else 0.0)
        ends = {0: self.embedding, shape.stages - 1: self.head} if shape.stages > 1 else {0: self.embedding + self.head}
        stages = [stage + ends.get(at, 0.0) for at in range(shape.stages)]
        longest = max(stages)
        return shape.batches * longest + (sum(stages) - longest) / shape.parts + self.update


def times_of(name: str, row: Row, profile: DeviceProfile) -> Times:
    """The times of a model's parts by ``profile``."""
    sizes, shape = sizes_of(name), ITERATIONS[name]
    two = planned(sizes, 2, row)
    layer, embedding, head = (
        Part.between(two, longer, profile)
        for longer in (
            planned(sizes, 3, row),
            planned(sizes, 2, row, first=True),
            planned(sizes, 2, row, last=True),
        )
    )
    in_first_stage = shape.layers // shape.stages * layer.parameters + embedding.parameters
    return Times(
        layer=layer.seconds,
        embedding=embedding.seconds,
        head=head.seconds,
        sent=sent_seconds(sizes, row, profile),
        update=update_seconds(in_first_stage, profile),
    )


@dataclass(frozen=True)
class Part:
    """A part of a stage: a layer, the embedding, or norm, head and loss.

    Attributes:
        parameters: how many elements one rank has.
        seconds: of forward, backward and of adding the gradients to their sums.
    """

    parameters: int
    seconds: Seconds

    @staticmethod
    def between(shorter: Planned, longer: Planned, profile: DeviceProfile) -> Part:
        """Return what ``longer`` has more than ``shorter``."""
        parameters = parameter_count(longer) - parameter_count(shorter)
        sums = parameters * SUMMED / profile.bandwidth
        return Part(parameters, seconds(longer, profile) - seconds(shorter, profile) + sums)


def parameter_count(planned_graph: Planned) -> int:
    """Elements of the parameters of a planned graph."""
    graph = planned_graph.graph
    nodes = {node.name: node for node in placeholders(graph.graph)}
    return sum(nodes[port.name].meta["val"].numel() for port in graph.inputs if port.role is Role.PARAMETER)


def sent_seconds(sizes: Mapping[str, Any], row: Row, profile: DeviceProfile) -> Seconds:
    """Seconds to hand a micro-batch to the next stage and its gradient to the one before.

    A rank sends its share of the tokens, which the others of its group gather where they need them whole
    (arXiv 2104.04473, section 4.1).
    """
    nbytes = 2 * sizes["seq"] * sizes["batch"] * sizes["width"]
    between, inside = profile.links[NETWORK], profile.links[NODE]
    gathered = (RANKS - 1) * (inside["latency"] + nbytes / RANKS / inside["bandwidth"])
    once = between["latency"] + nbytes / RANKS / between["bandwidth"]
    return 2 * (once + (0.0 if row.shard == "sequence" else gathered))


class _Flat(nn.Module):
    """Parameters of one rank in one piece, in float32, as Megatron-LM updates them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(count))

    def forward(self, gradient: Tensor) -> Tensor:
        """Return a scalar whose gradient is ``gradient``, of the shape of the parameters."""
        return (self.weights * gradient).sum()


def update_seconds(count: int, profile: DeviceProfile) -> Seconds:
    """Seconds of AdamW with clipping for ``count`` parameters in float32, and of their copy to 16 bits."""
    with torch.device("meta"):
        workload = Workload("update", _Flat(count), (torch.zeros(count),), lambda model, gradient: model(gradient))
    graph = capture(workload, clip_grad_norm=1.0, device=torch.device("cuda"))
    planned_update = search.run(graph, parse_options({"profile": PROFILE, "memory_budget": NO_TIME}))
    return seconds(planned_update, profile, Phase.UPDATE) + count * COPIED / profile.bandwidth


def rows(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each model and each of PLANNED."""
    sizes = sizes_of(NAMES[0])
    profile, factors = fitted(*(planned(sizes, layers, OF["t"]) for layers in (2, 3)))
    for name in names:
        for kind in PLANNED:
            times = times_of(name, OF[kind], profile)
            yield {
                "model": name,
                "kind": f"t={RANKS} {kind}, iteration",
                "row": kind,
                "ranks": RANKS,
                "factors": factors,
                "parts": {part: 1e3 * taken for part, taken in dataclasses.asdict(times).items()},
                "iteration": times.iteration(ITERATIONS[name]),
            }


def main() -> None:
    """Plan the stages; print a line each; write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(NAMES), help=f"of {', '.join(NAMES)}; all by default")
    for row in rows(parser.parse_args().models):
        parts = ", ".join(f"{part} {taken:.2f}" for part, taken in row["parts"].items())
        print(f"{row['model']:<12}{row['kind']:<24}{row['iteration']:8.2f} s; ms: {parts}", flush=True)
        save("shard", [row], "plans for the shipped profile a100; nothing was run", timeless=True)


if __name__ == "__main__":
    main()
