"""A training step as a graph: operators and storages, their lives and live bytes, and checks of both.

``train_graph`` is the FX graph with roles and phases, ``memory`` its storages and lives, ``layout`` their offsets in
the arena. ``rewrite`` writes nodes, ``verify`` and ``value_flow`` check what a pass leaves, ``printed`` shows a graph.
"""

from roamc.graph.origin import copy_origin, module_of, source_line
from roamc.graph.train_graph import (
    Agreement,
    Encoding,
    Phase,
    Port,
    Role,
    SamePlan,
    TrainGraph,
    attribute,
    copied,
    input_gradients,
    main_device,
    maker_of,
    operators,
    output_node,
    output_values,
    placeholders,
    storage_name,
    tensors_of,
)

__all__ = [
    "Agreement",
    "Encoding",
    "Phase",
    "Port",
    "Role",
    "SamePlan",
    "TrainGraph",
    "attribute",
    "copied",
    "copy_origin",
    "input_gradients",
    "main_device",
    "maker_of",
    "module_of",
    "operators",
    "output_node",
    "output_values",
    "placeholders",
    "source_line",
    "storage_name",
    "tensors_of",
]
