"""What a plan for another device than the model's takes beside its graph: ``--device cuda`` and ``device="cuda"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from roamc.capture.moved import device_of
from roamc.cost import GENERIC, load_profile
from roamc.errors import OptionError
from roamc.graph import TrainGraph
from roamc.options import Options
from roamc.planning.search import options_of


def asked_for(device: str | None, gpu: object, model: nn.Module | None = None) -> torch.device:
    """Return the device to plan for, as :func:`options_for` takes it.

    Args:
        device: "cpu" or "cuda", as the user sets it; None for cuda with ``gpu``, else the device of the model.
        gpu: the option of that name: a GPU to plan for; None for none.
        model: what is planned; one that lies on a GPU is planned where it lies.

    Raises:
        OptionError: ``device`` is neither, or a CPU and ``gpu`` is there.
    """
    if gpu is not None and device == "cpu":
        raise OptionError(f"gpu={gpu!r} plans for a GPU, and device='cpu' for a CPU: leave one of them out")
    there = model is not None and any(parameter.device.type == "cuda" for parameter in model.parameters())
    return device_of(device or ("cuda" if gpu is not None and not there else "cpu"), "device")


def options_for(settings: Mapping[str, Any], device: torch.device) -> Options:
    """Return options to plan for ``device`` with.

    Args:
        settings: options as the user set them. For a GPU, the profile is by default that of the option ``gpu``, and
            without one :data:`roamc.cost.GENERIC`'s, so that every machine makes the same plan.
        device: a CPU, for the device that the model lies on, or a GPU that need not be there.

    Raises:
        OptionError: an option is unknown or out of range, or the profile is not one of a GPU.
        ProfileError: there is no such profile.
    """
    if device.type != "cuda":
        return options_of(settings)
    named = settings.get("gpu") is not None
    options = options_of(settings if named else {"profile": GENERIC["cuda"], **settings})
    if (kind := load_profile(profile=options.profile).device) != "cuda":
        raise OptionError(f"profile {options.profile!r} describes a {kind}; give a GPU's, such as {GENERIC['cuda']}")
    return options


def noted(graph: TrainGraph, options: Options, device: torch.device) -> TrainGraph:
    """Return ``graph`` with a note on the profile that its times are of, if it is planned for a GPU."""
    if device.type != "cuda":
        return graph
    return graph.replace(notes=(*graph.notes, f"times are those of the device profile {options.profile}"))
