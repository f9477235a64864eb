"""What torch keeps private about ``fully_shard`` (FSDP2): how each parameter is held in parts, and its hooks."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from roamc.compat_dtensor import part_of
from roamc.compat_modules import modules_of


@dataclass(frozen=True)
class Sharding:
    """How ``fully_shard`` holds one parameter in parts, gathers it and reduces its gradient.

    Attributes:
        group: name of the group of ranks that have a part each; empty where one rank has all of it.
        ranks: the number of these ranks.
        reduced_by: name of the group that sums gradients and leaves each rank its part; the same ranks as of ``group``.
        copies_group: name of the group of ranks that have the same part; empty where there is none.
        copies: the number of these ranks.
        dim: the dimension along which the parameter is split; the parts of all ranks but the last ones are equal.
        shape: of the whole; with tensor parallelism, of all that this rank's place in the other mesh has of it.
        rows: length along ``dim`` of the longest part.
        dtype: of the whole, in forward and backward.
        reduced_in: the dtype in which gradients are reduced.
        before, after: what gradients are divided by before and after the reduction; None for no division.
        reduction: "avg" or "sum"; "other" for one that functional collectives do not have.
        gathered_again: whether backward gathers the parameter again, and the first whole is given up behind forward.
        spec: of the DTensor that the whole is, with tensor parallelism; else None.
    """

    group: str
    ranks: int
    reduced_by: str
    copies_group: str
    copies: int
    dim: int
    shape: tuple[int, ...]
    rows: int
    dtype: torch.dtype
    reduced_in: torch.dtype
    before: float | None
    after: float | None
    reduction: str
    gathered_again: bool
    spec: Any = None


def _sharded_modules(model: nn.Module) -> list[Any]:
    """The modules in ``model``, from the outside in, that ``fully_shard`` was called with."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where it is not imported, nobody has used it
    return [] if fsdp is None else [module for module in modules_of(model) if isinstance(module, fsdp.FSDPModule)]


def is_wrapped(module: nn.Module) -> bool:
    """Whether ``module`` is a ``FullyShardedDataParallel``, the wrapper that was there before ``fully_shard``."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def shardings_of(model: nn.Module) -> dict[int, Sharding]:
    """Return the ``id`` of every parameter of ``model`` that ``fully_shard`` holds in parts to how it does."""
    return {
        id(_live(shard)): _sharding(state, group, shard, is_root=is_root)
        for state, is_root in _states(model)
        for group in _groups(state)
        for shard in group.fsdp_params
    }


def settings_of(model: nn.Module) -> Iterator[Mapping[str, bool]]:
    """Yield, for each group of parameters that are held in parts, which of its settings no graph has, by words."""
    for state, _ in _states(model):
        for group in _groups(state):
            comms = (getattr(group, name, None) for name in ("_all_gather_comm", "_reduce_scatter_comm"))
            kinds = [type(comm).__name__ for comm in comms if comm is not None]
            yield {
                "is under set_requires_gradient_sync(False)": not group.reduce_grads,
                "is under set_requires_all_reduce(False)": not group.all_reduce_grads,
                "has an all-reduce hook": group._all_reduce_hook is not None,
                "gathers or reduces by a function of yours, or in memory of the process group": any(
                    not kind.startswith("Default") for kind in kinds
                ),
                "reduces zeros for unused parameters": bool(getattr(group, "reduce_scatter_unused_params", False)),
                "keeps its parts on the CPU (CPUOffloadPolicy)": any(
                    shard.offload_to_cpu for shard in group.fsdp_params
                ),
                "holds parameters that gather themselves (fsdp_pre_all_gather)": any(
                    hasattr(part_of(_live(shard)), "fsdp_pre_all_gather") for shard in group.fsdp_params
                ),
            }


def shard_fully(model: nn.Module, ranks: int) -> None:
    """Call ``fully_shard`` on each layer of the lists of ``model``, and then on the model, for all ranks of this job.

    Args:
        model: the model; it is changed in place.
        ranks: how many ranks the process group has.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (ranks,))
    for layer in (*_layers(model), model):
        fully_shard(layer, mesh=mesh)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The items of the outermost lists of modules in ``module``."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _layers(child)


def take_apart(model: nn.Module) -> None:
    """Let every parameter that ``fully_shard`` holds be this rank's part, as it is before forward in eager.

    A forward without backward, such as an evaluation, leaves the parameters of the outermost module whole.
    """
    for sharded in _sharded_modules(model):
        groups = _groups(sharded._get_fsdp_state())
        if any(group._all_gather_result is not None for group in groups):
            sharded.unshard()  # waits for what was started: else the next forward takes it for the values then
        if not all(group.is_sharded for group in groups):
            sharded.reshard()


@contextlib.contextmanager
def casts_alone(model: nn.Module) -> Iterator[None]:
    """Within this context, hooks of ``fully_shard`` cast arguments and results as its policy says, and no more.

    They neither gather parameters nor change what ``fully_shard`` knows of them.
    """
    with contextlib.ExitStack() as stack:
        for state, _ in _states(model):
            before, after = _casts(state._mp_policy)
            stack.enter_context(mock.patch.object(state, "_pre_forward", before))
            stack.enter_context(mock.patch.object(state, "_post_forward", after))
            for handle in _handles(state):
                hooks: Any = handle.hooks_dict_ref()
                is_first = any(hooks is module._forward_pre_hooks for module in state._modules)
                stack.enter_context(mock.patch.dict(hooks, {handle.id: before if is_first else after}))
        yield


def gathered_tensor(whole: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """Return ``whole``, or with tensor parallelism the DTensor of which it is this rank's part; autograd follows."""
    if sharding.spec is None:
        return whole
    from torch.distributed.tensor import DTensor

    spec = sharding.spec
    build: Any = DTensor.from_local
    tensor: torch.Tensor = build(
        whole, spec.mesh, spec.placements, run_check=False, shape=spec.tensor_meta.shape, stride=spec.tensor_meta.stride
    )
    return tensor


def _states(model: nn.Module) -> Iterator[tuple[Any, bool]]:
    """Each state of ``fully_shard`` in ``model``, with whether its module is an outermost one."""
    inside: set[int] = set()
    seen: set[int] = set()
    for sharded in _sharded_modules(model):
        state = sharded._get_fsdp_state()
        if id(state) not in seen:
            seen.add(id(state))
            yield state, id(sharded) not in inside if state._is_root is None else bool(state._is_root)
        inside.update(map(id, sharded.modules()))


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    return (
        list(several) if several is not None else [group for group in (state._fsdp_param_group,) if group is not None]
    )


def _live(shard: Any) -> torch.Tensor:
    """The parameter that the module has now: ``load_state_dict(assign=True)`` and the like exchange it."""
    tensor: torch.Tensor = getattr(shard._module_info.module, shard._module_info.param_name)
    return tensor


def _sharding(state: Any, group: Any, shard: Any, *, is_root: bool) -> Sharding:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    mesh = getattr(shard, "mesh_info", group.mesh_info)
    parts = getattr(mesh, "shard_process_group", None)
    reduced_by = getattr(mesh, "reduce_scatter_process_group", None) or parts
    copies = getattr(mesh, "replicate_process_group", None)
    policy, dtype = shard.mp_policy, _live(shard).dtype
    whole_dtype = policy.param_dtype if policy.param_dtype is not None and dtype.is_floating_point else dtype
    reduced_in = policy.reduce_dtype or whole_dtype
    before, after, *reductions = _get_gradient_divide_factors(
        reduced_by, copies, reduced_in, group.device.type, group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
    )  # fmt: skip
    kept_by_root = is_root and getattr(state, "_auto_reshard_after_forward", True)
    return Sharding(
        group=_name(parts),
        ranks=_size(parts),
        reduced_by=_name(reduced_by),
        copies_group=_name(copies),
        copies=_size(copies),
        dim=shard.fsdp_placement.dim,
        shape=tuple(shard._orig_size),
        rows=shard.padded_sharded_param_size[shard.fsdp_placement.dim],
        dtype=whole_dtype,
        reduced_in=reduced_in,
        before=before,
        after=after,
        reduction=_reduction(reductions),
        gathered_again=group.post_forward_mesh_info is not None and not kept_by_root,
        spec=getattr(shard, "_unsharded_dtensor_spec", getattr(shard, "_tp_spec", None)) if shard.is_dtensor else None,
    )


def _name(group: Any) -> str:
    return "" if group is None or group.size() == 1 else str(group.group_name)


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _reduction(reductions: list[Any]) -> str:
    """The one reduction of parts and of copies; "other" where they differ, or are none of functional collectives."""
    for name, reduction in (("avg", torch.distributed.ReduceOp.AVG), ("sum", torch.distributed.ReduceOp.SUM)):
        if all(each == reduction for each in reductions):
            return name
    return "other"


def _handles(state: Any) -> list[Any]:
    """The handles of all hooks that ``state`` has registered on the forward of its modules."""
    pair = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    flat = [part for handle in pair for part in getattr(handle, "handles", (handle,))]
    return list({(handle.id): handle for handle in flat}.values())


def _casts(policy: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What stands for the hooks before and after forward."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
    from torch.distributed.utils import _apply_to_tensors

    apply: Any = _apply_to_tensors

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not policy.cast_forward_inputs or policy.param_dtype is None:
            return args, kwargs
        cast = functools.partial(_cast_fp_tensor, policy.param_dtype)
        return apply(cast, args), apply(cast, kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return (
            output
            if policy.output_dtype is None
            else apply(functools.partial(_cast_fp_tensor, policy.output_dtype), output)
        )

    return before, after
