"""What is known of an operator: its rows of the tables, joined with its schema and tags, and what follows for a call.

A target is what a ``call_function`` node calls.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import fx

from roamc.compat import OpOverload
from roamc.compat_operators import is_pointwise, suggested_format
from roamc.operators.collectives import FINISHED, NAMESPACE
from roamc.operators.composite import Composite
from roamc.operators.costs.cost import Cost
from roamc.operators.costs.kinds import UNKNOWN, VIEW
from roamc.operators.costs.rows import COSTS
from roamc.operators.products_sent import PRODUCTS_SENT
from roamc.operators.random import replay, save_rng_state
from roamc.operators.schemas import argument_of, stem, value_form
from roamc.operators.table import ROWS, Facts, Row, Rowwise, Strides

Target = object
StoragesOf = Callable[[fx.Node], Iterable[Hashable]]
"""Function of a node that returns what stands for the storages of its tensors: ids, or in capture addresses."""

UNKNOWN_COST = Cost(UNKNOWN)


@dataclass(frozen=True)
class OpRule(Facts):
    """What the planner must know of one operator. Positions count its arguments from 0.

    Attributes:
        view_of: positions of the arguments whose storage a result shares.
        mutates: positions or keyword names of the arguments that are written.
        random: it draws from a generator, so that its place among random operators matters.
        unknown: nothing says whether it draws or keeps state between calls, as for an operator that
            ``torch.library.custom_op`` makes without tags: it keeps its place among random operators, and runs as often
            as in the graph.
        collective: it talks to other ranks; all ranks must issue such operators in the same order.
        asynchronous: it may return before its results are there or its arguments are read, as collectives may. In a
            graph that runs, an operator with ``finishes`` waits for it: capture takes no others, pass overlap makes
            such pairs.
        ordered: it has an effect that is not in its results (assertions, checks, prints), and keeps its place.
        recomputable: it gives the same bits again for the same inputs.
        overwrites: positions of the arguments whose memory the result may be written to, where argument and result have
            the same geometry. Every element is read before its place is written, and the bits are the same.
        strides: what gives the order of its result's dimensions in memory.
        rowwise: how it treats the rows along the last dimension, if each apart from the others; else None. An
            operator in place has the entry of its form that makes a new value.
        cost: what bounds its time and its workspace; its kind is never "".
    """

    view_of: tuple[int, ...] = ()
    mutates: tuple[int | str, ...] = ()
    random: bool = False
    unknown: bool = False
    collective: bool = False
    asynchronous: bool = False
    ordered: bool = False
    recomputable: bool = True
    overwrites: tuple[int, ...] = ()
    strides: Strides = Strides.AS_NOTED
    rowwise: Rowwise | None = None
    cost: Cost = UNKNOWN_COST

    @property
    def may_draw(self) -> bool:
        """Whether the operator draws random numbers, or nothing says that it does not."""
        return self.random or self.unknown


COLLECTIVE_NAMESPACES = frozenset(
    {
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"),
        *("_dtensor", "fsdp", "symm_mem", NAMESPACE),
    }
)
"""Namespaces of operators that talk to other ranks, or that prepare and unpack what such operators move."""

KNOWN_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "quantized", "quantized_decomposed", "mkldnn", "onednn", "roamc"}
)
"""Namespaces in which an operator without tags draws no random numbers and gives the same bits again.

In other namespaces, such as those of ``torch.library.custom_op``, this is unknown.
"""

SYNCHRONOUS = frozenset(finished._schema.name for finished in (*FINISHED.values(), *PRODUCTS_SENT))
"""The collectives of roamc whose results are there when they return; of torch's, the table says so."""


def rule(target: Target) -> OpRule:
    """Return what is known of ``target``: an overload, a composite, ``getitem``, a higher-order operator or a function.

    Of a function, a higher-order operator, or the name of an input or constant, the rule says that it may draw, keeps
    its place and must not run again.
    """
    cached = RULES.get(id(target))
    if cached is not None:
        return cached[1]
    if isinstance(target, str):  # each graph has strings of its own: one rule for all, or each would stay in the table
        return OF_NAMES
    if isinstance(target, Composite):
        own: OpRule = target.rule
        return own
    return RULES.setdefault(id(target), (target, _single_rule(target)))[1]


RULES: dict[int, tuple[Target, OpRule]] = {}
"""Identity of each target that was asked for, and is no composite, to the target and its rule.

A dict of targets would be slow: planning asks some 100,000 times, and torch hashes an overload by its name."""


OF_NAMES = OpRule(unknown=True, ordered=True, recomputable=False, cost=UNKNOWN_COST)
"""The rule of a target that names an input or a constant."""


def _single_rule(target: Target) -> OpRule:
    if target is operator.getitem:
        return OpRule(view_of=(0,), cost=Cost(VIEW))
    if isinstance(target, OpOverload):
        return _from_schema(target)
    if target is replay:  # leaves the generator as it finds it
        return OpRule(recomputable=False)
    if target is save_rng_state:
        return OpRule(random=True, recomputable=False, cost=Cost("pointwise"))
    cost = COSTS.get(stem(target), UNKNOWN_COST)
    return OpRule(unknown=True, ordered=True, recomputable=False, cost=cost)


def _from_schema(target: OpOverload) -> OpRule:
    schema = target._schema
    row = ROWS.get(f"{schema.name}.{schema.overload_name or 'default'}", ROWS.get(schema.name, Row()))
    mutates: list[int | str] = []
    views: list[int] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        if argument.alias_info.is_write:
            mutates.append(argument.name if argument.kwarg_only else position)
        elif not argument.kwarg_only:
            views.append(position)
    collective = target.namespace in COLLECTIVE_NAMESPACES
    random = torch.Tag.nondeterministic_seeded in target.tags if row.random is None else row.random
    unknown = not (random or collective or views or target.namespace in KNOWN_NAMESPACES)
    exact = not (random or unknown or collective or mutates)
    view_of = tuple(views) if row.view_of is None else row.view_of
    strides = _strides(target) if row.strides is None else row.strides
    return OpRule(
        view_of=view_of,
        mutates=tuple(mutates),
        random=random,
        unknown=unknown,
        collective=collective,
        asynchronous=collective and schema.name not in SYNCHRONOUS if row.asynchronous is None else row.asynchronous,
        ordered=not (schema.returns or mutates),  # there is no other reason to call it
        recomputable=exact if row.recomputable is None else (exact and row.recomputable),
        overwrites=() if mutates or view_of else _pointwise(target) if row.overwrites is None else row.overwrites,
        strides=strides,
        rowwise=_rowwise(target, row, strides) if exact and not view_of else _rowwise_in_place(target),
        cost=_cost(target, is_view=bool(view_of) and not mutates),
        **{fact.name: getattr(row, fact.name) for fact in fields(Facts)} | _as_value(target),
    )


def _as_value(target: OpOverload) -> dict[str, tuple[int, ...]]:
    """The facts that an operator in place shares with its form that makes a new value."""
    value = value_form(target)
    return {} if value is None else {"saves": rule(value).saves}


def _pointwise(target: OpOverload) -> tuple[int, ...]:
    """The positions of all tensor arguments of a pointwise operator; none for other operators."""
    if not is_pointwise(target):
        return ()
    arguments = enumerate(target._schema.arguments)
    return tuple(at for at, argument in arguments if str(argument.type) == "Tensor" and not argument.kwarg_only)


def _strides(target: OpOverload) -> Strides:
    """Return OPERANDS for an operator that torch tags as pointwise and that writes no argument, else AS_NOTED."""
    written = any(argument.alias_info is not None for argument in target._schema.arguments)
    return Strides.OPERANDS if is_pointwise(target) and not written else Strides.AS_NOTED


def _rowwise(target: OpOverload, row: Row, strides: Strides) -> Rowwise | None:
    """Return what the row says; else that each element is treated apart, of operators of ATen that torch tags so.

    Operators that need less of an argument than its elements are left out, so that it may be kept in a smaller form.
    """
    if row.rowwise is not None or row.compares is not None or target.namespace != "aten":
        return row.rowwise
    apart = is_pointwise(target) or strides is not Strides.AS_NOTED
    return Rowwise() if apart else None


def _rowwise_in_place(target: OpOverload) -> Rowwise | None:
    value = value_form(target)
    return None if value is None else rule(value).rowwise


def _cost(target: OpOverload, *, is_view: bool) -> Cost:
    """Return the row of ``COSTS`` for ``target``, or an empty one.

    Its kind is that of views if ``is_view``; a row without a kind gets the one that torch's tags say.
    """
    cost = COSTS.get(stem(target), Cost())
    if is_view:
        return replace(cost, kind=VIEW)
    return cost if cost.kind else replace(cost, kind=_tagged_kind(target))


def _tagged_kind(target: OpOverload) -> str:
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "random"
    if is_pointwise(target):
        return "pointwise"
    reduction = getattr(torch.Tag, "reduction", None)  # a tag since torch 2.12
    return "reduction" if reduction is not None and reduction in target.tags else UNKNOWN


def draws(target: Target, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call of ``target`` with ``args`` and ``kwargs`` draws random numbers.

    A call of a random operator does, unless its argument ``dropout_p`` is 0.
    """
    return rule(target).random and argument_of(target, args, kwargs, "dropout_p") != 0


def may_overwrite(node: fx.Node, storages_of: StoragesOf) -> tuple[int, ...]:
    """Return the positions of the arguments that ``node`` may write its result over, if both have the same geometry.

    There are none for complex results: compilers multiply and divide them in another order where an argument is written
    over. An argument is left out if the operator also reads its storage through an argument that it may not write over,
    as in ``addmm(x, x, x)``. The caller has to check that what ``node`` reads of that storage has one geometry; in
    ``mul(x, x.t())`` it has not. ``storages_of`` says of an argument's node which storages it lies in.
    """
    allowed = rule(node.target).overwrites
    result = node.meta.get("val")
    if not allowed or (isinstance(result, torch.Tensor) and result.is_complex()):
        return ()
    return tuple(position for position in allowed if not reads_elsewhere(node, position, storages_of, besides=allowed))


def reads_elsewhere(node: fx.Node, position: int, storages_of: StoragesOf, besides: Collection[int] = ()) -> bool:
    """Whether ``node`` reads the storage of its argument at ``position`` through an argument not listed in ``besides``.

    Tensors in lists and keyword arguments count. ``storages_of`` says of a node which storages it lies in.
    """
    other_values = [value for at, value in enumerate(node.args) if at != position and at not in besides]
    others: list[fx.Node] = []
    fx.map_arg((other_values, node.kwargs), others.append)
    argument = node.args[position] if position < len(node.args) else None
    if not others or not isinstance(argument, fx.Node):
        return False
    return not set(storages_of(argument)).isdisjoint(storage for other in others for storage in storages_of(other))


def is_view(target: Target) -> bool:
    """Whether a call of ``target`` only makes views, or picks one result of several: it is no step of an order."""
    views = VIEWS.get(id(target))
    if views is None:
        op_rule = rule(target)
        views = bool(op_rule.view_of) and not op_rule.mutates
        if id(target) in RULES:
            VIEWS[id(target)] = views
    return views


VIEWS: dict[int, bool] = {}
"""Identity of each target in :data:`RULES` that was asked for to whether a call of it only makes views."""


def misread(node: fx.Node) -> list[tuple[fx.Node, torch.memory_format]]:
    """Return the arguments of ``node`` that its kernel would read wrongly, each with the memory format that it takes.

    See :attr:`roamc.operators.table.Facts.dense`; a copy of the argument in that format has the strides that fit.
    """
    op_rule = rule(node.target)
    if not op_rule.dense and not op_rule.unit_stride:
        return []
    first = None if op_rule.format_of is None else _tensor_at(node, op_rule.format_of)
    form = torch.contiguous_format if first is None else suggested_format(first)
    wrong = [at for at in op_rule.dense if not _lies_in(_tensor_at(node, at), form)]
    wrong += [at for at in op_rule.unit_stride if _strided(_tensor_at(node, at))]
    return [(node.args[at], form) for at in wrong]  # type: ignore[misc]


def _strided(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor has a last dimension of several elements that do not lie side by side."""
    return tensor is not None and tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1


def _lies_in(tensor: torch.Tensor | None, form: torch.memory_format) -> bool:
    """Whether ``tensor`` is there and contiguous in ``form``, which counts as contiguous for other than images."""
    if tensor is None:
        return True
    of_images = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(form, tensor.dim())
    return tensor.is_contiguous(memory_format=form if tensor.dim() == of_images else torch.contiguous_format)


def _tensor_at(node: fx.Node, position: int) -> torch.Tensor | None:
    """The fake tensor of a positional argument, if it has one."""
    argument = node.args[position] if position < len(node.args) else None
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


class Need(enum.Enum):
    """What an operator needs of an argument, or what of a value an encoding keeps.

    Attributes:
        ELEMENTS: every element, exactly.
        SIGN: of every element, whether it is above zero.
        SHAPE: the shape alone.
    """

    ELEMENTS = "elements"
    SIGN = "sign"
    SHAPE = "shape"


def needs(target: Target, args: Sequence[object]) -> Mapping[int, Need]:
    """Return what a call of ``target`` needs of its tensors where it does not need their elements.

    Args:
        target: what is called.
        args: its positional arguments.

    Returns:
        Position of an argument to what the call needs of it: SHAPE or SIGN. Of tensors elsewhere it needs the elements.
    """
    op_rule = rule(target)
    if not op_rule.shape_of and op_rule.compares is None:
        return {}
    needed = dict.fromkeys(op_rule.shape_of, Need.SHAPE)
    if op_rule.compares is not None:
        tensor, number = op_rule.compares
        against = args[number] if number < len(args) else None
        if isinstance(against, int | float) and against == 0:
            needed[tensor] = Need.SIGN
    return needed


def has_effect(target: Target) -> bool:
    """Whether ``target`` changes anything beside its results."""
    op_rule = rule(target)
    return bool(op_rule.mutates) or op_rule.may_draw or op_rule.collective or op_rule.ordered


def must_run(target: Target) -> bool:
    """Whether a call of ``target`` stays even if nobody reads its results.

    It stays if it has an effect, or if it waits for the end of an asynchronous operator.
    """
    return has_effect(target) or rule(target).finishes is not None


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of ``node`` whose storage it writes, in schema order; lists of tensors are flattened.

    In-place reuse, which is no property of the operator, is left out.
    """
    written: list[fx.Node] = []
    mutates = rule(node.target).mutates
    if not mutates:  # most operators: planning asks some 100,000 times
        return written
    schema = getattr(node.target, "_schema", None)
    for where in mutates:
        if isinstance(where, str):
            value = node.kwargs.get(where)
        elif where < len(node.args):
            value = node.args[where]
        else:
            value = node.kwargs.get(schema.arguments[where].name) if schema is not None else None
        fx.node.map_arg(value, written.append)
    return written
