"""LoRA adapters of peft for ``--lora r=16,targets=q_proj,v_proj``: they alone are trained, base weights are frozen."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from roamc.errors import OptionError, nearest

_FIELDS = {"r": "r", "targets": "target_modules", "alpha": "lora_alpha", "dropout": "lora_dropout"}
"""Each word of ``--lora``, and its field in peft's ``LoraConfig``."""

EXAMPLE = "r=16,targets=q_proj,v_proj,alpha=32,dropout=0.05"


def added(model: nn.Module, text: str) -> nn.Module:
    """Return ``model`` with adapters as peft makes them, on torch's default device; the model itself is changed.

    Args:
        model: a model of transformers.
        text: as :data:`EXAMPLE`. Without targets peft takes those that it has for this type of model.

    Raises:
        OptionError: ``text`` is not of that form, peft is missing, or it refuses the adapters.
    """
    fields = _read(text)
    try:
        import peft
    except ImportError:
        raise OptionError("--lora needs peft: pip install peft") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft and transformers to each other
            wrapped: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**fields))
    except (ValueError, TypeError) as error:
        raise OptionError(f"--lora {text} is refused by peft: {str(error).splitlines()[0]}") from error
    return wrapped


def _read(text: str) -> Mapping[str, Any]:
    """The fields of ``LoraConfig``; a part without ``=`` is one more target."""
    words: dict[str, list[str]] = {}
    for part in text.split(","):
        word, equals, value = part.partition("=")
        if not equals and "targets" in words and list(words)[-1] == "targets" and word.strip():
            words["targets"].append(word.strip())
            continue
        if not equals or word.strip() not in _FIELDS or not value.strip():
            raise OptionError(f"--lora takes {EXAMPLE}, not {part.strip()!r}{nearest(word, _FIELDS)}")
        words[word.strip()] = [value.strip()]
    targets = words.pop("targets", None)
    numbers = {_FIELDS[word]: _number(word, value) for word, (value,) in words.items()}
    if targets is None:
        return numbers
    return {**numbers, "target_modules": targets[0] if targets == ["all-linear"] else targets}


def _number(word: str, text: str) -> int | float:
    try:
        value = float(text) if word == "dropout" else int(text)
    except ValueError:
        value = -1
    if value < 0 or (word != "dropout" and not value) or (word == "dropout" and value >= 1):
        wanted = "a number from 0 up to but not 1" if word == "dropout" else "a whole number from 1"
        raise OptionError(f"--lora: {word} must be {wanted}, not {text!r}")
    return value
