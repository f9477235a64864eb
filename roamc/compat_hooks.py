"""torch's private interfaces: hooks, the autograd graph, and modes. See roamc/compat.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from roamc.compat import flatten
from roamc.errors import CaptureError


def leaves_behind(result: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield each leaf tensor of the autograd graph behind ``result`` once."""
    return (node.variable for node in nodes_behind([result]) if hasattr(node, "variable"))


def nodes_behind(results: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield each node of the autograd graph behind ``results`` once."""
    waiting: list[Any] = [*dict.fromkeys(result.grad_fn for result in results)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        fresh = [before for before, _ in node.next_functions if before not in seen]
        seen.update(fresh)
        waiting.extend(fresh)


def has_gradient_node_hooks(parameter: torch.Tensor) -> bool:
    """Whether Python has registered hooks on the autograd node that accumulates ``parameter.grad``."""
    global _asked
    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *_: None)  # torch shows a node's hooks to nobody but a new one's handle
        _asked += 1
        beside = len(handle.hooks_dict_ref()) - 1
        handle.remove()
        if beside:
            return True
    return False


_asked = 0
"""Hooks that :func:`has_gradient_node_hooks` has registered to see the others."""


def hooks_so_far() -> int:
    """Return a number that is another one once Python has registered a hook, on whatever it may be."""
    from torch.utils.hooks import RemovableHandle

    return RemovableHandle.next_id - _asked


def global_module_hooks() -> tuple[dict[int, Callable[..., Any]], ...]:
    """Return the hooks that run for every module of the process, number to hook, as four dicts, one for each kind.

    The kinds are forward pre-hooks, forward hooks, backward pre-hooks and backward hooks.
    """
    from torch.nn.modules import module

    return (
        module._global_forward_pre_hooks, module._global_forward_hooks,
        module._global_backward_pre_hooks, module._global_backward_hooks,
    )  # fmt: skip


def function_modes() -> list[torch.overrides.TorchFunctionMode]:
    """Return the torch function modes around this call, outermost first, without that of the default device."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    return [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]


def off_meta() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager: inside, torch's default device is the CPU where it was meta, as in a traced step."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext()


def kernels_of_attention() -> tuple[object, ...]:
    """Return what decides which kernel attention takes: a flag for each kernel on CUDA, then torch's priorities."""
    return (
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled(),
        *torch._C._get_sdp_priority_order(),
    )  # fmt: skip


def optimizer_step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return (pre-hooks, post-hooks) of ``optimizer.step()``, in torch's order, those for all optimizers included."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    before = [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
    return before, [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]


class AbsentGradient(torch.Tensor):
    """A tensor with the geometry of a parameter's gradient and no values, for ``.grad`` while optimizer hooks run.

    Args:
        parameter: the parameter.
        name: its name, kept as ``parameter_name``.

    Raises:
        CaptureError: later, by every operator on the tensor; names the parameter.
    """

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> AbsentGradient:
        """Make one for ``parameter``; ``name`` is the parameter's, for the error message."""
        gradient: AbsentGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        gradient.parameter_name = name
        return gradient

    parameter_name: str

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise a CaptureError for any operator on such a gradient."""
        leaves, _ = flatten((args, kwargs))
        name = next(leaf.parameter_name for leaf in leaves if isinstance(leaf, cls))
        raise CaptureError(
            f"a step hook of the optimizer uses .grad of {name!r}, and train_step keeps no gradients; clip by "
            "clip_grad_norm=, change gradients by Tensor.register_hook on the parameter, or use roamc.optimize"
        )
