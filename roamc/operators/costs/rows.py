"""The rows on costs. A name without namespace stands for all overloads of an operator and its form in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from roamc.operators.costs import (
    attention,
    collectives,
    convolutions,
    flops,
    gpu,
    images,
    linear_algebra,
    lookups,
    norms,
    others,
    products,
    softmax,
)
from roamc.operators.costs.arguments import INDEX, image, matrix, plain, triangular
from roamc.operators.costs.cost import Cost, FlopFormula, Ordered
from roamc.operators.costs.kinds import COLLECTIVE, FREE

_PRODUCT = Cost("matmul", flops.product)
_ATTENTION = Cost("attention", flops.attention)
_ATTENTION_BACKWARD = Cost("attention_backward", flops.attention_backward, buffers=gpu.attention_gradient)
_FILL = Cost("pointwise", unread=(0,))
_COPY = Cost("pointwise", any_dtypes=True)
_LOSS = Cost("pointwise", workspace=others.losses)
_DRAW = Cost("random", unread_in_place=(0,))
_REDUCTION = Cost("reduction", workspace=others.cast_to_result)
_PICK = Cost("gather", picks_from=0)
_UPSAMPLINGS = (
    *(f"{kind}{rank}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
)


def _multiplied(kind: str, read_as: Mapping[int, Ordered] = MappingProxyType({})) -> Cost:
    return Cost(kind, read_as=read_as, workspace=products.workspace, thread_workspace=products.per_thread)


def _by_onednn(kind: str, counted: FlopFormula, read_as: Mapping[int, Ordered] = MappingProxyType({})) -> Cost:
    return Cost(kind, counted, read_as=read_as, workspace=products.onednn, thread_workspace=products.onednn_per_thread)


ROWS: dict[str, Cost] = {
    # Collectives.
    **dict.fromkeys(
        ("roamc_collective::all_reduce", "roamc_collective::start_all_reduce"),
        Cost(COLLECTIVE, workspace=collectives.reduced),
    ),
    "roamc_collective::all_reduce_coalesced": Cost(COLLECTIVE, workspace=collectives.reduced_together),
    **dict.fromkeys(
        ("roamc_collective::all_gather_into_tensor", "roamc_collective::start_all_gather_into_tensor"),
        Cost(COLLECTIVE, workspace=collectives.gathered),
    ),
    **dict.fromkeys(
        ("roamc_collective::reduce_scatter_tensor", "roamc_collective::start_reduce_scatter_tensor"),
        Cost(COLLECTIVE, workspace=collectives.scattered),
    ),
    # Products.
    "roamc_collective::all_gather_mm": Cost(
        "matmul", flops.gathered_products, workspace=collectives.gathered_for_products, buffers=collectives.rows_of_all
    ),
    "roamc_collective::mm_reduce_scatter": Cost(
        "matmul",
        flops.reduced_products,
        workspace=collectives.scattered_product,
        buffers=collectives.whole_products,
    ),
    "mm": _multiplied("matmul", {0: matrix, 1: matrix}),
    "addmm": _multiplied("matmul", {1: matrix, 2: matrix}),
    "mv": Cost("matmul", flops.product, read_as={0: matrix, 1: matrix}, workspace=products.by_vector),
    "addmv": Cost("matmul", flops.product_and_sum),
    **dict.fromkeys(("_int_mm", "dot", "vdot"), _PRODUCT),
    "linear": Cost("matmul", flops.linear),
    "addr": Cost("matmul", flops.outer_and_sum),
    **dict.fromkeys(("outer", "ger"), Cost("matmul", flops.outer)),
    **dict.fromkeys(("bmm", "baddbmm"), _multiplied("batched_matmul")),
    "roamc::onednn_mm": _by_onednn("onednn_matmul", flops.product, {0: matrix, 1: matrix}),
    "roamc::onednn_addmm": _by_onednn("onednn_matmul", flops.product_and_sum, {1: matrix, 2: matrix}),
    "roamc::onednn_bmm": _by_onednn("onednn_batched_matmul", flops.product),
    "roamc::aligned_mm": Cost("matmul", flops.product, workspace=products.aligned, buffers=products.aligned),
    "roamc::aligned_addmm": Cost("matmul", flops.product_and_sum, workspace=products.aligned, buffers=products.aligned),
    "roamc::padded_mm": Cost("matmul", flops.product),
    "roamc::padded_addmm": Cost("matmul", flops.product_and_sum),
    "_trilinear": Cost(workspace=products.trilinear, thread_workspace=products.trilinear_per_thread),
    "addbmm": Cost("batched_matmul", flops.product_and_sum),
    "matmul": Cost("batched_matmul", flops.product),
    **{f"_scaled_dot_product_{kernel}_attention": _ATTENTION for kernel in ("flash", "efficient", "cudnn")},
    **{
        f"_scaled_dot_product_{kernel}_attention_backward": _ATTENTION_BACKWARD
        for kernel in ("flash", "efficient", "cudnn")
    },
    "_scaled_dot_product_flash_attention_for_cpu": Cost(
        "attention", flops.attention, causal_blocks=True, thread_workspace=attention.per_thread
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Cost(
        "attention_backward",
        flops.attention_backward,
        causal_blocks=True,
        workspace=attention.backward,
        thread_workspace=attention.backward_per_thread,
    ),
    "convolution": Cost(
        "convolution",
        read_as={0: image, 1: image},
        workspace=convolutions.forward,
        thread_workspace=convolutions.forward_per_thread,
    ),
    "convolution_backward": Cost(
        "convolution_backward",
        read_as={0: image, 1: image},
        workspace=convolutions.backward,
        thread_workspace=convolutions.backward_per_thread,
    ),
    # Pointwise.
    **dict.fromkeys([f"{kind}_like" for kind in ("zeros", "ones", "full")], _FILL),
    **dict.fromkeys([f"new_{kind}" for kind in ("zeros", "ones", "full")], _FILL),
    **dict.fromkeys(("fill", "zero"), _FILL),
    **dict.fromkeys(("where", "masked_fill"), _COPY),
    "copy": Cost("pointwise", any_dtypes=True, unread=(0,)),
    **dict.fromkeys(("clone", "_to_copy", "roamc::padded_rows", "lift_fresh_copy", "detach_copy", "alias_copy"), _COPY),
    **dict.fromkeys(("tril", "triu"), Cost("pointwise", read_as={0: triangular})),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _LOSS),
    "pow": Cost("tanh", exponent=1),
    "log_sigmoid_forward": Cost("exponential", read_as={0: plain}),
    "gelu": Cost("exponential", fixed_workspace=others.gelu),
    "gelu_backward": Cost(
        "exponential_backward", workspace=others.gelu_backward, fixed_workspace=others.gelu_backward_fixed
    ),
    **dict.fromkeys(
        ("binary_cross_entropy", "soft_margin_loss"),
        Cost("exponential", workspace=others.losses, eager_workspace=others.losses_behind),
    ),
    "soft_margin_loss_backward": Cost("exponential_backward", workspace=others.margins_backward),
    "isinf": Cost("pointwise", workspace=others.magnitudes),
    "dist": Cost("reduction", workspace=others.differences),
    "mvlgamma": Cost("tanh", workspace=others.gammas_copied, eager_workspace=others.gammas),
    "ldexp": Cost(workspace=others.powers_of_two),
    "binary_cross_entropy_with_logits": Cost("exponential", workspace=others.logits_loss),
    # In another order than memory's.
    "roll": Cost("strided", workspace=others.rolled),
    **dict.fromkeys(("pixel_shuffle", "reflection_pad2d", "replication_pad2d"), Cost("strided", read_as={0: image})),
    "reflection_pad2d_backward": Cost(like_first=True),
    "im2col": Cost("strided", read_as={0: plain}, eager_workspace=others.first_again),
    "roamc::counter_mask": Cost("pointwise", workspace=others.piece_of_a_mask, eager_workspace=others.piece_of_a_mask),
    "roamc::activation_input": Cost(
        "tanh",
        workspace=others.activation_inputs,
        launches=others.launches_of_activation_inputs,
        buffers=others.activation_inputs,
    ),
    "roamc::lost_columns": Cost("pointwise", workspace=others.columns_of_norms, buffers=others.columns_of_norms),
    "roamc::norm_input": Cost(
        "pointwise",
        workspace=others.norm_inputs_of,
        launches=others.launches_of_norm_inputs,
        buffers=others.norm_inputs_of,
    ),
    "roamc::count": Cost("pointwise", any_dtypes=True),
    "roamc::projection": Cost(
        "random",
        elements=others.draws_of_a_projection,
        launches=others.launches_of_a_projection,
        workspace=others.piece_of_a_projection,
        buffers=others.piece_of_a_projection,
    ),
    # Random.
    **dict.fromkeys(("bernoulli", "uniform", "exponential", "random"), _DRAW),
    "normal": dataclasses.replace(_DRAW, workspace=others.around),
    **dict.fromkeys([f"{kind}_like" for kind in ("rand", "randn", "randint")], Cost("random", unread=(0,))),
    "multinomial": Cost("random", workspace=lookups.multinomial, thread_workspace=lookups.multinomial_per_thread),
    "native_dropout": Cost("random", eager_workspace=others.first_again),
    "native_dropout_backward": Cost(
        "random_backward", workspace=others.dropout_piece, eager_workspace=others.first_again
    ),
    # Over rows.
    "_softmax": Cost("softmax", read_as={0: plain}, thread_workspace=softmax.softmax_per_thread),
    "_log_softmax": Cost("softmax", read_as={0: plain}, thread_workspace=softmax.log_softmax_per_thread),
    "_safe_softmax": Cost(
        "safe_softmax",
        read_as={0: plain},
        workspace=others.safe_softmax,
        thread_workspace=softmax.softmax_per_thread,
    ),
    "_softmax_backward_data": Cost(
        "softmax_backward", read_as={0: plain, 1: plain}, thread_workspace=softmax.softmax_backward_per_thread
    ),
    "_log_softmax_backward_data": Cost(
        "softmax_backward", read_as={0: plain, 1: plain}, thread_workspace=softmax.log_softmax_backward_per_thread
    ),
    "logsumexp": Cost("softmax", workspace=others.log_sum),
    "native_layer_norm": Cost("norm", read_as={0: plain}),
    "native_layer_norm_backward": Cost(
        "norm_backward", read_as={0: plain, 1: plain}, thread_workspace=norms.layer_norm_backward_per_thread
    ),
    "_fused_rms_norm": Cost("norm", workspace=norms.rms_norm),
    **dict.fromkeys(
        (
            *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
            *("_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_with_update_functional"),
            "_batch_norm_no_update",
        ),
        Cost("batch_norm", workspace=norms.batch_norm, thread_workspace=norms.batch_norm_per_thread),
    ),
    **dict.fromkeys(
        ("native_batch_norm_backward", "batch_norm_backward"),
        Cost("batch_norm_backward", workspace=norms.batch_norm_backward),
    ),
    "native_group_norm": Cost("norm", workspace=norms.group_norm, thread_workspace=norms.group_norm_per_thread),
    "native_group_norm_backward": Cost(
        "norm_backward",
        workspace=norms.group_norm_backward,
        thread_workspace=norms.group_norm_backward_per_thread,
    ),
    "sum": Cost("reduction", workspace=others.summed, buffers=gpu.staged_sums),
    "mean": Cost("reduction", workspace=others.averaged, buffers=gpu.staged_sums),
    **dict.fromkeys(("prod", "linalg_vector_norm", "nansum"), _REDUCTION),
    "roamc::prod_backward": Cost("pointwise", workspace=others.other_elements, eager_workspace=others.quotients),
    **dict.fromkeys(("cumsum", "cumprod"), Cost("scan", workspace=others.cast_to_result)),
    **dict.fromkeys(
        ("median", "nanmedian"),
        Cost("reduction", workspace=lookups.median, thread_workspace=lookups.median_per_thread),
    ),
    **dict.fromkeys(("all", "any"), Cost("reduction", workspace=others.flags)),
    "histogram": Cost(thread_workspace=others.result_again),
    **dict.fromkeys(("cat", "stack"), Cost("concatenation", workspace=others.listed)),
    "_chunk_cat": Cost("concatenation", workspace=others.result_again),
    "mode": Cost("scan", thread_workspace=lookups.counted_per_thread),
    "kthvalue": Cost("scan", workspace=lookups.kth_value),
    # By index.
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), Cost("reduction", picks_from=0, read_as={0: plain})),
    "roamc::label_scores": Cost("reduction", picks_from=0, workspace=others.labels, buffers=others.labels),
    "roamc::nll_of_scores": Cost("reduction", workspace=others.labels, buffers=others.labels),
    "nll_loss_backward": Cost("scatter", written_into=1),
    **dict.fromkeys(("embedding", "index", "take", "_unsafe_index"), _PICK),
    "gather": Cost("gather", picks_from=0, workspace=others.half_in_float32),
    "index_select": Cost("gather", picks_from=0, read_as={0: plain}),
    "embedding_dense_backward": Cost("scatter", written_into=None, read_as={0: plain}),
    "embedding_backward": Cost("scatter", written_into=None),
    "_embedding_bag": Cost("gather", picks_from=0, workspace=lookups.bags),
    "_embedding_bag_forward_only": Cost("gather", workspace=lookups.bags),
    "_embedding_bag_backward": Cost(workspace=lookups.bags_backward),
    "_embedding_bag_per_sample_weights_backward": Cost(workspace=lookups.bags_of_weights),
    "_unsafe_masked_index": Cost("strided", workspace=lookups.masked_index),
    "_unsafe_masked_index_put_accumulate": Cost("scatter", workspace=lookups.masked_index),
    "_embedding_bag_dense_backward": Cost("scatter", workspace=lookups.bags_dense_backward),
    **dict.fromkeys(("scatter", "scatter_add"), Cost("scatter", workspace=others.half_in_float32)),
    "scatter_reduce": Cost("scatter", workspace=lookups.scatter_reduce),
    "index_reduce": Cost("scatter", workspace=lookups.index_reduce),
    "masked_scatter": Cost("scatter", read_as={2: plain}),
    "index_add": Cost("scatter", workspace=lookups.index_add),
    "topk": lookups.by_row("scan", 2 * INDEX),
    "sort": lookups.by_row("scan", INDEX),
    "isin": Cost("pointwise", workspace=lookups.is_in),
    "masked_scatter_backward": Cost("scatter", workspace=lookups.masked_scatter_backward),
    # Pooling.
    **dict.fromkeys(
        ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), Cost("pool", read_as={0: image})
    ),
    "max_pool2d_with_indices_backward": Cost("pool_backward", read_as={0: image, 7: image}),
    **dict.fromkeys(("avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), Cost("pool_backward", like_first=True)),
    **dict.fromkeys(
        [f"{name}_backward" for name in _UPSAMPLINGS],
        Cost("pool_backward", read_as={0: image}, thread_workspace=images.image_per_thread),
    ),
    **dict.fromkeys(_UPSAMPLINGS, Cost("pool", workspace=images.resized)),
    "upsample_bilinear2d": Cost("pool", workspace=images.resized, single_workspace=images.resized_by_one),
    **{
        f"_upsample_{method}2d_aa": Cost("pool", workspace=images.resized_smoothly)
        for method in ("bilinear", "bicubic", "lanczos")
    },
    "col2im": Cost("pool_backward", read_as={0: plain}),
    "unfold_backward": Cost("strided", workspace=images.windows_added),
    # Transforms, distances, linear algebra.
    **dict.fromkeys(("_fft_r2c", "_fft_c2c"), Cost(workspace=others.fourier)),
    "_fft_c2r": Cost(workspace=others.fourier_to_real),
    "_euclidean_dist": Cost(workspace=others.distances),
    "_cdist_forward": Cost("reduction", read_as={0: plain, 1: plain}, workspace=others.pairs),
    "_cdist_backward": Cost(read_as={1: plain, 2: plain}, workspace=others.pairs_backward),
    "linalg_matrix_exp": Cost(workspace=linear_algebra.exponential),
    "linalg_inv_ex": Cost(workspace=linear_algebra.inverse),
    "_linalg_svd": Cost(workspace=linear_algebra.singular),
    "linalg_pinv": Cost(workspace=linear_algebra.pseudo_inverse),
    "linalg_eig": Cost(workspace=linear_algebra.eigen_general),
    "linalg_eigvals": Cost(workspace=linear_algebra.eigen_values),
    "_linalg_eigh": Cost(workspace=linear_algebra.eigen),
    **dict.fromkeys(("linalg_qr", "linalg_householder_product"), Cost(workspace=linear_algebra.reflectors)),
    "cholesky_solve": Cost(workspace=linear_algebra.copied_factor),
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet"), Cost(workspace=linear_algebra.pivots)),
    "lu_unpack": Cost(workspace=linear_algebra.unpacked),
    "linalg_ldl_factor_ex": Cost(workspace=linear_algebra.factored_symmetric),
    "linalg_lu": Cost(workspace=linear_algebra.factored),
    "linalg_lu_solve": Cost(workspace=linear_algebra.pivots_checked),
    "linalg_solve_triangular": Cost(workspace=linear_algebra.solved_by_triangle),
    "ormqr": Cost(workspace=linear_algebra.reflected),
    "geqrf": Cost(workspace=linear_algebra.householder),
    "cholesky": Cost(workspace=linear_algebra.copied_result, eager_workspace=linear_algebra.status),
    "cholesky_inverse": Cost(workspace=linear_algebra.status),
}
"""Operator to its row, where more is known than its kind."""

ONLY_KIND: dict[str, str] = {
    FREE: "empty empty_like empty_strided new_empty new_empty_strided empty_permuted sym_size sym_stride sym_numel "
    "sym_storage_offset _assert_async _assert_scalar _assert_tensor_metadata sym_constrain_range "
    "sym_constrain_range_for_size _local_scalar_dense _linalg_check_errors",
    "matmul": "_scaled_mm",
    "batched_matmul": "_grouped_mm _scaled_grouped_mm",
    "attention": "_flash_attention_forward _efficient_attention_forward flex_attention",
    "attention_backward": "_flash_attention_backward _efficient_attention_backward flex_attention_backward",
    "convolution": "_convolution cudnn_convolution convolution_overrideable mkldnn_convolution _slow_conv2d_forward "
    "miopen_convolution",
    COLLECTIVE: "roamc_collective::all_gather_into_tensor_coalesced roamc_collective::reduce_scatter_tensor_coalesced "
    "roamc_collective::broadcast roamc_collective::start_broadcast roamc_collective::all_to_all_single "
    "roamc_collective::start_all_to_all_single",
    "pointwise": "arange linspace scalar_tensor zeros ones full eye hardtanh_backward hardswish_backward "
    "hardsigmoid_backward leaky_relu_backward threshold_backward rrelu_with_noise_backward prelu _prelu_kernel "
    "_prelu_kernel_backward softshrink_backward hardshrink_backward nan_to_num glu glu_backward addcmul addcdiv lerp "
    "bucketize searchsorted slice_backward select_backward slice_scatter select_scatter diagonal_scatter "
    "as_strided_scatter diagonal_backward _fused_adam _fused_adamw _fused_sgd mse_loss_backward l1_loss "
    "smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward roamc::own_part roamc::own_classes "
    "roamc::own_indices roamc::own_seeds",
    "concatenation": "constant_pad_nd split_with_sizes_copy",
    "strided": "repeat flip repeat_interleave pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad3d "
    "replication_pad1d replication_pad3d as_strided_copy permute_copy transpose_copy t_copy "
    "expand_copy view_copy unfold_copy",
    "root": "sqrt rsqrt hypot",
    "exponential": "exp exp2 expm1 log log2 log10 log1p erf erfc sigmoid silu softplus elu celu selu logaddexp "
    "logit logit_backward",
    "exponential_backward": "silu_backward softplus_backward elu_backward log_sigmoid_backward",
    "tanh": "tanh sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh mish mish_backward lgamma digamma "
    "erfinv igamma igammac polygamma xlogy special_erfcx special_i0 special_i1",
    "random": "_fused_dropout rand randn randint randperm cauchy log_normal geometric poisson rrelu_with_noise "
    "normal_functional alpha_dropout roamc::draw_seeds",
    "softmax": "logcumsumexp",
    "norm": "rms_norm layer_norm",
    "norm_backward": "_fused_rms_norm_backward",
    "batch_norm": "cudnn_batch_norm miopen_batch_norm batch_norm_stats",
    "batch_norm_backward": "cudnn_batch_norm_backward miopen_batch_norm_backward",
    "reduction": "amax amin max min aminmax argmax argmin var std var_mean std_mean norm count_nonzero "
    "_foreach_norm equal _weight_norm_interface trace cdist",
    "gather": "take_along_dim masked_select",
    "scatter": "index_put _index_put_impl _unsafe_index_put index_copy index_fill nll_loss2d_backward put one_hot",
    "pool": "max_pool3d_with_indices avg_pool1d avg_pool3d _adaptive_avg_pool3d adaptive_max_pool2d "
    "grid_sampler_2d grid_sampler_3d fractional_max_pool2d max_pool2d",
    "pool_backward": "max_pool3d_with_indices_backward avg_pool3d_backward _adaptive_avg_pool3d_backward "
    "adaptive_max_pool2d_backward grid_sampler_2d_backward grid_sampler_3d_backward",
    "scan": "cummax cummin argsort unique_consecutive _unique2 nonzero bincount",
}
"""Kind to the names, separated by spaces, of the operators of which only the kind is known."""

COSTS: dict[str, Cost] = {
    **{name: Cost(kind) for kind, names in ONLY_KIND.items() for name in names.split()},
    **ROWS,
}
