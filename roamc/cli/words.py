"""What the words of a command line say before anything is built: settings, options, and what is wrong with their names.

No torch in here: an error of usage is answered at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from re import fullmatch
from typing import Any

from roamc.budget import parse_budget
from roamc.cli.asked import Asked, Request
from roamc.cli.models import AUTOCAST_NAMES, MODELS, check_task, checked, is_function, is_path
from roamc.errors import OptionError, nearest
from roamc.gpus import gpu_of
from roamc.options import parse_options
from roamc.report.tables import BY
from roamc.settings import OPTIMIZERS, Setting, check_device, parse_setting

NO_OPTIMIZER = "none"
"""What ``--optimizer`` takes for forward and backward of the loss without an update."""

PLAIN = (*(name for name in OPTIMIZERS if name != "compact"), NO_OPTIMIZER)
"""Optimizers whose states depend on a parameter's shape alone, and none: those of a graph without its model."""

FRACTION = r"[0-9]+/[1-9][0-9]*"

COMPACT: Mapping[str, Callable[[Any], Any]] = {
    "rank": lambda value: float(Fraction(value)) if isinstance(value, str) and fullmatch(FRACTION, value) else value,
    "dense": lambda value: tuple(part.strip() for part in str(value).split(",") if part.strip()),
    **dict.fromkeys(("every", "scale", "basis", "seed", "dense_lr"), lambda value: value),
}
"""Settings of the optimizer that ``--set`` gives beside those of the model, with ``--optimizer compact``, by name, and
how each is read."""

NEED_TORCH = ("profile", "gpu")
"""Options of which torch is needed to say whether they are right."""


WITHOUT_MODEL = frozenset(
    {"target", "sets", "piece", "memory_budget", "option", "device", "gpu", "profile", "as_json", "debug", "save"}
    | {"optimizer", "top", "by", "source", "kernels", "graph", "graphml", "html", "curve"}
)
"""Parameters of the commands that do not need the model of a graph."""


OF_LAYERS = frozenset({"autocast", "gradient_checkpointing", "meta", "tp_plan", "lora", "task", "dtype"})
"""Parameters of the commands that change a model, which an archive of torch.export does not have."""


def check_words(asked: Asked) -> None:
    """Refuse names of models, settings, optimizers, devices and options that there are not, and wrong budgets.

    What takes torch to know, such as names of passes, and files are checked later.

    Raises:
        OptionError: names the nearest; or the target is a file with graphs, and an option needs their model.
    """
    request = asked.request
    for budget in asked.budgets:
        parse_budget(budget)
    check_device(request.device, "--device")
    if request.gpu is not None:
        gpu_of(request.gpu)
        if request.device == "cpu":
            raise OptionError(f"--gpu {request.gpu} plans for a GPU, and --device cpu for a CPU: leave one of them out")
    if request.is_dump and request.optimizer == "compact":
        raise OptionError(f"--optimizer compact needs the model's layers: {request.target} takes {', '.join(PLAIN)}")
    check_optimizer(request.optimizer, PLAIN if request.is_dump else (*OPTIMIZERS, NO_OPTIMIZER))
    _check_autocast(request)
    parse_options({name: value for name, value in options_in(request).items() if name not in NEED_TORCH})
    if request.is_dump:
        needing = next((option for name, option in asked.given.items() if name not in WITHOUT_MODEL), None)
        if needing is not None:
            raise OptionError(f"{request.target} has the graph of a step without its model, which {needing} needs")
        return
    if request.is_archive:
        needing = next((option for name, option in asked.given.items() if name in OF_LAYERS), None)
        if needing is not None:
            raise OptionError(f"{request.target} has operators without layers, which {needing} needs: give the model")
        return
    if request.target.endswith(".pt2"):
        raise OptionError(f"{request.target}: no such file")
    if request.piece is not None:
        raise OptionError(f"--piece names a graph of a log or printed text, and {request.target} is none")
    if request.target in MODELS or not (is_function(request.target) or is_path(request.target)):
        checked(request.target, settings_in(request))
    elif not is_function(request.target):
        check_task(settings_in(request).get("task"))
        if not Path(request.target).exists():
            raise OptionError(
                f"{request.target}: no such file or folder; roamc downloads nothing, so give the folder of a model, "
                "with its config.json"
            )


def _check_autocast(request: Request) -> None:
    """Refuse a dtype that no autocast has, and what a function of a file has to do itself."""
    name = request.autocast
    if name is not None and name not in AUTOCAST_NAMES:
        raise OptionError(f"--autocast takes {' or '.join(AUTOCAST_NAMES)}, not {name!r}")
    if is_function(request.target) and name is not None:
        raise OptionError(
            f"{request.target} runs its own model: call it under torch.autocast({request.device!r}, "
            f"torch.{AUTOCAST_NAMES[name]}) in loss_fn or forward, and leave --autocast out"
        )
    if is_function(request.target) and request.gradient_checkpointing:
        raise OptionError(
            f"{request.target} makes its own model: call model.gradient_checkpointing_enable() or "
            "torch.utils.checkpoint in it, and leave --gradient-checkpointing out"
        )


def check_report(*, source: bool, graph: bool, kernels: bool, by: str | None) -> None:
    """Refuse options of ``roamc explain`` that exclude one another, and a word for ``--by`` that there is not.

    Raises:
        OptionError: says which.
    """
    if source and graph:
        raise OptionError("--source and --graph print one text each: give one of them")
    if kernels and (source or graph):
        raise OptionError("--kernels adds to the report, which --source and --graph leave out")
    if by is not None and by not in BY:
        raise OptionError(f"--by {by}{nearest(by, BY)} Choices: {', '.join(BY)}")


def check_kernels(device: str) -> None:
    """Refuse ``--kernels`` where there are none, or nothing compiles them.

    Raises:
        OptionError: says which.
    """
    if not device.startswith("cuda"):
        raise OptionError("--kernels needs --device cuda")
    if importlib.util.find_spec("triton") is None:
        raise OptionError("--kernels needs Triton: pip install triton")


def check_optimizer(name: str | None, choices: Sequence[str] = (*OPTIMIZERS, NO_OPTIMIZER)) -> None:
    """Refuse a name that is none of ``choices``; None is the default's.

    Raises:
        OptionError: names the nearest.
    """
    if name is not None and name not in choices:
        alike = nearest(name, [choice for choice in choices if choice != NO_OPTIMIZER])
        hint = f"{alike} Optimizers: {', '.join(choices)}"
        raise OptionError(f"unknown optimizer {name!r}{hint}")


def options_in(request: Request) -> dict[str, Any]:
    """Return roamc's options in ``request``, as they stand there, its memory budget and device profile among them.

    Raises:
        OptionError: one is given twice, or is no ``key=value``; or it is ``plan``.
    """
    pairs = [parse_setting(text) for text in request.options]
    options: dict[str, Any] = dict(pairs)
    if len(options) < len(pairs):
        twice = next(name for name, _ in pairs if [other for other, _ in pairs].count(name) > 1)
        raise OptionError(f"--option {twice} is given twice; codecs and disable take several names: {twice}=a,b")
    if "plan" in options:
        raise OptionError(
            "--option plan applies a saved plan to what runs, and the command line plans anew: leave it out; roamc "
            f"plan {options['plan']} tells a saved plan"
        )
    own = {"memory_budget": request.memory_budget, "profile": request.profile, "gpu": request.gpu}
    return options | {name: value for name, value in own.items() if value is not None}


def settings_in(request: Request) -> dict[str, Setting]:
    """Return the settings of the whole model in ``request``."""
    settings: dict[str, Setting] = {key: value for key, value in request.sizes.items() if value is not None}
    settings.update(parse_setting(text) for text in request.sets)
    return {key: value for key, value in settings.items() if key not in settings_of_optimizer(request)}


def settings_of_optimizer(request: Request) -> dict[str, Any]:
    """Return those of ``request.sets`` that are the optimizer's."""
    sets = dict(parse_setting(text) for text in request.sets) if request.optimizer == "compact" else {}
    return {key: COMPACT[key](value) for key, value in sets.items() if key in COMPACT}
