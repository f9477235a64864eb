"""Two ranks on shards that do not have the same: an error on both, before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.end_to_end.ranks import run_ranks
from tests.parallel import Columns, Rows

SCRIPT = """
from tests.end_to_end.test_agreement import tried
for change in sys.argv[5:]:
    torch._dynamo.reset()
    print(f"[{rank}] {change}:", tried(sys.argv[4], change), flush=True)
"""
TOLD = {
    "own part": "",
    "batch": "another input primals_1 (float32 [4, 7, 8])",
    "weight of the norm": "another parameter ",
    "seed": "another state of random numbers on cpu",
    "size": "another plan (primals_1 is float32 [3, 7, 8], on rank 0 float32 [4, 7, 8])",
}
OF_A_STEP = {"learning rate": "another scalar group 0: lr"}
"""What rank 1 has in another way, and what both ranks are told."""

CASES = {
    "quick": ("roamc", "own part", "batch", "seed"),
    "all by optimize": ("optimize", *TOLD),
    "all": ("roamc", *TOLD),
    "a step": ("train_step", *OF_A_STEP),
}
"""Name to the way in and what is changed."""


class Tiny(nn.Module):
    """Two products that the ranks share, a norm and a dropout; ``model(x)`` is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = Columns(nn.Linear(8, 8)), Rows(nn.Linear(8, 8)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.down(self.up(x).relu()) + x), 0.5).square().mean()


def tried(way: str, change: str) -> str:
    """What a step gives in this rank, which differs from rank 0 by ``change`` if it is rank 1."""
    import torch.distributed as dist

    import roamc

    torch.manual_seed(0)
    model, x = Tiny(), torch.randn(4, 7, 8)
    if dist.get_rank() == 1:
        x = x + 1 if change == "batch" else x[:3] if change == "size" else x
        changed = {"weight of the norm": model.norm.weight, "own part": model.down.weight}.get(change)
        if changed is not None:
            changed.data += 1
    options: dict[str, Any] = {"strict": True, "shard": "sequence"}
    if way == "train_step":
        optimizer = torch.optim.SGD(model.parameters(), 0.2 if change == "learning rate" and dist.get_rank() else 0.1)
        try:
            return f"passed with {roamc.train_step(model, lambda model, x: model(x), optimizer, **options)(x)}"
        except roamc.RoamcError as error:
            return f"refused: {error}"
    compiled = (
        roamc.optimize(model, **options)
        if way == "optimize"
        else torch.compile(model, backend="roamc", options=options, dynamic=False)
    )
    torch.manual_seed(dist.get_rank() if change == "seed" else 7)
    try:
        loss = compiled(x)
    except roamc.RanksError as error:
        torch.manual_seed(7)
        return f"refused: {error}" + ("; passes with one seed" * (compiled(x) is not None) if change == "seed" else "")
    loss.backward()
    return f"passed with {loss.item()}, shards: {'reduce_scatter' in roamc.plans()[-1].to_json()}"


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_have_other_values_are_refused_on_all_ranks(case: str, tmp_path: Path) -> None:
    _, *changes = CASES[case]
    said = run_ranks(tmp_path, SCRIPT, 2, CASES[case])
    for change in changes:
        for rank in (0, 1):
            (line,) = [line for line in said.splitlines() if line.startswith(f"[{rank}] {change}: ")]
            wanted = {**TOLD, **OF_A_STEP}[change]
            if wanted:
                assert f"refused: Tiny is on several ranks, and rank 1 has {wanted}" in line, line
            else:
                assert "passed with" in line, line
                assert line.endswith("shards: True"), line
    assert said.count("; passes with one seed") == 2 * ("seed" in changes)


FAILING = """
from tests.end_to_end.test_agreement import trained_past_a_failure
for stage in ("capture", "plan", "emission"):
    for way in ("roamc", "train_step"):
        torch._dynamo.reset()
        print(f"[{rank}] {stage}, {way}:", trained_past_a_failure(stage, way), flush=True)
"""


def trained_past_a_failure(stage: str, way: str) -> str:
    """What a rank gets where ``stage`` fails on rank 1 alone."""
    import warnings
    from unittest import mock

    import torch.distributed as dist

    import roamc
    from roamc.capture import joint
    from roamc.errors import VerifyError
    from roamc.frontends import train_step
    from roamc.planning import search
    from roamc.runtime.program import Executable

    torch.manual_seed(0)
    model, twin, x = Tiny(), Tiny(), torch.randn(4, 7, 8)
    twin.load_state_dict(model.state_dict())
    owner: Any
    owner, name = {
        "capture": (train_step, "capture_step") if way == "train_step" else (joint, "stitch"),
        "plan": (search, "run"),
        "emission": (Executable, "__init__"),
    }[stage]
    right = getattr(owner, name)

    def failing(*args: Any, **named: Any) -> Any:
        if dist.get_rank() == 1:
            raise VerifyError("a planted fault")
        return right(*args, **named)

    with mock.patch.object(owner, name, failing), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if way == "train_step":
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            try:
                roamc.train_step(model, lambda model, x: model(x), optimizer, shard="sequence")(x)
            except roamc.RoamcError as error:
                return f"{type(error).__name__}: {error}"
        torch.manual_seed(7)
        loss = torch.compile(model, backend="roamc", options={"shard": "sequence"}, dynamic=False)(x)
        loss.backward()
    torch.manual_seed(7)
    wanted = torch.compile(twin, backend="aot_eager", dynamic=False)(x)
    wanted.backward()
    equal = all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]
    return f"equal: {equal}; " + "; ".join(str(warning.message) for warning in told)


@pytest.mark.thorough
def test_ranks_fall_back_or_raise_together(tmp_path: Path) -> None:
    said = run_ranks(tmp_path, FAILING, 2)
    for rank, stage in itertools.product((0, 1), ("capture", "plan", "emission")):
        (compiled,) = [line for line in said.splitlines() if line.startswith(f"[{rank}] {stage}, roamc: ")]
        assert "equal: True; roamc could not plan 'Tiny' and falls back to torch's aot_eager" in compiled, said
        (step,) = [line for line in said.splitlines() if line.startswith(f"[{rank}] {stage}, train_step: ")]
        for line in (compiled, step):
            assert ("a planted fault" if rank else "rank 1 could not plan ") in line, said
            assert "a planted fault" in line, said


class Parts(nn.Module):
    """The sum of :class:`Tiny` over the parts of a batch, which may have a weight and a term of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = Tiny()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        loss = torch.stack([self.tiny(x.float()) for x in batch["parts"]]).sum()
        loss = loss if batch["weight"] is None else loss * batch["weight"].sum()
        return loss + batch["more"].sum() if "more" in batch else loss


OTHERS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "no rows": lambda x: {"parts": [x[:0]]},
    "fewer rows": lambda x: {"parts": [x[:3]]},
    "one token": lambda x: {"parts": [x[:1, :1]]},
    "no tokens": lambda x: {"parts": [x[:, :0]]},
    "another dtype": lambda x: {"parts": [x.double()]},
    "no weight": lambda x: {"weight": None},
    "another key": lambda x: {"more": x},
    "two parts": lambda x: {"parts": [x, x]},
    "a set": lambda x: {"weight": {torch.ones(2)}},
}
"""What rank 1 has in another way than rank 0, by name."""

STEPS = """
from tests.end_to_end.test_agreement import steps_of
for change in sys.argv[5:]:
    torch._dynamo.reset()
    for number, said in enumerate(steps_of(sys.argv[4], change)):
        print(f"[{rank}] {change}, step {number}:", said, flush=True)
"""
STEPWISE = {
    "quick": ("train_step", "no rows", "a set"),
    "train_step": ("train_step", *OTHERS, "all: no rows"),
    "whole": ("whole", "no rows", "two parts", "all: no rows"),
    "optimize": ("optimize", *(change for change in OTHERS if change != "a set"), "all: no rows"),
    "roamc": ("roamc", "no rows", "two parts", "all: no rows"),
}
"""Name to the way in and what is changed."""


def steps_of(way: str, change: str) -> list[str]:
    """What a rank gets of four steps; in the first and in the third rank 1 has another batch, or all ranks have."""
    import torch.distributed as dist

    import roamc

    torch.manual_seed(0)
    model = Parts()
    options: dict[str, Any] = {"strict": True, "shard": "whole" if way == "whole" else "sequence"}
    call: Callable[[Any], Tensor]
    if way in ("train_step", "whole"):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        call = roamc.train_step(model, lambda model, batch: model(batch), optimizer, **options)
    elif way == "optimize":
        call = roamc.optimize(model, **options)
    else:
        call = torch.compile(model, backend="roamc", options=options, dynamic=False)
    said = []
    for number in range(4):
        torch.manual_seed(number)
        x = torch.randn(4, 7, 8)
        batch: dict[str, Any] = {"parts": [x], "weight": torch.ones(2)}
        if number % 2 == 0 and (dist.get_rank() == 1 or change.startswith("all: ")):
            batch |= OTHERS[change.removeprefix("all: ")](x)
        try:
            loss = call(batch)
            if loss.requires_grad:
                loss.backward()
            said.append(f"passed with {loss.item()}")
        except Exception as error:
            kind = getattr(error, "inner_exception", error)
            said.append(f"refused: {type(kind).__name__}: {str(kind).splitlines()[0]}")
            torch.compiler.reset()
    return said


@pytest.mark.parametrize("case", STEPWISE)
def test_ranks_with_other_batches_are_refused_at_any_step_and_go_on(case: str, tmp_path: Path) -> None:
    """No rank waits for the timeout, and no refused step leaves ranks with other programs."""
    _, *changes = STEPWISE[case]
    said = run_ranks(tmp_path, STEPS, 2, STEPWISE[case])
    assert "timeout" not in said, said
    for change, number in itertools.product(changes, range(4)):
        first, second = (_line(said, f"[{rank}] {change}, step {number}: ") for rank in (0, 1))
        if number % 2 == 0 and not change.startswith("all: "):
            for line in (first, second):
                assert line.startswith("refused: "), said
                assert "rank 1 " in line or "not set" in line, said
            assert change != "no rows" or "is float32 [0, 7, 8] with 0 rows, on rank 0 float32 [4, 7, 8]" in first
        else:
            assert first == second, said
            assert first.startswith("passed with "), said


def _line(said: str, start: str) -> str:
    (line,) = [line for line in said.splitlines() if line.startswith(start)]
    return line.removeprefix(start)
