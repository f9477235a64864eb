"""What a plan for another device than the model's takes beside its graph: ``--device cuda`` and ``device="cuda"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from roamc.cost import GENERIC, load_profile
from roamc.errors import OptionError
from roamc.graph import TrainGraph
from roamc.options import Options
from roamc.planning.search import options_of


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
