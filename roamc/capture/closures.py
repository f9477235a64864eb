"""Parameters and buffers that a step reads past the model, through a name of its own:

    w = model.head.weight
    loss_fn = lambda model, x: model(x).sum() + w.square().sum()

The trace puts other tensors in the model's place, and they have to be put in the place of ``w`` as well: else its
gradient would be lost, and the graph would not know that it reads what the update writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from roamc import compat, compat_hooks, notices
from roamc.capture.batch import check_dense
from roamc.compat import identity
from roamc.compat_dtensor import part_of
from roamc.errors import CaptureError
from roamc.graph import attribute, operators, placeholders, tensors_of
from roamc.graph.rewrite import move
from roamc.operators import ops


class Closures(TorchFunctionMode):
    """Context manager: functions of torch that are handed a parameter or buffer get the traced tensor in its place.

    That holds for arguments, and for what is in arguments that are lists, tuples, named tuples, dicts and the like. The
    argument ``traced`` maps the ``id`` of a parameter or buffer to the tensor in its place. What reads the memory of
    any other real tensor without an operator gets a view of it that is traced.
    """

    def __init__(self, traced: Mapping[int, torch.Tensor]) -> None:
        """Take ``traced``: ``id`` of a parameter or buffer to the tensor in its place."""
        super().__init__()
        self.traced = traced

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        is_property = getattr(func, "__name__", "") == "__get__"  # such as is_sparse
        dense = not is_property and func not in _OF_MEMORY
        args = self._swapped(args, dense)
        if func in _OF_MEMORY and type(args[0]) in (torch.Tensor, nn.Parameter):
            return getattr(torch.ops.aten.alias.default(args[0]), func.__name__)(*args[1:], **kwargs or {})
        return func(*args, **self._swapped(kwargs or {}, dense))

    def _swapped(self, value: Any, dense: bool) -> Any:
        """``value`` with traced tensors in it; with ``dense``, real ones that no plan takes are refused."""
        leaves, spec = compat.flatten(value)
        swapped = [self.traced.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for leaf in filter(compat.is_real, swapped) if dense else ():
            check_dense(leaf)
        return compat.unflatten(swapped, spec)


_OF_MEMORY = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
"""What reads the values of a real tensor in its memory, of which no trace would hear."""


def check_followed(module: fx.GraphModule, mode: compat.CaptureMode) -> None:
    """Refuse a trace of which a part was computed where it does not follow, so that ``module`` lacks operators.

    Its results would be constants without elements, and what it writes would be lost.

    Raises:
        CaptureError: ``loss_fn`` computes in a thread of its own, or without the modes of the trace, or it changes
            which kernels run, of which the graph says nothing.
    """
    if mode.switched:
        raise CaptureError(
            f"the step changes {mode.switched} while it runs, and a captured step runs with one value: set it around "
            "the step, or use roamc.optimize"
        )
    constants = (attribute(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr"))
    if mode.strayed or any(map(compat.is_traced, constants)):
        raise CaptureError(
            "the step computes where no trace follows, as in another thread; compute in the thread that calls the "
            "step, or use roamc.optimize"
        )


def join_constants(graph: fx.Graph, mode: compat.FakeTensorMode) -> None:
    """Merge the ``get_attr`` nodes of each constant into the first one.

    A constant is a tensor that is no parameter, buffer or batch tensor. The trace makes a fake tensor of it at every
    use; afterwards the fake tensors of the constant and of its views share one storage.

    Args:
        graph: changed in place.
        mode: the fake mode of its tensors.
    """
    first: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr" and first.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first[node.target])
            graph.erase_node(node)
    for node in first.values():
        inside = [user for user in node.users if _lies_in(user, node)]
        if inside and isinstance(node.meta.get("val"), torch.Tensor):
            (_, view), *_ = tensors_of(inside[0])
            with mode:
                move(node, 0, view.untyped_storage())


def _lies_in(user: fx.Node, node: fx.Node) -> bool:
    rule = ops.rule(user.target)
    return bool(rule.view_of or rule.mutates) and user.all_input_nodes[0] is node


def check_origins(model: nn.Module, loss: torch.Tensor, names: Mapping[int, str]) -> None:
    """Refuse a loss whose gradient flows to a parameter of the model past the trace.

    A warning says if the gradient flows to another tensor that is no parameter of the model.

    Args:
        model: the model; each model gets the warning once.
        loss: the loss as it was traced.
        names: ``id`` of each parameter to its name.

    Raises:
        CaptureError: a tensor that was computed from a parameter before the step is used in it; names the parameter.
    """
    for variable in compat_hooks.leaves_behind(loss):
        if id(variable) in names:
            raise CaptureError(
                f"the step uses a tensor that was computed from parameter {names[id(variable)]!r} before it began; "
                "compute it inside loss_fn, or detach and clone it"
            )
        if compat.fake_mode_of(part_of(variable)) is None:
            notices.warn(
                model,
                "gradient elsewhere",
                f"the loss depends on a tensor of shape {tuple(variable.shape)} that requires grad and is no parameter "
                "of the model: train_step computes no gradient for it. Put it into the model if it is to be trained; "
                "else call its requires_grad_(False), or use it under torch.no_grad()",
            )


def check_written(graph: fx.Graph, names: Sequence[str], read_past: Collection[str]) -> None:
    """Refuse a step that writes to a buffer and reads the buffer's memory through a view that was made before the step.

    Args:
        graph: of the step, without the update.
        names: of parameters and buffers, in the order of the graph's first inputs.
        read_past: names of buffers whose memory is read through such a view.

    Raises:
        CaptureError: names the buffer.
    """
    if not read_past:
        return
    owner = {
        identity(tensor): name
        for node, name in zip(placeholders(graph), names, strict=False)
        for _, tensor in tensors_of(node)
    }
    written = (argument for node in operators(graph) for argument in ops.mutated_arguments(node))
    for _, tensor in (pair for argument in written for pair in tensors_of(argument)):
        name = owner.get(identity(tensor))
        if name in read_past:
            raise CaptureError(compat.read_past(str(name)))
