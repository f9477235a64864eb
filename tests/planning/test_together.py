"""Ranks that plan together, as threads of one process; tests/end_to_end/test_agreement.py has processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roamc import budget, exchange
from roamc.errors import BudgetError, OtherStepError, PlanError, RanksError, VerifyError
from roamc.graph import SamePlan, TrainGraph
from roamc.options import parse_options
from roamc.passes.shard import choose
from roamc.planning import search, together
from roamc.planning.planned import Planned
from tests.graphs import captured_step

RANKS = 2
Failing = Callable[[int, Any], Exception | None]
"""From a rank and the plan that it is handed to the error that planning raises there."""
Groups = dict[str, tuple[tuple[int, ...], ...]]
"""Name of a group of ranks to the ranks of each of the groups that have this place in the mesh."""
ONE: Groups = {"group": ((0, 1),)}
GRID: Groups = {"rows": ((0, 1), (2, 3)), "columns": ((0, 2), (1, 3))}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def captured(rows: int = 4) -> TrainGraph:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return captured_step(model, (torch.zeros(rows, 8),), loss_of, torch.optim.SGD).graph


class Ranks:
    """Groups of threads in the place of ranks; counts what each decides by itself."""

    def __init__(
        self, patch: pytest.MonkeyPatch, failing: Failing = lambda rank, plan: None, groups: Groups = ONE
    ) -> None:
        self.local, self.groups = threading.local(), groups
        self.barriers = {
            (name, ranks): threading.Barrier(len(ranks), timeout=120) for name in groups for ranks in groups[name]
        }
        self.texts: dict[tuple[str, int], str] = {}
        self.decided: list[int] = []
        plan_alone = search.run

        def run(graph: TrainGraph, options: Any, plan: Any = None, *, quick: bool = False) -> Planned:
            error = failing(self.local.rank, plan)
            if error is not None:
                raise error
            if plan is None:
                self.decided.append(self.local.rank)
            return plan_alone(graph, options, plan)

        patch.setattr(choose, "groups", lambda graph: list(groups))
        patch.setattr(together, "ranks_in", lambda group: len(self.ranks_of(group)))
        patch.setattr(together, "rank_in", lambda group: self.ranks_of(group).index(self.local.rank))
        for module in (together, exchange):
            patch.setattr(module, "numbers_in", lambda group: [10 + rank for rank in self.ranks_of(group)])
            patch.setattr(module, "texts_of", self.exchange)
        patch.setattr(search, "run", run)
        patch.setattr(budget, "_free", lambda device: (1 << 20) * (4 - self.local.rank))

    def ranks_of(self, group: str) -> tuple[int, ...]:
        """The group with this name that the rank of this thread is in."""
        return next(ranks for ranks in self.groups[group] if self.local.rank in ranks)

    def exchange(
        self, group: str, text: str, name: str, what: str, advice: str, *, compiling: bool = True
    ) -> list[str]:
        ranks = self.ranks_of(group)
        self.texts[group, self.local.rank] = text
        self.barriers[group, ranks].wait()
        texts = [self.texts[group, rank] for rank in ranks]
        self.barriers[group, ranks].wait()
        return texts

    def plan(
        self,
        graphs: list[TrainGraph],
        of_second: dict[str, Any] | None = None,
        meeting: tuple[str, ...] = (),
        **options: Any,
    ) -> list[Planned | Exception]:
        """What each rank gets; the second has the options ``of_second`` besides."""

        def planned(rank: int) -> Planned | Exception:
            self.local.rank = rank
            try:
                own = (of_second or {}) if rank == 1 else {}
                return together.run(graphs[rank], parse_options({"shard": "sequence", **options, **own}), meeting)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(graphs)) as pool:
            return list(pool.map(planned, range(len(graphs))))


def test_first_rank_decides_and_the_others_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    first, second = ranks.plan([captured(), captured()], memory_budget="min")
    assert isinstance(first, Planned)
    assert isinstance(second, Planned)
    assert first.plan.to_json() == second.plan.to_json()
    assert ranks.decided == [0]
    assert first.graph.same_plan == second.graph.same_plan == (SamePlan("group", sums=False),)


def test_rank_with_another_graph_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    first, second = ranks.plan([captured(), captured(rows=5)])
    assert isinstance(first, Planned)
    assert isinstance(second, Planned)
    assert first.plan.fingerprint != second.plan.fingerprint
    assert sorted(ranks.decided) == [0, 1]
    assert first.graph.same_plan == second.graph.same_plan == (), "no collective runs again on one of them alone"


def test_plan_that_is_too_long_to_send_is_made_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "LARGEST", 10)
    ranks = Ranks(monkeypatch)
    first, second = ranks.plan([captured(), captured()])
    assert isinstance(first, Planned)
    assert isinstance(second, Planned)
    assert first.plan.to_json() == second.plan.to_json()
    assert sorted(ranks.decided) == [0, 1]


def test_device_that_has_least_free_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Ranks(monkeypatch).plan([captured(), captured()], memory_budget="device")
    limits = [planned.plan.budget_bytes for planned in plans if isinstance(planned, Planned)]
    assert limits == [int((3 << 20) * budget.MARGIN)] * RANKS


@pytest.mark.parametrize("failing", range(RANKS))
@pytest.mark.parametrize(
    ("error", "other"),
    [
        (VerifyError("a planted fault\nwith details"), RanksError),
        (BudgetError("too little room"), BudgetError),
        (ZeroDivisionError(), RanksError),
    ],
)
def test_no_rank_goes_on_where_one_fails(
    error: Exception, other: type[Exception], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = Ranks(monkeypatch, lambda rank, plan: error if rank == failing else None).plan([captured(), captured()])
    assert outcomes[failing] is error
    said = str(error).partition("\n")[0] or "ZeroDivisionError"
    assert type(outcomes[1 - failing]) is other
    assert str(outcomes[1 - failing]) == f"rank {10 + failing} could not plan Sequential: {said}"


def test_where_one_rank_may_fall_back_the_others_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [BudgetError("too little room"), VerifyError("a planted fault")]
    first, second = Ranks(monkeypatch, lambda rank, plan: errors[rank]).plan([captured(), captured()])
    assert type(first) is RanksError
    assert str(first) == "rank 11 could not plan Sequential: a planted fault"
    assert second is errors[1]


def test_decisions_that_do_not_hold_on_another_rank_stop_all(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PlanError("a planted difference")
    first, second = Ranks(monkeypatch, lambda rank, plan: refused if plan is not None else None).plan(
        [captured(), captured()]
    )
    assert second is refused
    assert str(first) == "rank 11 could not plan Sequential: a planted difference"


def test_plan_that_cannot_be_read_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_packed", lambda plan: "eJ")
    first, second = Ranks(monkeypatch).plan([captured(), captured()])
    assert type(first) is RanksError
    assert str(first).startswith("rank 11 could not plan Sequential: ")
    assert isinstance(second, Exception)
    assert "rank" not in str(second)


def test_budget_that_only_one_device_can_ask_for_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    there = budget._free

    def free(device: torch.device) -> int:
        if ranks.local.rank == 0:
            raise budget.OptionError("no such device")
        return there(device)

    monkeypatch.setattr(budget, "_free", free)
    first, second = ranks.plan([captured(), captured()], memory_budget="device")
    assert str(first) == "no such device"
    assert str(second) == "rank 10 could not plan Sequential: no such device"


def test_collectives_run_again_only_where_ranks_plan_every_graph_together(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Ranks(monkeypatch)
    by_tokens = group.plan([captured() for _ in range(RANKS)])
    at_first_step = group.plan([captured() for _ in range(RANKS)], meeting=("group",), shard="off")
    assert [[each.group for each in plan.graph.same_plan] for plan in by_tokens] == [["group"]] * RANKS
    assert [plan.graph.same_plan for plan in at_first_step] == [()] * RANKS
    assert at_first_step[0].plan.decisions == at_first_step[1].plan.decisions


def test_one_rank_of_a_grid_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Ranks(monkeypatch, groups=GRID)
    plans = grid.plan([captured() for _ in range(4)], memory_budget="min")
    assert grid.decided == [0]
    assert len({planned.plan.to_json() for planned in plans if isinstance(planned, Planned)}) == 1
    for planned in plans:
        assert isinstance(planned, Planned)
        assert [each.group for each in planned.graph.same_plan] == ["rows", "columns"]


def test_no_collective_of_a_grid_runs_again_where_one_rank_has_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Ranks(monkeypatch, groups=GRID)
    plans = grid.plan([captured(5 if rank == 3 else 4) for rank in range(4)], memory_budget="min")
    assert sorted(grid.decided) == [0, 3]
    assert [planned.graph.same_plan for planned in plans if isinstance(planned, Planned)] == [()] * 4
    assert len({planned.plan.to_json() for planned in plans[:3] if isinstance(planned, Planned)}) == 1


def test_collectives_of_groups_that_plan_every_graph_run_again_beside_those_that_meet_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid = Ranks(monkeypatch, groups={**GRID, "first step": GRID["columns"]})
    monkeypatch.setattr(choose, "groups", lambda graph: ["rows"])
    plans = grid.plan([captured() for _ in range(4)], meeting=("first step",))
    assert grid.decided == [0]
    for planned in plans:
        assert isinstance(planned, Planned)
        assert [each.group for each in planned.graph.same_plan] == ["rows"]


def test_least_free_memory_of_a_grid_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Ranks(monkeypatch, groups=GRID).plan([captured() for _ in range(4)], memory_budget="device")
    limits = [planned.plan.budget_bytes for planned in plans if isinstance(planned, Planned)]
    assert limits == [int((1 << 20) * budget.MARGIN)] * 4


@pytest.mark.parametrize("failing", range(4))
def test_no_rank_of_a_grid_goes_on_where_one_fails(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    error = VerifyError("a planted fault")
    grid = Ranks(monkeypatch, lambda rank, plan: error if rank == failing else None, groups=GRID)
    outcomes = grid.plan([captured() for _ in range(4)])
    assert outcomes[failing] is error
    for rank in {0, 1, 2, 3} - {failing}:
        assert type(outcomes[rank]) is RanksError
        assert "a planted fault" in str(outcomes[rank])


def test_a_plan_made_without_the_others_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    options = parse_options({"shard": "sequence", "memory_budget": "min"})
    ranks.local.rank = 1
    own = together.alone(captured(), options)
    first, _ = ranks.plan([captured(), captured()], memory_budget="min")
    assert isinstance(first, Planned)
    note = (
        "planned without asking the other ranks: a step of ranks 10, 11 takes this plan if all of them have the same "
        "graph and options"
    )
    assert own.plan.notes == (*first.plan.notes, note)
    assert own.plan.decisions == first.plan.decisions
    assert own.graph.same_plan == first.graph.same_plan


def test_a_graph_that_is_given_up_ends_no_wait_of_a_program_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    monkeypatch.setattr(exchange, "exchanged", lambda group, text, number: numbers.append(number) or [text])
    monkeypatch.setattr(exchange, "numbers_in", lambda group: [0])
    exchange.begin()
    exchange.texts_of("group", "text", "name", "plan it")
    exchange.texts_of("group", "text", "name", "compare its batch", compiling=False)
    assert numbers == [exchange._attempts.present, exchange.NOBODY]
    assert numbers[0] != numbers[1]


def test_ranks_with_other_options_are_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [captured(), captured()]
    for error in Ranks(monkeypatch).plan(graphs, {"memory_budget": "device", "profile": "cpu"}, memory_budget="min"):
        assert type(error) is RanksError
        assert str(error) == (
            "Sequential is on several ranks, and rank 11 plans it with memory_budget='device', rank 10 with 'min': "
            "give all ranks the same"
        )


def test_ranks_with_other_collectives_are_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with more layers on one rank would wait there for ever, whatever the graphs have of parts."""
    sums = [["all_reduce (4, 8)"] * (1 + rank) for rank in range(RANKS)]
    ranks = Ranks(monkeypatch)
    monkeypatch.setattr(together, "collectives_of", lambda graph, group: sums[ranks.local.rank])
    for error in ranks.plan([captured(), captured()], shard="whole"):
        assert type(error) is OtherStepError
        assert str(error) == (
            "Sequential is on several ranks, and rank 11 runs all_reduce (4, 8) where rank 10 runs nothing: give all "
            "ranks the same model and batch"
        )


def test_ranks_that_meet_at_their_first_step_alone_compare_no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "collectives_of", lambda graph, group: [str(id(graph))])
    plans = Ranks(monkeypatch).plan([captured() for _ in range(RANKS)], meeting=("group",), shard="whole")
    assert [type(plan) for plan in plans] == [Planned] * RANKS


def test_ranks_whose_model_sums_nothing_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "texts_of", lambda *_: json.loads("no rank is asked"))
    assert together.run(captured(), parse_options({"shard": "sequence"})).plan.arena_bytes > 0
