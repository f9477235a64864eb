"""A hash of a graph that is the same in every process: two graphs with one fingerprint have the same plans.

Every argument goes into the hash as text that no address and no hash seed changes: operators and functions by qualified
name, numbers by value, tensors that the graph holds by geometry, other objects by their type.
"""

from __future__ import annotations

import enum
import hashlib
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from roamc.graph import TrainGraph, attribute, operators, output_values, placeholders, tensors_of
from roamc.graph.keep import is_kept
from roamc.graph.storage_ids import StorageId, ids_of
from roamc.operators.schemas import group_of, name_of

PLAIN = (torch.dtype, torch.layout, torch.memory_format, torch.device, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Objects of torch whose text is their value."""

_GPU = re.compile(r"\bcuda:\d+\b")


def fingerprint(graph: TrainGraph, *, of_any_rank: bool = False) -> str:
    """Return a hash, in hexadecimal, of all in ``graph`` that plans depend on; it is the same in every process.

    It covers nodes with their names and arguments, geometries, phases, roles, and which inputs share memory. The
    elements of tensors that the graph holds are no part of it, nor are marks for recomputation, nor what eager holds.
    Of strides along an axis of one element, which reach nothing, it has only those of inputs and outputs.

    Args:
        graph: the graph.
        of_any_rank: whether to leave out which of several equal parts a rank takes of a tensor that all ranks have, so
            that ranks that differ in nothing else have one hash. Plans depend on nothing of that either; programs do.
    """
    digest = hashlib.sha256("\n".join(_lines(graph.module, graph.graph.nodes, of_any_rank)).encode())
    digest.update(repr([(port.role.value, int(port.phase)) for port in (*graph.inputs, *graph.outputs)]).encode())
    ports = dict.fromkeys((*placeholders(graph.graph), *filter(None, output_values(graph.graph))))
    digest.update(repr([tuple(map(int, tensor.stride())) for port in ports for _, tensor in tensors_of(port)]).encode())
    phases = [(node.name, int(graph.phase[node.name])) for node in operators(graph.graph) if node.name in graph.phase]
    digest.update(f"{graph.boundary}|{graph.saved}|{graph.gradients}|{sorted(graph.waits.items())}|{phases}".encode())
    digest.update("|".join(_shared(graph.graph)).encode())
    if graph.in_flight > 1:
        digest.update(f"{graph.in_flight} {'calls ' if graph.calls else ''}in flight".encode())
    return digest.hexdigest()


def text_of(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> str:
    """Return the text of ``nodes`` of the graph of ``module``, a line for each: the same on every rank.

    A line has the node's name, operator, arguments, and its tensors' shapes, strides and dtypes. Names of process
    groups and numbers of GPUs are left out.
    """
    return _GPU.sub("cuda", "\n".join(_lines(module, nodes)))


def _shared(graph: fx.Graph) -> list[str]:
    """``"a in b"`` for every input ``a`` that shares memory with an earlier input ``b``."""
    first: dict[StorageId, str] = {}
    pairs = [
        (node.name, first.setdefault(storage, node.name)) for node in placeholders(graph) for storage in ids_of(node)
    ]
    return [f"{name} in {other}" for name, other in pairs if name != other]


def is_own_part(node: fx.Node) -> bool:
    """Return whether ``node`` is one of the parts into which a tensor is cut, and the only one that is read."""
    if node.target is not operator.getitem:
        return False
    cut = node.args[0]
    return isinstance(cut, fx.Node) and cut.target is torch.ops.aten.split.Tensor and len(cut.users) == 1


def _lines(module: fx.GraphModule, nodes: Iterable[fx.Node], of_any_rank: bool = False) -> list[str]:
    """One line for each of ``nodes``.

    Groups of ranks have other names on other ranks: they count by where they come first.
    """
    lines, groups = [], dict[str, str]()
    for node in nodes:
        geometry = [_geometry(tensor) for _, tensor in tensors_of(node)]
        mark = "|kept" if is_kept(node) else ""
        constant = f"|{_text(attribute(module, str(node.target)))}" if node.op == "get_attr" else ""
        args, kwargs = _without_groups(node, groups)
        args = (args[0], "its own") if of_any_rank and is_own_part(node) else args
        called = f"{node.op}|{node.name}|{_text(node.target)}|{_text(args)}|{_text(kwargs)}"
        lines.append(f"{called}|{geometry}{constant}{mark}")
    return lines


def _without_groups(node: fx.Node, groups: dict[str, str]) -> tuple[Any, Any]:
    """The arguments of ``node`` with "group k" for the k-th group that the graph talks to; ``groups`` has the names."""
    named = group_of(node)
    if named is None:
        return node.args, node.kwargs
    stand_in = groups.setdefault(str(named), f"group {len(groups)}")

    def renamed(value: Any) -> Any:
        return stand_in if value is named else value

    return tuple(map(renamed, node.args)), {key: renamed(value) for key, value in node.kwargs.items()}


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    shape = tuple(map(int, tensor.shape))
    strides = tuple(int(stride) if size != 1 else 0 for size, stride in zip(shape, tensor.stride(), strict=True))
    return shape, strides, str(tensor.dtype)


def _text(value: Any) -> str:
    """A target or an argument as text: equal in two processes for what is the same there."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, PLAIN):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, torch.Tensor):
        return f"tensor{_geometry(value)}"
    if isinstance(value, fx.GraphModule):
        return f"graph({'; '.join(_lines(value, value.graph.nodes))})"
    return name_of(value)
