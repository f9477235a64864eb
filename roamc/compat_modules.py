"""What a model holds, read off the dicts of its modules: a step asks before every run, and torch's walk is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx._symbolic_trace import _orig_module_call

call_module: Callable[..., Any] = _orig_module_call
"""``nn.Module.__call__`` as it is while nothing is traced; ``fx.Tracer`` puts three more calls around it."""


def modules_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return what ``model.modules()`` yields, in its order."""
    reached: dict[int, nn.Module] = {}
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None and id(module) not in reached:
            reached[id(module)] = module
            left += reversed(module._modules.values())
    return tuple(reached.values())


def parameters_of(modules: Iterable[nn.Module]) -> tuple[nn.Parameter, ...]:
    """Return the parameters of ``modules``, each once, in the order of ``model.parameters()``."""
    reached = dict.fromkeys(value for module in modules for value in module._parameters.values())
    return tuple(value for value in reached if value is not None)


def buffers_of(modules: Iterable[nn.Module]) -> tuple[torch.Tensor, ...]:
    """Return the buffers of ``modules``, each once, in the order of ``model.buffers()``."""
    reached = dict.fromkeys(value for module in modules for value in module._buffers.values())
    return tuple(value for value in reached if value is not None)
