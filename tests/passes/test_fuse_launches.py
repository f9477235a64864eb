"""Updates that share a launch of a GPU: their bits, what is refused, the peak, and what the judges name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.codegen.group_judge import check_group, check_groups
from roamc.codegen.group_verdicts import Place
from roamc.errors import PlanError, VerifyError
from roamc.graph import TrainGraph, copied, operators, placeholders, value_flow, verify
from roamc.graph.storage_ids import STORAGES, new_id
from roamc.graph.value_numbers import Numbers
from roamc.operators.gpu import multi_tensor
from roamc.operators.gpu.multi_tensor import BLOCK, MOST_TENSORS, MultiTensorKernel
from roamc.options import Options
from roamc.passes.fuse import Decision, apply, decide, launches
from roamc.passes.fuse.multi_tensor import with_shared_launches
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import assert_same, captured_step, peak
from tests.kernel_groups import use_kernels
from tests.operators.updates import groups_of
from tests.planted import planted

FAST = Options(numerics="fast")
WIDTH, ROWS = 24, 256


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of a GPU on a CPU, where their operators run one by one; no matrix is small."""
    use_kernels(monkeypatch)
    monkeypatch.setattr(launches, "form_of", only_vectors)


def only_vectors(group: Any) -> Any:
    return None if group.matrix.rows > 1 else FORM_OF(group)


FORM_OF = launches.form_of


class Stack(nn.Module):
    """Layers with biases and norms, one element among them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.scale * torch.tanh(layer(norm(x)))
        return x


def square(model: nn.Module, x: Tensor) -> Tensor:
    loss_value: Tensor = model(x).square().sum()
    return loss_value


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def in_eager(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, clip: float | None) -> None:
    optimizer.zero_grad()
    square(model, x).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def trained(
    name: str, dtype: torch.dtype, step: Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor], Any]]
) -> list[Tensor]:
    """Parameters and optimizer state after three steps."""
    torch.manual_seed(0)
    model, x = Stack(3).to(dtype), torch.randn(ROWS, WIDTH).to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    run = step(model, optimizer)
    for _ in range(3):
        run(x)
    state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    return [*model.parameters(), *state]


@pytest.mark.parametrize(
    ("name", "dtype", "clip", "shared"),
    [
        ("AdamW", torch.bfloat16, None, 10),
        ("amsgrad", torch.float32, 0.5, 9),  # the update of one element is two groups
        pytest.param("AdamW", torch.float32, None, 10, marks=pytest.mark.thorough),
        pytest.param("Nesterov", torch.bfloat16, None, 10, marks=pytest.mark.thorough),
    ],
)
def test_updates_in_one_launch_have_the_bits_of_eager(
    name: str, dtype: torch.dtype, clip: float | None, shared: int
) -> None:
    """Biases, weights and biases of norms, and the scale. Operators of ATen stand for those of the kernel."""

    def planned(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
        x = torch.randn(ROWS, WIDTH).to(dtype)
        options: dict[str, Any] = {"numerics": "fast", "disable": ("products",)}
        step = roamc.train_step(model, square, optimizer, strict=True, clip_grad_norm=clip, **options)
        assert [len(names) for names in step.plan(x).decisions["fuse"]["launches"]] == [shared]
        return step

    def eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
        return lambda x: in_eager(model, optimizer, x, clip)

    assert_same(trained(name, dtype, planned), trained(name, dtype, eager), name)


@functools.cache
def captured(depth: int = 3) -> TrainGraph:
    """A step with AdamW, which stays as it is."""
    return captured_step(Stack(depth), (torch.randn(ROWS, WIDTH),), square).graph


@functools.cache
def decided(depth: int = 3) -> Decision:
    return decide(captured(depth), FAST)


def written(decision: Decision | None = None) -> TrainGraph:
    return apply(copied(captured()), decided() if decision is None else decision)


def kernels_of(graph: TrainGraph) -> list[Any]:
    return [node for node in operators(graph.graph) if isinstance(node.target, MultiTensorKernel)]


def test_a_launch_is_one_operator_that_writes_all_tensors() -> None:
    start, kept = value_flow.read(captured(), Numbers()), verify.constraints(captured())
    graph = written()
    verify.check_graph(graph, "fuse", kept, deep=True)
    value_flow.check(graph, start, "fuse", fast=True)
    check_groups(graph)
    (node,) = kernels_of(graph)
    assert node.meta["val"] is None
    assert node.target.launches == 1
    assert len(node.target.writes) == 3 * len(node.target.parts) == 30
    assert {name for name in graph.waits if name == node.name} == {node.name}
    alone = written(dataclasses.replace(decided(), launches=()))
    assert peak(graph) <= peak(alone)


def test_more_tensors_than_a_kernel_takes_are_several_launches_of_about_equal_length() -> None:
    shared_launches = decided(13).launches
    assert [len(names) for names in shared_launches] == [20, 20]
    assert MOST_TENSORS < 40


def test_exact_plans_share_no_launch() -> None:
    assert not decide(captured(), Options()).launches


def test_a_plan_with_shared_launches_comes_back_from_its_text() -> None:
    options = Options(numerics="fast", disable=frozenset({"products"}))
    plan = search.run(copied(captured()), options).plan
    again = search.run(copied(captured()), options, Plan.from_json(plan.to_json()))
    assert again.plan.decisions == plan.decisions
    assert len(kernels_of(again.graph)) == 1


def test_no_launch_is_shared_where_the_gradients_would_raise_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one row all that is large are gradients: the step holds most where some of them exist already."""
    graph = captured_step(Stack(3), (torch.randn(1, WIDTH),), square).graph
    shared_launches = decide(graph, FAST).launches
    assert sum(map(len, shared_launches)) < 10
    monkeypatch.setattr(launches.Ledger, "live", lambda ledger: torch.zeros(1).numpy())
    assert sum(map(len, decide(graph, FAST).launches)) == 10


def test_large_tensors_have_launches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "EFFORT", launches.Effort(most_share=0.0))
    assert not decide(captured(), FAST).launches


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (lambda names: [*names[:1], "mul"], "has no groups"),
        (lambda names: [*names[:1], *names[:1]], "has no groups"),
        (lambda names: [], "has no groups"),
        (lambda names: names[:1], "they are 1, and not 2 to 32"),
        (lambda names: [*names, "add_6"], "they are not of one form"),
    ],
)
def test_groups_that_cannot_share_a_launch_are_refused(names: Callable[[Sequence[str]], list[str]], said: str) -> None:
    (all_of_them,) = decided().launches
    with pytest.raises(PlanError, match=said):
        written(dataclasses.replace(decided(), launches=(tuple(names(all_of_them)),)))


def test_what_a_group_writes_no_other_of_its_launch_touches() -> None:
    graph = written(dataclasses.replace(decided(), launches=()))
    first, second, *_ = (node for node in operators(graph.graph) if node.name in decided().launches[0])
    second.args = (first.args[0], *second.args[1:])
    with pytest.raises(PlanError, match="another of them reads or writes"):
        with_shared_launches(graph, decided().launches)


def test_an_operator_between_groups_of_a_launch_must_not_use_what_they_write() -> None:
    graph = written(dataclasses.replace(decided(), launches=()))
    first, second, *_ = (node for node in operators(graph.graph) if node.name in decided().launches[0])
    with graph.graph.inserting_before(max(first, second)):
        between = graph.graph.call_function(torch.ops.aten.neg.default, (first.args[0],))
    between.meta = {"val": first.args[0].meta["val"].clone(), STORAGES: (new_id(96),)}
    with pytest.raises(PlanError, match="stands between them"):
        with_shared_launches(graph, decided().launches)


# -- the judge --------------------------------------------------------------------------------------------------------

FIRST, LAST = "state_layers_2_bias_exp_avg", "state_norms_0_bias_exp_avg"
FAULTS = {
    "a gradient of another tensor": (
        r"(arg9_1, state_norms_1_weight_exp_avg,) getitem_13",
        r"\1 getitem_14",
        "getitem_14",
    ),
    "a moment of another tensor": (
        rf"(?m){LAST}, (\w+), {LAST}_sq$",
        rf"{FIRST}, \1, {LAST}_sq",
        f"{FIRST} is used as",
    ),
    "the moments are exchanged": (
        rf"(?m){LAST}, (\w+), {LAST}_sq$",
        rf"{LAST}_sq, \1, {LAST}",
        f"{LAST}_sq is used as",
    ),
    "a tensor of the first that all others use": (r"tl.store\(exp_avg \+", f"tl.store({FIRST} +", "written elsewhere"),
    "a border is late": (r"if program >= 3:", "if program >= 4:", "is used as|other elements"),
    "a border is early": (r"if program >= 3:", "if program >= 2:", "is used as|other elements"),
    "a tensor begins late": (r"first, numel = 5,", "first, numel = 6,", "other elements are read: index"),
    "a tensor is short": (r"numel = 9, 24", "numel = 9, 23", "inside has other numbers"),
    "a tensor is long": (r"numel = 6, 1\b", "numel = 6, 2", "let in other elements|outside"),
    "the last tensor is left out": (r"    if program >= 9:\n.*\n.*\n", "", "is used as"),
    "a moment is not written": (r"    tl.store\(exp_avg \+.*\n", "", "elements of the result are not written"),
    "programs along another axis": (r"program_id\(0\)", "program_id(1)", "along axis 1"),
    "another number": (r"cast\(beta2_0,", "cast(eps_0,", "other numbers are computed"),
}


def judged(right: str = "", wrong: str = "", **changes: Any) -> None:
    """Judge the kernel with one change of its source, or of its text's fields."""
    graph = written()
    group = kernels_of(graph)[0].target
    if right:
        planted(group, right, wrong)
    group.__dict__["text"] = dataclasses.replace(group.text, **changes)
    check_groups(graph)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_kernel_of_several_tensors_is_named(fault: str) -> None:
    right, wrong, said = FAULTS[fault]
    with pytest.raises(VerifyError, match=said):
        judged(right, wrong)


def test_borders_inside_of_a_tensor_are_seen() -> None:
    """A tensor of several programs, all of which must be on one side of every border."""
    groups = groups_of(torch.optim.AdamW, [(2 * BLOCK + 1,), (7,), (2 * BLOCK + 2,)], torch.float32)
    kernel, _ = multi_tensor.join(groups)
    check_group(kernel, 1)
    for right, wrong in (("program >= 3", "program >= 2"), ("program >= 4", "program >= 5")):
        kernel.__dict__["text"] = dataclasses.replace(kernel.text, source=kernel.text.source.replace(right, wrong))
        with pytest.raises(VerifyError, match=r"both sides|is used as|which nobody needs"):
            check_group(kernel, 1)
        del kernel.__dict__["text"]


def test_a_launch_has_all_programs_and_operators() -> None:
    text = kernels_of(written())[0].target.text
    with pytest.raises(VerifyError, match="11 programs are launched, and not 10"):
        judged(programs=text.programs + 1)
    with pytest.raises(VerifyError, match="72 operators run on some tensor, of 80"):
        judged(members=text.members[:-1])
    mixed = (text.members[0][:-1], (*text.members[1], text.members[0][-1]), *text.members[2:])
    with pytest.raises(VerifyError, match="belongs to another tensor"):
        judged(members=mixed)


def test_operands_of_two_tensors_must_not_overlap() -> None:
    kernel, _ = multi_tensor.join(groups_of(torch.optim.AdamW, [(8,), (8,)], torch.float32))
    places = [Place(at) for at in range(len(placeholders(kernel.body)))]
    check_group(kernel, 1, places)
    second = kernel.parts[1].arguments
    places[second[3]] = Place(kernel.parts[0].arguments[0], 16)  # its gradient, over the first parameter
    with pytest.raises(VerifyError, match="is written over"):
        check_group(kernel, 1, places)


# -- operators that read the same -----------------------------------------------------------------------------------


class Gated(nn.Module):
    """The gradients of gate and up read one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return output


@functools.cache
def gated() -> TrainGraph:
    return captured_step(nn.Sequential(*(Gated() for _ in range(3))), (torch.randn(ROWS, WIDTH),), square).graph


def test_operators_that_read_the_same_are_one_launch_with_two_results() -> None:
    start, kept = value_flow.read(gated(), Numbers()), verify.constraints(gated())
    graph = apply(copied(gated()), decide(gated(), FAST))
    verify.check_graph(graph, "fuse", kept, deep=True)
    value_flow.check(graph, start, "fuse", fast=True)
    check_groups(graph)
    groups = [
        node.target for node in operators(graph.graph) if "silu_backward" in str(getattr(node.target, "title", ""))
    ]
    assert sorted(len(group.results) for group in groups) == [1, 2, 2], "where the step holds most it is one result"
    assert peak(graph) <= peak(gated())


def test_exact_groups_hold_what_leads_to_their_end_alone() -> None:
    graph = apply(copied(gated()), decide(gated(), Options()))
    several = [node.target for node in operators(graph.graph) if len(getattr(node.target, "results", ())) > 1]
    assert not several
