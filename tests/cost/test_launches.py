"""Operators of ours that launch several kernels of torch: their number and bytes, as seen while they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roamc import cost
from roamc.compat import FakeTensorMode, trace
from roamc.compat_operators import tensors_in
from roamc.graph import operators
from roamc.graph.storage_ids import number
from roamc.operators import activations, norm_inputs, ops
from roamc.operators.activations import activation_input, table_of
from roamc.operators.norm_inputs import norm_input
from roamc.operators.projection import projection, quantiles, write_projection
from tests.operator_calls import node_of_call

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Launched(TorchDispatchMode):
    """Counts operators that are no views, and the bytes of their arguments and results; of a table what is read."""

    def __init__(self, tables: list[Tensor]) -> None:
        super().__init__()
        self.count = self.nbytes = 0
        self.tables = {table.data_ptr() for table in tables}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = out = func(*args, **(kwargs or {}))
        if ops.is_view(func) or "empty" in func.name():
            return result
        if "index_copy" in func.name():  # which writes what it copies alone
            args, out = (args[3],), args[3]
        read = [tensor for tensor in tensors_in(args) if tensor.data_ptr() not in self.tables]
        gathers = len(read) < len(list(tensors_in(args)))
        self.count += 1
        written = 2 if gathers else 1
        copies = func.name() == "aten::copy_"  # reads nothing of what it writes
        self.nbytes += sum(each.nbytes for each in read[copies:]) + written * out.nbytes
        return result


def counted(operator: Any, args: tuple[Any, ...], tables: list[Tensor]) -> tuple[int, int]:
    with Launched(tables) as launched:
        operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)
    return launched.count, launched.nbytes


def priced(operator: Any, args: tuple[Any, ...]) -> tuple[int, int]:
    call: Any = node_of_call(operator, (args, {}))
    launches = ops.rule(operator).cost.launches
    assert launches is not None
    count, nbytes = launches(call, call.meta["val"])
    return count, nbytes


def agrees(seen: tuple[int, int], said: tuple[int, int]) -> None:
    """Elements that lie apart count with what lies between them; numbers for each row or column do not count."""
    assert seen[0] == said[0]
    assert 0.98 * seen[1] <= said[1] <= 1.1 * seen[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40, 1000, 1001])
def test_inputs_of_activations(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(activations.PIECES, "cpu", 50)
    args = torch.randn(size).to(dtype), torch.zeros(-(-size // 8), dtype=torch.uint8), "gelu"
    table = table_of("gelu", dtype, torch.device("cpu"))
    agrees(counted(activation_input, args, [table]), priced(activation_input, args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["layer", "unbiased", "rms"])
def test_inputs_of_norms(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(norm_inputs.PIECES, "cpu", 30_000)
    rows, columns = 350, 300
    mean, rstd = torch.randn(rows, 1), torch.rand(rows, 1) + 1
    weight, bias = torch.rand(columns).to(dtype) + 1, torch.randn(columns).to(dtype)
    kept, lost = torch.randn(rows, 2).to(dtype), torch.tensor([3, 7])
    args = kept, torch.randn(rows, columns).to(dtype), mean if kind != "rms" else None, rstd, weight
    args = *args, bias if kind == "layer" else None, lost
    agrees(counted(norm_input, args, []), priced(norm_input, args))


@pytest.mark.parametrize("n", [256, 1024])
def test_projections(n: int) -> None:
    numbers = 1.0, 0, 0, n, 256, "gaussian"
    with Launched([quantiles(torch.device("cpu"))]) as launched:
        write_projection(*numbers, out=torch.empty(n, 256))
    call: Any = node_of_call(projection, (numbers, {"dtype": torch.float32, "device": torch.device("cpu")}))
    count = ops.rule(projection).cost.launches
    assert count is not None
    agrees((launched.count, launched.nbytes), count(call, call.meta["val"]))


def test_a_gpu_waits_for_every_launch() -> None:
    profile = cost.load_profile(torch.device("cuda"), "h100")
    with FakeTensorMode() as mode, torch.device("cuda"):
        examples = [torch.empty(1 << 20), torch.empty(1 << 17, dtype=torch.uint8)]
    graph = trace(lambda y, right: activation_input(y, right, "gelu"), examples, mode).graph
    number(graph)
    (call,) = operators(graph)
    assert cost.seconds(call, profile) > 8 * 14 * profile.overhead
