"""``roamc.max_batch``: the largest batch, or sequence, whose step fits a budget; from plans alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from roamc import compat
from roamc.errors import BudgetError, CaptureError, OptionError
from roamc.frontends import workload
from roamc.graph import TrainGraph
from roamc.planning import together
from roamc.planning.plan import Plan
from roamc.planning.planned import SMALLER
from roamc.planning.search import options_of


@dataclass(frozen=True)
class Fit:
    """The largest size whose plan fits the budget.

    Attributes:
        size: the size.
        plan: the plan of the step of this size.
        too_large: the smallest size that was tried and does not fit; None if all sizes tried fit.
    """

    size: int
    plan: Plan
    too_large: int | None


def max_batch(
    make: Callable[[int], tuple[Any, ...]],
    memory_budget: int | str,
    *,
    smallest: int = 1,
    largest: int = 1 << 20,
    forward_backward: bool = False,
    **options: Any,
) -> Fit:
    """Find the largest ``size`` for which a plan of ``make(size)`` fits ``memory_budget``. Nothing runs.

    Sizes are doubled while they fit, then bisected; this assumes that every size below one that fits also fits.

    Args:
        make: called on the meta device, where tensors take no memory; returns ``(model, inputs)``,
            ``(model, inputs, loss_fn)`` or ``(model, inputs, loss_fn, optimizer)`` for a batch size, sequence length or
            other dimension ``size``.
        memory_budget: bytes, or "device"; see the option of that name.
        smallest: first size to try. Some models, such as those with batch norm, cannot run with 1.
        largest: largest size to try.
        forward_backward: plan without the optimizer's update, as for ``torch.compile``.
        options: see :class:`roamc.options.Options`.

    Raises:
        BudgetError: not even the smallest size fits.
        OptionError: an option is unknown or out of range, or the budget is neither in bytes nor "device"; others, such
            as "80%", "min" or "+1%", limit no batch.
        CaptureError: the function returns something else, a model built outside of it, or the same step for all sizes.
    """
    parsed = options_of({**options, "memory_budget": memory_budget})
    if not callable(make) or isinstance(make, nn.Module):
        raise CaptureError(
            f"max_batch takes a function of a size that returns (model, inputs, ...), not {type(make).__name__}"
        )
    if parsed.memory_budget is None or (isinstance(parsed.memory_budget, str) and parsed.memory_budget != "device"):
        raise OptionError(f"max_batch needs a memory_budget in bytes, or 'device', not {memory_budget!r}")
    _check_size("smallest", smallest, 1)
    _check_size("largest", largest, smallest)

    def plan_of(size: int) -> Plan:
        with torch.device("meta"):
            returned = make(size)
        quick = size > smallest  # the error for the smallest size says what it needs; of others none is shown
        return together.alone(_captured(returned, forward_backward), parsed, quick=quick).plan

    try:
        first = plan_of(smallest)
    except BudgetError as error:
        why = str(error).removesuffix(SMALLER)
        raise BudgetError(f"not even size {smallest}, the smallest that is tried, fits: {why}", error.plan) from None
    fit = _search(plan_of, Fit(smallest, first, None), largest)
    if fit.size > smallest and fit.plan.fingerprint == first.fingerprint:
        raise CaptureError(
            f"the step does not grow with its size: sizes {smallest} and {fit.size} give the same one; let the "
            "function make the inputs of the size that it is called with"
        )
    return fit


def _check_size(name: str, size: object, least: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise OptionError(f"{name} must be a whole number, at least {least}, not {size!r}")


def _captured(returned: Any, forward_backward: bool) -> TrainGraph:
    """The captured graph of what the user's function has returned, named after the model's class."""
    unnamed = workload.made("", returned)
    leaves, _ = compat.flatten(unnamed.batch)
    fed = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
    devices = {parameter.device.type for parameter in unnamed.model.parameters()}
    if "meta" in fed and devices and "meta" not in devices:
        raise CaptureError(
            f"the inputs are on the meta device, and the model's parameters on {', '.join(sorted(devices))}; build the "
            "model inside the function, where tensors are made on the meta device"
        )
    named = replace(unnamed, name=type(returned[0]).__name__)
    return workload.capture(named, forward_backward=forward_backward)


def _search(plan_of: Callable[[int], Plan], fit: Fit, largest: int) -> Fit:
    """Search from ``fit``, which fits, the largest size up to ``largest`` that does."""

    def tried(size: int) -> Fit:
        try:
            return Fit(size, plan_of(size), fit.too_large)
        except BudgetError:
            return replace(fit, too_large=size)

    while fit.size < largest and fit.too_large is None:
        fit = tried(min(2 * fit.size, largest))
    while fit.too_large is not None and fit.too_large - fit.size > 1:
        fit = tried((fit.size + fit.too_large) // 2)
    return fit
