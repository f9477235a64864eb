"""scores: on a GPU, a negative log-likelihood reads the scores of its labels alone, which a kernel picks.

    rewrite:  l, n = aten.nll_loss_forward(p, labels)  -->  s = roamc.label_scores(p, labels)
                                                            l, n = roamc.nll_of_scores(s, labels)
    checks:   every loss that the decision names is of rows of classes, on a GPU and without weights of classes

The log-probabilities ``p`` of a language model are a float32 for every token and word: for 16,384 tokens and 50,257
words 3.3 GB. ``s`` has a number for each token. Pass ``fuse`` makes it in the kernel of ``p``, and ``p`` once more
inside the kernel of the gradient; then ``p`` has no memory. These kernels sum in another order than ATen, so that the
pass decides nothing without ``numerics="fast"``; ``s`` alone keeps the bits of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from roamc.errors import PlanError
from roamc.graph import TrainGraph, copied, main_device, operators
from roamc.graph.rewrite import Writer, mode_of
from roamc.operators.scores import label_scores, nll_of_scores
from roamc.options import Options
from roamc.rewriting.versions import up_to_date

NAME = "scores"

aten = torch.ops.aten

DEVICES = frozenset({"cuda"})
"""Types of the devices whose groups sum along rows in registers."""


@dataclass(frozen=True)
class Decision:
    """A decision names the losses that read the scores of their labels.

    Attributes:
        losses: names of the operators, in graph order.
    """

    losses: tuple[str, ...] = ()


def decide(graph: TrainGraph, options: Options) -> Decision:
    """Find the losses that can read the scores of their labels; ``graph`` stays as it is.

    The decision is empty unless ``options.numerics`` is "fast" and the graph is on a GPU; and where pass ``fuse``,
    without which log-probabilities would be stored all the same, is left out.
    """
    if options.numerics != "fast" or "fuse" in options.disable or main_device(graph).type not in DEVICES:
        return Decision()
    return Decision(tuple(node.name for node in operators(graph.graph) if _fits(node)))


def apply(graph: TrainGraph, decision: Decision) -> TrainGraph:
    """Return ``graph`` with the losses split, on a new FX graph; the given one stays as it is.

    Raises:
        PlanError: a name in the decision is no operator of the graph, or no such loss.
    """
    if not decision.losses:
        return graph
    graph = copied(graph)
    nodes = {node.name: node for node in operators(graph.graph)}
    mode = mode_of(graph.graph)
    assert mode is not None, "a graph on a GPU has tensors"
    writer = Writer(graph.graph, mode, next(iter(graph.phase.values())))
    for name in decision.losses:
        if name not in nodes or not _fits(nodes[name]):
            raise PlanError(f"{name!r} is no loss of rows of classes, without weights and on a GPU, in this graph")
        loss = nodes[name]
        scores, labels, _, reduction, ignored = loss.args
        writer.current = graph.phase[name]
        picked = writer.insert(loss, label_scores, scores, labels, [1], False, ignored)
        loss.target = nll_of_scores
        loss.args = picked, labels, scores.meta["val"].shape[1], reduction, ignored  # type: ignore[union-attr]
    return up_to_date(graph, {**graph.phase, **writer.phase})


def _fits(node: fx.Node) -> bool:
    """Whether this is a loss of rows of classes, without weights of classes, on a device of groups that sum."""
    if node.target is not aten.nll_loss_forward.default or node.kwargs or node.args[2] is not None:
        return False
    scores: torch.Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    return scores.dim() == 2 and bool(scores.numel()) and scores.device.type in DEVICES
