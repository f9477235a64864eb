"""Groups of operators over blocks of rows: the bits of whole operators, and which operands and operators fit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from roamc.graph import operators, placeholders
from roamc.operators import blocks, ops
from roamc.operators.blocks import Matrix, matrix_of, steps_of
from roamc.operators.fused import Fused, fuse
from tests.graphs import traced

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks of small tensors."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 13)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Number of torch's threads while the test runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def group_of(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Fused, tuple[int, ...]]:
    """All operators of a function as one group; for each argument of the group, which input of the function it is."""
    graph = traced(function, *inputs).graph
    nodes = operators(graph)
    matrix = matrix_of(inputs[0].shape)
    assert matrix is not None
    for node in nodes:
        assert ops.is_view(node.target) or blocks.fits(node, matrix), node.name
    group, read = fuse(nodes[-1], nodes)
    return group, tuple(placeholders(graph).index(node) for node in read)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether every bit is equal, those of NaN as well."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


UNARY = """
    abs acos asin asinh atan ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor frac lgamma log log10 log1p
    log2 logit neg reciprocal relu round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc gelu silu mish softplus elu
    hardswish hardsigmoid hardtanh leaky_relu celu selu relu6 square isnan
""".split()  # noqa: SIM905 (a list of words)
BINARY = """
    add sub mul div maximum minimum pow atan2 fmod remainder hypot copysign eq ge lt ne logaddexp xlogy floor_divide
    fmax fmin nextafter
""".split()  # noqa: SIM905


def called(name: str) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    return function


SHAPES = ((300, 64), (97, 33), (40, 500), (7, 3, 70), (2, 1024), (640, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
@pytest.mark.usefixtures("threads")
def test_unary_operators_have_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(name))
    for shape in (*SHAPES, (4096, 64)):
        x = (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        check(lambda x: called(name)(x), (x,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.usefixtures("threads")
def test_binary_operators_have_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    """With operands of all elements, one for each row, one for each column, and one for all."""
    generator = torch.Generator().manual_seed(len(name))
    for shape in (*SHAPES, (4096, 64)):
        x, y = ((2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for _ in range(2))
        for other in (y, y[..., :1].contiguous(), y.flatten(0, -2)[0].contiguous(), y.flatten()[0].clone(), y[..., :1]):
            check(lambda x, y: called(name)(x, y), (x, other))


def check(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """A group of one operator gives what the operator gives."""
    graph = traced(function, *inputs)
    nodes = operators(graph.graph)
    matrix = matrix_of(inputs[0].shape)
    if len(nodes) != 1 or matrix is None or not blocks.fits(nodes[0], matrix):
        return  # operators that torch traces as several, or has no kernel for that dtype with out=
    group, _ = fuse(nodes[0], nodes)
    assert same_bits(group(*inputs), function(*inputs)), (tuple(inputs[0].shape), inputs[0].dtype)


def one_call(name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: called(name)(x)


def test_most_operators_are_tried() -> None:
    """The two tests above skip what does not fit; these are those that must fit in float32."""
    x = torch.rand(300, 64)
    nodes = {name: operators(traced(one_call(name), x).graph) for name in UNARY}
    fit = {name for name, calls in nodes.items() if len(calls) == 1 and blocks.fits(calls[0], Matrix(300, 64))}
    assert len(fit) >= 40
    assert {"gelu", "silu", "sigmoid", "exp", "relu", "rsqrt", "tanh"} <= fit


def rms_norm_backward(x: Tensor, grad: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    inner = grad * weight
    dot = (inner * x).sum(-1, keepdim=True)
    return inner * scale + (dot * scale.pow(3) * -0.5).expand(x.shape) / 64 * (x * 2.0)


def gate(x: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    return aten.silu_backward(grad * up, x)


def row_statistics(x: Tensor) -> Tensor:
    """The inner view has an element for each row and no last dimension."""
    return x - x.mean(-1).unsqueeze(-1) * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("columns", [64, 50, 257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("threads")
def test_groups_have_the_bits_of_their_members(dtype: torch.dtype, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, y, z = draw(6, 90, columns), draw(6, 90, columns), draw(6, 90, columns)
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (rms_norm_backward, (x, y, draw(columns), draw(6, 90, 1))),
        (gate, (x, y, z)),
        (row_statistics, (x,)),
        (lambda x, y: torch.log_softmax(x + y, 2), (x, y)),
        (lambda x, y: aten._softmax_backward_data(x * 2, y, -1, x.dtype), (x, torch.softmax(y, -1))),
        (lambda x, mask: torch.softmax(torch.where(mask, x * 0.3, x), -1), (x, y > 0)),
        (lambda x, y: (x > y).to(x.dtype) * y, (x, y)),
        (lambda x, y: (x.float() * y).to(x.dtype), (x, draw(columns).float())),
        (lambda x, y: (x * y).amax(-1, keepdim=True) - x, (x, y)),
        (lambda x, y: (x * y).mean(-1), (x, y)),
        (lambda x, y: (x * y + 1).sum(2, keepdim=True), (x, y)),
    ]
    for function, inputs in cases:
        group, order = group_of(function, *inputs)
        assert same_bits(group(*(inputs[at] for at in order)), function(*inputs)), group.title


@pytest.mark.parametrize(
    ("threads", "rows", "columns"), [(4, 4353, 256), (4, 1030, 256), (5, 5950, 320), (8, 4613, 512)]
)
def test_every_block_is_shared_at_a_multiple_of_what_vector_code_takes(
    monkeypatch: pytest.MonkeyPatch, threads: int, rows: int, columns: int
) -> None:
    """The last block has fewer rows: fewer threads may share it than the others."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 20)
    x = torch.randn(rows, columns)
    group, _ = group_of(lambda x: torch.nn.functional.mish(x * 2), x)
    taken = group.block_rows(threads)
    parts = {min(taken, rows), rows % taken} - {0}
    if taken < rows:
        assert all(blocks.same_groups(part * columns, threads) for part in parts)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert same_bits(group(x), torch.nn.functional.mish(x * 2))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_of_cross_entropy_never_has_the_dense_gradient(dtype: torch.dtype, threads: int) -> None:
    logs = torch.log_softmax(torch.randn(203, 1000).to(dtype), 1)
    target = torch.randint(0, 1000, (203,))
    target[::7] = -100
    total, grad = torch.tensor(174.0, dtype=dtype), torch.tensor(0.7, dtype=dtype)

    def both(logs: Tensor, target: Tensor, grad: Tensor, total: Tensor) -> Tensor:
        return aten._log_softmax_backward_data(
            aten.nll_loss_backward(grad, logs, target, None, 1, -100, total), logs, 1, logs.dtype
        )

    group, _ = group_of(both, logs, target, grad, total)
    wanted = both(logs, target, grad, total)
    assert same_bits(group(grad, logs, target, total), wanted)
    assert group.block_bytes(threads) < logs.numel() * logs.itemsize / 5
    group.write(grad, logs, target, total, out=logs)  # over the log-probabilities
    assert same_bits(logs, wanted)


def test_result_may_be_written_over_what_members_have_read() -> None:
    x, up, grad = (torch.randn(500, 64) for _ in range(3))
    group, _ = group_of(gate, x, up, grad)
    wanted = gate(x, up, grad)
    assert group.rule.overwrites == (0, 1, 2)
    for at in group.rule.overwrites:
        operands = [grad.clone(), up.clone(), x.clone()]
        group.write(*operands, out=operands[at])
        assert same_bits(operands[at], wanted)


def test_what_the_last_member_may_not_write_over_stays() -> None:
    """A matrix that is read by rows alone, or in another dtype, or in one more way."""
    x = torch.randn(500, 64)
    group, _ = group_of(lambda x, y: x * 2 + y, x, torch.randn(64))
    assert group.rule.overwrites == (0,)
    group, _ = group_of(lambda x, y: (x * 2).double() * y, x, x.double())
    assert group.rule.overwrites == (1,)


@pytest.mark.parametrize("layout", ["columns", "apart", "offset", "expanded"])
def test_arguments_that_lie_otherwise_than_planned_are_copied(layout: str) -> None:
    x, up, grad = (torch.randn(128, 64) for _ in range(3))
    group, _ = group_of(gate, x, up, grad)
    wanted = gate(x, up, grad)
    moved = {
        "columns": up.t().contiguous().t(),
        "apart": torch.stack([up, up], -1)[..., 0],
        "offset": torch.cat([torch.zeros(3), up.flatten()])[3:].view(128, 64),
        "expanded": up,
    }[layout]
    assert same_bits(group(grad, moved, x), wanted)
    if layout == "expanded":
        row = torch.randn(64)
        planned, _ = group_of(gate, x, row.expand(128, 64), grad)
        assert same_bits(planned(grad, row.expand(128, 64).contiguous(), x), gate(x, row.expand(128, 64), grad))


@pytest.mark.parametrize(
    ("shape", "stride", "to", "steps"),
    [
        ((6, 4), (4, 1), (6, 4), (4, 1)),
        ((2, 3, 4), (12, 4, 1), (2, 3, 4), (4, 1)),
        ((2, 3, 1), (3, 1, 1), (2, 3, 4), (1, 0)),
        ((4,), (1,), (2, 3, 4), (0, 1)),
        ((1, 1, 1), (1, 1, 1), (2, 3, 4), (0, 0)),
        ((2, 3, 4), (3, 1, 0), (2, 3, 4), (1, 0)),
        ((6, 4), (8, 1), (6, 4), (8, 1)),
        ((6, 4), (1, 6), (6, 4), None),
        ((6, 4), (8, 2), (6, 4), None),
        ((6, 4), (2, 1), (6, 4), None),
        ((2, 3, 4), (4, 8, 1), (2, 3, 4), None),
        ((3, 4), (4, 1), (2, 3, 4), None),
        ((2, 1, 4), (4, 4, 1), (2, 3, 4), None),
        ((5, 4), (4, 1), (6, 4), None),
    ],
)
def test_operands_are_seen_as_rows_and_columns(
    shape: tuple[int, ...], stride: tuple[int, ...], to: tuple[int, ...], steps: tuple[int, int] | None
) -> None:
    assert steps_of(torch.empty_strided(shape, stride), to) == steps


@pytest.mark.parametrize("seed", range(200))
def test_blocks_cover_all_rows_and_leave_none_alone(seed: int) -> None:
    dice = random.Random(seed)
    matrix = Matrix(dice.choice((2, 3, 65, 129, 1025, 4097)) + dice.randrange(3), dice.choice((2, 7, 64, 5000)))
    threads, aligned = dice.choice((1, 2, 5, 64)), dice.random() < 0.5
    pointwise = dice.random() < 0.5
    rows = blocks.block_rows(matrix, dice.choice((1, 2, 4, 8)), threads, aligned=aligned, pointwise=pointwise)
    if pointwise and rows < matrix.rows:
        for part in {rows, matrix.rows % rows}:
            assert blocks.same_groups(part * matrix.columns, threads)
            assert blocks.same_groups(part, threads)
    assert 1 <= rows <= matrix.rows
    assert matrix.rows % rows != 1 or rows == 1
    assert rows > 1
    if aligned and rows < matrix.rows:
        assert rows % (blocks.TOGETHER * threads) == 0


def test_whole_operators_run_where_threads_would_begin_elsewhere() -> None:
    x = torch.randn(301, 257)
    group, _ = group_of(lambda x: torch.sigmoid(x) * x, x)
    assert group.block_rows(1) < 301
    assert group.block_rows(2) == 301
    assert group.block_bytes(2) == x.nbytes
    softmax, _ = group_of(lambda x: aten._softmax_backward_data(torch.softmax(x, 1), x, 1, x.dtype), x)
    assert softmax.block_rows(2) < 301


def test_no_smaller_form_stands_for_what_a_group_reads() -> None:
    """One member needs the shape alone; a stand-in of one element would be laid out whole in the step."""

    def both(logs: Tensor, target: Tensor, grad: Tensor, total: Tensor) -> Tensor:
        return aten.nll_loss_backward(grad, logs, target, None, 1, -100, total) * 2

    logs = torch.randn(203, 64)
    group, _ = group_of(both, logs, torch.randint(0, 64, (203,)), torch.tensor(0.5), torch.tensor(3.0))
    assert ops.needs(group, ()) == {}


SQUARE = (
    lambda x, y: (x * 2) / (x * 2).sum(-1),
    lambda x, y: (x * 2).amax(-1).unsqueeze(0) + y,
    lambda x, y: (x * 2).mean(-1).view(1, -1) * y,
    lambda x, y: (x * 2).sum(-1, keepdim=True).t() - y,
    lambda x, y: x * (x.sum(-1) * 2),
)


@pytest.mark.parametrize("function", SQUARE)
def test_an_element_for_each_row_is_not_one_for_each_column_of_a_square(function: Callable[..., Tensor]) -> None:
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    nodes = operators(traced(function, x, y).graph)
    calls = [node for node in traced(function, x, y).graph.nodes if node.op == "call_function"]
    said = Fused.misfit(calls, Matrix(64, 64), 1)
    assert said, [node.name for node in nodes]


def test_the_result_is_not_written_over_what_all_blocks_read() -> None:
    x, column = torch.randn(512, 512), torch.randn(512)
    group, order = group_of(lambda x, column: (x * column).sin().sum(-1), x, column)
    assert group.rule.overwrites == ()
    row = torch.randn(512, 1)
    group, order = group_of(lambda x, row: (x * row).sin().sum(-1, keepdim=True), x, row)
    assert group.rule.overwrites == (order.index(1),)
