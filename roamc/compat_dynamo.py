"""torch's private interfaces: dynamo, the tracer in front of a backend. See roamc/compat.py."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch._dynamo import OptimizedModule, config, convert_frame, eval_frame, external_utils, trace_rules
from torch._dynamo.exc import SkipFrame, TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution

DynamoError = TorchDynamoException
"""What a backend raises to tell dynamo to trace anew or to leave a frame to eager."""


def compiled_module() -> torch.nn.Module | None:
    """Return the module whose method, such as ``forward``, dynamo compiles now; None if it compiles no method."""
    frame = _compiled_frame()
    if frame is None:
        return None
    names = ("self", *frame.f_code.co_varnames[:1])
    candidates = [frame.f_locals.get(name) for name in names]
    if frame.f_code.co_filename == external_utils.__file__:  # around a module of torch's own, such as nn.Sequential
        called = frame.f_locals.get("fn")
        candidates.append(getattr(called, "__self__", called))
    return next((value for value in candidates if isinstance(value, torch.nn.Module)), None)


def compiled_code() -> object:
    """Return the code object of the function that dynamo compiles now; None outside of dynamo."""
    frame = _compiled_frame()
    return None if frame is None else frame.f_code


def beside_a_break() -> bool:
    """Whether another graph of the same call ended before the one that dynamo compiles now.

    The one begins after the break, or is that of a function that was called at the break, such as the forward of a
    ``torch.autograd.Function`` that dynamo does not trace.
    """
    frame = _compiled_frame()
    if frame is not None and _RESUMED.match(frame.f_code.co_name) is not None:
        return True
    caller = _caller()
    return caller is not None and _is_compiled_in_part(caller)


def compiled_function() -> str:
    """Return the name of the function that dynamo compiles now; empty outside of dynamo."""
    frame = _compiled_frame()
    if frame is None:
        return ""
    resumed = _RESUMED.match(frame.f_code.co_name)
    return str(resumed["name"] if resumed else frame.f_code.co_name)


def eager_caller() -> CodeType | None:
    """Return the code that calls the function that dynamo is compiling, if that caller runs in eager.

    None if torch.compile was given that function itself, or if dynamo has compiled a part of the caller.
    """
    caller = _caller()
    return None if caller is None or _is_compiled_in_part(caller) else caller.f_code


def _caller() -> FrameType | None:
    """What calls the function that dynamo is compiling; None if torch.compile was given that function itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _is_entry(frame):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_TRANSPARENT):
        if frame.f_code.co_filename == eval_frame.__file__:
            return None
        frame = frame.f_back
    return frame


def _is_compiled_in_part(frame: FrameType) -> bool:
    return any(name.startswith("__compiled_fn") for name in frame.f_code.co_names)


def _is_entry(frame: FrameType) -> bool:
    """Whether dynamo has been called with this frame: its caller is what calls the function that is compiled."""
    if frame.f_code.co_filename != convert_frame.__file__ or frame.f_code.co_name != "__call__":
        return False
    return frame.f_back is None or frame.f_back.f_code.co_filename != convert_frame.__file__


_TRANSPARENT = (str(Path(torch.__file__).parent), contextlib.__file__)
"""Files whose functions may stand between a function that is compiled and what called it."""

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_\d+")
"""How dynamo names the rest of a function behind a break."""


def _compiled_frame() -> Any:
    """The frame that dynamo compiles now; None outside of dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


def compiling_backend() -> tuple[object, dict[str, Any]]:
    """Return the backend that the graph which dynamo compiles now is for, and its keywords; None outside of dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None, {}
    keywords: dict[str, Any] = {}
    while True:
        keywords = getattr(backend, "kwargs", keywords)
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        if inner is None:
            return backend, keywords
        backend = inner


def eager_is_asked_for() -> bool:
    """Whether the user has asked, by ``torch.compiler.set_stance``, that compiled functions may run in eager now.

    This is so in the stances "force_eager", "eager_on_recompile" and "eager_then_compile".
    """
    return eval_frame._stance.stance in ("force_eager", "eager_on_recompile", "eager_then_compile")


def traced_code() -> tuple[CodeType, ...]:
    """Return the code of each function whose lines are in the graph that dynamo has made now, once for each call."""
    from torch._guards import TracingContext

    return tuple(TracingContext.get_traced_code() or ())


def left_to_eager(why: str) -> DynamoError:
    """Return the error by which a backend tells dynamo to run the function that it compiles now in eager."""
    return SkipFrame(why)


def graph_break(gm: fx.GraphModule) -> str | None:
    """Return where a graph break ended ``gm``, as ``file.py:line (reason)``; None if it ends with the function.

    The line is the innermost outside torch. If torch's own code breaks the graph, its line is behind the reason.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frames = list(reason.user_stack)
    lines = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in frames] or ["unknown line"]
    users = [line for line, frame in zip(lines, frames, strict=False) if not frame.filename.startswith(_TRANSPARENT[0])]
    what, line = reason.reason.splitlines()[0].rstrip("."), users[-1] if users else lines[-1]
    return f"{line} ({what})" if line == lines[-1] else f"{line} ({what}, at torch's {lines[-1]})"


def dynamo_module(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Return ``graph`` as a module with the attributes and dynamo's notes of ``gm``, so that AOTAutograd takes it.

    Args:
        gm: a module that dynamo has made.
        graph: rewritten from the graph of ``gm``; becomes that of the result.
    """
    module = fx.GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        module._param_name_to_source = gm._param_name_to_source
    return module


def keep_source(copy: fx.Node, node: fx.Node) -> None:
    """Give ``copy`` dynamo's note of where the input ``node`` comes from; it is an attribute, not in ``meta``."""
    if hasattr(node, "_dynamo_source"):
        copy._dynamo_source = node._dynamo_source


@contextlib.contextmanager
def compilation(args: Sequence[Any]) -> Iterator[list[Any]]:
    """Set up a context in which AOTAutograd can compile after dynamo has ended.

    As in dynamo, one thread compiles at a time, and others may run what is compiled: without torch's flag for that, its
    functions take the trace of this thread for one of theirs, and raise.

    Yields:
        ``args`` with fakes for tensors, all sizes known.
    """
    from torch._guards import TracingContext, tracing
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(
        allow_scalar_outputs=config.capture_scalar_outputs,
        allow_dynamic_output_shape_ops=config.capture_dynamic_output_shape_ops,
    )
    mode = FakeTensorMode(shape_env=shapes)
    compiling = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)  # from torch 2.13 on
    with convert_frame.compile_lock, compiling(), tracing(TracingContext(mode)):
        yield [mode.from_tensor(arg, static_shapes=True) if isinstance(arg, torch.Tensor) else arg for arg in args]


@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Within this context, leave out the checks of torch.distributions that are on by default and read values.

    torch.compile does so from its first use on, for the whole process. A distribution that is made with
    ``validate_args=True`` is checked all the same.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def original(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` has wrapped in ``model``; ``model`` itself if it is not compiled."""
    return model._orig_mod if isinstance(model, OptimizedModule) else model


@contextlib.contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Within this context, run ``model`` and its submodules as plain modules, although ``compile`` was called on them.

    While FX traces, everything else that ``torch.compile`` has made runs plain as well, functions included.
    """
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    implementations = [module._compiled_call_impl for module in compiled]
    for module in compiled:
        module._compiled_call_impl = None
    try:
        with config.patch(error_on_nested_fx_trace=False):
            yield
    finally:
        for module, implementation in zip(compiled, implementations, strict=True):
            module._compiled_call_impl = implementation


def has_recurrent_layers(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has layers such as an LSTM, or is one."""
    return any(isinstance(module, torch.nn.RNNBase) for module in model.modules())


def compile_in_place(
    model: torch.nn.Module,
    backend: Callable[..., Any],
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    recurrent: bool,
) -> None:
    """Compile ``model`` in place with dynamic shapes off; it may have no attributes yet.

    ``backend`` is a dynamo backend. ``around`` gets the compiled call of the model, and returns the function that calls
    of the model run in its place; it may be called twice, and the last function counts. Dynamo leaves out recurrent
    layers, and models of torch's own classes, by default; here it traces them, too. ``recurrent`` says whether there
    are recurrent layers.
    """
    model.compile(backend=backend, dynamic=False)
    if trace_rules.check(model.forward):
        # Dynamo skips the frames of torch's own modules unless they are called from a frame that it traces.
        wrapped = external_utils.wrap_inline(model._call_impl)
        model._compiled_call_impl = torch.compile(wrapped, backend=backend, dynamic=False)
    compiled: Any = model._compiled_call_impl
    model._compiled_call_impl = around(compiled)
    if not recurrent or not hasattr(config, "allow_rnn"):
        return

    def with_recurrent_layers(*args: Any, **kwargs: Any) -> Any:
        with config.patch(allow_rnn=True):
            return compiled(*args, **kwargs)

    model._compiled_call_impl = around(with_recurrent_layers)
