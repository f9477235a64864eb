"""The chapter of the operator table on kernels: how an operator prints in Triton.

A value of 16 bits is held in float32 and rounded after every operator, as ATen's kernels do that run one after the
other. ``exact`` operators are one operation of IEEE 754, or none that rounds: their bits are those of ATen's kernels on
every device. The others, and all sums, may differ in last bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from roamc.compat import OpOverload
from roamc.operators.activations import ACTIVATIONS, FIRST, SHIFT, Table
from roamc.operators.counter import limit_of
from roamc.operators.gpu.lines import DoesNotPrintError
from roamc.operators.gpu.results import sums_over_rows
from roamc.operators.gpu.shifts import parts_of
from roamc.operators.schemas import argument_of, stem, value_form

if TYPE_CHECKING:
    from roamc.operators.gpu.lines import Lines, Value

Writer = Callable[["Lines", fx.Node, Sequence["Value"]], "Value | Sequence[Value | None]"]
"""Writes the lines of a call and returns its result before it is rounded, or several, None for one that is left out.

It gets the lines written so far, the node, and for each positional argument that is a tensor or a number its value.
"""


@dataclass(frozen=True)
class Printed:
    """How one operator prints.

    Attributes:
        write: the text of its result with ``{0}``, ``{1}`` for the positional arguments; or a function that writes it,
            for an operator that takes more than one line.
        exact: its bits are those of ATen's kernel on every device; or a function that says so of a call.
        common: what its operands are converted to: "result" for the dtype of the result; "operands" for the dtype that
            torch promotes the operands to; "each" for none.
        along: position of the argument that names the dimension along which it works, or its size: the last one, or all
            others for a sum over rows. None for an operator that works element by element.
        rounds_numbers: a number among its operands is rounded to their dtype first, even to 16 bits.
        integers: it also makes integers.
        booleans: it also makes booleans.
        keywords: names of arguments that it takes beside the positional ones; with any other it does not print.
        number_arguments: it also takes numbers that are known only when the kernel runs.
    """

    write: str | Writer
    exact: bool | Callable[[fx.Node], bool] = False
    common: str = "result"
    along: int | None = None
    keywords: tuple[str, ...] = ()
    rounds_numbers: bool = False
    integers: bool = False
    booleans: bool = False
    number_arguments: bool = False


# -- operators of several lines -----------------------------------------------------------------------------------


def _sum(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    return lines.total_down(values[0]) if sums_over_rows(node) else lines.total(values[0])


def _mean(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    return lines.let(f"{{0}} / {float(lines.columns)}", lines.total(values[0]))


def _largest(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    return lines.let("{0} + {1}", lines.largest(values[0]), _nans(lines, values[0]))


def _nans(lines: Lines, value: Value) -> Value:
    """NaN for the rows that have one, else zero: the largest of a row in Triton passes over them."""
    return lines.total(lines.let("tl.where({0} != {0}, {0}, 0.0)", value))


def _smallest(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    least = lines.let("-{0}", lines.largest(lines.let("-{0}", values[0])))
    return lines.let("{0} + {1}", least, _nans(lines, values[0]))


def _layer_norm(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Sequence[Value | None]:
    """The mean of a row first, then the mean of the squared distances from it."""
    x, _, weight, bias, eps = values
    mean = _mean(lines, node, [x])
    shifted = lines.let("{0} - {1}", x, mean)
    variance = _mean(lines, node, [lines.let("{0} * {0}", shifted)])
    rstd = lines.let("tl.rsqrt({0} + {1})", variance, eps)
    normed = _scaled_by(lines, lines.let("{0} * {1}", shifted, rstd), node.args[2], weight)
    return normed if node.args[3] is None else lines.let("{0} + {1}", normed, bias), mean, rstd


def _layer_norm_backward(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Sequence[Value | None]:
    grad, x, _, mean, rstd, weight = values[:6]
    normed = lines.let("({0} - {1}) * {2}", x, mean, rstd)
    scaled = _scaled_by(lines, grad, node.args[5], weight)
    along = _mean(lines, node, [lines.let("{0} * {1}", scaled, normed)])
    text = "({0} - {1} - {2} * {3}) * {4}"
    inputs = lines.let(text, scaled, _mean(lines, node, [scaled]), normed, along, rstd)
    output_mask: Sequence[bool] = node.args[7]  # type: ignore[assignment]
    weights = lines.total_down(lines.let("{0} * {1}", grad, normed)) if output_mask[1] else None
    return inputs if output_mask[0] else None, weights, lines.total_down(grad) if output_mask[2] else None


def _rms_norm(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Sequence[Value | None]:
    if node.args[3] is None:
        raise DoesNotPrintError(f"{node.name} leaves eps to its kernel")
    x, _, weight, eps = values
    rstd = lines.let("tl.rsqrt({0} + {1})", _mean(lines, node, [lines.let("{0} * {0}", x)]), eps)
    return _scaled_by(lines, lines.let("{0} * {1}", x, rstd), node.args[2], weight), rstd


def _rms_norm_backward(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Sequence[Value | None]:
    grad, x, _, rstd, weight = values[:5]
    normed = lines.let("{0} * {1}", x, rstd)
    scaled = _scaled_by(lines, grad, node.args[4], weight)
    along = _mean(lines, node, [lines.let("{0} * {1}", scaled, normed)])
    inputs = lines.let("({0} - {1} * {2}) * {3}", scaled, normed, along, rstd)
    output_mask: Sequence[bool] = node.args[5]  # type: ignore[assignment]
    weights = lines.total_down(lines.let("{0} * {1}", grad, normed)) if output_mask[1] else None
    return inputs if output_mask[0] else None, weights


def _scaled_by(lines: Lines, value: Value, argument: object, weight: Value) -> Value:
    """``value`` times ``weight``, unless the argument is left out."""
    return value if argument is None else lines.let("{0} * {1}", value, weight)


def _softmax(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    powers = lines.let("tl.exp({0} - {1})", values[0], lines.largest(values[0]))
    return lines.let("{0} / {1}", powers, lines.total(powers))


def _log_softmax(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    shifted = lines.let("{0} - {1}", values[0], lines.largest(values[0]))
    total = lines.total(lines.let("tl.exp({0})", shifted))
    return lines.let("{0} - tl.log({1})", shifted, total)


def _softmax_backward(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    product = lines.let("{0} * {1}", values[0], values[1])
    return lines.let("{0} - {1} * {2}", product, values[1], lines.total(product))


def _log_softmax_backward(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    return lines.let("{0} - tl.exp({1}) * {2}", values[0], values[1], lines.total(values[0]))


def _nll_loss_backward(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    """The gradient of a negative log-likelihood: minus the weight of the label's class, and zero elsewhere."""
    weight, reduction, ignored = node.args[3], node.args[4], node.args[5]
    grad, target = values[0], values[2]
    scale = lines.let("{0} / {1}", grad, values[6]) if reduction == 1 else grad
    if weight is not None:
        chosen = lines.let(f"tl.where({{0}} == {ignored}, 0, {{0}})", target)
        scale = lines.let("{0} * {1}", scale, lines.pick(weight, chosen))  # type: ignore[arg-type]
    return lines.let(f"tl.where((column == {{0}}) & ({{0}} != {ignored}), -{{1}}, 0.0)", target, scale)


def _label_scores(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    """The score of each row's label: the sum of a row in which all others are zero."""
    ignored = node.args[4]
    return lines.total(lines.let(f"tl.where((column == {{1}}) & ({{1}} != {ignored}), {{0}}, 0.0)", *values[:2]))


def _gelu(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    if argument_of(node.target, node.args, node.kwargs, "approximate") == "tanh":
        inner = lines.let(_GELU_INNER, values[0])
        return lines.let("0.5 * {0} * (1.0 + {1})", values[0], lines.let(_TANH, inner))
    return lines.let(f"{{0}} * 0.5 * (1.0 + tl.erf({{0}} * {_ROOT_HALF}))", values[0])


def _gelu_backward(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    grad, x = values[0], values[1]
    if argument_of(node.target, node.args, node.kwargs, "approximate") == "tanh":
        inner = lines.let(_GELU_INNER, x)
        tanh = lines.let(_TANH, inner)
        slope = lines.let(f"{_TWO_OVER_PI} * (1.0 + 3.0 * 0.044715 * {{0}} * {{0}})", x)
        return lines.let("{0} * (0.5 * (1.0 + {1}) + 0.5 * {2} * (1.0 - {1} * {1}) * {3})", grad, tanh, x, slope)
    below = lines.let(f"0.5 * (1.0 + tl.erf({{0}} * {_ROOT_HALF}))", x)
    density = lines.let(f"tl.exp(-0.5 * {{0}} * {{0}}) * {_ROOT_HALF_OVER_PI}", x)
    return lines.let("{0} * ({1} + {2} * {3})", grad, below, x, density)


def _clamp(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    result = values[0]
    for at, text in enumerate((_LARGER, _SMALLER), start=1):
        if at < len(node.args) and node.args[at] is not None:
            result = lines.let(text, result, values[at])
    return result


def _convert(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    return values[0]


def _add(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    return _scaled(lines, "+", node, values)


def _sub(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    return _scaled(lines, "-", node, values)


def _scaled(lines: Lines, sign: str, node: fx.Node, values: Sequence[Value]) -> Value:
    sign = "|" if node.meta["val"].dtype is torch.bool else sign  # one bit would wrap around
    second = values[1] if _unscaled(node) else _times(lines, node, "alpha", values[1])
    return lines.let(f"{{0}} {sign} {{1}}", values[0], second)


def _times(lines: Lines, node: fx.Node, name: str, value: Value) -> Value:
    """The value times a number that ``node`` takes by keyword."""
    scale = node.kwargs.get(name, 1)
    if isinstance(scale, fx.Node):
        return lines.let("{0} * {1}", lines.argument(scale), value)
    return lines.let(f"{lines.number(scale)} * {{0}}", value)


def _negative(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    """Triton 3.6 takes ``-x`` for ``0 - x``, which has another sign where ``x`` is 0."""
    return lines.let("{0} * -1.0" if node.meta["val"].is_floating_point() else "-{0}", values[0])


def _with_product(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    """ATen's kernels contract the last product and the sum."""
    product = lines.let("{0} * {1}", values[1], values[2])
    scaled = product if node.kwargs.get("value", 1) == 1 else _times(lines, node, "value", product)
    return lines.let("{0} + {1}", values[0], scaled)


def _with_quotient(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    """ATen's kernels contract the product of number and quotient, and the sum."""
    quotient = lines.let("tl.div_rn({0}, {1})", values[1], values[2])
    scaled = quotient if node.kwargs.get("value", 1) == 1 else _times(lines, node, "value", quotient)
    return lines.let("{0} + {1}", values[0], scaled)


def _lerp(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    """ATen's kernels take the nearer end first, and contract product and sum."""
    start, end, weight = values
    apart = lines.let("{0} - {1}", end, start)
    if weight.number is None or abs(weight.number) < 0.5:
        near = lines.let("{0} + {1} * {2}", start, weight, apart)
    if weight.number is None or not abs(weight.number) < 0.5:
        far = lines.let("{0} - {1} * (1.0 - {2})", end, apart, weight)
    if weight.number is not None:
        return near if abs(weight.number) < 0.5 else far
    return lines.let("tl.where(tl.abs({0}) < 0.5, {1}, {2})", weight, near, far)


def _unscaled(node: fx.Node) -> bool:
    return bool(node.kwargs.get("alpha", 1) == 1)


def _divide(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    """ATen's kernel multiplies by the reciprocal of a number, computed in float64 (since torch 2.11)."""
    divisor: Any = node.args[1]
    if values[1].argument:
        inverse = lines.let(f"tl.cast(1.0 / {lines.pointers[divisor]}, tl.float32)")
        return lines.let("{0} * {1}", values[0], inverse)
    if isinstance(divisor, fx.Node):
        return lines.let("tl.div_rn({0}, {1})", *values)
    with np.errstate(divide="ignore", over="ignore"):
        factor = float(np.float32(1 / np.float64(divisor)))
    return lines.let(f"{{0}} * {lines.number(factor)}", values[0])


def _side_by_side(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    """Each column from the operand that has it, and 0 beside all operands."""
    parts = parts_of(node)
    end = parts[-1].begin + parts[-1].width
    columns = [*values, lines.constant(0, node.meta["val"].dtype)]
    begins = [*(part.begin for part in parts), end if end < node.meta["val"].shape[-1] else sys.maxsize]
    result = columns.pop()
    for value, begin in zip(reversed(columns), reversed(begins[1:]), strict=True):
        result = _left_of(lines, begin, value, result)
    return _left_of(lines, begins[0], lines.constant(0, node.meta["val"].dtype), result)


def _left_of(lines: Lines, begin: int, left: Value, right: Value) -> Value:
    """The value ``left`` in front of column ``begin`` of the member that is being written, else ``right``."""
    lane = begin - lines.shift
    if 0 < lane < lines.columns:
        return lines.let(f"tl.where(column < {lane}, {{0}}, {{1}})", left, right)
    return right if lane <= 0 else left


def _counter_mask(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    """Philox runs once for four elements that lie side by side: a compiler sees that they have equal arguments."""
    seed: fx.Node = node.args[0]  # type: ignore[assignment]
    key, first = (lines.let(f"tl.load({lines.pointers[seed]}{place})") for place in ("", " + 1"))
    element = lines.element()
    counter = lines.let("{0} + ({1} >> 2)", first, element)
    words = lines.let("tl.philox({0}, {1}.to(tl.int32), ({1} >> 32).to(tl.int32), 0, 0)", key, counter)
    odd, pair = "({1} & 1) != 0", "tl.where({odd}, {{0}}[{second}], {{0}}[{first}])"
    pairs = [pair.format(odd=odd, first=at, second=at + 1) for at in (0, 2)]
    word = lines.let(f"tl.where(({{1}} & 2) != 0, {pairs[1]}, {pairs[0]})", words, element)
    return lines.let(f"{{0}}.to(tl.int32) < {limit_of(node.args[3])}", word)  # type: ignore[arg-type]


def _activation_input(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    """The lines of :mod:`roamc.operators.activations`, each of which rounds as torch's operator there does."""
    (y, right), table = values[:2], Table(node.args[2], node.meta["val"].dtype)  # type: ignore[arg-type]
    nbytes = node.args[1].meta["val"].numel()  # type: ignore[union-attr]
    side = lines.let(f"({{0}}.to(tl.int32) >> ({{1}} // {nbytes}).to(tl.int32)) & 1", right, lines.element())
    if table.dtype is not torch.float32:
        bits = lines.let(_BITS[table.dtype], y)
        return lines.entry(table, "{0} + {1} * 65536", bits, side)
    activation, cells = ACTIVATIONS[table.function], table.on(torch.device("cpu")).numel() // 4
    cut = lines.let(_SMALLER.format("{0}", -activation.edge), y)
    r = lines.let(f"tl.div_rn({{0}} - {activation.lowest!r}, {{1}}) * -1.0", y, cut)
    cell = lines.let(f"tl.cast({{0}}, tl.int32, bitcast=True) >> {SHIFT}", r)
    line = lines.let(f"tl.minimum(tl.maximum({{0}} - {FIRST}, 0), {cells - 1}) + {{1}} * {cells}", cell, side)
    base, steepness = (lines.entry(table, f"{{0}} * 2{second}", line) for second in ("", " + 1"))
    return lines.let("{0} + {1} * {2}", base, r, steepness)


_BITS = {
    torch.bfloat16: "(tl.cast({0}, tl.int32, bitcast=True) >> 16) & 65535",
    torch.float16: "tl.cast({0}.to(tl.float16), tl.int16, bitcast=True).to(tl.int32) & 65535",
}
"""Dtype to the text of the bits of a number of it that is held in float32."""


def _where(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    chosen = [lines.cast(value, node.meta["val"].dtype) for value in values[1:]]
    return lines.let("tl.where({0}, {1}, {2})", values[0], *chosen)


def _masked_fill(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    return lines.let("tl.where({1}, {2}, {0})", values[0], values[1], lines.cast(values[2], node.meta["val"].dtype))


def _rounds_once(node: fx.Node) -> bool:
    """Whether ATen rounds a power once: of 16 bits it rounds every product of three factors, or of a reciprocal."""
    return node.args[1] in (0.5, 1, 2, -1) or (node.args[1] in (3, -2) and node.meta["val"].dtype is torch.float32)


def _power(lines: Lines, node: fx.Node, values: Sequence[Value]) -> Value:
    if node.args[1] not in POWERS:
        raise DoesNotPrintError(f"{node.name} has another exponent than {', '.join(map(str, POWERS))}")
    return lines.let(POWERS[node.args[1]], values[0])  # type: ignore[index]


POWERS: Mapping[float, str] = {
    0.5: "tl.sqrt_rn({0})",
    1: "{0}",
    2: "{0} * {0}",
    3: "{0} * {0} * {0}",
    -0.5: "tl.rsqrt({0})",
    -1: "tl.div_rn(1.0, {0})",
    -2: "tl.div_rn(1.0, {0} * {0})",
}
"""Exponent to the text of a power; powers with other exponents do not print."""

_ROOT_HALF = math.sqrt(0.5)
_TWO_OVER_PI = math.sqrt(2 / math.pi)
_GELU_INNER = f"{_TWO_OVER_PI} * ({{0}} + 0.044715 * {{0}} * {{0}} * {{0}})"
_ROOT_HALF_OVER_PI = 1 / math.sqrt(2 * math.pi)
_SIGMOID = "(1.0 / (1.0 + tl.exp(-{0})))"
# Near zero the quotient would lose digits: two terms of the series are exact to float32 there.
_TANH = (
    "tl.where(tl.abs({0}) < 0.03125, {0} - {0} * {0} * {0} * (0.33333333 - 0.13333333 * {0} * {0}),"
    " 2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0)"
)
_LARGER = "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_SMALLER = "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"

# -- the chapter --------------------------------------------------------------------------------------------------

# Operands are on the device of the result, and the result lies as its fake value says.
_OF_COPIES = ("dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format")
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

PRINTED: dict[str, Printed] = {
    "_to_copy": Printed(_convert, exact=True, keywords=_OF_COPIES, integers=True, booleans=True),
    "add": Printed(_add, exact=_unscaled, keywords=("alpha",), integers=True, booleans=True, number_arguments=True),
    "sub": Printed(_sub, exact=_unscaled, keywords=("alpha",), integers=True, number_arguments=True),
    "mul": Printed("{0} * {1}", exact=True, integers=True, number_arguments=True),
    "div": Printed(_divide, exact=True, number_arguments=True),
    "neg": Printed(_negative, exact=True, integers=True),
    "abs": Printed("tl.abs({0})", exact=True),
    "reciprocal": Printed("tl.div_rn(1.0, {0})", exact=True),
    "sqrt": Printed("tl.sqrt_rn({0})", exact=True),
    "relu": Printed("tl.maximum({0}, 0, propagate_nan=tl.PropagateNan.ALL)", exact=True, integers=True),
    "maximum": Printed(_LARGER, exact=True),
    "minimum": Printed(_SMALLER, exact=True),
    "clamp": Printed(_clamp, exact=True),
    "clamp_min": Printed(_LARGER, exact=True),
    "clamp_max": Printed(_SMALLER, exact=True),
    "threshold_backward": Printed("tl.where({1} <= {2}, 0.0, {0})", exact=True, rounds_numbers=True),
    "where": Printed(_where, exact=True, common="each", integers=True, booleans=True),
    "masked_fill": Printed(_masked_fill, exact=True, common="each", integers=True, booleans=True),
    "native_dropout_backward": Printed("{0} * ({1}) * {2}", exact=True),
    "logical_not": Printed("{0} == 0", exact=True, common="each", booleans=True),
    "bitwise_not": Printed("~{0}", exact=True, integers=True, booleans=True),
    "bitwise_and": Printed("{0} & {1}", exact=True, integers=True, booleans=True),
    "bitwise_or": Printed("{0} | {1}", exact=True, integers=True, booleans=True),
    "logical_and": Printed("({0} != 0) & ({1} != 0)", exact=True, common="each", booleans=True),
    "logical_or": Printed("({0} != 0) | ({1} != 0)", exact=True, common="each", booleans=True),
    **{
        name: Printed(f"{{0}} {sign} {{1}}", exact=True, common="operands", rounds_numbers=True, booleans=True)
        for name, sign in _COMPARISONS.items()
    },
    "clone": Printed(_convert, exact=True, keywords=("memory_format",), integers=True, booleans=True),
    "roamc::padded_rows": Printed(_convert, exact=True, booleans=True, integers=True),
    "cat": Printed(_side_by_side, exact=True, integers=True, booleans=True),
    "slice_backward": Printed(_side_by_side, exact=True),
    "pow": Printed(_power, exact=_rounds_once),
    "exp": Printed("tl.exp({0})"),
    "exp2": Printed("tl.exp2({0})"),
    "log": Printed("tl.log({0})"),
    "log2": Printed("tl.log2({0})"),
    "rsqrt": Printed("tl.rsqrt({0})"),
    "sin": Printed("tl.sin({0})"),
    "cos": Printed("tl.cos({0})"),
    "erf": Printed("tl.erf({0})"),
    "tanh": Printed(_TANH),
    "sigmoid": Printed(_SIGMOID),
    "silu": Printed("{0} / (1.0 + tl.exp(-{0}))"),
    "gelu": Printed(_gelu, keywords=("approximate",)),
    "leaky_relu": Printed("tl.where({0} > 0, {0}, {0} * {1})"),
    "tanh_backward": Printed("{0} * (1.0 - {1} * {1})"),
    "sigmoid_backward": Printed("{0} * (1.0 - {1}) * {1}"),
    "silu_backward": Printed("{0} * %s * (1.0 + {1} * (1.0 - %s))" % ((_SIGMOID.replace("{0}", "{1}"),) * 2)),
    "gelu_backward": Printed(_gelu_backward, keywords=("approximate",)),
    "leaky_relu_backward": Printed("tl.where({1} > 0, {0}, {0} * {2})"),
    "addcmul": Printed(_with_product, keywords=("value",), number_arguments=True),
    "addcdiv": Printed(_with_quotient, keywords=("value",), number_arguments=True),
    "lerp": Printed(_lerp, number_arguments=True),
    "sum": Printed(_sum, along=1),
    "mean": Printed(_mean, along=1),
    "amax": Printed(_largest, along=1),
    "amin": Printed(_smallest, along=1),
    "native_layer_norm": Printed(_layer_norm, along=1),
    "native_layer_norm_backward": Printed(_layer_norm_backward, along=2),
    "_fused_rms_norm": Printed(_rms_norm, along=1),
    "_fused_rms_norm_backward": Printed(_rms_norm_backward, along=2),
    "_softmax": Printed(_softmax, along=1),
    "_log_softmax": Printed(_log_softmax, along=1),
    "_softmax_backward_data": Printed(_softmax_backward, along=2),
    "_log_softmax_backward_data": Printed(_log_softmax_backward, along=2),
    "nll_loss_backward": Printed(_nll_loss_backward, common="each"),
    "roamc::label_scores": Printed(_label_scores, along=2, common="each"),
    "roamc::counter_mask": Printed(_counter_mask, exact=True, common="each", booleans=True),
    "roamc::activation_input": Printed(_activation_input, exact=True, common="each"),
}
"""Name of an operator without its overload to how it prints. An overload has the row of its stem."""


def printed(target: Any) -> Printed | None:
    """Return the row of :data:`PRINTED` that says how a kernel prints ``target``; None if no kernel can print it.

    An operator in place, such as ``mul_``, has the row of the one that makes a new value, here ``mul``.
    """
    if not isinstance(target, OpOverload) or (target._schema.is_mutable and value_form(target) is None):
        return None
    return PRINTED.get(stem(target))


def is_exact(node: fx.Node) -> bool:
    """Whether ``node``, a call of an operator that prints, has the bits of ATen's kernel on every device."""
    printer = printed(node.target)
    if printer is None:
        return False
    return printer.exact if isinstance(printer.exact, bool) else printer.exact(node)
