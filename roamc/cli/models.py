"""The built-in models by name, with their settings; :mod:`roamc.cli.zoo` builds them. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roamc.errors import OptionError, nearest
from roamc.settings import EMBEDDING, HEAD, Setting

Settings = Mapping[str, Setting]

DTYPE_NAMES = ("float32", "bfloat16", "float16", "float64")

AUTOCAST_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
"""What ``--autocast`` takes, and the dtype that it means."""

TASK_NAMES = (
    "seq2seq-lm", "masked-lm", "causal-lm", "image-classification", "sequence-classification", "token-classification",
    "question-answering",
)  # fmt: skip
"""The tasks of configurations. Of those that one has a class for, the first is the default if it names none."""


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        about: one line for the list of models.
        settings: every setting that a user may change, with its default.
    """

    about: str
    settings: Settings


def settings_of(name: str) -> Settings:
    """Return the settings of a model of :data:`MODELS` with their defaults; none for other names."""
    return MODELS[name].settings if name in MODELS else {}


def is_function(target: str) -> bool:
    """Whether a target of the command line names a function of a Python file."""
    return ":" in target or target.endswith(".py")


def is_path(target: str) -> bool:
    """Whether a target of the command line is a configuration's path: of a ``.json`` file, or of a folder."""
    return target.endswith(".json") or "/" in target or Path(target).is_dir()


def check_task(name: Setting | None) -> None:
    """Refuse a name that is not of :data:`TASK_NAMES`; None is that of the configuration.

    Raises:
        OptionError: names the nearest.
    """
    if name is not None and name not in TASK_NAMES:
        raise OptionError(f"unknown task {name!r}{nearest(str(name), TASK_NAMES)} Tasks: {', '.join(TASK_NAMES)}")


def checked(name: str, settings: Settings) -> dict[str, Any]:
    """Return all settings of a built-in model: the defaults, replaced by ``settings``.

    Raises:
        OptionError: there is no model of that name, or no such setting, or a value is out of range; names the nearest.
    """
    if name not in MODELS:
        raise OptionError(
            f"unknown model {name!r}{nearest(name, MODELS)} Models: {', '.join(MODELS)}; or FILE.py:function"
        )
    defaults = MODELS[name].settings
    chosen: dict[str, Any] = dict(defaults)
    for key, value in settings.items():
        if key not in defaults:
            raise OptionError(f"{name} has no setting {key!r}{nearest(key, defaults)} Settings: {', '.join(defaults)}")
        chosen[key] = _typed(key, value, defaults[key])
    return chosen


def _typed(key: str, value: Setting, default: Setting) -> Setting:
    """``value`` in the type of the default, if it is in range."""
    if key == "dtype" and value not in DTYPE_NAMES:
        raise OptionError(
            f"dtype must be one of {', '.join(DTYPE_NAMES)}, not {value!r}{nearest(str(value), DTYPE_NAMES)}"
        )
    if isinstance(default, float) and isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    if isinstance(default, float):
        raise OptionError(f"{key} must be a number from 0 up to but not 1, not {value!r}")
    if isinstance(default, int) and not isinstance(default, bool):
        return in_range(key, value)
    if isinstance(default, bool) and not isinstance(value, bool):
        raise OptionError(f"{key} must be true or false, not {value!r}")
    return value


def in_range(key: str, value: Setting) -> int:
    """Return the value of the setting ``key`` if it is a whole number from 1.

    Raises:
        OptionError: it is not.
    """
    if type(value) is not int or value < 1:
        raise OptionError(f"{key} must be a whole number from 1, not {value!r}")
    return value


def _sizes(**sizes: Setting) -> dict[str, Setting]:
    return {**sizes, "dtype": "float32"}


_ENDS: dict[str, Setting] = {EMBEDDING: True, HEAD: True}


def _of_korthikanti(size: str, batch: int, layers: int, width: int, heads: int) -> Model:
    """A model of Korthikanti et al., arXiv 2205.05198, table 3, with the micro-batch of one rank."""
    sizes: dict[str, Setting] = {"batch": batch, "seq": 2048, "layers": layers, "width": width, "heads": heads}
    more: dict[str, Setting] = {"vocab": 51200, "dropout": 0.1, "tied": True, "fused_attention": False, **_ENDS}
    about = f"GPT-3 of {size} parameters as in arXiv 2205.05198; for --mesh tp=8"
    return Model(about, {**sizes, **more, "dtype": "bfloat16"})


MODELS: Mapping[str, Model] = {
    "gpt": Model(
        "decoder-only transformer as in nanoGPT",
        _sizes(batch=16, seq=256, layers=6, width=384, heads=6, vocab=256, dropout=0.1, tied=True, **_ENDS),
    ),
    "gpt2": Model(
        "GPT-2, 124 M parameters",
        _sizes(batch=4, seq=1024, layers=12, width=768, heads=12, vocab=50257),
    ),
    "gpt2-xl": Model(
        "GPT-2 XL, 1.6 G parameters",
        _sizes(batch=1, seq=1024, layers=48, width=1600, heads=25, vocab=50257),
    ),
    "bert": Model(
        "BERT base, masked language model",
        _sizes(batch=8, seq=512, layers=12, width=768, heads=12, hidden=3072, vocab=30522),
    ),
    "llama": Model(
        "Llama 2, 7 G parameters",
        _sizes(batch=1, seq=2048, layers=32, width=4096, heads=32, kv_heads=32, hidden=11008, vocab=32000),
    ),
    "t5": Model(
        "T5 small, encoder and decoder",
        _sizes(batch=8, seq=512, layers=6, width=512, heads=8, head_width=64, hidden=2048, vocab=32128),
    ),
    "vit": Model(
        "ViT base, image classification",
        _sizes(batch=32, image=224, layers=12, width=768, heads=12, hidden=3072, patch=16, classes=1000),
    ),
    "resnet50": Model(
        "ResNet-50, image classification",
        _sizes(batch=32, image=224, classes=1000),
    ),
    "mobilenetv2": Model(
        "MobileNetV2, image classification",
        _sizes(batch=32, image=224, classes=1000),
    ),
    "gpt3-22b": _of_korthikanti("22 G", 4, 48, 6144, 64),
    "gpt3-175b": _of_korthikanti("175 G", 1, 96, 12288, 96),
    "gpt3-530b": _of_korthikanti("530 G", 1, 105, 20480, 128),
    "gpt3-1t": _of_korthikanti("1 T", 1, 128, 25600, 160),
}
"""Name of each built-in model, as the command line takes it, to what it is."""
