"""Collectives that return before they are finished, and the operator that waits for one.

    z = roamc_collective.all_reduce(x, "sum", group)        y = roamc_collective.start_all_reduce(x, "sum", group)
                                                            ...  other work, that reads neither y nor writes x
                                                            z = roamc.wait_collective(y)      a view of y

Until the wait the network may read ``x`` and write ``y``. ``STARTS`` maps operators of
:mod:`roamc.operators.collectives` to those that only start them, ``KERNELS`` these to functions that write into
``out``. torch's own waits look for work by storage, and all of an arena is one: they would wait for whatever is under
way in it. So work is kept here, by the address of its result, for each thread: what a thread starts, it waits for.

Coalesced collectives, of several tensors in one call, are not split: their results would have one start and several
waits, and each of a few bytes would hold all arguments and results until the last of these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from roamc.compat import OpOverload
from roamc.compat_groups import all_gather, group_of_ranks, reduce_scatter
from roamc.operators.collectives import FINISHED, LIBRARY, NAMESPACE, RESULTS, real_view

REDUCTIONS = {
    name: getattr(dist.ReduceOp, name.upper())
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
    if dist.is_available()
}
"""Reductions that collectives can be started with: the name in an operator's arguments to torch's."""


@dataclass
class _UnderWay(threading.local):
    """Address of a result to the work that writes it, and the tensors that this work uses."""

    works: dict[int, tuple[Any, tuple[Tensor, ...]]] = field(default_factory=dict)


_UNDER_WAY = _UnderWay()


def start_all_reduce(input: Tensor, reduce_op: str, group_name: Any, *, out: Tensor) -> None:
    """Begin to reduce ``input`` over all ranks by ``reduce_op`` into ``out``, which may be ``input``.

    ``reduce_op``, such as "sum", and ``group_name``, the process group, are as torch's functional collectives take
    them.
    """
    if out.data_ptr() != input.data_ptr():
        out.copy_(input)
    group = group_of_ranks(group_name)
    _begin(dist.all_reduce(real_view(out), REDUCTIONS[reduce_op.lower()], group, async_op=True), out, input)


def start_all_gather_into_tensor(input: Tensor, group_size: int, group_name: Any, *, out: Tensor) -> None:
    """Begin to write the ``input`` of all ``group_size`` ranks to ``out``, one behind the other along dimension 0.

    The order is that of the ranks. ``group_name``, the process group, is as torch's functional collectives take it.
    """
    dense = real_view(input.contiguous())
    _begin(all_gather(real_view(out), dense, group_of_ranks(group_name)), out, dense)


def start_reduce_scatter_tensor(
    input: Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: Tensor
) -> None:
    """Begin to reduce ``input`` over all ranks by ``reduce_op`` and to write this rank's part to ``out``.

    The parts are ``group_size`` equal ones along dimension 0, by rank. ``reduce_op``, such as "sum", and
    ``group_name``, the process group, are as torch's functional collectives take them.
    """
    dense = real_view(input.contiguous())
    group, reduction = group_of_ranks(group_name), REDUCTIONS[reduce_op.lower()]
    _begin(reduce_scatter(real_view(out), dense, reduction, group), out, dense)


def start_broadcast(input: Tensor, src: int, group_name: Any, *, out: Tensor) -> None:
    """Begin to write the ``input`` of the rank at position ``src`` of the group to ``out``, which may be ``input``.

    ``group_name``, the process group, is as torch's functional collectives take it.
    """
    if out.data_ptr() != input.data_ptr():
        out.copy_(input)
    group = group_of_ranks(group_name)
    _begin(dist.broadcast(real_view(out), group=group, group_src=src, async_op=True), out, input)


def start_all_to_all_single(
    input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: Any, *, out: Tensor
) -> None:
    """Begin to send parts of ``input`` along dimension 0 to all ranks, and to write what they send to ``out``.

    The parts have ``input_split_sizes`` rows, by receiving rank, and ``output_split_sizes``, by sending rank.
    ``group_name``, the process group, is as torch's functional collectives take it.
    """
    dense, group = real_view(input.contiguous()), group_of_ranks(group_name)
    sizes = list(output_split_sizes), list(input_split_sizes)
    _begin(dist.all_to_all_single(real_view(out), dense, *sizes, group=group, async_op=True), out, dense)


def _begin(work: Any, out: Tensor, *used: Tensor) -> None:
    """Note the work that writes ``out``; results without elements share an address, and their work ends at once."""
    if work is None:
        return
    if not out.numel():
        work.wait()
        return
    _UNDER_WAY.works[out.data_ptr()] = work, (out, *used)


def _wait(started: Tensor) -> Tensor:
    """Wait for the collective that writes ``started``; a view of it. Nothing is waited for where none is under way."""
    address = started.data_ptr()
    work, _ = _UNDER_WAY.works.get(address, (None, ()))
    if work is not None:
        work.wait()
        del _UNDER_WAY.works[address]  # not before: an interruption leaves it to `finish_all`
    return started.view(started.shape)


def finish_all(error: BaseException | None = None) -> None:
    """Wait for all that this thread has started and not waited for.

    Until then the network may use memory that the caller gives away.

    Args:
        error: what has ended the program that would have waited.

    Raises:
        Exception: what the first wait that fails raises, from ``error``; the others are waited for all the same.
    """
    failures = []
    while _UNDER_WAY.works:
        _, (work, _) = _UNDER_WAY.works.popitem()
        try:
            work.wait()
        except Exception as failure:  # raised below, once nothing is under way any more
            failures.append(failure)
    if failures:
        raise failures[0] from error


def _started(finished: OpOverload, writer: Callable[..., None]) -> OpOverload:
    """Define the operator that begins what ``finished`` does: ``writer`` begins to write into memory that it makes."""
    name = finished._schema.name.removeprefix(f"{NAMESPACE}::")

    def run(*args: Any, **kwargs: Any) -> Any:
        result = RESULTS[name](*args, **kwargs)
        writer(*args, **kwargs, out=result)
        return result

    LIBRARY.define("start_" + str(finished._schema).removeprefix(f"{NAMESPACE}::"))
    torch.library.impl(LIBRARY, f"start_{name}", "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"{NAMESPACE}::start_{name}", RESULTS[name], lib=LIBRARY)
    operator: OpOverload = getattr(getattr(torch.ops, NAMESPACE), f"start_{name}").default
    fx.node.has_side_effect(operator)
    return operator


_WRITERS = {
    writer.__name__.removeprefix("start_"): writer
    for writer in (
        start_all_reduce,
        start_all_gather_into_tensor,
        start_reduce_scatter_tensor,
        start_broadcast,
        start_all_to_all_single,
    )
}
STARTS: dict[OpOverload, OpOverload] = {
    finished: _started(finished, _WRITERS[name])
    for finished in FINISHED.values()
    if (name := finished._schema.name.removeprefix(f"{NAMESPACE}::")) in _WRITERS
}
"""Operator of :mod:`roamc.operators.collectives` to the one that only starts the same; empty without ``dist``."""

KERNELS: dict[OpOverload, Callable[..., None]] = {
    start: _WRITERS[finished._schema.name.removeprefix(f"{NAMESPACE}::")] for finished, start in STARTS.items()
}
"""Operator that starts a collective to the function that starts it into ``out``."""

_WAITS = torch.library.Library("roamc", "FRAGMENT")
_WAITS.define("wait_collective(Tensor(a) started) -> Tensor(a)")
torch.library.impl(_WAITS, "wait_collective", "CompositeExplicitAutograd")(_wait)
torch.library.register_fake("roamc::wait_collective", lambda started: started.view(started.shape), lib=_WAITS)
WAIT: OpOverload = torch.ops.roamc.wait_collective.default
"""``roamc::wait_collective(started)``: waits for the collective whose result ``started`` is, and is a view of it."""
fx.node.has_side_effect(WAIT)


def can_start(node: fx.Node) -> bool:
    """Whether ``node`` is a collective that can be started and waited for apart.

    One whose argument would be copied into another first cannot: the copy would be there until the wait.
    """
    if node.target not in STARTS or node.kwargs or not isinstance(node.args[0], fx.Node):
        return False
    sent, reduction = node.args[0].meta["val"], node.args[1]
    supported = not isinstance(reduction, str) or reduction.lower() in REDUCTIONS
    return supported and bool(sent.is_contiguous()) and not (sent.is_conj() or sent.is_neg())
