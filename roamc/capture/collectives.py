"""Start and wait of a functional collective, put together as one operator.

    before                                      after
    y = _c10d_functional.all_reduce(x, ...)     y = roamc_collective.all_reduce(x, ...)
    a = add(x, 1)                               a = add(x, 1)
    z = _c10d_functional.wait_tensor(y)         b = mul(y, a)
    b = mul(z, a)

Between start and wait ``x`` must keep its bytes and ``y`` has no value, which no schema says; as one operator, at the
place of the start, there is no such time. Collectives keep their order, so all ranks still issue the same ones in turn.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from roamc.compat import FakeTensorMode, OpOverload
from roamc.errors import CaptureError
from roamc.graph import attribute
from roamc.graph.fingerprint import is_own_part
from roamc.graph.rewrite import derived, mode_of
from roamc.operators import ops
from roamc.operators.collectives import FINISHED

WAIT = "_c10d_functional::wait_tensor"


def join(module: fx.GraphModule) -> dict[str, str]:
    """Replace, in ``module`` itself, every start of a functional collective and its waits by one operator.

    The operator keeps the name of the start; ``module`` is recompiled.

    Returns:
        Name of every wait that is gone to the name of the node that stands for its result now.

    Raises:
        CaptureError: a start has no wait, a wait has no start, a collective stands in a branch or a loop, or roamc
            does not know when a collective has finished.
    """
    graph = module.graph
    starts = [node for node in graph.nodes if node.target in FINISHED]
    stands_for: dict[str, str] = {}
    for start in starts:
        results = _results(start)
        waits = {result: [user for user in result.users if is_wait(user)] for result in results}
        if not results or not all(waits.values()):
            raise CaptureError(f"{start.target} is never waited for in the graph; wait for it in the same function")
        for result, ends in waits.items():
            for wait in ends:
                stands_for[wait.name] = result.name
                wait.replace_all_uses_with(result)
                graph.erase_node(wait)
        start.target = FINISHED[start.target]
    _derive_again(graph, starts)
    _refuse(module)
    if starts:
        module.recompile()
    return stands_for


def name_own_parts(graph: fx.Graph) -> dict[str, str]:
    """Give the one part that is read of a tensor that is cut a name without its number, if ``graph`` has collectives.

    Where a rank keeps its part of what all have, as DTensor does for ``Shard``, that is ``split[0]`` and ``getitem`` on
    one rank, ``split[1]`` and ``getitem_1`` on the next. With one name the plan of one rank fits the others.

    Returns:
        Old name to new name.
    """
    if not any(ops.rule(node.target).collective for node in graph.nodes if node.op == "call_function"):
        return {}
    taken = {node.name for node in graph.nodes}
    names: dict[str, str] = {}
    for node in graph.nodes:
        if is_own_part(node) and (name := f"{node.all_input_nodes[0].name}_part") not in taken:
            names[node.name] = name
            node.name = name
    return names


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a functional collective."""
    return isinstance(node.target, OpOverload) and node.target._schema.name == WAIT


def _results(start: fx.Node) -> list[fx.Node]:
    """The nodes that stand for one result each: the start, or the picks of a start with several."""
    if isinstance(start.meta.get("val"), torch.Tensor):
        return [start]
    return [user for user in start.users if user.target is operator.getitem]


def _derive_again(graph: fx.Graph, starts: Sequence[fx.Node]) -> None:
    """Derive fake values for the new operators, for views of their results, and for nodes whose geometry changes.

    torch notes some results with other strides than their kernels give; operators of ours are noted as they are.
    """
    mode = mode_of(graph) if starts else None
    if mode is None:
        return
    new: set[fx.Node] = set(starts)
    other_geometry: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        shares = ops.rule(node.target).view_of or ops.rule(node.target).mutates
        inputs = node.all_input_nodes
        viewed = bool(shares) and not new.isdisjoint(inputs)
        if node not in new and not viewed and other_geometry.isdisjoint(inputs):
            continue
        before = _geometry_of(node.meta.get("val"))
        value = _derived(node, mode)
        changed = before != _geometry_of(value)
        if node in new or viewed or changed:
            node.meta["val"] = value
            new.add(node)
        if changed:
            other_geometry.add(node)


def _derived(node: fx.Node, mode: FakeTensorMode) -> Any:
    if node.target is not operator.getitem and not isinstance(node.target, OpOverload):
        raise CaptureError(f"{node.target} reads a collective's result that has other strides than torch notes")
    return derived(node, mode)


def _geometry_of(value: Any) -> list[tuple[object, ...]]:
    values = value if isinstance(value, list | tuple) else [value]
    return [(item.shape, item.stride(), item.dtype) for item in values if isinstance(item, torch.Tensor)]


def _refuse(module: fx.GraphModule) -> None:
    """Refuse the collectives that are left: nothing says when their results are there."""
    for node in module.graph.nodes:
        if node.op == "call_function" and ops.rule(node.target).asynchronous:
            if is_wait(node):
                raise CaptureError(
                    f"the graph waits for a collective that was started outside of it ({node.name}); wait for it "
                    "before the compiled function is called"
                )
            raise CaptureError(
                f"roamc does not know when {node.target} is finished; train_step takes calls such as "
                "torch.distributed.all_reduce(x) by that name, not by one of your own (roamc.optimize does)"
            )
        if node.op == "get_attr":
            _refuse_inside(module, str(node.target))


def _refuse_inside(module: fx.GraphModule, name: str) -> None:
    """Refuse collectives in the branch or loop body ``name``: called whole, it gives them no fixed order."""
    for node in _nodes_within(attribute(module, name)):
        if node.op == "call_function" and ops.rule(node.target).collective:
            raise CaptureError(f"{node.target} stands in a branch or a loop ({name}); move it out")


def _nodes_within(module: Any) -> Iterator[fx.Node]:
    if isinstance(module, torch.nn.Module):
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                yield from part.graph.nodes
