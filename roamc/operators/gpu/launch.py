"""From the text of a kernel to a function that launches it. Triton is imported here alone, and only if it is needed."""

from __future__ import annotations

import functools
import hashlib
import linecache
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roamc.errors import users_level
from roamc.operators.gpu.kernel import KernelText
from roamc.operators.gpu.kernel_keys import nameless
from roamc.operators.gpu.partial_sums import WARPS

MISSING = "Triton is not installed, so groups of operators run one by one on the GPU: pip install 'roamc[gpu]'"

OLDEST = (3, 6)
"""Divisions and roots of earlier versions of Triton take numbers below 2**-126 for zero, as ATen does not."""

OLD = "Triton {} is too old, so groups of operators run one by one on the GPU: pip install 'roamc[gpu]'"


def triton_version() -> str | None:
    """Return the version of Triton; None if it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def jit_function(text: KernelText, name: str = "") -> Any:
    """Return the kernel as a function of ``triton.jit``; not yet compiled.

    Kernels that differ in names alone, such as those of a model's layers, are one function: it is compiled once.

    Args:
        text: the kernel.
        name: of its second function, which ends sums over rows; "" for the kernel itself.

    Raises:
        ImportError: Triton is not installed.
    """
    kernel, end = _jitted(_Alike(nameless(text.source), text))
    return end if name else kernel


@dataclass(frozen=True)
class _Alike:
    """A kernel, equal to those that differ in names alone.

    Attributes:
        nameless: its source without names.
        text: the kernel.
    """

    nameless: str
    text: KernelText = field(compare=False)


@functools.lru_cache(maxsize=1 << 12)
def _jitted(alike: _Alike) -> tuple[Any, Any]:
    """Return a kernel, and the one that ends its sums over rows or None, as functions of ``triton.jit``."""
    import triton

    text = alike.text
    file = f"<{text.function} {hashlib.sha256(text.source.encode()).hexdigest()[:12]}>"
    # Triton reads the source of a function from its file; this is how Python keeps text without one.
    linecache.cache[file] = (len(text.source), None, text.source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"triton": triton, "tl": triton.language}
    exec(compile(text.source, file, "exec", dont_inherit=True), names)  # annotations are values, not texts
    return names[text.function], None if text.partials is None else names[text.partials.function]


def jit_functions(text: KernelText) -> Callable[..., None]:
    """Return a function that launches a kernel, and behind it the one that ends its sums over rows.

    The function takes a sequence of operands, a sequence of results, and by keyword options of Triton's launches. Both
    kernels run on the caller's device and stream.

    Raises:
        ImportError: Triton is not installed.
    """
    function, ends = jit_function(text), text.partials
    second = jit_function(text, ends.function) if ends is not None else None

    def run(args: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], **options: Any) -> None:
        tables = [table.on(outs[0].device) for table in text.tables]
        if ends is None:
            function[(text.programs,)](*args, *outs, *tables, **text.constants, num_warps=text.warps, **options)
            return
        partials = torch.empty(ends.numel, dtype=torch.float32, device=outs[0].device)
        others = [out for at, out in enumerate(outs) if at not in ends.results]
        sums = [outs[at] for at in ends.results]
        pointers = *args, *others, partials, *tables
        function[(text.programs,)](*pointers, **text.constants, num_warps=text.warps, **options)
        second[(ends.programs,)](partials, *sums, **ends.constants, num_warps=WARPS, **options)  # type: ignore[index]

    return run


def launcher(text: KernelText) -> Callable[..., None] | None:
    """Return a function that takes the operands and ``out``, and launches the kernel on the stream of the caller.

    The keyword ``out`` of that function is a tensor, or a tuple of them for several results; None without results. If
    Triton is not installed or older than :data:`OLDEST`, :func:`launcher` warns and returns None.
    """
    version = triton_version()
    if version is not None and tuple(map(int, version.split(".")[:2])) < OLDEST:
        warnings.warn(OLD.format(version), RuntimeWarning, stacklevel=users_level())
        return None
    try:
        run = jit_functions(text)
    except ImportError:
        warnings.warn(MISSING, RuntimeWarning, stacklevel=users_level())
        return None

    def launch(*args: torch.Tensor | float, out: Any) -> None:
        outs = (out,) if isinstance(out, torch.Tensor) else out or ()
        first = next(value for value in (*outs, *args) if isinstance(value, torch.Tensor))
        # No contraction: an operator has the same bits wherever it stands.
        with torch.cuda.device_of(first):
            run(args, outs, enable_fp_fusion=False)

    return launch
