"""Views of an input that forward writes to and returns, as functionalization leaves them, become views of the input.

    before                               after
    v = mul(x, 0.9)                      v = mul(x, 0.9)
    w = slice(v, 0, 1)                   copy_(x, v)
    copy_(x, v)                          w = slice(x, 0, 1)
    return w                             return w

``x`` is an input of the graph, such as a buffer, and ``v`` what the user's ``x.mul_(0.9)`` left in it, so that eager
returns ``x[1:]`` itself. Named by no output, ``v`` may be written to ``x``: see :mod:`roamc.capture.caller_writes`.
A tensor of its own that is copied to ``x`` (``v = x * 0.9; x.copy_(v); return v[1:]``) stays one.

The old output stays where the new view would have another geometry: ``resolve_conj``, which makes a tensor in eager,
leaves no operator in the graph, but a view without the lazy bit that views of ``x`` have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from roamc.capture.in_place_values import geometry
from roamc.capture.sharing import base_of, viewed
from roamc.compat import FakeTensorMode
from roamc.graph import Phase, output_node, output_values
from roamc.graph.memory import WROTE_OVER
from roamc.graph.rewrite import derived

aten = torch.ops.aten


def return_views_of_inputs(graph: fx.Graph, mode: FakeTensorMode, phase: dict[str, Phase]) -> None:
    """Let outputs that are views of a value that forward writes to an input be views of the input.

    Args:
        graph: changed in place.
        mode: the fake mode of its tensors.
        phase: node name to phase, changed in place: new views are added, views without readers are removed.
    """
    copies = {node.args[1]: node for node in graph.nodes if _keeps_writes(node, phase)}
    new_views: dict[Any, fx.Node] = {}
    for output in dict.fromkeys(output_values(graph)):
        for view in _views_of_written(output, copies):
            if view not in new_views:
                copy = copies.get(view.args[0])
                base = new_views[view.args[0]] if copy is None else copy.args[0]
                new_views[view] = _same_view(graph, view, base, base if copy is None else copy, mode)
                phase[new_views[view].name] = Phase.FORWARD
    outputs = tuple(_standing_for(value, new_views) for value in output_values(graph))
    output_node(graph).args = (outputs,)
    for view in reversed([*new_views, *new_views.values()]):
        if not view.users:
            graph.erase_node(view)
            del phase[view.name]


def _same_view(graph: fx.Graph, view: fx.Node, base: Any, after: Any, mode: FakeTensorMode) -> fx.Node:
    """``view`` once more, of ``base``, behind the node ``after``."""
    with graph.inserting_after(after):
        new_view = graph.create_node("call_function", view.target, (base, *view.args[1:]), view.kwargs)
    new_view.meta = dict(view.meta)
    new_view.meta["val"] = derived(new_view, mode)
    return new_view


def _standing_for(output: fx.Node | None, new_views: Mapping[Any, fx.Node]) -> fx.Node | None:
    """Return the view in ``new_views`` that stands for ``output``, if it has the same geometry; else ``output``."""
    view = new_views.get(output)
    if output is None or view is None:
        return output
    return view if geometry(view.meta["val"]) == geometry(output.meta["val"]) else output


def _keeps_writes(node: fx.Node, phase: Mapping[str, Phase]) -> bool:
    """Whether ``node`` copies to an input, at the end of forward, what operators that wrote there have made of it."""
    if node.target is not aten.copy_.default or node.users or phase[node.name] is not Phase.FORWARD:
        return False
    entry, value = node.args[:2]
    written = False
    while isinstance(value, fx.Node) and WROTE_OVER in (whole := viewed(value)).meta:
        written, value = True, whole.args[0]
    return written and isinstance(value, fx.Node) and viewed(value) is entry and entry.op == "placeholder"


def _views_of_written(output: fx.Node | None, copies: Mapping[Any, fx.Node]) -> list[fx.Node]:
    """The views that lead from what a copy writes to ``output``; none if it is no such view."""
    views: list[fx.Node] = []
    while output is not None and output not in copies:
        views.insert(0, output)
        output = base_of(output)
    return [] if output is None else views
