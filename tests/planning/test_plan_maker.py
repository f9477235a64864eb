"""A plan notes what eager takes without the model's outputs, where that is clearly less."""

from __future__ import annotations

from torch import Tensor, nn

import roamc
from roamc.units import format_bytes
from tests.end_to_end.helpers import noise, sgd, square

NOTE = "counts outputs to the end of backward"


class Wide(nn.Module):
    """A model whose output is as large as all else that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sin()


def test_a_large_output_is_noted_with_what_eager_takes_without_it() -> None:
    x = noise(512, 16)
    plan = roamc.plan(Wide(), x)
    (note,) = (note for note in plan.notes if NOTE in note)
    assert note.endswith(f"{format_bytes(plan.baseline_bytes - Wide()(x).nbytes)} without them")


def test_a_small_output_and_a_whole_step_are_not_noted() -> None:
    wide, narrow = Wide(), nn.Sequential(Wide(), nn.Linear(2048, 1))
    x = noise(512, 16)
    plans = [roamc.plan(narrow, x), roamc.plan(wide, x, loss_fn=square, optimizer=sgd(wide))]
    assert not [note for plan in plans for note in plan.notes if NOTE in note]
