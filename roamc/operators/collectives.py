"""Collective operators that are finished when they return.

torch's functional collectives are two operators each: one starts the communication, one waits for it.

    y = _c10d_functional.all_reduce(x, "sum", group)      # y is not there yet; x must stay as it is
    z = _c10d_functional.wait_tensor(y)

An operator here does both, so that no argument or result is in use by the network outside of it:

    z = roamc_collective.all_reduce(x, "sum", group)

``FINISHED`` maps torch's starts to these operators. ``KERNELS`` maps some of these operators to functions that write
into ``out``, tensors of the results' geometry, and return when the communication is finished; the other operators
allocate their results. Arguments are those of the operator of the same name in ``_c10d_functional``. Pass overlap
splits some of them again, into operators of :mod:`roamc.operators.split_collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roamc.compat import OpOverload

NAMESPACE = "roamc_collective"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
FUNCTIONAL: Any = torch.ops._c10d_functional
Fake = Callable[..., Any]


def _same_shape(input: Tensor, *rest: Any) -> Tensor:
    return input.new_empty(input.shape)


def _same_shapes(inputs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [_same_shape(tensor) for tensor in inputs]


def _gathered(input: Tensor, group_size: int, group: Any) -> Tensor:
    length = input.shape[0] if input.dim() else 1
    return input.new_empty((length * group_size, *input.shape[1:]))


def _all_gathered(inputs: Sequence[Tensor], group_size: int, group: Any) -> list[Tensor]:
    return [_gathered(tensor, group_size, group) for tensor in inputs]


def _scattered(input: Tensor, reduce_op: str, group_size: int, group: Any) -> Tensor:
    return input.new_empty((input.shape[0] // group_size, *input.shape[1:]))


def _all_scattered(inputs: Sequence[Tensor], reduce_op: str, group_size: int, group: Any) -> list[Tensor]:
    return [_scattered(tensor, reduce_op, group_size, group) for tensor in inputs]


def _exchanged(input: Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> Tensor:
    return input.new_empty((sum(received), *input.shape[1:]))


RESULTS: dict[str, Fake] = {
    "all_reduce": _same_shape,
    "all_reduce_coalesced": _same_shapes,
    "all_gather_into_tensor": _gathered,
    "all_gather_into_tensor_coalesced": _all_gathered,
    "reduce_scatter_tensor": _scattered,
    "reduce_scatter_tensor_coalesced": _all_scattered,
    "all_to_all_single": _exchanged,
    "broadcast": _same_shape,
}
"""Name in ``_c10d_functional`` to the fake kernel: its results are contiguous, as the real kernels allocate them."""


def _finished(start: OpOverload) -> OpOverload:
    """Define the operator that runs ``start`` and waits for all of its results."""
    name = start._schema.name.removeprefix("_c10d_functional::")

    def run(*args: Any, **kwargs: Any) -> Any:
        results = start(*map(_dense, args), **kwargs)
        for result in [results] if isinstance(results, Tensor) else results:
            FUNCTIONAL.wait_tensor.default(result)
        return results

    LIBRARY.define(str(start._schema).removeprefix("_c10d_functional::"))
    torch.library.impl(LIBRARY, name, "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"{NAMESPACE}::{name}", RESULTS[name], lib=LIBRARY)
    operator: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    torch.fx.node.has_side_effect(operator)
    return operator


def _dense(argument: Any) -> Any:
    """``argument`` with contiguous tensors: torch 2.11 refuses others, later versions copy them as well."""
    if isinstance(argument, Tensor):
        return argument.contiguous()
    return list(map(_dense, argument)) if isinstance(argument, list) else argument


FINISHED: dict[OpOverload, OpOverload] = (
    {getattr(FUNCTIONAL, name).default: _finished(getattr(FUNCTIONAL, name).default) for name in RESULTS}
    if torch.distributed.is_available()
    else {}
)
"""Operator that starts a collective to the one that also waits for it; empty in a torch without torch.distributed."""


def real_view(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as the network sends it: complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def all_reduce(input: Tensor, reduce_op: str, group_name: Any, *, out: Tensor) -> None:
    """Reduce ``input`` over all ranks by ``reduce_op`` into ``out``, and wait for the result.

    ``input`` stays unless ``out`` is ``input``. ``reduce_op``, such as "sum", and ``group_name``, the process group,
    are as torch's functional collectives take them.
    """
    if out.data_ptr() != input.data_ptr():
        out.copy_(input)
    FUNCTIONAL.all_reduce_.default(real_view(out), reduce_op, group_name)
    FUNCTIONAL.wait_tensor.default(out)


def all_reduce_coalesced(
    inputs: Sequence[Tensor], reduce_op: str, group_name: Any, *, out: Tensor | tuple[Tensor, ...]
) -> None:
    """Reduce each of ``inputs`` over all ranks by ``reduce_op`` into its tensor of ``out``, in one call, and wait.

    ``reduce_op``, such as "sum", and ``group_name``, the process group, are as torch's functional collectives take
    them.
    """
    results = [out] if isinstance(out, Tensor) else list(out)
    for result, tensor in zip(results, inputs, strict=True):
        result.copy_(tensor)
    FUNCTIONAL.all_reduce_coalesced_.default(results, reduce_op, group_name)
    for result in results:
        FUNCTIONAL.wait_tensor.default(result)


def all_gather_into_tensor(input: Tensor, group_size: int, group_name: Any, *, out: Tensor) -> None:
    """Write the ``input`` of all ``group_size`` ranks to ``out``, one behind the other along dimension 0.

    The order is that of the ranks. The call waits for the result. ``group_name``, the process group, is as torch's
    functional collectives take it.
    """
    FUNCTIONAL.all_gather_into_tensor_out.default(
        real_view(input.contiguous()), group_size, group_name, out=real_view(out)
    )
    FUNCTIONAL.wait_tensor.default(out)


def reduce_scatter_tensor(input: Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: Tensor) -> None:
    """Reduce ``input`` over all ranks by ``reduce_op``, write this rank's part along dimension 0 to ``out``, and wait.

    The parts are ``group_size`` equal ones, by rank. ``reduce_op``, such as "sum", and ``group_name``, the process
    group, are as torch's functional collectives take them.
    """
    dense = real_view(input.contiguous())
    FUNCTIONAL.reduce_scatter_tensor_out.default(dense, reduce_op, group_size, group_name, out=real_view(out))
    FUNCTIONAL.wait_tensor.default(out)


def broadcast(input: Tensor, src: int, group_name: Any, *, out: Tensor) -> None:
    """Write the ``input`` of rank ``src`` to ``out`` on every rank, and wait; ``out`` may be ``input``.

    ``src`` and ``group_name``, the process group, are as torch's functional collectives take them.
    """
    if out.data_ptr() != input.data_ptr():
        out.copy_(input)
    FUNCTIONAL.broadcast_.default(out, src, group_name)
    FUNCTIONAL.wait_tensor.default(out)


_WRITERS = (all_reduce, all_reduce_coalesced, all_gather_into_tensor, reduce_scatter_tensor, broadcast)
KERNELS: dict[OpOverload, Callable[..., None]] = {
    FINISHED[getattr(FUNCTIONAL, writer.__name__).default]: writer for writer in _WRITERS if FINISHED
}
"""Operator of this module to the function that writes its results into ``out``."""
