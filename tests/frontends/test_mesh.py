"""Plans for a mesh of ranks that are not there: ``roamc.plan(..., mesh=...)`` and ``--mesh``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import roamc
from roamc.capture.fully_sharded import EAGER
from roamc.capture.tensor_parallel import split
from roamc.cli.commands import app
from roamc.cli.request import Request, answer, mesh_of, workload_of
from roamc.compat_groups import numbers_in, planned_for, ranks_in, stand_in_group
from roamc.errors import OptionError
from roamc.frontends.mesh import Mesh, on_mesh, parse_mesh
from roamc.frontends.workload import Workload, capture, made
from roamc.gpus import NCCL
from roamc.graph import TrainGraph, copied, operators
from roamc.graph.fingerprint import fingerprint
from roamc.graph.memory import build_memory
from roamc.graph.shard_judge import check
from roamc.options import Options
from roamc.passes import normalize, shard
from tests.parallel import BOUND, COLUMNS, ROWS, batch, build, worst_error
from tests.shards import counted, joined, normal_form, one_rank, run_ranks

PLAN = {f"blocks.*.{name}": word for names, word in ((COLUMNS, "colwise"), (ROWS, "rowwise")) for name in names}
SIZES = {"layers": 2, "width": 32, "heads": 4, "vocab": 64, "seq": 16, "batch": 2}


@pytest.fixture(autouse=True)
def no_group() -> None:
    """Ends the process group that cases of collectives' kernels may have left."""
    if dist.is_initialized():
        dist.destroy_process_group()


def parts(kind: str, ranks: int, plan: Mapping[str, str] = PLAN) -> list[nn.Module]:
    """What each rank has of a model of ``tests.parallel``, with its elements."""
    whole = build(kind, 1)
    shards = [split(whole, None, plan, ranks, "tp")[0] for _ in range(ranks)]
    for rank, part in enumerate(shards):
        for name, parameter in part.named_parameters():
            source = whole.get_parameter(name).detach()
            dims = [at for at, size in enumerate(source.shape) if parameter.shape[at] != size]
            if dims:
                parameter.data = source.chunk(ranks, dims[0])[rank].clone()
    return shards


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_parts_of_all_ranks_give_loss_and_gradients_of_the_whole(kind: str) -> None:
    ranks = parts(kind, 2)
    assert_as_on_one_rank(kind, ranks, normal_form(ranks[0], (batch(),)))


def test_a_head_whose_outputs_are_gathered_stays_split_by_class() -> None:
    ranks = parts("gpt", 2, PLAN | {"head": "colwise_gather_output"})
    graph = normal_form(ranks[0], (batch(),))
    with parse_mesh("tp=2").planned_for():
        decision = shard.decide(graph, Options(shard="sequence"))
        sharded = shard.apply(graph, decision)
        check(graph, sharded, "shard")
    ((gathered, count, values),) = decision.classes
    assert (gathered, count) == ("cat", 2)
    assert {"_log_softmax", "nll_loss_backward"} <= set(values)
    assert all(node.target is not torch.ops.aten.cat.default for node in operators(sharded.graph))
    assert_as_on_one_rank("gpt", ranks, sharded)


def test_a_head_that_shares_its_weight_or_that_ranks_do_not_divide_stays_whole() -> None:
    plan = PLAN | {"head": "colwise_rep"}
    model = build("gpt", 1)
    model.head = nn.Linear(32, 47)
    assert type(split(model, None, plan, 2, "tp")[0].head) is nn.Linear
    model = build("gpt", 1)
    model.head.weight = model.tokens.weight
    assert type(split(model, None, plan, 2, "tp")[0].head) is nn.Linear


def assert_as_on_one_rank(kind: str, ranks: Sequence[nn.Module], graph: TrainGraph) -> None:
    """Run ``graph`` with the parameters of all ranks, and compare loss and gradients."""
    torch.manual_seed(0)
    inputs = [[*(p.detach() for p in part.parameters()), batch(), torch.ones(())] for part in ranks]
    results = run_ranks(graph, inputs)
    model, loss = one_rank(kind)
    assert all(abs(float(result[0] - loss)) <= BOUND * float(loss) for result in results)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {
        name: joined([result[1 + at] for result in results], wanted[name].shape)
        for at, (name, _) in enumerate(model.named_parameters())
    }
    assert worst_error(gradients, wanted) <= BOUND


def test_the_users_model_and_optimizer_stay_as_they_are() -> None:
    model = build("gpt", 1)
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    part, its_optimizer = split(model, optimizer, PLAN, 4, "tp")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model.get_submodule("blocks.0.q")) is nn.Linear
    assert its_optimizer is not None
    assert {id(p) for group in its_optimizer.param_groups for p in group["params"]} == set(map(id, part.parameters()))
    assert part.get_parameter("blocks.0.q.weight").shape == (8, 32)
    assert part.get_parameter("blocks.0.down.weight").shape == (32, 16)
    assert part.get_parameter("tokens.weight") is model.get_parameter("tokens.weight")


@pytest.fixture(scope="module")
def captured() -> TrainGraph:
    request = Request("gpt", {**SIZES, "layers": 1}, mesh="tp=2")
    with mesh_of(request).planned_for():
        return capture(on_mesh(workload_of(request), mesh_of(request)))


def test_a_whole_step_on_shards_updates_behind_its_gradients(captured: TrainGraph) -> None:
    options = Options(shard="sequence")
    with parse_mesh("tp=2").planned_for():
        graph = copied(captured)
        graph = normalize.apply(graph, normalize.decide(graph, Options()))
        sharded = shard.apply(graph, shard.decide(graph, options))
        check(graph, sharded, "shard")
    assert all(before < after for before, after in build_memory(sharded).edges)
    assert counted(sharded)["BACKWARD", "all_reduce_coalesced"] == 1


def test_no_plan_depends_on_a_groups_name(captured: TrainGraph) -> None:
    graph = copied(captured)
    before = fingerprint(graph)
    for node in operators(graph.graph):
        if "roamc_collective" in str(node.target):
            node.args = (*node.args[:-1], "7")
    assert fingerprint(graph) == before


def test_planned_groups_are_there_only_inside() -> None:
    with planned_for({"tp": (0, 1, 2)}):
        assert ranks_in("tp") == 3
        assert numbers_in("tp") == [0, 1, 2]
        assert ranks_in("dp") is None
    assert ranks_in("tp") is None
    with parse_mesh(f"tp={1 << 20}").planned_for():  # a number of ranks that takes no memory
        assert ranks_in("tp") == 1 << 20


def test_roamc_plan_takes_a_mesh() -> None:
    model, tokens = build("gpt", 1), batch()
    whole = roamc.plan(model, tokens)
    odd = {"blocks.*.upp": "colwise"}
    alone, sharded = (
        roamc.plan(model, tokens, mesh={"tp": 2}, tp_plan=PLAN | more, shard=way)
        for way, more in (("off", {}), ("sequence", odd))
    )
    (said,) = [note for note in sharded.notes if "blocks.*.upp" in note]
    assert "no layer of Model has a name like 'blocks.*.upp'" in said
    assert "did you mean 'blocks.*.up'" in said
    assert sharded.peak_bytes < alone.peak_bytes < whole.peak_bytes
    assert any("all-gathers" in note for note in sharded.notes)
    assert any(note.startswith("collectives: each rank sends") for note in alone.notes)
    assert not any("ranks" in note or "each rank" in note for note in whole.notes)


def test_the_command_line_plans_a_stage_and_tells_what_it_holds() -> None:
    words = [text for key, value in SIZES.items() for text in (f"--{key}", str(value))]
    mesh = ["--mesh", "dp=2,pp=2,tp=2", "--forward-backward", "--profile", "a100", "--device", "cuda"]
    result = CliRunner().invoke(app, ["plan", "gpt", *words, *mesh, "--option", "shard=sequence"])
    assert result.exit_code == 0, result.output
    assert "one rank of a mesh of 8: dp=2, pp=2, tp=2" in result.output
    assert "stage 0 of pp=2, 1 of 2 layers, has 2 micro-batches in flight" in result.output
    assert "ms on the links of profile a100, " in result.output


def step(**changes: Any) -> Callable[[], Any]:
    """A request for ``gpt`` with ``changes``, as far as the plan begins."""
    values: dict[str, Any] = {"target": "gpt", "sizes": SIZES, **changes}
    request = Request(**values)
    return lambda: on_mesh(workload_of(request), mesh_of(request))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: parse_mesh("xp=8"), "no axis 'xp'; did you mean '[dtp]p'"),
        (lambda: parse_mesh("tp=2,tp=4"), "axis tp of the mesh is named twice"),
        (lambda: parse_mesh({"tp": 0}), "axis tp of the mesh must be a whole number of ranks from 1 to 1048576"),
        (lambda: parse_mesh("fsdp=1048577"), "must be a whole number of ranks from 1 to 1048576, not 1048577"),
        (lambda: parse_mesh("tp"), "'tp' is no axis of a mesh with its size"),
        (step(mesh="tp=3"), "tp=3 does not divide the 4 heads"),
        (step(mesh="pp=4"), "pp=4 does not divide the 2 layers"),
        (step(mesh="pp=2", target="resnet50", sizes={}), "pp=2 needs a built-in model that has layers"),
        (step(mesh=""), "'' is no axis of a mesh with its size; write a mesh as 'dp=1,pp=8,tp=8'"),
        (step(mesh="tp=2,pp"), "'pp' is no axis of a mesh with its size"),
        (lambda: roamc.plan(build("gpt", 1), batch(), mesh={2: 2}), "the mesh has no axis 2"),
        (lambda: roamc.plan(build("gpt", 1), batch(), tp_plan={"a": "colwise"}), "give mesh={'tp': N} as well"),
        (lambda: roamc.optimize(build("gpt", 1), mesh="tp=2"), "mesh is for roamc.plan, whose ranks need not be there"),
        (step(tp_plan=("a=b",)), "--tp-plan says how a mesh splits layers: give --mesh"),
        (step(mesh="tp=2", tp_plan=("colwise",)), "--tp-plan takes PATTERN=WORD"),
        (step(mesh="tp=2", tp_plan=("blocks.*.up=columns",)), "says 'columns' of blocks.0.up; known are colwise, roww"),
        (step(mesh="tp=2", tp_plan=("blocks.*.norm1=colwise",)), "it is a LayerNorm, and not an nn.Linear"),
        (step(mesh="tp=2", tp_plan=("head=colwise",)), "head cannot be split: it shares a parameter with tokens"),
        (step(mesh="tp=2", tp_plan=("blocks.*.upp=colwise",)), r"no layer of GPT has .* did you mean 'blocks.\*.up'"),
        (lambda: roamc.plan(build("gpt", 1), batch(), mesh="tp=2"), "nothing says how .* is split among 2 ranks"),
        (lambda: roamc.plan(build("gpt", 1), batch(), mesh=2), "mesh must name its axes, such as 'tp=8'"),
        (
            lambda: roamc.plan(build("gpt", 1), batch(), mesh="tp=2", tp_plan=[("blocks.*.up", "colwise")]),
            "tp_plan must map patterns of layers' names to words",
        ),
        (
            lambda: roamc.plan(nn.Linear(6, 3), torch.zeros(2, 6), mesh="tp=2", tp_plan={"": "colwise"}),
            "tp=2 does not divide the 3 outputs of ",
        ),
        (lambda: roamc.plan(build("gpt", 1), batch(), mesh="pp=2"), "give it the layers of one stage"),
        (
            lambda: roamc.plan(build("gpt", 1), batch(5, 3), mesh="tp=2", tp_plan=PLAN, shard="sequence"),
            "tp=2 does not divide the 15 tokens of a batch, .* the next number that fits is 16",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(run: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as refused:
        run()
    assert "\n" not in str(refused.value)


def test_a_mesh_of_one_rank_changes_nothing() -> None:
    request = Request("gpt", SIZES, mesh="dp=4")
    assert mesh_of(request) == Mesh(dp=4)
    workload = workload_of(request)
    assert on_mesh(workload, mesh_of(request)).model is workload.model


@pytest.mark.parametrize(("mesh", "axes"), [("dp=2", "2: dp=2, pp=1, tp=1"), ("pp=2", "2: dp=1, pp=2, tp=1")])
def test_roamc_plan_and_the_command_line_say_the_same_of_a_mesh(mesh: str, axes: str) -> None:
    said = roamc.plan(build("gpt", 1), batch(), mesh=mesh, stage=0).notes[-2:]
    assert said[0] == f"one rank of a mesh of {axes}"
    beside = "what averages gradients over dp runs beside the planned step and is not counted"
    assert said[1] == beside if mesh == "dp=2" else said[1].startswith("stage 0 of pp=2 has 2 micro-batches in flight")
    assert answer(Request("gpt", SIZES, mesh=mesh)).plan.notes[-2] == said[0]


@pytest.mark.parametrize(("mesh", "groups"), [("dp=8", 1), ("tp=2", 1), ("dp=8,tp=2", 2)])
def test_the_margin_has_a_part_for_each_group_of_ranks(mesh: str, groups: int) -> None:
    model = build("gpt", 1)
    plan = roamc.plan(model, batch(), mesh=mesh, tp_plan=PLAN if "tp" in mesh else None, gpu="h100")
    assert plan.margin_bytes["NCCL"] == groups * NCCL


def test_fsdp_in_a_mesh_is_fully_shard_of_each_layer_and_the_model() -> None:
    sizes, ranks = {**SIZES, "vocab": 96}, 4
    whole, sharded = (answer(Request("gpt", sizes, mesh=mesh)).plan for mesh in (None, f"fsdp={ranks}"))
    for kind in ("parameter", "optimizer state"):
        assert sharded.fixed_bytes[kind] == pytest.approx(whole.fixed_bytes[kind] / ranks, rel=0.01)
    assert sharded.fixed_bytes["input"] == whole.fixed_bytes["input"]
    assert "one rank of a mesh of 4: fsdp=4" in sharded.notes
    assert EAGER in sharded.notes
    assert EAGER not in whole.notes
    assert not dist.is_initialized()
    workload = workload_of(Request("gpt", sizes))
    with stand_in_group(ranks):
        for layer in workload.model.blocks:
            fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
        model = fully_shard(workload.model, mesh=init_device_mesh("cpu", (ranks,)))
        by_hand = roamc.plan(
            model, *workload.batch, loss_fn=workload.loss_fn, optimizer=torch.optim.AdamW(model.parameters())
        )
    assert (sharded.peak_bytes, sharded.baseline_bytes) == (by_hand.peak_bytes, by_hand.baseline_bytes)
    assert sharded.fixed_bytes == by_hand.fixed_bytes


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda: parse_mesh("fsdp=2,tp=2"), "fsdp stands alone in a mesh: shard .* as docs/ranks.md shows"),
        (lambda: parse_mesh("zero=2"), "no axis 'zero': fsdp=N shards as ZeRO .* as docs/ranks.md shows"),
        (lambda: roamc.plan(nn.Linear(2, 2), torch.ones(1, 2), mesh={"fsdp": 2}), "for the command line: .*ranks.md"),
        (lambda: mesh_of(Request("gpt", mesh="fsdp=2", forward_backward=True)), "leave --forward-backward and"),
        (lambda: on_mesh(made("f", (nn.Linear(2, 2), torch.ones(1, 2))), Mesh(fsdp=2)), "inputs, loss_fn. from f"),
    ],
)
def test_fsdp_that_cannot_be_planned_says_what_to_do(asked: Callable[[], object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        asked()


def test_fsdp_takes_a_way_to_make_the_optimizer_and_no_optimizer_of_whole_parameters() -> None:
    def workload(optimizer: Any) -> Workload:
        return made("f", (model, torch.ones(1, 4), lambda model, x: model(x).sum(), optimizer))

    with stand_in_group(2):
        model = nn.Linear(4, 4)
        assert on_mesh(workload(torch.optim.SGD), Mesh(fsdp=2)).model is model
        model = nn.Linear(4, 4)
        with pytest.raises(OptionError, match="has whole parameters, and fsdp=2 shards them: return a function"):
            on_mesh(workload(torch.optim.SGD(model.parameters())), Mesh(fsdp=2))
        with pytest.raises(OptionError, match="has a process group already"), Mesh(fsdp=2).planned_for():
            pass
