"""On a GPU: kernels have the bits of the operators they stand for, for zeros, tiny numbers, NaNs and huge tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from roamc.operators.gpu import kept
from roamc.operators.kernels import KERNELS
from tests.codec_cases import CASES, Call
from tests.codegen.test_kernel_judge import group_of, on_gpu
from tests.operators.test_kernels import LEAVES_AS_IT_IS, results, same_bits

aten = torch.ops.aten
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("error:the Triton kernel"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

SPECIAL = (0.0, 1.0, 2.5, 3.0, 1 / 3, 1e-40, 1.2e-38, 3e-20, 6e-8, 6.5e4, 3.3e38, float("inf"), float("nan"))
"""Zero, plain numbers, some whose quotients round, some without leading digits in a dtype or another, and none."""

EXACT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "neg": lambda x, y: x.neg(),
    "abs": lambda x, y: x.abs(),
    "relu": lambda x, y: x.relu(),
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "by a number": lambda x, y: x / 3,
    "by a number between floats": lambda x, y: x / 0.0316227766,
    "by a tiny number": lambda x, y: x / 1e-41,
    "a number": lambda x, y: x * 0.1 + 1e-40,
    "reciprocal": lambda x, y: x.reciprocal(),
    "sqrt": lambda x, y: x.sqrt(),
    "square": lambda x, y: x.pow(2),
    "inverse": lambda x, y: x.pow(-1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda x, y: x.clamp(-0.5, 2),
    "clamp min": lambda x, y: x.clamp_min(0.3),
    "threshold backward": lambda x, y: aten.threshold_backward(x, y, 0),
    "where": lambda x, y: torch.where(x > y, x, y),
    "equal": lambda x, y: torch.where(x == 0.1, y, x),
    "fill": lambda x, y: x.masked_fill(y > 0.3, 0.3),
    "float": lambda x, y: x.float() + y,
    "bfloat16": lambda x, y: x.to(torch.bfloat16).float(),
    "dropout backward": lambda x, y: aten.native_dropout_backward(x, y > 0, 1 / 0.9),
    "logical": lambda x, y: torch.where(torch.logical_not(x) | (y != 0), x, y),
    "chain": lambda x, y: (x * y + x).neg() / y,
    "copies": lambda x, y: torch.cat([x, y], -1),
}
CLOSE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "gelu": lambda x, y: torch.nn.functional.gelu(x),
    "gelu tanh": lambda x, y: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu backward": lambda x, y: aten.gelu_backward(x, y),
    "silu": lambda x, y: torch.nn.functional.silu(x) * y,
    "silu backward": lambda x, y: aten.silu_backward(x, y),
    "tanh": lambda x, y: x.tanh(),
    "sigmoid": lambda x, y: x.sigmoid() * y,
    "exp": lambda x, y: x.exp().log(),
    "rsqrt": lambda x, y: (x.abs() + 1).rsqrt(),
    "softmax": lambda x, y: torch.softmax(x * y, -1),
    "log softmax": lambda x, y: torch.log_softmax(x.float(), -1),
    "norm": lambda x, y: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "rows": lambda x, y: x - (x * y).mean(-1, keepdim=True),
    "sum over rows": lambda x, y: ((z := x * y), z.sum([0])),
    "amax": lambda x, y: x - x.amax(-1, keepdim=True),
    "lerp": lambda x, y: x.float().lerp(y.float(), 0.1),
    "addcmul": lambda x, y: torch.addcmul(x.float(), y.float(), y.float(), value=0.3),
    "addcdiv": lambda x, y: torch.addcdiv(x.float(), y.float(), y.float().abs() + 1, value=0.3),
}


@pytest.fixture(autouse=True)
def a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(kept, "measured_folder", lambda: tmp_path)
    kept.forget()


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every special number with every other, of both signs."""
    numbers = torch.tensor([*SPECIAL, *(-number for number in SPECIAL)]).to(dtype).cuda()
    return tuple(x.contiguous() for x in torch.meshgrid(numbers, numbers, indexing="ij"))  # type: ignore[return-value]


def run(function: Callable[..., Any], operands: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], bool]:
    """What the kernel of ``function`` writes, what its operators give, and whether both must have the same bits."""
    group = group_of(function, *(on_gpu(tuple(x.shape), x.dtype, tuple(x.stride())) for x in operands))
    read = len([node for node in group.body.nodes if node.op == "placeholder"])
    out = group.allocated()
    group._run(*operands[:read], out=out)  # and no comparison, in which zeros of both signs are equal
    return [*results(out)], [*group.run_members(operands[:read])], group.exact


def bits(x: Tensor) -> Tensor:
    """The bits of numbers; those of all NaNs count as equal."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    return torch.where(x.isnan(), torch.full_like(x, 7), x).view(whole) if x.is_floating_point() else x


def many(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random numbers of all sizes."""
    torch.manual_seed(0)
    numbers = (torch.randn(300, 1000, device="cuda") * 10 ** torch.empty(300, 1, device="cuda").uniform_(-9, 4),)
    return tuple(x.to(dtype) for x in (*numbers, torch.randn(300, 1000, device="cuda")))  # type: ignore[return-value]


@pytest.mark.parametrize("operands_of", [pairs, many])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_kernels_have_all_bits(dtype: torch.dtype, operands_of: Callable[[torch.dtype], Any]) -> None:
    """Signs of zero and numbers without a leading digit included: earlier versions of Triton lose these."""
    wrong, operands = [], operands_of(dtype)
    for name, function in EXACT.items():
        outs, wanted, exact = run(function, operands)
        assert exact, name
        for out, want in zip(outs, wanted, strict=True):
            off = bits(out) != bits(want)
            if bool(off.any()):
                x, y = (each[off][0].item() for each in operands) if off.shape == operands[0].shape else (0, 0)
                wrong.append(f"{name}({x}, {y}) is {out[off][0].item()}, not {want[off][0].item()}; {int(off.sum())}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("shape", [(64, 64), (70, 1000), (3, 20000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_kernels_are_close(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    operands = [torch.randn(shape, device="cuda").to(dtype) for _ in range(2)]
    rtol = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    wrong = []
    for name, function in CLOSE.items():
        if name == "sum over rows" and shape[1] > 8192:
            continue  # the widest sums over rows
        outs, wanted, _ = run(function, operands)
        for out, want in zip(outs, wanted, strict=True):
            scale = max(1.0, float(want.float().abs().max()))
            error = float((out.float() - want.float()).abs().max()) / scale
            if not error <= rtol:
                wrong.append(f"{name} errs by {error:.2g}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("sizes", [(1024, 512, 1021), (1024, 1021, 512), (1021, 1024, 512), (1, 7, 3)], ids=str)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)], ids=str)
def test_products_by_aligned_copies_are_as_good_as_torchs(
    sizes: tuple[int, int, int], turned: tuple[bool, bool]
) -> None:
    rows, depth, columns = sizes
    first = torch.randn((depth, rows) if turned[0] else (rows, depth), device="cuda", dtype=torch.bfloat16)
    second = torch.randn((columns, depth) if turned[1] else (depth, columns), device="cuda", dtype=torch.bfloat16)
    first, second = first.t() if turned[0] else first, second.t() if turned[1] else second
    added, right = torch.randn(columns, device="cuda", dtype=torch.bfloat16), first.double() @ second.double()
    for ours, theirs, wanted in (
        (torch.ops.roamc.aligned_mm(first, second), first @ second, right),
        (torch.ops.roamc.aligned_addmm(added, first, second), torch.addmm(added, first, second), right + added),
    ):
        error, allowed = ((result - wanted).norm() for result in (ours.double(), theirs.double()))
        assert error <= 2 * allowed, "cuBLAS adds parts of a product in 16 bits where it splits the depth"


@pytest.mark.parametrize(
    ("shape", "function", "last"),
    [
        ((2**31 + 4096,), lambda x: (x * 2).relu() - 1, 5),
        ((2**19 + 1, 4096), lambda x: x * x.amax(-1, keepdim=True), 9),
    ],
    ids=["elements", "rows"],
)
def test_kernels_reach_elements_behind_the_range_of_32_bits(
    shape: tuple[int, ...], function: Callable[[Tensor], Tensor], last: int
) -> None:
    x = torch.ones(shape, dtype=torch.float16, device="cuda")
    x.view(-1)[-4096:] = 3
    group_of(function, on_gpu(shape, torch.float16))._run(x, out=x)
    assert x.view(-1)[[0, 2**31 - 1, -4097, -4096, -1]].tolist() == [1, 1, 1, last, last]


SERVED = [
    (overload, dtype)
    for overload, kernel in KERNELS.items()
    for dtype in CASES[overload][0]
    if "cuda" in kernel.devices and str(overload).startswith("aten") and overload not in LEAVES_AS_IT_IS
]


def moved(value: Any) -> Any:
    if isinstance(value, list):
        return [moved(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cuda", 0)
    if not isinstance(value, Tensor):
        return value
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).cuda()  # all that a view of it may read
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def run_both(overload: Any, arguments: Call) -> None:
    args, kwargs = moved(list(arguments[0])), {name: moved(value) for name, value in arguments[1].items()}
    torch.manual_seed(5)
    expected = results(overload(*args, **kwargs))
    state = torch.cuda.get_rng_state()
    outs = tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in expected)
    torch.manual_seed(5)
    KERNELS[overload].function(*args, **kwargs, out=outs if len(outs) > 1 else outs[0])
    assert torch.equal(torch.cuda.get_rng_state(), state), f"{overload}: the random state differs"
    for out, want in zip(outs, expected, strict=True):
        assert same_bits(out, want), f"{overload}{[x.shape for x in expected]}: {out}, not {want}"


@pytest.mark.parametrize(("overload", "dtype"), SERVED, ids=str)
def test_functions_in_the_place_of_operators_have_their_bits(overload: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for arguments in CASES[overload][1](dtype):
        run_both(overload, arguments)
