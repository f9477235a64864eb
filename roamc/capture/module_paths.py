"""Which module of the model runs while an operator is traced, noted on the operator's node as dynamo notes it.

``nn.Module.__call__`` is replaced while a step is traced, as ``fx.Tracer`` does: the model gets no hooks, and what the
user's own hooks and a checkpoint that runs a part again do belongs to the module that they run in. A module in two
places has the path of the first. Operators that a module's ``forward`` is not called for belong to the module around.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import fx, nn

from roamc import compat
from roamc.capture.batch import tensors_in
from roamc.compat_modules import call_module
from roamc.graph.origin import OUTPUT, trace_back

LOSS = "loss_fn"
"""What stands for the path of operators that no module of the model makes."""


@contextlib.contextmanager
def noted(model: nn.Module, *, outputs: bool = True) -> Iterator[None]:
    """Context manager inside a trace: nodes get the path of the module of ``model`` that makes them.

    Args:
        model: what paths begin at.
        outputs: whether nodes that ``model`` returns get the name of the output, see :data:`OUTPUT`.
    """
    paths = {id(module): path for path, module in model.named_modules()}

    def call(module: nn.Module, /, *args: Any, **named: Any) -> Any:
        path = paths.get(id(module))
        if path is None:
            return call_module(module, *args, **named)
        with inside(path, type(module).__name__):
            result = call_module(module, *args, **named)
        if outputs and module is model:
            _name_outputs(result)
        return result

    with mock.patch.object(nn.Module, "__call__", call):
        yield


@contextlib.contextmanager
def inside(path: str, kind: str = "") -> Iterator[None]:
    """Context manager inside a trace: nodes belong to the module ``path`` of the class ``kind``."""
    key = "nn_module_stack"
    around = fx.traceback.current_meta.get(key)
    fx.traceback.current_meta[key] = {path: (path, kind)}
    try:
        yield
    finally:
        fx.traceback.current_meta.pop(key, None)
        if around is not None:
            fx.traceback.current_meta[key] = around


@contextlib.contextmanager
def of_backward() -> Iterator[None]:
    """Context manager around the trace of a backward: its nodes get line and module of the forward call they belong to.

    What a checkpoint runs again in backward has its own.
    """
    graph = compat.graph_so_far()
    before = list(graph.nodes)
    around = fx.traceback.current_meta.pop("nn_module_stack", None)
    try:
        yield
    finally:
        if around is not None:
            fx.traceback.current_meta["nn_module_stack"] = around
    trace_back(before, list(graph.nodes)[len(before) :])


def _name_outputs(result: Any) -> None:
    for path, tensor in tensors_in(result):
        node = compat.node_of(tensor)
        if node is not None:
            node.meta.setdefault(OUTPUT, f"output{path}")
