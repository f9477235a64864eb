"""Heads and losses on two ranks: every rank has the head, or its own classes of it; loss and steps of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.end_to_end.ranks import run_ranks
from tests.parallel import BOUND, worst_error
from tests.passes.test_shard_loss import LOSSES, VOCABULARY, Model, tokens_and_labels

Case = tuple[str, str, str, bool]
"""Loss, which tokens have no label, way in, whether the head is split by class."""

CASES: dict[str, tuple[Case, ...]] = {
    "quick": (("class weights", "shards", "train_step", True),),  # test_shard.py has whole heads
    "all": tuple(
        (loss, places, way, by_class)
        for loss, places in (("class weights", "borders"), ("smoothed", "shards"), ("by hand", "borders"))
        for way in ("roamc", "optimize", "train_step")
        for by_class in (False, True)
    ),
}
RATE = 1.0
SCRIPT = """
from tests.end_to_end import test_shard_loss as tests
for number, case in enumerate(tests.CASES[sys.argv[4]]):
    torch._dynamo.reset()
    torch.save(tests.trained(*case), f"{folder}/{number}.{rank}.pt")
"""
BEYOND = """
from tests.end_to_end import test_shard_loss as tests
for line in tests.raised(sys.argv[4], sys.argv[5] == "True"):
    print(line)
"""


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(tokens, labels)
    return loss


def on_ranks(name: str, by_class: bool) -> Model:
    """The part that a rank has of the model, as DTensors."""
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    head = {"head": ColwiseParallel(output_layouts=Replicate())} if by_class else {}
    model = Model(LOSSES[name])
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan | head)
    return model


def trained(name: str, places: str, way: str, by_class: bool) -> tuple[float, dict[str, Tensor], str]:
    """Loss, whole parameters after a step, and plan, in each of the ranks."""
    import roamc

    options: dict[str, Any] = {"strict": True, "shard": "sequence"}
    model, inputs = on_ranks(name, by_class), tokens_and_labels(places)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    if way == "train_step":
        step = roamc.train_step(model, loss_of, optimizer, **options)
        loss, plan = float(step(*inputs).detach()), step.plans[-1]
    else:
        compiled = (
            roamc.optimize(model, **options)
            if way == "optimize"
            else torch.compile(model, backend="roamc", options=options, dynamic=False)
        )
        value = compiled(*inputs)
        value.backward()
        optimizer.step()
        loss, plan = float(value.detach()), roamc.plans()[-1]
    held = {key: tensor.detach() for key, tensor in model.named_parameters()}
    whole = {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in held.items()}
    return loss, whole, plan.to_json()


def of_one_rank(name: str, places: str) -> tuple[float, dict[str, Tensor]]:
    model = Model(LOSSES[name])
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loss = loss_of(model, *tokens_and_labels(places))
    loss.backward()
    optimizer.step()
    return float(loss.detach()), {key: tensor.detach() for key, tensor in model.named_parameters()}


def raised(name: str, by_class: bool) -> list[str]:
    """What a model says, in each of the ranks, to a label and to a token that it does not have, which one rank's part
    of the batch holds; it goes on with the same loss.
    """
    import roamc

    model = roamc.optimize(on_ranks(name, by_class), shard="sequence")
    tokens, labels = tokens_and_labels("borders")
    loss, said = float(model(tokens, labels).detach()), []
    for at in (1, 0):
        batch = [tokens.clone(), labels.clone()]
        batch[at].view(-1)[1] = VOCABULARY + 3
        try:
            model(*batch)
        except IndexError as error:
            said.append(str(error))
    assert float(model(tokens, labels).detach()) == loss
    assert "are split among 2 ranks" in str(roamc.plans()[-1].notes)
    return said


@pytest.mark.parametrize(
    ("name", "by_class"), [("shifted", False), pytest.param("class weights", True, marks=pytest.mark.thorough)]
)
def test_a_label_or_token_that_names_nothing_ends_the_step_on_all_ranks(
    name: str, by_class: bool, tmp_path: Path
) -> None:
    said = run_ranks(tmp_path, BEYOND, 2, [name, str(by_class)], seconds=100)
    for at, text in ((1, "Target 23 is out of bounds."), (0, "index out of range in self")):
        batch = [part.clone() for part in tokens_and_labels("borders")]
        batch[at].view(-1)[1] = VOCABULARY + 3
        with pytest.raises(IndexError, match=text):
            Model(LOSSES[name])(*batch)
        assert said.count(text) == 2


@pytest.mark.parametrize("which", [pytest.param("quick"), pytest.param("all", marks=pytest.mark.thorough)])
def test_steps_are_those_of_one_rank(which: str, tmp_path: Path) -> None:
    run_ranks(tmp_path, SCRIPT, 2, [which])
    for number, (name, places, way, by_class) in enumerate(CASES[which]):
        said = f"{name} by {way}, labels left out at {places}, head split by class: {by_class}"
        (loss, whole, plan), (other, same, _) = [torch.load(tmp_path / f"{number}.{rank}.pt") for rank in range(2)]
        wanted, parameters = of_one_rank(name, places)
        assert other == loss, said
        assert all(torch.equal(same[key], tensor) for key, tensor in whole.items()), said
        assert abs(loss - wanted) <= BOUND * abs(wanted), said
        assert worst_error(whole, parameters) <= BOUND, said
        assert ("stay split by class" in plan) == by_class, said
        assert "are split among 2 ranks" in plan, said
