"""Stages of a pipeline: what each has of the model, its micro-batches in flight, and the fullest of all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import roamc
from roamc.cli import request, zoo
from roamc.cli.commands import app
from roamc.cli.models import settings_of
from roamc.cli.request import Request, stages, workload_of
from roamc.cli.stages import StagePlan, fullest
from roamc.errors import OptionError, VerifyError
from roamc.frontends.stages import Stage, ends_note, stage_of
from roamc.frontends.workload import capture
from roamc.graph import Role, TrainGraph, copied, output_values
from roamc.graph.in_flight import waiting_bytes
from roamc.graph.memory import SUMS, build_memory
from roamc.options import Options
from roamc.planning import search
from roamc.planning.layout_judge import check_layout
from roamc.units import format_bytes

SIZES = {"layers": 3, "width": 32, "heads": 4, "vocab": 64, "seq": 16, "batch": 2}
STAGES = 3
PROFILE = ("profile=cpu",)
STREAM = SIZES["batch"] * SIZES["seq"] * SIZES["width"] * 4
"""Bytes of what one stage hands to the next."""


def request_of(stage: int | None, **changes: Any) -> Request:
    values: dict[str, Any] = {"target": "gpt", "sizes": SIZES, "mesh": f"pp={STAGES}", "options": PROFILE}
    return Request(**{**values, "sets": ("dropout=0.0",), **changes, "stage": stage})


@pytest.fixture(scope="module")
def graphs() -> list[TrainGraph]:
    return [capture(workload_of(request_of(n))).replace(in_flight=STAGES - n) for n in range(STAGES)]


@pytest.fixture(scope="module")
def every() -> tuple[StagePlan, ...]:
    return stages(request_of(None))


def with_parts_of(whole: nn.Module, number: int) -> nn.Module:
    """Stage ``number`` with the weights of ``whole``; the head is a copy of the embedding's weight."""
    ends = {end: bool(there) for end, there in Stage(number, STAGES).ends.items()}
    part = zoo.make("gpt", {**SIZES, "layers": 1, "dropout": 0.0, **ends}, device="cpu").model
    held = {name.replace(f"blocks.{number}.", "blocks.0."): value for name, value in whole.state_dict().items()}
    part.load_state_dict({name: held[name] for name in part.state_dict()})
    return part


def test_the_stages_one_behind_the_other_are_the_model() -> None:
    torch.manual_seed(0)
    whole = zoo.make("gpt", {**SIZES, "dropout": 0.0}, device="cpu").model
    tokens = torch.randint(0, SIZES["vocab"], (SIZES["batch"], SIZES["seq"]))
    parts = [with_parts_of(whole, number) for number in range(STAGES)]
    loss = zoo.text_loss(nn.Sequential(*parts), tokens, tokens)
    wanted = zoo.text_loss(whole, tokens, tokens)
    assert torch.equal(loss, wanted)
    loss.backward()
    wanted.backward()
    named, head = dict(whole.named_parameters()), dict(parts[-1].named_parameters())["head.weight"].grad
    for number, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            theirs = named.get(name.replace("blocks.0.", f"blocks.{number}."))
            if name not in ("tokens.weight", "head.weight"):
                assert theirs is not None
                assert torch.equal(parameter.grad, theirs.grad), name
    tied = dict(parts[0].named_parameters())["tokens.weight"].grad + head
    torch.testing.assert_close(tied, named["tokens.weight"].grad)


def test_a_stage_hands_the_gradient_of_its_input_back(graphs: list[TrainGraph]) -> None:
    roles = [[port.role for port in graph.outputs] for graph in graphs]
    assert roles == [[Role.LOSS], [Role.LOSS, Role.GRADIENT], [Role.LOSS, Role.GRADIENT]]
    gradient = output_values(graphs[1].graph)[1]
    assert gradient is not None
    assert gradient.meta["val"].shape == (SIZES["batch"], SIZES["seq"], SIZES["width"])


def test_what_waits_is_what_is_saved_and_the_input_of_every_other(graphs: list[TrainGraph]) -> None:
    held = [waiting_bytes(graph, build_memory(graph)) for graph in graphs]
    tokens = 8 * SIZES["batch"] * SIZES["seq"]
    assert held == [
        2 * (build_memory(graphs[0]).saved_bytes + tokens),
        1 * (build_memory(graphs[1]).saved_bytes + STREAM),
        0,
    ]


def test_judge_names_a_layout_that_forgets_the_inputs(graphs: list[TrainGraph]) -> None:
    planned = search.run(copied(graphs[1]).replace(in_flight=100), Options(profile="cpu"))
    layout = planned.graph.layout
    assert layout is not None
    check_layout(planned.graph)
    least = layout.needed_bytes - 99 * STREAM
    with pytest.raises(VerifyError, match=rf"above the {least} that the layout says"):
        check_layout(planned.graph.replace(layout=dataclasses.replace(layout, needed_bytes=least)))


def test_each_stage_is_planned_as_if_alone(every: tuple[StagePlan, ...]) -> None:
    assert [each.stage.in_flight for each in every] == [each.plan.in_flight for each in every] == [3, 2, 1]
    assert [each.stage.number for each in every] == [0, 1, 2]
    assert all(each.seconds > 0 for each in every)
    assert [each.plan.fixed_bytes[SUMS] for each in every] == [each.plan.fixed_bytes["parameter"] for each in every]
    assert all("accumulated gradients" in each.plan.headline for each in every)
    alone = CliRunner().invoke(app, ["plan", "gpt", *words(), "--mesh", "pp=3", "--stage", "1", "--json"])
    assert alone.exit_code == 0, alone.output
    printed, same = json.loads(alone.stdout), json.loads(json.dumps(every[1].to_dict()))
    fields = printed.keys() - {"seconds", "fragmentation"}
    assert {key: printed[key] for key in fields} == {key: same[key] for key in fields}


def words() -> list[str]:
    sizes = [text for key, value in SIZES.items() for text in (f"--{key}", str(value))]
    return [*sizes, "--set", "dropout=0.0", "--option", PROFILE[0]]


@pytest.mark.parametrize("fits", [True, False])
def test_the_command_line_shows_all_stages_and_the_fullest(
    every: tuple[StagePlan, ...], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = fullest(every)
    assert most.plan.total_bytes == max(each.plan.total_bytes for each in every)
    shown = tuple(dataclasses.replace(each, fits=fits or each is most) for each in every)
    monkeypatch.setattr(request, "stages", lambda asked, say: shown)
    result = CliRunner().invoke(app, ["plan", "gpt", *words(), "--mesh", "pp=3", "--stage", "all"])
    assert result.exit_code == (0 if fits else 2), result.output
    (line,) = [line for line in result.output.splitlines() if "fullest" in line]
    assert line.split()[0] == str(most.stage.number)
    assert format_bytes(most.plan.total_bytes) in line
    assert result.output.count("does not fit") == (0 if fits else 2)
    assert f"stage {most.stage.number} of pp=3, 1 of 3 layers, has {most.stage.in_flight} micro" in result.output


@pytest.mark.thorough
def test_a_budget_is_each_stages_own() -> None:
    result = CliRunner().invoke(
        app, ["plan", "gpt", *words(), "--mesh", "pp=3", "--stage", "all", "--json", "--memory-budget", "700000"]
    )
    rows = json.loads(result.stdout)
    assert result.exit_code == (0 if all(row["fits"] for row in rows) else 2)
    assert all((row["needed_bytes"] <= 700_000) is row["fits"] for row in rows)


def test_roamc_plan_takes_the_layers_of_a_stage() -> None:
    layers, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), torch.zeros(256, 16).requires_grad_()
    plans = [roamc.plan(layers, x, mesh={"pp": 4}, stage=stage, profile="cpu") for stage in (0, 2, 3)]
    assert [plan.in_flight for plan in plans] == [4, 2, 1]
    assert plans[0].waiting_bytes == 3 * plans[1].waiting_bytes > 0 == plans[2].waiting_bytes
    assert any("stage 2 of pp=4 has 2 micro-batches in flight (each waiting one" in note for note in plans[1].notes)
    whole = {"loss_fn": lambda model, x: model(x).sum(), "optimizer": torch.optim.SGD(layers.parameters())}
    step = roamc.plan(layers, x, mesh="pp=4", stage=1, profile="cpu", **whole)
    assert step.in_flight == 3


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: stage_of(8, 8), "there is no stage 8: pp=8 has stages 0 to 7"),
        (lambda: stage_of(8, -1), "there is no stage -1: pp=8 has stages 0 to 7"),
        (lambda: stage_of(1, 1), "there is no stage 1: pp=1 has one stage, 0"),
        (lambda: workload_of(request_of(3)), "there is no stage 3"),
        (lambda: workload_of(request_of(1, target="bert", sizes={}, sets=())), "stage 1 needs a built-in model"),
        (lambda: stages(request_of(None, mesh="tp=2")), "needs a mesh of several stages"),
        (lambda: roamc.plan(nn.Linear(2, 2), torch.zeros(2, 2), mesh="pp=2"), "the number of the stage, stage=0 to 1"),
        (lambda: roamc.plan(nn.Linear(2, 2), torch.zeros(2, 2), mesh="pp=2", stage=2), "there is no stage 2"),
        (lambda: roamc.plan(nn.Linear(2, 2), torch.zeros(2, 2), stage=1), "pp=1 has one stage, 0"),
    ],
)
def test_what_is_no_stage_is_refused_in_one_line(run: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as refused:
        run()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("plan", "--stage", "one"), "--stage takes the number of one stage, from 0, or all, not 'one'"),
        (("explain", "--stage", "all"), "--stage takes the number of one stage, from 0, not 'all'"),
        (("plan", "--stage", "all", "--save", "plan.json"), "--stage all plans each stage once"),
        (("plan", "--stage", "3"), "there is no stage 3: pp=3 has stages 0 to 2"),
    ],
)
def test_the_command_line_refuses_in_one_line(more: tuple[str, ...], said: str) -> None:
    command, *rest = more
    result = CliRunner().invoke(app, [command, "gpt", *words(), "--mesh", "pp=3", *rest])
    assert result.exit_code == 1
    assert result.output.startswith(f"error: {said}")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "vit"])
def test_a_stage_with_both_ends_says_so(name: str) -> None:
    (note,) = ends_note(settings_of(name), Stage(0, 2))
    assert "embedding, head and loss" in note
    assert not ends_note(settings_of(name), Stage())
    assert not ends_note(settings_of("gpt"), Stage(0, 2))
