"""Kernels of random groups under Triton's interpreter, beside the operators themselves, and judged. Run as a program.

The interpreter has to be chosen before Triton is imported, so a test runs this in a process of its own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import argparse
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from triton.runtime import interpreter

from roamc.codegen.group_judge import check_group
from roamc.codegen.group_verdicts import GroupFault, Place
from roamc.codegen.kernel_judge import judge_kernel
from roamc.graph import placeholders
from roamc.operators import blocks, ops
from roamc.operators.activations import ACTIVATIONS
from roamc.operators.blocks import Matrix
from roamc.operators.gpu import multi_tensor
from roamc.operators.gpu.frame import frame_of
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.operators.gpu.kernel import BLOCK, LONGEST_ROW, KernelText, kernel_text, unfit
from roamc.operators.gpu.launch import jit_functions
from roamc.operators.gpu.launch_shapes import launched_in, shapes_of
from roamc.operators.gpu.lines import DoesNotPrintError
from roamc.operators.gpu.multi_tensor import MOST_TENSORS
from roamc.operators.gpu.printed import is_exact
from roamc.operators.gpu.results import first_of, made_by
from tests.operators.updates import groups_of, update_of

aten = torch.ops.aten
convert = interpreter._convert_float


def rounding(data: Any, input_dtype: tl.dtype, wanted: tl.dtype, mode: Any) -> Any:
    """Convert as GPUs do: the interpreter cuts off the bits of a float32 that bfloat16 lacks."""
    if (input_dtype, wanted) != (tl.float32, tl.bfloat16):
        return convert(data, input_dtype, wanted, mode)
    return torch.from_numpy(np.array(data)).bfloat16().view(torch.uint16).numpy()


interpreter._convert_float = rounding

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ERROR = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
"""Of values of about one, after a few operators: some roundings of the dtype."""

# Continuous functions: where a comparison jumps, another rounding of its operand would be another result.
Unary = Callable[[Tensor], Tensor]
UNARY: dict[str, Unary] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "reciprocal": lambda x: (x.abs() + 1).reciprocal(),
    "exp": lambda x: x.clamp(-3, 1).exp(),
    "exp2": lambda x: x.clamp_max(1).exp2(),
    "log": lambda x: (x.abs() + 1).log(),
    "log2": lambda x: (x.abs() + 1).log2(),
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "square": lambda x: x.clamp_min(-2).clamp_max(2).pow(2),
    "cube": lambda x: x.clamp(-1, 1).pow(3),
    "root": lambda x: (x.abs() + 1).pow(-0.5),
    "inverse square": lambda x: (x.abs() + 1).pow(-2),
    "by number": lambda x: x / 3,
    "number": lambda x: 0.3 * x + 1,
    "wider": lambda x: x.float(),
    "narrower": lambda x: x.to(torch.bfloat16),
    "fill": lambda x: x.masked_fill(x > 0.5, 0.5),
    "not": lambda x: torch.where(~(x > 0) | (x < -1), x, 0.5 * x),
    "both": lambda x: torch.where((x > -0.5) & (x <= 0.5), x, x.clamp(-0.5, 0.5)),
    "logical": lambda x: torch.where(torch.logical_not(x > 0), x, torch.where(x == 0, x, x * 0.5)),
}
Binary = Callable[[Tensor, Tensor], Tensor]
BINARY: dict[str, Binary] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 1),
    "alpha": lambda x, y: torch.add(x, y, alpha=0.3),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "greater": lambda x, y: torch.where(x > y, x, y),
    "silu backward": lambda x, y: aten.silu_backward(x.float(), y.float()),
    "gelu backward": lambda x, y: aten.gelu_backward(x.float(), y.float()),
    "tanh gelu backward": lambda x, y: aten.gelu_backward(x.float(), y.float(), approximate="tanh"),
    "sigmoid backward": lambda x, y: aten.sigmoid_backward(x.float(), y.float()),
    "tanh backward": lambda x, y: aten.tanh_backward(x.float(), y.clamp(-1, 1).float()),
    "relu backward": lambda x, y: aten.threshold_backward(x.float() * y, y.float(), 0),
    "leaky backward": lambda x, y: aten.leaky_relu_backward(x.float() * y, y.float(), 0.1, False),
    "addcmul": lambda x, y: torch.addcmul(x.float(), y.float(), y.float()),
    "addcdiv": lambda x, y: torch.addcdiv(x.float(), y.float(), y.float().abs() + 1),
}
ROWS: dict[str, Unary] = {
    "sum": lambda x: x - x.sum(-1, keepdim=True) / x.shape[-1],
    "mean": lambda x: x * (x.float().pow(2).mean(-1, keepdim=True) + 1).rsqrt(),
    "amax": lambda x: x - x.amax(-1, keepdim=True),
    "amin": lambda x: x - x.amin(-1, keepdim=True),
    "softmax": lambda x: torch.softmax(x.float(), -1),
    "log softmax": lambda x: torch.log_softmax(x.float(), -1) / 8,
    "softmax backward": lambda x: (
        aten._softmax_backward_data(x.float(), x.float().sigmoid(), -1, torch.float32) / x.shape[-1]
    ),
    "log softmax backward": lambda x: (
        aten._log_softmax_backward_data(x.float(), -x.float().abs() - 3, -1, torch.float32) / x.shape[-1]
    ),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:], eps=0.1),
}


def over_rows(x: Tensor) -> list[int]:
    """All dimensions of a tensor but the last."""
    return list(range(x.dim() - 1))


def norm_backward(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Layer norm and its backward, whose results are all read, with parameters of their own."""
    sizes, wide, weight = x.shape[-1:], x.float(), weight.float()
    value, mean, rstd = aten.native_layer_norm(wide, sizes, weight, weight, 0.1)
    grad = wide.sigmoid() / x.numel() * x.shape[-1]
    return (
        mean,
        rstd,
        value,
        *aten.native_layer_norm_backward(grad, wide, sizes, mean, rstd, weight, weight, [True] * 3),
    )


SEVERAL: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "sum over rows": lambda x, weight: ((x / x.numel() * x.shape[-1]).sum(over_rows(x)),),
    "sums over rows": lambda x, weight: (
        y := x.abs(),
        (y / x.numel() * x.shape[-1]).sum(over_rows(x), keepdim=True),
        (x.relu() / x.numel() * x.shape[-1]).sum(over_rows(x)),
    ),
    "layer norm and backward": norm_backward,
}


def inputs(rng: random.Random, dtype: torch.dtype, shape: Sequence[int]) -> list[Tensor]:
    """Tensors of ``shape``, or that broadcast to it; some transposed, some with every second element."""
    operands = []
    for _ in range(rng.randint(1, 4)):
        sizes = [size if rng.random() < 0.8 else 1 for size in shape] if operands else list(shape)
        kind = rng.choice(("plain", "plain", "transposed", "strided", "row"))
        if kind == "transposed" and len(sizes) > 1:
            operands.append(torch.randn(*sizes[:-2], sizes[-1], sizes[-2]).to(dtype).transpose(-1, -2))
        elif kind == "strided":
            operands.append(torch.randn(*sizes[:-1], 2 * sizes[-1]).to(dtype)[..., ::2])
        elif kind == "row" and operands:
            operands.append(torch.randn(sizes[-1]).to(dtype))
        else:
            operands.append(torch.randn(sizes).to(dtype))
    return operands


def group(rng: random.Random, count: int, *, along_rows: bool) -> Callable[..., tuple[Tensor, ...]]:
    """A function of ``count`` steps, each on earlier values, that returns the last and now and then others."""
    steps = [
        (rng.choice([*UNARY] * 2 + [*BINARY] * 2 + ([*ROWS] * 3 if along_rows else [])), rng.random(), rng.random())
        for _ in range(count)
    ]

    more = [at for at in range(count - 1) if rng.random() < 0.15]
    added = along_rows and rng.random() < 0.4

    def run(*operands: Tensor) -> tuple[Tensor, ...]:
        value, others = operands[0], list(operands)
        for name, one, _ in steps:
            if name in BINARY:
                value = BINARY[name](value, others[int(one * len(others))])
            else:
                value = (UNARY.get(name) or ROWS[name])(value)
            others.append(value)
        read = [*(others[len(operands) + at] for at in more), value]
        share = value.shape[-1] / value.numel() if added and value.dim() else 1.0
        return *read, *([(value * share).sum(over_rows(value))] if added and value.dim() > 1 else [])

    return run


def same_on_cpu(node: fx.Node) -> bool:
    """Whether the interpreter has the bits of ATen on a CPU, which divides by numbers, and takes roots of its own."""
    if node.target is aten.div.Tensor and not isinstance(node.args[1], fx.Node):
        return False
    return is_exact(node) and node.target is not aten.sqrt.default and node.args[1:] != (0.5,)


def same(out: Tensor, want: Tensor) -> Tensor:
    """Where elements are equal, NaNs among them; zeros may differ in sign."""
    return (out == want) | ((out != out) & (want != want))


def compare(function: Callable[..., Tensor], operands: Sequence[Tensor]) -> tuple[str, KernelText | None]:
    """Say how the kernel of ``function`` differs from it; "" if it does not. None for a group that does not fit."""
    body = make_fx(function, tracing_mode="fake")(*operands).graph
    body.eliminate_dead_code()
    members = [node for node in body.nodes if node.op == "call_function" and not ops.is_view(node.target)]
    read = [node for node in body.nodes if node in blocks.results_of(body) and blocks.value_of(node) is node]
    results = [node for node in read if made_by(node)[0] in members]
    body.output_node().args = (tuple(results),)
    last = members[-1] if members else None
    frame = frame_of(last) if last in {made_by(node)[0] for node in results} else None
    if frame is None or any(unfit(node, frame, set(members)) for node in members):
        return "", None
    try:
        text = kernel_text("kernel", body, frame)
    except DoesNotPrintError:  # an element for each row in a kernel without rows, or elements that share memory
        return "", None
    try:
        judge_kernel(body, text, [Place(at) for at, _ in enumerate(operands)], [Place(node) for node in results])
    except GroupFault as fault:
        return f"the judge of kernels refuses: {fault}\n{text.source}", text
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN fails for some strides of gelu's backward
        wanted = fx.Interpreter(fx.GraphModule({}, body)).run(*operands)
    fakes = [blocks.only_tensor(node) for node in results]
    outs = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype) for one in fakes]
    for out in outs:
        out.fill_(float("nan") if out.is_floating_point() else 1)
    used = [node for node in body.nodes if node.op == "placeholder"]
    jit_functions(text)(operands[: len(used)], outs)
    dtypes = [first_of(node).dtype for node in (*members, *used)]
    narrowest = max(ERROR.get(dtype, 0.0) for dtype in dtypes)
    said = [
        difference(out, want, narrowest * (1 + len(members) / 4), members)
        for out, want in zip(outs, wanted, strict=True)
    ]
    said.append(in_other_shapes(body, text, frame, operands[: len(used)], outs))
    return "".join(f"{one}:\n{text.source}" for one in said if one), text


def in_other_shapes(
    body: fx.Graph, text: KernelText, frame: Matrix, operands: Sequence[Tensor], outs: Sequence[Tensor]
) -> str:
    """Say in which shape of its launch a kernel has other bits than ``outs``, or is refused; "" for none."""
    first, *others = shapes_of(text, frame)
    for shape in others:
        if shape.block == first.block:
            continue  # the interpreter has no warps
        launched = launched_in(text, frame, shape)
        places = [Place(at) for at, _ in enumerate(placeholders(body))]
        judge_kernel(body, launched, places, [Place(node) for node in blocks.results_of(body)])
        launch_outs = [torch.full_like(out, 1) for out in outs]
        jit_functions(launched)(operands, launch_outs)
        if not all(same(out, want).all() for out, want in zip(launch_outs, outs, strict=True)):
            return f"it has other bits in {shape}"
    return ""


def difference(out: Tensor, want: Tensor, most: float, members: Sequence[fx.Node]) -> str:
    """Say how a result differs from what the operators give; "" if by no more than ``most``, or in no bit if exact."""
    if all(map(same_on_cpu, members)) and not same(out, want).all():
        return "an exact kernel has other bits"
    errors = (out.double() - want.double()).abs() / (1 + want.double().abs())
    error = torch.where(same(out, want), 0, errors.nan_to_num(torch.inf)).max().item()
    return "" if error <= most else f"errs by {error:.2g}"


def loss(scale: Tensor, scores: Tensor, labels: Tensor, total: Tensor, *weight: Tensor) -> Tensor:
    """Backward of cross-entropy on log-probabilities."""
    grad = aten.nll_loss_backward(scale, scores, labels, weight[0] if weight else None, 1, -100, total)
    return aten._log_softmax_backward_data(grad, scores, 1, torch.float32)


def losses() -> list[str]:
    """Say which backwards of cross-entropy differ: few and many classes, with weights and without."""
    wrong = []
    for classes in (50, LONGEST_ROW + 1):
        for weighted in (False, True):
            scores = torch.randn(6, classes).log_softmax(-1)
            operands = [torch.tensor(2.0), scores, torch.tensor([1, 2, -100, 4, 0, 49]), torch.tensor(5.0)]
            said, text = compare(loss, [*operands, torch.rand(classes)] if weighted else operands)
            wrong += [f"{classes} classes: {said or 'does not print'}"] if said or text is None else []
        for keepdim in (False, True):
            said, text = compare(partial(picked, keepdim), [torch.randn(6, classes), operands[2]])
            wrong += [f"scores of {classes} classes: {said or 'does not print'}"] if said or text is None else []
    return wrong


def picked(keepdim: bool, logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each row's label."""
    return torch.ops.roamc.label_scores(logits.log_softmax(-1), labels, [1], keepdim, -100)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.Adam, weight_decay=0.1, amsgrad=True, betas=(0.3, 0.99)),
    "Nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
}


def updates() -> list[str]:
    """Say which updates of parameters of all kinds of shapes differ from their operators."""
    wrong = []
    shapes = ((7, 33), (1,), (257,), (4, 3, 3, 3), (16, 2, 64))
    for name, optimizer in OPTIMIZERS.items():
        for dtype in DTYPES:
            for shape in shapes:
                group = update_of(optimizer, torch.rand(shape).to(dtype))
                wrong += [f"{name}, {dtype}, {shape}: {said}" for said in written(group)]
    return wrong


SHARED = ([(1,), (1,)], [(7,), (BLOCK,), (3, 5, 7), (2 * BLOCK,), (1,)])
"""Shapes of the tensors of one kernel: of one element, odd, and multiples of a block."""


def shared_updates() -> list[str]:
    """Say which updates of several tensors in one kernel differ from their operators: of 2, 5 and 32 tensors."""
    kernels = [(name, dtype, shapes) for name in OPTIMIZERS for dtype in DTYPES for shapes in SHARED]
    kernels.append(("AdamW", torch.bfloat16, [(3,)] * (MOST_TENSORS - 1) + [(BLOCK + 1,)]))
    wrong = []
    for name, dtype, shapes in kernels:
        kernel, _ = multi_tensor.join(groups_of(OPTIMIZERS[name], shapes, dtype))
        wrong += [f"{name}, {dtype}, {len(shapes)} tensors: {said}" for said in written(kernel)]
    return wrong


def written(group: FusedKernel) -> list[str]:
    """Say which operand that a group writes has other elements than its operators give."""
    expected = [node.meta["val"] for node in placeholders(group.body)]
    operands = [(torch.rand(one.shape) + 0.1).to(one.dtype) if isinstance(one, Tensor) else one for one in expected]
    places = [Place(at) for at, _ in enumerate(operands)]
    check_group(group, 1, places)
    wanted = [result.clone() for result in group.run_members(operands)]
    jit_functions(group.text)(operands, ())
    most = ERROR[wanted[0].dtype] * 2
    said = [difference(operands[at], want, most, group.nodes) for at, want in zip(group.writes, wanted, strict=True)]
    return [f"{one}\n{group.text.source}" for one in said if one]


SPECIAL = torch.tensor([[torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1e-40], [1.0, -2.0, 3.0, -4.0, 0.1, 0.3]])
WHOLE = torch.tensor([2**53 + 1, -5, 0, 2**24 + 1, -(2**31)])
TENTHS = torch.tensor([0.1, 0.3, -0.1, 3.7]).bfloat16()
BITS = torch.tensor([[True, False, True], [True, True, False]])
CORNERS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "the largest of NaNs": (lambda x: (x * 1).amax(-1), [SPECIAL]),
    "the smallest of NaNs": (lambda x: (x * 1).amin(-1), [SPECIAL]),
    "the largest of NaNs in a long row": (lambda x: (x * 1).amax(-1), [SPECIAL.repeat(1, 3000)]),
    "relu of NaNs": (lambda x: torch.relu(x * 1), [SPECIAL]),
    "bounds for each element": (
        lambda x, low, high: torch.clamp(x * 1, low, high),
        [SPECIAL, SPECIAL - 1, SPECIAL + 1],
    ),
    "an upper bound": (lambda x, high: torch.clamp(x * 1, None, high), [SPECIAL, SPECIAL.flip(1)]),
    "softmax of infinities": (lambda x: torch.softmax(x * 1, -1), [SPECIAL]),
    "relu of large integers": (lambda x: torch.relu(x + 0), [WHOLE]),
    "a large integer fills": (lambda x: (x + 0).masked_fill(x < 0, 2**53 + 1), [WHOLE]),
    "a comparison with a large integer": (lambda x: (x + 0) < 2**53 + 1, [WHOLE]),
    "equal to a number that 16 bits do not hold": (lambda x: (x * 1) == 0.1, [TENTHS]),
    "at most a number that 16 bits do not hold": (lambda x: (x * 1) <= 0.1, [TENTHS]),
    "a sum of booleans": (lambda x, y: (x + y).logical_not(), [BITS, BITS.flip(1)]),
    "a slope by default": (lambda x: F.leaky_relu(x * 1), [SPECIAL]),
    "one column": (lambda x: torch.softmax(x * 2, -1) + x.sum(-1, keepdim=True), [torch.randn(5, 1)]),
    "one element": (lambda x, y: (x * 2) + y, [torch.randn(1, 1), torch.randn(())]),
    "no dimension": (lambda x, y: (x * 2) + y, [torch.randn(()), torch.randn(())]),
    "layer norm of long rows": (
        lambda x, w: aten.native_layer_norm(x * 2, x.shape[-1:], w, None, 1e-5),
        [torch.randn(3, LONGEST_ROW + 3), torch.randn(LONGEST_ROW + 3)],
    ),
    "programs that add up several blocks of rows": (
        lambda x: (x * 0.1).sum([0]),
        [torch.randn(1029, 1000)],
    ),
    "sums over one row": (lambda x: ((y := x * 2), y.sum([0])), [torch.randn(1, 33)]),
    "sums over rows of one element": (lambda x: ((y := x * 2), y.sum([0, 1])), [torch.randn(5, 3, 1)]),
    "sums over rows of NaNs": (lambda x: ((y := x * 1), y.sum([0])), [SPECIAL]),
    "windows that overlap": (lambda x, y: (x * 2) + y, [torch.randn(20).as_strided((4, 8), (2, 1)), torch.randn(8)]),
    "expanded along rows": (lambda x: (x * 2).sum(-1), [torch.randn(4, 1).expand(4, 8)]),
    "four dependent sums of long rows": (
        lambda x: torch.softmax(x - x.mean(-1, keepdim=True), -1) * x.abs().amax(-1, keepdim=True),
        [torch.randn(2, LONGEST_ROW + 3)],
    ),
}
"""Functions and operands for which a kernel is wrong where it takes numbers, NaNs or shapes for the usual ones."""


def drops(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """A mask that follows from a seed, and a dropout by it."""
    mask = torch.ops.roamc.counter_mask(seed, list(x.shape), list(x.stride()), 0.75)
    return mask, aten.native_dropout_backward(x, mask, 1 / 0.75)


def of_dropped(run: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """A function of what is dropped, which also returns the mask."""

    def function(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        mask, dropped = drops(x, seed)
        return mask, run(dropped)

    return function


def dropouts() -> list[str]:
    """Say which kernels with a mask differ from the operators, whose masks are equal in every bit."""
    seeds = [[7, 0], [(1 << 62) + 12345, (1 << 32) - 3], [-1, -2]]  # the counter passes from one word to the next
    cases: dict[str, tuple[Callable[..., Any], Tensor]] = {
        "alone": (drops, torch.randn(5, 33)),
        "in 16 bits": (drops, torch.randn(3, 2, 40).bfloat16()),
        "along rows": (of_dropped(lambda x: x.softmax(-1)), torch.randn(6, 24)),
        "in pieces": (of_dropped(lambda x: x.softmax(-1)), torch.randn(2, LONGEST_ROW + 6)),
        "over rows": (of_dropped(lambda x: x.sum(0)), torch.randn(70, 24)),
        "moved": (of_dropped(lambda x: torch.cat([x[..., 5:], x[..., :5]], -1)), torch.randn(6, 13)),
        "strided": (drops, torch.randn(6, 8).t()),
    }
    compared = {
        f"dropout {name}, seed {seed}": compare(function, [x, torch.tensor(seed)])
        for name, (function, x) in cases.items()
        for seed in seeds
    }
    return [f"{name}: {said or 'does not print'}" for name, (said, text) in compared.items() if said or text is None]


def decodes() -> list[str]:
    """Say which kernels that make inputs of activations differ from the operators, whose bits they have."""
    decode = torch.ops.roamc.activation_input

    def alone(name: str) -> Callable[..., Tensor]:
        return lambda y, right, grad: decode(y, right, name)

    def slope(y: Tensor, right: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        gradient = aten.gelu_backward(grad, decode(y, right, "gelu"))
        return gradient, (gradient / grad.numel() * grad.shape[-1]).sum(over_rows(grad))

    def gated(y: Tensor, right: Tensor, grad: Tensor) -> Tensor:
        x = decode(y, right, "silu")
        return aten.silu_backward(grad, x).softmax(-1) * x

    special = torch.tensor([math.nan, math.inf, 60_000.0, 30.0, -0.0, 0.0, -1e-7, -0.16997, -0.27846, 1e-3, 2.0, 3.0])
    cases: dict[str, tuple[Callable[..., Any], Tensor]] = {
        **{name: (alone(name), torch.randn(6, 44).clamp_min(-0.16)) for name in ACTIVATIONS},
        "special": (alone("gelu"), special.repeat(4, 2)),
        "one byte": (alone("gelu"), special[4:].clone()),
        "many programs": (alone("silu"), torch.randn(16, BLOCK + 8).clamp_min(-0.16)),
        "slope and sum": (slope, torch.randn(2, 32, 24).clamp_min(-0.16)),
        "along rows": (gated, torch.randn(6, 24).clamp_min(-0.16)),
        "in pieces": (gated, torch.randn(2, LONGEST_ROW + 4).clamp_min(-0.16)),
    }
    wrong = []
    for name, (function, values) in cases.items():
        for dtype in DTYPES:
            y, right = values.to(dtype), torch.randint(0, 256, (values.numel() // 8,), dtype=torch.uint8)
            said, text = compare(function, [y, right, torch.randn(y.shape).to(dtype)])
            wrong += [f"decode {name} in {dtype}: {said or 'does not print'}"] if said or text is None else []
    for y in (torch.randn(5, 3), torch.randn(8, 4).t()):
        text = compare(alone("gelu"), [y, torch.zeros(-(-y.numel() // 8), dtype=torch.uint8), y])[1]
        wrong += [] if text is None else ["bits that do not fill bytes, or lie in another order, print"]
    return wrong


def corners() -> list[str]:
    """Say which cases of CORNERS differ, or do not print."""
    compared = {name: compare(function, operands) for name, (function, operands) in CORNERS.items()}
    return [f"{name}: {said or 'does not print'}" for name, (said, text) in compared.items() if said or text is None]


def random_case(rng: random.Random, name: str | None) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A group, or the operator ``name`` alone, and operands for it."""
    sizes = [rng.choice((1, 2, 3, 5, 8, 16)) for _ in range(rng.randint(0, 3))] + [rng.choice((1, 7, 33, 64, 257))]
    if rng.random() < 0.05:
        sizes = [2, LONGEST_ROW + rng.choice((1, 64))]
    operands = inputs(rng, rng.choice(DTYPES), sizes)
    if name is None:
        return group(rng, rng.randint(2, 12), along_rows=rng.random() < 0.6), operands
    if name in SEVERAL:
        return SEVERAL[name], [operands[0], torch.randn(sizes[-1]).to(operands[0].dtype)]
    function = FORMS[name]
    return (lambda *x: function(*(x * 2)[:2]) if name in BINARY else function(x[0])), operands


def main() -> None:
    """Compare random groups, or every operator alone, ``--count`` of each; the exit status says whether all agree."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--forms", action="store_true", help="every operator alone, in the place of groups")
    parser.add_argument("--only", nargs="*", help="names of forms, in the place of all")
    how = parser.parse_args()
    rng = random.Random(how.seed)
    torch.manual_seed(how.seed)
    wrong = losses() + corners() + updates() + dropouts() + decodes() if how.forms and not how.only else []
    wrong += shared_updates() if how.forms and not how.seed else []
    for name in (how.only or FORMS) if how.forms else [None]:
        seen = tried = 0
        while seen < how.count and tried < 10 * how.count:
            function, operands = random_case(rng, name)
            said, text = compare(function, operands)
            tried, seen = tried + 1, seen + (text is not None)
            wrong += [f"{name}, {[(tuple(t.shape), t.stride(), t.dtype) for t in operands]}: {said}"] if said else []
        wrong += [f"{name}: only {seen} of {tried} print"] if seen < how.count else []
    print(f"{len(wrong)} wrong\n" + "\n\n".join(wrong[:3]))
    raise SystemExit(bool(wrong))


FORMS: dict[str, Callable[..., Any]] = {**UNARY, **BINARY, **ROWS, **SEVERAL}

if __name__ == "__main__":
    main()
