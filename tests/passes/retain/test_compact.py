"""Codec ``compact`` projects inputs of products: gradients of weights keep their mean, and all else its bits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roamc
from roamc.errors import OptionError, PlanError, VerifyError
from roamc.options import Options
from roamc.planning import search
from roamc.planning.plan import Plan
from tests.graphs import captured_step

WIDTH, ROWS = 64, 512
ROUTES = ("compile", "optimize", "train_step")


class Chain(nn.Module):
    """Products one after the other: all that waits is read by gradients of weights only, and products make it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def chain(width: int = WIDTH, rows: int = ROWS, layers: int = 8) -> tuple[Chain, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Chain(width, layers), torch.randn(4, rows // 4, width, requires_grad=True)


def stepper(model: nn.Module, x: Tensor, route: str, **options: Any) -> tuple[Callable[[], Tensor], list[Plan]]:
    """A function that makes one step and returns the loss, with gradients in ``.grad``, or in Adam's first moment."""
    options = {"memory_budget": "light", "strict": True, **options}
    if route == "train_step":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
        step = roamc.train_step(model, loss, optimizer, **options)

        def run() -> Tensor:
            optimizer.state.clear()
            value = step(x)
            for parameter in model.parameters():
                parameter.grad = optimizer.state[parameter]["exp_avg"] / (1 - 0.9)
            return value

        return run, [step.plan(x)]
    called: Any = model
    if route == "optimize":
        roamc.optimize(model, **options)
    else:
        called = torch.compile(model, backend="roamc", options=options, dynamic=False)

    def run_compiled() -> Tensor:
        model.zero_grad()
        x.grad = None
        value = loss(called, x)
        value.backward()
        return value.detach()

    run_compiled()
    return run_compiled, [roamc.plans()[-1]]


def errors(model: nn.Module, exact: nn.Module) -> dict[str, float]:
    """By parameter, how far its gradient is from the exact one, as a share of that."""
    pairs = zip(model.named_parameters(), exact.parameters(), strict=True)
    return {name: float((one.grad - other.grad).norm() / other.grad.norm()) for (name, one), other in pairs}  # type: ignore[operator]


@pytest.mark.parametrize("route", ROUTES)
def test_only_gradients_of_weights_change_by_what_the_rank_says(route: str) -> None:
    model, x = chain()
    exact = copy.deepcopy(model)
    exact_step, _ = stepper(exact, x, route)
    exact_loss = exact_step()
    exact_dx = x.grad
    step, (plan,) = stepper(model, x, route, codecs={"compact": {"rank": 1 / 4}})
    codes = plan.decisions["retain"]["codes"]
    assert len(codes) >= 5
    assert all(code[1] == "compact:rank=0.25" and code[3] * 4 == code[2] for code in codes)
    seen = []
    for _ in range(6):
        assert torch.equal(step(), exact_loss)
        assert route == "train_step" or torch.equal(x.grad, exact_dx)  # type: ignore[arg-type]
        shares = errors(model, exact)
        assert all(off < 1e-6 for name, off in shares.items() if "bias" in name)
        seen += [off for off in shares.values() if off > 1e-3]
    assert len(seen) == 6 * len(codes)
    assert math.sqrt(sum(off**2 for off in seen) / len(seen)) == pytest.approx(math.sqrt((WIDTH + 1) / 16), rel=0.1)


def test_mean_over_steps_is_the_exact_gradient() -> None:
    width, columns, steps = 16, 4, 2000
    model, x = chain(width, 64, layers=8)
    exact = copy.deepcopy(model)
    stepper(exact, x, "optimize")
    step, (plan,) = stepper(model, x, "optimize", codecs="compact")
    means = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for _ in range(steps):
        step()
        for name, parameter in model.named_parameters():
            means[name] += parameter.grad / steps  # type: ignore[operator]
    assert len(plan.decisions["retain"]["codes"]) >= 5
    for (name, mean), parameter in zip(means.items(), exact.parameters(), strict=True):
        off = (mean - parameter.grad).norm() / parameter.grad.norm()  # type: ignore[operator, union-attr]
        assert off <= 1.2 * math.sqrt((width + 1) / (steps * columns)), name


def test_users_generator_does_not_move_and_no_two_programs_project_alike() -> None:
    """As those of one model for two batch shapes, whose steps take turns."""
    gradients = []
    for _ in range(2):
        model, x = chain()
        step, _ = stepper(model, x, "optimize", codecs="compact:rank=1/8:basis=orthonormal")
        state = torch.get_rng_state()
        step()
        assert torch.equal(torch.get_rng_state(), state)
        gradients.append([parameter.grad for parameter in model.parameters()])
    weights = [pair for pair in zip(*gradients, strict=True) if pair[0].dim() == 2]
    assert sum(not torch.equal(*pair) for pair in weights) >= 5


def test_without_pass_count_or_with_all_columns_nothing_is_projected() -> None:
    for options in ({"codecs": "compact", "disable": "count"}, {"codecs": "compact:rank=1"}):
        model, x = chain()
        _, (plan,) = stepper(model, x, "optimize", **options)
        assert not plan.decisions["retain"]["codes"]


def test_readers_of_another_kind_keep_their_input() -> None:
    """What an activation's slope reads is not projected, and neither is what an embedding's own weight multiplies."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up, self.down = nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            h = self.down(torch.tanh(self.up(self.table(x))))
            return F.linear(h, self.table.weight).logsumexp(-1)

    torch.manual_seed(0)
    graph = captured_step(Tied(), (torch.randint(0, 32, (512,)),), loss, torch.optim.SGD).graph
    plan = search.run(graph, search.options_of({"memory_budget": "light", "codecs": "compact"})).plan
    assert not plan.decisions["retain"]["codes"]


def graph() -> Any:
    model, x = chain()
    return captured_step(model, (x.detach(),), loss, torch.optim.SGD).graph


def test_plan_names_the_rank_and_is_refused_where_the_options_do_not() -> None:
    options = search.options_of({"memory_budget": "light", "codecs": "compact:rank=1/8"})
    plan = Plan.from_json(search.run(graph(), options).plan.to_json())
    assert {code[1] for code in plan.decisions["retain"]["codes"]} == {"compact:rank=0.125"}
    assert search.run(graph(), options, plan).plan.decisions == plan.decisions
    for other in (Options(), search.options_of({"codecs": "compact"})):
        with pytest.raises(VerifyError, match=r"is kept by codec 'compact:rank=0.125', which has an error of 2.8"):
            search.run(graph(), other, plan)


def broken() -> Iterator[tuple[str, str]]:
    yield "compact:rank=0", "the rank of compact is a share of columns above 0 and up to 1.*, not '0'"
    yield "compact:rank=1.5", "not '1.5'"
    yield "compact:rank=True", "not 'True'"
    yield "compact:rank=nan", "not 'nan'"
    yield "compact:rank=-1/4", "not '-1/4'"
    yield "compact:basis=gauss", "the basis of compact is gaussian or orthonormal, not 'gauss'; did you mean"
    yield "compact:columns=4", "compact has no setting 'columns'"
    yield "compact:rank=4:rank=8", "gives 'compact' a setting twice"
    yield "compact,compact:rank=8", "'compact' has two settings, 'compact:rank=0.25' and 'compact:rank=8'; give one"


@pytest.mark.parametrize(("name", "says"), [*broken()])
def test_settings_out_of_range_are_refused(name: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        search.options_of({"codecs": name})


def test_settings_may_stand_in_a_dict_and_are_checked_in_plans() -> None:
    assert search.options_of({"codecs": {"compact": {"rank": 8}}}).codecs == ("compact:rank=8",)
    assert search.options_of({"codecs": {"compact": None}}).codecs == ("compact:rank=0.25",)
    for wrong in ({"compact": 0.25}, {"compact": {"rank": True}}, ["tempo", {"compact": {}}]):
        with pytest.raises(OptionError, match="codecs"):
            search.options_of({"codecs": wrong})
    plan = search.run(graph(), search.options_of({"memory_budget": "light", "codecs": "compact"})).plan
    text = plan.to_json().replace("compact:rank=0.25", "compact:rank=0.0")
    with pytest.raises(PlanError, match="the rank of compact"):
        search.run(graph(), search.options_of({"codecs": "compact"}), Plan.from_json(text))


def test_exact_codes_are_written_where_nothing_is_projected() -> None:
    """The program counts its steps all the same: the solver's sequence has that operator."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh())))
    step = captured_step(model, (torch.randn(256, 64),), loss, torch.optim.SGD).graph
    plan = search.run(step, search.options_of({"memory_budget": "light", "codecs": "compact:rank=64"})).plan
    assert {code[1] for code in plan.decisions["retain"]["codes"]} == {"bits"}
