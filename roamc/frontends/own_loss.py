"""The loss that the output of a model has itself, as those of transformers have where the batch has labels.

Whether it has one is seen in the first run of forward under fake tensors, of those that a capture makes anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roamc.capture import joint
from roamc.errors import CaptureError, with_article
from roamc.graph import TrainGraph
from roamc.planning.planned import loss_advice


class _HasLossError(Exception):
    """Ends a capture of forward and backward: the output has a loss."""


def returned_loss(model: nn.Module, *batch: Any, **named: Any) -> torch.Tensor:
    """Return the loss that the output of ``model(*batch, **named)`` has; a loss function as ``train_step`` takes it.

    Raises:
        CaptureError: the output has none that a step can be made of; says what to do.
    """
    output = model(*batch, **named)
    loss = _loss_of(output)
    if loss is None:
        raise CaptureError(
            f"the output of {type(model).__name__}, {with_article(type(output).__name__)}, has no loss that is a "
            "scalar and requires a gradient: give the model labels, or a loss function"
        )
    return loss


def capture_without(model: nn.Module, batch: Sequence[Any], named: Mapping[str, Any], name: str) -> TrainGraph | None:
    """Capture forward and backward as :func:`roamc.capture.joint.capture`; None where the output has a loss itself."""
    try:
        return joint.capture(model, batch, named, name, look=_end_at_loss)
    except _HasLossError:
        return None


def note(optimizer: str = "") -> str:
    """Return the note of a plan whose loss is the output's.

    Args:
        optimizer: the one that is planned although nobody named it; empty if there is none.
    """
    default = f", and {optimizer} the optimizer by default" if optimizer else ""
    return f"the loss is that of the model's output{default}"


def check_no_update(graph: TrainGraph, asked: str) -> None:
    """Refuse an update of parameters where there is no loss.

    Args:
        graph: what :func:`capture_without` has returned.
        asked: what asks for an update, such as "clip_grad_norm"; empty if nothing does.

    Raises:
        CaptureError: names what was asked for, and says how to give a loss.
    """
    if asked:
        raise CaptureError(
            f"{asked} has nothing to do: {graph.name} has no loss_fn, and its output no .loss; {loss_advice(graph)}"
        )


def _end_at_loss(output: object) -> None:
    if _loss_of(output) is not None:
        raise _HasLossError


def _loss_of(output: Any) -> torch.Tensor | None:
    """The loss of an output, a mapping or an object with attributes; None where it is not one to train with."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    scalar = isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point() and loss.requires_grad
    return loss if scalar else None
