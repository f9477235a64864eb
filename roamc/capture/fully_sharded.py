"""``fully_shard`` (FSDP2) in a training step: its gathers and reductions as operators of the graph.

    in front of the first reader in forward    all_gather of the parts of all ranks, in the dtype of the policy
    in front of the first reader in backward   the same again, where fully_shard reshards after forward
    behind each gradient                       reduce_scatter: the mean over the ranks, of which each keeps its part
    clipping, update                           on parts, as for any DTensor, see :mod:`roamc.capture.parts`

The hooks of ``fully_shard`` do not run in a step. Each parameter is gathered, and its gradient reduced, by itself: an
order under a budget may place each where memory is lowest, as long as all ranks start them in the same sequence, which
:func:`agreed` has compared. What a policy of mixed precision casts is cast in the graph. A part that is shorter than
others, or empty, is padded with zeros.

While the step is traced, gathers stand in front of all operators and reductions behind all; :func:`place` moves them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from roamc import compat
from roamc.capture.sharing import base_of
from roamc.compat import identity
from roamc.compat_fsdp import Sharding, gathered_tensor, settings_of, shardings_of
from roamc.errors import CaptureError
from roamc.exchange import difference, first_difference
from roamc.graph import Phase, copy_origin, operators
from roamc.graph.rewrite import derived, mode_of
from roamc.operators import ops

EAGER = (
    "eager's numbers are of this step's own gathers: the hooks of fully_shard hold more in eager, whole layers in "
    "buffers of their own, copied out, and the next one early"
)
"""Note on a step whose parameters lie in parts: eager's peak was twice as high in a net of four layers."""

COLLECTIVES: Any = torch.ops.roamc_collective
GATHER, REDUCE = "gather", "reduce"
MARK = "fully_shard"
"""Key in the ``meta`` of a node that gathers a parameter or reduces its gradient: (GATHER or REDUCE, parameter)."""


def shardings(model: nn.Module) -> dict[str, Sharding]:
    """Return how ``fully_shard`` holds each of the parameters that it has in parts, by their names in ``model``.

    Raises:
        CaptureError: a setting of a module needs its own hooks, or a parameter has hooks, which eager never runs.
    """
    check_settings(model)
    by_id = shardings_of(model)
    by_name = {name: by_id[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in by_id}
    for name, parameter in model.named_parameters():
        if name in by_name and parameter._backward_hooks:
            raise CaptureError(
                f"parameter {name!r} has a gradient hook, which fully_shard never calls: register it on a tensor "
                "inside of the model, or remove it"
            )
        if name in by_name and by_name[name].reduction == "other":
            raise CaptureError(
                f"the gradient of {name!r} is divided by a factor of yours (set_gradient_divide_factor), which a "
                "planned step does by sums alone: call set_force_sum_reduction_for_comms(True) as well"
            )
    return by_name


def check_settings(model: nn.Module) -> None:
    """Refuse settings of ``fully_shard`` that are no part of a graph; names the first.

    Raises:
        CaptureError: says what the module does, and which ways in take it.
    """
    for settings in settings_of(model):
        for words, is_set in settings.items():
            if is_set:
                raise CaptureError(
                    f"a fully_shard module {words}, which train_step does not support: leave it out, or use "
                    "roamc.optimize(model) with an optimizer of torch.optim"
                )


def whole(part: torch.Tensor, name: str, sharding: Sharding) -> torch.Tensor:
    """Trace the whole of a parameter; its gradient is that of ``part``, the mean over the ranks.

    Args:
        part: the traced part of this rank.
        name: of the parameter.
        sharding: how it is held.
    """
    gathered: torch.Tensor = _Whole.apply(part, name, sharding)  # type: ignore[no-untyped-call]
    return gathered_tensor(gathered, sharding)


class _Whole(torch.autograd.Function):
    """The parts of all ranks as one tensor; its gradient is reduced over the ranks, and each gets its part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, name: str, sharding: Sharding) -> torch.Tensor:
        ctx.part, ctx.name, ctx.sharding = (part.shape, part.dtype), name, sharding
        with _marked(GATHER, name):
            return _gathered(part, sharding)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        with _marked(REDUCE, ctx.name):
            return _reduced(grads[0], ctx.sharding, *ctx.part), None, None


def _gathered(part: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    dim, ranks = sharding.dim, sharding.ranks
    part = part.to(sharding.dtype)
    if not sharding.group:
        return part.view_as(part)
    gathered = COLLECTIVES.all_gather_into_tensor(_padded(part, sharding.rows, dim), ranks, sharding.group)
    if dim:
        gathered = torch.cat(gathered.chunk(ranks), dim)
    padded: torch.Tensor = gathered
    return padded.narrow(dim, 0, sharding.shape[dim]) if padded.shape != sharding.shape else padded


def _reduced(grad: torch.Tensor, sharding: Sharding, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Operator by operator what fully_shard does to the gradients of a group, in one buffer for all of them."""
    dim, ranks = sharding.dim, sharding.ranks
    part = grad.to(sharding.reduced_in)
    if sharding.group:
        part = torch.cat(part.chunk(ranks, dim)) if dim else _padded(part, sharding.rows * ranks, 0).contiguous()
    if sharding.before not in (None, 1):
        part = part / sharding.before
    if sharding.group:
        part = COLLECTIVES.reduce_scatter_tensor(part, sharding.reduction, ranks, sharding.reduced_by)
    if sharding.copies_group:
        part = COLLECTIVES.all_reduce(part, sharding.reduction, sharding.copies_group)
    if sharding.after not in (None, 1):
        part = part / sharding.after
    part = part.to(dtype)
    return part.narrow(dim, 0, shape[dim]) if part.shape != shape else part


def _padded(tensor: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """``tensor`` with zeros behind it up to ``length`` along ``dim``."""
    missing = length - tensor.shape[dim]
    return F.pad(tensor, [0, 0] * (tensor.dim() - dim - 1) + [0, missing]) if missing else tensor


@contextlib.contextmanager
def _marked(kind: str, name: str) -> Iterator[None]:
    """Mark all nodes that are traced within this context."""
    graph = compat.graph_so_far()
    last = next(iter(reversed(graph.nodes)), None)
    yield
    for node in reversed(graph.nodes):
        if node is last:
            break
        node.meta[MARK] = (kind, name)


def place(graph: fx.Graph, phase: Mapping[str, Phase], by_name: Mapping[str, Sharding]) -> None:
    """Move, in ``graph`` itself, gathers to their first readers and reductions to their gradients.

    A parameter that backward gathers again gets a second gather, in front of its first reader there, which all readers
    in backward read. Gathers that nobody reads are removed.

    Args:
        graph: as traced: forward, loss, backward.
        phase: name of each operator to FORWARD or BACKWARD.
        by_name: name of each parameter in parts to how it is held.

    Raises:
        CaptureError: the step writes to a gathered parameter.
    """
    chains: dict[tuple[str, str], list[fx.Node]] = {}
    for node in graph.nodes:
        if MARK in node.meta:
            chains.setdefault(node.meta[MARK], []).append(node)
    for name, sharding in by_name.items():
        chain = chains.get((GATHER, name))
        if chain:
            _check_unwritten(graph, chain[-1], name)
            if sharding.gathered_again and sharding.group:
                _gather_again(graph, phase, chain)
            _move_to_first_reader(chain)
    for (kind, _), chain in chains.items():
        if kind == REDUCE:
            _move_behind_gradient(chain, phase)


def _check_unwritten(graph: fx.Graph, gathered: fx.Node, name: str) -> None:
    memory = identity(gathered.meta["val"])
    for node in operators(graph):
        for written in ops.mutated_arguments(node):
            if isinstance(written.meta["val"], torch.Tensor) and identity(written.meta["val"]) == memory:
                raise CaptureError(
                    f"the step writes to parameter {name!r}, of which fully_shard gathers a copy: the write would be "
                    "lost, as it is in eager; write to it between steps"
                )


def _move_to_first_reader(chain: list[fx.Node]) -> None:
    inside = set(chain)
    readers = {user for node in chain for user in node.users} - inside
    if not readers:
        for node in reversed(chain):
            chain[0].graph.erase_node(node)
        return
    first = min(readers)
    for node in chain:
        first.prepend(node)
        copy_origin(node, first)


def _move_behind_gradient(chain: list[fx.Node], phase: Mapping[str, Phase]) -> None:
    inside = set(chain)
    sources = {source for node in chain for source in node.all_input_nodes} - inside
    last = max(sources)
    if phase.get(last.name) is Phase.BACKWARD:  # else backward gives an input of the step, or what forward has computed
        for node in reversed(chain):
            last.append(node)


def _gather_again(graph: fx.Graph, phase: Mapping[str, Phase], chain: list[fx.Node]) -> None:
    """Let readers in backward read a second run of ``chain``, the gather of a parameter, and of views of its result."""
    mode = mode_of(graph)
    assert mode is not None  # the chain has tensors
    first = set(chain)  # nodes of the first whole that forward makes: the chain, and views of its result
    again: dict[fx.Node, fx.Node] = {}
    moved: set[fx.Node] = set()  # views that backward makes, of the second whole
    for node in list(graph.nodes):
        base = base_of(node)
        if node in first or node.op == "output":
            continue
        if phase.get(node.name) is not Phase.BACKWARD:
            if base in first and (base is chain[-1] or base not in chain):
                first.add(node)
            continue
        stale = [source for source in node.all_input_nodes if source in first]
        for source in stale:
            with graph.inserting_before(node):
                _copied(source, first, again, mode)
        if stale:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: again.get(n, n))
        if base is not None and (base in first or base in moved):
            node.meta["val"] = derived(node, mode)
            moved.add(node)


def _copied(node: fx.Node, first: set[fx.Node], again: dict[fx.Node, fx.Node], mode: Any) -> fx.Node:
    """The second run of ``node``, behind those of what it reads; made at the graph's insertion point where missing."""
    if node not in first:
        return node
    if node not in again:
        for source in node.all_input_nodes:
            _copied(source, first, again, mode)
        copy = node.graph.node_copy(node, lambda source: again.get(source, source))
        copy.meta["val"] = derived(copy, mode)
        again[node] = copy
    return again[node]


def sequence(graph: fx.Graph) -> tuple[str, ...]:
    """Return what is gathered and reduced, parameter by parameter, in the order in which ranks start it."""
    sent = (node for node in operators(graph) if MARK in node.meta and ops.rule(node.target).collective)
    return tuple(" ".join(node.meta[MARK]) for node in sent)


def groups_of(by_name: Mapping[str, Sharding]) -> tuple[str, ...]:
    """Return the names of the groups of ranks that have parts of parameters, then of those that have copies.

    Each in the order of the parameters, which is the same on all ranks; names of groups are not.
    """
    parts = [sharding.group for sharding in by_name.values()]
    copies = [sharding.copies_group for sharding in by_name.values()]
    return tuple(dict.fromkeys(group for group in (*parts, *copies) if group))


def agreed(groups: Sequence[str], mine: Sequence[str], name: str) -> None:
    """Compare the sequence of gathers and reductions with the other ranks; all ranks must call this together.

    Args:
        groups: the names of the groups of ranks.
        mine: :func:`sequence` of this rank's graph.
        name: of the graph, for the message.

    Raises:
        CaptureError: the sequences of two ranks differ; raised on every rank, names the first difference.
        RanksError: a rank does not come to compare.
    """
    for group in groups:
        if (differs := first_difference(group, mine, name)) is not None:
            other, first, second = differs
            raise CaptureError(
                "the ranks of a fully_shard model do not send the same parameters in the same order: the first rank "
                f"{first!r}, {other} {second!r}; let all take the same way through the model"
            )


def check_sequence(before: Sequence[str], latest: Sequence[str]) -> None:
    """Refuse a batch that gathers or reduces other parameters than the first one did, or in another order.

    Raises:
        CaptureError: names the first difference.
    """
    if before and tuple(before) != tuple(latest):
        first, second = difference(before, latest)
        raise CaptureError(
            f"this batch takes another way through a fully_shard model than the first one did ({second!r} in the place "
            f"of {first!r}); ranks would wait for each other: let every step use the same parameters"
        )
