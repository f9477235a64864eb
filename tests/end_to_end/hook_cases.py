"""Kinds of hooks, and kinds of values that a hook or a loss reads: any with any, see ``test_hooks_read.py``."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.nn.modules import module as all_modules
from torch.optim import Optimizer

Act = Callable[..., Any]
"""``act(value, *arguments of the hook)`` returns what the hook returns, by a number that the hook has read."""

Hook = Callable[..., Any]
Put = Callable[[float], object]


class Net(nn.Module):
    """Two layers; forward has places for hooks on an activation and on what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
        self.on_activation: Hook | None = None
        self.on_node: Hook | None = None
        self.on_saved: Hook | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape [rows, 2]."""
        x = self.first(x)
        if self.on_activation is not None:
            x.register_hook(self.on_activation)
        if self.on_node is not None:
            x.grad_fn.register_hook(self.on_node)
        saved = self.on_saved
        with saved_tensors_hooks(saved, lambda kept: kept) if saved is not None else contextlib.nullcontext():
            x = self.act(x)
        return self.second(x)  # type: ignore[no-any-return]


# -- kinds of hooks: what the hook does with the number, and how it is registered ------------------------------


def scale_group(value: float, optimizer: Optimizer, *_: object) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * value


def scale_first(value: float, optimizer: Optimizer, *_: object) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(value)


def scale_late(value: float, parameter: Tensor) -> None:
    parameter.grad.mul_(value)  # type: ignore[union-attr]


def on_the_node(model: Any, _: Optimizer, hook: Hook) -> None:
    model.kept = get_gradient_edge(model.first.weight).node
    model.kept.register_prehook(hook)


def set_attribute(name: str) -> Callable[[Any, Optimizer, Hook], None]:
    return lambda model, _, hook: setattr(model, name, hook)


HOOKS: dict[str, tuple[Act, Callable[[Any, Optimizer, Hook], Any]]] = {
    "forward": (
        lambda value, _, args, result: result * value,
        lambda m, o, hook: m.second.register_forward_hook(hook),
    ),
    "forward with keywords": (
        lambda value, _, args, named, result: result * value,
        lambda m, o, hook: m.second.register_forward_hook(hook, with_kwargs=True),
    ),
    "forward, always called": (
        lambda value, _, args, result: result * value,
        lambda m, o, hook: m.second.register_forward_hook(hook, always_call=True),
    ),
    "forward of the model": (
        lambda value, _, args, result: result * value,
        lambda m, o, hook: m.register_forward_hook(hook, prepend=True),
    ),
    "forward pre": (
        lambda value, _, args: (args[0] * value,),
        lambda m, o, hook: m.second.register_forward_pre_hook(hook),
    ),
    "forward pre with keywords": (
        lambda value, _, args, named: ((args[0] * value,), named),
        lambda m, o, hook: m.second.register_forward_pre_hook(hook, with_kwargs=True),
    ),
    "full backward": (
        lambda value, _, got, given: (got[0] * value,),
        lambda m, o, hook: m.second.register_full_backward_hook(hook),
    ),
    "full backward pre": (
        lambda value, _, given: (given[0] * value,),
        lambda m, o, hook: m.second.register_full_backward_pre_hook(hook),
    ),
    "backward of old": (
        lambda value, _, got, given: tuple(None if one is None else one * value for one in got),
        lambda m, o, hook: m.second.register_backward_hook(hook),
    ),
    "parameter": (
        lambda value, grad: grad * value,
        lambda m, o, hook: m.first.weight.register_hook(hook),
    ),
    "activation": (lambda value, grad: grad * value, set_attribute("on_activation")),
    "node of an activation": (
        lambda value, got, given: tuple(None if one is None else one * value for one in got),
        set_attribute("on_node"),
    ),
    "saved tensor": (lambda value, tensor: tensor * value, set_attribute("on_saved")),
    "all forwards": (
        lambda value, module, args, result: result * value if isinstance(module, nn.Linear) else None,
        lambda m, o, hook: all_modules.register_module_forward_hook(hook),
    ),
    "before all forwards": (
        lambda value, module, args: (args[0] * value,) if isinstance(module, nn.Linear) else None,
        lambda m, o, hook: all_modules.register_module_forward_pre_hook(hook),
    ),
    "all backwards": (
        lambda value, module, got, given: (got[0] * value,) if isinstance(module, nn.Tanh) else None,
        lambda m, o, hook: all_modules.register_module_full_backward_hook(hook),
    ),
    "before all backwards": (
        lambda value, module, given: (given[0] * value,) if isinstance(module, nn.Tanh) else None,
        lambda m, o, hook: all_modules.register_module_full_backward_pre_hook(hook),
    ),
    "before an update": (scale_group, lambda m, o, hook: o.register_step_pre_hook(hook)),
    "after an update": (scale_first, lambda m, o, hook: o.register_step_post_hook(hook)),
    "after .grad": (scale_late, lambda m, o, hook: m.first.weight.register_post_accumulate_grad_hook(hook)),
    "node of .grad": (lambda value, grads: (grads[0] * value,), on_the_node),
    "several gradients": (
        lambda value, grads: grads[0].mul_(value),
        lambda m, o, hook: register_multi_grad_hook(tuple(m.first.parameters()), hook),
    ),
}

REFUSED = {
    "after .grad": "has a post-accumulate-grad hook",
    "node of .grad": "has a hook on the autograd node",
    "several gradients": "gives no new gradient",
}
"""Hooks that train_step refuses, whatever they read, and how."""

IN_EAGER = ("node of an activation", "all backwards", "before all backwards")
"""Hooks with which torch.compile leaves the model to eager: roamc.optimize says so, and ``strict`` refuses."""


# -- kinds of reads: each returns a hook that reads a number, and how to set the number ------------------------

SCALE = 1.0
SETTINGS: dict[str, Any] = {"scale": 1.0, "parts": [1.0]}
CONFIG: Any = SimpleNamespace(scale=1.0, inner=SimpleNamespace(scale=1.0))
ARRAY = np.ones(1)
NUMBER = np.float32(1)
TENSOR = torch.ones(())
CONSTANTS = types.ModuleType("constants_of_hooks")


class Shared:
    """A class whose attribute is read by its name, or by way of an object."""

    scale = 1.0
    __slots__ = ()


class Called:
    """A hook that is an object."""

    def __init__(self, act: Act) -> None:
        self.act, self.scale, self.rest = act, 1.0, [1.0]

    def __call__(self, *args: Any) -> Any:
        return self.act(self.scale, *args)

    def method(self, *args: Any) -> Any:
        return self.act(self.rest[0], *args)

    @property
    def doubled(self) -> float:
        return self.scale


def closure(act: Act) -> tuple[Hook, Put]:
    scale = 1.0

    def put(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda *args: act(scale, *args), put


def nested_closure(act: Act) -> tuple[Hook, Put]:
    scale = 1.0

    def put(value: float) -> None:
        nonlocal scale
        scale = value

    def read() -> float:
        def inner() -> float:
            return scale

        return inner()

    return lambda *args: act(read(), *args), put


def of_global(act: Act) -> tuple[Hook, Put]:
    return lambda *args: act(SCALE, *args), lambda value: globals().update(SCALE=value)


def global_function(act: Act) -> tuple[Hook, Put]:
    globals()["scale_now"] = lambda: 1.0
    return lambda *args: act(globals_scale(), *args), lambda value: globals().update(scale_now=lambda: value)


def globals_scale() -> float:
    return scale_now()  # type: ignore[name-defined, no-any-return]  # noqa: F821


def attribute(act: Act) -> tuple[Hook, Put]:
    return lambda *args: act(CONFIG.inner.scale, *args), lambda value: setattr(CONFIG.inner, "scale", value)


def attribute_by_name(act: Act) -> tuple[Hook, Put]:
    return lambda *args: act(getattr(CONFIG, "scale", 1.0), *args), lambda value: setattr(CONFIG, "scale", value)


def default(act: Act) -> tuple[Hook, Put]:
    def read(scale: float = 1.0) -> float:
        return scale

    return lambda *args: act(read(), *args), lambda value: setattr(read, "__defaults__", (value,))


def keyword_default(act: Act) -> tuple[Hook, Put]:
    def hook(*args: Any, scale: float = 1.0) -> Any:
        return act(scale, *args)

    return hook, lambda value: hook.__kwdefaults__.update(scale=value)


def called_object(act: Act) -> tuple[Hook, Put]:
    called = Called(act)
    return called, lambda value: setattr(called, "scale", value)


def bound_method(act: Act) -> tuple[Hook, Put]:
    called = Called(act)
    return called.method, lambda value: called.rest.__setitem__(0, value)


def of_property(act: Act) -> tuple[Hook, Put]:
    called = Called(act)
    return lambda *args: act(called.doubled, *args), lambda value: setattr(called, "scale", value)


def of_partial(act: Act) -> tuple[Hook, Put]:
    def hook(held: list[float], *args: Any) -> Any:
        return act(held[0], *args)

    held = functools.partial(hook, [1.0])
    return held, lambda value: held.args[0].__setitem__(0, value)


def dict_entry(act: Act) -> tuple[Hook, Put]:
    return lambda *args: act(SETTINGS["scale"], *args), lambda value: SETTINGS.update(scale=value)


def list_entry(act: Act) -> tuple[Hook, Put]:
    recent = [deque([1.0])]
    return lambda *args: act(recent[0][0], *args), lambda value: recent[0].__setitem__(0, value)


def class_attribute(act: Act) -> tuple[Hook, Put]:
    return lambda *args: act(Shared.scale, *args), lambda value: setattr(Shared, "scale", value)


def class_attribute_of_an_object(act: Act) -> tuple[Hook, Put]:
    shared = Shared()
    return lambda *args: act(shared.scale, *args), lambda value: setattr(Shared, "scale", value)


def of_python_module(act: Act) -> tuple[Hook, Put]:
    return lambda *args: act(CONSTANTS.SCALE, *args), lambda value: setattr(CONSTANTS, "SCALE", value)


def of_array(act: Act) -> tuple[Hook, Put]:
    return lambda *args: act(float(ARRAY[0]), *args), lambda value: ARRAY.fill(value)


def another_tensor(act: Act) -> tuple[Hook, Put]:
    return lambda *args: act(TENSOR, *args), lambda value: globals().update(TENSOR=torch.tensor(value))


def tensor_written(act: Act) -> tuple[Hook, Put]:
    held = torch.ones(())
    return lambda *args: act(held, *args), lambda value: held.fill_(value)


def context_variable(act: Act) -> tuple[Hook, Put]:
    variable = contextvars.ContextVar("scale", default=1.0)
    return lambda *args: act(variable.get(), *args), variable.set


def of_thread(act: Act) -> tuple[Hook, Put]:
    local = threading.local()
    local.scale = 1.0
    return lambda *args: act(local.scale, *args), lambda value: setattr(local, "scale", value)


def weak_reference(act: Act) -> tuple[Hook, Put]:
    called = Called(act)
    reference = weakref.ref(called)

    def put(value: float) -> None:
        called.scale = value

    return lambda *args: act(reference().scale, *args), put  # type: ignore[union-attr]


def function_attribute(act: Act) -> tuple[Hook, Put]:
    def read() -> float:
        return read.scale  # type: ignore[attr-defined, no-any-return]

    read.scale = 1.0  # type: ignore[attr-defined]
    return lambda *args: act(read(), *args), lambda value: setattr(read, "scale", value)


def bound_builtin(act: Act) -> tuple[Hook, Put]:
    held = {"scale": 1.0}
    read = held.get
    return lambda *args: act(read("scale"), *args), lambda value: held.update(scale=value)


def object_in_a_list(act: Act) -> tuple[Hook, Put]:
    class Inside:
        def read(self) -> float:
            return SCALE

    held = [Inside()]
    return lambda *args: act(held[0].read(), *args), lambda value: globals().update(SCALE=value)


def all_attributes(act: Act) -> tuple[Hook, Put]:
    held = SimpleNamespace(scale=1.0)
    return lambda *args: act(max(vars(held).values()), *args), lambda value: setattr(held, "scale", value)


def method_of_super(act: Act) -> tuple[Hook, Put]:
    class Below:
        def read(self) -> float:
            return SCALE

    class Above(Below):
        def read(self) -> float:
            return super().read()

    above = Above()
    return lambda *args: act(above.read(), *args), lambda value: globals().update(SCALE=value)


def computed_name(act: Act) -> tuple[Hook, Put]:
    class Computes:
        def __init__(self) -> None:
            self._values = {"scale": 1.0}

        def __getattr__(self, name: str) -> float:
            return self.__dict__["_values"][name]  # type: ignore[no-any-return]

    computes = Computes()
    return lambda *args: act(computes.scale, *args), lambda value: computes._values.update(scale=value)


def numpy_number(act: Act) -> tuple[Hook, Put]:
    return lambda *args: act(float(NUMBER), *args), lambda value: globals().update(NUMBER=np.float32(value))


def code_of_a_function(act: Act) -> tuple[Hook, Put]:
    def read() -> float:
        return 1.0

    def other(value: float) -> types.CodeType:
        return eval(f"lambda: {value}").__code__  # type: ignore[no-any-return]

    return lambda *args: act(read(), *args), lambda value: setattr(read, "__code__", other(value))


READS: dict[str, Callable[[Act], tuple[Hook, Put]]] = {
    "closure": closure,
    "closure of a nested function": nested_closure,
    "global": of_global,
    "global function": global_function,
    "attribute": attribute,
    "attribute by getattr": attribute_by_name,
    "default": default,
    "keyword default": keyword_default,
    "called object": called_object,
    "bound method": bound_method,
    "property": of_property,
    "partial": of_partial,
    "dict entry": dict_entry,
    "list entry": list_entry,
    "class attribute": class_attribute,
    "class attribute of an object": class_attribute_of_an_object,
    "Python module": of_python_module,
    "numpy array": of_array,
    "another tensor": another_tensor,
    "tensor written": tensor_written,
}


MORE_READS: dict[str, Callable[[Act], tuple[Hook, Put]]] = {
    "context variable": context_variable,
    "value of a thread": of_thread,
    "weak reference": weak_reference,
    "attribute of a function": function_attribute,
    "bound builtin": bound_builtin,
    "object in a list": object_in_a_list,
    "all attributes": all_attributes,
    "method of super": method_of_super,
    "computed name": computed_name,
    "number of numpy": numpy_number,
    "code of a function": code_of_a_function,
}
"""Reads that ``torch.compile`` does not follow, or that are as one of ``READS`` to it."""


@contextlib.contextmanager
def fresh_values() -> Iterator[None]:
    """Context manager: give what hooks read globally its first value, and remove hooks of all modules in the end."""
    registered = (
        all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks,
        all_modules._global_backward_hooks, all_modules._global_backward_pre_hooks,
    )  # fmt: skip
    globals().update(SCALE=1.0, TENSOR=torch.ones(()), NUMBER=np.float32(1))
    SETTINGS.update(scale=1.0)
    CONFIG.scale = CONFIG.inner.scale = CONSTANTS.SCALE = Shared.scale = 1.0  # type: ignore[attr-defined]
    ARRAY.fill(1.0)
    try:
        yield
    finally:
        for hooks in registered:
            hooks.clear()
