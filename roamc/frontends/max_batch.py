"""``roamc.max_batch``: the largest batch, or sequence, whose step fits a budget or a GPU; from plans alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from roamc import compat, ticker
from roamc.budget import is_absolute, total_bytes
from roamc.capture.moved import built_for
from roamc.errors import CaptureError, OptionError
from roamc.frontends import devices, workload
from roamc.frontends.largest import Fit, Largest
from roamc.gpus import gpu_of
from roamc.graph import TrainGraph
from roamc.options import Options
from roamc.units import format_bytes


def max_batch(
    make: Callable[[int], tuple[Any, ...]],
    memory_budget: int | str | None = None,
    *,
    smallest: int = 1,
    largest: int = 1 << 20,
    forward_backward: bool = False,
    recomputation: bool = True,
    device: str | None = None,
    **options: Any,
) -> Fit:
    """Find the largest ``size`` for which a plan of ``make(size)`` fits ``memory_budget``. Nothing runs.

    Few sizes are planned, see :mod:`roamc.frontends.largest`; the search takes it that every size below one that fits
    also fits. A step at the limit of a budget may recompute much: see ``added_share`` of the answer.

    Args:
        make: called on the meta device, where tensors take no memory; returns ``(model, inputs)``,
            ``(model, inputs, loss_fn)`` or ``(model, inputs, loss_fn, optimizer)`` for a batch size, sequence length or
            other dimension ``size``. Without ``loss_fn`` the loss is the ``.loss`` of the model's output, if it has
            one.
        memory_budget: bytes, "device", or a size in all such as "total:40GB"; see the option of that name. With the
            option ``gpu`` the whole process has to fit that GPU, and no budget is needed.
        smallest: the smallest size that is an answer. Some models, such as those with batch norm, cannot run with 1.
        largest: largest size to try.
        forward_backward: plan without the optimizer's update, as for ``torch.compile``.
        recomputation: whether operators may run again and values be encoded to keep the budget, which takes time.
            Without it, plans are those of the option ``disable="retain"``, and the answer is what fits at no cost in
            time.
        device: "cuda" plans for a GPU that need not be there, as for :func:`roamc.plan`; so does the option ``gpu``.
        options: see :class:`roamc.options.Options`.

    Raises:
        BudgetError: not even the smallest size fits.
        OptionError: an option is unknown or out of range, or the budget is one that limits no batch, such as "80%",
            "min" or "+1%".
        CaptureError: the function returns something else, a model built outside of it, or the same step for all sizes.
    """
    planned_for = devices.asked_for(device, options.get("gpu"))
    parsed = devices.options_for({**options, "memory_budget": memory_budget}, planned_for)
    if not callable(make) or isinstance(make, nn.Module):
        raise CaptureError(
            f"max_batch takes a function of a size that returns (model, inputs, ...), not {type(make).__name__}"
        )
    check_options(parsed)
    check_sizes(smallest, largest)

    def captured(size: int) -> TrainGraph:
        with torch.device("meta"), built_for(planned_for):
            returned = make(size)
        return devices.noted(_captured(returned, forward_backward, planned_for), parsed, planned_for)

    limit = parsed.memory_budget
    budget = parsed.room.title if parsed.room else format_bytes(limit) if isinstance(limit, int) else limit
    with ticker.working(f"looking for the largest size for {budget}", "", f"found the largest size for {budget}"):
        return Largest(captured, parsed, smallest, largest, recomputation).run()


def limits_batch(options: Options) -> bool:
    """Whether the budget is one that limits a batch: bytes, on the total or ``"device"``.

    Beside the option ``gpu``, which is a budget on the total, it is one on the total within the GPU's capacity.
    """
    if options.gpu is not None:
        return 0 < total_bytes(options.memory_budget) <= gpu_of(options.gpu).capacity
    return is_absolute(options.memory_budget)


def check_options(options: Options) -> None:
    """Refuse a budget that limits no batch, and plan files, which are for one size.

    Raises:
        OptionError: the budget's bytes grow with the step, there is none, the option ``gpu`` limits other bytes, or
            there are plan files.
    """
    budget, limits = options.memory_budget, limits_batch(options)
    if not limits and options.gpu is None:
        raise OptionError(
            f"max_batch needs a memory_budget in bytes, in all such as 'total:40GB', or 'device', not {budget!r}; or a "
            "gpu, such as 'h100'"
        )
    if not limits and options.gpu is not None:
        raise OptionError(
            f"max_batch looks for what fits gpu={options.gpu!r}: leave memory_budget={budget!r} out, or give a size in "
            f"all, at most 'total:{gpu_of(options.gpu).capacity}'"
        )
    if options.plan:
        raise OptionError(f"max_batch plans several sizes, and {', '.join(options.plan)} is for one: leave plan out")


def check_sizes(smallest: object, largest: object) -> tuple[int, int]:
    """Return the limits of the sizes that are looked for.

    Raises:
        OptionError: one is no whole number from 1 on, or the largest is below the smallest.
    """
    first = _checked_size("smallest", smallest, 1)
    return first, _checked_size("largest", largest, first)


def _checked_size(name: str, size: object, least: int) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise OptionError(f"{name} must be a whole number, at least {least}, not {size!r}")
    return size


def _captured(returned: Any, forward_backward: bool, device: torch.device) -> TrainGraph:
    """The graph, captured for ``device``, of what the user's function has returned, named after the model's class."""
    unnamed = workload.made("", returned)
    leaves, _ = compat.flatten((unnamed.batch, unnamed.named))
    fed = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
    held = {parameter.device.type for parameter in unnamed.model.parameters()}
    if "meta" in fed and held and "meta" not in held:
        raise CaptureError(
            f"the inputs are on the meta device, and the model's parameters on {', '.join(sorted(held))}; build the "
            "model inside the function, where tensors are made on the meta device"
        )
    named = replace(unnamed, name=type(returned[0]).__name__)
    return workload.capture(named, forward_backward=forward_backward, device=device)
