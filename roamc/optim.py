"""Optimizers of roamc's own, for eager PyTorch and for :func:`roamc.train_step`."""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roamc.compat import without_autocast
from roamc.compat_dtensor import is_dtensor
from roamc.errors import OptionError, nearest
from roamc.operators.projection import BASES, columns_of, is_rank, projection

__all__ = ["CompAct"]

DENSE = ("embed", "head", "o_proj")
"""Parts of the names of weights that are not projected, by default: those of the paper."""

log = logging.getLogger(__name__)

_REFUSED = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")

Group = Mapping[str, Any]


class CompAct(torch.optim.Optimizer):
    """Adam on gradients that are projected to few columns: CompAct, arXiv 2410.15352, as an optimizer.

    For a weight W ``[m, n]`` of a linear layer, with gradient G and a random projection P ``[n, r]`` that every
    ``every`` steps is another one (the paper's equations are for the transpose of W, and so are those here read from
    right to left)::

        G^ = G P                                        [m, r]
        M  = beta1 M + (1 - beta1) G^                   [m, r], and V likewise of the squares
        N  = (M / (1 - beta1^t)) / (sqrt(V / (1 - beta2^t)) + eps)
        W  = (1 - lr weight_decay) W - lr scale N P^T

    ``E[P P^T]`` is the identity. The moments stay when P changes. Both take r / n of the bytes of AdamW's. A step of
    :func:`roamc.train_step` makes G^ without G, as (dY^T) (x P), so that gradients take r / n as well, and clips by the
    norm of G^. In eager and with ``torch.compile`` activations and gradients are dense.

    Weights whose name has a part of ``dense`` in it, parameters that are no matrix, and weights of so few rows that P
    takes more than gradient and moments lose by it get AdamW. The state of a projected weight is "step", "exp_avg" and
    "exp_avg_sq". Projections of weights in one stream are the same: each has a stream of its own, until a step of
    ``train_step`` lets those that read one input share. Streams stand in the parameter groups, as "streams", and so in
    ``state_dict()``.

    Args:
        params: ``model.named_parameters()``, or parameter groups with such ``"params"``; parameters without names where
            ``dense`` is empty. A group becomes two: one of what is projected, one of what is not, whose "rank" is None.
        lr: learning rate.
        rank: columns of P, as a share of n up to 1, or as a number above 1.
        every: steps after which P is another one.
        scale: factor of the update of projected weights.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled, as AdamW's: on W, by ``lr``.
        dense: parts of names of weights that are not projected.
        dense_lr: learning rate of what is not projected; None for ``lr``.
        seed: of all projections, in ``[0, 2**32)``; the same on all ranks.
        basis: "gaussian", P of N(0, 1 / r); or "orthonormal", columns of a signed Hadamard matrix, which is the
            identity for r = n. See :mod:`roamc.operators.projection`.

    Raises:
        OptionError: a setting is out of its range, or a weight has fewer columns than ``rank``; names it.
    """

    _told = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        rank: float = 1 / 4,
        every: int = 50,
        scale: float = 0.25,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        dense: Sequence[str] = DENSE,
        dense_lr: float | None = None,
        seed: int = 0,
        basis: str = "gaussian",
    ) -> None:
        defaults = {
            "lr": lr, "rank": rank, "every": every, "scale": scale, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "dense": (dense,) if isinstance(dense, str) else dense,
            "dense_lr": dense_lr, "seed": seed, "basis": basis,
        }  # fmt: skip
        check_settings(defaults)
        if rank is None:
            raise OptionError("CompAct: rank=None must be a share of n or a number of columns; groups may have None")
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters as one group of those that are projected and one of those that are not.

        Args:
            param_group: ``"params"``, as for the class, and settings that replace the optimizer's.

        Raises:
            OptionError: as the class raises.
        """
        if not isinstance(param_group, Mapping) or "params" not in param_group:
            raise OptionError(f"CompAct: a parameter group is a dict with 'params', not {reprlib.repr(param_group)}")
        settings = {key: value for key, value in param_group.items() if key != "params"}
        if isinstance(settings.get("dense"), str):
            settings["dense"] = (settings["dense"],)
        group = {**self.defaults, **settings}
        check_settings(group)
        projected: list[Any] = []
        dense: list[Any] = []
        for parameter in _listed(param_group["params"]):
            (projected if _projects(parameter, group) else dense).append(parameter)
        if projected:
            first = 1 + max((stream for other in self.param_groups for stream in other["streams"]), default=-1)
            streams = list(range(first, first + len(projected)))
            super().add_param_group({**settings, "params": projected, "streams": streams, "shared": False})
        if dense or not projected:
            rate = group["lr"] if group["dense_lr"] is None else group["dense_lr"]
            super().add_param_group(
                {**settings, "params": dense, "lr": rate, "rank": None, "streams": [], "shared": False}
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` of a CompAct returned, whose projections had as many columns.

        Raises:
            OptionError: the state is another optimizer's, or has moments of another shape; names a parameter.
        """
        _check_loaded(self.param_groups, state_dict)
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returns; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        projected = (parameter for group in self.param_groups if group["streams"] for parameter in group["params"])
        if not self._told and any(parameter.grad is not None for parameter in projected):
            self._told = True
            log.info(
                "CompAct.step() was given whole gradients: they and activations are dense here, and states alone are "
                "smaller; a step of roamc.train_step makes projected gradients without whole ones"
            )
        latest: dict[tuple[object, ...], Tensor] = {}
        for group in self.param_groups:
            check_settings(group)
            streams: Iterable[int | None] = group["streams"] or [None] * len(group["params"])
            for parameter, stream in zip(group["params"], streams, strict=True):
                if parameter.grad is not None:
                    with without_autocast():
                        self._update(parameter, group, stream, latest)
        return loss

    def _update(
        self, parameter: Tensor, group: Group, stream: int | None, latest: dict[tuple[object, ...], Tensor]
    ) -> None:
        """Update one parameter; ``latest`` holds the projection of the last one, by what it is made from."""
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError("CompAct does not support sparse gradients; use sparse=False")
        shape = shape_of(group, parameter.shape)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.get_default_dtype() if _is_wide() else torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = fresh(parameter, shape), fresh(parameter, shape)
        if tuple(state["exp_avg"].shape) != shape:
            raise OptionError(
                f"CompAct: the moments of a weight of shape {list(parameter.shape)} have shape "
                f"{list(state['exp_avg'].shape)}, and rank={group['rank']} makes {list(shape)}: leave rank as it was "
                "at the first step, or make a new optimizer"
            )
        state["step"] += 1
        step, rate = float(state["step"]), float(group["lr"])
        p = None
        if stream is not None:
            counter = float((step - 1) // group["every"])
            numbers = counter, group["seed"], stream, parameter.shape[1], shape[1], group["basis"]
            key = (*numbers, grad.dtype, grad.device)
            if key not in latest:
                latest.clear()
                latest[key] = projection(*numbers, dtype=grad.dtype, device=grad.device)
            p = latest[key]
            grad = grad @ p
        if group["weight_decay"]:
            parameter.mul_(1 - rate * group["weight_decay"])
        first, second, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (second.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        size = rate / (1 - beta1**step)
        if p is None:
            parameter.addcdiv_(first, denominator, value=-size)
        else:
            parameter.addmm_(first / denominator, p.t(), alpha=-size * group["scale"])


def _is_wide() -> bool:
    return torch.get_default_dtype() is torch.float64


def fresh(parameter: Tensor, shape: Sequence[int], value: float = 0.0) -> Tensor:
    """Return a moment of ``shape`` for ``parameter``, full of ``value``; with its strides if its shape is equal."""
    if tuple(shape) == tuple(parameter.shape):
        return torch.full_like(parameter, value, memory_format=torch.preserve_format)
    return torch.full(tuple(shape), value, dtype=parameter.dtype, device=parameter.device)


def shape_of(group: Group, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the gradient that updates a parameter of ``shape`` in ``group``, and of its moments."""
    whole = tuple(shape)
    return whole if group["rank"] is None else (whole[0], columns_of(group["rank"], whole[1]))


def share_streams(optimizer: torch.optim.Optimizer, streams: Mapping[int, int]) -> None:
    """Let weights of a :class:`CompAct` read the projections of these streams, from now on and for good.

    Nothing changes for weights that share already. Other optimizers are left as they are.

    Args:
        optimizer: has the weights.
        streams: ``id`` of a weight to its stream.
    """
    for group in optimizer.param_groups if isinstance(optimizer, CompAct) else ():
        if not group["shared"] and any(id(parameter) in streams for parameter in group["params"]):
            pairs = zip(group["params"], group["streams"], strict=True)
            group["streams"] = [streams.get(id(parameter), own) for parameter, own in pairs]
            group["shared"] = True


def streams_of(optimizer: torch.optim.Optimizer) -> tuple[tuple[int, ...], ...]:
    """Return the streams of the weights of each parameter group; empty for another optimizer than :class:`CompAct`."""
    return tuple(tuple(group["streams"]) for group in optimizer.param_groups) if isinstance(optimizer, CompAct) else ()


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _projects(named: Any, group: Group) -> bool:
    """Whether a parameter, or a pair of its name and it, is projected.

    Raises:
        OptionError: it should be and cannot, or nothing says so without a name.
    """
    name, parameter = named if isinstance(named, tuple) else (None, named)
    if group["rank"] is None or not isinstance(parameter, Tensor) or parameter.dim() != 2 or not parameter.numel():
        return False
    if name is None and group["dense"]:
        raise OptionError(
            "CompAct leaves out weights by their names: give it model.named_parameters(), or dense=() to project all"
        )
    if any(part in str(name) for part in group["dense"]) or not _pays(group, parameter.shape):
        return False
    if is_dtensor(parameter) or not parameter.is_floating_point():
        what = "a DTensor" if is_dtensor(parameter) else f"of {parameter.dtype}"
        raise OptionError(f"CompAct does not project {name}, which is {what}: name it in dense=, for AdamW")
    columns = columns_of(group["rank"], parameter.shape[1])
    if columns > parameter.shape[1]:
        raise OptionError(
            f"CompAct cannot project {name} of shape {list(parameter.shape)} to rank={group['rank']} columns: lower "
            "rank, give a share such as 1/4, or name the weight in dense="
        )
    return True


def _pays(group: Group, shape: Sequence[int]) -> bool:
    """Whether P has no more elements than gradient and moments of a weight lose by it; True where it keeps them all."""
    rows, whole = shape
    columns = columns_of(group["rank"], whole)
    kept = group["rank"] == 1 or columns >= whole > 1
    return kept or whole * columns <= 3 * rows * (whole - columns)


def check_settings(settings: Group) -> None:
    """Refuse settings of a :class:`CompAct` that are out of their ranges.

    Args:
        settings: a parameter group; its "rank" may be None.

    Raises:
        OptionError: names the setting, and what it may be.
    """
    for name in _REFUSED:
        if settings.get(name):
            raise OptionError(f"CompAct has no {name}=True; leave {name} out")
    for name, holds, may_be in _RANGES:
        value = settings[name]
        if isinstance(value, bool) or not holds(value):
            raise OptionError(f"CompAct: {name}={value!r} must be {may_be}")
    if settings["basis"] not in BASES:
        raise OptionError(f"CompAct: unknown basis {settings['basis']!r}{nearest(str(settings['basis']), BASES)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool) and math.isfinite(float(value))


def _is_rank(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and is_rank(value))


def _are_names(value: Any) -> bool:
    return isinstance(value, Collection) and all(isinstance(part, str) and part for part in value)


def _is_natural(value: Any, least: int) -> bool:
    return isinstance(value, int) and least <= value < 2**32


def _are_betas(value: Any) -> bool:
    pair = isinstance(value, Sequence) and len(value) == 2
    return pair and all(_is_number(beta) and 0 <= beta < 1 for beta in value)


_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("lr", lambda value: _is_number(value) and value >= 0, "a number from 0"),
    ("rank", _is_rank, "a share of n above 0 and up to 1, or a number of columns"),
    ("every", lambda value: _is_natural(value, 1), "a number of steps, 1 at least"),
    ("scale", lambda value: _is_number(value) and value > 0, "a number above 0"),
    ("betas", _are_betas, "two numbers from 0, below 1"),
    ("dense", _are_names, "parts of names of weights, such as ('embed', 'head'), or () for none"),
    ("eps", lambda value: _is_number(value) and value >= 0, "a number from 0"),
    ("weight_decay", lambda value: _is_number(value) and value >= 0, "a number from 0"),
    ("dense_lr", lambda value: value is None or (_is_number(value) and value >= 0), "a number from 0, or None"),
    ("seed", lambda value: _is_natural(value, 0), "an integer in [0, 2**32)"),
)
"""Settings, whether a value is in their range, and the range in words."""


def _check_loaded(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> None:
    saved_groups = state_dict["param_groups"]
    for (name, parameter, group), (index, saved) in zip(_each(groups), _each_saved(saved_groups), strict=False):
        shape = shape_of(group, parameter.shape)
        kept = state_dict["state"].get(index, {}).get("exp_avg")
        if "rank" not in saved:
            raise OptionError(
                f"the loaded state is no CompAct's, whose moments of {name} have shape {list(shape)}, and whose groups "
                "have ranks and streams: load it into the optimizer that it is of, or begin without state"
            )
        if saved["rank"] is not None and len(saved.get("streams", ())) != len(saved["params"]):
            raise OptionError(
                f"the loaded group of {name} has {len(saved['params'])} weights, and not as many streams: load all of "
                "what state_dict() of a CompAct returned"
            )
        if len(groups) == len(saved_groups):
            loaded = shape_of(saved, parameter.shape) if "rank" in saved else tuple(parameter.shape)
            loaded = loaded if kept is None else tuple(kept.shape)
            if loaded != shape:
                raise OptionError(
                    f"the loaded moments of {name} are {list(loaded)}, and this CompAct's are {list(shape)}: make it "
                    "with the rank and the dense= that the state was made with"
                )


def _each(groups: Sequence[Group]) -> Iterator[tuple[str, Tensor, Group]]:
    """Name, parameter and group of each parameter."""
    for group in groups:
        names = group.get("param_names") or [f"a parameter of shape {list(each.shape)}" for each in group["params"]]
        yield from ((name, parameter, group) for name, parameter in zip(names, group["params"], strict=True))


def _each_saved(groups: Sequence[Group]) -> Iterator[tuple[int, Group]]:
    yield from ((index, group) for group in groups for index in group["params"])
