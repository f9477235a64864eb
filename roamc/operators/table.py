"""The operator table: what no schema says of an operator, one row for each.

Code outside of this folder asks :mod:`roamc.operators.ops`, which joins a row with the operator's schema and tags. Only
a rewriting whose subject is one operator compares that operator's name itself.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from roamc.compat import OpOverload
from roamc.operators.collectives import NAMESPACE
from roamc.operators.index_ranges import Rule, along, classes, places, rows

aten = torch.ops.aten


class Space(enum.Enum):
    """The memory that a storage lies in; only storages in DEVICE count as live bytes of the step.

    Attributes:
        DEVICE: memory of the device that the storage is on.
        HOST: memory of the CPU in which an operator puts the bytes of a device aside. No operator does so yet.
        FILE: a file in which an operator puts them aside. No operator does so yet.
    """

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


class Strides(enum.Enum):
    """What gives the order of a result's dimensions in memory; the value of each member says it in words."""

    OPERANDS = "the strides of the operands, from the first to the last"
    OPERANDS_BACKWARDS = "the strides of the operands, from the last to the first"
    AS_NOTED = "what torch's fake kernel says"


class OutForm(enum.Enum):
    """What an operator's overload with ``out=`` arguments does with memory that was planned for its results.

    The value of each member says it in words.
    """

    WRITES = "writes the results there"
    COPIES = "makes the results first and copies them"
    ASKS = "works differently if two results share a storage, as all tensors of an arena do"
    IN_ROWS = "gives wrong numbers for a first argument that lies neither in rows nor channels last"


class Kind(enum.Enum):
    """What an error in an argument that an operator reads does; the value of each member is its name in messages.

    Attributes:
        WEIGHT: it stays in the update of the weights: the results are gradients of parameters, linear in the argument.
        SLOPE: it changes the derivative of an activation, by which a gradient is multiplied element by element.
        NORM: it enters a gradient only through the normalised value and means over rows or channels.
        ATTENTION: it enters probabilities that backward computes again, and is amplified by an exponential.
        ANY: anything; of whatever is not known.
    """

    WEIGHT = "weight"
    SLOPE = "slope"
    NORM = "norm"
    ATTENTION = "attention"
    ANY = "any"


class Together(enum.Enum):
    """What another run of a collective gives, on all ranks of its group; the value of each member says it in words."""

    MOVED = "the same bits, since it only moves them"
    SUMMED = "the same bits where the group's backend sums in one order: gloo does, and NCCL without NVLS"


@dataclass(frozen=True)
class Rowwise:
    """How an operator treats the rows along the last dimension, each apart from the others.

    Run on some rows alone, it gives the bits that it gives for them among all. Positions count arguments from 0.

    Attributes:
        dim: position of the argument that names the dimension along which it works, a number or a list of one; None if
            it has no such argument.
        keepdim: position of the flag that keeps this dimension in the result, with size 1; None if the result has the
            shape of the arguments.
        per_row: positions of the arguments that have one element for each row. Where there are some, any other argument
            of one dimension that is not ``whole`` has so too.
        whole: positions of the arguments that are the same for all rows, such as weights of classes.
        rank: the only number of dimensions for which this holds; 0 for any.
        sizes: position of the argument that has the sizes of the dimensions along which it works: this holds if that is
            the last one alone. None if it has no such argument. Arguments of one dimension have an element for each
            column then.
    """

    dim: int | None = None
    keepdim: int | None = None
    per_row: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    rank: int = 0
    sizes: int | None = None


@dataclass(frozen=True)
class Columnwise:
    """How an operator adds up over rows: over all dimensions but the last.

    Run on some rows alone, it gives partial sums, which have to be added.

    Attributes:
        results: positions of the results that have one element for each column.
        dim: position of the argument that names the dimensions that are added up: this holds if these are all but the
            last. None if it has no such argument.
    """

    results: tuple[int, ...] = (0,)
    dim: int | None = None


@dataclass(frozen=True)
class Assembly:
    """How an operator puts operands side by side along one dimension of its result; elements beside them are 0.

    Positions count arguments from 0.

    Attributes:
        parts: position of the operands, a list of tensors or one tensor.
        dim: position of the dimension.
        start: position of the index along that dimension at which the first operand begins; None if it begins at 0.
        step: position of the distance from one index of an operand to the next in the result; None if it is 1.
        sizes: position of the sizes of the result; None if they follow from the operands.
    """

    parts: int = 0
    dim: int = 1
    start: int | None = None
    step: int | None = None
    sizes: int | None = None


@dataclass(frozen=True)
class Facts:
    """What neither an operator's schema nor its tags say. Positions count arguments, or results, from 0.

    Attributes:
        shape_of: positions of the arguments of which the operator reads the shape and no element.
        compares: (position of a tensor, position of a number): of the tensor's elements the operator reads only whether
            they are above the number. None if there is no such pair.
        part: the operator that makes a view of the first argument: in the result, the second argument replaces this
            view. Functionalization writes this for an operator that eager runs on that view; eager makes no new tensor.
            None if the operator does no such thing.
        accumulates: in eager, torch's formulas for gradients call the in-place form, on the first argument; while they
            are traced, they call this operator.
        saves: positions of the arguments that autograd saves, though its formula for the gradient may read no more of
            them than their size: eager keeps them, and the graph does not show it.
        renames: the result is the argument; only autograd tells them apart.
        broadcasts: the result has the elements of the second argument in the shape of the first.
        rounds_once: every element of the result is one of an argument or is rounded once, so that its bits are the same
            whatever the strides. Of other operators the last bits may depend on the strides.
        nonnegative: no element of the result is below zero.
        whole_storage: the operator reads the whole storage of its first argument, which is the whole arena if the
            argument lies there.
        absolute: the operator finds the elements of its first argument by their offset in that storage.
        out_form: what the overload with ``out=`` arguments does.
        index_ranges: position of a result of indices to the rule for their range.
        checked_ranges: position of an argument to the rule for the range outside of which the operator raises an error.
        dense: positions of the arguments whose elements the kernel takes from memory one after the other, whatever
            their strides. Of others than contiguous ones it makes wrong numbers, a crash or an error: torch's formulas
            for gradients make them contiguous first, and leave that out where they are.
        format_of: position of the argument whose memory format, contiguous or channels last, those of ``dense`` must
            have; None if they must be contiguous.
        unit_stride: positions of the arguments whose last dimension must have stride 1 if it has several elements. With
            another stride the kernel makes wrong numbers, a crash or an error, as for ``dense``.
        finishes: position of an argument made by an asynchronous operator, for whose end this operator waits. Until
            then the asynchronous operator reads its arguments and writes its results, whatever runs in between. None if
            this operator does not wait.
        space: the memory that its results lie in.
        columnwise: how it adds up over rows, if it does; else None.
        together: of a collective that may run again where all ranks of its group run it again, what that gives; None
            for one that may not, and for other operators.
        assembly: how it puts operands side by side, if that is all that it does; else None.
        copies: all that it does is to copy its first argument, in the same shape, to new memory.
        carries: positions of the arguments whose errors the result has, also scaled by a number, if it is of a floating
            dtype and the operator is called with no other tensors: what such an error does depends on who reads it.
        kinds: position of an argument to what an error in it does; ``ANY`` for positions that are not there.
        multiplies: of a product, position of an argument to the results that are linear in it. If these are gradients
            of parameters, an error in the argument is of kind ``WEIGHT``.
        bits: positions of the arguments that hold one bit for each element of the result: of n, element e is bit
            e // ceil(n / 8) of byte e % ceil(n / 8), counted in the sequence of memory.
        numbered: an element of the result follows from its number, counted row by row, besides the arguments: what runs
            on some rows alone has to know which ones.
    """

    shape_of: tuple[int, ...] = ()
    compares: tuple[int, int] | None = None
    part: OpOverload | None = None
    accumulates: bool = False
    saves: tuple[int, ...] = ()
    renames: bool = False
    broadcasts: bool = False
    rounds_once: bool = False
    nonnegative: bool = False
    whole_storage: bool = False
    absolute: bool = False
    out_form: OutForm = OutForm.WRITES
    index_ranges: Mapping[int, Rule] = field(default_factory=dict)
    checked_ranges: Mapping[int, Rule] = field(default_factory=dict)
    dense: tuple[int, ...] = ()
    format_of: int | None = None
    unit_stride: tuple[int, ...] = ()
    finishes: int | None = None
    space: Space = Space.DEVICE
    columnwise: Columnwise | None = None
    together: Together | None = None
    assembly: Assembly | None = None
    copies: bool = False
    bits: tuple[int, ...] = ()
    numbered: bool = False
    carries: tuple[int, ...] = ()
    kinds: Mapping[int, Kind] = field(default_factory=dict)
    multiplies: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row(Facts):
    """One row: facts, and corrections to fields of :class:`roamc.operators.ops.OpRule` that schema and tags give.

    ``view_of``, ``random``, ``asynchronous``, ``recomputable``, ``overwrites``, ``strides`` and ``rowwise`` replace the
    derived field; None leaves it.
    """

    view_of: tuple[int, ...] | None = None
    random: bool | None = None
    asynchronous: bool | None = None
    recomputable: bool | None = None
    overwrites: tuple[int, ...] | None = None
    strides: Strides | None = None
    rowwise: Rowwise | None = None


SLOPE, NORM = {1: Kind.SLOPE}, {1: Kind.NORM}
ATTENTION = dict.fromkeys((1, 2, 3, 4), Kind.ATTENTION)
BIASED_ATTENTION = dict.fromkeys((1, 2, 3, 5), Kind.ATTENTION)
_ATTENTION = ("_", "_scaled_dot_product_")
FACTORS, FACTORS_ADDED = dict.fromkeys((0, 1), (0,)), dict.fromkeys((1, 2), (0,))

ROWS: dict[str, Row] = {
    "aten::detach": Row(renames=True),
    "aten::alias": Row(renames=True),
    # Share storage although their schema declares no alias.
    "aten::_unsafe_view": Row(view_of=(0,)),
    "aten::_reshape_alias": Row(view_of=(0,)),
    "aten::lift": Row(view_of=(0,)),
    "aten::lift_fresh": Row(view_of=(0,), renames=True),
    "aten::unsafe_split": Row(view_of=(0,)),
    "aten::unsafe_split_with_sizes": Row(view_of=(0,)),
    # Draw random numbers although not tagged so in every supported torch.
    "aten::native_dropout": Row(random=True),
    "aten::bernoulli_": Row(random=True),
    "aten::uniform_": Row(random=True),
    "aten::normal_": Row(random=True),
    "aten::_fused_dropout": Row(random=True),
    # Has no dropout: refuses probabilities above 0.
    "aten::_scaled_dot_product_flash_attention_for_cpu": Row(random=False, unit_stride=(0, 1, 2)),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Row(unit_stride=(1, 2, 3, 4), kinds=ATTENTION),
    # Add or write with atomics on a GPU, or pick one of several equal elements: the same inputs may give other bits.
    # These are all that torch.use_deterministic_algorithms lists, and attention's backward.
    "aten::index_put": Row(recomputable=False, overwrites=(0,), accumulates=True),
    "aten::_index_put_impl_": Row(recomputable=False),
    "aten::scatter_add": Row(recomputable=False, overwrites=(0,), accumulates=True),
    "aten::index_add": Row(recomputable=False, overwrites=(0,), accumulates=True, saves=(3,)),
    "aten::scatter.src": Row(recomputable=False, overwrites=(0,), accumulates=True),
    "aten::scatter.reduce": Row(recomputable=False, overwrites=(0,), accumulates=True),
    "aten::put": Row(recomputable=False, accumulates=True, saves=(2,)),
    "aten::index_copy": Row(recomputable=False, saves=(3,)),
    **dict.fromkeys(["aten::scatter_reduce", "aten::index_reduce"], Row(recomputable=False, saves=(0, 3))),
    "aten::max_pool2d_with_indices_backward": Row(recomputable=False, shape_of=(1,)),
    "aten::max_pool3d_with_indices_backward": Row(recomputable=False, shape_of=(1,)),
    "aten::adaptive_max_pool2d_backward": Row(recomputable=False, shape_of=(1,)),
    "aten::adaptive_max_pool3d_backward": Row(recomputable=False, shape_of=(1,), dense=(2,)),
    "aten::avg_pool3d_backward": Row(recomputable=False, shape_of=(1,)),
    "aten::_adaptive_avg_pool2d_backward": Row(recomputable=False, shape_of=(1,)),
    **dict.fromkeys(
        [
            *("aten::_unsafe_index_put", "aten::cumsum", "aten::histc"),
            *("aten::bincount", "aten::median", "aten::nanmedian"),
            *("aten::_ctc_loss_backward", "aten::_segment_reduce_backward"),
            "aten::_adaptive_avg_pool3d_backward",
            *("aten::embedding_dense_backward", "aten::_embedding_bag_dense_backward"),
            *(f"aten::upsample_{name}_backward" for name in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
            *(f"aten::_upsample_{name}2d_aa_backward" for name in ("bilinear", "bicubic")),
            *(f"aten::grid_sampler_{rank}d_backward" for rank in (2, 3)),
            *(f"aten::{kind}_pad{rank}d_backward" for kind in ("reflection", "replication") for rank in (1, 2, 3)),
        ],
        Row(recomputable=False),
    ),
    **dict.fromkeys(
        [f"aten::{form}{name}_attention_backward" for form in _ATTENTION for name in ("flash", "cudnn")],
        Row(recomputable=False, kinds=ATTENTION),
    ),
    **dict.fromkeys(
        [f"aten::{form}efficient_attention_backward" for form in _ATTENTION],
        Row(recomputable=False, kinds=BIASED_ATTENTION),
    ),
    "aten::_embedding_bag_backward": Row(recomputable=False, dense=(1, 2, 3)),
    **dict.fromkeys(
        [f"aten::fractional_max_pool{rank}d_backward" for rank in (2, 3)], Row(recomputable=False, dense=(4,))
    ),
    # Take the elements of some arguments from memory one after the other.
    "aten::native_group_norm": Row(dense=(0,), format_of=0),
    "aten::native_group_norm_backward": Row(dense=(0, 1, 2, 3, 4), format_of=1, kinds=NORM),
    "aten::native_layer_norm_backward": Row(
        dense=(3, 4), rowwise=Rowwise(sizes=2), columnwise=Columnwise(results=(1, 2)), kinds=NORM
    ),
    **dict.fromkeys(["aten::_embedding_bag", "aten::_embedding_bag_forward_only"], Row(dense=(0, 1, 2, 6))),
    "aten::_embedding_bag_per_sample_weights_backward": Row(dense=(2, 3, 4)),
    "aten::mkldnn_rnn_layer": Row(dense=(0, 5, 6)),
    "aten::mkldnn_rnn_layer_backward": Row(dense=(0, 5, 6, 7, 9, 22)),
    "aten::nll_loss2d_backward": Row(dense=(1,)),
    "aten::_pdist_forward": Row(dense=(0,)),
    "aten::_pdist_backward": Row(dense=(1, 3)),
    # One of its methods, which is the default on a CPU, starts from numbers that nobody has set.
    "aten::linalg_lstsq": Row(recomputable=False),
    # Pointwise, though torch does not say so.
    "aten::hardswish": Row(overwrites=(0,)),
    **dict.fromkeys(
        [f"aten::{name}_backward" for name in ("elu", "hardsigmoid", "hardtanh", "leaky_relu", "softplus")],
        Row(overwrites=(0, 1)),
    ),
    # Whole rows are read before they are written, and every element of them before its place.
    "aten::_softmax": Row(overwrites=(0,), rowwise=Rowwise(dim=1)),
    "aten::_log_softmax": Row(overwrites=(0,), rowwise=Rowwise(dim=1)),
    "aten::_softmax_backward_data": Row(overwrites=(0, 1), rowwise=Rowwise(dim=2)),
    "aten::_log_softmax_backward_data": Row(overwrites=(0, 1), rowwise=Rowwise(dim=2)),
    "aten::_to_copy": Row(rowwise=Rowwise(), carries=(0,)),
    "aten::nll_loss_backward": Row(rowwise=Rowwise(per_row=(2,), whole=(3, 6), rank=2)),
    "roamc::label_scores": Row(rowwise=Rowwise(dim=2, keepdim=3, per_row=(1,), rank=2)),
    **dict.fromkeys(["aten::mean.dim", "aten::amax", "aten::amin"], Row(rowwise=Rowwise(dim=1, keepdim=2))),
    "aten::sum.dim_IntList": Row(rowwise=Rowwise(dim=1, keepdim=2), columnwise=Columnwise(dim=1)),
    "aten::native_layer_norm": Row(rowwise=Rowwise(sizes=1)),
    "aten::_fused_rms_norm": Row(rowwise=Rowwise(sizes=1)),
    "aten::_fused_rms_norm_backward": Row(rowwise=Rowwise(sizes=2), columnwise=Columnwise(results=(1,)), kinds=NORM),
    **dict.fromkeys(["aten::native_batch_norm_backward", "aten::batch_norm_backward"], Row(kinds=NORM)),
    **dict.fromkeys([f"aten::{name}_batch_norm_backward" for name in ("cudnn", "miopen")], Row(kinds={0: Kind.NORM})),
    # The addend is copied into the result first, unless it lies there.
    **dict.fromkeys(
        ["aten::addmm", "roamc::onednn_addmm", "roamc::aligned_addmm", "aten::baddbmm"],
        Row(overwrites=(0,), multiplies=FACTORS_ADDED),
    ),
    "roamc::padded_addmm": Row(multiplies=FACTORS_ADDED),
    **dict.fromkeys(
        [
            *("aten::mm", "roamc::onednn_mm", "roamc::aligned_mm", "roamc::padded_mm"),
            *("aten::bmm", "roamc::onednn_bmm"),
        ],
        Row(multiplies=FACTORS),
    ),
    "aten::convolution_backward": Row(multiplies={1: (1,)}),
    "aten::scatter": Row(overwrites=(0,), accumulates=True),
    "aten::masked_scatter": Row(accumulates=True),
    # Operators whose kernel here begins with a copy of their first argument, or reads only its geometry.
    "aten::copy.default": Row(overwrites=(0, 1), broadcasts=True, rounds_once=True, whole_storage=True),
    "aten::masked_fill": Row(overwrites=(0,), rounds_once=True, strides=Strides.AS_NOTED),
    "aten::slice_scatter": Row(overwrites=(0,), part=aten.slice.Tensor, whole_storage=True),
    "aten::select_scatter": Row(overwrites=(0,), part=aten.select.int, whole_storage=True),
    "aten::diagonal_scatter": Row(overwrites=(0,), part=aten.diagonal.default, whole_storage=True),
    "aten::as_strided_scatter": Row(overwrites=(0,), part=aten.as_strided.default, whole_storage=True, absolute=True),
    "aten::as_strided_copy": Row(whole_storage=True, absolute=True),
    "aten::bernoulli": Row(overwrites=(0,)),
    **dict.fromkeys(
        [f"aten::{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn")], Row(overwrites=(0,))
    ),
    **dict.fromkeys([f"aten::new_{name}" for name in ("zeros", "full", "empty")], Row(overwrites=(0,))),
    # Work in place: our kernels copy their argument into the result first, unless it lies there.
    **dict.fromkeys(
        [f"{NAMESPACE}::{form}all_reduce" for form in ("", "start_")],
        Row(overwrites=(0,), together=Together.SUMMED, carries=(0,)),
    ),
    **dict.fromkeys(
        [f"{NAMESPACE}::{form}broadcast" for form in ("", "start_")], Row(overwrites=(0,), together=Together.MOVED)
    ),
    f"{NAMESPACE}::all_gather_mm": Row(together=Together.MOVED),
    f"{NAMESPACE}::mm_reduce_scatter": Row(together=Together.SUMMED),
    **dict.fromkeys(
        [f"{NAMESPACE}::{name}_coalesced" for name in ("all_reduce", "reduce_scatter_tensor")]
        + [f"{NAMESPACE}::{form}reduce_scatter_tensor" for form in ("", "start_")],
        Row(together=Together.SUMMED),
    ),
    **dict.fromkeys(
        [f"{NAMESPACE}::{form}" for form in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")]
        + [f"{NAMESPACE}::start_all_gather_into_tensor"],
        Row(together=Together.MOVED),
    ),
    # Reads its seed at places that it finds itself.
    "roamc::counter_mask": Row(rowwise=Rowwise(whole=(0,)), numbered=True),
    # Reads each piece of its outputs before it writes the inputs.
    "roamc::activation_input": Row(overwrites=(0,), rowwise=Rowwise(), bits=(1,)),
    "roamc::norm_input": Row(overwrites=(1,)),
    "roamc::count": Row(recomputable=False),
    "roamc::wait_collective": Row(finishes=0, recomputable=False),
    "_dtensor::shard_dim_alltoall": Row(asynchronous=False),
    # Their results do not depend on strides.
    **dict.fromkeys(
        [f"aten::{name}.Tensor" for name in ("mul", "div")],
        Row(rounds_once=True, carries=(0,)),
    ),
    **dict.fromkeys(
        ["aten::sub.Tensor"]
        + [f"aten::{name}.default" for name in ("neg", "abs", "clamp", "clamp_min", "clamp_max")]
        + ["aten::fill.Scalar"],
        Row(rounds_once=True),
    ),
    "aten::add.Tensor": Row(rounds_once=True, carries=(0, 1)),
    "aten::relu": Row(rounds_once=True, nonnegative=True),
    "aten::fill.Tensor": Row(broadcasts=True, rounds_once=True),
    "aten::clone": Row(copies=True, carries=(0,)),
    "roamc::padded_rows": Row(rowwise=Rowwise(), copies=True),
    "aten::cat.default": Row(assembly=Assembly()),
    "aten::slice_backward": Row(assembly=Assembly(dim=2, start=3, step=5, sizes=1)),
    # Not written as they are with out=.
    **dict.fromkeys([f"aten::_fft_{kind}" for kind in ("c2r", "c2c")], Row(out_form=OutForm.COPIES)),
    "aten::_fft_r2c": Row(out_form=OutForm.COPIES, saves=(0,)),
    "aten::linalg_qr": Row(out_form=OutForm.ASKS),
    **dict.fromkeys(
        ["aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional"],
        Row(out_form=OutForm.IN_ROWS),
    ),
    # Make indices, or check them.
    "aten::max_pool2d_with_indices": Row(index_ranges={1: places(2)}),
    "aten::max_pool3d_with_indices": Row(index_ranges={1: places(3)}),
    "aten::adaptive_max_pool2d": Row(index_ranges={1: places(2)}),
    "aten::adaptive_max_pool3d": Row(index_ranges={1: places(3)}),
    **dict.fromkeys(["aten::argmax", "aten::argmin", "aten::argsort.default"], Row(index_ranges={0: along})),
    **dict.fromkeys(
        [f"aten::{name}" for name in ("topk", "sort", "mode", "max.dim", "min.dim")],
        Row(index_ranges={1: along}),
    ),
    **dict.fromkeys(["aten::cummax", "aten::cummin"], Row(index_ranges={1: along}, saves=(0,))),
    "aten::kthvalue": Row(recomputable=False, index_ranges={1: along}),
    "aten::median.dim": Row(recomputable=False, index_ranges={1: along}),
    "aten::embedding": Row(checked_ranges={1: rows}),
    "aten::gather": Row(checked_ranges={2: along}, saves=(0,)),
    "aten::index_select": Row(checked_ranges={2: along}),
    "aten::nll_loss_forward": Row(checked_ranges={1: classes}),
    "aten::nll_loss2d_forward": Row(recomputable=False, checked_ranges={1: classes}),
    # Read less of an argument than its elements.
    "aten::avg_pool2d_backward": Row(shape_of=(1,)),
    # Work element by element, but are not tagged so, read their operands backwards, or read a mask as it is.
    **dict.fromkeys(
        [f"aten::{name}_backward" for name in ("elu", "hardsigmoid", "hardswish", "hardtanh", "softshrink")]
        + ["aten::hardshrink_backward"]
        + ["aten::floor_divide", "aten::mse_loss", "aten::smooth_l1_loss", "aten::polar"],
        Row(strides=Strides.OPERANDS),
    ),
    **dict.fromkeys(
        [f"aten::{name}_backward" for name in ("silu", "mish", "softplus")],
        Row(strides=Strides.OPERANDS, kinds=SLOPE),
    ),
    **dict.fromkeys([f"aten::{name}_backward" for name in ("gelu", "tanh", "sigmoid")], Row(kinds=SLOPE)),
    "aten::complex": Row(strides=Strides.OPERANDS, saves=(0, 1)),
    "aten::div.Tensor_mode": Row(saves=(0, 1)),
    **dict.fromkeys(
        ["aten::linalg_vector_norm", "aten::_linalg_det", "aten::_linalg_slogdet", "aten::_linalg_solve_ex"],
        Row(saves=(0,)),
    ),
    "aten::leaky_relu_backward": Row(strides=Strides.OPERANDS_BACKWARDS),
    "aten::threshold_backward": Row(compares=(1, 2), strides=Strides.OPERANDS_BACKWARDS),
    "aten::where": Row(strides=Strides.AS_NOTED),
}
