"""One rank's part of a model under tensor parallelism, made of the whole model: for plans, without any other rank.

    colwise   y = x W^T + b      rank r has rows r of W and of b, and so its own columns of y
    rowwise   y = x W^T + b      rank r has columns r of W, reads its own columns of x; y is summed over the ranks
    gathered  y = x W^T + b      as colwise, and the columns of all ranks are gathered: a head, of which y are scores

The argument of a ``colwise`` layer is the same on all ranks; its gradient is the sum of what the ranks have (f of
Shoeybi et al., Megatron-LM, arXiv 1909.08053); the sum of a ``rowwise`` layer is g there. A plan maps patterns of
layers' names, in which ``*`` stands for a name between two dots, to these words: the form of ``base_model_tp_plan`` in
configurations of transformers.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roamc.errors import OptionError
from roamc.operators.collectives import FUNCTIONAL

LEFT_WHOLE = ("embedding_rowwise", "sequence_parallel")
"""Words of a plan for layers that every rank keeps whole here: embeddings and norms give the same values so."""

GATHERED = ("colwise_gather_output", "colwise_rep")
"""Words of a plan for heads. One that shares its weight, or has outputs that the ranks do not divide, is kept whole."""

HEADS = ("heads", "num_heads", "n_head", "n_heads", "num_attention_heads", "num_key_value_heads")
"""Names under which modules and configurations say how many heads, or key heads, attention has."""


def summed(x: Tensor, group: str) -> Tensor:
    """Return the sum of what the ranks have as ``x``, as tensor parallelism in torch traces it; it has no gradient."""
    result: Tensor = FUNCTIONAL.wait_tensor.default(FUNCTIONAL.all_reduce.default(x.contiguous(), "sum", group))
    return result


class _Enter(torch.autograd.Function):
    """All ranks read the argument; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum of what the ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.view_as(grad), None


class _Beside(torch.autograd.Function):
    """What the ranks have, side by side along the last dimension; the gradient of the first rank is its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.size = x.shape[-1]
        started = FUNCTIONAL.all_gather_into_tensor.default(x.contiguous(), ranks, group)
        return torch.cat(FUNCTIONAL.wait_tensor.default(started).split(x.shape[0]), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.split(ctx.size, -1)[0].contiguous(), None, None


def enter(x: Tensor, group: str) -> Tensor:
    """Return ``x``, the same on all ranks, for a layer that each has a part of: its gradient is the sum of theirs."""
    entered: Tensor = _Enter.apply(x, group)  # type: ignore[no-untyped-call]
    return entered


def leave(x: Tensor, group: str) -> Tensor:
    """Return the sum of what the ranks have as ``x``; the gradient is the same on all of them."""
    left: Tensor = _Leave.apply(x, group)  # type: ignore[no-untyped-call]
    return left


class Columns(nn.Linear):
    """A linear layer of which this rank has a part of the outputs: some rows of weight and bias.

    Attributes:
        group: name of the process group that splits the layer; set after construction.
    """

    group: str

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's columns of the layer's result for ``input`` (..., in_features), the same on every rank."""
        return F.linear(enter(input, self.group), self.weight, self.bias)


class Gathered(Columns):
    """A linear layer of which this rank has a part of the outputs, and all ranks then have all.

    Attributes:
        ranks: how many ranks share the outputs; set after construction.
    """

    ranks: int

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's result for ``input`` (..., in_features), the same on every rank."""
        whole: Tensor = _Beside.apply(super().forward(input), self.ranks, self.group)  # type: ignore[no-untyped-call]
        return whole


class Rows(nn.Linear):
    """A linear layer of which this rank has a part of the inputs: some columns of the weight, and the whole bias.

    Attributes:
        group: name of the process group that splits the layer; set after construction.
    """

    group: str

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's result, summed over the ranks, for ``input``: this rank's columns of the argument."""
        result = leave(F.linear(input, self.weight), self.group)
        return result if self.bias is None else result + self.bias


LAYERS: dict[str, type[Columns] | type[Rows]] = {
    **{"colwise": Columns, "rowwise": Rows},
    **dict.fromkeys(GATHERED, Gathered),
}
"""Word of a plan to the layer that one rank has."""


def split(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, plan: Mapping[str, str], ranks: int, group: str
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return one rank's part of ``model``, and of the optimizer of its parameters if there is one.

    ``model`` and ``optimizer`` stay as they are. Parameters and buffers that are not split are shared with them.

    Args:
        model: the whole model; its parameters may be on the meta device.
        optimizer: the optimizer of its parameters; what it has as its state is left out.
        plan: pattern of layers' names to a word of :data:`LAYERS` or :data:`LEFT_WHOLE`.
        ranks: how many ranks the group has.
        group: the group's name, as operators are called with it.

    Raises:
        OptionError: the plan splits no layer or one that is not an ``nn.Linear``, has an unknown word, or ``ranks`` do
            not divide the heads or the sizes of a layer.
    """
    words = dict(_planned(model, plan, ranks))
    _check(model, words, ranks)
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    layers = dict(model.named_modules())
    for name, word in words.items():
        for parameter, cut in _cut(name, layers[name], word, ranks):
            memo[id(parameter)] = nn.Parameter(cut, parameter.requires_grad)
    part = copy.deepcopy(model, memo)
    layers = dict(part.named_modules())
    for name, word in words.items():
        layer: Any = layers[name]
        layer.__class__ = LAYERS[word]
        layer.group, layer.ranks = group, ranks
        layer.out_features, layer.in_features = layer.weight.shape
    return part, None if optimizer is None else _without_state(optimizer, memo)


def _without_state(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy of ``optimizer``, for the parameters that ``memo`` has in the place of its own."""
    memo[id(optimizer.state)] = type(optimizer.state)(dict)
    return copy.deepcopy(optimizer, memo)


def check_names(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Refuse a plan of the user's that names no layer of ``model``.

    Args:
        model: the whole model.
        plan: as for :func:`split`.

    Raises:
        OptionError: ``plan`` does not map texts to texts, or no layer has a name like any of its patterns.
    """
    if not isinstance(plan, Mapping) or not all(isinstance(text, str) for text in (*plan, *plan.values())):
        raise OptionError(f"tp_plan must map patterns of layers' names to words, not be {plan!r}")
    names = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name, _ in model.named_modules())
    if not any(_pattern(pattern).fullmatch(name) for pattern in plan for name, _ in model.named_modules()):
        wanted = next(iter(plan))
        near = difflib.get_close_matches(wanted, names, n=1)
        raise OptionError(
            f"no layer of {type(model).__name__} has a name like {wanted!r}, which the tensor-parallel plan splits"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )


def _pattern(name: str) -> re.Pattern[str]:
    """The pattern of a plan: ``*`` stands for a name between two dots."""
    return re.compile(re.escape(name).replace(r"\*", r"[^.]+"))


def _planned(model: nn.Module, plan: Mapping[str, str], ranks: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the word of every layer that is split."""
    patterns = [(_pattern(name), word) for name, word in plan.items()]
    for name, layer in model.named_modules():
        word = next((word for pattern, word in patterns if pattern.fullmatch(name)), None)
        if word is None or word in LEFT_WHOLE:
            continue
        if word not in LAYERS:
            known = ", ".join((*LAYERS, *LEFT_WHOLE))
            raise OptionError(f"the tensor-parallel plan says {word!r} of {name}; known are {known}")
        if type(layer) is not nn.Linear:
            raise OptionError(f"{name} cannot be split {word}: it is a {type(layer).__name__}, and not an nn.Linear")
        if word not in GATHERED or (layer.out_features % ranks == 0 and not _shares(model, layer)):
            yield name, word


def _shares(model: nn.Module, layer: nn.Module) -> bool:
    """Whether another layer has a parameter of ``layer``."""
    own = {id(parameter) for parameter in layer.parameters()}
    others = (other for other in model.modules() if other is not layer)
    return any(id(parameter) in own for other in others for parameter in other.parameters(recurse=False))


def _check(model: nn.Module, words: Mapping[str, str], ranks: int) -> None:
    """Refuse a plan that splits nothing, tied weights, and numbers that the ranks do not divide."""
    if not words:
        raise OptionError(
            f"nothing says how {type(model).__name__} is split among {ranks} ranks: give a tp_plan such as "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
        )
    for name, heads in _heads(model):
        if heads % ranks:
            raise OptionError(f"tp={ranks} does not divide the {heads} {name}")
    owners: dict[int, str] = {}
    for name, layer in model.named_modules():
        for parameter in layer.parameters(recurse=False):
            other = owners.setdefault(id(parameter), name)
            if other != name and (name in words or other in words):
                raise OptionError(f"{name} cannot be split: it shares a parameter with {other}")


def _heads(model: nn.Module) -> Iterator[tuple[str, int]]:
    for each in (getattr(model, "config", None), *model.modules()):
        for name in HEADS:
            if isinstance(count := getattr(each, name, None), int):
                yield name, count


def _cut(name: str, layer: Any, word: str, ranks: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter of a layer that is split, and a tensor like this rank's part of it."""
    axis, size = (1, "inputs") if word == "rowwise" else (0, "outputs")
    shape = list(layer.weight.shape)
    if shape[axis] % ranks:
        raise OptionError(f"tp={ranks} does not divide the {shape[axis]} {size} of {name}")
    shape[axis] //= ranks
    yield layer.weight, layer.weight.new_empty(shape)
    if axis == 0 and layer.bias is not None:
        yield layer.bias, layer.bias.new_empty(shape[:1])
