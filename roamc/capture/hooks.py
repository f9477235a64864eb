"""Hooks that a user has registered on parameters and modules, in the trace of a training step.

Hooks of modules, and of tensors inside the model, run while the model is traced: of them only what they read is needed,
as a part of the step's key. Hooks of parameters need more: the trace puts other tensors in the parameters' place.

    Tensor.register_hook                         traced on the gradient, before clipping and update
    Tensor.register_post_accumulate_grad_hook    refused: it reads .grad, and a planned step has none
    hooks on the node that accumulates .grad     refused likewise
    hooks that the step itself registers         refused: the next trace would not have them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from roamc import compat, compat_hooks
from roamc.capture.closures import Closures
from roamc.capture.python_keys import Seen, of_called
from roamc.capture.python_names import iterators_of
from roamc.capture.python_state import HOOKS
from roamc.errors import CaptureError
from roamc.operators import ops

Hook = Callable[..., Any]


class NodeHooks:
    """Finds the parameters that have hooks on the autograd node that accumulates their ``.grad``, before every step.

    To ask one parameter takes 15 microseconds. Where none had such hooks, the same parameters are asked again only once
    any hook has been registered in this process since.
    """

    def __init__(self) -> None:
        self._asked_for: object = None
        self._found: tuple[int, ...] = ()

    def among(self, parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the positions in ``parameters`` of those with hooks on the autograd node that accumulates ``.grad``.

        Parameters that require no gradient are left out.
        """
        asked_for = compat_hooks.hooks_so_far(), [id(p) for p in parameters if p.requires_grad]
        if self._found or asked_for != self._asked_for:
            self._found = tuple(
                number
                for number, parameter in enumerate(parameters)
                if parameter.requires_grad and compat_hooks.has_gradient_node_hooks(parameter)
            )
            self._asked_for = asked_for
        return self._found


def hooks_key(
    modules: Sequence[nn.Module], parameters: Sequence[torch.Tensor], of_nodes: NodeHooks, seen: Seen
) -> tuple[object, ...]:
    """Return a hashable key of the hooks that a step contains; a captured step serves only while it stays equal.

    A hook is known by the number that torch gives it at its registration (one that is removed and registered again is
    another hook) and by its function; what that reads is put into ``seen``.

    Args:
        modules: all modules of the model, as ``model.modules()`` gives them.
        parameters: all parameters of the model, always in the same order.
        of_nodes: finds the hooks on autograd nodes; the same object at every step.
        seen: what the step's key has met.

    Returns:
        Four items: the hooks of modules, each with the position of its module; the tensor hooks and the
        post-accumulate-grad hooks of parameters, likewise; the positions of parameters with hooks on their autograd
        node; the hooks that run for every module of the process.
    """
    of_modules = tuple(
        (number, name, *_described(hooks, seen))
        for number, own in enumerate(map(vars, modules))
        for name in HOOKS
        if (hooks := own.get(name))
    )
    of_parameters = tuple(
        (number, *_described(parameter._backward_hooks or {}, seen), "late", *_late(parameter))
        for number, parameter in enumerate(parameters)
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    )
    of_all = tuple(tuple(_described(hooks, seen)) for hooks in compat_hooks.global_module_hooks())
    return (of_modules, of_parameters, of_nodes.among(parameters), of_all)


def _described(hooks: Mapping[int, Hook], seen: Seen) -> Iterator[object]:
    return ((number, of_called(hook, seen)) for number, hook in hooks.items())


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks that run when ``.grad`` is accumulated, which a planned step does not do, and hooks with iterators.

    Parameters with ``requires_grad=False`` may have any.

    Raises:
        CaptureError: names the parameter and, where torch tells it, the hook.
    """
    registered: list[Mapping[int, Hook]] = [*compat_hooks.global_module_hooks()]
    registered += [vars(module)[name] for module in model.modules() for name in HOOKS]
    registered += [parameter._backward_hooks or {} for parameter in model.parameters()]
    for hook in (hook for hooks in registered for hook in hooks.values()):
        check_iterators(hook, f"hook {name_of(hook)}")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        late = _late(parameter)
        if late:
            raise CaptureError(
                f"parameter {name!r} has a post-accumulate-grad hook ({name_of(next(iter(late.values())))}), and "
                "train_step keeps no .grad for it to read; change the gradient by register_hook, or use roamc.optimize"
            )
        if compat_hooks.has_gradient_node_hooks(parameter):
            raise CaptureError(
                f"parameter {name!r} has a hook on the autograd node that accumulates its .grad, and train_step keeps "
                "no .grad; change the gradient by parameter.register_hook, or use roamc.optimize"
            )


def check_iterators(function: Callable[..., object], who: str) -> None:
    """Refuse a function that names an iterator: every later step would compute with the values of the first.

    Args:
        function: the loss function or a hook.
        who: its name in the message.

    Raises:
        CaptureError: says of which type the iterator is, and what to do.
    """
    for iterator in iterators_of(function):
        raise CaptureError(
            f"{who} names a {type(iterator).__name__}, an iterator, which advances only while the step is traced: "
            "every later step would compute with the same values; call next() outside, and pass what it returns"
        )


def follow_hooks(leaf: torch.Tensor, parameter: torch.Tensor, name: str, closures: Closures) -> None:
    """Register the tensor hooks of ``parameter`` on ``leaf``, in their order, so that its backward traces them.

    Call it inside the traced function. A parameter that requires no gradient is left out.

    Args:
        leaf: the traced tensor in the place of ``parameter``.
        parameter: the model's own; its hooks stay.
        name: of the parameter, for messages.
        closures: entered around each hook, since autograd runs hooks outside of all modes.

    Raises:
        CaptureError: later, when backward runs a hook: the hook depends on values, or neither returns another gradient
            nor writes to a tensor.
    """
    for hook in (parameter._backward_hooks or {}).values() if parameter.requires_grad else ():
        leaf.register_hook(_traced(hook, name, closures))


def hooks_on(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the numbers of the gradient hooks on ``tensor``, those behind the accumulation of ``.grad`` included."""
    return (*(tensor._backward_hooks or ()), *_late(tensor))


def name_of(hook: object) -> str:
    """Return the name of the function or object ``hook`` for messages: its qualified name, or that of its class."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _late(parameter: torch.Tensor) -> Mapping[int, Any]:
    """Post-accumulate-grad hooks."""
    return parameter._post_accumulate_grad_hooks or {}


def _traced(hook: Hook, name: str, closures: Closures) -> Hook:
    """Wrap a gradient hook for a trace: errors name it, and one that leaves nothing in the trace is refused."""
    who = f"the gradient hook {name_of(hook)} of parameter {name!r}"

    def run(gradient: torch.Tensor) -> torch.Tensor | None:
        last = _last(compat.graph_so_far())
        try:
            with closures:  # autograd runs hooks without the modes that are around it
                result: torch.Tensor | None = hook(gradient)
        except (RuntimeError, CaptureError) as error:  # torch's own, or roamc's, for values of fake tensors
            raise CaptureError(
                f"{who} cannot be traced ({str(error).splitlines()[0]}); a hook of a planned step must not depend on "
                "values: use torch.where, or roamc.optimize, which runs hooks as they are"
            ) from error
        if (result is None or result is gradient) and not _writes(compat.graph_so_far(), last):
            raise CaptureError(
                f"{who} gives no new gradient and writes to no tensor, so a planned step would run it once, while it "
                "is traced, and never again; remove it, or use roamc.optimize, which runs hooks as they are"
            )
        return result

    return run


def _last(graph: fx.Graph) -> fx.Node | None:
    return next(iter(reversed(graph.nodes)), None)


def _writes(graph: fx.Graph, last: fx.Node | None) -> bool:
    """Whether an operator behind ``last``, or any one if ``last`` is None, writes to an argument."""
    for node in reversed(graph.nodes):
        if node is last:
            return False
        if node.op == "call_function" and ops.rule(node.target).mutates:
            return True
    return False
