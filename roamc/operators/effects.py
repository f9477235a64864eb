"""Operators that do something beside giving results: checks that raise, prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_effect(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """``operator(*args)`` as torch's ``with_effects`` returns it: a token, which is None here, then the results."""
    results = operator(*args, **kwargs)
    return (None, *results) if isinstance(results, tuple) else (None, results)
