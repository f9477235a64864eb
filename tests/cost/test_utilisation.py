"""MFU and HFU of planned steps: what they count, and for which plans they are said."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roamc.cost import load_profile, step_seconds
from roamc.cost.utilisation import all_products, model_products, utilisation
from roamc.frontends.workload import Workload, capture
from roamc.graph import TrainGraph
from roamc.options import parse_options
from roamc.planning import search

ROWS, WIDTH, INNER = 64, 32, 128
FORWARD = 2 * 2 * ROWS * WIDTH * INNER
A100 = load_profile(profile="a100")


class Layer(nn.Module):
    """Two products with dropout between them, run again in backward where asked for."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.up, self.down, self.again = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.again else self.run(x)  # type: ignore[no-any-return]

    def run(self, x: Tensor) -> Tensor:
        result: Tensor = torch.sigmoid(self.down(torch.dropout(torch.relu(self.up(x)), 0.1, True)))
        return result


def graph_of(again: bool, *, step: bool) -> TrainGraph:
    with torch.device("meta"):
        model = nn.Sequential(Layer(again), Layer(again)).bfloat16()
        x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    loss = (lambda model, x: model(x).sum()) if step else None
    return capture(Workload("layers", model, (x,), loss), device=torch.device("cuda"))


@pytest.mark.parametrize(("step", "model", "hardware"), [(False, 6.0, 7.5), (True, 6.0, 8.0)])
def test_what_checkpoints_run_again_is_no_product_of_the_model(step: bool, model: float, hardware: float) -> None:
    """Of a layer's two products, the last one need not run again; in a whole step both do."""
    plain, again = (graph_of(again, step=step) for again in (False, True))
    assert all_products(plain) == model_products(plain) == {"bfloat16": model * FORWARD}
    assert model_products(again) == {"bfloat16": model * FORWARD}
    assert all_products(again) == {"bfloat16": hardware * FORWARD}


def test_utilisation_is_flops_at_the_peak_rate_over_predicted_seconds() -> None:
    graph = graph_of(True, step=False)
    used = utilisation(graph, model_products(graph), A100)
    assert used is not None
    assert used.seconds == step_seconds(graph, A100)
    assert used.mfu == pytest.approx(6 * FORWARD / 312e12 / used.seconds)
    assert used.hfu == pytest.approx(7.5 * FORWARD / 312e12 / used.seconds)


@pytest.mark.parametrize("peaks", [{}, {"float32": 1e12}])
def test_without_the_peak_rate_of_a_product_there_is_no_utilisation(peaks: dict[str, float]) -> None:
    graph = graph_of(False, step=False)
    assert utilisation(graph, model_products(graph), dataclasses.replace(A100, peaks=peaks)) is None


@pytest.mark.parametrize(("device", "said"), [("cuda", 1), ("cpu", 0)])
def test_plans_for_a_gpu_say_their_utilisation(device: str, said: int) -> None:
    with torch.device("meta"):
        workload = Workload("one", nn.Linear(WIDTH, WIDTH), (torch.zeros(ROWS, WIDTH),))
    graph = capture(workload, device=torch.device(device))
    plan = search.run(graph, parse_options({"profile": "a100" if device == "cuda" else "cpu"})).plan
    assert sum(note.startswith("utilisation: MFU ") for note in plan.notes) == said
