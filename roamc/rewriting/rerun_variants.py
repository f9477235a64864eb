"""Variants to call for a rerun, where the operator itself cannot be called again: one row of ``VARIANTS`` each.

A batch norm in training also gives new running statistics, for which it reads the old ones. By the time of a rerun
these have been replaced. The normalised result does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from roamc.compat import OpOverload
from roamc.graph import Phase, SamePlan, tensors_of
from roamc.graph.keep import is_kept
from roamc.graph.memory import MemoryModel, Operator
from roamc.graph.ranks import runs_together
from roamc.operators import ops
from roamc.operators.random import save_rng_state

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Target, positional arguments and keyword arguments of a call; a node stands for each tensor."""

aten = torch.ops.aten


def recompute_variant(node: fx.Node) -> Call:
    """Return target, positional arguments and keyword arguments of another run of ``node``.

    The results of that run are the first results of ``node``; :func:`results_of` says how many.
    """
    variant = VARIANTS.get(node.target)
    return variant(node) if variant is not None else (node.target, node.args, dict(node.kwargs))


def _without_statistics(node: fx.Node) -> Call:
    x, weight, bias, _, _, training, momentum, epsilon = node.args
    if not training:
        return node.target, node.args, dict(node.kwargs)
    return aten._native_batch_norm_legit.no_stats, (x, weight, bias, True, momentum, epsilon), {}


VARIANTS: dict[Any, Callable[[fx.Node], Call]] = {
    aten._native_batch_norm_legit.default: _without_statistics,
    aten._native_batch_norm_legit_functional.default: _without_statistics,
}
"""Target of a node to the function that returns the call to make for another run of the node."""


def results_of(target: Any, first: fx.Node) -> int:
    """Return how many results another run of the node ``first`` has.

    Args:
        target: the target that :func:`recompute_variant` returns for ``first``.
        first: the node of the first run, with its fake value in ``meta["val"]``.
    """
    value = first.meta["val"]
    if isinstance(value, torch.Tensor):
        return 1
    return len(target._schema.returns) if isinstance(target, OpOverload) and target is not first.target else len(value)


def may_run_again(node: fx.Node, same_plan: Sequence[SamePlan] = ()) -> bool:
    """Return whether another run of the operator ``node`` gives the same bits, and writes no argument.

    The inputs and, for a random operator, the state of the generator are the same in both runs.

    Args:
        node: the operator.
        same_plan: of its graph; collectives of these groups may run again.
    """
    target, _, _ = recompute_variant(node)
    rule = ops.rule(target)
    repeats = rule.recomputable or rule.random or runs_together(node, same_plan)
    return repeats and not rule.mutates and node.target is not save_rng_state


def must_stay(operator: Operator) -> bool:
    """Return whether no rerun and no codec may free what ``operator`` makes, in forward inside :func:`roamc.keep`."""
    return operator.phase is Phase.FORWARD and is_kept(operator.node)


def reads_of(memory: MemoryModel, node: fx.Node) -> set[int]:
    """Return the indices of the storages that the arguments of the operator ``node`` lie in."""
    return {memory.owner[argument.name, at] for argument in node.all_input_nodes for at, _ in tensors_of(argument)}


def reads_again(memory: MemoryModel, node: fx.Node) -> set[int]:
    """Return the indices of the storages that the arguments of another run of ``node`` lie in."""
    _, args, kwargs = recompute_variant(node)
    read: set[int] = set()
    fx.map_arg(
        (args, kwargs), lambda argument: read.update(memory.owner[argument.name, at] for at, _ in tensors_of(argument))
    )
    return read


def makes_again(memory: MemoryModel, operator: Operator) -> set[int]:
    """Return the indices of the storages that another run of ``operator`` would make, if it may run again."""
    target, _, _ = recompute_variant(operator.node)
    count = results_of(target, operator.node)
    results = {memory.owner[operator.node.name, at] for at, _ in tensors_of(operator.node) if at < count}
    return results.intersection(operator.births)
