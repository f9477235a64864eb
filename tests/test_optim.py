"""CompAct in eager: its equations, its state, what it refuses, and that it is an optimizer like torch's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc import OptionError
from roamc.operators.projection import projection
from roamc.optim import CompAct


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8, bias=False), nn.LayerNorm(8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(step)
        x, target = torch.randn(12, 16), torch.randn(12, 8)
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()


def make(model: nn.Module, **settings: Any) -> CompAct:
    return CompAct(model.named_parameters(), **{"rank": 1 / 2, "every": 2, **settings})


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


def test_update_is_that_of_the_equations() -> None:
    model = model_of()
    optimizer = make(model, lr=0.1, weight_decay=0.5, seed=7, scale=0.3)
    w = model[0].weight.detach().double()
    first = second = torch.zeros(24, 8, dtype=torch.float64)
    for step in range(1, 6):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(12, 16)).square().sum().backward()
        gradient = model[0].weight.grad.double()
        optimizer.step()
        counter = (step - 1) // 2
        p = projection(counter, 7, 0, 16, 8, "gaussian", dtype=torch.float64, device=torch.device("cpu"))
        small = gradient @ p
        first, second = 0.9 * first + 0.1 * small, 0.999 * second + 0.001 * small.square()
        direction = first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        w = w * (1 - 0.1 * 0.5) - 0.1 * 0.3 * direction @ p.t()
        assert torch.allclose(model[0].weight.double(), w, atol=1e-5)


def test_all_columns_of_an_orthonormal_basis_are_adamw() -> None:
    model, other = model_of(), model_of()
    train(model, make(model, rank=1, basis="orthonormal", lr=4e-3, dense_lr=1e-3, weight_decay=0.1), 5)
    decays = [{"params": [p], "weight_decay": 0.4 if p.dim() == 2 else 0.1} for p in other.parameters()]
    train(other, torch.optim.AdamW(decays, lr=1e-3), 5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(weights(model), weights(other), strict=True))


def test_what_is_not_projected_has_the_bits_of_adamw() -> None:
    model, other = model_of(), model_of()
    train(model, make(model, dense=("0", "2", "3"), lr=1e-3, weight_decay=0.1), 5)
    train(other, torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.1, foreach=False), 5)
    assert same(model, other)


def test_states_have_the_shape_of_the_projected_gradient() -> None:
    model = nn.Sequential(nn.Embedding(5, 12), nn.Conv2d(1, 2, 3), nn.Linear(12, 6), nn.Linear(6, 6))
    named = [(f"{name}_of_head" if name == "3.weight" else name, p) for name, p in model.named_parameters()]
    named = [("embedding", p) if name == "0.weight" else (name, p) for name, p in named]
    optimizer = CompAct(named, rank=1 / 4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shapes = {name: tuple(optimizer.state[p]["exp_avg"].shape) for name, p in named}
    assert shapes.pop("2.weight") == (6, 3)
    assert shapes == {name: tuple(p.shape) for name, p in named if name != "2.weight"}


def test_columns_are_a_share_or_a_number() -> None:
    weight = ("w", nn.Parameter(torch.ones(30, 10)))
    for rank, columns in ((1 / 4, 2), (0.26, 3), (1, 10), (1.0, 10), (7, 7), (0.001, 1)):
        optimizer = CompAct([weight], rank=rank)
        weight[1].grad = torch.ones(30, 10)
        optimizer.step()
        assert optimizer.state[weight[1]]["exp_avg_sq"].shape == (30, columns)


@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy"])
def test_training_goes_on_with_the_same_bits(way: str) -> None:
    model = model_of()
    optimizer = make(model)
    train(model, optimizer, 3)
    if way == "state_dict":
        other = copy.deepcopy(model)
        again = make(other, seed=5, lr=1.0)
        again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    else:
        pair = (model, optimizer)
        other, again = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    train(model, optimizer, 3, first=3)
    train(other, again, 3, first=3)
    assert same(model, other)


def test_state_of_another_optimizer_or_rank_names_the_parameter() -> None:
    model = model_of()
    optimizer = make(model)
    for other in (
        torch.optim.AdamW(model.parameters()),
        torch.optim.Adam(model.named_parameters()),
        make(model, rank=1 / 4),
        make(model, dense=("0",)),
    ):
        train(model, other, 1)
        with pytest.raises(OptionError, match=r"0\.weight|2\.weight"):
            optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state


@pytest.mark.parametrize(
    "settings",
    [
        *({"rank": rank} for rank in (0, -1, True, 1.5, float("nan"), "4", 17)),
        *({"every": every} for every in (0, True, 1.5, -3)),
        *({"seed": seed} for seed in (-1, 2**32, 0.5)),
        *({"lr": lr} for lr in (-1.0, True, float("inf"))),
        *({"scale": 0}, {"betas": (0.9, 1.0)}, {"betas": 0.9}, {"eps": -1e-8}, {"weight_decay": -1}, {"dense_lr": -1}),
        *({"basis": "gauss"}, {"basis": None}, {"rank": torch.tensor(0.5)}),
        *({"dense": dense} for dense in (None, (3,), ("",), 5)),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(OptionError, match=name):
        make(model_of(), **settings)


@pytest.mark.parametrize("group", [{"lr": 1e-3}, [nn.Parameter(torch.ones(4, 4))]], ids=["no params", "no dict"])
def test_groups_without_parameters_are_refused(group: Any) -> None:
    optimizer = CompAct([nn.Parameter(torch.ones(4, 4))], dense=())
    with pytest.raises(OptionError, match="a parameter group is a dict with 'params', not "):
        optimizer.add_param_group(group)


def test_one_name_may_stand_for_itself_in_a_group() -> None:
    named = [(name, nn.Parameter(torch.ones(4, 4))) for name in ("head", "d")]
    optimizer = CompAct([{"params": named, "dense": "head"}])
    assert [len(group["params"]) for group in optimizer.param_groups if group["rank"]] == [1], "d is no part of 'd'"


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable", "amsgrad", "maximize", "differentiable"])
def test_settings_of_torchs_optimizers_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        make(model_of(), **{name: True})
    with pytest.raises(OptionError, match=name):
        CompAct([{"params": [*model_of().named_parameters()], name: True}])


def test_a_state_of_adamw_is_refused_where_nothing_is_projected_too() -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(OptionError, match=r"the loaded state is no CompAct's, whose moments of 0\.weight"):
        make(model).load_state_dict(other.state_dict())


def test_weights_that_lose_less_than_a_projection_takes_get_adamw() -> None:
    """Of 64 columns 16 stay: 3 of 48 that go in each row, for 16 * 64 elements of P, from 8 rows on."""
    model = nn.Sequential(nn.Linear(1, 64), nn.Linear(64, 7, bias=False), nn.Linear(64, 8, bias=False))
    projected, dense = make(model, rank=1 / 4).param_groups
    assert [tuple(each.shape) for each in projected["params"]] == [(8, 64)]
    assert [tuple(each.shape) for each in dense["params"]] == [(64, 1), (64,), (7, 64)]
    assert len(make(model, rank=1).param_groups[0]["params"]) == 3, "as asked"


def test_no_rank_is_of_groups_alone() -> None:
    named = [("a", nn.Parameter(torch.ones(16, 16)))]
    assert [group["rank"] for group in CompAct([{"params": named, "rank": None}]).param_groups] == [None]
    with pytest.raises(OptionError, match="rank=None must be a share"):
        CompAct(named, rank=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("streams", [None, [0]], ids=["without streams", "with one"])
def test_states_with_other_streams_than_weights_are_refused(streams: list[int] | None) -> None:
    optimizer = make(model_of())
    state = optimizer.state_dict()
    state["param_groups"][0].pop("streams")
    if streams is not None:
        state["param_groups"][0]["streams"] = streams
    with pytest.raises(OptionError, match=r"the loaded group of 0\.weight has 2 weights, and not as many streams"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_around_a_step_changes_no_update(dtype: torch.dtype) -> None:
    models = [model_of(), model_of()]
    for model, around in zip(models, (True, False), strict=True):
        optimizer = make(model)
        train(model, optimizer, 1)
        with torch.autocast("cpu", dtype, enabled=around):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def test_a_step_without_gradients_tells_of_none(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    optimizer = make(model)
    with caplog.at_level("INFO"):
        optimizer.step()
        assert "whole gradients" not in caplog.text
        train(model, optimizer, 1)
        assert "whole gradients" in caplog.text


def test_weights_need_names_to_be_left_out() -> None:
    with pytest.raises(OptionError, match="named_parameters"):
        CompAct(model_of().parameters())
    assert [group["rank"] for group in CompAct(model_of().parameters(), dense=()).param_groups] == [1 / 4, None]


def test_complex_weights_are_refused() -> None:
    with pytest.raises(OptionError, match=r"w.*complex64"):
        CompAct([("w", nn.Parameter(torch.ones(3, 4, dtype=torch.complex64)))])


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = CompAct(table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_frozen_and_tied_weights() -> None:
    model = model_of()
    model[0].weight.requires_grad_(False)
    tied = nn.Linear(16, 24)
    tied.weight = model[0].weight
    model.add_module("tied", tied)
    optimizer = make(model)
    before = model[0].weight.clone()
    train(nn.Sequential(*model[:4]), optimizer, 2)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state


def test_closures_schedulers_and_more_groups() -> None:
    model = model_of()
    optimizer = make(model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    more = nn.Linear(16, 8)
    optimizer.add_param_group({"params": [*more.named_parameters()], "rank": 4, "lr": 0.3})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = more(torch.ones(2, 16)).square().sum() + model(torch.ones(2, 16)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups][:2] == [0.05, 0.05]
    assert optimizer.state[more.weight]["exp_avg"].shape == (8, 4)
    streams = [stream for group in optimizer.param_groups for stream in group["streams"]]
    assert streams == [0, 1, 2]


def test_it_needs_no_generator() -> None:
    model = model_of()
    optimizer = make(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)


def test_half_precision_and_meta() -> None:
    model = model_of().to(torch.bfloat16)
    optimizer = make(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype is torch.bfloat16
    with torch.device("meta"):
        assert len(make(model_of()).param_groups) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"every": 0}, "every=0 must be a number of steps"),
        ({"seed": -1}, "seed=-1 must be an integer"),
        ({"basis": "x"}, "unknown basis 'x'"),
        ({"scale": -1.0}, "scale=-1.0 must be a number above 0"),
        ({"rank": 0.5}, r"rank=0.5 makes \[16, 8\]|of which rank=0.5 of its group makes \[16, 8\]"),
    ],
)
@pytest.mark.parametrize("planned", [False, True], ids=["eager", "train_step"])
def test_settings_that_are_changed_between_steps_are_checked(change: dict[str, Any], says: str, planned: bool) -> None:
    model, x = nn.Linear(16, 16), torch.randn(4, 16)
    optimizer = CompAct(model.named_parameters())
    step = roamc.train_step(model, lambda net, batch: net(batch).square().mean(), optimizer)

    def run() -> None:
        if planned:
            step(x)
            return
        model(x).square().mean().backward()
        optimizer.step()

    run()
    optimizer.param_groups[0].update(change)
    with pytest.raises(roamc.RoamcError, match=says):
        run()
