"""The operator table: what an operator views, mutates, may write over; whether it draws, talks to ranks, repeats.

Most of it is in the operator's schema and tags. ``ROWS`` holds what a schema does not say. Code asks
:func:`rule` and never compares operator names itself.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roamc.compat import HigherOrderOperator, OpOverload
from roamc.operators.collectives import FINISHED, NAMESPACE
from roamc.operators.random import replay, save_rng_state

Target = object


@dataclass(frozen=True)
class OpRule:
    """What the planner must know of one operator.

    Attributes:
        view_of: positions of the arguments whose storage a result shares.
        mutates: positions or keyword names of the arguments that are written.
        random: draws from a generator, so that its place among random operators matters.
        collective: talks to other ranks; all ranks must issue it in the same order.
        asynchronous: may return before its results are there or its arguments are read. A graph that runs has none:
            capture puts operators of :mod:`roamc.operators.collectives` in their place, or refuses the graph.
        ordered: has an effect that is not in its results (assertions, checks, prints); keeps its place.
        recomputable: gives the same bits again for the same inputs.
        overwrites: positions of the arguments whose memory the result may be written to, where argument and result have
            the same geometry. Every element is read before its place is written, and the bits are the same.
        shape_of: positions of the arguments of which the operator reads the shape and no element.
        compares: (position of a tensor, position of a number): of the tensor's elements the operator reads only whether
            they are above the number.
        patches: what functionalization writes for an operator that eager runs on a view of the first argument. The
            result is that argument with the view replaced; eager makes no new tensor.
        accumulates: torch's formulas for gradients write it over its first argument in eager, and call this form while
            they are traced.
    """

    view_of: tuple[int, ...] = ()
    mutates: tuple[int | str, ...] = ()
    random: bool = False
    collective: bool = False
    asynchronous: bool = False
    ordered: bool = False
    recomputable: bool = True
    overwrites: tuple[int, ...] = ()
    shape_of: tuple[int, ...] = ()
    compares: tuple[int, int] | None = None
    patches: bool = False
    accumulates: bool = False


@dataclass(frozen=True)
class Row:
    """Corrections to what schema and tags say; None leaves a field as derived."""

    view_of: tuple[int, ...] | None = None
    random: bool | None = None
    recomputable: bool | None = None
    overwrites: tuple[int, ...] | None = None
    shape_of: tuple[int, ...] = ()
    compares: tuple[int, int] | None = None
    patches: bool = False
    accumulates: bool = False


ROWS: dict[str, Row] = {
    # Share storage although their schema declares no alias.
    "aten::_unsafe_view": Row(view_of=(0,)),
    "aten::_reshape_alias": Row(view_of=(0,)),
    "aten::lift": Row(view_of=(0,)),
    "aten::lift_fresh": Row(view_of=(0,)),
    "aten::unsafe_split": Row(view_of=(0,)),
    "aten::unsafe_split_with_sizes": Row(view_of=(0,)),
    # Draw random numbers although not tagged so in every supported torch.
    "aten::native_dropout": Row(random=True),
    "aten::bernoulli_": Row(random=True),
    "aten::uniform_": Row(random=True),
    "aten::normal_": Row(random=True),
    "aten::_fused_dropout": Row(random=True),
    # Has no dropout: refuses probabilities above 0.
    "aten::_scaled_dot_product_flash_attention_for_cpu": Row(random=False),
    # Add up or write with atomics on a GPU, or pick one of equals: the same inputs may give other bits. All that
    # torch.use_deterministic_algorithms lists, and attention's backward.
    "aten::index_put": Row(recomputable=False, overwrites=(0,), accumulates=True),
    "aten::_index_put_impl_": Row(recomputable=False),
    "aten::scatter_add": Row(recomputable=False, overwrites=(0,), accumulates=True),
    "aten::index_add": Row(recomputable=False, overwrites=(0,), accumulates=True),
    "aten::scatter.src": Row(recomputable=False, overwrites=(0,), accumulates=True),
    "aten::scatter.reduce": Row(recomputable=False, overwrites=(0,), accumulates=True),
    "aten::put": Row(recomputable=False, accumulates=True),
    "aten::max_pool2d_with_indices_backward": Row(recomputable=False, shape_of=(1,)),
    "aten::max_pool3d_with_indices_backward": Row(recomputable=False, shape_of=(1,)),
    "aten::adaptive_max_pool2d_backward": Row(recomputable=False, shape_of=(1,)),
    "aten::adaptive_max_pool3d_backward": Row(recomputable=False, shape_of=(1,)),
    "aten::avg_pool3d_backward": Row(recomputable=False, shape_of=(1,)),
    "aten::_adaptive_avg_pool2d_backward": Row(recomputable=False, shape_of=(1,)),
    **dict.fromkeys(
        [
            *("aten::scatter_reduce", "aten::index_reduce", "aten::index_copy", "aten::_unsafe_index_put"),
            *("aten::cumsum", "aten::histc", "aten::bincount", "aten::kthvalue", "aten::median", "aten::nanmedian"),
            *("aten::nll_loss2d_forward", "aten::_ctc_loss_backward", "aten::_segment_reduce_backward"),
            "aten::_adaptive_avg_pool3d_backward",
            *("aten::embedding_dense_backward", "aten::_embedding_bag_backward", "aten::_embedding_bag_dense_backward"),
            *(f"aten::upsample_{name}_backward" for name in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
            *(f"aten::_upsample_{name}2d_aa_backward" for name in ("bilinear", "bicubic")),
            *(f"aten::grid_sampler_{rank}d_backward" for rank in (2, 3)),
            *(f"aten::fractional_max_pool{rank}d_backward" for rank in (2, 3)),
            *(f"aten::{kind}_pad{rank}d_backward" for kind in ("reflection", "replication") for rank in (1, 2, 3)),
            *(f"aten::_{name}_attention_backward" for name in ("efficient", "flash", "cudnn")),
            *(f"aten::_scaled_dot_product_{name}_attention_backward" for name in ("efficient", "flash", "cudnn")),
        ],
        Row(recomputable=False),
    ),
    # One of its methods, which is the default on a CPU, starts from numbers that nobody has set.
    "aten::linalg_lstsq": Row(recomputable=False),
    # Pointwise, though torch does not say so.
    "aten::hardswish": Row(overwrites=(0,)),
    **dict.fromkeys(
        [f"aten::{name}_backward" for name in ("elu", "hardsigmoid", "hardtanh", "leaky_relu", "softplus")],
        Row(overwrites=(0, 1)),
    ),
    # Whole rows are read before they are written, and every element of them before its place.
    "aten::_softmax": Row(overwrites=(0,)),
    "aten::_log_softmax": Row(overwrites=(0,)),
    "aten::_softmax_backward_data": Row(overwrites=(0, 1)),
    "aten::_log_softmax_backward_data": Row(overwrites=(0, 1)),
    # The addend is copied into the result first, unless it lies there.
    "aten::addmm": Row(overwrites=(0,)),
    "aten::baddbmm": Row(overwrites=(0,)),
    "aten::scatter": Row(overwrites=(0,), accumulates=True),
    "aten::masked_scatter": Row(accumulates=True),
    # Kernels of ours that begin with a copy of their first argument, or that read no more than its geometry.
    "aten::copy": Row(overwrites=(0, 1)),
    "aten::masked_fill": Row(overwrites=(0,)),
    "aten::slice_scatter": Row(overwrites=(0,), patches=True),
    "aten::select_scatter": Row(overwrites=(0,), patches=True),
    "aten::diagonal_scatter": Row(overwrites=(0,), patches=True),
    "aten::as_strided_scatter": Row(overwrites=(0,), patches=True),
    "aten::bernoulli": Row(overwrites=(0,)),
    **dict.fromkeys(
        [f"aten::{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn")], Row(overwrites=(0,))
    ),
    **dict.fromkeys([f"aten::new_{name}" for name in ("zeros", "full", "empty")], Row(overwrites=(0,))),
    # Work in place: our kernels copy their argument into the result first, unless it lies there.
    **dict.fromkeys([f"{NAMESPACE}::{name}" for name in ("all_reduce", "broadcast")], Row(overwrites=(0,))),
    # Read less of an argument than its elements.
    "aten::avg_pool2d_backward": Row(shape_of=(1,)),
    "aten::threshold_backward": Row(compares=(1, 2)),
}

COLLECTIVE_NAMESPACES = frozenset(
    {
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"),
        *("_dtensor", "fsdp", "symm_mem", NAMESPACE),
    }
)
"""Namespaces of operators that talk to other ranks, or that prepare and unpack what such operators move."""

SYNCHRONOUS = frozenset({"_dtensor::shard_dim_alltoall", *(start._schema.name for start in FINISHED.values())})
"""The operators of these namespaces whose results are there when they return."""


@functools.cache
def rule(target: Target) -> OpRule:
    """The row of ``target``: an ATen or custom overload, ``operator.getitem`` or a higher-order operator."""
    if target is operator.getitem:
        return OpRule(view_of=(0,))
    if isinstance(target, OpOverload):
        return _from_schema(target)
    if target is replay:  # leaves the generator as it finds it
        return OpRule(recomputable=False)
    return OpRule(random=target is save_rng_state, ordered=target is not save_rng_state, recomputable=False)


def _from_schema(target: OpOverload) -> OpRule:
    schema = target._schema
    row = ROWS.get(f"{schema.name}.{schema.overload_name}", ROWS.get(schema.name, Row()))
    mutates: list[int | str] = []
    views: list[int] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        if argument.alias_info.is_write:
            mutates.append(argument.name if argument.kwarg_only else position)
        elif not argument.kwarg_only:
            views.append(position)
    random = torch.Tag.nondeterministic_seeded in target.tags if row.random is None else row.random
    collective = target.namespace in COLLECTIVE_NAMESPACES
    exact = not (random or collective or mutates)
    return OpRule(
        view_of=tuple(views) if row.view_of is None else row.view_of,
        mutates=tuple(mutates),
        random=random,
        collective=collective,
        asynchronous=collective and schema.name not in SYNCHRONOUS,
        ordered=not (schema.returns or mutates),  # there is no other reason to call it
        recomputable=exact if row.recomputable is None else (exact and row.recomputable),
        overwrites=_pointwise(target) if row.overwrites is None else row.overwrites,
        shape_of=row.shape_of,
        compares=row.compares,
        patches=row.patches,
        accumulates=row.accumulates,
    )


def _pointwise(target: OpOverload) -> tuple[int, ...]:
    """All tensors that a pointwise operator reads."""
    if torch.Tag.pointwise not in target.tags:
        return ()
    arguments = enumerate(target._schema.arguments)
    return tuple(at for at, argument in arguments if str(argument.type) == "Tensor" and not argument.kwarg_only)


def draws(target: Target, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether this call draws random numbers: attention does not where its dropout has probability 0."""
    return rule(target).random and argument_of(target, args, kwargs, "dropout_p") != 0


def argument_of(target: Target, args: Sequence[object], kwargs: Mapping[str, object], name: str) -> Any:
    """An argument of a call by its name in the schema, given or its default; None if there is none of that name."""
    for position, argument in enumerate(target._schema.arguments if isinstance(target, OpOverload) else ()):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def may_overwrite(node: fx.Node) -> tuple[int, ...]:
    """Positions of the arguments that ``node`` may write its result over, if both have the same geometry.

    Empty for complex results: compilers multiply and divide them in another order where an argument is written over.
    Left out: an argument whose storage the operator also reads through an argument that it may not write over, such as
    ``addmm(x, x, x)``. Other geometries in that storage (``mul(x, x.t())``) are the caller's to look for.
    """
    allowed = rule(node.target).overwrites
    result = node.meta.get("val")
    if not allowed or (isinstance(result, torch.Tensor) and result.is_complex()):
        return ()
    return tuple(position for position in allowed if not reads_elsewhere(node, position, besides=allowed))


def reads_elsewhere(node: fx.Node, position: int, besides: Collection[int] = ()) -> bool:
    """Whether ``node`` reads the storage of its argument at ``position`` through an argument not listed in ``besides``.

    Tensors in lists and keyword arguments count.
    """
    rest = [value for at, value in enumerate(node.args) if at != position and at not in besides]
    others: list[fx.Node] = []
    fx.map_arg((rest, node.kwargs), others.append)
    return bool(others) and not _storages([node.args[position]]).isdisjoint(_storages(others))


def _storages(arguments: Iterable[Any]) -> set[int]:
    """The storages of those arguments that are tensors."""
    values = [argument.meta.get("val") for argument in arguments if isinstance(argument, fx.Node)]
    dense = [value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided]
    return {value.untyped_storage()._cdata for value in dense}


def name_of(target: Target) -> str:
    """The qualified name of an operator or a function, the same in every process; of another object that of its type.

    ``aten.mul.Tensor``, ``_operator.getitem``, ``roamc.operators.random.replay``.
    """
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if isinstance(target, functools.partial):
        return f"partial({name_of(target.func)}, {len(target.args)}, {sorted(target.keywords)})"
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def is_view(target: Target) -> bool:
    """Whether a call of ``target`` only makes another view (or picks one result of several)."""
    found = rule(target)
    return bool(found.view_of) and not found.mutates


class Need(enum.Enum):
    """What an operator needs of an argument."""

    ELEMENTS = "elements"
    SIGN = "sign"  # whether each element is above zero
    SHAPE = "shape"


def needs(target: Target, args: Sequence[object]) -> Mapping[int, Need]:
    """What ``target``, called with ``args``, needs of the tensors at these positions; of all others the elements."""
    found = rule(target)
    if not found.shape_of and found.compares is None:
        return {}
    known = dict.fromkeys(found.shape_of, Need.SHAPE)
    if found.compares is not None:
        tensor, number = found.compares
        against = args[number] if number < len(args) else None
        if isinstance(against, int | float) and against == 0:
            known[tensor] = Need.SIGN
    return known


def has_effect(target: Target) -> bool:
    """Whether ``target`` changes anything beside its results, so that it must run even if nobody reads them."""
    found = rule(target)
    return bool(found.mutates) or found.random or found.collective or found.ordered


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose storage ``node`` writes, in schema order; lists of tensors are flattened."""
    written: list[fx.Node] = []
    schema = getattr(node.target, "_schema", None)
    for where in rule(node.target).mutates:
        if isinstance(where, str):
            value = node.kwargs.get(where)
        elif where < len(node.args):
            value = node.args[where]
        else:
            value = node.kwargs.get(schema.arguments[where].name) if schema is not None else None
        fx.node.map_arg(value, written.append)
    return written
