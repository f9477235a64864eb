"""Pass fuse on operators in place: an update as one group, its bits, what is refused, and what the judges name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.codegen.group_judge import check_groups
from roamc.errors import PlanError, VerifyError
from roamc.graph import TrainGraph, copied, operators, value_flow, verify
from roamc.graph.memory import build_memory
from roamc.graph.value_numbers import Numbers
from roamc.operators import blocks
from roamc.operators.fused import Fused
from roamc.options import Options
from roamc.passes.fuse import Decision, apply, choose, decide, estimates
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import assert_same, captured_step, clones, run_real, traced
from tests.kernel_groups import use_kernels
from tests.planted import planted

FAST = Options(numerics="fast")
X = torch.randn(40, 24)


@pytest.fixture(autouse=True)
def any_group_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of the smallest tensors as well, in blocks of a few rows."""
    monkeypatch.setattr(choose, "EFFORT", choose.Effort(least_bytes=1, least_share=0.0, least_update_bytes=1))
    monkeypatch.setattr(estimates, "group_workspace", lambda group, threads: 0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 10)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of a GPU on a CPU, where their operators run one by one."""
    use_kernels(monkeypatch)


class Small(nn.Module):
    """Parameters of one, two and four dimensions, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.table = nn.Conv2d(3, 8, 3), nn.Linear(72, 40)
        self.out = nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.table(torch.tanh(self.filters(x)).flatten(1))
        twice: Tensor = self.out(torch.tanh(self.out(hidden)))
        return twice


def square(model: nn.Module, x: Tensor) -> Tensor:
    loss_value: Tensor = model(x).square().sum()
    return loss_value


IMAGES = torch.randn(2, 3, 5, 5)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam, amsgrad and weight decay": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW, maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
}
MEMBERS = {
    "AdamW": 8,
    "Adam": 7,
    "Adam, amsgrad and weight decay": 10,
    "AdamW, maximize": 9,
    "momentum": 3,
    "Nesterov": 5,
}


def updates(graph: TrainGraph) -> list[Any]:
    """The groups that write."""
    return [node for node in operators(graph.graph) if isinstance(node.target, Fused) and node.target.writes]


def trained(name: str, dtype: torch.dtype, run: Callable[..., Any]) -> list[Tensor]:
    """Parameters and optimizer state after ``run(model, optimizer, batch)``."""
    torch.manual_seed(0)
    model = Small().to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    run(model, optimizer, IMAGES.to(dtype))
    state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    return [*model.parameters(), *state]


def in_eager(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, clip: float | None = None) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        square(model, x).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def check_steps(name: str, dtype: torch.dtype, *, whole: int, clip: float | None = None, **options: Any) -> None:
    """Three planned steps have the bits of eager's; ``whole`` parameters are updated by one group each."""
    members = MEMBERS[name] + (clip is not None)

    def planned(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        step = roamc.train_step(model, square, optimizer, strict=True, clip_grad_norm=clip, **options)
        update_groups = [group for group in step.plan(x).decisions["fuse"]["groups"] if group[-1].startswith("add")]
        assert [len(group) for group in update_groups if len(group) == members] == [members] * whole
        for _ in range(3):
            step(x)

    assert_same(trained(name, dtype, planned), trained(name, dtype, functools.partial(in_eager, clip=clip)), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_blocks_have_the_bits_of_eager(name: str, dtype: torch.dtype) -> None:
    check_steps(name, dtype, whole=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("kernels")
def test_members_of_kernels_have_the_bits_of_eager(name: str, dtype: torch.dtype) -> None:
    """All six parameters, whatever their dimensions. Operators of ATen stand for those of the kernel."""
    check_steps(name, dtype, whole=6, numerics="fast", disable=("products",))


def test_the_gradient_is_clipped_in_the_group() -> None:
    check_steps("Adam, amsgrad and weight decay", torch.float32, whole=3, clip=0.5, memory_budget="min")


def test_a_group_made_smaller_has_no_copy_without_what_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with a copy has so large blocks that its last operator stays alone."""

    def large(group: Fused, threads: int) -> int:
        return 1_000_000 if len(group.nodes) > 4 else int(not group.block_rows(threads))

    monkeypatch.setattr(estimates, "group_workspace", large)
    check_steps("Adam, amsgrad and weight decay", torch.float32, whole=0)


@pytest.mark.usefixtures("kernels")
def test_exact_kernels_hold_what_rounds_once() -> None:
    """``lerp``, ``addcmul`` and ``addcdiv`` are contracted in ATen's kernels, and run for themselves."""
    graph = copied(captured())
    groups = [group for group in decide(graph, Options()).groups if group[0].startswith("sqrt")]
    assert [len(group) for group in groups] == [3] * 6
    start, kept = value_flow.read(graph, Numbers()), verify.constraints(graph)
    graph = apply(graph, Decision(tuple(groups)))
    verify.check_graph(graph, "fuse", kept, deep=True)
    value_flow.check(graph, start, "fuse")
    assert not updates(graph), "roots are results: nothing of the caller's is written"


@functools.cache
def captured() -> TrainGraph:
    """A step with AdamW, which stays as it is."""
    return captured_step(Small(), (IMAGES,), square).graph


@pytest.fixture
def step() -> TrainGraph:
    """A step with AdamW, before the pass."""
    return copied(captured())


def test_a_group_that_writes_is_an_operator_without_results(step: TrainGraph) -> None:
    kept, start = verify.constraints(step), value_flow.read(step, Numbers())
    graph = apply(step, decide(step, Options()))
    verify.check_graph(graph, "fuse", kept, deep=True)
    value_flow.check(graph, start, "fuse")
    check_groups(graph)
    first, *_ = group_nodes = updates(graph)
    assert len(group_nodes) == 3
    assert first.meta["val"] is None
    memory = build_memory(graph)
    (operator,) = (one for one in memory.operators if one.node is first)
    written = {memory.storages[storage].name for storage in operator.writes}
    assert written == {first.args[at].name for at in first.target.rule.mutates}
    assert len(written) == 3
    assert not operator.births
    assert set(first.target.stands_for) == {name for name in first.target.stands_for if name in start.operators}
    assert {name for name in graph.waits if name == first.name} == {first.name}


def test_a_plan_with_updates_comes_back_from_its_text(step: TrainGraph) -> None:
    plan = search.run(copied(step), Options()).plan
    again = search.run(copied(step), Options(), Plan.from_json(plan.to_json()))
    assert again.plan.decisions == plan.decisions
    assert len(updates(again.graph)) == 3


def test_an_update_that_lies_elsewhere_in_memory_is_written_there(step: TrainGraph) -> None:
    """The caller may exchange a parameter for one with other strides; then the group works on a copy."""
    node = updates(apply(step, decide(step, Options())))[0]
    group, arguments = node.target, [argument.meta["val"] for argument in node.args]
    inputs = [torch.rand(one.shape) + 1 if isinstance(one, Tensor) else one for one in arguments]
    turned = [one.mT.contiguous().mT if isinstance(one, Tensor) else one for one in inputs]
    results = []
    for args in (clones(inputs), turned):
        assert group(*args) is None
        results.append([args[at] for at in group.writes])
    assert_same(*results, "strides")


# -- what is refused --------------------------------------------------------------------------------------------------


def chain(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    x.add_(y)
    return y.sum()


def part(x: Tensor, y: Tensor) -> Tensor:
    x[:20].mul_(2)
    x[:20].add_(y[:20])
    return y.sum()


def read_as_a_part(x: Tensor, y: Tensor) -> Tensor:
    turned, other = x.view(24, 40), y.view(24, 40)
    x.mul_(2)
    other.add_(turned)
    return torch.ones(2)


def read_between(x: Tensor, y: Tensor) -> Tensor:
    same = x.view(40, 24)
    x.mul_(2)
    kept = same @ y.t()
    x.add_(y)
    return kept


def converted(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    x.add_(y.double())
    return y.sum()


def returned(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x.add_(y)


@pytest.mark.parametrize(
    ("function", "names", "said"),
    [
        (part, ("mul_", "add_"), "writes a part of a storage"),
        (read_as_a_part, ("mul_", "add_"), "a part of what"),
        (read_between, ("mul_", "add_"), "mm and mul_ use what one of them writes|mm and add_ use what one"),
        (converted, ("mul_", "add_"), "converts what it writes"),
        (returned, ("mul_", "add_"), "read outside"),
    ],
)
def test_writes_that_are_no_value_inside_are_refused(function: Any, names: tuple[str, ...], said: str) -> None:
    inputs = X.clone(), X.clone()
    graph = traced(function, *inputs)
    whole = apply(copied(traced(chain, *inputs)), Decision((("mul_", "add_"),)))
    assert updates(whole)
    with pytest.raises(PlanError, match=said):
        apply(graph, Decision((names,)))


def test_two_operands_of_one_storage_are_refused() -> None:
    """As parameters that are tied: the group would read one in front of what it writes to the other."""
    x = X.clone()
    graph = traced(lambda x, y: (x.mul_(2), x.add_(y), y.sum())[-1:], x, x.detach())
    with pytest.raises(PlanError, match="one storage, which is written"):
        apply(graph, Decision((("mul_", "add_"),)))


@pytest.mark.parametrize("kind", ["blocks", "kernel"])
def test_a_written_operand_is_read_element_by_element(kind: str, request: pytest.FixtureRequest) -> None:
    """In a square one for each row is as large as one for each column, which other programs write."""
    if kind == "kernel":
        request.getfixturevalue("kernels")
    graph = traced(lambda x, y: (y.mul_(2), y.add_(1), x.mul_(y), x.sum())[-1:], torch.ones(8, 8), torch.ones(8))
    with pytest.raises(PlanError, match="cannot be one group"):
        apply(graph, Decision((("mul_", "add_", "mul__1"),)))


@pytest.mark.parametrize("seed", [*range(12), 84, 174])  # of the last two, groups have results and write
@pytest.mark.parametrize("kind", ["blocks", "kernel"])
def test_random_updates_leave_the_bits_of_operators(kind: str, seed: int, request: pytest.FixtureRequest) -> None:
    """Random operators, in place and not, on a few tensors; whatever is chosen gives the same values."""
    if kind == "kernel":
        request.getfixturevalue("kernels")
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, 8, (12, 3), generator=rng).tolist()

    def run(*held: Tensor) -> list[Tensor]:
        values = list(held)
        for kind, one, other in chosen:
            first, second = values[one % len(values)], values[other % len(values)]
            own = held[one % len(held)]
            if kind < 3:
                values.append((first * second, first.abs().sqrt(), first - second)[kind])
            elif kind == 3:
                own.lerp_(second, 0.25)
            else:
                (own.add_, own.mul_, own.addcmul_, own.copy_)[kind - 4](*([second] * (2 if kind == 6 else 1)))
        return values[-2:]

    inputs = [torch.rand(24, 16, generator=rng) + 0.5 for _ in range(4)]
    graph = traced(run, *inputs)
    graph = traced(run, *inputs, phases="U" * len(operators(graph.graph)))
    wanted, used = run_real(graph, wanted_inputs := clones(inputs))[0], clones(inputs)
    start, kept = value_flow.read(graph, Numbers()), verify.constraints(graph)
    changed = apply(graph, decide(graph, FAST))
    verify.check_graph(changed, "fuse", kept, deep=True)
    value_flow.check(changed, start, "fuse", fast=True)
    check_groups(changed)
    outputs = run_real(changed, used)[0]
    assert_same([*outputs, *used], [*wanted, *wanted_inputs], f"seed {seed}")


# -- the judges -------------------------------------------------------------------------------------------------------

AVERAGE, SQUARES = "state_table_weight_exp_avg", "state_table_weight_exp_avg_sq"
BLOCKS = {
    "a store is missing": (r"out=arg2_1\)\n$", "out=block_0)\n", "elements of the result are not written"),
    "the wrong operand is written": (r"(mul_out\(\w+_sq, .*)out=\w+", rf"\1out={AVERAGE}", "another value is read"),
    "stored in front of a late read": (r"(lerp_Scalar_out\(.*)out=\w+", rf"\1out={SQUARES}", "another value is read"),
    "written twice": (
        r"    for (.*) in (zip\(.*\)):\n((?:        .*\n)+)",
        r"    kept = \1\n    for \1 in zip(*kept):\n\3    for \1 in zip(*kept):\n\3",
        "written twice",
    ),
    "the old value is read behind the write": (
        rf"(        mul_out\({SQUARES}, .*)out=\w+\)",
        r"\1out=block_0)",
        "another value is read",
    ),
    "another number": (r"beta2_0, out", "eps_0, out", "another argument is given"),
    "a number that does not change": (r"beta2_0, out", "0.999, out", "another argument is given"),
    "blocks of other rows": (r"(arg2_1 = .*), \(72, 1", r"\1, (1, 72", "elements"),
    "the last block is missing": (r"(    t_14 = )(.*)", r"\1[*\2][:-1]", "is not called"),
}
KERNELS = {
    "a store is missing": (r"    tl.store\(arg2_1 .*\n", "", "elements of the result are not written"),
    "the wrong operand is written": (rf"tl.store\({SQUARES} ", f"tl.store({AVERAGE} ", "written twice"),
    "an operand is written that only is read": (
        r"tl.store\(arg2_1 ",
        "tl.store(t_14 ",
        "the result is written elsewhere",
    ),
    "stored in front of a late read": (
        r"(    addcdiv)",
        rf"    {AVERAGE}_value = tl.load({AVERAGE} + index, inside, 0)\n\1",
        "what is still read is overwritten",
    ),
    "written twice": (r"(    tl.store\(arg2_1 .*\n)", r"\1\1", "written twice"),
    "the old value is read": (r"div_rn\(lerp__scalar_2,", f"div_rn({AVERAGE}_value,", "other numbers are computed"),
    "written at other places": (r"tl.store\(arg2_1 \+ index", "tl.store(arg2_1 + index // 2", "elsewhere|twice"),
    "another number": (r"cast\(beta2_0,", "cast(eps_0,", "other numbers are computed"),
    "a number that does not change": (r"cast\(beta2_0,", "cast(0.999,", "other numbers are computed"),
}


def fused_with(step: TrainGraph, right: str, wrong: str) -> TrainGraph:
    """The graph with one change of the source of the second update, that of a matrix."""
    graph = apply(step, decide(step, FAST))
    check_groups(graph)
    planted(next(node.target for node in updates(graph) if AVERAGE in map(str, node.args)), right, wrong)
    return graph


@pytest.mark.parametrize("fault", BLOCKS)
def test_a_fault_of_blocks_is_named(step: TrainGraph, fault: str) -> None:
    right, wrong, said = BLOCKS[fault]
    with pytest.raises(VerifyError, match=said):
        check_groups(fused_with(step, right, wrong))


@pytest.mark.parametrize("fault", KERNELS)
@pytest.mark.usefixtures("kernels")
def test_a_fault_of_a_kernel_is_named(step: TrainGraph, fault: str) -> None:
    right, wrong, said = KERNELS[fault]
    with pytest.raises(VerifyError, match=said):
        check_groups(fused_with(step, right, wrong))


def test_a_write_that_the_rule_does_not_name_is_seen(step: TrainGraph) -> None:
    start = value_flow.read(step, Numbers())
    graph = apply(step, decide(step, Options()))
    node = updates(graph)[0]
    node.target.__dict__["rule"] = dataclasses.replace(node.target.rule, mutates=node.target.writes[1:])
    with pytest.raises(VerifyError, match="its rule says that it writes"):
        check_groups(graph)
    with pytest.raises(VerifyError, match="after pass 'fuse'"):
        value_flow.check(graph, start, "fuse")


def test_a_member_that_is_exchanged_is_seen(step: TrainGraph) -> None:
    start = value_flow.read(step, Numbers())
    graph = apply(step, decide(step, Options()))
    member = next(node for node in updates(graph)[0].target.body.nodes if node.target is torch.ops.aten.mul.Tensor)
    member.target = torch.ops.aten.add.Tensor
    with pytest.raises(VerifyError, match="after pass 'fuse'"):
        value_flow.check(graph, start, "fuse")


def test_a_write_that_is_gone_is_seen(step: TrainGraph) -> None:
    kept = verify.constraints(step)
    graph = apply(step, decide(step, Options()))
    node = updates(graph)[0]
    group = dataclasses.replace(node.target, stands_for=node.target.stands_for[1:])
    node.target = group
    with pytest.raises(VerifyError, match=r"which writes, draws or asserts, is gone"):
        verify.check_graph(graph, "fuse", kept)


def test_an_update_in_front_of_what_it_must_follow_is_seen(step: TrainGraph) -> None:
    """The product that makes the gradient of the input reads the weight: the update stays behind it."""
    kept = verify.constraints(step)
    graph = apply(step, decide(step, Options()))
    node = next(node for node in updates(graph) if AVERAGE in map(str, node.args))
    weight = next(argument for argument in node.args if str(argument) == "arg2_1")
    readers = [user for user in weight.users if user is not node]
    assert readers
    last = max(build_memory(graph).uses[build_memory(graph).owner[weight.name, 0]][:-1])
    build_memory(graph).operators[last].node.prepend(node)
    with pytest.raises(VerifyError, match=r"must stay behind|malformed"):
        verify.check_graph(graph, "fuse", kept)
