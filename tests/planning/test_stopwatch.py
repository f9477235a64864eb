"""The times of a search, by stage."""

from __future__ import annotations

import time

import torch
from torch import nn

import roamc
from roamc.planning.stopwatch import Stopwatch


def test_stages_within_others_count_for_themselves() -> None:
    watch = Stopwatch()
    with watch.of("outer"):
        time.sleep(0.05)
        with watch.of("inner"):
            time.sleep(0.2)
        with watch.of("outer"):
            pass
    assert set(watch.seconds) == {"outer", "inner"}
    assert watch.seconds["inner"] >= 0.2
    assert 0.05 <= watch.seconds["outer"] < watch.seconds["inner"]


def test_a_plan_under_a_budget_names_all_that_the_search_did() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()), torch.ones(512, 64)
    plan = roamc.plan(model, x, memory_budget="min")
    assert {"prepare", "retain", "other plans", "other"} <= set(plan.seconds)
    assert min(plan.seconds.values()) >= 0
