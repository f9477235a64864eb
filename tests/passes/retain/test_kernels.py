"""Decodes on a GPU: in kernels of their own, and inside the groups that read the decoded value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roamc import cost
from roamc.codegen.group_judge import check_group
from roamc.codegen.judge import check_program
from roamc.codegen.source import emit
from roamc.frontends.workload import Workload, capture
from roamc.graph import TrainGraph, copied, value_flow, verify
from roamc.graph.lifetimes import live_bytes
from roamc.graph.memory import build_memory
from roamc.graph.value_numbers import Numbers
from roamc.operators.activations import activation_input
from roamc.operators.gpu.fused_kernel import FusedKernel
from roamc.options import parse_options
from roamc.passes import fuse
from roamc.passes.retain import Decision, apply
from roamc.passes.retain.offers import offered
from roamc.passes.retain.problem import question
from roamc.planning import search
from tests.graphs import clones, run_real
from tests.kernel_groups import use_kernels
from tests.passes.retain.test_compress import cleaned, squares
from tests.passes.retain.test_tempo import CLOSE, FITS, FUNCTIONS, compare, fitting, mlps, tokens


def encoded(graph: TrainGraph, storages: list[str]) -> TrainGraph:
    """The graph with codec tempo for these storages, as pass retain writes it."""
    codes = tuple((storage, "tempo", 0, 0, 0.0, ()) for storage in storages)
    return apply(graph, Decision((), 0, 0.0, 0.0, "optimal", "all", codes=codes))


def decoding(graph: TrainGraph) -> list[FusedKernel]:
    """The groups that decode inside themselves."""
    groups = (node.target for node in graph.graph.nodes if isinstance(node.target, FusedKernel))
    return [group for group in groups if any(node.target is activation_input for node in group.nodes)]


def fast(graph: TrainGraph) -> TrainGraph:
    options = {"numerics": "fast", "codecs": "tempo", "profile": "h100"}
    return fuse.apply(graph, fuse.decide(graph, parse_options(options)))


def gpu_graph(model: nn.Module, x: Tensor, loss: Callable[[nn.Module, Tensor], Tensor] = squares) -> TrainGraph:
    return capture(Workload("gpu", model, (x,), loss), forward_backward=False, device=torch.device("cuda", 0))


@pytest.mark.parametrize(("dtype", "route"), [*((dtype, "joint") for dtype in CLOSE), (torch.float32, "step")], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_groups_decode_what_they_read(
    name: str, dtype: torch.dtype, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are near, every byte is foreseen, and the judge agrees if asked to."""
    use_kernels(monkeypatch)
    graph, inputs = cleaned(mlps(name).to(dtype), (tokens().to(dtype),), squares, route)
    before, again = clones(inputs), clones(inputs)
    flow = value_flow.read(graph, Numbers())
    grouped = fast(graph)
    expected, _ = run_real(grouped, before)
    kept, storages = verify.constraints(grouped), fitting(grouped)
    after = encoded(grouped, storages)
    verify.check_graph(after, "retain", kept, deep=True)
    value_flow.check(after, flow, "retain", ["tempo"], fast=True)
    groups = decoding(after)
    assert len(groups) == len(storages) == 3
    assert all(len(group.nodes) > 1 for group in groups)
    got, measured = run_real(after, again)
    compare([*got, *again], [*expected, *before], CLOSE[dtype])
    assert measured == live_bytes(build_memory(after)).tolist()


def test_each_reader_decodes_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    graph, inputs = cleaned(nn.Linear(8, 8), (torch.randn(6, 8),), FITS["twice"], "step")
    before, again = clones(inputs), clones(inputs)
    flow = value_flow.read(graph, Numbers())
    grouped = fast(graph)
    expected, _ = run_real(grouped, before)
    after = encoded(grouped, fitting(grouped))
    value_flow.check(after, flow, "retain", ["tempo"], fast=True)
    members = [[member.operator for member in group.members] for group in decoding(after)]
    assert sum(each.count("aten.gelu_backward.default") for each in members) == 2
    assert all("aten.gelu_backward.default" in each for each in members)
    got, _ = run_real(after, again)
    compare([*got, *again], [*expected, *before], 1e-5)


def test_one_reader_in_no_group_keeps_the_kernel_that_decodes() -> None:
    """Where codecs are not named when groups are chosen, a slope that joins nothing is none."""
    graph = gpu_graph(mlps().bfloat16(), tokens().bfloat16())
    graph = fuse.apply(graph, fuse.decide(graph, parse_options({"numerics": "fast", "profile": "h100"})))
    assert sorted(len(group.nodes) for group in decoding(encoded(graph, fitting(graph)))) == [1, 3, 3]


def test_the_judge_sees_what_a_codec_does_not_serve_inside_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    graph, _ = cleaned(mlps(layers=1), (tokens(),), squares, "step")
    flow = value_flow.read(graph, Numbers())
    grouped = fast(graph)
    after = encoded(grouped, fitting(grouped))
    value_flow.check(after, flow, "retain", ["tempo"], fast=True)
    (encoding,) = after.encodings
    object.__setattr__(encoding, "serves", frozenset())
    with pytest.raises(verify.VerifyError, match=r"reads addmm as 'slope', decoded by codec 'tempo'"):
        value_flow.check(after, flow, "retain", ["tempo"], fast=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_kernel_of_its_own_decodes_for_other_readers(name: str) -> None:
    """Slopes have other last bits in kernels, so that exact plans have no groups with them. Planned without a GPU."""
    graph = gpu_graph(mlps(name).bfloat16(), tokens().bfloat16())
    flow = value_flow.read(graph, Numbers())
    after = encoded(graph, fitting(graph))
    value_flow.check(after, flow, "retain", ["tempo"])
    assert [len(group.nodes) for group in decoding(after)] == [1, 1, 1]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_kernels_of_a_gpu_decode_and_are_judged(dtype: torch.dtype) -> None:
    """Planned without one."""
    graph = fast(gpu_graph(mlps().to(dtype), tokens().to(dtype)))
    after = encoded(graph, fitting(graph))
    assert len(decoding(after)) == 3
    for group in decoding(after):
        assert {"aten.gelu_backward.default", "roamc.activation_input.default"} <= {m.operator for m in group.members}
        check_group(group, 1)


def odd(model: nn.Module, x: Tensor) -> Tensor:
    return F.gelu(model(x)).square().sum()


def test_bits_that_do_not_fill_bytes_stay_operators() -> None:
    graph = gpu_graph(nn.Linear(7, 7).bfloat16(), torch.randn(5, 7).bfloat16(), odd)
    after = encoded(graph, fitting(graph))
    assert not decoding(after)
    assert [node.name for node in after.graph.nodes if node.target is activation_input] == ["addmm_decode_1"]


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_a_decode_costs_what_runs(numerics: str) -> None:
    """In a group the bytes of the code and a look-up, alone a kernel that writes the value."""
    profile = cost.load_profile(torch.device("cuda"), "h100")
    graph = gpu_graph(mlps().bfloat16(), tokens().bfloat16())
    graph = fast(graph) if numerics == "fast" else graph
    storages = fitting(graph)
    before, after = cost.prices(graph, profile), encoded(copied(graph), storages)
    asked = question(graph, parse_options({}), [op.node.name for op in build_memory(graph).operators], before, "all")
    offers = offered(asked, parse_options({"codecs": "tempo"}), profile)
    added = {code.storage: offer.seconds for code, offer in offers if code.codec == "tempo"}
    runs = cost.prices(after, profile)
    assert sum(added[storage] for storage in storages) == pytest.approx(sum(runs.values()) - sum(before.values()))
    assert all(len(group.nodes) > 1 for group in decoding(after)) is (numerics == "fast")


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_plans_for_a_gpu_decode_in_kernels(numerics: str) -> None:
    """The program is judged, and the plan makes the same program again."""
    settings = {"memory_budget": "light", "codecs": "tempo", "numerics": numerics, "profile": "h100"}
    options, model, x = parse_options(settings), mlps().bfloat16(), tokens(16).bfloat16()
    planned = search.run(gpu_graph(model, x), options)
    encoded_by = [code[1] for code in planned.plan.decisions["retain"]["codes"]]
    assert encoded_by.count("tempo") == len(decoding(planned.graph)) > 0
    assert {len(group.nodes) > 1 for group in decoding(planned.graph)} == {numerics == "fast"}
    program = emit(planned.graph)
    check_program(planned.graph, program)
    again = search.run(gpu_graph(model, x), options, plan=planned.plan)
    assert emit(again.graph).source == program.source
