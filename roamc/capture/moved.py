"""A step that was captured on a CPU, as it is on a GPU that need not be there.

Autograd over fake tensors of CUDA ends the process where torch is built without CUDA. So a step is traced on a CPU,
with the attention and the autocast of a GPU (see :mod:`roamc.capture.cuda_attention` and :mod:`roamc.compat_autocast`),
and every result of the finished graph is derived once more from inputs on the GPU, operator by operator and without
autograd. Where torch has CUDA the road is the same, and so is the plan.

Tensors made inside the step are made on the GPU, and tensors that the step reads from outside lie there. Tensors of no
dimension that the step writes as ``torch.tensor(2.5)`` stay on the CPU, as in eager: operators on a GPU take such
tensors of the CPU. One that is put into a part of a tensor (see :mod:`roamc.capture.view_writes`) lies on the GPU.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from roamc import compat_autocast
from roamc.capture import cuda_attention
from roamc.capture.device_mode import DeviceMode
from roamc.compat import OpOverload, identity
from roamc.errors import CaptureError
from roamc.graph import TrainGraph, attribute, source_line
from roamc.graph.rewrite import given, placed_in
from roamc.graph.storage_ids import number
from roamc.operators import ops
from roamc.operators.composite import Composite
from roamc.operators.corrections import corrected, derived_anew
from roamc.operators.effects import with_effect
from roamc.operators.fakes import fake_kernel
from roamc.operators.random import replay, save_rng_state, state_bytes
from roamc.operators.schemas import name_of
from roamc.settings import check_device

CPU = torch.device("cpu")

NOTE = (
    "planned for a GPU that need not be here: nothing was measured, and for workspaces of cuBLAS and "
    "cuDNN the margin has a fixed share"
)

LITERAL = "aten.lift_fresh"
"""Begin of the name of what reads the constant that a trace makes of ``torch.tensor(2.5)``."""

CPU_ONLY = ("mkldnn", "onednn", "for_cpu", "quantized::")
"""Parts of the names of operators that only a CPU has."""


def device_of(text: str, name: str = "--device") -> torch.device:
    """Return the device to plan for: the CPU, or GPU 0.

    Args:
        text: ``"cpu"`` or ``"cuda"``.
        name: of the argument, for the message.

    Raises:
        OptionError: ``text`` is neither.
    """
    return CPU if check_device(text, name) == "cpu" else torch.device("cuda", 0)


def built_for(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context manager: inside, a model may make the ``torch.autocast`` of its steps for ``device``."""
    return contextlib.nullcontext() if device.type == "cpu" else compat_autocast.enabled_for_cuda()


@contextlib.contextmanager
def traced_for(device: torch.device) -> Iterator[None]:
    """While inside, a step that this thread traces on a CPU has operators that :func:`moved` can take to ``device``."""
    with contextlib.ExitStack() as stack:
        if device.type != "cpu":
            stack.enter_context(cuda_attention.on_cuda())
            stack.enter_context(compat_autocast.on_cuda())
        yield


def moved(graph: TrainGraph, device: torch.device) -> TrainGraph:
    """Return ``graph`` as it is on ``device``; its FX graph is changed in place.

    Inputs are tensors of ``device`` with the same geometry; those that share memory still do. Arguments that name a CPU
    name ``device``. Where an operator's kernel on ``device`` needs other strides than its argument has, a copy of the
    argument is inserted, as eager makes one.

    Args:
        graph: as it was captured on a CPU, under :func:`traced_for`.
        device: where it is to run. The CPU leaves the graph as it is.

    Raises:
        CaptureError: an operator does not run there; names the operator and the user's line.
    """
    if device.type == "cpu":
        return graph
    mover = _Mover(graph, device)
    for node in list(graph.graph.nodes):
        mover.move(node)
    number(graph.graph)
    phase = dict(graph.phase)
    phase |= {copy: phase[reader] for copy, reader in mover.copies.items()}
    return graph.replace(phase=phase, notes=(*graph.notes, NOTE))


class _Mover:
    """Moves one node after the other, in the order of the graph.

    Attributes:
        copies: name of each inserted copy to the name of the operator that reads it.
    """

    def __init__(self, graph: TrainGraph, device: torch.device) -> None:
        self.graph, self.device, self.mode = graph, device, DeviceMode(kernel_of=fake_kernel)
        self.copies: dict[str, str] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def move(self, node: fx.Node) -> None:
        """Give ``node`` its arguments and its value on the device."""
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["val"] = self._copy(node.meta["val"], self.device)
        elif node.op == "get_attr":
            self._move_constant(node)
        elif node.op == "call_function":
            node.args, node.kwargs = self._renamed(node.args), self._renamed(node.kwargs)
            value = self._value(node)
            if "val" in node.meta or value is not None:
                node.meta["val"] = value

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a fake on ``device`` with the geometry of ``tensor``, in the storage that stands for its storage."""
        key = identity(tensor)
        with self.mode, torch.no_grad():
            if key not in self._storages:
                nbytes = tensor.untyped_storage().nbytes()
                self._storages[key] = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
            return placed_in(tensor, self._storages[key], device)

    def _move_constant(self, node: fx.Node) -> None:
        constant = node.meta.get("val", attribute(self.graph.module, str(node.target)))
        if isinstance(constant, torch.Tensor):
            literal = not constant.dim() and any(map(_is_literal, node.users))
            node.meta["val"] = self._copy(constant, CPU if literal else self.device)

    def _renamed(self, value: Any) -> Any:
        """Return arguments with this device in the place of the CPU."""

        def there(item: Any) -> Any:
            return self.device if item == CPU and isinstance(item, torch.device) else item

        return fx.node.map_aggregate(value, there)

    def _value(self, node: fx.Node) -> Any:
        target: Any = node.target
        if target is save_rng_state:
            with self.mode:
                return torch.empty(state_bytes(self.device), dtype=torch.uint8)
        if target is with_effect:  # what it calls reads elements, and as a rule gives nothing
            return tuple(self._copy(v, self.device) if isinstance(v, torch.Tensor) else v for v in node.meta["val"])
        self._check(node)
        try:
            with torch.no_grad():
                return self._derived(node)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            raise self._refusal(node, _why(node, error)) from None

    def _derived(self, node: fx.Node) -> Any:
        target: Any = node.target
        arguments, keywords = given(node)
        if target is replay or isinstance(target, Composite):
            run: Any = arguments[1] if target is replay else target
            operands = arguments[2:] if target is replay else arguments
            with self.mode:
                return corrected(node, run(*operands, **keywords), self.mode)
        return derived_anew(node, self.mode, self.copies)

    def _check(self, node: fx.Node) -> None:
        """Refuse what no GPU has: operators of the CPU alone, and targets that are no operators."""
        target: Any = node.target
        if target in (operator.getitem, replay) or isinstance(target, Composite):
            return
        if not isinstance(target, OpOverload):
            raise self._refusal(node, "it is no operator of torch's")
        if any(part in target.name() for part in CPU_ONLY):
            raise self._refusal(node, "only a CPU has it")

    def _refusal(self, node: fx.Node, why: str) -> CaptureError:
        line = source_line(node)
        at = f" ({line})" if line else ""
        return CaptureError(f"{name_of(node.target)}{at} cannot be planned for {self.device.type}: {why}")


def _is_literal(node: fx.Node) -> bool:
    """Whether ``node`` reads the constant of a ``torch.tensor(2.5)``, for operators that take one of the CPU."""
    return name_of(node.target).startswith(LITERAL) and not any(map(_is_put, node.users))


def _is_put(node: fx.Node) -> bool:
    """Whether ``node`` is a view of what is put into parts of other tensors: a write, which may cross devices."""
    scattered = (ops.rule(reader.target).part is not None for reader in node.users)
    return ops.is_view(node.target) and all(scattered)


def _why(node: fx.Node, error: Exception) -> str:
    """Say in one line why the operator of ``node`` has no result on the device."""
    if str(error) == str(node.target):
        return "torch has no fake kernel of it"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
