"""Operators that change a shape in place are views in a captured step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import roamc
from roamc.capture.in_place_views import AS_VIEWS
from roamc.errors import CaptureError
from tests.end_to_end.cases import Apply
from tests.end_to_end.helpers import assert_steps_equal, noise, sgd, square


def reshaped(_: nn.Module, x: Tensor) -> Tensor:
    """Every operator of the table, some on a tensor that is read before and behind."""
    y = x * 2
    total = y.sum(0)
    y.unsqueeze_(0).transpose_(0, 1).squeeze_(1)
    y.unsqueeze_(2).squeeze_((2,)).t_().swapaxes_(0, 1).swapdims_(1, 0)
    flat = (y * 3).as_strided_((2, 4), (1, 2)).sum()
    kept = (y + 1).detach_().unsqueeze_(-1)
    return (kept.squeeze_().t() * y.t() + total * flat).unsqueeze_(0)[0]


def test_a_step_with_every_operator_equals_eager() -> None:
    step = assert_steps_equal(Apply(reshaped), square, sgd, [(noise(4, 8),)])
    targets = {str(node.target) for node in step.latest.executable.planned.graph.graph.nodes}
    assert not targets.intersection(map(str, AS_VIEWS))


def test_vmap_of_a_linear_equals_eager() -> None:
    assert_steps_equal(
        Apply(lambda m, x: torch.func.vmap(lambda row: m.last(row).tanh())(x)), square, sgd, [(noise(4, 8),)]
    )


def test_an_input_whose_shape_changes_is_refused() -> None:
    model = nn.Linear(8, 8)
    step = roamc.train_step(model, lambda m, x: m(x.unsqueeze_(0)).sum(), sgd(model))
    with pytest.raises(
        CaptureError, match=r"shape of one of its inputs in place \(unsqueeze_\); write x = x.unsqueeze"
    ):
        step(noise(4, 8))


@pytest.mark.parametrize("target", AS_VIEWS, ids=str)
def test_operator_and_view_take_the_same_arguments(target: torch.Tag) -> None:
    before, after = (
        [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
        for operator in (target, AS_VIEWS[target])
    )
    names = {"axis0": "dim0", "axis1": "dim1"}
    assert [(names.get(name, name), kind) for name, kind in before] == after
