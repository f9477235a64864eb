"""DistributedDataParallel in a training step: what its reducer does outside of the graph, as operators of the graph.

    forward of the module     buffers: cat, broadcast from the first rank, copy back
    loss, backward            as without it, on this rank's part of the batch
    each gradient             mul(gradient, 1 / ranks), all_reduce: the mean over the ranks
    clipping, update          read the mean

The gradients are reduced in the order in which backward makes them, which :func:`agreed` has compared on all ranks.
For fully_shard see :mod:`roamc.capture.fully_sharded`, for DTensors :mod:`roamc.capture.parts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from roamc.compat_fsdp import is_wrapped
from roamc.compat_modules import modules_of
from roamc.errors import CaptureError
from roamc.exchange import first_difference
from roamc.graph.rewrite import Writer

aten = torch.ops.aten


@dataclass(frozen=True)
class Replica:
    """One DistributedDataParallel module of a model.

    Attributes:
        module: the module itself.
        parameters: names, in the whole model, of the parameters whose gradients it averages over the ranks.
    """

    module: DistributedDataParallel
    parameters: frozenset[str]

    @property
    def ranks(self) -> int:
        """The number of ranks in the module's process group."""
        return int(self.module.process_group.size())

    @property
    def group(self) -> str:
        """The name of the module's process group, as functional collectives take it."""
        return str(self.module.process_group.group_name)


def replicas_of(model: nn.Module) -> list[Replica]:
    """Return every DistributedDataParallel module in ``model``, the model itself included; empty if there is none.

    Raises:
        CaptureError: the model is sharded (:func:`check_whole`), a module has a setting that needs its own reducer
            (``SETTINGS``), or two modules average one parameter.
    """
    check_whole(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    replicas = []
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            check_settings(module)
            own = [parameter for name, parameter in module.module.named_parameters() if _averaged(module, name)]
            replicas.append(Replica(module, frozenset(names[id(parameter)] for parameter in own)))
    if sum(len(replica.parameters) for replica in replicas) > len({name for r in replicas for name in r.parameters}):
        raise CaptureError("a parameter is in two DistributedDataParallel modules; wrap it once")
    return replicas


def _averaged(module: DistributedDataParallel, name: str) -> bool:
    return name not in module.parameters_to_ignore


def check_whole(model: nn.Module) -> None:
    """Refuse a model that ``FullyShardedDataParallel`` wraps: it gathers flat parameters outside of any graph.

    Raises:
        CaptureError: says what train_step takes in its place.
    """
    if any(map(is_wrapped, model.modules())):
        raise CaptureError(
            "train_step does not take FullyShardedDataParallel: use torch.distributed.fsdp.fully_shard, or "
            "roamc.optimize(model) with an optimizer of torch.optim"
        )


SETTINGS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("is inside no_sync()", lambda ddp: not ddp.require_backward_grad_sync),
    ("is used with join()", lambda ddp: ddp._join_config.enable),
    ("has a communication hook", lambda ddp: bool(ddp._comm_hooks) or _has_builtin_hook(ddp)),
    ("has a hook for its buffers", lambda ddp: hasattr(ddp, "buffer_hook")),
    ("has mixed_precision set", lambda ddp: ddp.mixed_precision is not None),
    ("has delay_all_reduce_named_params set", lambda ddp: bool(ddp._delay_all_reduce_params)),
    ("spreads its parameters over several devices", lambda ddp: ddp.is_multi_device_module),
)
"""Settings that need DistributedDataParallel's own reducer: words for the error, and whether a module is set so."""


def _has_builtin_hook(module: Any) -> bool:
    return bool(module._get_ddp_logging_data().get("comm_hook"))


def check_around(model: nn.Module) -> None:
    """Refuse a step while a DistributedDataParallel module of ``model`` is set to need its own reducer (``SETTINGS``).

    Raises:
        CaptureError: names the setting.
    """
    for module in modules_of(model):
        if isinstance(module, DistributedDataParallel):
            check_settings(module)


def check_settings(module: DistributedDataParallel) -> None:
    """Refuse a module that is set to need its own reducer, such as inside ``no_sync()``; ``SETTINGS`` has all cases.

    Raises:
        CaptureError: names the setting.
    """
    for setting, holds in SETTINGS:
        if holds(module):
            raise CaptureError(
                f"the DistributedDataParallel module {setting}, which train_step does not support: leave that out, or "
                "use roamc.optimize(model) before it is wrapped"
            )


@contextlib.contextmanager
def followed(replicas: Sequence[Replica]) -> Iterator[list[Replica]]:
    """Context manager: a call of the module of one of ``replicas`` runs the wrapped module, without the reducer.

    Where DistributedDataParallel would do so, the buffers of rank 0 are broadcast before the call.

    Yields:
        A list, empty at first. A replica is appended at its first call with gradients enabled.
    """
    called: list[Replica] = []

    def forward_of(replica: Replica) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and replica not in called:
                called.append(replica)
            if replica.module.will_sync_module_buffers():
                _take_over_buffers(replica)
            return replica.module.module(*args, **kwargs)

        return forward

    with contextlib.ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(mock.patch.object(replica.module, "forward", forward_of(replica)))
        yield called


def _take_over_buffers(replica: Replica) -> None:
    """Give the buffers of every rank the values of rank 0's, in one broadcast for each dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for name, buffer in replica.module.module.named_buffers():
        if _averaged(replica.module, name):
            alike.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for buffers in alike.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            sent = torch.ops.roamc_collective.broadcast(flat, 0, replica.group)
            for buffer, part in zip(buffers, sent.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(part.view(buffer.shape))


def check_called(replicas: Iterable[Replica], called: Sequence[Replica], updated: Sequence[str]) -> None:
    """Refuse a step that uses the parameters of a DistributedDataParallel module without calling it.

    torch would not average their gradients either.

    Args:
        replicas: all DistributedDataParallel modules of the model.
        called: the replicas that forward has called, as :func:`followed` yields them.
        updated: names of the parameters that have a gradient.

    Raises:
        CaptureError: a replica is not in ``called``, but one of its parameters is in ``updated``.
    """
    for replica in replicas:
        if replica not in called and not replica.parameters.isdisjoint(updated):
            raise CaptureError(
                "loss_fn does not call the DistributedDataParallel module, so its gradients would stay those of one "
                "rank: call the module itself, not its .module"
            )


def average(
    writer: Writer, gradients: Mapping[str, fx.Node], replicas: Sequence[Replica], order: Sequence[str]
) -> tuple[dict[str, fx.Node], tuple[str, ...]]:
    """Append the mean over all ranks of every gradient that a module averages.

    Args:
        writer: writes into the graph, behind backward.
        gradients: parameter name to the node of its gradient on this rank.
        replicas: the DistributedDataParallel modules of the model.
        order: the second result of an earlier capture, to be kept; empty for the first capture, which takes the order
            in which backward makes the gradients.

    Returns:
        Parameter name to the node of its mean, or of its gradient where no module averages it; the names of the
        averaged parameters, in the order in which they are reduced.

    Raises:
        CaptureError: other averaged parameters have gradients than in ``order``.
    """
    owner = {name: replica for replica in replicas for name in replica.parameters if name in gradients}
    position = {node: index for index, node in enumerate(writer.graph.nodes)}
    names = tuple(sorted(owner, key=lambda name: position[gradients[name]]))
    if order and set(order) != set(names):
        other = min(set(order).symmetric_difference(names))
        raise CaptureError(
            f"this batch gives gradients to other parameters than the first one did ({other}); ranks would wait for "
            "each other: let every step of a DistributedDataParallel module use the same parameters"
        )
    means: dict[tuple[fx.Node, str], fx.Node] = {}
    averaged = dict(gradients)
    for name in order or names:
        key = (gradients[name], owner[name].group)
        if key not in means:
            means[key] = _mean(writer, gradients[name], owner[name])
        averaged[name] = means[key]
    return averaged, tuple(order or names)


def _mean(writer: Writer, gradient: fx.Node, replica: Replica) -> fx.Node:
    """Append the mean of one gradient over the ranks, with its elements in memory in the order of the gradient's.

    Each rank divides before the sum, as torch's reducer does.
    """
    part = writer.call(aten.mul.Tensor, gradient, 1.0 / replica.ranks)
    value = part.meta["val"]
    dims = sorted(range(value.dim()), key=lambda dim: -value.stride(dim))
    turned = not value.is_contiguous() and value.permute(dims).is_contiguous()
    if turned:
        part = writer.call(aten.permute.default, part, dims)
    whole = writer.call(torch.ops.roamc_collective.all_reduce.default, part, "sum", replica.group)
    return writer.call(aten.permute.default, whole, [dims.index(dim) for dim in range(len(dims))]) if turned else whole


def groups_of(replicas: Sequence[Replica]) -> tuple[str, ...]:
    """Return the names of the groups of ranks that have copies of a model, each once, in the order of its modules."""
    return tuple(dict.fromkeys(replica.group for replica in replicas))


def agreed(replicas: Sequence[Replica], order: Sequence[str], name: str) -> None:
    """Compare the order in which gradients are reduced with the other ranks; all ranks must call this together.

    Args:
        replicas: the DistributedDataParallel modules of the model.
        order: names of the averaged parameters, as :func:`average` returns them on this rank.
        name: of the graph, for the message.

    Raises:
        CaptureError: the orders of two ranks differ; raised on every rank, names the first difference.
        RanksError: a rank does not come to compare; says why if it has failed.
    """
    for group in groups_of(replicas):
        averaged = frozenset[str]().union(*(each.parameters for each in replicas if each.group == group))
        differs = first_difference(group, [parameter for parameter in order if parameter in averaged], name)
        if differs is not None:
            other, first, second = differs
            raise CaptureError(
                "the ranks of the DistributedDataParallel module do not reduce the same gradients in the same order: "
                f"the first rank {first!r}, {other} {second!r}; let all take the same way through it"
            )
