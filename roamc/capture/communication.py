"""Calls of ``torch.distributed`` in a training step, as operators of the graph.

    dist.all_reduce(x)                      x.copy_(roamc_collective.all_reduce(x, ...))
    dist.all_gather_into_tensor(out, x)     out.copy_(roamc_collective.all_gather_into_tensor(x, ...))
    ...

Tensor parallelism by autograd functions of one's own calls them. ``torch.compile`` replaces them alike. With
``async_op=True`` the result is there at once, and waiting for it does nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from roamc.errors import CaptureError

COLLECTIVES: Any = torch.ops.roamc_collective
"""Operators that have finished when they return; :mod:`roamc.operators.collectives` defines them."""


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """Context manager: collectives of ``torch.distributed`` that are called by their names there enter the graph.

    Raises:
        CaptureError: later, where one is called in a way that has no place in a graph; says what to do.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    with contextlib.ExitStack() as stack:
        for name, traced in {**TRACED, **{name: functools.partial(_refuse, name) for name in REFUSED}}.items():
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, traced))
                stack.enter_context(mock.patch.object(dist.distributed_c10d, name, traced))
        yield


class _Done:
    """What a call with ``async_op=True`` returns: its work is done.

    Args:
        written: the tensors that it has written.
    """

    def __init__(self, written: list[torch.Tensor]) -> None:
        self._written = written

    def wait(self, timeout: Any = None) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is done; its value is the list of tensors that were written."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._written)
        return future

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were written."""
        return self._written


def _check(name: str, *tensors: torch.Tensor) -> None:
    """Refuse tensors that autograd follows: in eager torch warns that their gradients may be wrong."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise CaptureError(
            f"the step calls torch.distributed.{name} on a tensor that requires grad: {name} has no gradient in torch; "
            "call it in an autograd.Function, or on a .detach()"
        )


def _written(results: Iterable[tuple[torch.Tensor, torch.Tensor]], async_op: bool) -> _Done | None:
    """Copy each second tensor to the first, which may have another shape."""
    written = []
    for tensor, result in results:
        written.append(tensor.copy_(result.view(tensor.shape)))
    return _Done(written) if async_op else None


def _all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> _Done | None:
    _check("all_reduce", tensor)
    name, _ = _group(group)
    return _written([(tensor, COLLECTIVES.all_reduce(tensor, _reduction(op), name))], async_op)


def _all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> _Done | None:
    _check("all_gather_into_tensor", output_tensor, input_tensor)
    name, ranks = _group(group)
    gathered = COLLECTIVES.all_gather_into_tensor(input_tensor, ranks, name)
    return _written([(output_tensor, gathered)], async_op)


def _all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> _Done | None:
    _check("all_gather", tensor, *tensor_list)
    name, ranks = _group(group)
    if any(part.shape != tensor.shape for part in tensor_list):
        raise CaptureError("dist.all_gather of tensors that differ in shape has no place in a planned step; pad them")
    gathered = COLLECTIVES.all_gather_into_tensor(tensor, ranks, name)
    return _written(zip(tensor_list, gathered.view(ranks, *tensor.shape).unbind(), strict=True), async_op)


def _reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> _Done | None:
    _check("reduce_scatter_tensor", output, input)
    name, ranks = _group(group)
    flat = input.reshape(ranks * output.shape[0], *output.shape[1:]) if output.dim() else input.reshape(ranks)
    scattered = COLLECTIVES.reduce_scatter_tensor(flat, _reduction(op), ranks, name)
    return _written([(output, scattered)], async_op)


def _group(group: Any) -> tuple[str, int]:
    """The name of a group of ranks and the number of its ranks; None stands for all ranks."""
    group = dist.group.WORLD if group is None else group
    return str(group.group_name), int(group.size())


REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def _reduction(op: Any) -> str:
    """The name that operators of a graph take for a ``dist.ReduceOp``; None stands for a sum."""
    for name in REDUCTIONS:
        if op is None or op == getattr(dist.ReduceOp, name):
            return name.lower()
    raise CaptureError(f"a planned step reduces by {', '.join(REDUCTIONS)}, not by {op}")


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise CaptureError(
        f"the step calls torch.distributed.{name}, which has no place in a planned step; train_step takes "
        f"{', '.join(TRACED)}; roamc.optimize(model) takes what torch.compile takes"
    )


TRACED: dict[str, Callable[..., _Done | None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_single": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_single": _reduce_scatter_tensor,
}
"""Name in ``torch.distributed`` to what is called in its place while a step is traced; not every torch has all."""

REFUSED = (
    *("all_gather_object", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "recv", "reduce"),
    *("reduce_scatter", "scatter", "scatter_object_list", "send"),
)
"""Names in ``torch.distributed`` of what would run outside of the graph, and in the first step alone."""
