"""Settings as the command line takes them, and names that it and Python know alike. No torch in here."""

from __future__ import annotations

from roamc.errors import OptionError

Setting = int | float | str | bool

OPTIMIZERS = ("sgd", "adam", "adamw", "compact")
"""Names of optimizers; :data:`roamc.frontends.workload.OPTIMIZERS` makes them."""

EMBEDDING, HEAD = "embedding", "head"
"""Settings of a built-in model by which a stage of a pipeline leaves out an end of it."""

DEVICES = ("cpu", "cuda")
"""Types of the devices that a step can be planned for."""


def parse_setting(text: str) -> tuple[str, Setting]:
    """Read ``key=value`` as a key, with ``_`` for ``-``, and a value: int, float, bool (``true``, ``false``) or text.

    Raises:
        OptionError: there is no ``=``, or no key.
    """
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise OptionError(f"{text!r} is not a setting; write key=value")
    return key.strip().replace("-", "_"), _value(value.strip())


def _value(text: str) -> Setting:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_device(text: str, name: str) -> str:
    """Return the type of device ``text``, one of :data:`DEVICES`; ``name`` is that of the argument.

    Raises:
        OptionError: it is none.
    """
    if text not in DEVICES:
        raise OptionError(f"{name} must be one of {', '.join(DEVICES)}, not {text!r}")
    return text
