"""The kind of every operator: what bounds its time. One table; what it does not name is derived from torch's tags.

Two families. Kinds of ``PRODUCTS`` do many operations an element, and a profile gives FLOP/s for them. The others do
few, and are bound by memory or, where a profile gives it, by elements a second: a CPU draws random numbers and takes
exponentials far slower than it reads memory.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from roamc.compat import OpOverload
from roamc.cost.call import Call, call_of, fakes, tensors_in
from roamc.operators import ops
from roamc.operators.random import save_rng_state

VIEW = "view"
FREE = "free"
UNKNOWN = "unknown"
CONVOLUTIONS = tuple(f"convolution{what}{way}" for what in ("", "_1x1", "_grouped") for way in ("", "_backward"))
PRODUCTS = ("matmul", "batched_matmul", "attention", "attention_backward", *CONVOLUTIONS)

KINDS: dict[str, str] = {
    VIEW: "makes no tensor: takes no time",
    FREE: "makes a tensor and does not fill it: an operator's overhead",
    "matmul": "one matrix product",
    "batched_matmul": "many small matrix products",
    "attention": "fused scaled dot-product attention",
    "attention_backward": "of this",
    "convolution": "dense, with a window",
    "convolution_backward": "of this",
    "convolution_1x1": "dense, without a window: a matrix product over pixels",
    "convolution_1x1_backward": "of this",
    "convolution_grouped": "depthwise, or in many groups",
    "convolution_grouped_backward": "of this",
    "pointwise": "arithmetic on elements, copies, fills: as fast as memory",
    "mixed": "pointwise over several dtypes, for which torch on a CPU has no vector code",
    "strided": "reads or writes elements in another order than memory's, as transposed copies do",
    "concatenation": "puts tensors together, or into a larger one",
    "root": "square roots",
    "exponential": "exp, log, erf and what is made of one of them, such as gelu and sigmoid",
    "exponential_backward": "of these",
    "tanh": "slow functions: tanh, sine, general powers",
    "random": "draws a number for every element",
    "random_backward": "of dropout: what it is given, or a gradient, by its mask",
    "softmax": "softmax and log-softmax",
    "safe_softmax": "softmax that looks for rows without a finite element",
    "softmax_backward": "of either",
    "norm": "layer and group normalisation",
    "norm_backward": "of these",
    "batch_norm": "batch normalisation",
    "batch_norm_backward": "of this",
    "reduction": "sums, means, largest elements",
    "gather": "reads elements or rows by index",
    "scatter": "adds or writes elements or rows by index",
    "pool": "pooling, resampling",
    "pool_backward": "of these",
    "scan": "running sums, sorting, largest k",
    UNKNOWN: "none of the above; taken for expensive, see roamc.cost.predict",
}
"""Every kind and what is in it."""

HEAVY = frozenset({*PRODUCTS, "random", "scatter", "pool", "pool_backward", "scan", UNKNOWN})
"""Kinds that do much for an element, or read and write memory here and there."""

LIGHT = frozenset(KINDS) - HEAVY
"""Kinds that do a few operations an element, mostly one after the other in memory: cheap on any device."""

_MEMBERS: dict[str, str] = {
    FREE: "empty empty_like empty_strided new_empty new_empty_strided empty_permuted sym_size sym_stride sym_numel "
    "sym_storage_offset _assert_async _assert_scalar _assert_tensor_metadata sym_constrain_range "
    "sym_constrain_range_for_size _local_scalar_dense _linalg_check_errors",
    "matmul": "mm addmm _scaled_mm _int_mm linear mv addmv dot vdot addr outer ger",
    "batched_matmul": "bmm baddbmm addbmm matmul _grouped_mm _scaled_grouped_mm",
    "attention": "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward "
    "_efficient_attention_forward flex_attention",
    "attention_backward": "_scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward "
    "_scaled_dot_product_flash_attention_for_cpu_backward _flash_attention_backward _efficient_attention_backward "
    "flex_attention_backward",
    "convolution": "convolution convolution_backward _convolution cudnn_convolution convolution_overrideable "
    "mkldnn_convolution _slow_conv2d_forward miopen_convolution",
    "pointwise": "arange linspace scalar_tensor zeros ones full zeros_like ones_like full_like new_zeros new_ones "
    "new_full fill zero eye where masked_fill copy clone _to_copy lift_fresh_copy detach_copy alias_copy "
    "tril triu hardtanh_backward hardswish_backward hardsigmoid_backward leaky_relu_backward threshold_backward "
    "rrelu_with_noise_backward prelu _prelu_kernel _prelu_kernel_backward softshrink_backward hardshrink_backward "
    "nan_to_num glu glu_backward addcmul addcdiv lerp isin bucketize searchsorted "
    "slice_backward select_backward slice_scatter select_scatter diagonal_scatter as_strided_scatter diagonal_backward "
    "_fused_adam _fused_adamw _fused_sgd mse_loss mse_loss_backward l1_loss smooth_l1_loss smooth_l1_loss_backward "
    "huber_loss huber_loss_backward binary_cross_entropy_backward convert_element_type",
    "concatenation": "cat stack constant_pad_nd split_with_sizes_copy",
    "strided": "repeat flip roll repeat_interleave pixel_shuffle pixel_unshuffle "
    "channel_shuffle reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d unfold_backward as_strided_copy permute_copy transpose_copy t_copy expand_copy view_copy "
    "_unsafe_masked_index unfold_copy im2col",
    "root": "sqrt rsqrt hypot",
    "exponential": "exp exp2 expm1 log log2 log10 log1p erf erfc sigmoid silu gelu softplus elu celu selu "
    "log_sigmoid_forward logaddexp binary_cross_entropy binary_cross_entropy_with_logits logit logit_backward "
    "soft_margin_loss",
    "exponential_backward": "silu_backward gelu_backward softplus_backward elu_backward log_sigmoid_backward "
    "soft_margin_loss_backward",
    "tanh": "tanh sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh pow mish mish_backward lgamma digamma "
    "erfinv igamma igammac polygamma xlogy special_erfcx special_i0 special_i1",
    "random": "native_dropout _fused_dropout bernoulli uniform normal rand randn rand_like randn_like randint "
    "randint_like randperm multinomial exponential cauchy log_normal geometric poisson rrelu_with_noise random "
    "normal_functional alpha_dropout",
    "random_backward": "native_dropout_backward",
    "softmax": "_softmax _log_softmax logsumexp logcumsumexp",
    "safe_softmax": "_safe_softmax",
    "softmax_backward": "_softmax_backward_data _log_softmax_backward_data",
    "norm": "native_layer_norm native_group_norm _fused_rms_norm rms_norm layer_norm",
    "norm_backward": "native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward",
    "batch_norm": "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training cudnn_batch_norm _batch_norm_with_update batch_norm_with_update "
    "_batch_norm_with_update_functional miopen_batch_norm _batch_norm_no_update batch_norm_stats",
    "batch_norm_backward": "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward "
    "miopen_batch_norm_backward",
    "reduction": "sum mean prod amax amin max min aminmax argmax argmin any all var std var_mean std_mean norm "
    "linalg_vector_norm nansum count_nonzero _foreach_norm equal median nll_loss_forward nll_loss2d_forward "
    "_weight_norm_interface trace cdist _cdist_forward",
    "gather": "embedding gather index index_select take take_along_dim _unsafe_index _embedding_bag "
    "_embedding_bag_forward_only masked_select",
    "scatter": "embedding_dense_backward scatter scatter_add scatter_reduce index_put _index_put_impl "
    "_unsafe_index_put index_add index_copy index_fill masked_scatter embedding_backward nll_loss_backward "
    "nll_loss2d_backward _embedding_bag_dense_backward _unsafe_masked_index_put_accumulate put index_reduce "
    "masked_scatter_backward one_hot",
    "pool": "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d _upsample_bilinear2d_aa "
    "grid_sampler_2d grid_sampler_3d fractional_max_pool2d max_pool2d",
    "pool_backward": "max_pool2d_with_indices_backward max_pool3d_with_indices_backward avg_pool2d_backward "
    "avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward "
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward upsample_bilinear2d_backward "
    "upsample_bicubic2d_backward upsample_linear1d_backward upsample_trilinear3d_backward grid_sampler_2d_backward "
    "grid_sampler_3d_backward col2im",
    "scan": "cumsum cumprod cummax cummin sort topk kthvalue argsort unique_consecutive _unique2 nonzero bincount",
}
OPERATORS: dict[str, str] = {name: kind for kind, names in _MEMBERS.items() for name in names.split()}
"""ATen operator, without namespace, overload and the underscore of in-place forms, to its kind."""

COPIES = frozenset({"clone", "copy", "_to_copy", "lift_fresh_copy", "detach_copy", "alias_copy"})
"""Torch on a CPU has vector code for these between any two dtypes."""
QUICK_POWERS = (2, 3, -1, -2, 1, 0, 2.0, 3.0, -1.0, -2.0, 1.0, 0.0)
"""Exponents that ``pow`` takes by multiplication; 0.5 and -0.5 are roots."""


@functools.cache
def _base_kind(target: Any, name: str) -> str:
    """The kind by name and tags alone."""
    if target is save_rng_state:
        return "pointwise"
    if ops.is_view(target):
        return VIEW
    if not isinstance(target, OpOverload):
        return OPERATORS.get(name, UNKNOWN)
    if name in OPERATORS:
        return OPERATORS[name]
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "random"
    if torch.Tag.pointwise in target.tags:
        return "pointwise"
    reduction = getattr(torch.Tag, "reduction", None)  # a tag since torch 2.12
    return "reduction" if reduction is not None and reduction in target.tags else UNKNOWN


def kind_of(node: fx.Node) -> str:
    """The kind of ``node``, one of :data:`KINDS`; by its operator, and for a few by their arguments."""
    call = call_of(node)
    kind = _base_kind(call.target, call.name)
    refine = _REFINE.get(kind)
    return refine(call, node) if refine is not None else kind


def is_light(node: fx.Node) -> bool:
    """Whether another run of ``node`` is cheap on any device: see :data:`LIGHT`."""
    return kind_of(node) in LIGHT


def _pointwise(call: Call, node: fx.Node) -> str:
    """Pointwise operators read and write in step unless dtypes or strides differ."""
    read = [tensor for tensor in tensors_in(fakes([*call.args, *call.kwargs.values()])) if tensor.dim()]
    made = next(tensors_in(node.meta.get("val")), None)
    if made is None:
        return "pointwise"
    if call.name not in COPIES and _is_mixed(call, read):
        return "mixed"
    whole = [tensor for tensor in read if tensor.shape == made.shape and made.numel() > 1]
    return "pointwise" if all(_steps(tensor) == _steps(made) for tensor in whole) else "strided"


def _is_mixed(call: Call, read: list[torch.Tensor]) -> bool:
    """Whether arguments have several dtypes; a condition is no operand."""
    operands = read[1:] if call.name in ("where", "masked_fill") else read
    return len({tensor.dtype for tensor in operands}) > 1 and call.name not in ("where", "masked_fill")


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that have more than one element; an expanded dimension moves nothing."""
    return tuple(int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and step)


def _power(call: Call, node: fx.Node) -> str:
    exponent = call.args[1] if call.name == "pow" and len(call.args) > 1 else None
    if exponent in (0.5, -0.5):
        return "root"
    return _pointwise(call, node) if exponent in QUICK_POWERS else "tanh"


def _convolution(call: Call, node: fx.Node) -> str:
    """By window and groups, and the direction."""
    backward = "_backward" if call.name == "convolution_backward" else ""
    weight = fakes(call.args[2 if backward else 1])
    groups = call.args[-2 if backward else 8] if len(call.args) > 8 else 1
    if isinstance(groups, int) and groups > 1:
        return f"convolution_grouped{backward}"
    return f"{'convolution_1x1' if all(size == 1 for size in weight.shape[2:]) else 'convolution'}{backward}"


_REFINE = {"pointwise": _pointwise, "tanh": _power, "convolution": _convolution}
