"""CUDA's autocast on a machine without one: the casts of torch's own kernels, of fake tensors on a GPU."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from roamc import compat, compat_autocast
from roamc.capture.device_mode import DeviceMode
from roamc.compat_operators import tensors_in
from roamc.operators.schemas import name_of

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
LISTS = {
    "LOWER_PRECISION_FP": compat_autocast.NARROW,
    "FP32": compat_autocast.FLOAT32,
    "FP32_SET_OPT_DTYPE": compat_autocast.FLOAT32_RESULT,
    "PROMOTE": compat_autocast.WIDEST,
}


@pytest.mark.parametrize("policy", LISTS)
def test_lists_are_those_of_torchs_header(policy: str) -> None:
    macro = re.search(rf"#define AT_FORALL_{policy}\(_\)((?:.*\\\n)+.*)", HEADER.read_text())
    assert macro is not None
    assert set(re.findall(r"_\((\w+)", macro[1])) <= LISTS[policy]  # an older torch has fewer


def test_every_operator_of_cudas_autocast_is_on_a_list_or_banned() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.removeprefix("aten::").partition(".")[0] for name in registered if name.startswith("aten::")}
    assert {name for name in names if compat_autocast.casting_of(name) is None} == {
        "binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose",
    }  # fmt: skip


FUNCTIONS = {
    "torch_fp16": torch, "torch_fp32": torch, "torch_need_autocast_promote": torch, "nn_fp16": torch._C._nn,
    "nn_fp32": torch._C._nn, "linalg_fp16": torch._C._linalg, "torch_expect_builtin_promote": torch,
}  # fmt: skip
"""Lists of calls that torch tests its autocast with, and where their functions are."""


def calls(kind: str, device: str) -> list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Name, function and arguments of every call of a list, with tensors on ``device``."""
    cases = []
    for name, args, *rest in getattr(AutocastTestLists(device), kind):
        if isinstance(args, str):  # of einsum
            args = ("ab,bc->ac", *rest[0])
        named = rest[0] if rest and isinstance(rest[0], dict) else {}
        if not any(part in name for part in ("cudnn", "equal", "_cell")):  # a GPU's cells are kernels of its own
            cases.append((name, getattr(FUNCTIONS[kind], name), _in_bfloat16(args), named))
    return cases


def _in_bfloat16(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with bfloat16 in the place of float16, of which a GPU has a softmax that casts its operand itself."""
    leaves, nest = compat.flatten(args)
    halves = (isinstance(leaf, Tensor) and leaf.dtype is torch.float16 for leaf in leaves)
    cast = [leaf.bfloat16() if half else leaf for leaf, half in zip(leaves, halves, strict=True)]
    return tuple(compat.unflatten(cast, nest))


def traced(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], mode: Any) -> list[Any]:
    """Name, operands and result of every operator that a call becomes under ``torch.autocast("cuda")``."""
    leaves, nest = compat.flatten((args, named))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*tensors: Tensor) -> Any:
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        positional, keywords = compat.unflatten(leaves, nest)
        with torch.autocast("cuda", torch.bfloat16):
            return function(*positional, **keywords)

    nodes = compat.trace(run, [leaves[place] for place in places], mode).graph.nodes
    return [
        (name_of(node.target), *(t.dtype for n in (*node.all_input_nodes, node) for t in tensors_in(n.meta.get("val"))))
        for node in nodes
        if node.op == "call_function"
    ]


@pytest.mark.filterwarnings("ignore:.*(chain_matmul is deprecated|cross without specifying)")
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_every_call_is_cast_as_torch_casts_it_on_a_gpu(kind: str) -> None:
    gpu, cpu = DeviceMode(), compat.CaptureMode()
    with gpu:
        there = calls(kind, "cuda")
    with cpu:
        here = calls(kind, "cpu")
    for (name, *by_torch), (_, *ours) in zip(there, here, strict=True):
        with compat_autocast.enabled_for_cuda(), torch.no_grad():
            expected = traced(*by_torch, gpu)
        with compat_autocast.on_cuda(), torch.no_grad():
            assert traced(*ours, cpu) == expected, name


def test_threads_that_trace_at_once_leave_torch_as_it_was() -> None:
    def functions() -> list[object]:
        return [torch.autocast.__init__, torch.is_autocast_enabled, torch.clear_autocast_cache]

    before, entered, left = functions(), threading.Event(), threading.Event()

    def trace() -> None:
        with compat_autocast.on_cuda():
            entered.set()
            left.wait()

    other = threading.Thread(target=trace)
    with compat_autocast.on_cuda():
        other.start()
        entered.wait(0.2)
    left.set()
    other.join()
    assert functions() == before
