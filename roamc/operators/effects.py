"""How roamc calls operators that do something beside giving results: checks that raise, prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_effect(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Call ``operator`` and return a tuple as torch's ``with_effects`` does: a token, None here, then each result."""
    results = operator(*args, **kwargs)
    return (None, *results) if isinstance(results, tuple) else (None, results)
