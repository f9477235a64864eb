"""How an operator puts its results into planned memory: in one of four forms.

| form     | what is emitted                                   | extra bytes while it runs  |
|----------|---------------------------------------------------|----------------------------|
| OUT      | the overload with ``out=`` arguments              | none                       |
| KERNEL   | a function of :mod:`roamc.operators.kernels`, or of a group | none               |
| IN_PLACE | the operator itself; it makes no storage          | none                       |
| ALLOCATE | the operator itself, then a copy or a held result | its results, until copied  |

An ``out=`` overload counts only if it has a kernel of its own: those that torch generates run the plain operator and
copy, which would hide an allocation. It must also write its results where it is told to: see
:class:`roamc.operators.table.OutForm`.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.compat import OpOverload
from roamc.compat_operators import has_kernel, suggested_format
from roamc.graph import tensors_of
from roamc.operators.composite import Composite
from roamc.operators.kernels import kernel_of
from roamc.operators.ops import rule
from roamc.operators.table import OutForm


class FormKind(enum.Enum):
    """How an operator puts its results into planned memory.

    Attributes:
        OUT: its overload with ``out=`` arguments writes them there.
        KERNEL: a function of :mod:`roamc.operators.kernels`, or of a group, writes them there.
        IN_PLACE: the operator makes no storage.
        ALLOCATE: the operator allocates them; they are copied to planned memory, or stay with torch's allocator.
    """

    OUT = "out"
    KERNEL = "kernel"
    IN_PLACE = "in place"
    ALLOCATE = "allocate"


@dataclass(frozen=True)
class Form:
    """How one operator puts its results into planned memory on one device.

    Attributes:
        kind: one of the four ways.
        overload: for OUT, the overload to call; else None.
        arguments: for OUT, the keyword of each result, in result order; else empty.
    """

    kind: FormKind
    overload: OpOverload | None = None
    arguments: tuple[str, ...] = ()


CPU_ALONE = frozenset(
    {
        *("aten::_add_relu.out", "aten::_stack.out", "aten::_upsample_lanczos2d_aa.out", "aten::narrow_copy.out"),
        *("aten::_upsample_lanczos2d_aa_backward.grad_input", "aten::slow_conv3d_forward.output"),
        *("aten::histogram.bin_ct_out", "aten::histogram.bins_tensor_out"),
    }
)
"""Overloads with ``out=`` that a CPU has a kernel for and CUDA has none, by torch's ``native_functions.yaml``."""

CUDA_ALONE = frozenset(
    {
        *("aten::_chunk_cat.out", "aten::split_with_sizes_copy.out", "aten::batch_norm_elemt.out"),
        *("aten::_conv_depthwise2d.out", "aten::cudnn_convolution.out", "aten::cudnn_batch_norm.out"),
        *("aten::mm.dtype_out", "aten::addmm.dtype_out", "aten::bmm.dtype_out", "aten::baddbmm.dtype_out"),
    }
)
"""Overloads with ``out=`` arguments that have a kernel on CUDA and none on a CPU."""

ALLOCATE = Form(FormKind.ALLOCATE)
"""The form of operators that cannot write into planned memory."""


def form_of(node: fx.Node, births: int) -> Form:
    """Return the form in which the operator ``node`` writes its results, of which ``births`` are new storages."""
    if births == 0:
        return Form(FormKind.IN_PLACE)
    target: Any = node.target
    if isinstance(target, Composite):
        return Form(FormKind.KERNEL)
    tensors = [tensor for _, tensor in tensors_of(node)]
    devices = {tensor.device.type for tensor in tensors}
    results = node.meta["val"]
    count = len(results) if isinstance(results, list | tuple) else 1
    if not isinstance(target, OpOverload) or len(devices) != 1 or not births == len(tensors) == count:
        return ALLOCATE
    if rule(target).out_form is OutForm.IN_ROWS and not _in_rows(node.args[0]):
        return ALLOCATE
    return _form(target, devices.pop())


def _in_rows(argument: object) -> bool:
    """Whether a node's tensor is contiguous, or has its channels last."""
    if not isinstance(argument, fx.Node):
        return False
    tensor = argument.meta["val"]
    return bool(tensor.is_contiguous(memory_format=suggested_format(tensor)))


@functools.cache
def _form(target: OpOverload, device: str) -> Form:
    kernel = kernel_of(target)
    if kernel is not None and device in kernel.devices:
        return Form(FormKind.KERNEL)
    variant = out_overload(target) if device != "meta" else None  # meta: results that nobody reads, until erased
    writes = rule(target).out_form in (OutForm.WRITES, OutForm.IN_ROWS)
    if variant is not None and writes and runs_on(variant[0].name(), device):
        return Form(FormKind.OUT, *variant)
    return ALLOCATE


def runs_on(name: str, device: str) -> bool:
    """Whether the overload ``name``, such as ``"aten::mm.out"``, has a kernel of its own on ``device``, such as "cpu".

    Where torch is built without CUDA, it is asked for the CPU's kernels: CUDA has the same, but for those of
    :data:`CPU_ALONE` and :data:`CUDA_ALONE`.
    """
    if device != "cuda" or torch.backends.cuda.is_built():
        return has_kernel(name, device.upper())
    return name in CUDA_ALONE or (has_kernel(name, "CPU") and name not in CPU_ALONE)


def out_overload(target: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """Find the overload with the arguments of ``target`` plus one written keyword for each result.

    Returns:
        The overload, and the names of these keywords in the order of the results; None if there is none.
    """
    arguments = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    packet = target.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        outs, inputs = [], []
        for argument in overload._schema.arguments:
            written = argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write
            if written:
                outs.append(argument.name)
            else:
                inputs.append((argument.name, str(argument.type)))
        if outs and inputs == arguments and len(outs) == len(target._schema.returns):
            return overload, tuple(outs)
    return None
