"""One rank's part of a model under tensor parallelism, made of the whole model: for plans, without any other rank.

    colwise   y = x W^T + b      rank r has rows r of W and of b, and so its own columns of y
    rowwise   y = x W^T + b      rank r has columns r of W, reads its own columns of x; y is summed over the ranks
    gathered  y = x W^T + b      as colwise, and the columns of all ranks are gathered: a head, of which y are scores

The argument of a ``colwise`` layer is the same on all ranks; its gradient is the sum of what the ranks have (f of
Shoeybi et al., Megatron-LM, arXiv 1909.08053); the sum of a ``rowwise`` layer is g there. A plan maps patterns of
layers' names, in which ``*`` stands for a name between two dots, to words: the form of ``base_model_tp_plan`` in
configurations of transformers, whose other words are in :data:`WORDS`, :data:`WITH_SUM` and :data:`LEFT_WHOLE`.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roamc.compat import reparametrized
from roamc.errors import OptionError, nearest
from roamc.operators.collectives import FUNCTIONAL
from roamc.operators.shards import own_part

LEFT_WHOLE = ("embedding_rowwise", "embedding_colwise", "sequence_parallel")
"""Words of a plan for layers that every rank keeps whole here: embeddings and norms give the same values so."""

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


def gathered(x: Tensor, ranks: int, group: str) -> Tensor:
    """Return the columns of all ranks beside each other, where each has ``x``; it has no gradient."""
    rows = FUNCTIONAL.all_gather_into_tensor.default(x.movedim(-1, 0).contiguous(), ranks, group)
    result: Tensor = FUNCTIONAL.wait_tensor.default(rows)
    return result.movedim(0, -1)


def own_columns(x: Tensor, ranks: int, group: str) -> Tensor:
    """Return this rank's columns of ``x``, which all ranks have; it has no gradient."""
    result: Tensor = own_part(x.movedim(-1, 0), ranks, group)
    return result.movedim(0, -1)


class _Pick(torch.autograd.Function):
    """This rank's columns of what all ranks have; the gradient is put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.among = ranks, group
        return own_columns(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gathered(grad, *ctx.among), None, None


class Calls:
    """How often a layer has been called; one object for it and its copies, which no capture puts back.

    Attributes:
        count: the number.
    """

    def __init__(self) -> None:
        self.count = 0


class Part(nn.Linear):
    """A linear layer of which this rank has a part. The attributes are set after construction.

    Attributes:
        group: name of the process group that splits the layer.
        ranks: how many ranks it has.
        whole: whether columns are those of all ranks: of the result of :class:`Columns`, the argument of :class:`Rows`.
        calls: how often ``forward`` was called.
    """

    group: str
    ranks: int
    whole: bool
    calls: Calls


class Columns(Part):
    """A linear layer of which this rank has a part of the outputs: some rows of weight and bias."""

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's columns of the layer's result, or if :attr:`whole` all of them.

        Args:
            input: the same on every rank, (..., in_features).
        """
        self.calls.count += 1
        result = F.linear(enter(input, self.group), self.weight, self.bias)
        if not self.whole:
            return result
        columns: Tensor = _Beside.apply(result, self.ranks, self.group)  # type: ignore[no-untyped-call]
        return columns


class Rows(Part):
    """A linear layer of which this rank has a part of the inputs: some columns of the weight, and the whole bias."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's result, summed over the ranks.

        Args:
            input: this rank's columns of the layer's argument, or if :attr:`whole` all of them.
        """
        self.calls.count += 1
        own: Tensor = _Pick.apply(input, self.ranks, self.group) if self.whole else input  # type: ignore[no-untyped-call]
        result = leave(F.linear(own, self.weight), self.group)
        return result if self.bias is None else result + self.bias


WORDS: dict[str, tuple[type[Columns] | type[Rows], bool]] = {
    "colwise": (Columns, False),
    "rowwise": (Rows, False),
    "packed_colwise": (Columns, False),
    "colwise_gather_output": (Columns, True),
    "colwise_rep": (Columns, True),
    "rowwise_split_input": (Rows, True),
    "rowwise_rep": (Rows, True),
}
"""Word of a plan to the layer that one rank has, and whether it is :attr:`Part.whole`.

Columns that are gathered may be a head's: one that shares its weight, or has outputs that the ranks do not divide, is
kept whole.
"""

WITH_SUM = "replicated_with_grad_allreduce"
"""Word of a plan for a layer that all ranks have whole and use on their own heads: its gradients are summed."""


@functools.cache
def _with_sum(kind: type[nn.Module]) -> type[nn.Module]:
    """The class ``kind`` with parameters whose gradients are summed over the ranks of its attribute ``group``."""

    class Summed(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **named: Any) -> Any:
            own = self.named_parameters(recurse=False)
            entered = {name: enter(tensor, self.group) for name, tensor in own}
            with reparametrized(self, entered):
                return super().forward(*args, **named)

    Summed.__name__ = kind.__name__
    return Summed


def split(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, plan: Mapping[str, str], ranks: int, group: str
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return one rank's part of ``model``, and of the optimizer of its parameters if there is one.

    ``model`` and ``optimizer`` stay as they are. Parameters and buffers that are not split are shared with them.

    Args:
        model: the whole model; its parameters may be on the meta device.
        optimizer: the optimizer of its parameters; what it has as its state is left out.
        plan: pattern of layers' names to a word of :data:`WORDS` or :data:`LEFT_WHOLE`, or :data:`WITH_SUM`.
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
        layer.group = group
        if word == WITH_SUM:
            layer.__class__ = _with_sum(layer.__class__)
            continue
        layer.__class__, layer.whole = WORDS[word]
        layer.ranks, layer.calls = ranks, Calls()
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
    missing = unmatched(model, plan)
    if len(missing) == len(plan):
        raise OptionError(missing[next(iter(plan))])


def unmatched(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return each pattern of ``plan`` that no layer of ``model`` has a name like, with a sentence that says so."""
    names = [name for name, _ in model.named_modules()]
    patterns = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)
    return {
        pattern: f"no layer of {type(model).__name__} has a name like {pattern!r}, which the tensor-parallel plan "
        f"splits{nearest(pattern, patterns)}"
        for pattern in plan
        if not any(map(_pattern(pattern).fullmatch, names))
    }


def calls_of(layer: nn.Module) -> list[Calls]:
    """Return the counts of calls that ``layer`` and its parts have, in the order of ``modules()``."""
    return [value for part in layer.modules() for value in vars(part).values() if isinstance(value, Calls)]


def check_called(model: nn.Module) -> None:
    """Refuse a layer that is split and was not called, although its model was captured.

    Args:
        model: what :func:`split` returned.

    Raises:
        OptionError: names the layer: where the model reads its weight itself, nothing is summed over the ranks.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, Part) and not layer.calls.count:
            raise OptionError(
                f"{name} is split, but the model does not call it: what it does with the weight itself is not split "
                "among the ranks; leave the layer out of the tp_plan, or call it"
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
        if word not in WORDS and word != WITH_SUM:
            words = ", ".join((*WORDS, WITH_SUM, *LEFT_WHOLE))
            raise OptionError(f"the tensor-parallel plan says {word!r} of {name}; known are {words}")
        if word in WORDS and type(layer) is not nn.Linear:
            raise OptionError(f"{name} cannot be split {word}: it is a {type(layer).__name__}, and not an nn.Linear")
        if WORDS.get(word) != (Columns, True) or (layer.out_features % ranks == 0 and not _shares(model, layer)):
            yield name, word


def _shares(model: nn.Module, layer: nn.Module) -> bool:
    """Whether another layer has a parameter of ``layer``."""
    own = {id(parameter) for parameter in layer.parameters()}
    others = (other for other in model.modules() if other is not layer)
    return any(id(parameter) in own for other in others for parameter in other.parameters(recurse=False))


def _check(model: nn.Module, words: Mapping[str, str], ranks: int) -> None:
    """Refuse a plan that splits nothing, tied weights, and numbers that the ranks do not divide."""
    if not any(word in WORDS for word in words.values()):
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
    if word == WITH_SUM:
        return
    axis, size = (0, "outputs") if WORDS[word][0] is Columns else (1, "inputs")
    shape = list(layer.weight.shape)
    if shape[axis] % ranks:
        raise OptionError(f"tp={ranks} does not divide the {shape[axis]} {size} of {name}")
    shape[axis] //= ranks
    yield layer.weight, layer.weight.new_empty(shape)
    if axis == 0 and layer.bias is not None:
        yield layer.bias, layer.bias.new_empty(shape[:1])
