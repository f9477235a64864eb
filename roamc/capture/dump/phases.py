"""Which operators of a printed joint graph are forward's: the text does not have torch's tags."""

from __future__ import annotations

import torch
from torch import fx

from roamc.capture.dump.text import TANGENTS


def tag(joint: fx.Graph) -> None:
    """Set ``meta["partitioner_tag"]`` of all operators, as AOTAutograd does while it traces.

    Forward goes on to the first operator that reads something of a tangent; what comes then is backward. A write to an
    input that reads no tangent is forward's wherever it stands: AOTAutograd puts all of them at the end.
    """
    late: set[fx.Node] = set()
    backward = False
    for node in joint.nodes:
        if node.op == "placeholder":
            late |= {node} if node.name.startswith(TANGENTS) else set()
        if node.op not in ("call_function", "get_attr"):
            continue
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            backward = True
        if node.target is torch.ops.aten.copy_.default and node not in late and node.args[0].op == "placeholder":
            node.meta["partitioner_tag"] = "must_be_in_forward"
        else:
            node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
