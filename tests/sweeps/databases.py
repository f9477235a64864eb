"""torch's own databases of modules and operators as cases: a module, and the arguments of one call.

Needs ``expecttest``, which ``torch.testing._internal`` imports.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import time
import warnings
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

DTYPES = (torch.float32, torch.bfloat16)

LEFT_OUT = dict.fromkeys(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    "gives memory as it finds it",
)
"""Operators without a right answer, and why."""


@dataclass(frozen=True)
class Entry:
    """One entry of a database in one dtype; modules also in training or not."""

    database: str
    number: int
    name: str
    dtype: torch.dtype
    training: bool = True

    def __str__(self) -> str:
        mode = "" if self.training else " eval"
        return f"{self.database} {self.name} {str(self.dtype).removeprefix('torch.')}{mode}"


@dataclass(frozen=True)
class Case:
    """A call to compile: ``model(*args, **kwargs)``."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> Case:
        """The same case in tensors of its own; strides and ``requires_grad`` are kept."""
        args, kwargs = pytree.tree_map_only(Tensor, _again, (self.args, self.kwargs))
        return Case(copy.deepcopy(self.model), args, kwargs)


def _again(tensor: Tensor) -> Tensor:
    return copy.deepcopy(tensor.detach()).requires_grad_(tensor.requires_grad)


class Operator(nn.Module):
    """One operator as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


DATABASES = {
    "module": ("common_modules", "module_db"),
    "op": ("common_methods_invocations", "op_db"),
    "optimizer": ("common_optimizers", "optim_db"),
}


@functools.cache
def database(name: str) -> list[Any]:
    """One of ``DATABASES``. torch's import takes hypothesis over; its settings are put back."""
    module, attribute = DATABASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        home = importlib.import_module(f"torch.testing._internal.{module}")
        infos = list(getattr(home, attribute))
    if name == "op":  # dynamo leaves what sets a seed to eager, and a trace loses it; callers set it before the call
        for info in infos:
            if info.gradcheck_wrapper is home.wrapper_set_seed:
                info.gradcheck_wrapper = _unseeded
        home.wrapper_set_seed = _unseeded  # type: ignore[attr-defined]
    hypothesis.settings.load_profile("default")
    return infos


def _unseeded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def entries() -> Iterator[Entry]:
    """Every entry of both databases, in every dtype of ``DTYPES`` that it has on a CPU."""
    for dtype in DTYPES:
        for number, module in enumerate(database("module")):
            if dtype in module.dtypes or dtype is torch.bfloat16:
                yield from (Entry("module", number, module.name, dtype, training) for training in (True, False))
        yield from operators_in(dtype)


def operators_in(dtype: torch.dtype) -> Iterator[Entry]:
    """Every operator of torch's database that has ``dtype`` on a CPU."""
    for number, operator in enumerate(database("op")):
        if dtype in operator.supported_dtypes("cpu") and operator.name not in LEFT_OUT:
            yield Entry("op", number, operator.formatted_name, dtype)


def cases(entry: Entry) -> list[Case]:
    """The samples of an entry; the same ones in every process."""
    torch.manual_seed(0)
    info = database(entry.database)[entry.number]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _modules(info, entry) if entry.database == "module" else _operators(info, entry)


def _modules(info: Any, entry: Entry) -> list[Case]:
    samples = info.module_inputs_func(
        info, device="cpu", dtype=entry.dtype, requires_grad=True, training=entry.training
    )
    module_cases = []
    for sample in samples:
        construct, call = sample.constructor_input, sample.forward_input
        model = info.module_cls(*construct.args, **construct.kwargs).to(entry.dtype).train(entry.training)
        if call is not None:
            module_cases.append(Case(model, tuple(call.args), dict(call.kwargs)))
    return module_cases


def _operators(info: Any, entry: Entry) -> list[Case]:
    trains = entry.dtype in info.supported_backward_dtypes("cpu")
    samples = info.sample_inputs("cpu", entry.dtype, requires_grad=trains)
    return [Case(Operator(info.op), (sample.input, *sample.args), dict(sample.kwargs)) for sample in samples]


def spread(count: int, wanted: int | None) -> list[int]:
    """``wanted`` numbers below ``count``, first and last among them; all of them for None."""
    if wanted is None or wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [0]
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def verdicts(
    entry: Entry,
    samples: int | None,
    judge: Callable[[Case], Any],
    first: int,
    judged: Container[int] = (),
    cases: Callable[[Entry], list[Case]] = cases,
) -> Iterator[dict[str, Any]]:
    """The row of each sample of an entry, from the ``first`` on of those that are not in ``judged``.

    Args:
        entry: of one of the databases.
        samples: how many, evenly spread; None for all.
        judge: gives what has an ``outcome`` and a ``text``.
        first: number of the first sample.
        judged: numbers of samples that an earlier run has judged.
        cases: gives all samples of the entry.
    """
    try:
        entry_cases = cases(entry)
    except Exception as error:  # the database refuses the dtype
        yield {"outcome": "left out", "sample": 0, "text": f"no samples: {type(error).__name__}: {error}"[:200]}
        return
    for sample in [sample for sample in spread(len(entry_cases), samples) if sample not in judged][first:]:
        start = time.perf_counter()
        verdict = judge(entry_cases[sample])
        seconds = round(time.perf_counter() - start, 2)
        yield {"outcome": verdict.outcome, "sample": sample, "text": verdict.text, "seconds": seconds}


def tensors_in(nest: Any) -> list[Tensor]:
    """The tensors of a nest, in order."""
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers."""
    return itertools.chain(model.named_parameters(), model.named_buffers())
