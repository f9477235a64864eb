"""The options of every way in: one frozen dataclass, checked once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from roamc.budget import Budget, parse_budget, total_bytes
from roamc.errors import OptionError, nearest
from roamc.gpus import Gpu, gpu_of
from roamc.solvers.layout import EFFORT
from roamc.solvers.order import ALGORITHMS
from roamc.units import Bytes, format_bytes

IDLE = ("keep", "free")

ORDERS = ("best", *ALGORITHMS)

NUMERICS = ("exact", "fast")

SHARD = ("off", "whole", "sequence")

ASYNC_TP = ("auto", "on", "off")

ARGUMENTS = ("clip_grad_norm", "loss_fn", "optimizer")
"""Arguments of roamc's functions that stand beside the options: a misspelt one arrives as an option."""

LARGEST_ALIGNMENT: Bytes = 2 << 20
"""A huge page: no kernel asks for more."""


@dataclass(frozen=True)
class Options:
    """What a user may set; the same names in ``options={...}``, keyword arguments and the command line.

    Attributes:
        memory_budget: most bytes that the step may allocate, such as "6GiB"; "80%" of what eager needs; "min" for the
            lowest peak; "light" for the lowest peak without recomputing matrix products, convolutions, attention and
            other heavy operators; "+1%" for the lowest peak of plans that add at most that share of the step's
            predicted time; "+0%" for a plan that recomputes only where that costs no time; "device" for the device's
            free memory; "total:40GB" for a size that parameters, optimizer state, inputs and, on a GPU, a margin share
            with the step. If no plan fits, it is refused before anything runs. None is "+1%"; for a step of which
            eager holds less than 8 MiB, and where sequence parallelism gathers again in backward, it is "+0%".
        gpu: the GPU to plan for, such as "h100", "a100-40" or "rtx4090", or its capacity such as "40GB": the plan says
            whether it fits. Its capacity is a budget on the total; beside a ``memory_budget`` in bytes, the tighter of
            both counts. Its profile predicts times, without ``profile``. None for the device at hand.
        alignment: bytes, a power of two; every tensor of the arena starts at a multiple, at least of its element size.
            0 uses the device's own; a smaller one may change the last bits of MKL's matrix products.
        layout_nodes: node limit of the layout's tree search; 0 skips it.
        order: name of an ordering algorithm, or "best" to try all and keep the best.
        disable: names of passes to skip, such as ("reorder",).
        idle_arena: "keep" the arena's memory between steps, shared by all roamc programs, or "free" it after each step.
            That lowers memory while other code runs, such as the optimizer, and costs time at every step.
        strict: raise instead of warning and falling back.
        max_plans: number of input shapes of one train step or module that keep a plan at the same time.
        codecs: names of lossy codecs that a plan may use, such as "tempo" or ("tempo", "compact"); a codec's settings
            stand in a dict, {"compact": {"rank": 1/4}}, or behind its name, "compact:rank=0.25". Without names every
            value is exact.
        tune: autotune the launch shapes of kernels when a program is first built on a GPU, for some seconds, once per
            machine. Does not change any value.
        numerics: "exact": every value has the bits of torch's own operators. "fast" allows different last bits:
            float32 matrix products by oneDNN on a CPU where it is faster; other summation orders on a GPU, where
            dropouts also keep other elements than eager, with the same probability.
        shard: for tensor-parallel models. "off": each rank plans alone and no collective is recomputed. "whole": the
            ranks plan together, so that collectives may be recomputed under a budget. "sequence": also sequence
            parallelism: norms, dropouts, residuals and other per-token operators run on a part of the tokens of each
            rank. Sums over the ranks are then computed in another order, so last bits may differ.
        async_tp: with ``numerics="fast"``, overlap matrix products with the all-gather of their rows or the
            reduce-scatter of their result: "auto" on GPUs of groups with symmetric memory, "on" everywhere (without
            such memory one runs after the other), "off" nowhere.
        plan: files of saved plans, one or several: a graph that a plan was made for takes its decisions in the place of
            a search. They are checked as those of a search are, and a plan is refused where it does not do what it
            says, or does not keep ``memory_budget``. Of several plans of a graph, the first that keeps it is taken.
            Other graphs are planned anew, with a warning; ``strict`` raises. None plans every graph.
        cache: keep plans that took a second or more to make in the folder "plans" of the user's cache folder, and take
            them from there in later runs with the same graph, options, machine, profile, versions and threads. What is
            taken is checked as a ``plan`` of a file is. False neither reads nor writes plans there. Those for the
            budget "device" are never kept.
        profile: device profile for time predictions: a file written by ``roamc calibrate``, or the name of a shipped
            one. None uses the profile measured on this machine, else the shipped one for the device.
    """

    memory_budget: Budget | None = None
    alignment: int = 0
    layout_nodes: int = EFFORT.node_limit
    order: str = "best"
    disable: tuple[str, ...] = ()
    idle_arena: str = "keep"
    strict: bool = False
    max_plans: int = 8
    codecs: tuple[str, ...] = ()
    tune: bool = True
    numerics: str = "exact"
    shard: str = "off"
    async_tp: str = "auto"
    profile: str | None = None
    gpu: str | None = None
    plan: tuple[str, ...] = ()
    cache: bool = True

    @property
    def keeps_arena(self) -> bool:
        """Whether idle arenas keep their memory."""
        return self.idle_arena == "keep"

    @property
    def limit_bytes(self) -> Bytes | None:
        """The budget, if it is in bytes; None if there is none, or it is still a share or a name such as "min"."""
        return self.memory_budget if isinstance(self.memory_budget, int) else None

    @property
    def room(self) -> Gpu | None:
        """What is to hold the whole process: the GPU or a budget on the total, the tighter of both; None if neither."""
        gpu, total = None if self.gpu is None else gpu_of(self.gpu), total_bytes(self.memory_budget)
        if gpu is not None and not 0 < total < gpu.capacity:
            return gpu
        return Gpu("", format_bytes(total), total) if total else None

    def key(self) -> tuple[object, ...]:
        """Return the values of all options as a hashable key, equal for equal options."""
        return dataclasses.astuple(self)


def parse_options(settings: Mapping[str, Any] | None) -> Options:
    """Check names, types and ranges of user options and return them; None gives the defaults.

    Raises:
        OptionError: names the nearest valid option, or the range that was left.
        ProfileError: there is no such profile, or the file is none.
    """
    if settings is not None and not isinstance(settings, Mapping):
        raise OptionError(f"options must be a dict such as {{'memory_budget': 'min'}}, not {settings!r}")
    settings = dict(settings or {})
    names = [field.name for field in dataclasses.fields(Options)]
    for name in settings:
        if name not in names:
            raise OptionError(_unknown(name, names))
    if settings.get("gpu") is not None:
        _set_for_gpu(settings)
    if "memory_budget" in settings:
        settings["memory_budget"] = parse_budget(settings["memory_budget"])
    if isinstance(settings.get("codecs"), Mapping):
        settings["codecs"] = _with_settings(settings["codecs"])
    for name, kind in (("disable", "pass"), ("codecs", "codec")):
        if name in settings:
            settings[name] = _names(name, kind, settings[name])
    settings["plan"] = _files(settings.get("plan"))
    options = Options(**settings)
    _check_ranges(options)
    return options


def _set_for_gpu(settings: dict[str, Any]) -> None:
    """Fill in what a GPU sets: the budget, unless there is one, and the profile."""
    gpu = gpu_of(settings["gpu"])
    settings["gpu"] = str(settings["gpu"])
    if settings.get("memory_budget") is None:
        settings["memory_budget"] = f"total:{gpu.capacity}"
    if settings.get("profile") is None:
        from roamc.cost import GENERIC

        settings["profile"] = gpu.profile or GENERIC["cuda"]


def _unknown(name: str, names: list[str]) -> str:
    if name == "options":  # as torch.compile takes them
        return "options are keyword arguments here: memory_budget='min' in place of options={'memory_budget': 'min'}"
    if name in ("mesh", "tp_plan", "stage"):
        return f"{name} is for roamc.plan, whose ranks need not be there; what runs has the mesh of its model and ranks"
    if name == "device":
        return (
            "device is no option: what runs is planned for the device of its tensors; roamc plan --device cuda plans "
            "for a GPU that is not there"
        )
    return f"unknown option {name!r}{nearest(name, (*names, *ARGUMENTS))} Valid options: {', '.join(names)}"


def _files(value: object) -> tuple[str, ...]:
    """Return the absolute paths of one file, several with commas between them, or a list of files; () for None."""
    paths = [value] if isinstance(value, os.PathLike) else value
    if isinstance(paths, list | tuple):
        paths = [os.fspath(path) if isinstance(path, os.PathLike) else path for path in paths]
    return tuple(map(os.path.abspath, _names("plan", "file", paths)))


def _names(option: str, kind: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple | Set) and all(isinstance(part, str) for part in value):
        return tuple(sorted(value) if isinstance(value, Set) else value)
    also = ", such as 'tempo', or with settings {'tempo': {}, 'compact': {'rank': 0.25}}" if option == "codecs" else ""
    raise OptionError(f"{option} takes {kind} names{also}, not {value!r}")


def _with_settings(codecs: Mapping[Any, Any]) -> tuple[str, ...]:
    """The names of codecs, each with its settings behind it: {"name": {"a": 1, "b": 2}} is ("name:a=1:b=2",)."""
    texts = []
    for name, settings in codecs.items():
        if not isinstance(settings, Mapping | None):
            raise OptionError(f"codecs: the settings of {name!r} are a dict such as {{'rank': 0.25}}, not {settings!r}")
        texts.append(":".join((str(name), *(f"{key}={value}" for key, value in (settings or {}).items()))))
    return tuple(texts)


def _check_ranges(options: Options) -> None:
    if not _is_int(options.alignment) or options.alignment < 0 or options.alignment & (options.alignment - 1):
        raise OptionError(f"alignment must be 0 or a power of two, not {options.alignment!r}")
    if options.alignment > LARGEST_ALIGNMENT:
        raise OptionError(f"alignment must be at most {LARGEST_ALIGNMENT} bytes, not {options.alignment}")
    if not _is_int(options.layout_nodes) or options.layout_nodes < 0:
        raise OptionError(f"layout_nodes must be a whole number from 0, not {options.layout_nodes!r}")
    if not _is_int(options.max_plans) or options.max_plans < 1:
        raise OptionError(f"max_plans must be a whole number from 1, not {options.max_plans!r}")
    names = (("idle_arena", IDLE), ("numerics", NUMERICS), ("shard", SHARD), ("async_tp", ASYNC_TP))
    for name, kinds in names:
        value = getattr(options, name)
        if value not in kinds:
            raise OptionError(f"{name} must be one of {', '.join(kinds)}, not {value!r}{nearest(str(value), kinds, 0)}")
    for name, value in (("strict", options.strict), ("tune", options.tune)):
        if not isinstance(value, bool):
            raise OptionError(f"{name} must be True or False, not {value!r}")
    if options.order not in ORDERS:
        raise OptionError(
            f"unknown order {options.order!r}{nearest(str(options.order), ORDERS)} Valid: {', '.join(ORDERS)}"
        )
    if options.profile is not None and not (isinstance(options.profile, str) and options.profile):
        raise OptionError(f"profile must be a file or the name of a shipped profile, not {options.profile!r}")
    if options.profile is not None:
        from roamc.cost import load_profile  # needs torch, without which other options are checked

        load_profile(profile=options.profile)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
