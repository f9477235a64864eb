"""``train_step`` of models that ranks hold in parts: the steps of eager on these ranks, and those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.end_to_end.helpers import assert_same
from tests.end_to_end.ranks import run_ranks
from tests.parallel import BOUND, _gathered, batch, build, worst_error

Case = tuple[str, str, str, str | None, str, float | None]
"""Model, how it is split, optimizer, budget, option ``shard``, clipping."""

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
}
EAGER: dict[str, tuple[Case, ...]] = {
    "quick": (("gpt", "parallelize_module", "adamw", "70%", "off", None),),
    "all": (
        ("bert", "parallelize_module", "sgd", None, "off", None),
        ("llama", "plain collectives", "adamw", "min", "off", None),
    ),
}
ONE_RANK: tuple[Case, ...] = (
    *(("gpt", "parallelize_module", "sgd", budget, "off", 0.1) for budget in (None, "80%", "min")),
    *(("bert", "parallelize_module", "sgd", budget, "sequence", 0.1) for budget in (None, "80%")),
    *(("llama", "plain collectives", "sgd", budget, "sequence", None) for budget in (None, "min")),
)
STEPS = 3
SCRIPT = """
from tests.end_to_end import test_parallel_steps as tests
if sys.argv[4] != "one rank":
    for case in tests.EAGER[sys.argv[4]]:
        tests.compare_with_eager(*case)
else:
    for number, case in enumerate(tests.ONE_RANK):
        torch.save(tests.trained(*case), f"{folder}/{number}.{rank}.pt")
"""


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens)
    return loss


def steps(
    kind: str, split: str, optimizer: str, budget: str | None, shard: str, clip: float | None
) -> tuple[nn.Module, torch.optim.Optimizer, list[float], str]:
    """Model, optimizer and losses after planned steps in each of the ranks, and the plan."""
    import roamc
    from tests.parallel import SPLITS

    options: dict[str, Any] = {"strict": True, "shard": shard, **({"memory_budget": budget} if budget else {})}
    model = SPLITS[split](build(kind, layers=1))
    updates = OPTIMIZERS[optimizer](model)
    step = roamc.train_step(model, loss_of, updates, clip_grad_norm=clip, **options)
    torch.manual_seed(0)
    losses = [step(batch()).item() for _ in range(STEPS)]
    return model, updates, losses, step.plans[-1].to_json()


def compare_with_eager(kind: str, split: str, optimizer: str, budget: str | None, shard: str, clip: None) -> None:
    """In each of the ranks: planned steps have the bits of eager's, and parameters and state are what they were."""
    from tests.parallel import SPLITS

    model, updates, losses, _ = steps(kind, split, optimizer, budget, shard, clip)
    twin = SPLITS[split](build(kind, layers=1))
    reference = OPTIMIZERS[optimizer](twin)
    assert losses == eager_losses(twin, reference)
    held, eager = all_of(model, updates), all_of(twin, reference)
    assert [isinstance(tensor, DTensor) for tensor in held.values()] == [isinstance(t, DTensor) for t in eager.values()]
    for name, tensor in held.items():
        assert_same(own_part(tensor), own_part(eager[name]), f"{kind}, {split}: {name}")


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = [(f"{name}: {key}", t) for name, p in model.named_parameters() for key, t in optimizer.state[p].items()]
    return {**model.state_dict(), **dict(states)}


def own_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(*case: Any) -> tuple[list[float], dict[str, Tensor], str]:
    """Losses, whole parameters and plan after planned steps, in each of the ranks."""
    model, _, losses, plan = steps(*case)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if case[1] == "plain collectives":
        named = {name: _gathered(name, tensor) for name, tensor in named.items()}
    return losses, {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in named.items()}, plan


def of_one_rank(kind: str, optimizer: str, clip: float | None) -> tuple[list[float], dict[str, Tensor]]:
    model = build(kind, layers=1)
    losses = eager_losses(model, OPTIMIZERS[optimizer](model), clip)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def eager_losses(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None = None) -> list[float]:
    """Train ``model`` in eager, and return the losses."""
    torch.manual_seed(0)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, batch())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("which", [pytest.param("quick"), pytest.param("all", marks=pytest.mark.thorough)])
def test_steps_are_those_of_eager_on_the_same_ranks(which: str, tmp_path: Path) -> None:
    run_ranks(tmp_path, SCRIPT, 2, [which])


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_are_those_of_one_rank_and_budgets_change_no_bit(ranks: int, tmp_path: Path) -> None:
    run_ranks(tmp_path, SCRIPT, ranks, ["one rank"])
    kept: dict[tuple[str, str], dict[str, Tensor]] = {}
    for number, (kind, split, optimizer, budget, shard, clip) in enumerate(ONE_RANK):
        said = f"{kind}, {split}, budget {budget}, shard {shard}"
        results = [torch.load(tmp_path / f"{number}.{rank}.pt") for rank in range(ranks)]
        losses, whole, plan = results[0]
        assert ("reduce_scatter" in plan) == (shard == "sequence"), said
        for other, parameters, _ in results[1:]:
            assert other == losses, said
            assert_same(parameters, whole, said)
        wanted, parameters = of_one_rank(kind, optimizer, clip)
        assert losses == pytest.approx(wanted, rel=BOUND), said
        assert worst_error(whole, parameters) <= BOUND, said
        assert_same(whole, kept.setdefault((kind, split), whole), f"{said}: another budget, other bits")
