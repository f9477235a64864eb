"""``roamc.max_batch``: the largest batch, or sequence, whose step fits a budget; from plans alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from roamc import pipeline, workload
from roamc.errors import BudgetError, OptionError
from roamc.options import parse_options
from roamc.plan import Plan


@dataclass(frozen=True)
class Fit:
    """The largest size that fits.

    Attributes:
        size: what the function was called with.
        plan: the plan for it.
        too_large: the smallest size that was tried and does not fit; None if none was.
    """

    size: int
    plan: Plan
    too_large: int | None


def max_batch(
    make: Callable[[int], tuple[Any, ...]],
    memory_budget: int | str,
    *,
    largest: int = 1 << 20,
    forward_backward: bool = False,
    **options: Any,
) -> Fit:
    """Find the largest ``size`` for which a plan of ``make(size)`` keeps ``memory_budget``. Nothing runs.

    Sizes are doubled while they fit, then halved in between; a size fits if all smaller ones do.

    Args:
        make: called on the meta device, where tensors take no memory; returns ``(model, inputs)``,
            ``(model, inputs, loss_fn)`` or ``(model, inputs, loss_fn, optimizer)`` for a batch, a sequence, or
            whatever else is to grow to ``size``.
        memory_budget: as the option of that name.
        largest: no larger size is tried.
        forward_backward: plan without the optimizer's update, as for ``torch.compile``.
        options: see :class:`roamc.options.Options`.

    Raises:
        BudgetError: not even size 1 fits.
        OptionError: an option is unknown or out of range; the budget is a share of what eager holds, which grows
            with the batch.
    """
    parsed = parse_options({**options, "memory_budget": memory_budget})
    if isinstance(parsed.memory_budget, str) and parsed.memory_budget != "device":
        raise OptionError(f"max_batch needs a memory_budget in bytes, or 'device', not {memory_budget!r}")
    if largest < 1:
        raise OptionError(f"largest must be at least 1, not {largest}")

    def plan_of(size: int) -> Plan | None:
        with torch.device("meta"):
            returned = make(size)
        graph = workload.capture(workload.made("max_batch", returned), forward_backward=forward_backward)
        try:
            return pipeline.run(graph, parsed).plan
        except BudgetError:
            if size == 1:
                raise
            return None

    return _search(plan_of, largest)


def _search(plan_of: Callable[[int], Plan | None], largest: int) -> Fit:
    size, too_large = 1, None
    plan = plan_of(size)
    while size < largest and too_large is None:
        found = plan_of(min(2 * size, largest))
        if found is None:
            too_large = min(2 * size, largest)
        else:
            size, plan = min(2 * size, largest), found
    while too_large is not None and too_large - size > 1:
        middle = (size + too_large) // 2
        found = plan_of(middle)
        if found is None:
            too_large = middle
        else:
            size, plan = middle, found
    if plan is None:
        raise BudgetError("not even a size of 1 fits")
    return Fit(size, plan, too_large)
