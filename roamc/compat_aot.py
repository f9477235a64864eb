"""torch's private interfaces: AOTAutograd, which traces a model. See roamc/compat.py."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from roamc.compat import (
    checkpoints_followed,
    fake_input,
    fake_parameter,
    flatten,
    quiet_meta,
    reparametrized,
    unflatten,
)
from roamc.compat_dynamo import uncompiled
from roamc.graph.keep import keep_saved


@contextlib.contextmanager
def _checkpoints_marked() -> Iterator[None]:
    """Within this context, AOTAutograd marks regions of plain ``checkpoint`` to run again in backward, as dynamo does.

    Their second run is in the trace, but reads nothing of backward: a partition would take it for a part of forward.
    """
    from torch.utils import checkpoint

    name = "_checkpoint_without_reentrant_generator"
    name = next(each for each in (f"{name}_impl", name) if hasattr(checkpoint, each))  # the first since torch 2.14
    plain, run = checkpoint.noop_context_fn, getattr(checkpoint, name)

    def mark(*_: Any, **__: Any) -> checkpoint.CheckpointPolicy:
        return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    marked = functools.partial(checkpoint.create_selective_checkpoint_contexts, mark, allow_cache_entry_mutation=True)

    def begin(*args: Any, **named: Any) -> Any:
        args = tuple(marked if value is plain else value for value in args)
        return run(*args, **{key: marked if value is plain else value for key, value in named.items()})

    with mock.patch.object(checkpoint, name, begin):
        yield


def _writes_first(func: OpOverload) -> bool:
    """Whether the operator writes to its first argument; a batch norm writes to its fourth."""
    first = next(iter(func._schema.arguments), None)
    return first is not None and first.alias_info is not None and first.alias_info.is_write


@contextlib.contextmanager
def writes_marked(key: str) -> Iterator[None]:
    """Within this context, have AOTAutograd set ``meta[key] = True`` of nodes that stand for a write, as ``relu_``.

    These are calls that write to their first argument. Functionalization leaves an operator that makes a new value, and
    nothing to tell it by. All nodes that one such call adds are marked, the scatters into the base of a view among
    them; a scatter that the user calls is not.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    plain = FunctionalTensorMode.__torch_dispatch__
    calls = itertools.count()

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = next(calls)
        tracer = get_proxy_mode() if isinstance(func, OpOverload) and _writes_first(func) else None
        if tracer is None:
            return plain(self, func, types, args, kwargs)
        last = next(iter(reversed(tracer.tracer.graph.nodes)), None)
        result = plain(self, func, types, args, kwargs)
        if next(calls) == number + 1:  # it has not come apart into others, which have their own marks
            for node in reversed(tracer.tracer.graph.nodes):
                if node is last:
                    break
                node.meta[key] = True
        return result

    with mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", dispatch):
        yield


def default_partition(
    joint: fx.GraphModule, inputs: Sequence[Any], **how: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into (forward, backward) as torch does at full save: what eager saves, nothing recomputed.

    Five faults of torch's are mended, partly in ``joint`` itself: a random operator with several results that nobody
    reads fails an assertion, each half gets dead copies of the other's random operators, which would draw again, the
    running statistics of a batch norm in training are saved, which its backward takes and does not read, a
    generator's state is saved behind device meshes, where AOTAutograd expects no tensor any more, and results lose
    their description where a random operator runs again. What runs again draws from the generator's saved state on a
    GPU as well, where torch gives it a generator for CUDA graphs.

    Args:
        joint: AOTAutograd's graph of forward and backward.
        inputs: its inputs.
        how: what AOTAutograd passes to a partition besides, such as ``num_fwd_outputs``.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import default_partition as split

    keep_saved(joint.graph)
    _run_once(joint.graph, how["num_fwd_outputs"])
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and not node.users and isinstance(node.meta.get("val"), tuple):
            _pick_first(node)
        if node.target is torch.ops.aten.native_batch_norm_backward.default and node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])
    with config.patch(graphsafe_rng_functionalization=False):
        forward, backward = split(joint, inputs, **how)
    _draw_in_one_half(forward.graph, backward.graph)
    _save_objects_last(forward, backward, how["num_fwd_outputs"])
    _describe(forward.graph, joint.graph, how["num_fwd_outputs"])
    backward.recompile()
    return forward, backward


def _draw_in_one_half(forward: fx.Graph, backward: fx.Graph) -> None:
    """Erase what nobody reads of the operators that both halves have from the half that does not run them in eager.

    What backward draws without reading a gradient looks to torch like a part of forward.
    """
    early = {node.name: node for node in forward.nodes if node.op == "call_function"}
    for late in reversed(list(backward.nodes)):
        if late.op == "call_function" and late.name in early:
            copy = late if late.meta.get("partitioner_tag") == "is_forward" else early[late.name]
            if not copy.users:
                copy.graph.erase_node(copy)


def _run_once(joint: fx.Graph, outputs: int) -> None:
    """Unmark the random operators of checkpoints that nothing behind the first ``outputs`` results needs.

    Torch keeps them in backward, since they are random, and would save a generator's state for each.
    """
    end = next(node for node in reversed(joint.nodes) if node.op == "output")
    needed = {node for node in end.args[0][outputs:] if isinstance(node, fx.Node)}
    for node in reversed(joint.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
        elif isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            node.meta.pop("recompute", None)


def _describe(forward: fx.Graph, joint: fx.Graph, outputs: int) -> None:
    """Describe the first ``outputs`` results of ``forward`` as in ``joint``, for :func:`overwritten_inputs`."""
    end, of_both = (next(node for node in reversed(graph.nodes) if node.op == "output") for graph in (forward, joint))
    described = pytree.arg_tree_leaves(of_both.meta.get("desc") or ())[:outputs]
    end.meta["desc"] = [*described, *[None] * (len(end.args[0]) - len(described))]


def _save_objects_last(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Order what forward saves behind its first ``outputs`` results: tensors, then objects, then symbolic sizes.

    What a checkpoint runs again draws from a state of the generator, which torch saves behind the objects.
    """
    end = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
    results, saved = end.args[0][:outputs], end.args[0][outputs:]
    end.args = ((*results, *sorted(saved, key=_place_among_saved)),)
    forward.recompile()
    entries = [node for node in backward.graph.nodes if node.op == "placeholder"][: len(saved)]
    objects = [node for node in entries if _place_among_saved(node) == 1]
    for last in [node for node in entries if node not in objects][-1:]:
        for node in reversed(objects):
            last.append(node)


def _place_among_saved(node: fx.Node) -> int:
    value = node.meta.get("val")
    is_size = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return 0 if isinstance(value, torch.Tensor) else 2 if is_size else 1


def _pick_first(node: fx.Node) -> None:
    """Give ``node`` a user that takes its first result."""
    if not node.meta["val"] or not isinstance(node.meta["val"][0], torch.Tensor):
        return
    with node.graph.inserting_after(node):
        pick = node.graph.call_function(operator.getitem, (node, 0))
    pick.meta = {**node.meta, "val": node.meta["val"][0]}


def overwritten_inputs(forward: fx.Graph) -> frozenset[str]:
    """Return the names of the inputs that torch writes to, or lays otherwise, when ``forward`` has run.

    AOTAutograd keeps a write out of the graph where autograd has to see it, such as that of an embedding with
    ``max_norm`` to its weight: the graph returns the new value, which torch copies into the input.

    Args:
        forward: AOTAutograd's graph of forward.
    """
    from torch._functorch._aot_autograd import descriptors

    end = next(node for node in reversed(forward.nodes) if node.op == "output")
    outputs = [_whole(described) for described in end.meta.get("desc") or ()]
    written = [out.mutated_input for out in outputs if isinstance(out, descriptors.InputMutationAOTOutput)]
    entries = [node for node in forward.nodes if node.op == "placeholder"]
    return frozenset(node.name for node in entries if _whole(node.meta.get("desc")) in written)


def output_places(forward: fx.Graph) -> dict[int, int]:
    """Return the position, among the results of ``forward``, of each tensor that the traced function returns.

    Args:
        forward: AOTAutograd's graph of forward.

    Returns:
        The position among the tensors that the function returns to that among the results. None is known if torch does
        not say it.
    """
    from torch._functorch._aot_autograd import descriptors

    end = next(node for node in reversed(forward.nodes) if node.op == "output")
    outputs = [_whole(described) for described in end.meta.get("desc") or ()]
    return {out.idx: place for place, out in enumerate(outputs) if isinstance(out, descriptors.PlainAOTOutput)}


def output_of(tangent: fx.Node) -> int | None:
    """Return the position, among the tensors that the traced function returns, of that with the gradient ``tangent``.

    Args:
        tangent: a placeholder of AOTAutograd's graph of backward, or a copy of one. None if torch does not say it.
    """
    from torch._functorch._aot_autograd import descriptors

    described = _whole(tangent.meta.get("desc"))
    output = _whole(described.output) if isinstance(described, descriptors.TangentAOTInput) else None
    return output.idx if isinstance(output, descriptors.PlainAOTOutput) else None


def input_of(node: fx.Node) -> int | None:
    """Return the position, among the arguments of the traced function, of that which a placeholder stands for.

    None if torch does not say it.
    """
    from torch._functorch._aot_autograd import descriptors

    described = _whole(node.meta.get("desc"))
    return described.idx if isinstance(described, descriptors.PlainAOTInput) else None


def _whole(described: Any) -> Any:
    """The description of a tensor subclass in the place of that of one of its parts."""
    from torch._functorch._aot_autograd import descriptors

    while isinstance(described, descriptors.SubclassGetAttrAOTInput | descriptors.SubclassGetAttrAOTOutput):
        described = described.base
    return described


def aot_backend(
    *,
    forward: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    backward: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    inference: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """Make a dynamo backend of AOTAutograd with these compilers and this partition.

    Args:
        forward: compiles a forward graph for its fake inputs.
        backward: compiles a backward graph.
        inference: compiles a graph without backward.
        partition: splits a joint graph into forward and backward, as :func:`default_partition` does.
    """
    from torch._dynamo.backends.common import aot_autograd

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )

    def compile_graph(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with _kept_if_unused():
            return compiler(gm, inputs)

    return compile_graph


@contextlib.contextmanager
def _kept_if_unused() -> Iterator[None]:
    """Within this context, AOTAutograd keeps operators whose results nobody reads, and that eager runs for an effect.

    These are random operators, without which all later ones draw other numbers than in eager, and the check behind
    ``torch.linalg.inv``, which torch 2.11 drops.
    """
    from torch._higher_order_ops import effects
    from torch._inductor import config

    check = torch.ops.aten._linalg_check_errors.default
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(fallback_random=True))  # torch asks it when it drops what is unused
        if not effects.has_effects(check):
            stack.callback(effects._register_effectful_op(check, effects._EffectType.ORDERED).destroy)
        yield


def unwatched(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return ``run``, outside the dispatch mode in which torch runs the first call of what a backend has compiled.

    Args:
        run: takes a list of arguments, which it may empty.
    """
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch.utils import _python_dispatch as modes

    watch = getattr(runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", None)
    if watch is None:
        return run

    def call(args: list[Any]) -> Any:
        if not isinstance(modes._get_current_dispatch_mode(), watch):
            return run(args)
        with modes._pop_mode_temporarily():
            return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def static_inputs() -> tuple[int, ...]:
    """Return the positions of inputs that are parameters or buffers, while AOTAutograd compiles; else ()."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    return tuple(getattr(metadata, "static_input_indices", None) or ())


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Within this context, operators run as outside of AOTAutograd: no mode of its trace sees them."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def donate_nothing() -> None:
    """While AOTAutograd compiles a forward: let its backward run with ``retain_graph=True`` at any step.

    Else torch refuses that once a backward has run without: a compiler of its own may write over saved tensors then.
    """
    from torch._guards import TracingContext

    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    donated = getattr(metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()  # in place: metadata of the same graph with tensor subclasses has the same list


def forward_backward(
    model: torch.nn.Module, batch: Sequence[Any], call_model: Callable[..., Any] | None = None
) -> tuple[tuple[fx.GraphModule, ...], int, tuple[int, ...]]:
    """Trace ``model(*batch)`` with AOTAutograd under fake tensors, with nodes that know the user's line.

    Models that ask whether they are being compiled hear that they are.

    Args:
        model: the model.
        batch: its arguments, nests with tensors; meta tensors count as tensors on the CPU.
        call_model: called as ``call_model(model, *batch)``; None calls the model.

    Returns:
        The graphs, (forward, backward), or (forward,) if there is no backward; the number of forward outputs that are
        not saved tensors; and the positions of parameters and buffers among the forward inputs.
    """
    from torch._functorch._aot_autograd import graph_capture
    from torch._functorch.aot_autograd import aot_function

    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    leaves, spec = flatten(tuple(batch))
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    captured: dict[str, Any] = {"outputs": 0, "static": tuple(range(len(names)))}

    def call(*flat: torch.Tensor) -> list[torch.Tensor]:
        values = list(leaves)
        for index, tensor in zip(where, flat[len(names) :], strict=True):
            values[index] = tensor
        tensors = dict(zip(names, flat, strict=False))
        args = unflatten(values, spec)
        with reparametrized(model, tensors), mock.patch.object(torch.compiler, "_is_compiling_flag", True):
            results, _ = flatten(model(*args) if call_model is None else call_model(model, *args))
        return [result for result in results if isinstance(result, torch.Tensor)]

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        captured["outputs"] = how["num_fwd_outputs"]
        forward, backward = captured["halves"] = default_partition(joint, inputs, **how)
        return forward, backward

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        captured.setdefault("halves", (gm,))
        return gm

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device("cpu")
    fakes = [fake_parameter(mode, tensor, device) for tensor in (*model.parameters(), *model.buffers())]
    fakes += [fake_input(mode, leaves[index], device) for index in where]
    traced = functools.partial(make_fx, record_stack_traces=True)
    with (
        mode,
        uncompiled(model),
        checkpoints_followed(),
        quiet_meta(),
        _checkpoints_marked(),
        _kept_if_unused(),
        mock.patch.object(graph_capture, "make_fx", traced),
    ):
        aot_function(
            call, keep, keep, partition, num_params_buffers=len(names), keep_inference_input_mutations=True,
            inference_compiler=keep,
        )(*fakes)  # fmt: skip
    return captured["halves"], captured["outputs"], captured["static"]


@functools.cache
def _descriptions() -> dict[str, Any]:
    """Classes of what AOTAutograd says of inputs and outputs, by name."""
    from torch._functorch._aot_autograd import descriptors

    return {
        name: each
        for name, each in vars(descriptors).items()
        if dataclasses.is_dataclass(each) and name.endswith(("AOTInput", "AOTOutput"))
    }


def described(comment: str) -> Any:
    """Return what AOTAutograd notes as ``meta["desc"]`` of an input or output, from the comment that it prints.

    Args:
        comment: such as ``GradAOTOutput(grad_of=PlainAOTInput(idx=3))``; of unknown classes nothing is read.

    Returns:
        The description; None if there is none.
    """
    classes = _descriptions()

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if name in classes:
                return classes[name](**{each.arg: value(each.value) for each in keywords if each.arg})
        raise ValueError

    try:
        return value(ast.parse(comment.strip(), mode="eval", filename="<description>").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def checkpoint_policy(name: str) -> Any:
    """Return torch's ``CheckpointPolicy`` of that name, such as ``PREFER_RECOMPUTE``; None if it has none."""
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.__members__.get(name)


def partition(
    joint: fx.GraphModule, mode: FakeTensorMode, outputs: int, static: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph that was not captured here, as :func:`default_partition` does for one that was.

    Args:
        joint: forward and backward, with torch's tags of their halves.
        mode: of its fake tensors; a checkpoint with random operators needs it.
        outputs: how many results are forward's.
        static: positions of inputs that are parameters or buffers.
    """
    from torch._guards import TracingContext, tracing
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    inputs = [node.meta["val"] for node in joint.graph.nodes if node.op == "placeholder"]
    with tracing(TracingContext(mode)), _use_lazy_graph_module(True), _kept_if_unused():
        return default_partition(joint, inputs, num_fwd_outputs=outputs, static_lifetime_input_indices=list(static))
