"""From the text of a kernel to a function that launches it. Triton is imported here alone, and only if it is needed."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import torch

from roamc.operators.gpu.kernel import KernelText

MISSING = "Triton is not installed, so groups of operators run one by one on the GPU: pip install 'roamc[gpu]'"


def jit_function(text: KernelText) -> Any:
    """Return the kernel as a function of ``triton.jit``; not yet compiled.

    Raises:
        ImportError: Triton is not installed.
    """
    import triton

    file = f"<{text.function}>"
    # Triton reads the source of a function from its file; this is how Python keeps text without one.
    linecache.cache[file] = (len(text.source), None, text.source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"triton": triton, "tl": triton.language}
    exec(compile(text.source, file, "exec"), names)
    return names[text.function]


def launcher(text: KernelText) -> Callable[..., None] | None:
    """Return a function that takes the operands and ``out``, and launches the kernel on the stream of the caller.

    ``out`` is a tensor, or a tuple of them for several results; None without results.

    None, and a warning, if Triton is not installed.
    """
    try:
        function = jit_function(text)
    except ImportError:
        warnings.warn(MISSING, RuntimeWarning, stacklevel=2)
        return None

    def launch(*args: torch.Tensor | float, out: Any) -> None:
        outs = (out,) if isinstance(out, torch.Tensor) else out or ()
        first = next(value for value in (*outs, *args) if isinstance(value, torch.Tensor))
        # No contraction: an operator has the same bits wherever it stands.
        with torch.cuda.device_of(first):
            function[(text.programs,)](*args, *outs, **text.constants, num_warps=text.warps, enable_fp_fusion=False)

    return launch
