"""Every setting of SGD, Adam and AdamW in torch's own optimizer database: train_step against eager, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import roamc
from tests.end_to_end.helpers import assert_same, state_of, tensors_of
from tests.sweeps.databases import database

SUPPORTED = (SGD, Adam, AdamW)
REFUSED = ("capturable", "differentiable")
FORMS: tuple[dict[str, bool], ...] = ({"foreach": False}, {"foreach": True}, {"fused": True})
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
EXTRA: dict[type, list[dict[str, Any]]] = {
    SGD: [
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "nesterov": True, "maximize": True, "lr": 0.1},
        {"momentum": 0.9, "lr": torch.tensor(0.01)},
    ],
    Adam: [{"weight_decay": 0.1, "amsgrad": True, "maximize": True}, {"lr": torch.tensor(0.01)}],
    AdamW: [
        {"weight_decay": 0.0, "betas": (0.5, 0.7), "eps": 1e-3},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    ],
}
"""What the database has no entry for."""

INFOS = {info.optim_cls: info for info in database("optimizer")}


def settings_of(info: Any) -> list[dict[str, Any]]:
    """The database's settings, those for CUDA too, each in every form that torch takes."""
    listed = [entry.kwargs for device in ("cpu", "cuda") for entry in info.optim_inputs_func(device=device)]
    unique = {str(settings): settings for settings in [*listed, *EXTRA[info.optim_cls]]}
    variants = [{**settings, **form} for settings in unique.values() for form in FORMS]
    return [settings for settings in variants if _taken(info.optim_cls, settings)]


def _taken(kind: type, settings: dict[str, Any]) -> bool:
    try:
        kind([torch.zeros(1, requires_grad=True)], **settings)
    except (ValueError, RuntimeError):
        return False
    return True


class Shapes(nn.Module):
    """Parameters of all sorts of shapes, strides and gradients."""

    def __init__(self, dtype: torch.dtype, small: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        shapes = [(), (1,), (2,), (3,), (2, 3), (1, 1), (0,), (0, 3), *([] if small else [(37,), (8, 5)])]
        values = [torch.randn(shape, dtype=dtype) for shape in shapes]
        values += [torch.randn(4, 3, dtype=dtype).t(), torch.randn(2, 3, 2, dtype=dtype).permute(2, 0, 1)]
        self.values = nn.ParameterList(values)

    def forward(self, x: Tensor) -> Tensor:
        """One number; a transposed parameter once gets its gradient in rows."""
        terms = [(value * x).sin().sum() for value in self.values]
        return torch.stack([*terms, (self.values[-2].contiguous().view(-1) * x).exp().sum()]).sum()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def assert_as_eager(kind: type[torch.optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Three steps: parameters and every entry of the state."""
    # torch's fused SGD in 16 bits reads memory that it never wrote, from 16 elements on: eager differs from itself.
    small = kind is SGD and settings.get("fused", False) and dtype.itemsize == 2
    model, twin = Shapes(dtype, small), Shapes(dtype, small)
    # foreach changes speed only: train_step runs the single-tensor form, and that is the reference.
    plain = {**settings, "foreach": False} if settings.get("foreach") else settings
    optimizer = kind(model.parameters(), **copy.deepcopy(settings))
    reference = kind(twin.parameters(), **copy.deepcopy(plain))
    step = roamc.train_step(model, loss, optimizer, strict=True)
    for number in range(3):
        x = torch.tensor(0.3 + 0.2 * number, dtype=dtype)
        step(x)
        reference.zero_grad()
        loss(twin, x).backward()
        reference.step()
        assert_same(tensors_of(model), tensors_of(twin), f"parameters after step {number}")
        assert_same(state_of(optimizer), state_of(reference), f"state after step {number}")


def name_of(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={setting}" for key, setting in value.items())
    return value.__name__ if isinstance(value, type) else str(value)


def every() -> tuple[list[tuple[type, dict[str, Any]]], list[tuple[type, dict[str, Any]]]]:
    """Kinds and settings that train_step takes, and those that it refuses."""
    pairs = [(kind, settings) for kind in SUPPORTED for settings in settings_of(INFOS[kind])]
    refused = [case for case in pairs if _is_refused(case[1])]
    return [case for case in pairs if case not in refused], refused


def _is_refused(settings: dict[str, Any]) -> bool:
    tensors = any(isinstance(beta, Tensor) for beta in settings.get("betas", ()))
    return any(settings.get(flag) for flag in REFUSED) or (tensors and not settings.get("fused"))


TAKEN, NOT_TAKEN = every()


def cases() -> Iterator[Any]:
    """`make test` runs every SGD that is fused and some of the others, in float32; `make sweep` the rest."""
    for number, (kind, settings) in enumerate(TAKEN):
        for dtype in DTYPES:
            sampled = dtype is DTYPES[0] and (number % 5 == 0 or (kind is SGD and "fused" in settings))
            name = "-".join(map(name_of, (kind, settings, dtype)))
            yield pytest.param(kind, settings, dtype, id=name, marks=() if sampled else pytest.mark.sweep)


@pytest.mark.parametrize(("kind", "settings", "dtype"), list(cases()))
def test_entry(kind: type[torch.optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype) -> None:
    assert_as_eager(kind, settings, dtype)


def test_learning_rate_as_a_tensor_rounds_where_torch_rounds() -> None:
    settings = {"lr": torch.tensor(0.01), "weight_decay": 0.1, "foreach": False}
    assert_as_eager(AdamW, settings, torch.float64)
    assert_as_eager(Adam, settings, torch.float32)


def test_fused_sgd_in_bfloat16() -> None:
    assert_as_eager(SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True}, torch.bfloat16)


@pytest.mark.parametrize("flag", REFUSED)
def test_what_is_not_taken_is_refused_in_one_line(flag: str) -> None:
    cases = [(kind, settings) for kind, settings in NOT_TAKEN if settings.get(flag)]
    assert cases or flag == "differentiable", "the database has entries for it"
    for kind, settings in cases or [(SGD, {"differentiable": True})]:
        model = Shapes(torch.float32)
        with pytest.raises(roamc.CaptureError, match=rf"^{kind.__name__}\({flag}=True\) is not supported; .*$"):
            roamc.train_step(model, loss, kind(model.parameters(), **settings))


def test_tensors_as_betas_are_refused_in_one_line() -> None:
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = AdamW([torch.zeros(1, requires_grad=True)], betas=betas, foreach=False)
    with pytest.raises(roamc.CaptureError, match=r"^AdamW with betas that are tensors is not supported; give numbers$"):
        roamc.train_step(nn.Linear(1, 1), loss, optimizer)


@pytest.mark.parametrize("kind", SUPPORTED, ids=name_of)
def test_fused_with_a_parameter_that_has_gaps_is_refused_in_one_line(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.randn(3, 4)[:, ::2])
    step = roamc.train_step(model, lambda m, x: (m.wide * x).sum(), kind(model.parameters(), fused=True))
    with pytest.raises(roamc.CaptureError, match=r"^wide has gaps in memory .*; leave fused=True out, "):
        step(torch.ones(2))
