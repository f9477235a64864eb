"""Kernels compiled ahead of time for GPUs that are not here. Run as a program, in a process without the interpreter.

Prints one line for each kernel and target: registers, bytes of shared memory, bytes spilled.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from roamc.operators import blocks
from roamc.operators.gpu import multi_tensor
from roamc.operators.gpu.ahead import TARGETS, compile_for, sources_of, taken_of
from roamc.operators.gpu.frame import frame_of
from roamc.operators.gpu.kernel import KernelText, kernel_text
from roamc.operators.gpu.launch_shapes import launched_in, shapes_of
from roamc.operators.gpu.multi_tensor import MOST_TENSORS
from tests.operators.updates import groups_of, update_of

aten = torch.ops.aten


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def normed(x: Tensor, more: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    total = x + more
    return total, *aten.native_layer_norm(total, x.shape[-1:], weight, bias, 1e-5)


def norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, more: Tensor
) -> tuple[Tensor, ...]:
    inner, *sums = aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, rstd, weight, weight, [True] * 3)
    total = inner + more
    return total, *sums, total.sum([0, 1])


def gates(grad: Tensor, up: Tensor, gate: Tensor) -> Tensor:
    return aten.silu_backward(grad * up, gate)


def loss(scale: Tensor, scores: Tensor, labels: Tensor, total: Tensor) -> Tensor:
    grad = aten.nll_loss_backward(scale, scores, labels, None, 1, -100, total)
    return aten._log_softmax_backward_data(grad, scores, 1, torch.float32).bfloat16()


def rotary(x: Tensor, first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of heads whose columns are ``first`` and ``second``; and back, stored token by token."""
    turned = x * cos + torch.cat([-second, first], -1) * sin
    product, sizes = turned * sin, list(turned.shape)
    right = aten.slice_backward(-product[..., :32], sizes, 3, 32, 64, 1)
    back = right + aten.slice_backward(product[..., 32:], sizes, 3, 0, 32, 1) + turned * cos
    return back.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def dropped(grad: Tensor, mask: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(aten.native_dropout_backward(grad, mask, 1.25), x, approximate="tanh")


def decoded(grad: Tensor, y: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Backward of a GELU whose input is made again from its output, and the gradient of the bias in front of it."""
    inner = aten.gelu_backward(grad, torch.ops.roamc.activation_input(y, right, "gelu"))
    return inner, inner.sum([0])


def masked(x: Tensor, seed: Tensor, more: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """The end of a layer: a dropout by a mask that follows from a seed, the residual sum and its norm."""
    mask = torch.ops.roamc.counter_mask(seed, list(x.shape), list(x.stride()), 0.9)
    return normed(aten.native_dropout_backward(x, mask, 1 / 0.9), more, weight, bias)


def group(name: str) -> tuple[torch.fx.Graph, KernelText]:
    """A group by name at the sizes of a language model of a billion parameters, and its kernel."""
    half = torch.bfloat16
    if name == "update":
        optimizer = functools.partial(torch.optim.Adam, weight_decay=0.1, amsgrad=True)
        update = update_of(optimizer, torch.empty(2048, dtype=half))
        return update.body, update.text
    if name == "updates":
        several, _ = multi_tensor.join(groups_of(torch.optim.AdamW, [(4096,)] * MOST_TENSORS, half))
        return several.body, several.text
    with torch.device("meta"):
        functions = {
            "norm": (norm, (torch.empty(4, 2048, 2048, dtype=half), torch.empty(2048, dtype=half))),
            "gates": (gates, tuple(torch.empty(8192, 8192, dtype=half) for _ in range(3))),
            "loss": (
                loss,
                (torch.empty(()), torch.empty(8192, 50257), torch.empty(8192, dtype=torch.int64), torch.empty(())),
            ),
            "softmax": (lambda x: F.softmax(x.float(), -1).to(half), (torch.empty(4, 32, 512, 2048, dtype=half),)),
            "rotary": (
                rotary,
                (
                    *(torch.empty(4, 2048, 32, size, dtype=half).transpose(1, 2) for size in (64, 32, 32)),
                    *(torch.empty(2048, 64, dtype=half) for _ in range(2)),
                ),
            ),
            "normed": (
                normed,
                (*(torch.empty(4, 2048, 4096, dtype=half) for _ in range(2)), *(torch.empty(4096) for _ in range(2))),
            ),
            "masked": (
                masked,
                (
                    torch.empty(4, 1024, 768, dtype=half),
                    torch.empty(2, dtype=torch.int64),
                    torch.empty(4, 1024, 768, dtype=half),
                    *(torch.empty(768, dtype=half) for _ in range(2)),
                ),
            ),
            "norm backward": (
                norm_backward,
                (
                    *(torch.empty(4, 2048, 4096, dtype=half) for _ in range(2)),
                    *(torch.empty(4, 2048, 1) for _ in range(2)),
                    torch.empty(4096, dtype=half),
                    torch.empty(4, 2048, 4096, dtype=half),
                ),
            ),
            "dropped": (
                dropped,
                (
                    torch.empty(8192, 3072, dtype=half),
                    torch.empty(8192, 3072, dtype=torch.bool),
                    torch.empty(8192, 3072, dtype=half),
                ),
            ),
        }
        for name_of, dtype in (("decoded", half), ("decoded in 32 bits", torch.float32)):
            wide = [torch.empty(8192, 3072, dtype=dtype) for _ in range(2)]
            functions[name_of] = decoded, (*wide, torch.empty(8192 * 3072 // 8, dtype=torch.uint8))
        function, operands = functions[name]
        body = make_fx(function, tracing_mode="fake")(*operands).graph
    frame = frame_of(blocks.last_member(body))
    assert frame is not None, f"{name} has no frame"
    return body, kernel_text(f"fused_{name.replace(' ', '_')}", body, frame)


NAMES = (
    *("norm", "gates", "loss", "softmax", "rotary", "dropped", "masked", "update", "updates", "normed"),
    *("norm backward", "decoded", "decoded in 32 bits"),
)


ALONE = ("gates", "rotary", "dropped", "update")
"""Groups whose elements are each computed alone."""


def float_instructions(ptx: str) -> set[str]:
    """The names of all instructions of a kernel that compute with floats: the same names, the same bits.

    An instruction on two elements of 16 bits, such as ``max.NaN.bf16x2``, counts as that on one.
    """
    names = re.findall(r"^\s*(?:@%p\d+ )?([a-z][\w.]*)\s", ptx.replace("16x2", "16"), re.MULTILINE)
    return {name for name in names if re.search(r"\.b?f(16|32)", name) and not name.startswith(("ld.", "st.", "mov."))}


def in_all_shapes() -> int:
    """Compile groups in all shapes of their launches; return how many spill, or compute otherwise than as printed."""
    wrong = 0
    for name, target in itertools.product(ALONE, ("sm_80", "sm_90")):
        body, text = group(name)
        frame = frame_of(blocks.last_member(body))
        assert frame is not None, f"{name} has no frame"
        computed: list[set[str]] = []
        for shape in shapes_of(text, frame):
            (source,) = sources_of(body, launched_in(text, frame, shape))
            compiled = compile_for(target, source)
            registers, lost = taken_of(compiled, target)
            computed.append(float_instructions(compiled.asm["ptx"]))
            wrong += lost > 0 or computed[-1] != computed[0]
            print(f"{name} {target} {shape}: {registers} registers, {lost} spilled, {sorted(computed[-1])}")
        wrong += len(computed) < 2
    return wrong


def in_printed_shapes() -> int:
    """Compile every group for every target; return how many spill."""
    wrong = 0
    for name in NAMES:
        body, text = group(name)
        for source, target in itertools.product(sources_of(body, text), TARGETS):
            compiled = compile_for(target, source)
            registers, lost = taken_of(compiled, target)
            wrong += lost > 0
            taken = f"{registers} registers, {compiled.metadata.shared} bytes shared, {lost} spilled"
            print(f"{source.name} {target}: {taken}")
    return wrong


def main() -> None:
    """Compile groups, with ``--shapes`` in all shapes of their launches; the exit status says whether all is well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", action="store_true", help="in all shapes of their launches")
    raise SystemExit(bool(in_all_shapes() if parser.parse_args().shapes else in_printed_shapes()))


if __name__ == "__main__":
    main()
