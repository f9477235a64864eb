"""Mend fake results that are not what the real kernels give, so that predicted bytes are the real ones.

Each row of ``FIXES`` names an operator and says what its results really are. Views of a mended result are
derived again. Tests compare every predicted byte with real storages and find the rows that are missing.

A fix is called with a node and the fake mode of its tensors. ``node.meta["val"]`` is what torch's fake kernel gives, as
it is *noted* in the graph. A fix returns the result of the real kernel, or None where it is the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roamc.compat import FakeTensorMode, OpOverload
from roamc.compat_operators import suggested_format
from roamc.errors import CaptureError
from roamc.graph import tensors_of
from roamc.graph.rewrite import derived, given, mode_of, settings_of, value_of
from roamc.graph.storage_ids import addresses, lie_in, number_result
from roamc.operators import ops, pointwise
from roamc.operators.fakes import statistics_dtype
from roamc.operators.table import Strides

aten = torch.ops.aten
Fix = Callable[[fx.Node, FakeTensorMode], Any]


def correct(graph: fx.Graph) -> dict[str, str]:
    """Give the fake results of ``graph`` the shapes, strides and dtypes of the real kernels; changes it in place.

    Where the real strides allow no view, a ``clone`` is inserted and the view is of that copy, as ``reshape`` has it in
    eager. Likewise for an operator that takes elements from memory one after the other, as ``contiguous`` has it.

    Returns:
        Name of each inserted copy to the name of the operator that reads it; it belongs to the phase of that operator.

    Raises:
        CaptureError: a node cannot be planned or run again: it draws from a generator of the user's, reads or swaps a
            whole storage, or makes a sparse tensor.
    """
    mode = mode_of(graph)
    copies: dict[str, str] = {}
    if mode is None:
        return copies
    changed: set[fx.Node] = set()
    moved: set[fx.Node] = set()  # results with another geometry than torch noted; results of these are derived again
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        _refuse(node)
        noted = fresh = node.meta.get("val")
        if not moved.isdisjoint(node.all_input_nodes) and _derivable(node):
            _lay_out_arguments(node, mode, copies)
            fresh = _derive(node, mode, copies)
        elif _shares(node) and (not changed.isdisjoint(node.all_input_nodes) or _astray(node)):
            fresh = derived(node, mode)
        fixed = corrected(node, fresh, mode)
        if _geometry(fixed) != _geometry(noted):
            moved.add(node)
        if node in moved or (fixed is not noted and (fixed is not fresh or _shares(node))):
            node.meta["val"] = fixed
            changed.add(node)
    return copies


def derived_anew(node: fx.Node, mode: FakeTensorMode, copies: dict[str, str]) -> Any:
    """Return the result of the real kernel of ``node`` for the fake values that its arguments have now.

    Args:
        node: calls an operator with a schema, or ``getitem``; its value stays as it is. Where the operator does not
            take the strides of an argument, a copy is put in front of ``node``, which reads it from now on.
        mode: the fake mode of its tensors.
        copies: gets an entry for each such copy: its name to that of ``node``.

    Raises:
        Exception: as the operator's fake kernel raises, mostly RuntimeError, if it does not take such arguments.
    """
    _lay_out_arguments(node, mode, copies)
    return corrected(node, _derive(node, mode, copies), mode)


def note_results(node: fx.Node, mode: FakeTensorMode) -> None:
    """Write the fake results that the real kernel of ``node`` gives to ``node.meta["val"]``, and number their storages.

    Args:
        node: a node that is new, or whose arguments have changed.
        mode: the fake mode of its tensors.
    """
    node.meta["val"] = derived(node, mode)
    node.meta["val"] = corrected(node, node.meta["val"], mode)
    number_result(node)


def corrected(node: fx.Node, fake: Any, mode: FakeTensorMode) -> Any:
    """Return the result of the real kernel of ``node``.

    Args:
        node: the node; stays as it is.
        fake: what its fake kernel gives.
        mode: the fake mode of its tensors.

    Returns:
        ``fake`` itself where the real kernel gives the same, else fake tensors made anew.
    """
    target: Any = node.target
    by_column = ops.rule(target).strides is not Strides.AS_NOTED
    fix = FIXES.get(target) or (pointwise.with_real_strides if by_column else None)
    if fix is None:
        return fake
    noted, node.meta["val"] = node.meta["val"], fake
    try:
        fixed = fix(node, mode)
    finally:
        node.meta["val"] = noted
    return fake if fixed is None else fixed


def _refuse(node: fx.Node) -> None:
    """Raise CaptureError for what cannot be planned: generators of the user's, swapped storages, sparse tensors."""
    if node.kwargs.get("generator") is not None:
        raise CaptureError(
            f"{node.target} draws from a generator of its own; draw outside the step and pass the numbers in the "
            "batch, or use the default generator"
        )
    if node.target in WHOLE_STORAGE:
        first = value_of(node.all_input_nodes[0])
        if node.target not in WHERE_IT_STARTS or first.storage_offset():
            raise CaptureError(f"{node.target} changes or reads a whole storage; write the model without it")
    layouts = {str(value.layout): None for _, value in tensors_of(node) if value.layout is not torch.strided}
    if layouts:
        raise CaptureError(
            f"{node.target} makes a tensor of layout {next(iter(layouts))}, and roamc plans dense ones only; "
            "embeddings need sparse=False"
        )


def _shares(node: fx.Node) -> bool:
    rule = ops.rule(node.target)
    return bool(rule.view_of or rule.mutates)


def _astray(node: fx.Node) -> bool:
    """Whether ``node`` is noted as a view of none of its arguments.

    torch replaces a product with a number by one with a tensor, where the number becomes an input, and leaves the views
    of the product as they were noted.
    """
    if node.target is operator.getitem:
        picked, own = value_of(node.all_input_nodes[0])[node.args[1]], node.meta.get("val")
        return isinstance(picked, torch.Tensor) and isinstance(own, torch.Tensor) and not lie_in(picked, [own])
    read = addresses(node.all_input_nodes)
    return bool(read) and not addresses([node]) <= read


def _derive(node: fx.Node, mode: FakeTensorMode, copies: dict[str, str]) -> Any:
    """Return the fake result of ``node``, derived anew from those of its inputs.

    If it is a view that its input's strides do not allow, ``node`` reads a copy of the input from now on, and
    ``copies`` gets an entry: name of the copy to name of ``node``.
    """
    try:
        fresh = derived(node, mode)
    except (RuntimeError, ValueError):
        if node.target is not aten.view.default:
            raise
        copies[_read_copy(node, node.all_input_nodes[0], torch.contiguous_format, mode)] = node.name
        fresh = derived(node, mode)
    return fresh


def _lay_out_arguments(node: fx.Node, mode: FakeTensorMode, copies: dict[str, str]) -> None:
    """Let ``node`` read copies of the arguments that do not lie as its kernel takes them.

    ``copies`` gets an entry for each: name of the copy to name of ``node``. torch's formulas for gradients make such
    arguments contiguous, but not where their guessed strides were contiguous already.
    """
    for argument, form in ops.misread(node):
        copies[_read_copy(node, argument, form, mode)] = node.name


def _read_copy(node: fx.Node, read: fx.Node, form: torch.memory_format, mode: FakeTensorMode) -> str:
    """Let ``node`` read a copy of its input ``read`` in the memory format ``form``; return the name of the copy."""
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(aten.clone.default, (read,), {"memory_format": form})
    copy.meta = {**node.meta, "val": derived(copy, mode)}
    node.replace_input_with(read, copy)
    return copy.name


def _derivable(node: fx.Node) -> bool:
    has_value = "val" in node.meta  # operators that give nothing have none
    return has_value and (node.target is operator.getitem or isinstance(node.target, OpOverload))


def _geometry(value: Any) -> list[tuple[Any, ...] | None]:
    """Return (shape, strides) for each item of a result, in order; None for an item that is no tensor."""
    return [
        (item.shape, item.stride()) if isinstance(item, torch.Tensor) else None
        for item in (value if isinstance(value, list | tuple) else (value,))
    ]


def _norm_of_images(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return a norm's results with the strides of a CPU's kernel; None where ``node.meta["val"]`` is right.

    Result 0 is contiguous or channels last, as the input suggests. torch notes the strides of the input; for group
    norms it notes a contiguous result from 2.14 on.
    """
    return _laid_out(node.meta["val"], value_of(node.args[0]), mode)  # type: ignore[arg-type]


def _batch_norm_backward(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the gradients of a batch norm as its kernel makes them; None where ``node.meta["val"]`` is right.

    On a CPU the input's gradient is contiguous or channels last, as the input suggests; torch notes the strides of
    the gradient read. Results that ``output_mask`` turns off are None.
    """
    masked = _masked(node, mode)
    return _laid_out(masked or node.meta["val"], value_of(node.args[1]), mode) or masked  # type: ignore[arg-type]


def _laid_out(results: Any, read: torch.Tensor, mode: FakeTensorMode) -> Any:
    """Return ``results`` with the first in the memory format that ``read`` suggests.

    None where it has that format already, is None itself, or ``read`` is not on a CPU.
    """
    first, *rest = results
    if first is None or read.device.type != "cpu":
        return None
    with mode:
        result = torch.empty_like(first, memory_format=suggested_format(read))
    return None if result.stride() == first.stride() else (result, *rest)


def _in_turn(*fixes: Fix) -> Fix:
    """Return one fix that applies ``fixes`` in turn, each to what the one before it has left."""

    def fix(node: fx.Node, mode: FakeTensorMode) -> Any:
        noted, fixed = node.meta["val"], None
        for each in fixes:
            more = each(node, mode)
            if more is not None:
                node.meta["val"] = fixed = more
        node.meta["val"] = noted
        return fixed

    return fix


def _statistics(*parameters: int) -> Fix:
    """Return a fix of the dtype of mean and deviation, results 1 and 2 of a norm.

    A CPU computes and keeps them in float32 where the input is narrower than one of the arguments at positions
    ``parameters`` (weight, bias, running statistics); torch notes the input's dtype.
    """

    def fix(node: fx.Node, mode: FakeTensorMode) -> Any:
        noted = list(node.meta["val"])
        weights = [value_of(at) for at in map(node.args.__getitem__, parameters) if isinstance(at, fx.Node)]
        dtype = statistics_dtype(noted[0], weights)
        if noted[0].device.type != "cpu" or dtype is noted[0].dtype or noted[1].dtype is noted[2].dtype is dtype:
            return None
        with mode:
            noted[1:3] = [torch.empty_like(statistic, dtype=dtype) for statistic in noted[1:3]]
        return tuple(noted)

    return fix


def _functional_batch_norm(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return a functional batch norm's results as its kernel makes them; None where ``node.meta["val"]`` is right.

    Result 0 is as for :func:`_norm_of_images`. The new running statistics, results 3 and 4, have the dtype of the old
    ones; torch notes them as float32.
    """
    laid_out = _norm_of_images(node, mode)
    results = list(laid_out or node.meta["val"])
    before = [value_of(argument) for argument in node.args[3:5] if isinstance(argument, fx.Node)]
    if len(before) != 2 or all(results[3 + i].dtype == old.dtype for i, old in enumerate(before)):
        return laid_out
    with mode:
        results[3:5] = [torch.empty_like(old) for old in before]
    return tuple(results)


def _by_cudnn(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the results of a convolution on a GPU as cuDNN lays them out; None where ``node.meta["val"]`` is right.

    Result and gradients of image and weight have their channels last if image or weight has. torch notes this only
    where it is built with cuDNN.
    """
    noted = node.meta["val"]
    image, weight = given(node)[0][node.target is aten.convolution_backward.default :][:2]
    grouped = settings_of(node)["groups"] != 1
    if image.device.type != "cuda" or grouped or image.dtype is torch.float64 or not torch.backends.cudnn.enabled:
        return None
    form = next((f for f in map(suggested_format, (image, weight)) if f is not torch.contiguous_format), None)
    results = noted if isinstance(noted, tuple) else (noted,)
    if form is None or all(r is None or r.dim() < image.dim() or r.is_contiguous(memory_format=form) for r in results):
        return None
    with mode:
        laid = [r if r is None or r.dim() < image.dim() else torch.empty_like(r, memory_format=form) for r in results]
    return tuple(laid) if isinstance(noted, tuple) else laid[0]


def _functional_copy(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the fake copy with the bytes that its kernel makes; None where ``node.meta["val"]`` has as many.

    The kernel clones the whole storage of its first argument; the decomposition notes the part that is seen.
    """
    fresh = derived(node, mode)
    return None if _nbytes(fresh) == _nbytes(node.meta["val"]) else fresh


def _scattered(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the dense result of a scatter into an expanded base; None where ``node.meta["val"]`` is not expanded.

    torch 2.11 notes the result as expanded, like the base.
    """
    noted = node.meta["val"]
    if not is_expanded(noted):
        return None
    with mode:
        return torch.empty(noted.shape, dtype=noted.dtype, device=noted.device)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has a dimension of stride 0 along which several elements share their bytes."""
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _masked(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the results with None for each that ``output_mask`` turns off.

    None instead of the results where the mask turns nothing off, or has another length than they.
    """
    mask = node.args[-1]
    noted = node.meta["val"]
    if not isinstance(mask, list | tuple) or all(mask) or len(mask) != len(noted):
        return None
    return tuple(value if computed else None for value, computed in zip(noted, mask, strict=True))


def _norm_backward(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the gradients of a norm as its kernel makes them; None where ``node.meta["val"]`` is right.

    On a CPU the input's gradient has the input's dtype and memory format; torch notes a promoted dtype and another
    order of channels. Results that ``output_mask`` turns off are None.
    """
    fixed = _masked(node, mode)
    results = list(node.meta["val"] if fixed is None else fixed)
    image: torch.Tensor = given(node)[0][1]
    if results[0] is None or image.device.type != "cpu":
        return fixed
    with mode:
        like = torch.empty_like(image, memory_format=suggested_format(image))
    if (results[0].dtype, results[0].stride()) == (like.dtype, like.stride()):
        return fixed
    return like, *results[1:]


def _viewed(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return a view as its kernel makes it; None where ``node.meta["val"]`` is right.

    A trace takes torch's Python references, which give dimensions of one element other strides, and views without
    elements another offset.
    """
    noted: torch.Tensor = node.meta["val"]
    if noted.numel() and 1 not in noted.shape:
        return None
    view = derived(node, mode)
    places = [(tensor.stride(), tensor.storage_offset()) for tensor in (view, noted)]
    return view if places[0] != places[1] else None


def _dense(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the results as contiguous tensors, as a CPU makes them; None where ``node.meta["val"]`` is right.

    torch notes that they lie like the argument.
    """
    noted = node.meta["val"]
    results = noted if isinstance(noted, tuple) else (noted,)
    if all(result is None or result.is_contiguous() or result.device.type != "cpu" for result in results):
        return None
    with mode:
        dense = tuple(r if r is None else torch.empty_like(r, memory_format=torch.contiguous_format) for r in results)
    return dense if isinstance(noted, tuple) else dense[0]


def _in_order_of(position: int) -> Fix:
    """Return a fix for a result that on a CPU has the memory format of the argument at ``position``.

    torch notes that the result lies in rows.
    """

    def fix(node: fx.Node, mode: FakeTensorMode) -> Any:
        image, noted = given(node)[0][position], node.meta["val"]
        if image.device.type != "cpu" or suggested_format(image) is torch.contiguous_format:
            return None
        with mode:
            return torch.empty_like(noted, memory_format=suggested_format(image))

    return fix


def _like(position: int) -> Fix:
    """Return a fix for a result that on a CPU has the strides of the argument at ``position``, if both have one shape.

    torch notes strides that follow from all arguments.
    """

    def fix(node: fx.Node, mode: FakeTensorMode) -> Any:
        read, noted = given(node)[0][position], node.meta["val"]
        if read.device.type != "cpu" or read.shape != noted.shape:
            return None
        with mode:
            like = torch.empty_like(read, dtype=noted.dtype)
        return None if like.stride() == noted.stride() else like

    return fix


def _dtype_of(position: int) -> Fix:
    """Return a fix for a result that on a CPU has the dtype of the argument at ``position``.

    torch notes the widest dtype of all arguments.
    """

    def fix(node: fx.Node, mode: FakeTensorMode) -> Any:
        read, noted = given(node)[0][position], node.meta["val"]
        if read.device.type != "cpu" or read.dtype is noted.dtype:
            return None
        with mode:
            return torch.empty_like(noted, dtype=read.dtype)

    return fix


def _prelu_backward(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return both results with the strides of the real kernel; None where ``node.meta["val"]`` is right.

    One loop writes both. It reads input and weight, then the gradient; torch notes the input's order.
    """
    (gradient, *others), noted = given(node)[0], node.meta["val"]
    with mode:
        fixed = [pointwise.ordered_by((*others, gradient), result) for result in noted]
    if fixed == [None, None]:
        return None
    return tuple(old if new is None else new for old, new in zip(noted, fixed, strict=True))


def _rrelu_backward(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the result with the strides and dtype of the real kernel; None where ``node.meta["val"]`` is right.

    The kernel multiplies noise and gradient where slopes were drawn, else it is the backward of a leaky ReLU; torch's
    formula reads both noise and input.
    """
    (gradient, read, noise, *_), noted, settings = given(node)[0], node.meta["val"], settings_of(node)
    drawn = settings["training"] and settings["upper"] - settings["lower"] > NARROWEST_SLOPES
    operands = (noise if drawn else read, gradient)
    dtype = torch.promote_types(operands[0].dtype, gradient.dtype)
    with mode:
        typed = noted if noted.dtype is dtype else torch.empty_like(noted, dtype=dtype)
        fixed = pointwise.ordered_by(operands, typed)
    return fixed if fixed is not None else (None if typed is noted else typed)


def _bags(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the results of ``_embedding_bag`` as long as on a CPU; None where ``node.meta["val"]`` is right.

    Results 1 to 3 are the bag of each index, the size of each bag, and the winners of each bag. Sums of bfloat16, like
    those of float32, leave result 1 empty. Where no gradient is needed, sums leave results 2 and 3 as long as the
    offsets.
    """
    weight, indices, offsets, *_ = given(node)[0]
    if weight.device.type != "cpu":
        return None
    settings = settings_of(node)
    scale, sums = settings["per_sample_weights"], settings["mode"] == SUM
    in_order = weight.stride(1) == 1 and (scale is None or scale.stride(0) == 1)
    quick = sums and in_order and settings["padding_idx"] < 0 and weight.dtype is not torch.float64
    trained = node.target is aten._embedding_bag.default
    bags = offsets.size(0) - (settings["include_last_offset"] and (trained or not sums))
    lengths = {1: 0 if quick else indices.size(0), 2: bags, 3: bags}
    results = list(node.meta["val"])
    wrong = [at for at, length in lengths.items() if results[at].dim() == 1 and results[at].size(0) != length]
    with mode:
        for at in wrong:
            results[at] = offsets.new_empty(lengths[at])
    return tuple(results) if wrong else None


def _seeds_on_cpu(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return the results of memory-efficient attention on a GPU with seed and offset, results 2 and 3, on the CPU.

    There CUDA's kernel makes them, unless a CUDA graph is captured, and its backward reads them there; torch notes the
    device of the query. ROCm's kernel makes them on the GPU.
    """
    noted = node.meta["val"]
    if noted[2].device.type != "cuda" or torch.version.hip is not None:
        return None
    with mode:
        return (*noted[:2], *(torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in noted[2:]))


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


SUM = 0
"""The mode of ``EmbeddingBag`` that adds rows up."""

NARROWEST_SLOPES = 1e-6
"""Randomised leaky ReLU takes slopes from a range no wider than this as one slope."""

WHERE_IT_STARTS = frozenset({aten.as_strided_scatter.default, aten.as_strided_copy.default})
"""Operators that read a storage by offsets from its start: allowed for an argument that starts its storage."""

WHOLE_STORAGE = frozenset(
    {
        *WHERE_IT_STARTS,
        aten.resize_.default,
        aten.resize_as_.default,
        aten.set_.source_Tensor,
        aten.set_.source_Storage_storage_offset,
    }
)
"""Operators that read, swap or resize a whole storage: capture refuses them, but for :data:`WHERE_IT_STARTS`."""

FIXES: dict[OpOverload, Fix] = {  # no operator of these has a row with ``strides`` in the operator table
    aten._native_batch_norm_legit_functional.default: _in_turn(_functional_batch_norm, _statistics(1, 2, 3, 4)),
    aten.native_batch_norm.default: _in_turn(_norm_of_images, _statistics(1, 2, 3, 4)),
    aten._native_batch_norm_legit.default: _in_turn(_norm_of_images, _statistics(1, 2, 3, 4)),
    aten._native_batch_norm_legit.no_stats: _in_turn(_norm_of_images, _statistics(1, 2)),
    aten._native_batch_norm_legit_no_training.default: _in_turn(_norm_of_images, _statistics(1, 2, 3, 4)),
    aten.native_layer_norm.default: _statistics(2, 3),
    aten.native_group_norm.default: _in_turn(_norm_of_images, _statistics(1, 2)),
    **dict.fromkeys((aten.expand.default, aten.view.default, aten._unsafe_view.default), _viewed),
    **dict.fromkeys((aten._reshape_alias.default, aten.diagonal.default), _viewed),
    aten.copy.default: _functional_copy,
    aten.slice_scatter.default: _scattered,
    aten.select_scatter.default: _scattered,
    aten.diagonal_scatter.default: _scattered,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm_backward.default: _in_turn(_masked, _dense),
    aten._log_softmax_backward_data.default: _dense,
    aten.log_sigmoid_forward.default: _dense,
    aten.pow.Scalar: _dense,
    aten.normal.Tensor_Tensor: _dense,
    aten.mse_loss_backward.default: _in_turn(_dtype_of(1), _dense),
    aten.smooth_l1_loss_backward.default: _in_turn(_dtype_of(1), _dense),
    aten.huber_loss_backward.default: _dense,
    aten.binary_cross_entropy.default: _like(0),
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.reflection_pad2d_backward.default: _in_order_of(1),
    aten.max_unpool2d.default: _in_order_of(0),
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _bags,
    aten.huber_loss.default: _in_turn(_dtype_of(0), _like(0)),
    aten.soft_margin_loss.default: _dtype_of(0),
    aten.soft_margin_loss_backward.default: _in_turn(_dtype_of(1), _like(2)),
    aten.log_sigmoid_backward.default: _like(0),
    aten._prelu_kernel_backward.default: _prelu_backward,
    aten.rrelu_with_noise_backward.default: _rrelu_backward,
    aten.native_group_norm_backward.default: _norm_backward,
    aten._scaled_dot_product_efficient_attention.default: _seeds_on_cpu,
    aten.convolution.default: _by_cudnn,
    aten.convolution_backward.default: _in_turn(_masked, _by_cudnn),
}
